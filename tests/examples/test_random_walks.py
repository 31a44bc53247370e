"""The random-walks task against its published definition, and against computations that share no code with it."""

import hashlib
import importlib.util
import json
import sys
from pathlib import Path

import networkx as nx
import numpy as np
import pytest


EXAMPLE = Path(__file__).parents[2] / "examples" / "random_walks.py"


@pytest.fixture(scope="module")
def game():
    spec = importlib.util.spec_from_file_location("random_walks_example", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture(scope="module")
def data(game):
    graph, walks = game.make_data(seed=1000)
    return graph, walks, game.optimality(walks, graph)


def test_facts_of_the_data(game, data):
    graph, walks, scores = data
    assert len(walks) == 1000
    assert len(set(walks)) == 722
    assert scores.mean() == pytest.approx(0.3515, abs=5e-5)
    assert np.mean([walk.endswith("a") for walk in walks]) == pytest.approx(0.56)
    assert game.best_per_start(walks, scores) == pytest.approx(0.9917, abs=5e-5)
    assert scores.min() == 0 and scores.max() == 1


def test_every_edge_is_seen(data):
    graph, walks, _ = data
    assert graph.n_edges == 51
    assert len({edge for walk in walks for edge in zip(walk, walk[1:], strict=False)}) == 51


def test_the_walks_are_those_of_trlx(data):
    _, walks, _ = data
    digest = hashlib.sha256("\n".join(walks).encode()).hexdigest()
    assert digest == "69d12e9cd7e4c474aa6f5d94862438390508d55e299c207c9d0d2cb453d00fd3"


def test_the_easy_graph(game):
    graph, walks = game.make_data(seed=1002)
    assert game.optimality(walks, graph).mean() == pytest.approx(0.7902, abs=5e-5)
    assert np.mean([walk.endswith("a") for walk in walks]) == pytest.approx(0.985)
    assert game.expected_optimality(graph, game.uniform_policy(graph)) == pytest.approx(0.7852, abs=5e-5)


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
def test_every_start_of_every_graph_can_reach_the_goal(game, seed):
    graph = game.make_graph(seed)
    assert graph.adjacency[1:].any(axis=1).all()
    assert not np.diag(graph.adjacency)[1:].any()
    assert (graph.shortest[1:] >= 2).all() and (graph.shortest < 10).all()


def test_exact_value_of_the_random_policy(game, data):
    graph, _, _ = data
    value = game.expected_optimality(graph, game.uniform_policy(graph))
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


def test_exact_value_of_the_shortest_way(game, data):
    graph, _, _ = data
    nearest = np.zeros((21, 21))
    for node in range(21):
        nearest[node, min(graph.successors(node), key=lambda n: graph.shortest[n])] = 1
    assert game.expected_optimality(graph, nearest) == pytest.approx(1.0)


def test_exact_value_agrees_with_sampling(game, data):
    graph, _, _ = data
    sampled = game.optimality(game.sample_walks(graph, 7, n_walks=5000), graph)
    assert sampled.mean() == pytest.approx(game.expected_optimality(graph, game.uniform_policy(graph)), abs=0.02)


@pytest.fixture
def line(game):
    """d -> c -> b -> a, with a detour d -> b and a blind alley c -> c."""
    adjacency = np.zeros((4, 4), dtype=bool)
    for source, target in ["aa", "ba", "cb", "dc", "db", "bc"]:
        adjacency[ord(source) - 97, ord(target) - 97] = True
    return game.Graph(adjacency, game.shortest_lengths(adjacency))


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
def test_worth_of_single_walks(game, line, walk, worth):
    assert game.optimality([walk], line).item() == pytest.approx(worth)


@pytest.mark.parametrize("walk", ["", "a", "aba", "z", "Z", "|ba"])
def test_a_walk_needs_a_start(game, line, walk):
    with pytest.raises(ValueError, match="starts with a letter from b to d"):
        game.optimality([walk], line)


def test_too_many_nodes(game):
    with pytest.raises(ValueError, match="between 2 and 26"):
        game.make_graph(0, n_nodes=27)


def test_tokenizer(game, data, tmp_path):
    _, walks, _ = data
    tokenizer = game.make_tokenizer()
    assert len(tokenizer) == tokenizer.vocab_size == 23
    assert tokenizer("bcua")["input_ids"] == [1, 2, 20, 0]
    assert tokenizer("ba" + tokenizer.eos_token)["input_ids"] == [1, 0, 21]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (21, 21, 22)
    assert tokenizer.batch_decode(tokenizer(walks)["input_ids"]) == walks
    assert tokenizer.decode([1, 0, 21, 22, 22], skip_special_tokens=True) == "ba"

    tokenizer.save_pretrained(tmp_path)
    again = type(tokenizer).from_pretrained(tmp_path)
    assert again(walks)["input_ids"] == tokenizer(walks)["input_ids"]
    assert again.decode([1, 0, 21, 22], skip_special_tokens=True) == "ba"


def test_a_sign_outside_the_vocabulary_is_an_error(game):
    with pytest.raises(Exception, match="UNK"):
        game.make_tokenizer()("b?a")


def test_rows(game, data):
    graph, walks, scores = data
    rows = game.to_rows(walks, scores)
    assert [row["prompt"] + row["completion"] for row in rows] == walks
    assert {len(row["prompt"]) for row in rows} == {1}
    assert [row["reward"] for row in rows] == scores.tolist()
    assert game.make_prompts(graph) == list("bcdefghijklmnopqrstu") == sorted({walk[0] for walk in walks})


def test_results_file(game, data, tmp_path):
    results = game.reference_scores(*data)
    path = tmp_path / "new" / "results.json"
    game.write_results(results, path)
    read = json.loads(path.read_text())
    assert read["optimum"] == {"mean": 1.0, "interval": [1.0, 1.0], "n": 20}
    assert read["behaviour data"]["n"] == 1000
    low, high = read["behaviour data"]["interval"]
    assert low < read["behaviour data"]["mean"] < high
    assert high - low == pytest.approx(2 * 1.96 * data[2].std(ddof=1) / 1000**0.5)
