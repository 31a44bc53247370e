# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""The sliding puzzle: known numbers of boards, the parity of the scramble, and values by value iteration."""

import itertools

import numpy as np
import pytest

from hf_qrl.environments.games.sliding_puzzle import (
    SlidingPuzzleEnv,
    action_text,
    best_directions,
    describe,
    distances,
    make_dataset,
    neighbours,
    optimal_q_values,
    optimal_value,
    solved_board,
)


def inversions(board):
    tiles = [tile for tile in board if tile]
    return sum(one > other for one, other in itertools.combinations(tiles, 2))


def start_at(env, board):
    env.reset(seed=0)
    env.board = board
    return env


class TestBoards:
    def test_size_two(self):
        lengths = distances(2)
        assert len(lengths) == 12 and max(lengths.values()) == 6

    @pytest.mark.slow
    def test_size_three(self):
        lengths = distances(3)
        assert len(lengths) == 181_440 and max(lengths.values()) == 31
        # On boards of odd width the reachable half are those with an even number of inversions.
        assert all(inversions(board) % 2 == 0 for board in itertools.islice(lengths, 0, None, 100))

    def test_larger_boards_are_not_searched(self):
        with pytest.raises(ValueError, match="size 2 and 3"):
            distances(4)
        with pytest.raises(ValueError, match="cannot be solved"):
            optimal_value((2, 1, 3, 0))

    def test_text(self):
        assert describe(solved_board(3)) == "1 2 3\n4 5 6\n7 8 _"
        assert describe(solved_board(4)).split("\n")[2:] == [" 9 10 11 12", "13 14 15  _"]


class TestScramble:
    @pytest.mark.parametrize("size, moves", [(2, 1), (2, 15), (3, 1), (3, 7), (4, 9)])
    def test_is_odd_and_never_solved(self, size, moves):
        env = SlidingPuzzleEnv(size=size, scramble_moves=moves)
        boards = set()
        for seed in range(200):
            board = env.reset(seed=seed)[1]["board"]
            boards.add(board)
            row, column = divmod(board.index(0), size)
            assert (row + column) % 2 == 1  # the gap's home is on an even place
            assert board != solved_board(size)
            assert sorted(board) == list(range(size * size))
        assert len(boards) == 2 if moves == 1 else len(boards) > 2

    def test_size_two_reaches_every_odd_board(self):
        env = SlidingPuzzleEnv(size=2)
        starts = {env.reset(seed=seed)[1]["board"] for seed in range(300)}
        assert starts == {board for board, length in distances(2).items() if length % 2}

    @pytest.mark.parametrize("options", [{"size": 1}, {"scramble_moves": 4}, {"scramble_moves": -1}, {"max_turns": 0}])
    def test_errors(self, options):
        with pytest.raises(ValueError, match="must be"):
            SlidingPuzzleEnv(**options)


class TestGame:
    #   1 2 3
    #   4 _ 5
    #   6 7 8
    BOARD = (1, 2, 3, 4, 0, 5, 6, 7, 8)

    @pytest.mark.parametrize(
        "reply, board",
        [
            ("<action>up</action>", (1, 2, 3, 4, 7, 5, 6, 0, 8)),
            ("<action>down</action>", (1, 0, 3, 4, 2, 5, 6, 7, 8)),
            ("<action>left</action>", (1, 2, 3, 4, 5, 0, 6, 7, 8)),
            ("<action>right</action>", (1, 2, 3, 0, 4, 5, 6, 7, 8)),
            ("<action>slide 1 2</action>", (1, 0, 3, 4, 2, 5, 6, 7, 8)),
            ("<action>slide 2 3</action>", (1, 2, 3, 4, 5, 0, 6, 7, 8)),
            ("I would go <action>up</action>, no: <action> Left\n</action>", (1, 2, 3, 4, 5, 0, 6, 7, 8)),
            ("<action>view</action>", BOARD),
        ],
    )
    def test_actions(self, reply, board):
        env = start_at(SlidingPuzzleEnv(), self.BOARD)
        text, reward, terminated, truncated, info = env.step(reply)
        assert env.board == board
        assert text == describe(board) + "\n"
        assert (reward, terminated, truncated, info["invalid_action"]) == (0, False, False, False)

    @pytest.mark.parametrize(
        "reply",
        [
            "up",
            "",
            "<action>up",
            "<action>fly</action>",
            "<action>slide 1 1</action>",
            "<action>slide 2 2</action>",
            "<action>slide 0 9</action>",
            "<action>slide 1</action>",
            "<action>slide one two</action>",
            "<action>up</action><action>nothing</action>",
            "<action></action>",
        ],
    )
    def test_invalid_actions_count_as_turns(self, reply):
        env = start_at(SlidingPuzzleEnv(max_turns=2), self.BOARD)
        text, reward, terminated, _, info = env.step(reply)
        assert text == f"That is not possible.\n{describe(self.BOARD)}\n"
        assert (reward, terminated, info["invalid_action"]) == (0, False, True)
        assert env.step(reply)[2:4] == (True, False)

    def test_a_tile_beyond_the_edge(self):
        env = start_at(SlidingPuzzleEnv(size=2), (1, 2, 0, 3))
        assert env.legal_actions() == ["<action>down</action>", "<action>left</action>"]
        assert env.step("<action>up</action>")[4]["invalid_action"]

    def test_solved(self):
        env = start_at(SlidingPuzzleEnv(size=2, max_turns=1), (1, 2, 0, 3))
        text, reward, terminated, truncated, info = env.step("<action>left</action>")
        assert (text, reward, terminated, truncated) == ("Solved.\n1 2\n3 _\n", 1.0, True, False)
        assert info["success"]
        with pytest.raises(RuntimeError, match="call `reset`"):
            env.step("<action>left</action>")

    def test_slide_is_the_move_of_that_tile(self):
        rng = np.random.default_rng(0)
        for _ in range(50):
            board = tuple(int(tile) for tile in rng.permutation(9))
            for direction, target in neighbours(board).items():
                env = start_at(SlidingPuzzleEnv(), board)
                row, column = divmod(target.index(0), 3)
                env.step(f"<action>slide {row + 1} {column + 1}</action>")
                assert env.board in (target, None)
                gap_row, gap_column = divmod(board.index(0), 3)
                moved = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}[direction]
                assert (gap_row - row, gap_column - column) == moved


class TestExactValues:
    @pytest.mark.parametrize("gamma", [1.0, 0.8])
    def test_value_iteration_agrees(self, gamma):
        solved = solved_board(2)
        values = dict.fromkeys(distances(2), 0.0)
        for _ in range(20):
            values = {
                board: max(1.0 if b == solved else gamma * values[b] for b in neighbours(board).values())
                for board in values
            }
        for board, length in distances(2).items():
            if length:
                q_values = optimal_q_values(board, gamma)
                assert optimal_value(board, gamma) == pytest.approx(values[board])
                assert q_values == pytest.approx(
                    {d: 1.0 if b == solved else gamma * values[b] for d, b in neighbours(board).items()}
                )
                if gamma < 1:
                    best = max(q_values.values())
                    assert best_directions(board) == [d for d, value in q_values.items() if value == best]
        with pytest.raises(ValueError, match="is solved"):
            optimal_value(solved)


def test_data():
    episodes = make_dataset(300)
    assert 0.5 < np.mean([episode["return"] for episode in episodes]) < 1
    replies = {message["content"] for episode in episodes for message in episode["messages"][1::2]}
    assert replies == {action_text(direction) for direction in ("up", "down", "left", "right")}
    assert max(len(episode["turn_rewards"]) for episode in episodes) == 20
