# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""How sure a mean is: percentile bootstrap."""

from numbers import Integral, Real
from typing import NamedTuple

import numpy as np


_CHUNK = 2_000_000


class Interval(NamedTuple):
    """
    A mean with its confidence interval.

    Args:
        mean (`float`):
            Mean of the sample, NaN if it is empty.
        low (`float`), high (`float`):
            Ends of the interval. A single number has none: both are NaN.
    """

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.3g} [{self.low:.3g}, {self.high:.3g}]"


def check_resampling(confidence: float, num_resamples: int) -> None:
    """Raises a `ValueError` if no interval can be made with these arguments of [`bootstrap_mean`]."""
    if not isinstance(confidence, Real) or not 0 < confidence < 1:
        raise ValueError(f"`confidence` is a probability, 0 < confidence < 1, got {confidence!r}.")
    if isinstance(num_resamples, bool) or not isinstance(num_resamples, Integral) or num_resamples < 1:
        raise ValueError(f"`num_resamples` is a number of samples, at least 1, got {num_resamples!r}.")


def bootstrap_mean(
    values: np.ndarray | list[float], *, confidence: float = 0.95, num_resamples: int = 2000, seed: int = 0
) -> Interval:
    """
    Returns the mean of a sample and the interval between the quantiles of the means of its resamples.

    Args:
        values (`np.ndarray` of shape `(n,)`):
            Sample.
        confidence (`float`, *optional*, defaults to 0.95):
            Probability that the interval is made for.
        num_resamples (`int`, *optional*, defaults to 2000):
            Number of samples of size n drawn from it with replacement.
        seed (`int`, *optional*, defaults to 0):
            Seed of the draws: the same numbers give the same interval.

    Raises:
        ValueError: If `confidence` is not between 0 and 1, or `num_resamples` less than 1.
    """
    check_resampling(confidence, num_resamples)
    sample = np.asarray(values, dtype=np.float64)
    if len(sample) < 2:
        return Interval(float(sample[0]) if len(sample) else np.nan, np.nan, np.nan)
    generator = np.random.default_rng(seed)
    step = max(1, _CHUNK // len(sample))
    means = [
        sample[generator.integers(len(sample), size=(min(step, num_resamples - start), len(sample)))].mean(1)
        for start in range(0, num_resamples, step)
    ]
    low, high = np.quantile(np.concatenate(means), [(1 - confidence) / 2, (1 + confidence) / 2])
    return Interval(float(sample.mean()), float(low), float(high))
