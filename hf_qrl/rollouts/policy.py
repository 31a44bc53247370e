# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""Policies: what they are asked, what they answer, and the two that need no model."""

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch

from ..data.chat import Message
from ..environments.text_env import short
from .naming import describe, describe_object
from .stop_strings import find_stop


logger = logging.getLogger(__name__)

# The prompt leaves no room for a reply: nothing was said.
OVERFLOW = "overflow"
_FINISHES = ("eos", "length", OVERFLOW)


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
            The sampled tokens, the eos included. They may be an array or a tensor.
        logprobs (`list[float]`, *optional*):
            Log-probability of each under the policy, as it was sampled from; given if `token_ids` are.
        num_tokens (`int`, *optional*, defaults to 0):
            Number of tokens of the reply; 0 if the policy knows none.
        num_prompt_tokens (`int`, *optional*, defaults to 0):
            Number of tokens it was read from.
        prompt_ids (`list[int]`, *optional*):
            These tokens.
    """

    text: str
    finish: str = "eos"
    token_ids: list[int] | None = None
    logprobs: list[float] | None = None
    num_tokens: int = 0
    num_prompt_tokens: int = 0
    prompt_ids: list[int] | None = None


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
        """
        Returns what the policy is, for the record and to tell whether a run that goes on has the same one; plain JSON.

        **A subclass with parameters must override it**, and return whatever its replies depend on beyond the
        conversation and the seed: `{"id": "my-policy", "revision": None, "sampling": {"epsilon": self.epsilon}}`. This
        one knows the class only, and adds `"unnamed": True` if the object has attributes.
        """
        described = describe_object(type(self))
        named = len(described) == 1 and not vars(self)
        return {
            "id": described["name"],
            "revision": None,
            "sampling": None,
            **({} if named else {"unnamed": True}),
        }


class _WholeReplies(Policy):
    """A policy whose replies come as a whole, and are cut after a stop string as ones that are generated would be."""

    _told = False

    def _reply(self, text: Any, stop_strings: list[str] | None) -> Action:
        if not isinstance(text, str):
            raise TypeError(f"A `{type(self).__name__}` says strings, got {short(text)} ({self.identity()['id']}).")
        stop = find_stop(text, stop_strings)
        if stop is not None:
            return Action(text[: stop[0]], f"stop:{stop[1]}")
        if any(stop_strings or ()) and not self._told:
            self._told = True
            logger.warning(
                "`%s` said %.60r, with none of the stop strings %r that end a reply in this environment. A model that "
                "is trained on such replies does not learn to end its own: let each end with one.",
                type(self).__name__,
                text,
                stop_strings,
            )
        return Action(text)


class RandomPolicy(_WholeReplies):
    """
    Chooses uniformly.

    Args:
        actions (`Sequence[str]`, *optional*):
            What to choose from. By default the environment's legal actions.

    Raises:
        TypeError: If `actions` is one string, or has something else than strings.
        ValueError: If there are none.
    """

    def __init__(self, actions: Sequence[str] | None = None) -> None:
        self.actions: list[str] | None = None
        if actions is not None:
            if isinstance(actions, str | bytes):
                raise TypeError(
                    f"`actions` is a list of strings, got {actions!r}: for this one only give it in a list."
                )
            self.actions = list(actions)
            if not self.actions:
                raise ValueError("`actions` is empty: a random policy needs something to choose from.")
            for action in self.actions:
                _check_text("Each of `actions`", action)

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
            replies.append(self._reply(text, strings))
        return replies

    def identity(self) -> dict[str, Any]:
        """See [`Policy.identity`]."""
        return {"id": "random", "revision": None, "sampling": {"actions": self.actions}}


class ScriptedPolicy(_WholeReplies):
    """
    Answers with a function.

    Args:
        function (`Callable[[list[dict]], str]`):
            Returns the reply to a conversation.
        name (`str`, *optional*):
            Name of the policy, which stands for the function in records. Without it they have the function's module
            and name, which do not tell one lambda or local function from another.

    Raises:
        TypeError: If `function` cannot be called, or `name` is no string.

    Examples:

    ```python
    >>> policy = ScriptedPolicy(lambda messages: "dig" if "here" in messages[-1]["content"] else "walk left")
    ```
    """

    def __init__(self, function: Callable[[list[Message]], str], name: str | None = None) -> None:
        if not callable(function):
            raise TypeError(f"`function` must make a reply of the messages so far, got {short(function)}.")
        if not isinstance(name, str | None):
            raise TypeError(f"`name` must be a string, got {short(name)}.")
        self.function, self._own_name = function, name
        self.name = name or describe_object(function)["name"]

    def act(
        self,
        conversations: list[list[Message]],
        stop_strings: list[list[str] | None],
        seeds: list[np.random.SeedSequence],
        **context: Any,
    ) -> list[Action]:
        """See [`Policy.act`]."""
        return [
            self._reply(self.function(messages), strings)
            for messages, strings in zip(conversations, stop_strings, strict=True)
        ]

    def identity(self) -> dict[str, Any]:
        """See [`Policy.identity`]."""
        identity: dict[str, Any] = {"id": f"scripted:{self.name}", "revision": None, "sampling": None}
        if not self._own_name:
            identity["function"] = describe(self.function)
        return identity


def checked_actions(policy: Policy, replies: Any, count: int) -> list[Action]:
    """
    Returns what a policy answered, with plain lists of tokens and log-probabilities.

    Args:
        policy ([`Policy`]):
            Who answered.
        replies (`Any`):
            What [`Policy.act`] returned.
        count (`int`):
            Number of conversations that it was asked to answer.

    Raises:
        TypeError, ValueError: If that is not one [`Action`] each, or one of them is not what it should be.
    """
    name = f"`{type(policy).__name__}.act`"
    if isinstance(replies, str | bytes) or not isinstance(replies, Iterable):
        raise TypeError(f"{name} must return a list of `Action`s, got {short(replies)}.")
    actions = list(replies)
    if len(actions) != count:
        raise ValueError(f"{name} returned {len(actions)} actions for {count} conversations, needed is one each.")
    return [_checked_action(name, action) for action in actions]


def _checked_action(name: str, action: Any) -> Action:
    if not isinstance(action, Action):
        raise TypeError(f"{name} must return `Action`s, such as `Action(text)`, got {short(action)}.")
    origin = f"of {name}"
    _check_text(f"The text of an action {origin}", action.text)
    finish = action.finish
    if not isinstance(finish, str) or not (finish in _FINISHES or (finish.startswith("stop:") and finish != "stop:")):
        raise ValueError(f'The finish of an action {origin} is {finish!r}, known are {_FINISHES} and "stop:<string>".')
    what = f"`num_tokens` and `num_prompt_tokens` of an action {origin}"
    counts = _numbers(what, [action.num_tokens, action.num_prompt_tokens], Integral)
    numbers: dict[str, Any] = {"num_tokens": counts[0], "num_prompt_tokens": counts[1]}
    if (action.token_ids is None) != (action.logprobs is None):
        raise ValueError(f"An action {origin} has only one of `token_ids` and `logprobs`: give both, or none.")
    if action.token_ids is not None:
        ids = _numbers(f"`token_ids` of an action {origin}", action.token_ids, Integral)
        logprobs = _numbers(f"`logprobs` of an action {origin}", action.logprobs, Real)
        if len(ids) != len(logprobs):
            raise ValueError(f"An action {origin} has {len(ids)} `token_ids` and {len(logprobs)} `logprobs`.")
        numbers.update(token_ids=ids, logprobs=logprobs)
    if action.prompt_ids is not None:
        numbers["prompt_ids"] = _numbers(f"`prompt_ids` of an action {origin}", action.prompt_ids, Integral)
    return replace(action, **numbers)


def _check_text(what: str, text: Any) -> None:
    if not isinstance(text, str):
        raise TypeError(f"{what} must be a string, got {short(text)}.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{what} has half of a surrogate pair, which is no text: {error}.") from None


def _numbers(what: str, values: Any, kind: type[Any]) -> list[int] | list[float]:
    """Returns numbers as Python's own, which can be stored."""
    convert = int if kind is Integral else float
    # What a model policy gives, checked in one pass each: the general case takes as long as all the rest of a turn.
    if type(values) is list and set(map(type, values)) == {convert}:
        if convert is int or all(map(math.isfinite, values)):
            return values
    if isinstance(values, np.ndarray | torch.Tensor):
        values = values.tolist()
    if not isinstance(values, list | tuple) or not all(
        isinstance(value, kind) and not isinstance(value, bool) and math.isfinite(value) for value in values
    ):
        needed = "whole" if kind is Integral else "finite"
        raise TypeError(f"{what} must be {needed} numbers, got {short(values)}.")
    return [convert(value) for value in values]
