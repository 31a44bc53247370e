# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""The maze against its published facts, a map drawn by hand, and value iteration on that map."""

import random

import numpy as np
import pytest

from hf_qrl.environments.games.maze import (
    DIRECTIONS,
    GOAL,
    STARTS,
    MazeEnv,
    action_text,
    distances,
    move,
    optimal_directions,
    optimal_q_values,
    optimal_values,
    policy_returns,
)


MAP = """
#############
#     #     #
### ##### ###
### ##### ###
### ##### ###
###       ###
###### ######
###### ######
######G######
#############
""".strip().split("\n")
STEPS = {"left": (0, -1), "right": (0, 1), "up": (-1, 0), "down": (1, 0)}
FREE = {(row, column) for row, line in enumerate(MAP) for column, sign in enumerate(line) if sign != "#"}


def walk(cell, direction):
    target = (cell[0] + STEPS[direction][0], cell[1] + STEPS[direction][1])
    return target if MAP[target[0]][target[1]] != "#" else cell


def value_iteration(gamma):
    values = dict.fromkeys(FREE, 0.0)
    for _ in range(200):
        values = {
            cell: 0.0
            if cell == (8, 6)
            else max(0.0 if walk(cell, d) == (8, 6) else -1 + gamma * values[walk(cell, d)] for d in STEPS)
            for cell in FREE
        }
    return values


def play(env, actions, **kwargs):
    """All that the environment says, and the rewards."""
    texts, rewards = [env.reset(seed=0, **kwargs)[0]], []
    for action in actions:
        text, reward, terminated, truncated, info = env.step(action)
        texts.append(text)
        rewards.append(reward)
    return texts, rewards, terminated, truncated, info


class TestMap:
    def test_is_the_published_one(self):
        assert len(MAP) == 10 and {len(line) for line in MAP} == {13}
        assert len(STARTS) == 25 and {*STARTS, GOAL} == FREE and GOAL == (8, 6)
        assert all(move(cell, direction) == walk(cell, direction) for cell in FREE for direction in STEPS)

    def test_published_facts(self):
        lengths = [distances()[start] for start in STARTS]
        assert np.mean(lengths) == pytest.approx(7.84)
        assert max(lengths) == 12
        assert np.mean([optimal_values()[start] for start in STARTS]) == pytest.approx(-6.84)


class TestExactValues:
    @pytest.mark.parametrize("gamma", [1.0, 0.99, 0.9, 0.0])
    def test_value_iteration_agrees(self, gamma):
        expected = value_iteration(gamma)
        values, q_values = optimal_values(gamma), optimal_q_values(gamma)
        assert values == pytest.approx(expected)
        for start in STARTS:
            for direction in STEPS:
                target = walk(start, direction)
                reward = 0 if target == GOAL else -1
                assert q_values[start][direction] == pytest.approx(reward + gamma * expected[target])

    def test_optimal_directions_are_the_best_by_value(self):
        q_values = optimal_q_values()
        for start, directions in optimal_directions().items():
            best = max(q_values[start].values())
            assert set(directions) == {d for d in STEPS if q_values[start][d] == pytest.approx(best)}

    def test_optimal_policy_returns(self):
        policy = {cell: {directions[0]: 1.0} for cell, directions in optimal_directions().items()}
        assert policy_returns(policy) == pytest.approx({start: optimal_values()[start] for start in STARTS})

    def test_worst_policies(self):
        assert set(policy_returns({cell: {"up": 1.0} for cell in STARTS}).values()) == {-101.0}
        assert set(policy_returns({cell: {} for cell in STARTS}).values()) == {-401.0}

    def test_random_policy_agrees_with_play(self):
        chances = {"left": 0.2, "right": 0.2, "up": 0.1, "down": 0.4}  # and one text in ten is no action
        returns = policy_returns(dict.fromkeys(STARTS, chances))
        rng = random.Random(0)
        texts = [action_text(direction) for direction in chances] + ["sing"]
        played = []
        for _ in range(2000):
            env = MazeEnv(start=(7, 6))
            env.reset(seed=0)
            total, over = 0.0, False
            while not over:
                _, reward, over, _, _ = env.step(rng.choices(texts, [*chances.values(), 0.1])[0])
                total += reward
            played.append(total)
        error = np.std(played) / len(played) ** 0.5
        assert np.mean(played) == pytest.approx(returns[7, 6], abs=4 * error)


