# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""The random-walks task against its published definition, and against computations that share no code with it."""

import hashlib

import networkx as nx
import numpy as np
import pytest

from hf_qrl.environments.games.random_walks import (
    Graph,
    RandomWalksEnv,
    best_per_start,
    expected_optimality,
    make_data,
    make_dataset,
    make_graph,
    optimality,
    sample_walks,
    shortest_lengths,
    uniform_policy,
)


@pytest.fixture(scope="module")
def data():
    graph, walks = make_data(seed=1000)
    return graph, walks, optimality(walks, graph)


def test_facts_of_the_data(data):
    graph, walks, scores = data
    assert len(walks) == 1000
    assert len(set(walks)) == 722
    assert scores.mean() == pytest.approx(0.3515, abs=5e-5)
    assert np.mean([walk.endswith("a") for walk in walks]) == pytest.approx(0.56)
    assert best_per_start(walks, scores) == pytest.approx(0.9917, abs=5e-5)
    assert scores.min() == 0 and scores.max() == 1


def test_every_edge_is_seen(data):
    graph, walks, _ = data
    assert graph.n_edges == 51
    assert len({edge for walk in walks for edge in zip(walk, walk[1:], strict=False)}) == 51


def test_the_walks_are_those_of_trlx(data):
    _, walks, _ = data
    digest = hashlib.sha256("\n".join(walks).encode()).hexdigest()
    assert digest == "69d12e9cd7e4c474aa6f5d94862438390508d55e299c207c9d0d2cb453d00fd3"


def test_the_easy_graph():
    graph, walks = make_data(seed=1002)
    assert optimality(walks, graph).mean() == pytest.approx(0.7902, abs=5e-5)
    assert np.mean([walk.endswith("a") for walk in walks]) == pytest.approx(0.985)
    assert expected_optimality(graph, uniform_policy(graph)) == pytest.approx(0.7852, abs=5e-5)


def test_walks_follow_the_rules(data):
    graph, walks, _ = data
    for walk in walks:
        assert 2 <= len(walk) <= 10
        assert walk[0] != "a" and "a" not in walk[:-1]
        assert len(walk) == 10 or walk[-1] == "a"


def test_shortest_paths(data):
    graph, _, _ = data
    reference = nx.shortest_path_length(nx.from_numpy_array(graph.adjacency, create_using=nx.DiGraph), target=0)
    assert graph.shortest.tolist() == [reference[node] + 1 for node in range(21)]


@pytest.mark.parametrize("seed", range(20))
def test_every_start_of_every_graph_can_reach_the_goal(seed):
    graph = make_graph(seed)
    assert graph.adjacency[1:].any(axis=1).all()
    assert not np.diag(graph.adjacency)[1:].any()
    assert (graph.shortest[1:] >= 2).all() and (graph.shortest < 10).all()


def test_exact_value_of_the_random_policy(data):
    graph, _, _ = data
    value = expected_optimality(graph, uniform_policy(graph))
    assert value == pytest.approx(0.3462, abs=5e-5)

    def by_enumeration(node, length):  # sum of probability x remaining nodes, over every walk there is
        if node == 0:
            return 10 - length
        if length == 10:
            return 0.0
        following = np.flatnonzero(graph.adjacency[node])
        return sum(by_enumeration(n, length + 1) for n in following) / len(following)

    starts = range(1, 21)
    assert value == pytest.approx(np.mean([by_enumeration(n, 1) / (10 - graph.shortest[n]) for n in starts]))


def test_exact_value_of_the_shortest_way(data):
    graph, _, _ = data
    nearest = np.zeros((21, 21))
    for node in range(21):
        nearest[node, min(graph.successors(node), key=lambda n: graph.shortest[n])] = 1
    assert expected_optimality(graph, nearest) == pytest.approx(1.0)


def test_exact_value_agrees_with_sampling(data):
    graph, _, _ = data
    sampled = optimality(sample_walks(graph, 7, n_walks=5000), graph)
    assert sampled.mean() == pytest.approx(expected_optimality(graph, uniform_policy(graph)), abs=0.02)


@pytest.fixture
def line():
    """d -> c -> b -> a, with a detour d -> b and a blind alley c -> c."""
    adjacency = np.zeros((4, 4), dtype=bool)
    for source, target in ["aa", "ba", "cb", "dc", "db", "bc"]:
        adjacency[ord(source) - 97, ord(target) - 97] = True
    return Graph(adjacency, shortest_lengths(adjacency))


@pytest.mark.parametrize(
    "walk, worth",
    [
        ("ba", 1.0),
        ("dba", 1.0),
        ("dcba", 6 / 7),
        ("bcba", 6 / 8),
        ("dcb", 0.0),  # never arrives
        ("d", 0.0),
        ("da", 0.0),  # no such edge
        ("dzba", 0.0),  # no such node
        ("d|ba", 0.0),
        ("baaa", 1.0),  # what follows the goal does not count
        ("baz", 1.0),
        ("bcbcbcbca", 0.0),
        ("bcbcbcbcba", 0.0),  # ten nodes are as bad as getting lost
        ("bcbcbcba", 2 / 8),
        ("bcbcbcbcbcba", 0.0),
    ],
)
def test_worth_of_single_walks(line, walk, worth):
    assert optimality([walk], line).item() == pytest.approx(worth)


@pytest.mark.parametrize("walk", ["", "a", "aba", "z", "Z", "|ba"])
def test_a_walk_needs_a_start(line, walk):
    with pytest.raises(ValueError, match="starts with a letter from b to d"):
        optimality([walk], line)


def test_too_many_nodes():
    with pytest.raises(ValueError, match="between 2 and 26"):
        make_graph(0, n_nodes=27)


class TestGame:
    def test_one_turn(self, data):
        graph, walks, scores = data
        env = RandomWalksEnv()
        assert (env.graph.adjacency == graph.adjacency).all()
        for walk, score in list(zip(walks, scores, strict=True))[:50]:
            assert env.reset(seed=0, options={"start": walk[0]}) == (walk[0], {})
            assert env.step(walk[1:]) == ([], score, True, False, {"success": score > 0})
        with pytest.raises(RuntimeError, match="call `reset`"):
            env.step("a")

    @pytest.mark.parametrize("reply", ["", " ", "?", "a b", "A", "\u00e9", "zzz"])
    def test_nonsense_earns_nothing(self, reply):
        env = RandomWalksEnv()
        env.reset(seed=0, options={"start": "u"})
        assert env.step(reply)[1] == 0.0

    def test_starts(self):
        env = RandomWalksEnv()
        assert {env.reset(seed=seed)[0] for seed in range(300)} == set("bcdefghijklmnopqrstu")
        with pytest.raises(ValueError, match="a letter from b to u"):
            env.reset(seed=0, options={"start": "a"})

    def test_dataset_is_the_walks(self, data):
        _, walks, scores = data
        episodes = make_dataset()
        assert ["".join(m["content"] for m in episode["messages"]) for episode in episodes] == walks
        assert [episode["turn_rewards"] for episode in episodes] == [[score] for score in scores]
