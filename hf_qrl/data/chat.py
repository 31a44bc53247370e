# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""Conversations to tokens through the chat template, with the positions of the model's own tokens.

One promise is kept for every turn: the tokens before it in training are exactly the tokens that the template renders
as its prompt, so a policy acts in the contexts it was trained in.
"""

import re
from dataclasses import dataclass, field
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase


Message = dict[str, Any]

ROLES = ("system", "user", "assistant", "tool", "environment")
_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")


def check_messages(messages: Any, column: str, where: str) -> list[Message]:
    """Returns the messages, or raises a `ValueError` if they are not a non-empty list of dicts with known roles."""
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise ValueError(f'{where}: `{column}` must be a list of dicts with "role" and "content", got {messages!r}.')
    if not messages:
        raise ValueError(f"{where}: `{column}` is empty. Give it at least one message, or drop the row.")
    for message in messages:
        if message.get("role") not in ROLES:
            raise ValueError(f"{where}: unknown role {message.get('role')!r} in `{column}`, known roles are {ROLES}.")
    return [{key: without_none(x) for key, x in message.items() if x is not None} for message in messages]


def model_role(role: str) -> str:
    """Chat templates know no environment; to the model it is whoever answers."""
    return "user" if role == "environment" else role


def without_none(value: Any) -> Any:
    """Drops the None entries of dicts: Arrow gives every struct of a column the keys of all of them."""
    if isinstance(value, dict):
        return {key: without_none(x) for key, x in value.items() if x is not None}
    return [without_none(x) for x in value] if isinstance(value, list) else value


def window_messages(messages: list[Message], history_window: int | None) -> list[Message]:
    """
    Selects the messages a policy reads when it acts: the leading system messages and the last turns.

    A turn is an assistant message with the messages before it that answer the previous one. The turn about to be
    played counts, so a window of 1 holds the current observation only.

    Args:
        messages (`list[dict]`):
            Conversation so far. Its last message is not the assistant's.
        history_window (`int`, *optional*):
            Number of turns to keep. All are kept if it is `None`.

    Returns:
        `list[dict]`: the messages to render with a generation prompt.

    Raises:
        ValueError: If the last message is the assistant's, or `history_window` is less than 1.

    Examples:

    ```python
    >>> messages = [
    ...     {"role": "system", "content": "Play."},
    ...     {"role": "user", "content": "a"},
    ...     {"role": "assistant", "content": "b"},
    ...     {"role": "user", "content": "c"},
    ... ]
    >>> [message["content"] for message in window_messages(messages, 1)]
    ['Play.', 'c']
    ```
    """
    if not messages or messages[-1]["role"] == "assistant":
        raise ValueError(
            "A policy acts on an observation: the messages before an assistant message must end with another role. "
            "Merge assistant messages that follow each other."
        )
    if history_window is None:
        return messages
    if history_window < 1:
        raise ValueError(f"`history_window` must be at least 1, got {history_window}.")
    num_system = 0
    while num_system < len(messages) and messages[num_system]["role"] == "system":
        num_system += 1
    turn_ends = [i + 1 for i, message in enumerate(messages) if message["role"] == "assistant"]
    starts = [num_system, *turn_ends]
    return messages[:num_system] + messages[starts[-history_window:][0] :]


def training_chat_template(tokenizer: PreTrainedTokenizerBase) -> str:
    """
    Returns the template that conversations are rendered with: the tokenizer's own if it marks the assistant's tokens
    with `{% generation %}`, else TRL's training version of it, else its own (whose prompts are then compared turn by
    turn to find the assistant's tokens).

    Generate with the same template: set it as `tokenizer.chat_template`.

    Args:
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            Tokenizer with a chat template.

    Returns:
        `str`: the Jinja template.

    Raises:
        ValueError: If the tokenizer has no chat template.
    """
    if not tokenizer.chat_template:
        raise ValueError(
            "The dataset is conversational but the tokenizer has no chat template. Set `tokenizer.chat_template`, "
            "or use string `prompt` and `completion` columns."
        )
    template = tokenizer.get_chat_template()
    if _GENERATION_TAG.search(template):
        return template
    from trl import get_training_chat_template  # slow to import, and needed here only

    try:
        return get_training_chat_template(tokenizer)
    except ValueError:  # a template that TRL has no training version of
        return template


@dataclass
class ChatRenderer:
    """
    Renders the conversations of one row.

    Args:
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            Tokenizer.
        chat_template (`str`):
            Template of [`training_chat_template`], or the user's.
        where (`str`):
            Name of the row in error messages.
        tools (`list`, *optional*):
            Tools the template describes to the model.
        template_kwargs (`dict`, *optional*):
            Further variables of the template.
        eos_token_ids (`tuple[int, ...]`, *optional*, defaults to `()`):
            Tokens that end generation.
    """

    tokenizer: PreTrainedTokenizerBase
    chat_template: str
    where: str
    tools: list | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    eos_token_ids: tuple[int, ...] = ()

    def prompt(self, messages: list[Message], **kwargs: Any) -> list[int]:
        """Returns the tokens the model reads when it is asked for the next assistant message."""
        return self._encode(messages, add_generation_prompt=True, **kwargs)["input_ids"]

    def render(
        self, messages: list[Message], turns: list[int], cut_while_speaking: bool = False
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """
        Renders a conversation; one that ends with an observation gets a generation prompt.

        Args:
            messages (`list[dict]`):
                Conversation.
            turns (`list[int]`):
                Indices of the assistant messages whose tokens are actions.
            cut_while_speaking (`bool`, *optional*, defaults to `False`):
                Whether the last message is an unfinished assistant message, which has no end-of-turn token.

        Returns:
            `tuple[list[int], list[tuple[int, int]]]`: token ids, and `[start, end)` of the own tokens of each turn.

        Raises:
            ValueError: If the prompt of a turn is not a token prefix of the conversation, or a turn has no tokens.
        """
        last = len(messages) - 1
        masked = self.tokenizer.is_fast and bool(_GENERATION_TAG.search(self.chat_template))
        encoded = self._encode(
            messages,
            add_generation_prompt=messages[last]["role"] != "assistant",
            return_assistant_tokens_mask=masked,
        )
        if cut_while_speaking:
            input_ids = self._encode(messages, continue_final_message=True)["input_ids"]
        else:
            input_ids = encoded["input_ids"]
        spans: list[tuple[int, int]] = []
        for turn in turns:
            if cut_while_speaking and turn == last:
                turn_ids = input_ids
                start, end = self._start(messages, turn, turn_ids), len(turn_ids)
            elif masked:
                turn_ids, mask = encoded["input_ids"], encoded["assistant_masks"]
                start = self._start(messages, turn, turn_ids)
                end = self._end(turn_ids, start, mask.index(0, start) if 0 in mask[start:] else len(mask))
            else:
                # The end of a turn is where the conversation that stops with it ends.
                turn_ids = encoded["input_ids"] if turn == last else self._encode(messages[: turn + 1])["input_ids"]
                start = self._start(messages, turn, turn_ids)
                end = self._end(turn_ids, start, len(turn_ids))
            self._check_prefix(turn_ids[:end], input_ids, f"message {turn} and those before it")
            if end <= start:
                raise ValueError(
                    f"{self.where}: message {turn} has no tokens of the assistant after its prompt. Give it content, "
                    "or use a chat template that renders it as such."
                )
            if spans and start < spans[-1][1]:
                raise ValueError(f"{self.where}: message {turn} overlaps the turn before it in the chat template.")
            spans.append((start, end))
        return input_ids, spans

    def _start(self, messages: list[Message], turn: int, input_ids: list[int]) -> int:
        if turn == 0:
            raise ValueError(
                f"{self.where}: the conversation starts with an assistant message, which has no context to act in. "
                "Put a system or user message before it."
            )
        prompt = self.prompt(messages[:turn])
        self._check_prefix(prompt, input_ids, f"the prompt of message {turn}")
        return len(prompt)

    def _end(self, input_ids: list[int], start: int, end: int) -> int:
        """Own tokens end with the first eos: generation stops there, what the template adds after it is context."""
        return next((p + 1 for p in range(start, end) if input_ids[p] in self.eos_token_ids), end)

    def _check_prefix(self, prefix: list[int], input_ids: list[int], name: str) -> None:
        if input_ids[: len(prefix)] != prefix:
            raise ValueError(
                f"{self.where}: the tokens of {name} are not a prefix of the rendered conversation, so training would "
                "see other contexts than generation. Use a prefix-preserving training chat template "
                "(`chat_template`), or `history_window`, which renders every turn on its own."
            )

    def _encode(self, messages: list[Message], **kwargs) -> dict[str, Any]:
        try:
            return self.tokenizer.apply_chat_template(
                [{**message, "role": model_role(message["role"])} for message in messages],
                tools=self.tools,
                chat_template=self.chat_template,
                tokenize=True,
                return_dict=True,
                **self.template_kwargs,
                **kwargs,
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise ValueError(
                f"{self.where}: the chat template cannot render the messages ({error}). Change them, or pass another "
                "`chat_template`."
            ) from error
