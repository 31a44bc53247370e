# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""Guess the number: search by comparison, with exact values from a dynamic program over intervals."""

import random
import re
from functools import cache
from typing import Any

from ..text_env import TextEnv
from .episodes import draw_seed, play_episode


# The game


class GuessNumberEnv(TextEnv):
    """
    Guess a hidden number between 1 and `maximum`.

    A wrong guess costs -1 and is answered by where the hidden number is, `"higher\\n"` or `"lower\\n"`; the right one
    costs nothing and ends the game. A text that is no number of the range counts as a wrong guess and is answered by
    `"invalid\\n"`. Blanks and newlines around a number do not matter.

    Args:
        maximum (`int`, *optional*, defaults to 16):
            The largest number.
        max_guesses (`int`, *optional*):
            Number of guesses after which the game is lost. By default there is no limit.
    """

    stop_strings = ["\n"]

    def __init__(self, maximum: int = 16, max_guesses: int | None = None):
        if maximum < 1 or (max_guesses is not None and max_guesses < 1):
            raise ValueError(f"`maximum` and `max_guesses` must be at least 1, got {maximum} and {max_guesses}.")
        self.maximum = maximum
        self.max_guesses = max_guesses
        # What the answers so far allow.
        self.low, self.high = 1, maximum
        self._hidden: int | None = None
        self._guesses = 0

    def reset(self, *, seed: int, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Starts an episode; `options` may hold the `hidden` number."""
        hidden = (options or {}).get("hidden")
        if hidden is not None and not 1 <= hidden <= self.maximum:
            raise ValueError(f"`hidden` must be between 1 and {self.maximum}, got {hidden!r}.")
        self._hidden = random.Random(seed).randint(1, self.maximum) if hidden is None else int(hidden)
        self._guesses = 0
        self.low, self.high = 1, self.maximum
        return f"Guess a number between 1 and {self.maximum}.\n", {"low": self.low, "high": self.high}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Takes one guess."""
        if self._hidden is None:
            raise RuntimeError("There is no episode under way: call `reset` before `step`.")
        hidden = self._hidden
        self._guesses += 1
        guess = int(action) if re.fullmatch(r"\s*[0-9]{1,9}\s*", action) else 0
        legal = 1 <= guess <= self.maximum
        if not legal:
            answer = "invalid"
        elif guess < hidden:
            answer, self.low = "higher", max(self.low, guess + 1)
        elif guess > hidden:
            answer, self.high = "lower", min(self.high, guess - 1)
        else:
            answer, self.low, self.high = "correct", guess, guess
        success = answer == "correct"
        over = success or self._guesses == self.max_guesses
        if over:
            self._hidden = None
        info = {"low": self.low, "high": self.high, "success": success, "invalid_action": not legal}
        return answer + "\n", 0.0 if success else -1.0, over, False, info

    def legal_actions(self) -> list[str]:
        """Every number of the range, also those that the answers rule out."""
        return [f"{number}\n" for number in range(1, self.maximum + 1)]


# Exact values. Where the hidden number can be is an interval, and all that matters of it is its length.


def optimal_value(length: int, gamma: float = 1.0, guesses_left: int | None = None) -> float:
    """
    V*: the best expected return, discounted by `gamma` for every guess.

    Args:
        length (`int`):
            How many numbers are still possible.
        gamma (`float`, *optional*, defaults to 1.0):
            Discount.
        guesses_left (`int`, *optional*):
            Number of guesses to the limit, if there is one.
    """
    if guesses_left is not None:
        guesses_left = min(guesses_left, length.bit_length())  # with so many, halving finds every number
    return _values(length, gamma, guesses_left)[length]


def optimal_q_values(
    low: int, high: int, maximum: int, gamma: float = 1.0, guesses_left: int | None = None
) -> dict[int, float]:
    """
    Q*: the best expected return after each guess.

    Args:
        low, high (`int`):
            Smallest and largest number still possible.
        maximum (`int`):
            Largest number of the game. A guess that the answers rule out teaches nothing.
        gamma, guesses_left:
            As for [`optimal_value`].

    Returns:
        `dict[int, float]`: the value of each number of the game as a guess.
    """
    if not 1 <= low <= high <= maximum:
        raise ValueError(f"Needed are 1 <= low <= high <= maximum, got {low}, {high} and {maximum}.")
    if guesses_left is not None and guesses_left < 1:
        raise ValueError(f"`guesses_left` must be at least 1, or `None` for a game without limit, got {guesses_left}.")
    length = high - low + 1
    rest = None if guesses_left is None else guesses_left - 1
    values = [optimal_value(part, gamma, rest) for part in range(length + 1)]
    return {
        guess: _q_value(length, guess - low + 1, gamma, values)
        if low <= guess <= high
        else -1 + gamma * values[length]
        for guess in range(1, maximum + 1)
    }


@cache
def _values(length: int, gamma: float, guesses_left: int | None) -> list[float]:
    """The values of all lengths up to `length`."""
    if guesses_left == 0:
        return [0.0] * (length + 1)
    values = [0.0]
    # Without a limit the parts of an interval are valued by the list under way: they are shorter.
    rest = values if guesses_left is None else _values(length, gamma, guesses_left - 1)
    for whole in range(1, length + 1):
        values.append(max(_q_value(whole, guess, gamma, rest) for guess in range(1, whole + 1)))
    return values


def _q_value(length: int, guess: int, gamma: float, values: list[float]) -> float:
    """The value of the guess that is number `guess` of the `length` possible ones."""
    return sum(part / length * (-1 + gamma * values[part]) for part in (guess - 1, length - guess))


# The data


def make_dataset(
    num_episodes: int = 1000,
    seed: int = 0,
    *,
    maximum: int = 16,
    max_guesses: int | None = None,
    bisection_probability: float = 0.5,
) -> list[dict[str, Any]]:
    """
    Plays episodes by a policy that halves what is possible in some guesses and guesses any number in the others.

    Args:
        num_episodes (`int`, *optional*, defaults to 1000):
            Number of episodes.
        seed (`int`, *optional*, defaults to 0):
            Seed.
        maximum, max_guesses:
            As for [`GuessNumberEnv`].
        bisection_probability (`float`, *optional*, defaults to 0.5):
            Probability of the middle of what is possible as the guess.

    Returns:
        `list[dict]`: rows as of [`~hf_qrl.environments.games.episodes.play_episode`].
    """
    rng = random.Random(seed)
    env = GuessNumberEnv(maximum, max_guesses)

    def act() -> str:
        bisects = rng.random() < bisection_probability
        return f"{(env.low + env.high) // 2 if bisects else rng.randint(1, maximum)}\n"

    return [play_episode(env, act, seed=draw_seed(rng)) for _ in range(num_episodes)]
