# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
import pytest
from datasets import Dataset, DatasetDict, IterableDataset
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from hf_qrl.data import is_prepared, prepare_dataset, window_messages


def say(role, content):
    return {"role": role, "content": content}


def turn(user, assistant):
    return [say("user", user), say("assistant", assistant)]


EPISODE = [say("system", "s"), *turn("a", "bc"), *turn("d", "e"), *turn("f", "gh")]


def prepare_one(tokenizer, row, **kwargs):
    """Prepares a dataset of one row and returns its rows."""
    return prepare_dataset(Dataset.from_list([row]), tokenizer, **kwargs).to_list()


def actions(tokenizer, row):
    return "".join(tokenizer.decode(row["input_ids"][p + 1]) for p in row["actions_ixs"])


def text(tokenizer, row):
    return tokenizer.decode(row["input_ids"])


class TestText:
    def test_row(self, tokenizer):
        (row,) = prepare_one(tokenizer, {"prompt": "ab", "completion": "cd", "reward": 2.0, "other": 1})
        a, b, c, d = tokenizer("abcd")["input_ids"]
        assert row == {
            "input_ids": [a, b, c, d, tokenizer.eos_token_id],
            "attention_mask": [1] * 5,
            "rewards": [0.0, 0.0, 2.0],
            "states_ixs": [1, 2, 3, 4],
            "actions_ixs": [1, 2, 3],
            "dones": [1, 1, 1, 0],
            "turn_ixs": [0, 0, 0],
            "truncated": False,
        }

    def test_eos_that_is_there_is_not_doubled(self, tokenizer):
        rows = [prepare_one(tokenizer, {"prompt": "a", "completion": c, "reward": 1.0}) for c in ("b", "b<|im_end|>")]
        assert rows[0][0]["input_ids"][-1] == tokenizer.eos_token_id
        assert len(rows[0][0]["input_ids"]) == 3

    def test_no_eos_after_another_stop_token(self, tokenizer):
        stop = tokenizer.convert_tokens_to_ids("d")
        (row,) = prepare_one(tokenizer, {"prompt": "ab", "completion": "cd", "reward": 1.0}, eos_token_id=[stop])
        assert text(tokenizer, row) == "abcd"
        assert row["rewards"] == [0.0, 1.0]

    def test_truncated_gets_no_eos(self, tokenizer):
        (row,) = prepare_one(tokenizer, {"prompt": "a", "completion": "bc", "reward": 1.0, "truncated": True})
        assert text(tokenizer, row) == "abc"
        assert (row["actions_ixs"], row["states_ixs"], row["truncated"]) == ([0, 1], [0, 1, 2], True)

    def test_terminated_wins(self, tokenizer):
        sample = {"prompt": "a", "completion": "b", "reward": 1.0, "truncated": True, "terminated": True}
        assert not prepare_one(tokenizer, sample)[0]["truncated"]
        sample = {"prompt": "a", "completion": "b", "reward": 1.0, "truncated": False, "terminated": False}
        assert prepare_one(tokenizer, sample)[0]["truncated"]

    @pytest.mark.parametrize("label, reward", [(True, 1.0), (False, -1.0)])
    def test_label(self, tokenizer, label, reward):
        (row,) = prepare_one(tokenizer, {"prompt": "a", "completion": "b", "label": label})
        assert row["rewards"] == [0.0, reward]

    def test_weight(self, tokenizer):
        (row,) = prepare_one(tokenizer, {"prompt": "a", "completion": "b", "reward": 1.0, "weight": 2})
        assert row["weight"] == 2.0

    def test_standardised(self, tokenizer):
        sample = {"prompt": "a", "completion": "b", "reward": 4.0, "truncated": False}
        assert prepare_one(tokenizer, sample, reward_mean=1.0, reward_std=2.0)[0]["rewards"] == [0.0, 1.5]
        sample["truncated"] = True
        assert prepare_one(tokenizer, sample, reward_mean=1.0, reward_std=2.0)[0]["rewards"] == [2.0]

    def test_prompt_prefix(self):
        backend = Tokenizer(WordLevel({"<unk>": 0, "a": 1, "b": 2, "ab": 3}, unk_token="<unk>"))
        backend.pre_tokenizer = Whitespace()
        words = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
        assert prepare_one(words, {"prompt": "a", "completion": " b", "reward": 1.0})[0]["input_ids"] == [1, 2]
        with pytest.raises(ValueError, match="Row 0: the tokens of `prompt` are not a prefix"):
            prepare_one(words, {"prompt": "a", "completion": "b", "reward": 1.0})


