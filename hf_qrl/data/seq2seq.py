# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""Rows of encoder-decoder models: the encoder reads all that was said before a turn, the decoder speaks the turn."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from .chat import ChatRenderer, Message, model_role
from .rows import build_row


def conversation_text(messages: list[Message]) -> str:
    """
    Writes a conversation as plain text, one line `role: content` per message: what an encoder reads of a conversation
    if the tokenizer has no chat template.

    Args:
        messages (`list[dict]`):
            Conversation so far, each message with a `role` and a string `content`. The role `environment` is written
            as `user`.

    Returns:
        `str`: the text, to be tokenised as any other.

    Raises:
        ValueError: If the content of a message is not a string, or a message calls tools.

    Examples:

    ```python
    >>> print(conversation_text([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi!"}]))
    system: Be brief.
    user: Hi!
    ```
    """
    return "\n".join(f"{model_role(message['role'])}: {_content(message)}" for message in messages)


def _content(message: Message) -> str:
    content = message.get("content")
    if not isinstance(content, str) or "tool_calls" in message:
        got = "tool calls" if "tool_calls" in message else f"`content` of type {type(content).__name__}"
        raise ValueError(
            f"a message of the role {message['role']!r} has {got}, and plain text needs a string `content` alone. "
            "Write it out as text, or for what the encoder reads give the tokenizer a chat template."
        )
    return content


@dataclass
class Seq2SeqRenderer:
    """
    Makes the rows of one episode.

    Args:
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            Tokenizer.
        decoder_start_token_id (`int`):
            Token the decoder starts with.
        where (`str`):
            Name of the row in error messages.
        max_length (`int`, *optional*):
            Largest number of tokens of the encoder and of the decoder, each. The encoder keeps its end.
        eos_token_ids (`tuple[int, ...]`, *optional*, defaults to `()`):
            Tokens that end generation.
        chat ([`ChatRenderer`], *optional*):
            Renders conversations; [`conversation_text`] does if not given.
    """

    tokenizer: PreTrainedTokenizerBase
    decoder_start_token_id: int
    where: str
    max_length: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    chat: ChatRenderer | None = None

    def source(self, context: str | list[Message]) -> list[int]:
        """Returns the tokens the encoder reads: those that the tokenizer makes of the context at inference."""
        limit = {} if self.max_length is None else {"truncation": True, "max_length": self.max_length}
        with _cut_on_the_left(self.tokenizer):
            if isinstance(context, list) and self.chat is not None:
                input_ids = self.chat.prompt(context, **limit)
            else:
                input_ids = self.tokenizer(self._text(context), **limit)["input_ids"]
        if not input_ids:
            raise ValueError(
                f"{self.where}: the prompt has no tokens, so the encoder has nothing to read. Give it text."
            )
        return input_ids

    def target(self, reply: str | Message, finished: bool) -> list[int]:
        """Returns the tokens the decoder says, up to the first that ends generation; unfinished ones have none."""
        if not isinstance(reply, str):
            try:
                reply = _content(reply)
            except ValueError as error:
                raise ValueError(f"{self.where}: {error}") from error
        tokens = self.tokenizer(text_target=reply)["input_ids"]
        eos = self.tokenizer.eos_token_id
        if not finished:
            # The tokenizer ends whatever it is given; the model has not.
            empty = self.tokenizer(text_target="")["input_ids"]
            ending = empty[empty.index(eos) :] if eos in empty else []
            return tokens[: len(tokens) - len(ending)] if ending and tokens[-len(ending) :] == ending else tokens
        end = next((i + 1 for i, token in enumerate(tokens) if token in (eos, *self.eos_token_ids)), None)
        if end is None and eos is not None:
            return [*tokens, eos]
        return tokens[:end]

    def row(self, context: str | list[Message], reply: str | Message, reward: float, finished: bool) -> dict[str, Any]:
        """
        Returns the row of one turn. Every token of the reply is an action, the first one too: its state is that of the
        decoder start token.
        """
        tokens = [self.decoder_start_token_id, *self.target(reply, finished)]
        row = build_row(
            tokens,
            [(1, len(tokens))],
            [reward],
            terminated=finished,
            max_length=self.max_length,
            where=self.where,
        )
        source = self.source(context)
        row["decoder_input_ids"] = row["input_ids"]
        return {**row, "input_ids": source, "attention_mask": [1] * len(source)}

    def _text(self, context: str | list[Message]) -> str:
        if isinstance(context, str):
            return context
        try:
            return conversation_text(context)
        except ValueError as error:
            raise ValueError(f"{self.where}: {error}") from error


@contextmanager
def _cut_on_the_left(tokenizer: PreTrainedTokenizerBase) -> Iterator[None]:
    """The encoder loses what was said first; special tokens stay."""
    side = tokenizer.truncation_side
    tokenizer.truncation_side = "left"
    try:
        yield
    finally:
        tokenizer.truncation_side = side
