# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
import json
import math

import numpy as np
import pytest
from datasets import Dataset, load_from_disk

from hf_qrl.data import prepare_dataset
from hf_qrl.data.episodes import (
    PLAIN_CHAT_TEMPLATE,
    episode_features,
    episodes_dataset,
    filter_by_return,
    from_jsonl,
    make_episode,
    plain_json,
    successes,
    to_jsonl,
    validate_episode,
)


def conversation(*replies, system=True):
    messages = [{"role": "system", "content": "Play."}] if system else []
    for i, reply in enumerate(replies):
        messages += [{"role": "environment", "content": f"Öbs {i}\n"}, {"role": "assistant", "content": reply}]
    return [*messages, {"role": "environment", "content": "Final."}]


def episodes():
    return [
        make_episode(
            conversation("a", "b"),
            [0.1, 0.2],
            terminated=True,
            episode_id="0",
            env_id="game",
            env_kwargs={"size": 3},
            seed=2**32 - 1,
            success=True,
            turn_finish=["eos", "stop:\n"],
            turn_reward_components=[{"reward/x": 0.1}, {}],
            turn_legal_actions=[["a", "b"], None],
            policy={"id": "p", "revision": None, "sampling": {"temperature": 0.5}},
            info={"turns": [{}, {"success": True}]},
        ),
        make_episode(conversation("c"), [-1 / 3], terminated=False, truncation_reason="max_turns", metadata=[1, "x"]),
    ]


def test_an_episode_has_every_column():
    for row in episodes():
        assert set(row) == set(episode_features())
    assert episodes()[0]["return"] == math.fsum([0.1, 0.2])
    assert episodes()[1]["truncated"] is True


def test_round_trips(tmp_path):
    dataset = episodes_dataset(episodes())
    assert dataset.features == episode_features()
    assert dataset.to_list() == episodes()
    dataset.to_parquet(tmp_path / "episodes.parquet")
    dataset.save_to_disk(tmp_path / "disk")
    to_jsonl(dataset, tmp_path / "episodes.jsonl")
    for again in (
        Dataset.from_parquet(str(tmp_path / "episodes.parquet"), cache_dir=str(tmp_path / "cache")),
        load_from_disk(tmp_path / "disk"),
        from_jsonl(tmp_path / "episodes.jsonl"),
    ):
        assert again.to_list() == episodes()
        assert again.features == dataset.features


def test_tool_calls_and_tokens(tmp_path):
    call = {"type": "function", "function": {"name": "look", "arguments": {"where": "up", "n": 1}}}
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    messages = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "look", "content": "A bird."},
    ]
    row = make_episode(
        messages,
        [1.0],
        terminated=True,
        tools=tools,
        turn_token_ids=[[5, 6]],
        turn_logprobs=[[-0.1, -1 / 3]],
        turn_prompt_ids=[[1, 2, 3]],
        tokenizer_id="t",
    )
    dataset = episodes_dataset([row])
    assert dataset.features == episode_features(structured_messages=True, tokens=True)
    to_jsonl(dataset, tmp_path / "episodes.jsonl")
    dataset.to_parquet(tmp_path / "episodes.parquet")
    for again in (
        dataset,
        from_jsonl(tmp_path / "episodes.jsonl"),
        Dataset.from_parquet(str(tmp_path / "episodes.parquet"), cache_dir=str(tmp_path / "cache")),
    ):
        # No key of one message is given to another.
        assert again[0] == row


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"messages": []}, "at least one message"),
        ({"messages": [{"role": "narrator", "content": ""}]}, "unknown role 'narrator'"),
        ({"messages": [{"role": "user", "content": ""}]}, "no assistant message"),
        ({"turn_rewards": [1.0]}, "1 rewards for 2 assistant turns"),
        ({"turn_rewards": [1.0, math.nan]}, "finite"),
        ({"turn_rewards": [1.0, math.inf]}, "finite"),
        ({"return": 7.0}, "`return` is 7.0"),
        ({"turn_finish": ["eos"]}, "`turn_finish` has 1 entries for 2"),
        ({"turn_legal_actions": [None]}, "`turn_legal_actions` has 1 entries for 2"),
        ({"terminated": None}, "True or False"),
        ({"truncated": True}, "exactly one"),
        ({"terminated": False}, "exactly one"),
        ({"terminated": False, "truncated": True}, "`truncation_reason`"),
        ({"terminated": False, "truncated": True, "truncation_reason": "tired"}, "'tired'"),
        ({"truncation_reason": "max_turns"}, "it terminated"),
    ],
)
def test_malformed_episodes(changes, message):
    row = {**episodes()[0], **changes}
    with pytest.raises(ValueError, match=message):
        validate_episode(row)
    with pytest.raises(ValueError, match="Episode 1"):
        episodes_dataset([episodes()[0], row])


def test_unknown_columns():
    with pytest.raises(ValueError, match=r"\['reward'\]"):
        make_episode(conversation("a"), [1.0], terminated=True, reward=1.0)


