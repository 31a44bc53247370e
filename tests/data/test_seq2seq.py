# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""Rows of encoder-decoder models."""

import doctest
import string

import numpy as np
import pytest
import torch
from datasets import Dataset, IterableDataset
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hf_qrl.data import (
    DataCollatorForILQL,
    DataCollatorForSeq2SeqILQL,
    ILQLSeq2SeqBatch,
    conversation_text,
    make_experience_seq2seq,
    prepare_dataset,
    return_statistics,
    tokenize_dialogue,
    value_bounds,
    window_messages,
)
from hf_qrl.data.rows import check_row


PAD, EOS, BOS = 0, 2, 3
START = 0
EPISODE = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": "a?"},
    {"role": "assistant", "content": "bc"},
    {"role": "environment", "content": "d!"},
    {"role": "assistant", "content": "e"},
]
FINAL = {"role": "user", "content": "f"}


@pytest.fixture(scope="session")
def t5(make_seq2seq_tokenizer):
    return make_seq2seq_tokenizer("$A </s>")


@pytest.fixture(scope="session")
def bart(make_seq2seq_tokenizer):
    return make_seq2seq_tokenizer("<s> $A </s>")


def chars(text: str) -> list[int]:
    """Ids of the characters of a text, without special tokens."""
    return [4 + string.printable.index(c) for c in text]


def run_docstring(thing, num_examples: int) -> None:
    text = thing.__doc__.replace("```python", "").replace("```", "")
    example = doctest.DocTestParser().get_doctest(text, {thing.__name__: thing}, thing.__name__, None, None)
    assert len(example.examples) == num_examples
    assert doctest.DocTestRunner().run(example).failed == 0


def prepare(tokenizer, *rows, **kwargs):
    kwargs = {"decoder_start_token_id": START, **kwargs}
    return prepare_dataset(Dataset.from_list(list(rows)), tokenizer, **kwargs).to_list()


TEXT = {"prompt": "2+2=", "completion": "4!", "reward": 1.5}
CHAT = {"messages": EPISODE, "rewards": [1.0, 2.0]}


class TestText:
    def test_t5(self, t5):
        (row,) = prepare(t5, TEXT)
        assert row == {
            "input_ids": [*chars("2+2="), EOS],
            "attention_mask": [1] * 5,
            "decoder_input_ids": [START, *chars("4!"), EOS],
            "rewards": [0.0, 0.0, 1.5],
            "states_ixs": [0, 1, 2, 3],
            "actions_ixs": [0, 1, 2],
            "dones": [1, 1, 1, 0],
            "turn_ixs": [0, 0, 0],
            "truncated": False,
        }

    def test_bart(self, bart):
        (row,) = prepare(bart, TEXT, decoder_start_token_id=EOS)
        assert row["input_ids"] == [BOS, *chars("2+2="), EOS]
        # Generation says the bos token too.
        assert row["decoder_input_ids"] == [EOS, BOS, *chars("4!"), EOS]
        assert (row["actions_ixs"], row["rewards"]) == ([0, 1, 2, 3], [0.0, 0.0, 0.0, 1.5])

    def test_tokenizer_without_special_tokens_gets_an_eos(self, make_seq2seq_tokenizer):
        (row,) = prepare(make_seq2seq_tokenizer(None), TEXT)
        assert (row["input_ids"], row["decoder_input_ids"]) == (chars("2+2="), [START, *chars("4!"), EOS])
        (row,) = prepare(make_seq2seq_tokenizer(None), {**TEXT, "truncated": True})
        assert row["decoder_input_ids"] == [START, *chars("4!")]

    @pytest.mark.parametrize("name", ["t5", "bart"])
    def test_truncated_bootstraps_from_its_last_token(self, request, name):
        tokenizer = request.getfixturevalue(name)
        (row,) = prepare(tokenizer, {**TEXT, "truncated": True})
        said = [*([BOS] if name == "bart" else []), *chars("4!")]
        assert row["decoder_input_ids"] == [START, *said]
        assert (row["truncated"], row["states_ixs"][-1], row["rewards"][-1]) == (True, len(said), 1.5)
        assert row["dones"] == [1] * len(said) + [0]

    def test_stops_at_the_first_stop_token(self, t5):
        (row,) = prepare(t5, {**TEXT, "completion": "4!</s>x"})
        assert row["decoder_input_ids"] == [START, *chars("4!"), EOS]
        (row,) = prepare(t5, TEXT, eos_token_id=[EOS, *chars("4")])
        assert row["decoder_input_ids"] == [START, *chars("4")]

    def test_empty_completion_is_an_end(self, t5):
        (row,) = prepare(t5, {**TEXT, "completion": ""})
        assert (row["decoder_input_ids"], row["rewards"]) == ([START, EOS], [1.5])

    def test_label_weight_and_standardisation(self, t5):
        row = {"prompt": "a", "completion": "b", "label": False, "weight": 2.0}
        (row,) = prepare(t5, row, reward_mean=1.0, reward_std=2.0)
        assert (row["rewards"], row["weight"]) == ([0.0, -1.0], 2.0)


