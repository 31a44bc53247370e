# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""The environment most users write: gymnasium's shape, on text."""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any, NamedTuple

import numpy as np
import torch

from ..data.chat import ROLES
from ..data.rewards import FLOAT32_MAX
from .failures import EnvironmentFailure, ReplayMismatch, call_guarded
from .seeding import check_seed


Message = dict[str, Any]
Observation = str | list[Message]
TextStep = tuple[Observation, float, bool, bool, dict[str, Any]]

_write = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode

# An assistant message in an observation would be a turn without a reward.
_OBSERVATION_ROLES = tuple(role for role in ROLES if role != "assistant")


class TextEnv(ABC):
    """
    A game, task or user simulator that one conversation is played in.

    An observation is a string, which becomes a user message, or a list of messages with "role" and "content": a system
    message and a question to start with, the answers of several tools, or an empty list for nothing.

    **An episode must follow from the seed and the actions alone**, without global random state or clocks: lost
    episodes are replayed, and policies are compared on equal seeds.

    Attributes:
        stop_strings (`list[str]` or `None`):
            Strings that end a reply. They are read before each turn, so `step` may change them for the next one.
        tools (`list[dict]` or `None`):
            JSON schemas of the tools that the chat template describes to the model; read after `reset`.

    Examples:

    ```python
    class GuessTheNumber(TextEnv):
        def reset(self, *, seed, options=None):
            self.secret = random.Random(seed).randint(1, 100)
            return "Guess a number between 1 and 100.", {}

        def step(self, action):
            if not action.strip().isdigit():
                return "That is not a number.", -1.0, False, False, {"invalid_action": True}
            guess = int(action)
            if guess == self.secret:
                return "Correct!", 0.0, True, False, {"success": True}
            return "higher" if guess < self.secret else "lower", -1.0, False, False, {}
    ```
    """

    stop_strings: list[str] | None = None
    tools: list[dict[str, Any]] | None = None

    @abstractmethod
    def reset(self, *, seed: int, options: dict[str, Any] | None = None) -> tuple[Observation, dict[str, Any]]:
        """
        Starts an episode, possibly in the middle of another one.

        Args:
            seed (`int`):
                Seed of the episode, `0 <= seed < 2**32`.
            options (`dict`, *optional*):
                What else the start depends on.

        Returns:
            `tuple[str | list[dict], dict]`: the first observation, and information for people and evaluators.
        """

    @abstractmethod
    def step(self, action: str) -> TextStep:
        """
        Answers a reply of the policy.

        Args:
            action (`str`):
                The reply, with the stop string that ended it. It can be anything: answer nonsense in the game, an
                exception means that the environment is broken and makes the episode a failure.

        Returns:
            `tuple[str | list[dict], float, bool, bool, dict]`: observation; reward of this turn; `terminated`, the
            game is over; `truncated`, the environment stops although the game could go on; information, in which
            evaluators know `"success"` (a bool) and `"invalid_action"`.
        """

    def legal_actions(self) -> list[str] | None:
        """Returns the replies that make sense in the current state, `None` if that is not a short list."""
        return None

    def close(self) -> None:  # noqa: B027  (most environments hold nothing)
        """Frees what the environment holds. It is called once, after the last episode or a failure."""


TextEnvFactory = Callable[[], TextEnv]


def observation_messages(observation: Observation) -> list[Message]:
    """
    Returns an observation as messages; a string is a user message.

    Raises:
        EnvironmentFailure: If it is neither a string nor a list of dicts.
    """
    if isinstance(observation, str):
        return [{"role": "user", "content": observation}]
    if isinstance(observation, list) and all(isinstance(message, dict) for message in observation):
        return [dict(message) for message in observation]
    raise EnvironmentFailure(f"An observation is a string or a list of messages, got {short(observation)}.")


def checked_messages(messages: Sequence[Any], where: str) -> list[Message]:
    """
    Returns copies of the messages of an observation.

    Args:
        messages (`Sequence[dict]`):
            What is to be checked.
        where (`str`):
            Name of the observation, for the message.

    Raises:
        EnvironmentFailure: If one is not a dict with the strings "role" and "content", has the role of the assistant
            or none that is known, or holds what can be neither stored nor sent as JSON: half of a surrogate pair, say.
    """
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            raise EnvironmentFailure(
                f'{where} must be made of dicts with the strings "role" and "content", got {short(message)}.'
            )
        if message.get("role") not in _OBSERVATION_ROLES:
            raise EnvironmentFailure(
                f"{where} has the role {message.get('role')!r}, allowed are {_OBSERVATION_ROLES}."
            )
        try:
            _write(message).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise EnvironmentFailure(
                f"{where} holds what JSON cannot say ({type(error).__name__}: {error}): {short(message)}."
            ) from None
    return [dict(message) for message in messages]


def short(value: Any) -> str:
    """Returns the type and the beginning of a value's `repr`, for messages."""
    try:
        text = repr(value)
    except Exception as error:  # of an integer with thousands of digits, for instance
        text = f"<its repr cannot be made: {type(error).__name__}>"
    return f"a `{type(value).__name__}`: {text if len(text) <= 120 else text[:120] + '...'}"


def observation_hash(observation: Observation) -> str:
    """
    Returns the SHA-256 of an observation's roles and contents, equal for equal observations in every process.

    Args:
        observation (`str` or `list[dict]`):
            A string counts as the user message that it becomes.
    """
    pairs = [[message["role"], message["content"]] for message in observation_messages(observation)]
    return hashlib.sha256(json.dumps(pairs).encode()).hexdigest()