class TestSamples:
    def test_list_and_string(self, golden_tokenizer):
        (row,) = prepare_one(golden_tokenizer, {"samples": ["abc", "d", "ef", "gh"], "rewards": 3.0})
        assert row["input_ids"] == [3, 4, 5, 6, 7, 8, 9, 10, 2]
        assert (row["actions_ixs"], row["states_ixs"]) == ([2, 5, 6, 7], [2, 5, 6, 7, 8])
        assert (row["rewards"], row["turn_ixs"]) == ([0.0, 0.0, 0.0, 3.0], [0, 1, 1, 1])
        (row,) = prepare_one(golden_tokenizer, {"samples": "ab", "rewards": 3.0})
        assert (row["input_ids"], row["actions_ixs"]) == ([1, 3, 4, 2], [0, 1, 2])

    def test_cut_by_the_rules_of_rows(self, golden_tokenizer):
        sample = {"samples": ["abc", "d", "ef", "gh"], "rewards": 3.0}
        (row,) = prepare_one(golden_tokenizer, sample, max_length=7)
        assert (row["actions_ixs"], row["states_ixs"][-1]) == ([2, 5], 6)
        assert row["rewards"] == [0.0, 0.0]
        assert row["truncated"]
        (row,) = prepare_one(golden_tokenizer, sample, max_length=4, truncation_side="left")
        assert (row["actions_ixs"], row["rewards"], row["truncated"]) == ([0, 1, 2], [0.0, 0.0, 3.0], False)

    def test_truncated_gets_no_eos(self, golden_tokenizer):
        (row,) = prepare_one(golden_tokenizer, {"samples": ["a", "b"], "rewards": 3.0, "truncated": True})
        assert row["input_ids"] == [3, 4]


