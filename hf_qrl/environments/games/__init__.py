# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""Games with known values, a generator of data each, and no dependency beyond NumPy.

Each module holds one game: its environment, `make_dataset(num_episodes, seed)`, and its exact values where they are
known. `scores` holds the results that LMRL-Gym reports for some of them.
"""

from .arithmetic import ArithmeticEnv
from .guess_number import GuessNumberEnv
from .maze import MazeEnv
from .random_walks import RandomWalksEnv
from .scores import normalized_score
from .sliding_puzzle import SlidingPuzzleEnv
from .text_navigation import TextNavigationEnv
from .wordle import WordleEnv


__all__ = [
    "ArithmeticEnv",
    "GuessNumberEnv",
    "MazeEnv",
    "RandomWalksEnv",
    "SlidingPuzzleEnv",
    "TextNavigationEnv",
    "WordleEnv",
    "normalized_score",
]