class TestConversation:
    def test_a_row_for_each_turn(self, t5):
        first, second = prepare(t5, CHAT)
        history = "system: S\nuser: a?"
        longer = history + "\nassistant: bc\nuser: d!"
        assert first["input_ids"] == [*chars(history), EOS]
        assert first["decoder_input_ids"] == [START, *chars("bc"), EOS]
        assert first["rewards"] == [0.0, 0.0, 1.0]
        assert first["next_input_ids"] == second["input_ids"] == [*chars(longer), EOS]
        assert first["next_attention_mask"] == [1] * len(first["next_input_ids"])
        assert second["decoder_input_ids"] == [START, *chars("e"), EOS]
        assert (second["rewards"], second["next_input_ids"]) == ([0.0, 2.0], [])
        assert not first["truncated"] and not second["truncated"]

    def test_encoder_reads_what_it_reads_at_inference(self, t5, bart, make_seq2seq_tokenizer):
        for tokenizer in (t5, bart):
            for window in (None, 1):
                rows = prepare(tokenizer, CHAT, history_window=window)
                for row, turn in zip(rows, (2, 4), strict=True):
                    text = conversation_text(window_messages(EPISODE[:turn], window))
                    assert row["input_ids"] == tokenizer(text)["input_ids"]
        # A chat template brings its own special tokens.
        tokenizer = make_seq2seq_tokenizer("$A </s>", chatml=True)
        for row, turn in zip(prepare(tokenizer, CHAT), (2, 4), strict=True):
            messages = [{**m, "role": "user" if m["role"] == "environment" else m["role"]} for m in EPISODE[:turn]]
            prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
            assert row["input_ids"] == prompt["input_ids"]
        assert EOS not in row["input_ids"] and row["decoder_input_ids"][-1] == EOS

    def test_history_window(self, t5):
        first, second = prepare(t5, CHAT, history_window=1)
        assert second["input_ids"] == first["next_input_ids"] == [*chars("system: S\nuser: d!"), EOS]

    def test_truncated_with_final_observation(self, t5):
        rows = prepare(t5, {**CHAT, "messages": [*EPISODE, FINAL], "truncated": True})
        assert rows[1]["next_input_ids"] == [*chars(conversation_text([*EPISODE, FINAL])), EOS]
        assert rows[1]["decoder_input_ids"] == [START, *chars("e"), EOS]
        assert not rows[1]["truncated"]  # its next state is another row's

    def test_truncated_while_speaking(self, t5):
        rows = prepare(t5, {**CHAT, "truncated": True})
        assert rows[0]["decoder_input_ids"][-1] == EOS and not rows[0]["truncated"]
        assert rows[1]["decoder_input_ids"] == [START, *chars("e")]
        assert rows[1]["truncated"] and rows[1]["next_input_ids"] == []

    def test_prompt_completion_and_episode_reward(self, t5):
        row = {"prompt": EPISODE[:3], "completion": EPISODE[3:], "reward": 0.5}
        (row,) = prepare(t5, row)
        assert row["input_ids"] == [*chars(conversation_text(EPISODE[:4])), EOS]
        assert row["rewards"] == [0.0, 0.5]
        rows = prepare(t5, {"messages": EPISODE, "reward": 0.5})
        assert [row["rewards"] for row in rows] == [[0.0] * 3, [0.0, 0.5]]

    def test_statistics(self, t5):
        data = Dataset.from_list([CHAT, {"messages": EPISODE, "rewards": [0.0, -3.0]}])
        rows = prepare_dataset(data, t5, decoder_start_token_id=START)
        statistics = return_statistics(rows, 0.5)
        assert statistics.continues_elsewhere and not statistics.pays_only_at_end
        assert (statistics.num_rows, statistics.num_actions) == (4, 10)
        assert (statistics.return_min, statistics.return_max) == (-3.0, 2.0)
        assert value_bounds(statistics, 0.5) == (-6.0, 4.0)
        ends = prepare_dataset(data.select([1]), t5, decoder_start_token_id=START)
        assert value_bounds(return_statistics(ends, 0.5), 0.5) == (-3.0, 0.0)

    def test_text_of_a_conversation(self):
        run_docstring(conversation_text, 1)
        assert conversation_text(EPISODE[3:4]) == "user: d!"
        for message in ({"role": "user", "content": [{"type": "text", "text": "a"}]}, {"role": "user"}):
            with pytest.raises(ValueError, match="plain text needs a string `content`"):
                conversation_text([message])
        with pytest.raises(ValueError, match="has tool calls"):
            conversation_text([{"role": "assistant", "content": "a", "tool_calls": []}])

    @settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
    @given(
        contents=st.lists(st.tuples(st.text("xyz", max_size=3), st.text("pqr", max_size=3)), min_size=1, max_size=4),
        final=st.booleans(),
        window=st.none() | st.integers(1, 3),
        max_length=st.none() | st.integers(3, 12),
    )
    def test_properties(self, t5, contents, final, window, max_length):
        messages = [
            {"role": role, "content": content}
            for pair in contents
            for role, content in zip(("user", "assistant"), pair, strict=True)
        ]
        messages += [FINAL] if final else []
        row = {"messages": messages, "rewards": [float(2**i) for i in range(len(contents))], "truncated": final}
        rows = prepare(t5, row, history_window=window, max_length=max_length)
        assert len(rows) == len(contents)
        for i, (row, (_, reply)) in enumerate(zip(rows, contents, strict=True)):
            check_row(row, len(t5), "Row 0", max_length, START)
            whole = [START, *chars(reply), EOS]
            cut = max_length is not None and len(whole) > max_length
            assert row["decoder_input_ids"] == (whole[:max_length] if cut else whole)
            assert row["truncated"] == cut
            assert sum(row["rewards"]) == (0.0 if cut else 2.0**i)
            last = i == len(contents) - 1
            if cut or (last and not final):
                assert row["next_input_ids"] == []
            elif not last:
                assert row["next_input_ids"] == rows[i + 1]["input_ids"]
            context = t5(conversation_text(window_messages(messages[: 2 * i + 1], window)))["input_ids"]
            expected = context if max_length is None else [*context[:-1][-(max_length - 1) :], EOS]
            assert row["input_ids"] == expected