class TestConversation:
    def test_rewards_sit_on_the_last_token_of_each_turn(self, chat_tokenizer):
        (row,) = prepare_one(chat_tokenizer, {"messages": EPISODE, "rewards": [1.0, 2.0, 3.0]})
        assert actions(chat_tokenizer, row) == "bc<|im_end|>e<|im_end|>gh<|im_end|>"
        assert row["rewards"] == [0, 0, 1.0, 0, 2.0, 0, 0, 3.0]
        assert row["turn_ixs"] == [0, 0, 0, 1, 1, 2, 2, 2]
        assert row["states_ixs"][:-1] == row["actions_ixs"]
        assert row["states_ixs"][-1] == len(row["input_ids"]) - 1
        assert row["input_ids"][-1] == chat_tokenizer.eos_token_id

    def test_reward_of_the_episode(self, chat_tokenizer):
        (row,) = prepare_one(chat_tokenizer, {"messages": EPISODE, "reward": 4.0})
        assert row["rewards"] == [0.0] * 7 + [4.0]

    @pytest.mark.parametrize("column, value", [("reward", 4.0), ("turn_rewards", [1.0, 4.0]), ("label", True)])
    def test_prompt_completion(self, chat_tokenizer, column, value):
        (row,) = prepare_one(chat_tokenizer, {"prompt": EPISODE[:4], "completion": EPISODE[4:], column: value})
        assert actions(chat_tokenizer, row) == "e<|im_end|>gh<|im_end|>"
        last = 1.0 if column == "label" else 4.0
        assert row["rewards"] == [0, 1.0 if column == "turn_rewards" else 0, 0, 0, last]

    def test_terminated_drops_what_follows_the_last_action(self, chat_tokenizer):
        (row,) = prepare_one(chat_tokenizer, {"messages": [*EPISODE, say("user", "bye")], "reward": 4.0})
        assert [row] == prepare_one(chat_tokenizer, {"messages": EPISODE, "reward": 4.0})

    def test_truncated_with_final_observation(self, chat_tokenizer):
        messages = [*turn("a", "b"), say("user", "c")]
        (row,) = prepare_one(chat_tokenizer, {"messages": messages, "reward": 4.0, "truncated": True})
        assert (
            row["input_ids"] == chat_tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        )
        assert row["states_ixs"][-1] == len(row["input_ids"]) - 1
        assert (row["rewards"], row["truncated"]) == ([0.0, 4.0], True)

    def test_truncated_while_speaking(self, chat_tokenizer):
        (row,) = prepare_one(chat_tokenizer, {"messages": turn("a", "bc"), "reward": 4.0, "terminated": False})
        assert actions(chat_tokenizer, row) == "bc"
        assert row["states_ixs"][-1] == len(row["input_ids"]) - 1
        assert (row["rewards"], row["truncated"]) == ([0.0, 4.0], True)

    def test_tagged_and_untagged_templates_agree(self, tokenizer, tagged_tokenizer):
        episode = {"messages": EPISODE, "rewards": [1.0, 2.0, 3.0]}
        for window in (None, 1, 2):
            options = {"history_window": window}
            assert prepare_one(tokenizer, episode, **options) == prepare_one(tagged_tokenizer, episode, **options)

    def test_template_argument(self, no_template_tokenizer, tokenizer):
        episode = {"messages": EPISODE, "reward": 1.0}
        rows = prepare_one(no_template_tokenizer, episode, chat_template=tokenizer.chat_template)
        assert rows == prepare_one(tokenizer, episode)

    def test_actions_end_where_generation_does(self, tokenizer):
        template = tokenizer.chat_template.replace("<|im_end|>", "#")
        episode = {"messages": [*turn("a", "b"), *turn("c", "d")], "rewards": [1.0, 2.0]}
        (row,) = prepare_one(tokenizer, episode, chat_template=template)
        assert actions(tokenizer, row) == "b#\nd#\n"
        stop = tokenizer.convert_tokens_to_ids("#")
        for eos_token_id in (stop, [tokenizer.eos_token_id, stop]):
            (row,) = prepare_one(tokenizer, episode, chat_template=template, eos_token_id=eos_token_id)
            assert actions(tokenizer, row) == "b#d#"
            assert row["rewards"] == [0.0, 1.0, 0.0, 2.0]

    def test_tools_and_template_variables(self, tagged_tokenizer):
        tools = '[{"type": "function", "function": {"name": "add", "description": "", "parameters": {}}}]'
        (row,) = prepare_one(tagged_tokenizer, {"messages": turn("a", "b"), "reward": 1.0, "tools": tools})
        assert text(tagged_tokenizer, row).startswith("[add]")
        (row,) = prepare_one(
            tagged_tokenizer,
            {"messages": turn("a", "b"), "reward": 1.0, "chat_template_kwargs": {"mood": "!"}},
            chat_template="{{ mood }}" + tagged_tokenizer.chat_template,
        )
        assert text(tagged_tokenizer, row).startswith("!")

    def test_template_variables_of_another_row_stay_undefined(self, tokenizer):
        rows = [{"messages": turn("a", "b"), "reward": 1.0, "chat_template_kwargs": {name: "!"}} for name in "xy"]
        template = "{{ x is defined }}" + tokenizer.chat_template
        prepared = prepare_dataset(Dataset.from_list(rows), tokenizer, chat_template=template)
        assert [text(tokenizer, row)[:4] for row in prepared] == ["True", "Fals"]

    @settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
    @given(
        contents=st.lists(st.tuples(st.text("ab c", max_size=4), st.text("ab c", max_size=4)), min_size=1, max_size=4),
        final=st.booleans(),
        window=st.none() | st.integers(1, 3),
    )
    def test_properties(self, chat_tokenizer, contents, final, window):
        from hf_qrl.data.preparation import _Options, _prepare_episode

        messages = [message for pair in contents for message in turn(*pair)]
        messages += [say("user", "z")] if final else []
        rewards = [float(2**i) for i in range(len(contents))]
        options = _Options(
            "messages", "rewards", chat_tokenizer.chat_template, None, "right", window, None, None, None, (3,)
        )
        episode = {"messages": messages, "rewards": rewards, "terminated": not final}
        rows = _prepare_episode(episode, "Row 0", chat_tokenizer, options)
        assert sum(sum(row["rewards"]) for row in rows) == sum(rewards)
        spoken = "".join(answer + "<|im_end|>" for _, answer in contents)
        assert "".join(actions(chat_tokenizer, row) for row in rows) == spoken
        for row in rows:
            assert all(0 <= p < len(row["input_ids"]) - 1 for p in row["actions_ixs"])
            assert row["states_ixs"] == [*row["actions_ixs"], len(row["input_ids"]) - 1]


