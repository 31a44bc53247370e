# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""The double-T maze of LMRL-Gym (Abdulhai et al., 2023): the map, the game, and its exact values.

Two Ts stand on a common bar, from the middle of which a stem leads down to the goal. Data for it are made by
[`~hf_qrl.environments.games.maze_data.make_dataset`].
"""

import random
from collections import deque
from collections.abc import Mapping
from typing import Any

from ..text_env import TextEnv


Cell = tuple[int, int]

GOAL: Cell = (8, 6)
CELLS: tuple[Cell, ...] = (
    *((1, column) for column in (1, 2, 3, 4, 5, 7, 8, 9, 10, 11)),
    *((row, column) for row in (2, 3, 4) for column in (3, 9)),
    *((5, column) for column in range(3, 10)),
    *((row, 6) for row in (6, 7, 8)),
)
STARTS: tuple[Cell, ...] = tuple(cell for cell in CELLS if cell != GOAL)
# In the order in which the walls around a cell are told.
DIRECTIONS = ("right", "left", "up", "down")
MAX_MOVES = 100

_STEPS = {"right": (0, 1), "left": (0, -1), "up": (-1, 0), "down": (1, 0)}
_WALLS = {"right": "to your right", "left": "to your left", "up": "above you", "down": "below you"}
_FREE = frozenset(CELLS)


# The map


def move(cell: Cell, direction: str) -> Cell:
    """The cell one step from `cell` in `direction`, or `cell` itself where a wall is in the way."""
    row, column = _STEPS[direction]
    target = (cell[0] + row, cell[1] + column)
    return target if target in _FREE else cell


def describe_walls(cell: Cell) -> str:
    """The sentence about the walls next to a cell, the whole observation of the partially observed maze."""
    walls = [_WALLS[direction] for direction in DIRECTIONS if move(cell, direction) == cell]
    if not walls:
        return "There are no walls near you."
    return f"There {'is a wall' if len(walls) == 1 else 'are walls'} {', '.join(walls)}."


def describe(cell: Cell) -> str:
    """The observation of the fully observed maze, without its newline."""
    goal, position = (", ".join(" ".join(str(number)) for number in place) for place in (GOAL, cell))
    return f"The goal is at position {goal}. Your current position is at position {position}. {describe_walls(cell)}"


def action_text(direction: str, one_token_actions: bool = False) -> str:
    """What the player writes to go in `direction`: `"move left\\n"`, or `"l"` with `one_token_actions`."""
    return direction[0] if one_token_actions else f"move {direction}\n"


# The game


class MazeEnv(TextEnv):
    """
    Find the way to the goal.

    A move costs -1, the one that reaches the goal nothing, and a string that is no action costs -4 and leaves the
    player where it is, as does a wall. After 100 moves the game is lost: the next action is not carried out any
    more and costs -1. Actions must match to the letter, the newline included.

    Args:
        partially_observed (`bool`, *optional*, defaults to `False`):
            Whether observations tell only about walls, and neither the position nor the goal.
        one_token_actions (`bool`, *optional*, defaults to `False`):
            Whether actions are single letters, `"l"`, `"r"`, `"u"` and `"d"`, instead of `"move left\\n"` and so on.
        history_length (`int`, *optional*, defaults to 1):
            Number of latest texts (observations and actions) that make up one observation. 1 suits players that are
            shown the whole conversation, or need no more than the present; LMRL-Gym's players of the partially
            observed maze see 40.
        start (`tuple[int, int]`, *optional*):
            Row and column where episodes start. By default the seed draws one of the 25 cells besides the goal.
            `reset(options={"start": ...})` overrules it for one episode.
    """

    def __init__(
        self,
        partially_observed: bool = False,
        one_token_actions: bool = False,
        history_length: int = 1,
        start: Cell | None = None,
    ):
        if history_length < 1:
            raise ValueError(f"`history_length` must be at least 1, the present observation, got {history_length}.")
        self.partially_observed = partially_observed
        self.history_length = history_length
        self.start = None if start is None else _check_start(start)
        self._directions = {action_text(direction, one_token_actions): direction for direction in DIRECTIONS}
        # With these a model that talks on is cut after its action.
        self.stop_strings = list(self._directions) if one_token_actions else ["\n"]
        self.position: Cell | None = None
        self._moves = 0
        self._texts: list[str] = []

    def reset(self, *, seed: int, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Starts an episode; `options` may hold a `start`."""
        start = (options or {}).get("start")
        start = self.start if start is None else _check_start(start)
        start = random.Random(seed).choice(STARTS) if start is None else start
        self.position = start
        self._moves = 0
        self._texts = []
        return self._observe(start), {"position": start}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Carries out one action."""
        if self.position is None:
            raise RuntimeError("There is no episode under way: call `reset` before `step`.")
        position, direction = self.position, self._directions.get(action)
        if self._moves == MAX_MOVES:
            self.position = None
            info = {"position": position, "success": False, "invalid_action": direction is None}
            return "Failure\n", -1.0, True, False, info
        self._moves += 1
        if direction is not None:
            position = move(position, direction)
        success = position == GOAL
        self.position = None if success else position
        info = {"position": position, "success": success, "invalid_action": direction is None}
        if success:
            return "Success\n", 0.0, True, False, info
        self._texts.append(action)
        return self._observe(position), -4.0 if direction is None else -1.0, False, False, info

    def legal_actions(self) -> list[str]:
        """The four actions, the same everywhere."""
        return list(self._directions)

    def _observe(self, position: Cell) -> str:
        describe_cell = describe_walls if self.partially_observed else describe
        self._texts.append(describe_cell(position) + "\n")
        return "".join(self._texts[-self.history_length :])


def _check_start(start: Any) -> Cell:
    cell = tuple(start)
    if cell not in STARTS:
        raise ValueError(f"`start` must be one of the 25 free cells besides the goal {GOAL}, got {start!r}.")
    return cell


# Exact values. They do not know of the limit of 100 moves, which the best player never meets.


def distances() -> dict[Cell, int]:
    """Number of moves from each cell to the goal: a breadth-first search from the goal."""
    found = {GOAL: 0}
    queue = deque([GOAL])
    while queue:
        cell = queue.popleft()
        for direction in DIRECTIONS:
            neighbour = move(cell, direction)
            if neighbour not in found:
                found[neighbour] = found[cell] + 1
                queue.append(neighbour)
    return found


def optimal_values(gamma: float = 1.0) -> dict[Cell, float]:
    """V*: the best return from each cell, discounted by `gamma` for every move; 0 at the goal."""
    # All moves but the last cost -1.
    return {cell: -sum(gamma**move for move in range(length - 1)) + 0.0 for cell, length in distances().items()}


def optimal_q_values(gamma: float = 1.0) -> dict[Cell, dict[str, float]]:
    """Q*: the best return from each cell besides the goal after a move in each direction."""
    values = optimal_values(gamma)
    return {
        cell: {direction: _reward(cell, direction) + gamma * values[move(cell, direction)] for direction in DIRECTIONS}
        for cell in STARTS
    }


def optimal_directions() -> dict[Cell, list[str]]:
    """The directions, of each cell besides the goal, that are the first of a shortest way."""
    length = distances()
    return {
        cell: [direction for direction in DIRECTIONS if length[move(cell, direction)] < length[cell]]
        for cell in STARTS
    }


def policy_returns(policy: Mapping[Cell, Mapping[str, float]]) -> dict[Cell, float]:
    """
    Exact expected return, limit of moves included, of a policy that looks at the present cell only.

    Args:
        policy (`Mapping[tuple[int, int], Mapping[str, float]]`):
            Probability of each direction in each cell besides the goal. What is missing to 1 is the probability of a
            string that is no action.

    Returns:
        `dict[tuple[int, int], float]`: the undiscounted return from each start. The mean over the starts is the
        score of the task.
    """
    returns = dict.fromkeys(STARTS, -1.0)  # of the action that comes too late
    returns[GOAL] = 0.0
    for _ in range(MAX_MOVES):
        following = {GOAL: 0.0}
        for cell in STARTS:
            chances = policy[cell]
            following[cell] = (1 - sum(chances.values())) * (-4 + returns[cell]) + sum(
                chance * (_reward(cell, direction) + returns[move(cell, direction)])
                for direction, chance in chances.items()
            )
        returns = following
    return {cell: returns[cell] for cell in STARTS}


def _reward(cell: Cell, direction: str) -> float:
    return 0.0 if move(cell, direction) == GOAL else -1.0
