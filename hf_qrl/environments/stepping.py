# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""One step of any environment, in one shape: what environments may leave open is settled here."""

import math
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..data.interfaces import LLMMessageLogType
from ..data.rewards import FLOAT32_MAX
from .failures import EnvironmentFailure, call_guarded
from .interfaces import EnvironmentInterface
from .text_env import checked_messages, short


TRUNCATED_KEY = "_truncated"
FAILURE_KEY = "_failure"


@dataclass
class StepResult:
    """
    A step of B conversations.

    Args:
        observations (`list[list[dict]]`):
            Messages of each conversation: mostly one, none if the environment answered nothing.
        metadata (`list`):
            State of each for the next step, without the reserved keys.
        next_stop_strings (`list[list[str] | None]`):
            Strings that end each next reply. `None` says nothing new.
        rewards (`torch.DoubleTensor` of shape `(B,)`):
            Reward of the turn, NaN where there is a failure.
        reward_components (`dict[str, torch.DoubleTensor]`):
            Its summands, keys with the prefix `"reward/"`; empty if the environment names none.
        terminateds (`torch.BoolTensor` of shape `(B,)`):
            Whether the conversation has ended: there is no value beyond.
        truncateds (`torch.BoolTensor` of shape `(B,)`):
            Whether the environment cut it off before its end. Never both.
        answers (`list[str | None]`):
            Answers found in the replies.
        failures (`list[EnvironmentFailure | None]`):
            Failures of single conversations. Nothing else of such a row means anything.
    """

    observations: list[list[dict[str, Any]]]
    metadata: list[Any]
    next_stop_strings: list[list[str] | None]
    rewards: Tensor
    reward_components: dict[str, Tensor]
    terminateds: Tensor
    truncateds: Tensor
    answers: list[str | None]
    failures: list[EnvironmentFailure | None]


def call_step(env: EnvironmentInterface, message_logs: list[LLMMessageLogType], metadata: list[Any]) -> StepResult:
    """
    Plays one step of a batch.

    The environment gets copies: of each message "role" and "content", of the metadata all. So it cannot change what
    the caller has, here as little as in another process, and the same call can be made again.

    Args:
        env (`EnvironmentInterface`):
            Environment in this process.
        message_logs (`list[LLMMessageLogType]`):
            Conversations whose last message is the assistant's.
        metadata (`list`):
            State of each, from the start of the episode or the last step.

    Returns:
        `StepResult`: the step.

    Raises:
        EnvironmentFailure: If the environment raises, returns something else than the interface asks for or a reward
            that is not finite, or reports a failure for every conversation (so for a single one it is always raised).
        ValueError: If there is not one metadata per conversation, or a conversation does not end with the assistant.
    """
    if not message_logs or len(message_logs) != len(metadata):
        raise ValueError(
            f"A step needs one metadata for each of at least one conversation, got {len(message_logs)} conversations "
            f"and {len(metadata)} metadata."
        )
    for i, log in enumerate(message_logs):
        if not log or log[-1]["role"] != "assistant":
            raise ValueError(
                f"Conversation {i} does not end with an assistant message, so there is nothing to answer."
            )
    logs = [[{"role": message["role"], "content": message["content"]} for message in log] for log in message_logs]
    # By position: environments name the two arguments as they like.
    returned = call_guarded("The environment's `step`", lambda: env.step(logs, deepcopy(metadata)))
    result = call_guarded("Reading what `step` returned", _normalise, returned, metadata)
    if all(result.failures):
        raise result.failures[0]  # type: ignore[misc]
    return result


