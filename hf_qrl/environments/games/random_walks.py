# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""The random walks of trlX (Havrilla et al., 2023): find the shortest way through a graph from walks that wander.

The world is a small directed graph whose nodes are the letters `a` to `u`. A walk starts anywhere but at the goal `a`
and is worth more the fewer nodes it visits before the goal. Graph and walks are trlX's for the same seed.
"""

import random
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..text_env import TextEnv, TextStep
from .episodes import play_episode


GOAL = 0
N_NODES = 21
MAX_LENGTH = 10  # nodes in the longest walk, its start included
NO_PATH = 10**6  # distance of a node from which the goal cannot be reached


# The graph


@dataclass(frozen=True)
class Graph:
    """A directed graph with an absorbing goal.

    Args:
        adjacency (`np.ndarray` of shape `(n_nodes, n_nodes)`, boolean):
            `adjacency[i, j]` says whether a step from node `i` to node `j` is allowed. The goal leads to itself.
        shortest (`np.ndarray` of shape `(n_nodes,)`):
            Number of nodes on a shortest path from each node to the goal, both ends counted: 1 at the goal itself.
    """

    adjacency: np.ndarray
    shortest: np.ndarray

    @property
    def n_nodes(self) -> int:
        return len(self.adjacency)

    @property
    def n_edges(self) -> int:
        """Number of edges, the goal's loop not counted."""
        return int(self.adjacency.sum()) - 1

    @property
    def starts(self) -> list[int]:
        return [node for node in range(self.n_nodes) if node != GOAL]

    def successors(self, node: int) -> np.ndarray:
        return np.flatnonzero(self.adjacency[node])


def make_graph(
    seed: int | np.random.RandomState = 1000, n_nodes: int = N_NODES, p_edge: float = 0.1, max_length: int = MAX_LENGTH
) -> Graph:
    """
    Draw a graph in which every node has a way out and every start can reach the goal in fewer than `max_length` nodes.

    Args:
        seed (`int` or `np.random.RandomState`, *optional*, defaults to 1000):
            Seed, or a generator under way, which then moves on.
        n_nodes (`int`, *optional*, defaults to 21):
            Number of nodes, one letter each: 26 at most.
        p_edge (`float`, *optional*, defaults to 0.1):
            Probability of each directed edge.
        max_length (`int`, *optional*, defaults to 10):
            Number of nodes in the longest walk that counts. A start that cannot do better has no scale to be
            measured on, so a graph with such a start is drawn again.
    """
    if not 2 <= n_nodes <= 26:
        raise ValueError(f"n_nodes must be between 2 and 26, one letter for each node, got {n_nodes}.")
    rng = _as_generator(seed)
    while True:
        adjacency = rng.rand(n_nodes, n_nodes) > 1 - p_edge
        np.fill_diagonal(adjacency, False)
        if not adjacency.any(axis=1).all():
            continue
        adjacency[GOAL] = False
        adjacency[GOAL, GOAL] = True
        shortest = shortest_lengths(adjacency)
        if shortest.max() < max_length:
            return Graph(adjacency, shortest)


def shortest_lengths(adjacency: np.ndarray) -> np.ndarray:
    """Number of nodes on the shortest path from each node to the goal: a breadth-first search backwards."""
    lengths = np.full(len(adjacency), NO_PATH)
    lengths[GOAL] = 1
    queue = deque([GOAL])
    while queue:
        node = queue.popleft()
        for previous in np.flatnonzero(adjacency[:, node]):
            if lengths[previous] == NO_PATH:
                lengths[previous] = lengths[node] + 1
                queue.append(int(previous))
    return lengths


# The walks and their worth


def sample_walks(
    graph: Graph, seed: int | np.random.RandomState, n_walks: int = 1000, max_length: int = MAX_LENGTH
) -> list[str]:
    """
    Walk at random: a uniform start other than the goal, then uniform steps until the goal or `max_length` nodes.

    Returns:
        `list[str]`: one letter per node visited.
    """
    rng = _as_generator(seed)
    return [_sample_walk(graph, rng, max_length) for _ in range(n_walks)]


def _sample_walk(graph: Graph, rng: np.random.RandomState, max_length: int) -> str:
    node = GOAL
    while node == GOAL:
        node = rng.randint(graph.n_nodes)
    walk = [node]
    while node != GOAL and len(walk) < max_length:
        node = rng.choice(graph.successors(node))
        walk.append(node)
    return "".join(map(node_to_letter, walk))


def make_data(seed: int = 1000, n_walks: int = 1000) -> tuple[Graph, list[str]]:
    """Graph and walks from one stream of random numbers, as in trlX."""
    rng = np.random.RandomState(seed)
    graph = make_graph(rng)
    return graph, sample_walks(graph, rng, n_walks)


def optimality(walks: Iterable[str], graph: Graph, max_length: int = MAX_LENGTH) -> np.ndarray:
    """
    The worth of each walk: 1 for a shortest path to the goal, 0 for one that is lost, breaks the rules, or takes
    `max_length` nodes. What follows the goal does not count.

    Returns:
        `np.ndarray` of shape `(n_walks,)`: `(max_length - nodes until the goal) / (max_length - shortest)`.
    """
    return np.array([_optimality(walk, graph, max_length) for walk in walks])


