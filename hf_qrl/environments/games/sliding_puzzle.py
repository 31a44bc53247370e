# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""The sliding puzzle: order the tiles by way of the gap, with exact values from a search of all boards."""

import random
import re
from collections import deque
from functools import cache
from typing import Any

from ..text_env import TextEnv
from .episodes import draw_seed, play_episode


# Row by row; 0 is the gap.
Board = tuple[int, ...]

# Where, seen from the gap, the tile is that moves in this direction.
_TILES = {"up": (1, 0), "down": (-1, 0), "left": (0, 1), "right": (0, -1)}
DIRECTIONS = tuple(_TILES)


# The board


def solved_board(size: int) -> Board:
    """The goal: all tiles in order and the gap last."""
    return (*range(1, size * size), 0)


def neighbours(board: Board) -> dict[str, Board]:
    """The moves that a board allows, named by the direction in which a tile moves, and the boards they lead to."""
    size = _size(board)
    gap = board.index(0)
    row, column = divmod(gap, size)
    found = {}
    for direction, (down, right) in _TILES.items():
        if 0 <= row + down < size and 0 <= column + right < size:
            tile = (row + down) * size + column + right
            moved = list(board)
            moved[gap], moved[tile] = board[tile], 0
            found[direction] = tuple(moved)
    return found


def describe(board: Board) -> str:
    """The board as text, one line for each row and `_` for the gap."""
    size = _size(board)
    width = len(str(size * size - 1))
    tiles = [("_" if tile == 0 else str(tile)).rjust(width) for tile in board]
    return "\n".join(" ".join(tiles[start : start + size]) for start in range(0, size * size, size))


def _size(board: Board) -> int:
    return round(len(board) ** 0.5)


# The game


