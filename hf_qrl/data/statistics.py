# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""What the data says about values: their mean, to start a value head from, and their range, to clamp targets to."""

import math
from dataclasses import dataclass

import numpy as np
from datasets import Dataset


@dataclass
class ReturnStatistics:
    """
    Rewards and returns of a prepared dataset, in the (possibly standardised) units of its `rewards` column.

    Args:
        num_rows (`int`):
            Number of rows.
        num_actions (`int`):
            Number of actions.
        reward_min, reward_max (`float`):
            Smallest and largest reward between two discounts: of an action, or of what is left of an utterance where
            only utterances are discounted.
        return_min, return_max (`float`):
            Smallest and largest undiscounted return-to-go within a row, over all actions.
        discounted_return_min (`float`):
            Smallest discounted return-to-go within a row, over all actions.
        mean_return (`float`):
            Mean, over actions and weighted by `weight`, of the discounted return-to-go within a row.
        truncated_fraction (`float`):
            Fraction of rows that are truncated.
        pays_only_at_end (`bool`):
            Whether every nonzero reward sits on the last action of a row that terminated. The returns-to-go of the
            data are then all the returns there are.
        continues_elsewhere (`bool`):
            Whether some row's episode goes on in another row (history windows). The returns within rows then say
            nothing about the returns of episodes, unless only the end pays.
    """

    num_rows: int
    num_actions: int
    reward_min: float
    reward_max: float
    return_min: float
    return_max: float
    discounted_return_min: float
    mean_return: float
    truncated_fraction: float
    pays_only_at_end: bool
    continues_elsewhere: bool


def return_statistics(dataset: Dataset, gamma: float, discount_on: str = "token") -> ReturnStatistics:
    """
    Computes [`ReturnStatistics`] in one pass.

    Args:
        dataset ([`~datasets.Dataset`]):
            Prepared dataset.
        gamma (`float`):
            Discount of the returns that are discounted.
        discount_on (`str`, *optional*, defaults to `"token"`):
            `"token"` discounts after every action, `"utterance"` after the last action of an utterance only.

    Returns:
        [`ReturnStatistics`]: the statistics. Bootstraps are not known to the data and left out.

    Raises:
        ValueError: If the dataset is empty or `discount_on` is unknown.
    """
    if discount_on not in ("token", "utterance"):
        raise ValueError(f'`discount_on` must be "token" or "utterance", got {discount_on!r}.')
    if len(dataset) == 0:
        raise ValueError("The dataset is empty: it needs at least one row.")
    optional = [c for c in ("turn_ixs", "truncated", "weight", "next_input_ids") if c in dataset.column_names]

    num_actions, num_truncated, return_sum, weight_sum = 0, 0, 0.0, 0.0
    pays_only_at_end, continues_elsewhere = True, False
    reward_min, reward_max, return_min, return_max = math.inf, -math.inf, math.inf, -math.inf
    discounted_return_min = math.inf
    columns = dataset.select_columns(["rewards", "actions_ixs", *optional]).with_format(None)
    for batch in columns.iter(batch_size=1000):
        rewards, mask = _pad(batch["rewards"])
        num_rows, width = rewards.shape
        discounts = np.full((num_rows, width), gamma)
        ends = np.ones((num_rows, width), dtype=bool)
        if discount_on == "utterance":
            ends = _utterance_ends(batch)
            discounts[~ends] = 1.0

        # Padding holds zero rewards, so the backward recursion may start in it.
        returns, discounted, paid = (np.zeros((num_rows, width + 1)) for _ in range(3))
        for j in reversed(range(width)):
            returns[:, j] = rewards[:, j] + returns[:, j + 1]
            discounted[:, j] = rewards[:, j] + discounts[:, j] * discounted[:, j + 1]
            paid[:, j] = rewards[:, j] + np.where(ends[:, j], 0.0, paid[:, j + 1])
        returns, discounted, paid = returns[:, :-1], discounted[:, :-1], paid[:, :-1]

        weights = np.asarray(batch["weight"] if "weight" in batch else np.ones(num_rows), dtype=np.float64)
        ended = ~np.asarray(batch["truncated"] if "truncated" in batch else np.zeros(num_rows), dtype=bool)
        num_truncated += int((~ended).sum())
        if "next_input_ids" in batch:
            continues = np.array([len(ids) > 0 for ids in batch["next_input_ids"]])
            ended &= ~continues
            continues_elsewhere |= bool(continues.any())
        last = mask & ~np.pad(mask[:, 1:], ((0, 0), (0, 1)))
        pays_only_at_end &= not np.any(rewards[~(last & ended[:, None])])

        num_actions += int(mask.sum())
        return_sum += float((weights[:, None] * discounted)[mask].sum())
        weight_sum += float((weights[:, None] * mask).sum())
        reward_min, reward_max = min(reward_min, paid[mask].min()), max(reward_max, paid[mask].max())
        return_min, return_max = min(return_min, returns[mask].min()), max(return_max, returns[mask].max())
        discounted_return_min = min(discounted_return_min, discounted[mask].min())

    return ReturnStatistics(
        num_rows=len(dataset),
        num_actions=num_actions,
        reward_min=float(reward_min),
        reward_max=float(reward_max),
        return_min=float(return_min),
        return_max=float(return_max),
        discounted_return_min=float(discounted_return_min),
        mean_return=return_sum / weight_sum,
        truncated_fraction=num_truncated / len(dataset),
        pays_only_at_end=bool(pays_only_at_end),
        continues_elsewhere=continues_elsewhere,
    )


