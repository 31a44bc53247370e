# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""The data of the maze: confined, mixed as stated, and enough to be stitched to the optimum."""

from collections import Counter

import numpy as np
import pytest

from hf_qrl.environments.games.maze import GOAL, STARTS, MazeEnv, optimal_directions, optimal_values, policy_returns
from hf_qrl.environments.games.maze_data import SUBMAZES, make_dataset


@pytest.fixture(scope="module")
def episodes():
    return make_dataset()


def trace(episode):
    """The cells an episode visits and the directions it takes, read off its text."""
    observations = [message["content"] for message in episode["messages"] if message["role"] == "user"]
    cells = []
    for text in observations[:-1]:
        row, column = text.split("Your current position is at position ")[1].split(".")[0].split(", ")
        cells.append((int(row.replace(" ", "")), int(column.replace(" ", ""))))
    actions = [message["content"] for message in episode["messages"] if message["role"] == "assistant"]
    return cells, [action.removeprefix("move ").removesuffix("\n") for action in actions], observations[-1]


@pytest.fixture(scope="module")
def traces(episodes):
    return [trace(episode) for episode in episodes]


class TestSubmazes:
    def test_cover_the_maze_and_meet_at_the_feet_of_the_ts(self):
        left, right, bar = SUBMAZES
        assert left | right | bar == {*STARTS, GOAL}
        assert (left & right, left & bar, right & bar) == (set(), {(4, 3)}, {(4, 9)})
        assert [GOAL in submaze for submaze in SUBMAZES] == [False, False, True]


class TestData:
    def test_size_and_mean(self, episodes):
        assert len(episodes) == 1240
        returns = [episode["return"] for episode in episodes]
        # Published is -83. Two thirds return -101, the others scatter by 35: the mean has a standard error of 0.6.
        assert np.mean(returns) == pytest.approx(-83, abs=1.5)
        assert all(episode["return"] == sum(episode["turn_rewards"]) for episode in episodes)

    def test_each_episode_stays_in_its_submaze(self, episodes, traces):
        counts = Counter(episode["submaze"] for episode in episodes)
        assert counts == {0: 414, 1: 413, 2: 413}
        for episode, (cells, _, _) in zip(episodes, traces, strict=True):
            assert set(cells) <= SUBMAZES[episode["submaze"]]
            assert list(cells[0]) == episode["start"]

    def test_only_one_submaze_reaches_the_goal(self, episodes, traces):
        ends = Counter((episode["submaze"], end) for episode, (_, _, end) in zip(episodes, traces, strict=True))
        assert set(ends) == {(0, "Failure\n"), (1, "Failure\n"), (2, "Success\n"), (2, "Failure\n")}
        assert ends[2, "Success\n"] > 300
        for episode, (_, _, end) in zip(episodes, traces, strict=True):
            assert episode["terminated"] and not episode["truncated"]
            assert end == "Success\n" or episode["return"] == -101

    def test_starts_are_uniform_in_their_submaze(self, episodes):
        for number, submaze in enumerate(SUBMAZES):
            starts = Counter(tuple(episode["start"]) for episode in episodes if episode["submaze"] == number)
            assert set(starts) == submaze - {GOAL}
            mean = starts.total() / len(starts)
            assert max(abs(count - mean) for count in starts.values()) < 5 * mean**0.5

    def test_action_mix(self, traces):
        """Where no direction leaves the sub-maze, that of the shortest way has 0.85 / 4 + 0.15 (1/2 + 1/8)."""
        best = optimal_directions()
        taken, optimal = Counter(), Counter()
        for cells, directions, _ in traces:
            for cell, direction in list(zip(cells, directions, strict=True))[:100]:
                if cell not in {(4, 3), (4, 9), (5, 6)}:  # the feet are left, the middle has two ways up
                    taken[direction] += 1
                    optimal[direction in best[cell]] += 1
        share = optimal[True] / optimal.total()
        error = (0.31 * 0.69 / optimal.total()) ** 0.5
        assert share == pytest.approx(0.30625, abs=5 * error)
        assert set(taken) == {"left", "right", "up", "down"}

    def test_every_action_is_seen_in_every_cell(self, traces):
        seen = Counter(pair for cells, directions, _ in traces for pair in zip(cells, directions, strict=True))
        assert len(seen) == 25 * 4
        assert min(seen.values()) >= 100

    @pytest.mark.parametrize("gamma", [0.9, 0.97])
    def test_stitching_gives_the_optimum(self, traces, gamma):
        """Value iteration on the transitions of the data, lost games included, finds a way from everywhere."""
        targets = {}
        for cells, directions, end in traces:
            after = [*cells[1:], GOAL if end == "Success\n" else "lost"]
            for cell, direction, target in zip(cells, directions, after, strict=True):
                targets.setdefault((cell, direction), Counter())[target] += 1
        q_values = dict.fromkeys(targets, 0.0)
        for _ in range(300):
            values = {cell: max(q_values[cell, d] for d in ("left", "right", "up", "down")) for cell in STARTS}
            values |= {GOAL: 0.0, "lost": 0.0}
            q_values = {
                pair: sum(n * (gamma * values[t] - (t != GOAL)) for t, n in counts.items()) / counts.total()
                for pair, counts in targets.items()
            }
        policy = {
            cell: {max(("left", "right", "up", "down"), key=lambda d, cell=cell: q_values[cell, d]): 1.0}
            for cell in STARTS
        }
        assert policy_returns(policy) == {start: pytest.approx(optimal_values()[start]) for start in STARTS}

    def test_no_episode_shows_a_way_from_a_t_to_the_goal(self, traces):
        for cells, _, end in traces:
            if end == "Success\n":
                assert all(row >= 4 for row, _ in cells)


class TestVariants:
    @pytest.mark.parametrize("options", [{"partially_observed": True}, {"one_token_actions": True}])
    def test_same_moves_in_other_words(self, episodes, options):
        other = make_dataset(60, **options)
        for episode, variant in zip(episodes, other, strict=False):
            for key in ("turn_rewards", "start", "submaze", "seed"):
                assert variant[key] == episode[key]
            for message, changed in zip(episode["messages"], variant["messages"], strict=True):
                if message["role"] == "assistant":
                    short = message["content"][5] if options.get("one_token_actions") else message["content"]
                    assert changed["content"] == short
                elif "partially_observed" in options:
                    assert message["content"].endswith(changed["content"])
                    assert "position" not in changed["content"]

    def test_replay(self, episodes):
        env = MazeEnv()
        for episode in episodes[:9]:
            texts = [env.reset(seed=episode["seed"], options={"start": episode["start"]})[0]]
            for message in episode["messages"]:
                if message["role"] == "assistant":
                    texts.append(env.step(message["content"])[0])
            assert texts == [message["content"] for message in episode["messages"] if message["role"] == "user"]
