# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""Wordle: hints by hand, the consistent words by brute force, and the published returns of two scripted policies."""

import random
from collections import Counter

import numpy as np
import pytest

from hf_qrl.environments.games.wordle import (
    WordleEnv,
    consistent_words,
    expected_return,
    hint,
    information_gain_policy,
    make_dataset,
    spell,
)
from hf_qrl.environments.games.wordle_words import WORDS


def test_words():
    assert len(WORDS) == len(set(WORDS)) == 400
    assert all(len(word) == 5 and word.isascii() and word.isalpha() and word.islower() for word in WORDS)
    assert list(WORDS) == sorted(WORDS)


class TestHints:
    @pytest.mark.parametrize(
        "guess, word, colors",
        [
            ("stare", "stare", "ggggg"),
            ("stare", "could", "bbbbb"),
            ("stare", "light", "bybbb"),
            ("crane", "nerve", "bybyg"),
            # Every repeat of a letter of the word is yellow, also the one too many.
            ("eerie", "three", "yygbg"),
            ("sleep", "three", "bbygb"),
            ("added", "dread", "yyyyg"),
            ("llama", "label", "gyyby"),
        ],
    )
    def test_by_hand(self, guess, word, colors):
        assert hint(guess, word) == colors

    def test_letter_constraints_agree(self):
        """The state of the original: for every letter where it can be and whether it must be somewhere."""
        rng = random.Random(0)
        for _ in range(200):
            word = rng.choice(WORDS)
            guesses = rng.sample(WORDS, rng.randint(1, 3))
            fixed, banned, present, absent = {}, set(), set(), set()
            for guess in guesses:
                for place, letter in enumerate(guess):
                    if word[place] == letter:
                        fixed[place] = letter
                    elif letter in word:
                        banned.add((place, letter))
                        present.add(letter)
                    else:
                        absent.add(letter)
            expected = [
                other
                for other in WORDS
                if all(other[place] == letter for place, letter in fixed.items())
                and not any(other[place] == letter for place, letter in banned)
                and present <= set(other)
                and not absent & set(other)
            ]
            assert consistent_words([(guess, hint(guess, word)) for guess in guesses]) == expected
            assert word in expected


class TestGame:
    def test_text(self):
        env = WordleEnv(["stare", "stars"])
        assert env.reset(seed=0) == ("Wordle:\n", {"num_consistent": 2})
        text, reward, terminated, truncated, info = env.step("s t a r e\n")
        while reward:  # of two words one guess leaves one
            assert text == "g g g g b\n" and not terminated
            text, reward, terminated, truncated, info = env.step("s t a r s\n")
        assert (text, reward, terminated, truncated) == ("g g g g g\n", 0.0, True, False)
        assert info == {"num_consistent": 1, "success": True, "invalid_action": False}
        with pytest.raises(RuntimeError, match="call `reset`"):
            env.step("s t a r e\n")

    @pytest.mark.parametrize(
        "guess", ["z z z z z\n", "stare\n", "s t a r\n", "", "\n", "s  t a r e\n", "s t a r e x\n"]
    )
    def test_invalid_guess(self, guess):
        env = WordleEnv(["stare", "crane"])
        env.reset(seed=0)
        text, reward, terminated, _, info = env.step(guess)
        assert (text, reward, terminated) == ("\n", -1.0, False)
        assert info == {"num_consistent": 2, "success": False, "invalid_action": True}

    def test_six_guesses(self):
        env = WordleEnv()
        env.reset(seed=0)
        ends = [env.step("n o n e\n")[1:4] for _ in range(6)]
        assert ends == [(-1.0, False, False)] * 5 + [(-1.0, True, False)]

    def test_the_word_is_uniform_over_the_consistent_ones_at_every_guess(self):
        env = WordleEnv(["house", "light", "fight", "right"])
        replies = Counter()
        for seed in range(4000):
            env.reset(seed=seed)
            first = env.step("h o u s e\n")[0]
            replies[first] += 1
            if first == "y b b b b\n":
                assert env.consistent == ["light", "fight", "right"]
                replies[env.step("l i g h t\n")[0]] += 1
        expected = {"g g g g g\n": 1000 + 1000, "y b b b b\n": 3000, "b g g g g\n": 2000}
        assert set(replies) == set(expected)
        assert all(abs(replies[reply] - count) < 5 * 35 for reply, count in expected.items())

    def test_a_reset_forgets(self):
        env = WordleEnv()
        env.reset(seed=1)
        first = [env.step(spell(word)) for word in ("house", "light", "brand")]
        env.reset(seed=1)
        assert [env.step(spell(word)) for word in ("house", "light", "brand")] == first

    def test_legal_actions(self):
        assert WordleEnv(["stare"]).legal_actions() == ["s t a r e\n"]

    @pytest.mark.parametrize("words", [[], ["four"], ["stare", "stare"]])
    def test_wrong_words(self, words):
        with pytest.raises(ValueError, match="different words of five letters"):
            WordleEnv(words)


class TestPolicies:
    def test_information_gain_by_brute_force(self):
        words = WORDS[::10]
        policy = information_gain_policy(words)
        rng = random.Random(0)
        for _ in range(20):
            consistent = sorted(rng.sample(words, rng.randint(1, 20)))
            entropy = {}
            for guess in words:
                counts = np.array(list(Counter(hint(guess, word) for word in consistent).values())) / len(consistent)
                entropy[guess] = -(counts * np.log(counts)).sum()
            best = max(entropy.values())
            guesses = [word for word in words if entropy[word] > best - 1e-12]
            assert policy(consistent) in ([word for word in guesses if word in consistent] or guesses)

    def test_information_gain_is_as_good_as_published(self):
        # Published is -1.94 for another, longer list: 431 words are log2(431 / 400) = 0.11 bits more to find out.
        assert expected_return(information_gain_policy()) == pytest.approx(-1.94, abs=0.15)

    def test_expected_return_by_sampling(self):
        words = WORDS[::8]
        env, policy = WordleEnv(words), information_gain_policy(words)
        returns = []
        for seed in range(2000):
            env.reset(seed=seed)
            total, over = 0.0, False
            while not over:
                _, reward, over, *_ = env.step(spell(policy(env.consistent)))
                total += reward
            returns.append(total)
        error = np.std(returns) / len(returns) ** 0.5
        assert np.mean(returns) == pytest.approx(expected_return(policy, words), abs=4 * error)

    def test_expected_return_of_a_hopeless_policy(self):
        # It wins only if the word is the first, with the first guess.
        assert expected_return(lambda _: WORDS[0]) == pytest.approx(-6 * 399 / 400)


class TestData:
    def test_mean_is_the_published_one(self):
        returns = [episode["return"] for episode in make_dataset(1500)]
        # Published is -4.12 for another list; the returns scatter by 1.6, so the standard error is 0.04.
        assert np.mean(returns) == pytest.approx(-4.12, abs=0.15)
        assert min(returns) == -6 and max(returns) == 0

    def test_every_guess_is_a_word(self):
        for episode in make_dataset(50):
            assert all(m["content"][:-1].replace(" ", "") in WORDS for m in episode["messages"][1::2])