class TestHistoryWindow:
    def render(self, tokenizer, messages, **kwargs):
        return tokenizer.apply_chat_template(messages, **kwargs)["input_ids"]

    @pytest.mark.parametrize("window", [1, 2, 5])
    def test_rows(self, chat_tokenizer, window):
        rows = prepare_one(
            chat_tokenizer, {"messages": EPISODE, "rewards": [1.0, 2.0, 3.0], "weight": 2.0}, history_window=window
        )
        prompts = [
            self.render(chat_tokenizer, window_messages(EPISODE[:i], window), add_generation_prompt=True)
            for i in (2, 4, 6)
        ]
        assert [actions(chat_tokenizer, row) for row in rows] == ["bc<|im_end|>", "e<|im_end|>", "gh<|im_end|>"]
        for i, row in enumerate(rows):
            assert row["input_ids"][: len(prompts[i])] == prompts[i]
            assert row["actions_ixs"][0] == len(prompts[i]) - 1
            assert sum(row["rewards"]) == row["rewards"][-1] == i + 1
            assert row["next_input_ids"] == (prompts[i + 1] if i < 2 else [])
            assert row["next_attention_mask"] == [1] * len(row["next_input_ids"])
            assert not row["truncated"]
            assert row["weight"] == 2.0

    def test_hand_built_row(self, chat_tokenizer):
        row = prepare_one(chat_tokenizer, {"messages": EPISODE, "reward": 1.0}, history_window=1)[1]
        expected = "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nd<|im_end|>\n<|im_start|>assistant\ne<|im_end|>"
        assert row["input_ids"] == chat_tokenizer(expected)["input_ids"]

    def test_truncated_with_final_observation(self, chat_tokenizer):
        messages = [*EPISODE, say("user", "z")]
        rows = prepare_one(chat_tokenizer, {"messages": messages, "reward": 1.0, "truncated": True}, history_window=1)
        final = self.render(chat_tokenizer, [EPISODE[0], say("user", "z")], add_generation_prompt=True)
        assert rows[-1]["next_input_ids"] == final
        assert not any(row["truncated"] for row in rows)

    def test_truncated_while_speaking(self, chat_tokenizer):
        rows = prepare_one(chat_tokenizer, {"messages": EPISODE, "reward": 1.0, "truncated": True}, history_window=1)
        assert [row["truncated"] for row in rows] == [False, False, True]
        assert rows[-1]["next_input_ids"] == []
        assert actions(chat_tokenizer, rows[-1]) == "gh"

    def test_prompt_completion(self, chat_tokenizer):
        rows = prepare_one(
            chat_tokenizer, {"prompt": EPISODE[:4], "completion": EPISODE[4:], "reward": 1.0}, history_window=2
        )
        whole = prepare_one(chat_tokenizer, {"messages": EPISODE, "reward": 1.0}, history_window=2)
        assert rows == whole[1:]

    def test_right_cut_makes_the_row_truncated(self, chat_tokenizer):
        episode = {"messages": EPISODE, "rewards": [1.0, 2.0, 3.0]}
        length = len(prepare_one(chat_tokenizer, episode, history_window=1)[0]["input_ids"])
        rows = prepare_one(chat_tokenizer, episode, history_window=1, max_length=length - 1)
        assert [row["truncated"] for row in rows] == [True, False, True]
        assert rows[0]["next_input_ids"] == []
        assert sum(rows[0]["rewards"]) == 0
        assert sum(rows[1]["rewards"]) == 2.0

    def test_left_cut_cuts_the_next_context_too(self, chat_tokenizer):
        episode = {"messages": EPISODE, "reward": 1.0}
        rows = prepare_one(chat_tokenizer, episode, history_window=2, max_length=20, truncation_side="left")
        whole = prepare_one(chat_tokenizer, episode, history_window=2)
        assert rows[0]["next_input_ids"] == whole[0]["next_input_ids"][-20:]
        assert rows[0]["input_ids"] == whole[0]["input_ids"][-20:]

    def test_no_prefix_template_is_fine_turn_by_turn(self, no_prefix_tokenizer):
        with pytest.raises(ValueError, match="Row 0: .*not a prefix"):
            prepare_one(no_prefix_tokenizer, {"messages": EPISODE, "reward": 1.0})

    def test_policy_context_is_the_trained_one(self, chat_tokenizer):
        rows = prepare_one(chat_tokenizer, {"messages": EPISODE, "reward": 1.0}, history_window=2)
        for row, after in zip(rows, rows[1:], strict=False):
            context = after["input_ids"][: after["actions_ixs"][0] + 1]
            assert row["next_input_ids"] == context