def returns_of(*returns):
    return episodes_dataset(
        make_episode(conversation("a"), [value], terminated=True, success=[True, False, None][i % 3])
        for i, value in enumerate(returns)
    )


def test_the_best_are_kept():
    dataset = returns_of(3, 1, 4, 1, 5, 9, 2, 6, 5, 3)
    assert filter_by_return(dataset, top=0.1)["return"] == [9]
    assert filter_by_return(dataset, top=0.3)["return"] == [5, 9, 6]
    assert filter_by_return(dataset, top=1.0)["return"] == dataset["return"]
    assert filter_by_return(dataset, top=0.001)["return"] == [9]
    assert filter_by_return(dataset, minimum=5)["return"] == [5, 9, 6, 5]
    assert successes(dataset)["return"] == [3, 1, 2, 3]
    for kwargs in ({}, {"top": 0.1, "minimum": 1}, {"top": 0}, {"top": 10}):
        with pytest.raises(ValueError, match="top"):
            filter_by_return(dataset, **kwargs)


def test_what_json_can_say():
    value = {1: (np.float32(0.5), np.arange(2)), "nan": math.nan, "set": {1}}
    assert plain_json(value) == {"1": [0.5, [0, 1]], "nan": "nan", "set": "{1}"}


class Named:
    def method(self):
        pass


def test_names_are_the_same_in_each_process():
    written = plain_json([Named, test_what_json_can_say, Named().method, len, str.upper, Named(), lambda: None])
    assert written[:3] == [f"{__name__}.Named", f"{__name__}.test_what_json_can_say", f"{__name__}.Named.method"]
    assert written[3] == "builtins.len" and not any("0x" in text for text in written)


@pytest.mark.parametrize("number", [2**62, -(2**63), 2**64 - 1, 2**64, -(2**63) - 1, 10**1000, True])
def test_integers_of_any_length_are_stored(number, tmp_path):
    row = make_episode(conversation("a"), [1.0], terminated=True, info={"turns": [{"number": number}]})
    dataset = episodes_dataset([row])
    to_jsonl(dataset, tmp_path / "episodes.jsonl")
    for again in (dataset, from_jsonl(tmp_path / "episodes.jsonl")):
        stored = again[0]["info"]["turns"][0]["number"]
        assert int(stored) == number and isinstance(stored, str) == (not -(2**63) <= number < 2**64)
        assert stored == row["info"]["turns"][0]["number"]


def test_messages_are_made_plain():
    messages = [{"role": "tool", "content": "x", "where": (np.int64(1), 2.0)}, {"role": "assistant", "content": "a"}]
    row = make_episode(messages, [1.0], terminated=True)
    assert row["messages"][0]["where"] == [1, 2.0] and row["messages"] is not messages
    assert episodes_dataset([row])[0]["messages"][0] == row["messages"][0]


@pytest.mark.parametrize("column", ["messages", "info", "tools", "metadata", "task", "turn_finish", "env_kwargs"])
def test_half_of_a_surrogate_pair_is_refused_before_it_is_written(column):
    value = {"turn_finish": ["\ud800"], "task": "\ud800", "messages": conversation("\ud800")}.get(column, ["\ud800"])
    row = {**make_episode(conversation("a"), [1.0], terminated=True), column: value}
    with pytest.raises(ValueError, match=f"`{column}` cannot be stored"):
        validate_episode(row)


@pytest.mark.parametrize("column", ["messages", "turn_rewards", "terminated", "truncated", "return"])
def test_a_line_without_a_column_is_named(column, tmp_path):
    dataset = episodes_dataset(episodes())
    to_jsonl(dataset, tmp_path / "episodes.jsonl")
    lines = (tmp_path / "episodes.jsonl").read_text().splitlines()
    row = json.loads(lines[1])
    del row[column]
    (tmp_path / "episodes.jsonl").write_text(f"{lines[0]}\n{json.dumps(row)}\n")
    with pytest.raises(ValueError, match=rf"Line 2 of .*episodes.jsonl has no `{column}`"):
        from_jsonl(tmp_path / "episodes.jsonl")


def test_they_are_training_data(tokenizer, make_tokenizer):
    rows = prepare_dataset(episodes_dataset(episodes()), tokenizer)
    assert rows["truncated"] == [False, True]
    # The reward of a turn is on its last token.
    assert [[reward for reward in row if reward] for row in rows["rewards"]] == [[0.1, 0.2], [-1 / 3]]
    plain = make_tokenizer(PLAIN_CHAT_TEMPLATE)
    row = prepare_dataset(episodes_dataset(episodes()), plain)[1]
    assert plain.decode(row["input_ids"]) == "Play.Öbs 0\ncFinal.".replace("Ö", "<unk>")
    assert [row["input_ids"][p + 1] for p in row["actions_ixs"]] == plain("c")["input_ids"]