class TestSamples:
    def test_turns(self, t5):
        rows = prepare(t5, {"samples": ["ab", "c", "d", "ef"], "rewards": 2.0})
        assert [row["input_ids"] for row in rows] == [[*chars("ab"), EOS], [*chars("abcd"), EOS]]
        assert [row["decoder_input_ids"] for row in rows] == [[START, *chars(x), EOS] for x in ("c", "ef")]
        assert [row["rewards"] for row in rows] == [[0.0, 0.0], [0.0, 0.0, 2.0]]
        assert [row["next_input_ids"] for row in rows] == [rows[1]["input_ids"], []]

    def test_string_has_an_empty_prompt(self, t5, bart, make_seq2seq_tokenizer):
        for tokenizer, empty in ((t5, [EOS]), (bart, [BOS, EOS])):
            (row,) = prepare(tokenizer, {"samples": "ab", "rewards": 1.0})
            assert row["input_ids"] == empty == tokenizer("")["input_ids"]
        with pytest.raises(ValueError, match="Row 0: the prompt has no tokens"):
            prepare(make_seq2seq_tokenizer(None), {"samples": "ab", "rewards": 1.0})

    def test_truncated(self, t5):
        rows = prepare(t5, {"samples": ["a", "b", "c", "d"], "rewards": 2.0, "truncated": True})
        assert [row["decoder_input_ids"] for row in rows] == [[START, *chars("b"), EOS], [START, *chars("d")]]
        assert [row["truncated"] for row in rows] == [False, True]


