# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""Data for the maze that no single episode of which shows the whole way.

LMRL-Gym says: 1.24k trajectories, each confined to one of three sub-mazes, 15% of the actions by a sub-optimal solver,
85% random, and a mean return of -83. What it leaves open is settled here as follows.

* The sub-mazes are the two Ts and the bar with the stem to the goal. The cell at the foot of each T belongs to the bar
  as well: without a common cell the step from one to the other would be in no episode, and no learner could find it.
* The sub-mazes take turns, so each has a third of the episodes. An episode starts in any of its cells but the goal.
* The solver takes a shortest way to the goal in one decision of two, and a random direction in the other.
* A direction that would leave the sub-maze is drawn again, solver or not. The game's own rules end the episodes, hence
  those in the Ts fail after 100 moves and return -101.
"""

import random
from typing import Any

from .episodes import draw_seed, play_episode
from .maze import CELLS, DIRECTIONS, GOAL, Cell, MazeEnv, action_text, move, optimal_directions


NUM_EPISODES = 1240
SOLVER_PROBABILITY = 0.15
SOLVER_ERROR = 0.5
SUBMAZES: tuple[frozenset[Cell], ...] = (
    frozenset(cell for cell in CELLS if cell[0] <= 4 and cell[1] <= 5),
    frozenset(cell for cell in CELLS if cell[0] <= 4 and cell[1] >= 7),
    frozenset(cell for cell in CELLS if cell[0] >= 4),
)


def make_dataset(
    num_episodes: int = NUM_EPISODES,
    seed: int = 0,
    *,
    partially_observed: bool = False,
    one_token_actions: bool = False,
    history_length: int = 1,
) -> list[dict[str, Any]]:
    """
    Plays the episodes described at the top of this file.

    Args:
        num_episodes (`int`, *optional*, defaults to 1240):
            Number of episodes.
        seed (`int`, *optional*, defaults to 0):
            Seed. The moves are the same whatever the observations and the names of the actions.
        partially_observed, one_token_actions, history_length:
            As for [`MazeEnv`].

    Returns:
        `list[dict]`: rows as of [`~hf_qrl.environments.games.episodes.play_episode`], with the `start` (row and
        column) and the index of the `submaze`. To play an episode again, reset to its seed and start.
    """
    rng = random.Random(seed)
    best = optimal_directions()
    env = MazeEnv(partially_observed, one_token_actions, history_length)

    episodes = []
    for index in range(num_episodes):
        number = index % len(SUBMAZES)
        submaze = SUBMAZES[number]
        start = rng.choice([cell for cell in CELLS if cell in submaze and cell != GOAL])

        def act(submaze: frozenset[Cell] = submaze) -> str:
            assert env.position is not None
            return action_text(_behaviour(env.position, submaze, best, rng), one_token_actions)

        episode = play_episode(env, act, seed=draw_seed(rng), options={"start": start})
        episodes.append({**episode, "start": list(start), "submaze": number})
    return episodes


def _behaviour(cell: Cell, submaze: frozenset[Cell], best: dict[Cell, list[str]], rng: random.Random) -> str:
    while True:
        by_solver = rng.random() < SOLVER_PROBABILITY and rng.random() >= SOLVER_ERROR
        direction = rng.choice(best[cell] if by_solver else DIRECTIONS)
        if move(cell, direction) in submaze:
            return direction