class TestErrors:
    GOOD = {"prompt": "a", "completion": "b", "reward": 1.0}
    CHAT = {"messages": turn("a", "b"), "rewards": [1.0]}

    @pytest.mark.parametrize(
        "change, options, match",
        [
            ({"reward": float("nan")}, {}, "`reward` must hold finite numbers, got nan"),
            ({"reward": float("inf")}, {}, "finite numbers, got inf"),
            ({"reward": None}, {}, "finite numbers, got None"),
            ({"completion": ""}, {"terminated": False}, "has the reward 1.0 but no action"),
            ({"completion": None}, {}, "must both be strings"),
            ({"prompt": "a" * 20}, {"max_length": 10}, "no action tokens are left: .*max_length=10.*Raise max_length"),
            ({}, {"vocab_size": 4}, "token id .* lies outside the vocabulary of 4"),
            ({"weight": 0.0}, {}, "`weight` must be a positive finite number, got 0.0"),
            ({"terminated": None}, {}, "`terminated` must be True or False, got None"),
        ],
    )
    def test_text_row_raises(self, tokenizer, change, options, match):
        options = dict(options)
        good = {**self.GOOD, "terminated": options.pop("terminated", True), "weight": 1.0}
        dataset = Dataset.from_list([good, {**good, **change}])
        bad = "Row [01]" if "vocab_size" in options else "Row 1"
        with pytest.raises(ValueError, match=f"{bad}: .*{match}"):
            prepare_dataset(dataset, tokenizer, **options)

    @pytest.mark.parametrize(
        "change, options, match",
        [
            ({"messages": []}, {}, "`messages` is empty"),
            ({"messages": None}, {}, "`messages` must be a list of dicts"),
            ({"messages": [say("robot", "a")]}, {}, "unknown role 'robot'"),
            ({"messages": [say("user", "a")]}, {}, "no assistant message"),
            ({"rewards": [1.0, 2.0]}, {}, "got 2 rewards for 1 assistant turns"),
            ({"rewards": [float("nan")]}, {}, "finite numbers, got nan"),
            ({"rewards": [None]}, {}, "finite numbers, got None"),
            ({"rewards": None}, {}, "must be a list"),
            ({"messages": [say("assistant", "a")]}, {}, "starts with an assistant message"),
            ({"messages": [say("assistant", "a")]}, {"history_window": 1}, "acts on an observation"),
        ],
    )
    def test_conversation_row_raises(self, tokenizer, change, options, match):
        with pytest.raises(ValueError, match=f"Row 1: .*{match}"):
            prepare_dataset(Dataset.from_list([self.CHAT, {**self.CHAT, **change}]), tokenizer, **options)

    @pytest.mark.parametrize(
        "sample, match", [(["a"], "even number"), (None, "`samples` must be"), (["a", ""], "no output")]
    )
    def test_sample_row_raises(self, golden_tokenizer, sample, match):
        dataset = Dataset.from_dict({"samples": [sample], "rewards": [1.0], "truncated": [True]})
        with pytest.raises(ValueError, match=f"Row 0: .*{match}"):
            prepare_dataset(dataset, golden_tokenizer)

    @pytest.mark.parametrize(
        "columns, match",
        [
            ({"text": ["a"]}, r"found \['text'\], accepted are the formats"),
            ({"prompt": ["a"], "completion": ["b"]}, "Missing columns"),
            ({"messages": [turn("a", "b")]}, "Missing columns"),
            ({"messages": [turn("a", "b")], "reward": [1.0], "rewards": [[1.0]]}, "several reward columns"),
            ({"prompt": [], "completion": [], "reward": []}, "empty"),
        ],
    )
    def test_dataset_raises(self, tokenizer, columns, match):
        with pytest.raises(ValueError, match=match):
            prepare_dataset(Dataset.from_dict(columns), tokenizer)

    @pytest.mark.parametrize(
        "options, match",
        [
            ({"truncation_side": "middle"}, "`truncation_side` must be"),
            ({"history_window": 0}, "`history_window` must be at least 1"),
            ({"history_window": 1}, "needs a conversational dataset"),
            ({"reward_std": 0.0}, "`reward_std` must be positive"),
            ({"tokenizer": None}, "needs a tokenizer"),
        ],
    )
    def test_arguments_raise(self, tokenizer, options, match):
        with pytest.raises(ValueError, match=match):
            prepare_dataset(Dataset.from_list([self.GOOD]), **{"tokenizer": tokenizer, **options})

    def test_dataset_dict_raises(self, tokenizer):
        with pytest.raises(ValueError, match="single `Dataset` or `IterableDataset`, got `DatasetDict`"):
            prepare_dataset(DatasetDict(train=Dataset.from_list([self.GOOD])), tokenizer)

    def test_empty_stream_raises(self, tokenizer):
        with pytest.raises(ValueError, match="empty"):
            prepare_dataset(IterableDataset.from_generator(lambda: iter([])), tokenizer)

    def test_no_chat_template_raises(self, no_template_tokenizer):
        with pytest.raises(ValueError, match="the tokenizer has no chat template"):
            prepare_dataset(Dataset.from_list([self.CHAT]), no_template_tokenizer)

    def test_mixed_text_and_conversation_raises(self, tokenizer):
        rows = [self.GOOD, {"prompt": turn("a", "b")[:1], "completion": turn("a", "b")[1:], "reward": 1.0}]
        dataset = IterableDataset.from_generator(lambda: iter(rows))
        with pytest.raises(ValueError, match="Row 1: `prompt` and `completion` must both be strings"):
            list(prepare_dataset(dataset, tokenizer))