def _optimality(walk: str, graph: Graph, max_length: int) -> float:
    nodes = [letter_to_node(letter) for letter in walk]
    if not nodes or nodes[0] not in graph.starts:
        last = node_to_letter(graph.n_nodes - 1)
        raise ValueError(f"A walk starts with a letter from {node_to_letter(GOAL + 1)} to {last}, got {walk!r}.")
    length = min(_nodes_until_goal(nodes, graph) or max_length, max_length)
    return (max_length - length) / float(max_length - graph.shortest[nodes[0]])


def _nodes_until_goal(nodes: Sequence[int], graph: Graph) -> int | None:
    for count, (node, following) in enumerate(zip(nodes, nodes[1:], strict=False), start=2):
        if not (0 <= following < graph.n_nodes and graph.adjacency[node, following]):
            return None
        if following == GOAL:
            return count
    return None


def uniform_policy(graph: Graph) -> np.ndarray:
    """The policy that made the data, as a transition matrix `(n_nodes, n_nodes)`."""
    return graph.adjacency / graph.adjacency.sum(axis=1, keepdims=True)


def expected_optimality(graph: Graph, transitions: np.ndarray, max_length: int = MAX_LENGTH) -> float:
    """
    Exact mean optimality of a Markov policy over uniform starts, without sampling.

    Args:
        graph ([`Graph`]):
            The graph.
        transitions (`np.ndarray` of shape `(n_nodes, n_nodes)`):
            Probability of each step. Probability on a step that is not an edge is a walk that is lost.
    """
    steps = np.where(graph.adjacency, transitions, 0.0)
    steps[GOAL] = 0.0  # the goal is entered once
    starts = graph.starts
    scale = max_length - graph.shortest[starts]
    occupancy = np.eye(graph.n_nodes)[starts]  # (starts, nodes)
    value = np.zeros(len(starts))
    for length in range(2, max_length + 1):
        occupancy = occupancy @ steps
        value += occupancy[:, GOAL] * (max_length - length) / scale
    return float(value.mean())


def best_per_start(walks: Sequence[str], scores: np.ndarray) -> float:
    """Mean, over the starts, of the best walk in the data: what a policy that only picks whole walks could reach."""
    best: dict[str, float] = {}
    for walk, score in zip(walks, scores, strict=True):
        best[walk[0]] = max(score, best.get(walk[0], 0.0))
    return float(np.mean(list(best.values())))


def node_to_letter(node: int) -> str:
    return chr(ord("a") + node)


def letter_to_node(letter: str) -> int:
    """The node of a letter; for any other sign a number that is no node."""
    return ord(letter) - ord("a")


def _as_generator(seed: int | np.random.RandomState) -> np.random.RandomState:
    return seed if isinstance(seed, np.random.RandomState) else np.random.RandomState(seed)


# The game


class RandomWalksEnv(TextEnv):
    """
    Walk to the goal: the game tells the start, the player answers with the rest of the walk, `"cda"` for example, and
    earns its [`optimality`]. There is one turn, and nothing is said after it.

    Args:
        graph ([`Graph`], *optional*):
            The graph, by default that of seed 1000.
    """

    def __init__(self, graph: Graph | None = None):
        self.graph = make_graph() if graph is None else graph
        self._start: str | None = None

    def reset(self, *, seed: int, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Draws a start; `options` may hold the letter of a `start` instead."""
        starts = [node_to_letter(node) for node in self.graph.starts]
        start = (options or {}).get("start") or random.Random(seed).choice(starts)
        if start not in starts:
            raise ValueError(f"`start` must be a letter from {starts[0]} to {starts[-1]}, got {start!r}.")
        self._start = start
        return start, {}

    def step(self, action: str) -> TextStep:
        """Walks."""
        if self._start is None:
            raise RuntimeError("There is no episode under way: call `reset` before `step`.")
        worth = float(optimality([self._start + action.strip()], self.graph)[0])
        self._start = None
        return [], worth, True, False, {"success": worth > 0}


def make_dataset(num_episodes: int = 1000, seed: int = 1000) -> list[dict[str, Any]]:
    """
    The walks of [`make_data`] as episodes.

    Args:
        num_episodes (`int`, *optional*, defaults to 1000):
            Number of walks.
        seed (`int`, *optional*, defaults to 1000):
            Seed of the graph and the walks.

    Returns:
        `list[dict]`: rows as of [`~hf_qrl.environments.games.episodes.play_episode`], with the `start`. To play an
        episode again, reset to its start.
    """
    graph, walks = make_data(seed, num_episodes)
    env = RandomWalksEnv(graph)

    def row(walk: str) -> dict[str, Any]:
        return play_episode(env, lambda: walk[1:], seed=seed, options={"start": walk[0]})

    return [{**row(walk), "start": walk[0]} for walk in walks]