class TestMaxLength:
    @pytest.mark.parametrize("name", ["t5", "bart"])
    def test_encoder_keeps_its_end_and_its_special_tokens(self, request, name):
        tokenizer = request.getfixturevalue(name)
        (row,) = prepare(tokenizer, {**TEXT, "prompt": "abcdefgh"}, max_length=5)
        kept = [BOS, *chars("fgh"), EOS] if name == "bart" else [*chars("efgh"), EOS]
        assert row["input_ids"] == kept
        assert tokenizer.truncation_side == "right"
        tokenizer.truncation_side = "left"
        assert tokenizer("abcdefgh", truncation=True, max_length=5)["input_ids"] == kept
        tokenizer.truncation_side = "right"

    def test_encoder_cut_of_a_template(self, make_seq2seq_tokenizer):
        tokenizer = make_seq2seq_tokenizer("$A </s>", chatml=True)
        whole, cut = prepare(tokenizer, CHAT), prepare(tokenizer, CHAT, max_length=20)
        assert [row["input_ids"] for row in cut] == [row["input_ids"][-20:] for row in whole]
        assert cut[0]["next_input_ids"] == cut[1]["input_ids"]

    def test_decoder_cut_is_truncated(self, t5):
        first, second = prepare(t5, {"messages": EPISODE, "rewards": [1.0, 2.0]}, max_length=3)
        assert first["decoder_input_ids"] == [START, *chars("bc")]
        assert (first["truncated"], first["rewards"], first["next_input_ids"]) == (True, [0.0, 0.0], [])
        assert first["states_ixs"] == [0, 1, 2]
        assert (second["truncated"], second["rewards"]) == (False, [0.0, 2.0])


class TestErrors:
    @pytest.mark.parametrize(
        ("row", "options", "match"),
        [
            (TEXT, {"truncation_side": "left"}, 'truncation_side="left" would cut the start off the decoder'),
            (TEXT, {"vocab_size": 20}, "Row 0: token id .* lies outside the vocabulary"),
            (TEXT, {"history_window": 1}, "needs a conversational dataset"),
            (TEXT, {"max_length": 1}, "Row 0: no action tokens are left"),
            ({**TEXT, "completion": "", "truncated": True}, {}, "Row 0: turn 0 has the reward 1.5 but no action"),
            ({**CHAT, "messages": EPISODE[2:]}, {}, "Row 0: A policy acts on an observation"),
            ({**CHAT, "rewards": [1.0]}, {}, "Row 0: got 1 rewards for 2 assistant turns"),
            ({**CHAT, "tools": "[{}]"}, {}, "Row 0: `tools` and `chat_template_kwargs` are for a chat template"),
            (
                {"messages": [FINAL, {"role": "assistant", "content": None}], "reward": 1.0},
                {},
                "Row 0: a message of the role 'assistant' has `content` of type NoneType",
            ),
            ({"samples": ["a"], "rewards": 1.0}, {}, "Row 0: `samples` must be a string or a list of strings"),
            ({"samples": None, "rewards": 1.0}, {}, "Row 0: `samples` must be a string or a list of strings"),
        ],
    )
    def test_row_raises(self, t5, row, options, match):
        with pytest.raises(ValueError, match=match):
            prepare(t5, row, **options)

    def test_rows_of_the_other_kind_raise(self, t5):
        (seq2seq,) = prepare(t5, TEXT)
        with pytest.raises(ValueError, match="have `decoder_input_ids`, which a causal language model does not read"):
            prepare(None, seq2seq, decoder_start_token_id=None)
        del seq2seq["decoder_input_ids"]
        with pytest.raises(ValueError, match="have no `decoder_input_ids`, which an encoder-decoder model needs"):
            prepare(None, seq2seq)


