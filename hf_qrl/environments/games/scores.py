# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""The scores of LMRL-Gym (Abdulhai et al., 2023), and what it reports for each task.

A raw score is a mean return. The published normalised scores do not all follow from the published raw ones by the
published formula (one in three is off by more than a point): compare raw scores.
"""

from typing import NamedTuple


class ScoreScale(NamedTuple):
    """Three returns of a task: the lowest, the mean of the data, and the highest."""

    minimum: float
    mean: float
    maximum: float


class PublishedScore(NamedTuple):
    """What LMRL-Gym reports for a method: the normalised score, and the raw one where it is given."""

    normalized: float
    raw: float | None


def normalized_score(raw: float, scale: ScoreScale) -> float:
    """
    Puts a mean return on LMRL-Gym's scale: 0 for the minimum, 50 for the mean of the data, 100 for the maximum, and
    linear in between.

    What is below the minimum or above the maximum stays there, below 0 or above 100: the "maximum" of some tasks is
    only the best that was known.

    Args:
        raw (`float`):
            Mean return.
        scale ([`ScoreScale`]):
            Returns of the task, `SCALES["maze"]` for example.
    """
    minimum, mean, maximum = scale
    if not minimum < mean < maximum:
        raise ValueError(f"A scale needs minimum < mean < maximum, got {minimum}, {mean} and {maximum}.")
    if raw <= mean:
        return 50 * (raw - minimum) / (mean - minimum)
    return 50 + 50 * (raw - mean) / (maximum - mean)


# No scale is given for the car dealer.
SCALES: dict[str, ScoreScale] = {
    "maze": ScoreScale(-101, -83, -6.84),
    "partially observed maze": ScoreScale(-101, -83, -25.75),
    "text navigation": ScoreScale(0, 0.26, 1),
    "partially observed text navigation": ScoreScale(0, 0.26, 1),
    "wordle": ScoreScale(-6, -4.12, -1.94),
    "chess": ScoreScale(-401, 0.21, 1),
    "chess endgames": ScoreScale(-1, 0.586, 1),
    "twenty questions": ScoreScale(-20, -17.3, -12.6),
    "guess my city": ScoreScale(-20, -18.8, -8.56),
}

METHODS = ("BC", "filtered BC", "MC", "ILQL", "PPO", "online filtered BC", "GPT-4")


def _row(*scores: tuple[float, float | None]) -> dict[str, PublishedScore]:
    return {method: PublishedScore(*score) for method, score in zip(METHODS, scores, strict=True)}


PUBLISHED_SCORES: dict[str, dict[str, PublishedScore]] = {
    "maze": _row(
        (58.2, -72.1), (68.9, -56.4), (75.0, -48.1), (99.9, -6.97), (79.7, -37.7), (57.4, -71.7), (78.2, -39.7)
    ),
    "partially observed maze": _row(
        (53.1, -79.5), (50.1, -82.9), (52.4, -80.3), (76.3, -52.9), (42.4, -91.7), (53.1, -79.5), (60.4, -88.0)
    ),
    "text navigation": _row(
        (53.7, 0.39), (65.1, 0.54), (71.9, 0.63), (91.8, 0.88), (87.1, 0.81), (74.5, 0.62), (67.5, 0.52)
    ),
    "partially observed text navigation": _row(
        (49.7, 0.25), (60.5, 0.49), (71.6, 0.58), (83.7, 0.76), (85.5, 0.80), (68.4, 0.53), (40.2, 0.21)
    ),
    "wordle": _row(
        (79.9, -2.81), (79.1, -2.85), (94.9, -2.16), (97.7, -2.04), (84.2, -2.63), (95.2, -2.15), (15.4, -5.42)
    ),
    "chess": _row(
        (47.2, -22.3), (42.9, -56.5), (46.5, -28.2), (47.3, -21.4), (48.0, -16.0), (47.2, -22.3), (0, -81.3)
    ),
    "chess endgames": _row(
        (35.1, 0.112), (17.7, -0.439), (50.2, 0.588), (45.8, 0.452), (77.5, 0.814), (36.2, 0.112), (0, -22.87)
    ),
    "twenty questions": _row(
        (57.1, -16.0), (77.1, -14.6), (87.1, -13.9), (82.9, -14.2), (72.9, -14.9), (55.2, -16.8), (95.7, -13.0)
    ),
    "guess my city": _row(
        (30.0, -17.0), (48.0, -15.2), (88.0, -11.2), (75.0, -12.5), (49.9, -15.1), (31.6, -19.2), (92.3, -10.13)
    ),
    "car dealer": _row(
        (44.5, None), (54.8, None), (57.2, None), (46.3, None), (50.5, None), (40.4, None), (53.5, None)
    ),
}
