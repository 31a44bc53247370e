# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""Policies: what they are asked, what they answer, and the two that need no model."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..data.chat import Message
from .stop_strings import find_stop


# The prompt leaves no room for a reply: nothing was said.
OVERFLOW = "overflow"


@dataclass(frozen=True)
class Action:
    """
    A reply of a policy.

    Args:
        text (`str`):
            The reply, with the stop string that ended it.
        finish (`str`, *optional*, defaults to `"eos"`):
            Why it ended: `"eos"`, the policy was done; `"stop:<string>"`; `"length"`, it was cut; or `"overflow"`, the
            conversation is too long to say anything.
        token_ids (`list[int]`, *optional*):
            The sampled tokens, the eos included.
        logprobs (`list[float]`, *optional*):
            Log-probability of each under the policy, as it was sampled from.
        num_tokens (`int`, *optional*, defaults to 0):
            Number of tokens of the reply; 0 if the policy knows none.
        num_prompt_tokens (`int`, *optional*, defaults to 0):
            Number of tokens it was read from.
    """

    text: str
    finish: str = "eos"
    token_ids: list[int] | None = None
    logprobs: list[float] | None = None
    num_tokens: int = 0
    num_prompt_tokens: int = 0


class Policy(ABC):
    """
    Whatever answers observations.

    Attributes:
        tokenizer_id (`str` or `None`):
            Name of the tokenizer of `token_ids`.
    """

    tokenizer_id: str | None = None

    @abstractmethod
    def act(
        self,
        conversations: list[list[Message]],
        stop_strings: list[list[str] | None],
        seeds: list[np.random.SeedSequence],
        **context: Any,
    ) -> list[Action]:
        """
        Answers a batch of conversations.

        Args:
            conversations (`list[list[dict]]`):
                Messages so far, of any number of conversations. They are not to be changed.
            stop_strings (`list[list[str] | None]`):
                Strings that end the reply of each.
            seeds (`list[np.random.SeedSequence]`):
                All the randomness that the reply of each may have: the same for the same turn of the same episode.
            context:
                What else is known, a list each or one value for all: `legal_actions` (`list[list[str] | None]`),
                `tools` (`list[list[dict] | None]`), `max_seq_len` (`int` or `None`). More may come.

        Returns:
            `list[Action]`: one per conversation.
        """

    def identity(self) -> dict[str, Any]:
        """Returns what the policy is, for the record; plain JSON."""
        return {"id": type(self).__name__, "revision": None, "sampling": None}


class RandomPolicy(Policy):
    """
    Chooses uniformly.

    Args:
        actions (`Sequence[str]`, *optional*):
            What to choose from. By default the environment's legal actions.
    """

    def __init__(self, actions: Sequence[str] | None = None) -> None:
        if actions is not None and len(actions) == 0:
            raise ValueError("`actions` is empty: a random policy needs something to choose from.")
        self.actions = None if actions is None else list(actions)

    def act(
        self,
        conversations: list[list[Message]],
        stop_strings: list[list[str] | None],
        seeds: list[np.random.SeedSequence],
        **context: Any,
    ) -> list[Action]:
        """See [`Policy.act`]."""
        legal = context.get("legal_actions") or [None] * len(conversations)
        replies = []
        for strings, seed, known in zip(stop_strings, seeds, legal, strict=True):
            choices = known if self.actions is None else self.actions
            if not choices:
                raise ValueError(
                    "The environment names no legal actions, so a random policy has nothing to choose from: pass "
                    "`RandomPolicy(actions)`, or give the environment a `legal_actions` method."
                )
            text = choices[np.random.default_rng(seed).integers(len(choices))]
            replies.append(written(text, strings))
        return replies

    def identity(self) -> dict[str, Any]:
        """See [`Policy.identity`]."""
        return {"id": "random", "revision": None, "sampling": {"actions": self.actions}}


class ScriptedPolicy(Policy):
    """
    Answers with a function.

    Args:
        function (`Callable[[list[dict]], str]`):
            Returns the reply to a conversation.
        name (`str`, *optional*):
            Name of the policy; the function's if not given.

    Examples:

    ```python
    >>> policy = ScriptedPolicy(lambda messages: "dig" if "here" in messages[-1]["content"] else "walk left")
    ```
    """

    def __init__(self, function: Callable[[list[Message]], str], name: str | None = None) -> None:
        self.function = function
        self.name = name or getattr(function, "__qualname__", type(function).__name__)

    def act(
        self,
        conversations: list[list[Message]],
        stop_strings: list[list[str] | None],
        seeds: list[np.random.SeedSequence],
        **context: Any,
    ) -> list[Action]:
        """See [`Policy.act`]."""
        return [
            written(self.function(messages), strings)
            for messages, strings in zip(conversations, stop_strings, strict=True)
        ]

    def identity(self) -> dict[str, Any]:
        """See [`Policy.identity`]."""
        return {"id": f"scripted:{self.name}", "revision": None, "sampling": None}


def written(text: str, stop_strings: list[str] | None) -> Action:
    """Returns a reply that came as a whole: cut after a stop string, as one that is generated would be."""
    stop = find_stop(text, stop_strings)
    return Action(text) if stop is None else Action(text[: stop[0]], f"stop:{stop[1]}")
