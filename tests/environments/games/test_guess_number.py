# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""Guess the number: the dynamic program against a search over the hidden numbers themselves."""

from collections import Counter
from functools import cache

import numpy as np
import pytest

from hf_qrl.environments.games.guess_number import GuessNumberEnv, make_dataset, optimal_q_values, optimal_value


def brute_force(numbers, gamma, guesses_left):
    """Best expected return of guessing one of `numbers`, by the answers each of them would give."""

    @cache
    def best(possible, left):
        if not possible or left == 0:
            return 0.0
        totals = []
        for guess in possible:
            answers = {}
            for hidden in possible:
                if hidden != guess:
                    answers.setdefault(hidden > guess, []).append(hidden)
            totals.append(
                sum(
                    len(part) * (-1 + gamma * best(tuple(part), None if left is None else left - 1))
                    for part in answers.values()
                )
            )
        return max(totals) / len(possible)

    return best(tuple(numbers), guesses_left)


class TestGame:
    def test_answers(self):
        env = GuessNumberEnv(maximum=10)
        assert env.reset(seed=0, options={"hidden": 7})[0] == "Guess a number between 1 and 10.\n"
        assert env.step("3\n") == (
            "higher\n", -1.0, False, False, {"low": 4, "high": 10, "success": False, "invalid_action": False},
        )  # fmt: skip
        assert env.step(" 9 ")[0] == "lower\n" and (env.low, env.high) == (4, 8)
        assert env.step("1")[0] == "higher\n" and (env.low, env.high) == (4, 8)  # known before
        assert env.step("10")[0] == "lower\n" and (env.low, env.high) == (4, 8)
        assert env.step("7\n")[:4] == ("correct\n", 0.0, True, False)
        with pytest.raises(RuntimeError, match="call `reset`"):
            env.step("7\n")

    @pytest.mark.parametrize("text", ["0", "11", "-3", "7.0", "seven", "", "7 7", "٧"])
    def test_invalid(self, text):
        env = GuessNumberEnv(maximum=10)
        env.reset(seed=0, options={"hidden": 7})
        answer, reward, terminated, _, info = env.step(text)
        assert (answer, reward, terminated) == ("invalid\n", -1.0, False)
        assert info == {"low": 1, "high": 10, "success": False, "invalid_action": True}

    def test_limit(self):
        env = GuessNumberEnv(maximum=10, max_guesses=2)
        env.reset(seed=0, options={"hidden": 7})
        assert env.step("6")[2:4] == (False, False)
        assert env.step("8")[:4] == ("lower\n", -1.0, True, False)

    def test_hidden_number_is_uniform(self):
        env = GuessNumberEnv(maximum=4)
        counts = Counter()
        for seed in range(4000):
            env.reset(seed=seed)
            counts[next(n for n in range(1, 5) if env.step(str(n))[2])] += 1
        assert set(counts) == {1, 2, 3, 4} and max(abs(n - 1000) for n in counts.values()) < 5 * 28

    def test_errors(self):
        with pytest.raises(ValueError, match="at least 1"):
            GuessNumberEnv(maximum=0)
        with pytest.raises(ValueError, match="between 1 and 16"):
            GuessNumberEnv().reset(seed=0, options={"hidden": 17})
        with pytest.raises(ValueError, match="low <= high"):
            optimal_q_values(3, 2, 5)
        with pytest.raises(ValueError, match="`guesses_left` must be at least 1"):
            optimal_q_values(1, 2, 5, guesses_left=0)


class TestExactValues:
    @pytest.mark.parametrize("gamma", [1.0, 0.9, 0.3])
    @pytest.mark.parametrize("guesses_left", [None, 1, 2, 3, 5])
    def test_brute_force_agrees(self, gamma, guesses_left):
        for low, high in [(1, 1), (1, 2), (3, 7), (1, 9), (2, 12)]:
            numbers = range(low, high + 1)
            expected = brute_force(numbers, gamma, guesses_left)
            assert optimal_value(len(numbers), gamma, guesses_left) == pytest.approx(expected)
            q_values = optimal_q_values(low, high, 12, gamma, guesses_left)
            assert list(q_values) == list(range(1, 13))
            assert max(q_values.values()) == pytest.approx(expected)

    @pytest.mark.parametrize("guesses_left", [None, 1, 3])
    def test_q_of_each_guess(self, guesses_left):
        rest = None if guesses_left is None else guesses_left - 1
        for guess, value in optimal_q_values(3, 8, 10, 0.9, guesses_left).items():
            outcomes = []
            for hidden in range(3, 9):
                part = range(3, guess) if hidden < guess else range(guess + 1, 9)
                part = [n for n in range(3, 9) if n in part]
                outcomes.append(0.0 if hidden == guess else -1 + 0.9 * brute_force(part, 0.9, rest))
            assert value == pytest.approx(np.mean(outcomes))

    def test_halving(self):
        # A full tree of 15 numbers: 2 are found with the second guess, 4 with the third, 8 with the fourth.
        assert optimal_value(15) == pytest.approx(-(2 * 1 + 4 * 2 + 8 * 3) / 15)
        q_values = optimal_q_values(1, 15, 15)
        assert max(q_values, key=q_values.get) == 8

    def test_long_ranges(self):
        assert -7 < optimal_value(200) < -5
        assert optimal_value(200, guesses_left=1000) == pytest.approx(optimal_value(200))

    def test_best_play_returns_the_value(self):
        env = GuessNumberEnv(maximum=13)
        returns = []
        for hidden in range(1, 14):
            env.reset(seed=0, options={"hidden": hidden})
            total, over = 0.0, False
            while not over:
                q_values = optimal_q_values(env.low, env.high, 13)
                _, reward, over, *_ = env.step(str(max(q_values, key=q_values.get)))
                total += reward
            returns.append(total)
        assert np.mean(returns) == pytest.approx(optimal_value(13))


def test_data_holds_every_guess_and_is_not_optimal():
    episodes = make_dataset(500)
    guesses = {message["content"] for episode in episodes for message in episode["messages"][1::2]}
    assert guesses == {f"{number}\n" for number in range(1, 17)}
    assert -6 < np.mean([episode["return"] for episode in episodes]) < optimal_value(16) - 1