class TestPrepared:
    def test_preparing_twice_changes_nothing(self, t5):
        prepared = prepare_dataset(Dataset.from_list([CHAT]), t5, decoder_start_token_id=START)
        assert prepare_dataset(prepared, decoder_start_token_id=START).data == prepared.data

    def test_streaming_equals_map_style(self, t5):
        stream = IterableDataset.from_generator(lambda: iter([CHAT, CHAT]))
        rows = prepare_dataset(stream, t5, decoder_start_token_id=START)
        assert list(rows) == prepare(t5, CHAT, CHAT)
        assert list(prepare_dataset(rows, decoder_start_token_id=START)) == prepare(t5, CHAT, CHAT)

    GOOD = {
        "input_ids": [5, 6],
        "attention_mask": [1, 1],
        "decoder_input_ids": [0, 7, 8, 2],
        "rewards": [0.0, 0.0, 1.0],
        "states_ixs": [0, 1, 2, 3],
        "actions_ixs": [0, 1, 2],
        "dones": [1, 1, 1, 0],
    }

    @pytest.mark.parametrize(
        ("change", "match"),
        [
            ({"decoder_input_ids": [7, 8, 2, 2]}, "must begin with the decoder start token 0"),
            ({"decoder_input_ids": [0, 7, 2]}, r"`actions_ixs` must increase strictly within \[0, 1\]"),
            ({"decoder_input_ids": None}, "`decoder_input_ids` is None"),
            ({"decoder_input_ids": [0, 7, 8, 9]}, "token id 9 lies outside the vocabulary of 9"),
            ({"input_ids": [5, 9]}, "token id 9"),
            ({"input_ids": [], "attention_mask": []}, "`input_ids` is empty"),
            ({"next_input_ids": [9]}, "token id 9"),
            ({"attention_mask": [1, 1, 1, 1]}, "`attention_mask` has 4 entries, 2 are needed"),
            ({"states_ixs": [0, 1, 2, 4]}, "`states_ixs` must be `actions_ixs` followed by"),
            ({"dones": [1, 1, 1, 1]}, "`dones` must be 1 for every action and 0"),
            ({"decoder_input_ids": [0, 7, 8, 2, 3, 4]}, "6 tokens are more than max_length=5"),
            ({"input_ids": [5] * 6, "attention_mask": [1] * 6}, "6 tokens are more than max_length=5"),
        ],
    )
    def test_bad_row_raises(self, change, match):
        check_row(self.GOOD, 9, "Row 4", 5, 0)
        with pytest.raises(ValueError, match=f"Row 4: .*{match}"):
            check_row({**self.GOOD, **change}, 9, "Row 4", 5, 0)