def value_bounds(statistics: ReturnStatistics, gamma: float) -> tuple[float, float]:
    """
    Returns bounds that no value of the data's process leaves, to clamp targets to.

    Where rewards are paid only at the end of an episode, and where nothing is discounted, they are the range of the
    returns; otherwise those of paying the smallest or largest reward forever, `r / (1 - gamma)`. Both contain 0, the
    value of doing nothing more. Undiscounted episodes that are paid along the way and go on after a row (truncated, or
    split by a history window) have no known range: their bounds are infinite.

    Args:
        statistics ([`ReturnStatistics`]):
            Statistics of the training data.
        gamma (`float`):
            Discount.

    Returns:
        `tuple[float, float]`: smallest and largest value.
    """
    goes_on = statistics.continues_elsewhere or statistics.truncated_fraction > 0
    if gamma == 1 and goes_on and not statistics.pays_only_at_end:
        return -math.inf, math.inf
    if gamma == 1 or statistics.pays_only_at_end:
        return min(statistics.return_min, 0.0), max(statistics.return_max, 0.0)
    return min(statistics.reward_min, 0.0) / (1 - gamma), max(statistics.reward_max, 0.0) / (1 - gamma)


def _pad(rows: list[list[float]]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the rows as a matrix padded with 0, and the mask of their entries."""
    lengths = np.array([len(row) for row in rows])
    mask = np.arange(lengths.max()) < lengths[:, None]
    padded = np.zeros(mask.shape)
    padded[mask] = np.concatenate([np.asarray(row, dtype=np.float64) for row in rows])
    return padded, mask


def _utterance_ends(batch: dict[str, list]) -> np.ndarray:
    """Marks the last action of each utterance (without `turn_ixs`: of each run of neighbouring own tokens)."""
    if "turn_ixs" in batch:
        turns, mask = _pad(batch["turn_ixs"])
        changes = np.diff(turns, axis=1) != 0
    else:
        positions, mask = _pad(batch["actions_ixs"])
        changes = np.diff(positions, axis=1) != 1
    last = mask & ~np.pad(mask[:, 1:], ((0, 0), (0, 1)))
    return mask & (last | np.pad(changes, ((0, 0), (0, 1))))