def checked_reset(
    env: TextEnv, seed: int, options: dict[str, Any] | None = None
) -> tuple[list[Message], dict[str, Any]]:
    """
    Starts an episode and checks what comes back. The environment gets a copy of the options.

    Returns:
        `tuple[list[dict], dict]`: messages of the first observation, and the information.

    Raises:
        EnvironmentFailure: If the environment raises, or returns something else.
        ValueError: If the seed is out of range.
    """
    name = f"`{type(env).__name__}.reset`"
    returned = call_guarded(name, env.reset, seed=check_seed(seed), options=deepcopy(options))
    if not isinstance(returned, tuple) or len(returned) != 2 or not isinstance(returned[1], dict):
        raise EnvironmentFailure(f"{name} must return the pair (observation, info dict), got {short(returned)}.")
    return checked_messages(observation_messages(returned[0]), f"The observation of {name}"), returned[1]


class CheckedStep(NamedTuple):
    """What a step returned, checked: messages of the observation, reward, the two flags, and the information."""

    messages: list[Message]
    reward: float
    terminated: bool
    truncated: bool
    info: dict[str, Any]


def checked_step(env: TextEnv, action: str) -> CheckedStep:
    """
    Plays a turn and checks what comes back.

    Raises:
        EnvironmentFailure: If the environment raises, or returns something else: a reward that is no finite number
            within the range of float32, or a flag that is no bool, for instance.
    """
    name = f"`{type(env).__name__}.step`"
    returned = call_guarded(name, env.step, action)
    if not isinstance(returned, tuple) or len(returned) != 5 or not isinstance(returned[4], dict):
        raise EnvironmentFailure(
            f"{name} must return (observation, reward, terminated, truncated, info dict), got {short(returned)}."
        )
    observation, reward, terminated, truncated, info = returned
    if isinstance(reward, str | bytes):
        raise EnvironmentFailure(f"{name} returned the reward {reward!r}. Rewards must be numbers.")
    reward = call_guarded(f"The reward of {name}", float, reward)
    if not abs(reward) <= FLOAT32_MAX:
        raise EnvironmentFailure(
            f"{name} returned the reward {reward}. Rewards must be finite numbers, within the range of float32."
        )
    flags = [_truth(f"`{flag}` of {name}", x) for flag, x in (("terminated", terminated), ("truncated", truncated))]
    success = info.get("success")
    if success is not None:
        # Scores of another kind would be taken for a success, or for none.
        plain = isinstance(success, int | float) and success in (0, 1)
        info = {
            **info,
            "success": bool(success) if plain else _truth(f"`success` in the information of {name}", success),
        }
    messages = checked_messages(observation_messages(observation), f"The observation of {name}")
    return CheckedStep(messages, reward, flags[0], flags[1], info)


def _truth(what: str, value: Any) -> bool:
    """Returns a bool of Python, NumPy or torch; most other things are true by accident, `"False"` among them."""
    single = isinstance(value, np.generic | np.ndarray | torch.Tensor) and value.ndim == 0
    plain = value.item() if single else value
    if not isinstance(plain, bool):
        raise EnvironmentFailure(f"{what} must be True or False, got {short(value)}.")
    return plain


class Replay(NamedTuple):
    """
    An episode that was played again.

    Args:
        messages (`list[dict]`):
            The conversation.
        rewards (`list[float]`):
            Reward of each action.
        terminated, truncated (`bool`):
            Flags of the last step, `False` before the first.
        observation_hashes (`list[str]`):
            Hash of the first observation and of the one after each action.
    """

    messages: list[Message]
    rewards: list[float]
    terminated: bool
    truncated: bool
    observation_hashes: list[str]


def replay(
    env: TextEnv,
    seed: int,
    actions: Sequence[str],
    *,
    options: dict[str, Any] | None = None,
    observation_hashes: Sequence[str] | None = None,
) -> Replay:
    """
    Plays recorded actions again, and leaves the environment in the state after them.

    Args:
        env (`TextEnv`):
            Environment to play in; it is reset.
        seed (`int`):
            Seed of the episode.
        actions (`Sequence[str]`):
            Replies of the policy.
        options (`dict`, *optional*):
            Options of the episode's reset.
        observation_hashes (`Sequence[str]`, *optional*):
            Recorded hashes ([`observation_hash`]): of the first observation, then of the one after each action. Fewer
            than `len(actions) + 1` check the beginning.

    Returns:
        `Replay`: the episode.

    Raises:
        ReplayMismatch: If an observation differs from the recorded one, or the episode ends before its last action.
        EnvironmentFailure: If the environment fails.
    """
    expected = list(observation_hashes or [])
    observed, _ = checked_reset(env, seed, options)
    messages, rewards, hashes = list(observed), [], [observation_hash(observed)]
    terminated = truncated = False
    for turn, action in enumerate([None, *actions]):
        if action is not None:
            if terminated or truncated:
                raise ReplayMismatch(f"The replay of seed {seed} ended before action {turn - 1} of {len(actions)}.")
            observed, reward, terminated, truncated, _ = checked_step(env, action)
            messages += [{"role": "assistant", "content": action}, *observed]
            rewards.append(reward)
            hashes.append(observation_hash(observed))
        if turn < len(expected) and hashes[turn] != expected[turn]:
            raise ReplayMismatch(
                f"The replay of seed {seed} observed something else than was recorded after {turn} actions. Either "
                "the environment has changed, or it does not follow from its seed and actions alone: look for global "
                "random state, clocks and unordered sets."
            )
    return Replay(messages, rewards, terminated, truncated, hashes)