class TestDataCollatorForSeq2SeqILQL:
    def test_docstring(self):
        run_docstring(DataCollatorForSeq2SeqILQL, 4)

    def test_batch_fields(self, t5):
        rows = prepare(t5, {**CHAT, "weight": 2.0}, {"messages": EPISODE[1:3], "rewards": [1.0], "weight": 1.0})
        batch = DataCollatorForSeq2SeqILQL(pad_token_id=9, pad_to_multiple_of=4)(rows)
        fields = ILQLSeq2SeqBatch(**batch)
        assert fields.decoder_input_ids.tolist() == [
            [START, *chars("bc"), EOS],
            [START, *chars("e"), EOS, 9],
            [START, *chars("bc"), EOS],
        ]
        assert fields.input_ids.shape[1] % 4 == 0 and fields.input_ids[0, -1] == 9
        assert fields.next_attention_mask.any(1).tolist() == [True, False, False]
        assert {name: x.dtype for name, x in batch.items() if not x.dtype == torch.long} == {
            "rewards": torch.float32,
            "truncated": torch.bool,
            "weight": torch.float32,
        }
        taken = fields.decoder_input_ids.gather(1, fields.actions_ixs + 1)[fields.dones[:, :-1].bool()]
        assert taken.tolist() == [token for row in rows for token in row["decoder_input_ids"][1:]]

    def test_rows_of_the_other_kind_raise(self, t5):
        rows = prepare(t5, TEXT)
        with pytest.raises(ValueError, match="`DataCollatorForSeq2SeqILQL`, for an encoder-decoder model"):
            DataCollatorForILQL()(rows)
        del rows[0]["decoder_input_ids"]
        with pytest.raises(ValueError, match="have no `decoder_input_ids`"):
            DataCollatorForSeq2SeqILQL()(rows)


class TestMakeExperience:
    SAMPLES = [["ab", "cde"], ["f", "gh", "i", "j"], "klm"]
    REWARDS = [1.0, 2.0, 6.0]

    def test_parity(self, golden_tokenizer):
        """Against a transcription of trlX's definition."""
        samples = ["a".join(["", "b"]), ["ab", "ba"], ["a", "bab", "b", "a"]]
        elements = make_experience_seq2seq(samples, self.REWARDS, golden_tokenizer, 64)
        returns = (np.array(self.REWARDS) - 3.0) / (np.std(self.REWARDS, ddof=1) + np.finfo(np.float64).eps)
        for sample, element, score in zip(samples, elements, returns, strict=True):
            messages = tokenize_dialogue(sample, golden_tokenizer, 64)
            source, target = messages[0].tokens, messages[1].tokens
            assert element.input_ids.tolist() == list(source)
            assert element.attention_mask.tolist() == [1] * len(source)
            assert element.decoder_input_ids.tolist() == list(target)
            assert element.actions_ixs.tolist() == list(range(len(target) - 1))
            assert element.states_ixs.tolist() == list(range(len(target)))
            assert element.dones.tolist() == [1] * (len(target) - 1) + [0]
            assert element.rewards.tolist() == pytest.approx([0.0] * (len(target) - 2) + [score])

    def test_decoder_start_makes_rows_to_train_on(self, t5):
        elements = make_experience_seq2seq(self.SAMPLES, self.REWARDS, t5, 64, decoder_start_token_id=START)
        # The phrase that ends a sample has an end.
        outputs = ([*chars("cde"), EOS], chars("gh"), [*chars("klm"), EOS])
        for element, said in zip(elements, outputs, strict=True):
            assert element.decoder_input_ids.tolist() == [START, *said]
            assert element.actions_ixs.tolist() == list(range(len(element.decoder_input_ids) - 1))
        data = Dataset.from_list([{k: x.tolist() for k, x in vars(element).items()} for element in elements])
        assert prepare_dataset(data, decoder_start_token_id=START, vocab_size=len(t5)) is not None
        parity = make_experience_seq2seq(self.SAMPLES, self.REWARDS, t5, 64)
        data = Dataset.from_list([{k: x.tolist() for k, x in vars(element).items()} for element in parity])
        with pytest.raises(ValueError, match="make_experience_seq2seq"):
            prepare_dataset(data, decoder_start_token_id=START)

    def test_bad_samples_raise(self, t5):
        with pytest.raises(ValueError, match="Sample 1 has no prompt with an output"):
            make_experience_seq2seq([["a", "b"], ["abcdef", "g"]], [1.0, 2.0], t5, 4)
        with pytest.raises(ValueError, match="Got 1 samples and 2 rewards"):
            make_experience_seq2seq([["a", "b"]], [1.0, 2.0], t5)
        assert make_experience_seq2seq([], [], t5) == []
