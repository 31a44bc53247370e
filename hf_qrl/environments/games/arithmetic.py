# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""Arithmetic: one question, one answer, and a verifier. The smallest task there is, and its values are known."""

import operator
import random
import re
from collections.abc import Sequence
from typing import Any

from ..text_env import TextEnv
from .episodes import draw_seed, play_episode


_OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
_NUMBER = r"\s*-?[0-9]{1,18}\s*"


# The task


class ArithmeticEnv(TextEnv):
    """
    Answer a question such as `"What is 3 + 4?\\n"`.

    The right number earns 1, everything else 0. Blanks and newlines around the number do not matter.

    Args:
        maximum (`int`, *optional*, defaults to 9):
            Largest operand; the smallest is 0.
        operations (`Sequence[str]`, *optional*, defaults to `("+", "-", "*")`):
            Operations that come up.
    """

    stop_strings = ["\n"]

    def __init__(self, maximum: int = 9, operations: Sequence[str] = ("+", "-", "*")):
        if maximum < 0:
            raise ValueError(f"`maximum` must be at least 0, got {maximum}.")
        if not operations or not set(operations) <= set(_OPERATIONS):
            raise ValueError(f"`operations` must be some of {', '.join(_OPERATIONS)}, got {operations!r}.")
        self.maximum = maximum
        self.operations = tuple(operations)
        self.question: str | None = None

    def reset(self, *, seed: int, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Asks a question."""
        rng = random.Random(seed)
        left, right = rng.randint(0, self.maximum), rng.randint(0, self.maximum)
        self.question = f"What is {left} {rng.choice(self.operations)} {right}?\n"
        return self.question, {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Verifies the answer."""
        if self.question is None:
            raise RuntimeError("There is no episode under way: call `reset` before `step`.")
        reward = q_value(self.question, action)
        invalid = re.fullmatch(_NUMBER, action) is None
        text = "Right.\n" if reward else f"Wrong, it is {solve(self.question)}.\n"
        self.question = None
        return text, reward, True, False, {"success": bool(reward), "invalid_action": invalid}


def solve(question: str) -> int:
    """The answer to a question of [`ArithmeticEnv`]."""
    match = re.fullmatch(r"What is ([0-9]+) ([-+*]) ([0-9]+)\?\s*", question)
    if match is None:
        raise ValueError(f"A question reads like 'What is 3 + 4?', got {question!r}.")
    left, operation, right = match.groups()
    return _OPERATIONS[operation](int(left), int(right))


def q_value(question: str, answer: str) -> float:
    """Q of an answer, the same for every policy: 1 if it is right, else 0."""
    return float(re.fullmatch(_NUMBER, answer) is not None and int(answer) == solve(question))


# The data


def make_dataset(
    num_episodes: int = 1000,
    seed: int = 0,
    *,
    maximum: int = 9,
    operations: Sequence[str] = ("+", "-", "*"),
    right_probability: float = 0.5,
) -> list[dict[str, Any]]:
    """
    Answers questions, some of them rightly.

    Args:
        num_episodes (`int`, *optional*, defaults to 1000):
            Number of questions.
        seed (`int`, *optional*, defaults to 0):
            Seed.
        maximum, operations:
            As for [`ArithmeticEnv`].
        right_probability (`float`, *optional*, defaults to 0.5):
            Probability of the right answer; a wrong one is off by 1 to 5.

    Returns:
        `list[dict]`: rows as of [`~hf_qrl.environments.games.episodes.play_episode`].
    """
    rng = random.Random(seed)
    env = ArithmeticEnv(maximum, operations)

    def act() -> str:
        assert env.question is not None
        error = 0 if rng.random() < right_probability else rng.choice([-5, -4, -3, -2, -1, 1, 2, 3, 4, 5])
        return f"{solve(env.question) + error}\n"

    return [play_episode(env, act, seed=draw_seed(rng)) for _ in range(num_episodes)]
