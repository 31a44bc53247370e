# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""What holds for every game: episodes follow from seeds, and rows have the right shape."""

from functools import partial

import pytest
from datasets import Dataset

from hf_qrl.environments import replay
from hf_qrl.environments.games import (
    ArithmeticEnv,
    GuessNumberEnv,
    MazeEnv,
    RandomWalksEnv,
    SlidingPuzzleEnv,
    TextNavigationEnv,
    WordleEnv,
    arithmetic,
    guess_number,
    maze_data,
    random_walks,
    sliding_puzzle,
    text_navigation,
    wordle,
)


# Environment, and the generator of its data.
GAMES = {
    "maze": (MazeEnv, maze_data.make_dataset),
    "partially observed maze": (
        partial(MazeEnv, True, True, 5),
        partial(maze_data.make_dataset, partially_observed=True, one_token_actions=True, history_length=5),
    ),
    "text navigation": (TextNavigationEnv, text_navigation.make_dataset),
    "wordle": (WordleEnv, wordle.make_dataset),
    "guess the number": (GuessNumberEnv, guess_number.make_dataset),
    "sliding puzzle": (partial(SlidingPuzzleEnv, 2, 15, 20), sliding_puzzle.make_dataset),
    "arithmetic": (ArithmeticEnv, arithmetic.make_dataset),
    "random walks": (RandomWalksEnv, random_walks.make_dataset),
}


@pytest.fixture(params=GAMES)
def game(request):
    return GAMES[request.param]


class TestEveryGame:
    def test_rows(self, game):
        _, make_dataset = game
        rows = make_dataset(30)
        assert len(rows) == 30
        for row in rows:
            roles = [message["role"] for message in row["messages"]]
            actions = len(row["turn_rewards"])
            assert roles[: 2 * actions] == ["user", "assistant"] * actions
            assert roles[2 * actions :] in (["user"], [])  # nothing where the game has nothing to say at its end
            assert all(set(message) == {"role", "content"} for message in row["messages"])
            assert row["return"] == sum(row["turn_rewards"])
            assert row["terminated"] is True and row["truncated"] is False
            assert 0 <= row["seed"] < 2**30  # those of the training split
        dataset = Dataset.from_list(rows)
        assert dataset.to_list() == rows

    def test_same_seed_same_data(self, game):
        _, make_dataset = game
        assert make_dataset(20, 5) == make_dataset(20, seed=5)
        assert make_dataset(20, 5) != make_dataset(20, 6)
        assert make_dataset(5, 5) == make_dataset(20, 5)[:5]

    def test_replay(self, game):
        make_env, make_dataset = game
        env = make_env()  # one for all episodes: a reset leaves nothing behind
        for row in make_dataset(10):
            options = {"start": row["start"]} if "start" in row else None
            actions = [message["content"] for message in row["messages"] if message["role"] == "assistant"]
            again = replay(env, row["seed"], actions, options=options)
            assert (again.messages, again.rewards) == (row["messages"], row["turn_rewards"])
            assert again.terminated and not again.truncated

    def test_a_reset_in_the_middle(self, game):
        make_env, make_dataset = game
        env, other = make_env(), make_env()
        for seed in range(5):
            env.reset(seed=seed)
            env.step("nonsense")
            assert env.reset(seed=seed + 1) == other.reset(seed=seed + 1)

    def test_seeds_differ(self, game):
        make_env, _ = game
        env = make_env()
        starts = set()
        for seed in range(20):
            first = env.reset(seed=seed)[0]
            actions = env.legal_actions() or ["1"]
            reply = env.step(actions[len(actions) // 2])[0]
            starts.add(f"{first} {reply}")
        assert len(starts) > 1

    def test_legal_actions_are_legal(self, game):
        make_env, _ = game
        env = make_env()
        env.reset(seed=0)
        for action in env.legal_actions() or []:
            env.reset(seed=0)
            assert not env.step(action)[4]["invalid_action"]

    def test_nothing_without_a_reset(self, game):
        make_env, _ = game
        with pytest.raises(RuntimeError, match="call `reset`"):
            make_env().step("1")

    def test_stop_strings_end_the_actions(self, game):
        make_env, make_dataset = game
        stop_strings = make_env().stop_strings
        if stop_strings:
            for row in make_dataset(5):
                actions = [message["content"] for message in row["messages"] if message["role"] == "assistant"]
                assert all(action.endswith(tuple(stop_strings)) for action in actions)
