# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
import pytest
import torch

from hf_qrl.rollouts.stop_strings import RowStops, find_stop


@pytest.mark.parametrize(
    "text, strings, expected",
    [
        ("go left\nor", ["\n"], (8, "\n")),
        ("</a>\n", ["\n", "</a>"], (4, "</a>")),
        ("abab", ["bab", "ab"], (2, "ab")),
        ("xab", ["b", "ab"], (3, "ab")),
        ("nothing", ["\n"], None),
        ("nothing", [], None),
        ("nothing", None, None),
        ("nothing", [""], None),
    ],
)
def test_find_stop(text, strings, expected):
    assert find_stop(text, strings) == expected


def feed(stops: RowStops, rows: list[list[int]]) -> list[list[bool]]:
    """Shows the criterion rows of equal length token by token."""
    tokens = torch.tensor(rows)
    return [stops(tokens[:, : i + 1], None).tolist() for i in range(tokens.shape[1])]


@pytest.fixture(scope="module")
def words(make_tokenizer):
    return make_tokenizer(more=("</a", ">\n", "nd>x", "o.k", "é"))


def ids(words, *tokens):
    return [words.convert_tokens_to_ids(token) for token in tokens]


def test_a_string_over_several_tokens_ends_within_one(words):
    rows = [ids(words, "</a", ">\n", "b"), ids(words, "o.k", "nd>x", "c"), ids(words, "a", "</a", "nd>x")]
    stops = RowStops(words, 0, [["</a>"], ["</a>", "knd>"], ["</and>"]], [9, 9, 9], [])
    assert feed(stops, rows) == [[False] * 3, [True, True, False], [True] * 3]
    assert [stops.text(row) for row in range(3)] == ["</a>", "o.knd>", "a</and>"]
    assert stops.finishes == ["stop:</a>", "stop:knd>", "stop:</and>"]
    # The tokens are those that were sampled, also what the last one says beyond the match.
    assert stops.token_ids == [rows[0][:2], rows[1][:2], rows[2]]


def test_eos_budgets_and_prompts(words):
    eos = words.eos_token_id
    rows = [[*ids(words, "a"), eos, 5], ids(words, "a", "b", "c"), [eos, *ids(words, "\n", "b")]]
    stops = RowStops(words, 7, [None, ["zz"], None], [3, 2, 3], [eos])
    assert feed(stops, rows)[-1] == [True, True, True]
    assert stops.finishes == ["eos", "length", "eos"]
    assert [stops.text(row) for row in range(3)] == ["a", "ab", ""]


def test_a_match_is_found_behind_a_long_text_and_silent_tokens(words):
    said = list("once upon a time there was a long text")
    row = ids(words, *said, "<unk>", "<unk>", "E", "<unk>", "<unk>", "N", "D", "é")
    stops = RowStops(words, 0, [["END"]], [99], [])
    done = feed(stops, [row])
    assert [step[0] for step in done].index(True) == len(row) - 2
    assert stops.text(0) == "".join(said) + "END"