class TestGame:
    def test_starts_are_uniform_over_the_cells_but_the_goal(self):
        env = MazeEnv()
        starts = [env.reset(seed=seed)[1]["position"] for seed in range(5000)]
        assert set(starts) == set(STARTS)
        assert max(starts.count(start) for start in STARTS) < 200 + 5 * 200**0.5

    def test_start_can_be_chosen(self):
        assert MazeEnv(start=(1, 1)).reset(seed=3)[1]["position"] == (1, 1)
        assert MazeEnv(start=(1, 1)).reset(seed=3, options={"start": [5, 6]})[1]["position"] == (5, 6)
        for wrong in [(8, 6), (0, 0), (1, 6), (1,)]:
            with pytest.raises(ValueError, match="one of the 25 free cells"):
                MazeEnv(start=wrong)
            with pytest.raises(ValueError, match="one of the 25 free cells"):
                MazeEnv().reset(seed=0, options={"start": wrong})

    @pytest.mark.parametrize(
        "cell, text",
        [
            ((1, 1), "1, 1. There are walls to your left, above you, below you.\n"),
            ((1, 3), "1, 3. There is a wall above you.\n"),
            ((1, 1 + 10), "1, 1 1. There are walls to your right, above you, below you.\n"),
            ((1, 1 + 9), "1, 1 0. There are walls above you, below you.\n"),
            ((3, 9), "3, 9. There are walls to your right, to your left.\n"),
            ((5, 6), "5, 6. There is a wall above you.\n"),
            ((5, 3), "5, 3. There are walls to your left, below you.\n"),
            ((7, 6), "7, 6. There are walls to your right, to your left.\n"),
        ],
    )
    def test_observation(self, cell, text):
        full = MazeEnv(start=cell).reset(seed=0)[0]
        assert full == "The goal is at position 8, 6. Your current position is at position " + text
        partial = MazeEnv(partially_observed=True, start=cell).reset(seed=0)[0]
        assert partial == text.split(". ")[1]

    def test_seven_partial_observations(self):
        env = MazeEnv(partially_observed=True)
        assert len({env.reset(seed=0, options={"start": start})[0] for start in STARTS}) == 7

    def test_wall_and_nonsense_do_not_move(self):
        texts, rewards, terminated, truncated, info = play(
            MazeEnv(start=(1, 1)), ["move up\n", "move left", "left\n", "", " move right\n", "MOVE RIGHT\n", "r"]
        )
        assert set(texts) == {texts[0]}
        assert rewards == [-1, -4, -4, -4, -4, -4, -4]
        assert not terminated and not truncated
        assert info == {"position": (1, 1), "success": False, "invalid_action": True}

    def test_goal(self):
        texts, rewards, terminated, truncated, info = play(MazeEnv(start=(6, 6)), ["move down\n", "move down\n"])
        assert texts[-1] == "Success\n" and rewards == [-1, 0]
        assert terminated and not truncated and info["success"]

    def test_failure_after_100_moves(self):
        env = MazeEnv(start=(7, 6))
        _, rewards, terminated, *_ = play(env, ["move up\n", "move down\n"] * 50)
        assert not terminated and env.position == (7, 6)
        text, reward, terminated, truncated, info = env.step("move down\n")
        # The goal was one step away, but the 101st action is not carried out.
        assert (text, reward, terminated, truncated) == ("Failure\n", -1, True, False)
        assert info["position"] == (7, 6) and not info["success"]
        assert sum(rewards) + reward == -101
        with pytest.raises(RuntimeError, match="call `reset`"):
            env.step("move up\n")

    def test_the_hundredth_move_may_reach_the_goal(self):
        texts, rewards, terminated, *_ = play(MazeEnv(start=(7, 6)), ["move left\n"] * 99 + ["move down\n"])
        assert terminated and texts[-1] == "Success\n" and sum(rewards) == -99

    def test_one_token_actions(self):
        env = MazeEnv(one_token_actions=True, start=(1, 1))
        assert env.legal_actions() == ["r", "l", "u", "d"] == env.stop_strings
        texts, rewards, *_ = play(env, ["r", "r", "d", "move right\n"])
        assert rewards == [-1, -1, -1, -4]
        assert "position 2, 3." in texts[-1]

    def test_textual_actions(self):
        env = MazeEnv()
        assert env.legal_actions() == ["move right\n", "move left\n", "move up\n", "move down\n"]
        assert [action_text(direction) for direction in DIRECTIONS] == env.legal_actions()
        assert env.stop_strings == ["\n"]

    def test_history(self):
        actions = ["move right\n"] * 2 + ["sing"] + ["move down\n"] * 40
        plain, *_ = play(MazeEnv(partially_observed=True, start=(1, 1)), actions)
        texts = [plain[0]]
        for action, text in zip(actions, plain[1:], strict=True):
            texts += [action, text]
        seen, *_ = play(MazeEnv(partially_observed=True, history_length=40, start=(1, 1)), actions)
        assert seen == ["".join(texts[max(0, 2 * turn + 1 - 40) : 2 * turn + 1]) for turn in range(len(seen))]
        with pytest.raises(ValueError, match="at least 1"):
            MazeEnv(history_length=0)

    def test_a_reset_forgets(self):
        env = MazeEnv(history_length=5, start=(1, 1))
        first = env.reset(seed=0)
        for _ in range(60):
            env.step("move up\n")
        assert env.reset(seed=0) == first
        _, _, terminated, *_ = play(env, ["move up\n"] * 100)
        assert not terminated