class TestMapping:
    EPISODES = [{"messages": EPISODE, "rewards": [1.0, 2.0, 3.0]}, {"messages": turn("a", "b"), "rewards": [1.0]}]

    @pytest.mark.parametrize("window", [None, 1])
    def test_streaming_equals_map_style(self, tokenizer, window):
        dataset = Dataset.from_list(self.EPISODES)
        rows = prepare_dataset(dataset, tokenizer, history_window=window)
        stream = prepare_dataset(dataset.to_iterable_dataset(), tokenizer, history_window=window)
        assert isinstance(stream, IterableDataset)
        assert list(stream) == rows.to_list()
        assert stream.column_names == rows.column_names

    def test_streaming_errors_name_the_row(self, tokenizer):
        dataset = Dataset.from_list([*self.EPISODES, {"messages": turn("a", "b"), "rewards": [1.0, 1.0]}])
        with pytest.raises(ValueError, match="Row 2: "):
            list(prepare_dataset(dataset.to_iterable_dataset(), tokenizer))

    def test_stream_without_known_columns(self, tokenizer):
        stream = IterableDataset.from_generator(lambda: iter(self.EPISODES))
        rows = prepare_dataset(Dataset.from_list(self.EPISODES), tokenizer).to_list()
        assert list(prepare_dataset(stream, tokenizer)) == rows

    def test_second_map_uses_the_cache(self, tokenizer, tmp_path, monkeypatch):
        Dataset.from_list(self.EPISODES).save_to_disk(tmp_path)
        first = prepare_dataset(Dataset.load_from_disk(tmp_path), tokenizer, max_length=50)
        monkeypatch.setattr("hf_qrl.data.preparation._prepare_episode", lambda *args: pytest.fail("not cached"))
        second = prepare_dataset(Dataset.load_from_disk(tmp_path), tokenizer, max_length=50)
        assert second.cache_files == first.cache_files
        assert second.to_list() == first.to_list()

    def test_several_processes(self, tokenizer):
        dataset = Dataset.from_list(self.EPISODES)
        assert (
            prepare_dataset(dataset, tokenizer, num_proc=2).to_list() == prepare_dataset(dataset, tokenizer).to_list()
        )

    def test_formatted_dataset(self, tokenizer):
        dataset = Dataset.from_list([TestErrors.GOOD])
        assert (
            prepare_dataset(dataset.with_format("torch"), tokenizer).to_list()
            == prepare_dataset(dataset, tokenizer).to_list()
        )


