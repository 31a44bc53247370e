# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""Seeds of episodes: one for every index, none shared between splits."""

import numpy as np


MAX_SEED = 2**32
_BLOCK_BITS = 30
_BLOCK = 2**_BLOCK_BITS
SPLITS = ("train", "validation", "test", "other")


def check_seed(seed: int) -> int:
    """
    Returns the seed as an `int`.

    Raises:
        ValueError: If it is not an integer with `0 <= seed < 2**32`: NumPy's legacy generator takes no larger one, and
            some servers no negative one.
    """
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or not 0 <= seed < MAX_SEED:
        raise ValueError(f"A seed is an integer with 0 <= seed < 2**32, got {seed!r}.")
    return int(seed)


def episode_seed(index: int, split: str = "train") -> int:
    """
    Returns the environment's seed of an episode.

    The index is mapped one-to-one into the split's own quarter of the 32-bit integers, so that neither two episodes
    nor two splits share a start. The map (multiplication by odd numbers and xor-shifts, the mixing steps of
    MurmurHash3 on 30 bits) scatters neighbours, whose seeds would otherwise be neighbours too.

    Args:
        index (`int`):
            Number of the episode within the split, `0 <= index < 2**30`.
        split (`str`, *optional*, defaults to `"train"`):
            One of `"train"`, `"validation"`, `"test"` and `"other"`.

    Raises:
        ValueError: If the index is out of range or the split is unknown.
    """
    if not 0 <= index < _BLOCK:
        raise ValueError(f"An episode's index must be between 0 and 2**{_BLOCK_BITS} - 1, got {index}.")
    block = _split_number(split) * _BLOCK
    mixed = int(index)
    for factor, shift in ((0x85EBCA6B, 13), (0xC2B2AE35, 16)):
        mixed ^= mixed >> shift
        mixed = mixed * factor % _BLOCK
    return block + (mixed ^ (mixed >> 15))


def policy_seed_sequence(run_seed: int, index: int, split: str = "train") -> np.random.SeedSequence:
    """
    Returns the source of randomness of the policy in an episode, independent of the environment's.

    Args:
        run_seed (`int`):
            Seed of the run: two runs play the same episodes with other samples.
        index (`int`):
            Number of the episode within the split.
        split (`str`, *optional*, defaults to `"train"`):
            As in [`episode_seed`].
    """
    return np.random.SeedSequence([check_seed(run_seed), _split_number(split), index])


def _split_number(split: str) -> int:
    if split not in SPLITS:
        raise ValueError(f"Unknown split {split!r}, known are {SPLITS}.")
    return SPLITS.index(split)
