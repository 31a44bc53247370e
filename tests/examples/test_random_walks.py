"""What the example adds to the random walks of the library: text, rows and the table of policies."""

import importlib.util
import json
import sys
from pathlib import Path

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