class TestPrepared:
    def test_preparing_twice_changes_nothing(self, tokenizer):
        dataset = Dataset.from_list([TestErrors.GOOD])
        assert not is_prepared(dataset)
        prepared = prepare_dataset(dataset, tokenizer)
        assert is_prepared(prepared)
        assert prepare_dataset(prepared).data == prepared.data  # the same table, not a copy of it

    def test_stream(self, tokenizer):
        prepared = prepare_dataset(Dataset.from_list([TestErrors.GOOD]), tokenizer)
        stream = prepare_dataset(prepared.to_iterable_dataset())
        assert is_prepared(stream)
        assert list(stream) == prepared.to_list()

    @pytest.mark.parametrize("streaming", [False, True])
    def test_bad_row_raises(self, streaming):
        good = {"input_ids": [1, 2], "actions_ixs": [0], "states_ixs": [0, 1], "dones": [1, 0], "rewards": [1.0]}
        dataset = Dataset.from_list([good, {**good, "input_ids": [1, 9]}])
        dataset = dataset.to_iterable_dataset() if streaming else dataset
        with pytest.raises(ValueError, match="Row 1: token id 9"):
            list(prepare_dataset(dataset, vocab_size=9))

    @pytest.mark.parametrize("streaming", [False, True])
    @pytest.mark.parametrize("format", ["torch", "numpy", "arrow"])
    def test_formatted_rows(self, tokenizer, format, streaming):
        prepared = prepare_dataset(Dataset.from_list([TestErrors.GOOD]), tokenizer)
        dataset = prepared.to_iterable_dataset() if streaming else prepared
        assert list(prepare_dataset(dataset.with_format(format))) == prepared.to_list()

    def test_options_that_cannot_be_applied_raise(self, tokenizer):
        prepared = prepare_dataset(Dataset.from_list([TestErrors.GOOD]), tokenizer)
        with pytest.raises(ValueError, match="Row 0: .* tokens are more than max_length=2"):
            prepare_dataset(prepared, max_length=2)
        with pytest.raises(ValueError, match="no `next_input_ids`"):
            prepare_dataset(prepared, history_window=2)