def _normalise(returned: Any, old_metadata: list[Any]) -> StepResult:
    size = len(old_metadata)
    if not isinstance(returned, tuple) or len(returned) != 6:
        raise EnvironmentFailure(
            f"`step` returned {short(returned)}, needed is an `EnvironmentReturn`: a tuple of observations, "
            "metadata, next_stop_strings, rewards, terminateds and answers."
        )
    observations, metadata, stop_strings, rewards, terminateds, answers = returned
    new_metadata = _rows("metadata", metadata, size)
    failures = [_pop(new_metadata, i, FAILURE_KEY) for i in range(size)]
    for i, failure in enumerate(failures):
        if not isinstance(failure, EnvironmentFailure | None):
            raise EnvironmentFailure(
                f"`{FAILURE_KEY}` in the metadata of row {i} must be an `EnvironmentFailure`, got {short(failure)}."
            )
    failed = [failure is not None for failure in failures]
    total, components = _rewards(rewards, size, failed)
    ends = _column("terminateds", terminateds, size)
    terminated = [bool(end) and not lost for end, lost in zip(ends, failed, strict=True)]
    # A state that is an end stays one when a limit is reached in the same turn.
    limits = [bool(_pop(new_metadata, i, TRUNCATED_KEY)) for i in range(size)]
    truncated = [limits[i] and not terminated[i] and not failed[i] for i in range(size)]
    for i, old in enumerate(old_metadata):
        if new_metadata[i] is None and not terminated[i]:
            new_metadata[i] = old
    return StepResult(
        observations=[_messages(i, row) for i, row in enumerate(_rows("observations", observations, size))],
        metadata=new_metadata,
        next_stop_strings=[
            string_list(f"The stop strings of row {i}", row)
            for i, row in enumerate(_rows("next_stop_strings", stop_strings, size, none=True))
        ],
        rewards=torch.tensor(total, dtype=torch.float64),
        reward_components={key: torch.tensor(values, dtype=torch.float64) for key, values in components.items()},
        terminateds=torch.tensor(terminated),
        truncateds=torch.tensor(truncated),
        answers=_rows("answers", answers, size, none=True),
        failures=failures,
    )


def _rows(name: str, rows: Any, size: int, none: bool = False) -> list[Any]:
    if rows is None and none:
        return [None] * size
    if not isinstance(rows, list | tuple) or len(rows) != size:
        raise EnvironmentFailure(f"`{name}` must be a list with one entry for each of {size} rows, got {short(rows)}.")
    return list(rows)


def _column(name: str, values: Any, size: int) -> list[Any]:
    """Numbers, one for each row. Lists: a dozen operations on tensors of one row take longer than a game's step."""
    column = torch.as_tensor(values)
    if column.shape != (size,):
        raise EnvironmentFailure(
            f"`{name}` must have the shape ({size},), one entry per row, got {tuple(column.shape)}."
        )
    return column.tolist()


def _rewards(rewards: Any, size: int, failed: list[bool]) -> tuple[list[float], dict[str, list[float]]]:
    components: dict[str, list[float]] = {}
    if isinstance(rewards, dict):
        if not rewards:
            raise EnvironmentFailure("`rewards` is an empty dict: give it a tensor, or at least one component.")
        for key, values in rewards.items():
            name = key if key.startswith("reward/") else f"reward/{key}"
            if name in components:
                raise EnvironmentFailure(f"`rewards` has two components of the name {name!r}.")
            components[name] = _column(f"rewards[{key!r}]", values, size)
        total = [sum(row) for row in zip(*components.values(), strict=True)]
    else:
        total = _column("rewards", rewards, size)
    for i, (reward, lost) in enumerate(zip(total, failed, strict=True)):
        if not lost and not abs(reward) <= FLOAT32_MAX:
            raise EnvironmentFailure(
                f"The reward of row {i} is {reward}. Rewards must be finite numbers, within the range of float32."
            )
    return [math.nan if lost else reward for reward, lost in zip(total, failed, strict=True)], components


def _messages(row: int, observation: Any) -> list[dict[str, Any]]:
    messages = [observation] if isinstance(observation, dict) else observation
    if not isinstance(messages, list | tuple):
        raise EnvironmentFailure(
            f"The observation of row {row} must be a message or a list, got {short(observation)}."
        )
    return checked_messages(messages, f"The observation of row {row}")


def string_list(what: str, strings: Any) -> list[str] | None:
    """
    Returns a list of strings, or `None` as it is.

    Args:
        what (`str`):
            Name of the list, for the message.
        strings (`Iterable[str]`, *optional*):
            What is to be checked.

    Raises:
        EnvironmentFailure: If it is something else: one string, which would be taken apart, or a set, whose order is
            another one in each process.
    """
    if strings is None:
        return None
    listed = isinstance(strings, Iterable) and not isinstance(strings, str | bytes | set | frozenset)
    items = list(strings) if listed else []
    if not listed or not all(isinstance(item, str) for item in items):
        raise EnvironmentFailure(f"{what} must be a list of strings, got {short(strings)}.")
    return items


def _pop(metadata: list[Any], i: int, key: str) -> Any:
    """Takes a reserved key out of row i, of a copy: the dict is the environment's."""
    row = metadata[i]
    if not isinstance(row, dict) or key not in row:
        return None
    metadata[i] = {name: value for name, value in row.items() if name != key}
    return row[key]