class SlidingPuzzleEnv(TextEnv):
    """
    Slide the tiles of an n x n board until they are in order.

    The player may think aloud; what counts is the last `<action>...</action>` of a reply: `up`, `down`, `left` or
    `right`, the direction in which a tile moves into the gap, or `slide r c`, the tile in row r and column c (both
    counted from 1), or `view`. Solving the puzzle earns 1, everything else 0. Every reply is a turn, also one without
    a valid action.

    Args:
        size (`int`, *optional*, defaults to 3):
            Number of rows and columns.
        scramble_moves (`int`, *optional*, defaults to 15):
            Number of random moves that a puzzle is away from the solved board. Each changes the colour of the gap's
            place on a chessboard, so an odd number never ends on the solved board.
        max_turns (`int`, *optional*, defaults to 50):
            Number of turns after which the game is lost.
    """

    stop_strings = ["</action>"]

    def __init__(self, size: int = 3, scramble_moves: int = 15, max_turns: int = 50):
        if size < 2:
            raise ValueError(f"`size` must be at least 2, got {size}.")
        if scramble_moves < 1 or scramble_moves % 2 == 0:
            raise ValueError(f"`scramble_moves` must be odd, or a puzzle may start solved, got {scramble_moves}.")
        if max_turns < 1:
            raise ValueError(f"`max_turns` must be at least 1, got {max_turns}.")
        self.size = size
        self.scramble_moves = scramble_moves
        self.max_turns = max_turns
        self.board: Board | None = None
        self._turns = 0

    def reset(self, *, seed: int, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Scrambles a board."""
        rng = random.Random(seed)
        board = solved_board(self.size)
        for _ in range(self.scramble_moves):
            board = rng.choice(list(neighbours(board).values()))
        self.board = board
        self._turns = 0
        return (
            f"Slide the tiles until they read 1 to {self.size**2 - 1}, row by row, with the gap (_) last. Answer with "
            "<action>up</action>, <action>down</action>, <action>left</action> or <action>right</action>, the "
            "direction in which a tile moves into the gap, with <action>slide row column</action> (counted from 1), "
            f"or with <action>view</action>.\n{describe(board)}\n",
            {"board": board},
        )

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Carries out the last action of a reply."""
        if self.board is None:
            raise RuntimeError("There is no episode under way: call `reset` before `step`.")
        self._turns += 1
        target = self._target(self.board, action)
        board = self.board if target is None else target
        success = board == solved_board(self.size)
        over = success or self._turns == self.max_turns
        self.board = None if over else board
        head = "Solved.\n" if success else "That is not possible.\n" if target is None else ""
        info = {"board": board, "success": success, "invalid_action": target is None}
        return f"{head}{describe(board)}\n", float(success), over, False, info

    def legal_actions(self) -> list[str] | None:
        """The directions in which a tile can move, as replies; `None` when no episode is under way."""
        return None if self.board is None else [action_text(direction) for direction in neighbours(self.board)]

    def _target(self, board: Board, reply: str) -> Board | None:
        """The board that the reply asks for, `None` if there is no such board."""
        actions = re.findall(r"<action>(.*?)</action>", reply, re.DOTALL)
        words = actions[-1].lower().split() if actions else []
        if words == ["view"]:
            return board
        moves = neighbours(board)
        if len(words) == 1:
            return moves.get(words[0])
        if len(words) == 3 and words[0] == "slide" and all(re.fullmatch("[0-9]{1,9}", word) for word in words[1:]):
            row, column = int(words[1]) - 1, int(words[2]) - 1
            # The gap moves to where the tile was.
            places = {divmod(target.index(0), self.size): target for target in moves.values()}
            return places.get((row, column))
        return None


def action_text(direction: str) -> str:
    """A reply that moves a tile in `direction`."""
    return f"<action>{direction}</action>"


# Exact values. They do not know of the limit of turns.


@cache
def distances(size: int) -> dict[Board, int]:
    """
    Least number of moves to the solved board, from every board that can be solved: a breadth-first search.

    Args:
        size (`int`):
            2 (12 boards) or 3 (181,440 boards, about a second).
    """
    if size not in (2, 3):
        raise ValueError(f"Boards of size 2 and 3 can be searched completely, got size {size}.")
    found = {solved_board(size): 0}
    queue = deque(found)
    while queue:
        board = queue.popleft()
        for neighbour in neighbours(board).values():
            if neighbour not in found:
                found[neighbour] = found[board] + 1
                queue.append(neighbour)
    return found


def optimal_value(board: Board, gamma: float = 1.0) -> float:
    """V*: the best return from an unsolved board, discounted by `gamma` for every turn."""
    length = _distance(board)
    if length == 0:
        raise ValueError(f"The board {board} is solved: the game is over, and there is no action to value.")
    return gamma ** (length - 1)


def optimal_q_values(board: Board, gamma: float = 1.0) -> dict[str, float]:
    """Q*: the best return from an unsolved board after each move it allows."""
    optimal_value(board)
    moves = neighbours(board).items()
    return {direction: 1.0 if _distance(b) == 0 else gamma * optimal_value(b, gamma) for direction, b in moves}


def best_directions(board: Board) -> list[str]:
    """The moves that are the first of a shortest solution."""
    length = _distance(board)
    return [direction for direction, target in neighbours(board).items() if _distance(target) < length]


def _distance(board: Board) -> int:
    length = distances(_size(board)).get(tuple(board))
    if length is None:
        raise ValueError(f"The board {board} cannot be solved: half of all orders of the tiles cannot be reached.")
    return length


# The data


def make_dataset(
    num_episodes: int = 1000,
    seed: int = 0,
    *,
    size: int = 2,
    scramble_moves: int = 15,
    max_turns: int = 20,
    solver_probability: float = 0.25,
) -> list[dict[str, Any]]:
    """
    Plays episodes by a policy that makes some moves of a shortest solution, and random moves otherwise.

    Args:
        num_episodes (`int`, *optional*, defaults to 1000):
            Number of episodes.
        seed (`int`, *optional*, defaults to 0):
            Seed.
        size, scramble_moves, max_turns:
            As for [`SlidingPuzzleEnv`].
        solver_probability (`float`, *optional*, defaults to 0.25):
            Probability that a move is one of a shortest solution.

    Returns:
        `list[dict]`: rows as of [`~hf_qrl.environments.games.episodes.play_episode`].
    """
    rng = random.Random(seed)
    env = SlidingPuzzleEnv(size, scramble_moves, max_turns)

    def act() -> str:
        assert env.board is not None
        solves = rng.random() < solver_probability
        return action_text(rng.choice(best_directions(env.board) if solves else list(neighbours(env.board))))

    return [play_episode(env, act, seed=draw_seed(rng)) for _ in range(num_episodes)]
