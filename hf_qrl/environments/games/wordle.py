# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""Wordle as LMRL-Gym (Abdulhai et al., 2023) plays it: six guesses at a word, with a hint after each.

It differs from the newspaper's game in two ways. The hidden word is drawn anew before every guess, uniformly from the
words that all hints allow, so that what is known *is* the state. And a hint looks at each letter alone: a letter that
is somewhere else in the word is yellow however often it was guessed.
"""

import random
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import numpy as np

from ..text_env import TextEnv
from .episodes import draw_seed, play_episode
from .wordle_words import WORDS


MAX_GUESSES = 6
_WON = "ggggg"


# The rules


def hint(guess: str, word: str) -> str:
    """One letter for each letter of `guess`: `g` where it is right, `y` if `word` has it elsewhere, else `b`."""
    return "".join(
        "g" if letter == right else "y" if letter in word else "b" for letter, right in zip(guess, word, strict=True)
    )


def consistent_words(hints: Iterable[tuple[str, str]], words: Sequence[str] = WORDS) -> list[str]:
    """The words that would have given all these hints, pairs of a guess and its hint."""
    hints = list(hints)
    return [word for word in words if all(hint(guess, word) == given for guess, given in hints)]


def spell(word: str) -> str:
    """A word as the player writes it: `"s t a r e\\n"`."""
    return " ".join(word) + "\n"


class WordleEnv(TextEnv):
    """
    Guess the word.

    A guess costs -1, the right one, after which no other word is possible, nothing. The game ends with it, or with the
    sixth guess. The player writes `"s t a r e\\n"` and reads `"b y g b b\\n"`; a text that is no word of the list
    counts as a guess and is answered by an empty line.

    Args:
        words (`Sequence[str]`, *optional*):
            The words, of five letters each. By default 400 ordinary ones.
    """

    stop_strings = ["\n"]

    def __init__(self, words: Sequence[str] = WORDS):
        wrong = [word for word in words if len(word) != 5]
        if wrong or not words or len(set(words)) != len(words):
            raise ValueError(
                f"`words` must be different words of five letters and at least one, got {len(words)} words, "
                f"{len(set(words))} of them different, {len(wrong)} of another length ({', '.join(wrong[:3])})."
            )
        self.words = tuple(words)
        self.consistent: list[str] = []
        self._known = frozenset(words)
        self._guesses = MAX_GUESSES

    def reset(self, *, seed: int, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Starts an episode in which every word is possible."""
        self._rng = random.Random(seed)
        self.consistent = list(self.words)
        self._guesses = 0
        return "Wordle:\n", {"num_consistent": len(self.consistent)}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Takes one guess."""
        if self._guesses == MAX_GUESSES:
            raise RuntimeError("There is no episode under way: call `reset` before `step`.")
        self._guesses += 1
        guess = action.strip().replace(" ", "")
        legal = guess in self._known and action.strip() == " ".join(guess)
        reply, won = "\n", False
        if legal:
            given = hint(guess, self._rng.choice(self.consistent))
            self.consistent = consistent_words([(guess, given)], self.consistent)
            reply, won = spell(given), given == _WON
        if won:
            self._guesses = MAX_GUESSES
        info = {"num_consistent": len(self.consistent), "success": won, "invalid_action": not legal}
        return reply, 0.0 if won else -1.0, self._guesses == MAX_GUESSES, False, info

    def legal_actions(self) -> list[str]:
        """Every word of the list."""
        return [spell(word) for word in self.words]


# Policies: functions from the words that are still possible to a guess


def information_gain_policy(words: Sequence[str] = WORDS) -> Callable[[Sequence[str]], str]:
    """
    The best scripted policy of LMRL-Gym: guess the word whose hint is expected to tell most.

    Args:
        words (`Sequence[str]`, *optional*):
            The words of the game.

    Returns:
        `Callable[[Sequence[str]], str]`: maps the words that are still possible to a guess: of the guesses with the
        highest entropy of the hint the first, those that may themselves be right before all others.
    """
    hints = _hint_numbers(words)
    index = {word: number for number, word in enumerate(words)}

    @cache
    def best(consistent: tuple[str, ...]) -> str:
        columns = [index[word] for word in consistent]
        # Row by row the histogram of the hints, all in one count.
        rows = np.arange(len(words))[:, None] * 3**5
        counts = np.bincount((rows + hints[:, columns]).ravel(), minlength=len(words) * 3**5).reshape(-1, 3**5)
        shares = counts / len(consistent)
        entropy = -(shares * np.log(shares, where=shares > 0, out=np.zeros_like(shares))).sum(axis=1)
        entropy[columns] += 1e-9
        return words[int(entropy.argmax())]

    return lambda consistent: best(tuple(consistent))


def _hint_numbers(words: Sequence[str]) -> np.ndarray:
    """`hint` of every guess (row) for every word (column), read as a number to base three."""
    letters = np.array([[ord(letter) for letter in word] for word in words])
    green = letters[:, None, :] == letters[None, :, :]
    present = (letters[:, None, :, None] == letters[None, :, None, :]).any(axis=-1)
    return (green.astype(int) + present) @ 3 ** np.arange(5)


def expected_return(policy: Callable[[Sequence[str]], str], words: Sequence[str] = WORDS) -> float:
    """
    Exact expected return of a policy that guesses words of the list and draws no random numbers.

    Args:
        policy (`Callable[[Sequence[str]], str]`):
            Maps the words that are still possible to a guess.
        words (`Sequence[str]`, *optional*):
            The words of the game.
    """

    def value(consistent: list[str], guesses_left: int) -> float:
        if guesses_left == 0:
            return 0.0
        guess = policy(consistent)
        parts: dict[str, list[str]] = {}
        for word in consistent:
            parts.setdefault(hint(guess, word), []).append(word)
        return sum(
            len(part) / len(consistent) * (value(part, guesses_left - 1) - 1)
            for given, part in parts.items()
            if given != _WON
        )

    return value(list(words), MAX_GUESSES)


# The data


def make_dataset(
    num_episodes: int = 1000,
    seed: int = 0,
    *,
    consistent_probability: float = 1 / 3,
    words: Sequence[str] = WORDS,
) -> list[dict[str, Any]]:
    """
    Plays episodes by a policy that ignores all hints in most of its guesses.

    Args:
        num_episodes (`int`, *optional*, defaults to 1000):
            Number of episodes. LMRL-Gym has a million.
        seed (`int`, *optional*, defaults to 0):
            Seed.
        consistent_probability (`float`, *optional*, defaults to 1/3):
            Probability that a guess is drawn from the words that are still possible, instead of from all words.
        words (`Sequence[str]`, *optional*):
            The words of the game.

    Returns:
        `list[dict]`: rows as of [`~hf_qrl.environments.games.episodes.play_episode`].
    """
    rng = random.Random(seed)
    env = WordleEnv(words)

    def act() -> str:
        return spell(rng.choice(env.consistent if rng.random() < consistent_probability else env.words))

    return [play_episode(env, act, seed=draw_seed(rng)) for _ in range(num_episodes)]
