# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""Rewards in the user's columns: one number per turn, checked, and standardised over the dataset."""

import math
from numbers import Real
from typing import Any

import numpy as np
from datasets import Dataset, IterableDataset

from .formats import column_names, detect_format


FLOAT32_MAX = float(np.finfo(np.float32).max)


def turn_rewards(value: Any, column: str, num_turns: int, where: str) -> list[float]:
    """
    Reads one row's reward column as one reward per turn.

    Args:
        value (`float`, `bool` or `list[float]`):
            Content of the column.
        column (`str`):
            `"reward"` (for the episode: it goes to the last turn), `"label"` (a bool: 1 or -1, to the last turn), or
            `"rewards"`, `"turn_rewards"` (one per turn).
        num_turns (`int`):
            Number of turns of the row.
        where (`str`):
            Name of the row in error messages.

    Returns:
        `list[float]`: the rewards of the turns.

    Raises:
        ValueError: If a reward is missing, not a finite number, or their count is not `num_turns`.
    """
    if column in ("reward", "label"):
        return [0.0] * (num_turns - 1) + [scalar_reward(value, column, where)]
    if not isinstance(value, list | tuple | np.ndarray):
        raise ValueError(f"{where}: `{column}` must be a list with one number per assistant turn, got {value!r}.")
    if len(value) != num_turns:
        raise ValueError(
            f"{where}: got {len(value)} rewards for {num_turns} assistant turns. Give `{column}` one number per "
            "assistant turn, or one number for the whole episode in a `reward` column."
        )
    return [_finite(reward, column, where) for reward in value]


def scalar_reward(value: Any, column: str, where: str) -> float:
    """Reads a reward for a whole episode: a finite number, or for `label` a bool that means 1 or -1."""
    if column != "label":
        return _finite(value, column, where)
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"{where}: `label` must be True or False, got {value!r}.")
    return 1.0 if value else -1.0


def _finite(reward: Any, column: str, where: str) -> float:
    if not isinstance(reward, Real) or not abs(float(reward)) <= FLOAT32_MAX:
        raise ValueError(f"{where}: `{column}` must hold finite numbers, got {reward!r}. Fix or drop the row.")
    return float(reward)


def standardization(returns: np.ndarray) -> tuple[float, float]:
    """
    Returns the mean and the standard deviation that standardise episode returns, as trlX computes them.

    Args:
        returns (`np.ndarray` of shape `(num_episodes,)`):
            Returns, at least one.

    Returns:
        `tuple[float, float]`: mean, and unbiased standard deviation plus the float64 epsilon. The deviation is 1 for a
        single return or equal ones: they have no scale, and dividing by a rounding error would invent one.
    """
    returns = np.asarray(returns, dtype=np.float64)
    eps = float(np.finfo(np.float64).eps)
    mean = float(returns.mean())
    std = float(returns.std(ddof=1)) if len(returns) > 1 else 0.0
    return mean, std + eps if std > eps * abs(mean) else 1.0


def standardize(rewards: list[float], mean: float | None, std: float | None, terminated: bool) -> list[float]:
    """
    Standardises the rewards of an episode's turns so that the returns of terminated episodes become
    `(R - mean) / std`. The offset is paid when an episode ends: a truncated one has not ended yet, its bootstrapped
    value carries the offset.
    """
    if std is not None:
        rewards = [reward / std for reward in rewards]
    if mean is not None and terminated:
        rewards = [*rewards[:-1], rewards[-1] - mean / (1.0 if std is None else std)]
    return rewards


def episode_returns(dataset: Dataset) -> np.ndarray:
    """
    Sums the rewards of every row, reading nothing but the reward column.

    Args:
        dataset ([`~datasets.Dataset`]):
            Dataset in any of the formats that [`prepare_dataset`] accepts.

    Returns:
        `np.ndarray` of shape `(num_rows,)`, float64: the undiscounted return of every row.

    Raises:
        ValueError: If the dataset is streaming or empty, or a reward is not a finite number.
    """
    if isinstance(dataset, IterableDataset):
        raise ValueError(
            "The returns of an `IterableDataset` would take a whole pass over the stream: compute them once and pass "
            "`reward_mean` and `reward_std`."
        )
    name, column = detect_format(column_names(dataset))
    scalar = name == "samples" or column in ("reward", "label")
    returns: list[float] = []
    for batch in dataset.select_columns([column]).with_format(None).iter(batch_size=1000):
        for value in batch[column]:
            where = f"Row {len(returns)}"
            if scalar:
                returns.append(scalar_reward(value, column, where))
            elif value is None:
                raise ValueError(f"{where}: `{column}` must be a list of numbers, got None.")
            else:
                returns.append(math.fsum(turn_rewards(value, column, len(value), where)))
    return np.asarray(returns, dtype=np.float64)
