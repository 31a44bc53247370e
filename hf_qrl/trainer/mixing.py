# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""
Rows of two datasets in fixed shares, the second of which grows.

Which rows a batch has follows from its number, the seed and the datasets: a run that goes on from a checkpoint has
nothing to restore.
"""

import math
from fractions import Fraction
from typing import Any

import numpy as np
from datasets import Dataset


# What a row means that lacks a column which rows of the other dataset have.
_DEFAULTS: dict[str, Any] = {"weight": 1.0, "truncated": False, "next_input_ids": [], "next_attention_mask": []}


class RowMixer:
    """
    Draws rows of two datasets. Each is gone through in epochs, shuffled anew for each: every row of a small dataset
    then occurs equally often, up to one, which independent draws do not promise.

    Args:
        offline ([`~datasets.Dataset`], *optional*):
            The dataset that stays as it is.
        offline_fraction (`float`):
            Share of the rows that come from it, spread evenly: of any `n` successive rows it is `n` times the share,
            up to one row, and in the long run exactly.
        seed (`int`):
            Seed of the order.
    """

    def __init__(self, offline: Dataset | None, offline_fraction: float, seed: int):
        self.offline = offline
        self._fraction = Fraction(0 if offline is None else offline_fraction).limit_denominator(1_000_000)
        self._orders = [ShuffledEpochs(seed, 0), ShuffledEpochs(seed, 1)]

    def draw(self, start: int, count: int, online: Dataset) -> list[dict[str, Any]]:
        """Rows `start` to `start + count` of the endless sequence, as the online dataset is now."""
        numbers: list[list[int]] = [[], []]
        sources = []
        for i in range(start, start + count):
            before = math.floor(self._fraction * i)
            source = 0 if math.floor(self._fraction * (i + 1)) > before else 1
            sources.append(source)
            numbers[source].append(i - before if source else before)
        drawn = [
            iter(rows_at(dataset, [order(number, len(dataset)) for number in wanted]) if wanted else [])
            for dataset, order, wanted in zip((self.offline, online), self._orders, numbers, strict=True)
        ]
        return with_same_columns([next(drawn[source]) for source in sources])


class ShuffledEpochs:
    """Place, within a dataset of `size` rows, of the row with a `number`, where each epoch has an order of its own."""

    def __init__(self, *entropy: int):
        self.entropy = entropy
        self._key: tuple[int, int] | None = None
        self._order = np.empty(0, dtype=np.int64)

    def __call__(self, number: int, size: int) -> int:
        epoch, place = divmod(number, size)
        if self._key != (epoch, size):
            self._key = (epoch, size)
            self._order = np.random.default_rng([*self.entropy, epoch]).permutation(size)
        return int(self._order[place])


def rows_at(dataset: Dataset, places: list[int]) -> list[dict[str, Any]]:
    columns = dataset[places]
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def with_same_columns(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """
    Completes rows of different datasets.

    Raises:
        ValueError: If a column is missing that has no default.
    """
    names = list(dict.fromkeys(name for row in rows for name in row))
    for row in rows:
        for name in names:
            if name in row:
                continue
            if name == "attention_mask":
                row[name] = [1] * len(row["input_ids"])
            elif name in _DEFAULTS:
                row[name] = _DEFAULTS[name]
            else:
                raise ValueError(
                    f"Only one of the training data and the replay has the column `{name}`, and a batch has rows of "
                    "both. Add it to the other, or drop it."
                )
    return rows


__all__ = ["RowMixer", "ShuffledEpochs"]
