# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hf_qrl.data import DataCollatorForILQL, DialogMessage, make_experience, tokenize_dialogue
from hf_qrl.data.tokenization import output_spans


FIELDS = ("input_ids", "attention_mask", "rewards", "states_ixs", "actions_ixs", "dones")
EXPERIENCES = ["make_experience", "make_experience_single", "make_experience_truncated_right_ends_on_prompt"]
PHRASES = st.lists(st.text("abcz ", max_size=6), min_size=2, max_size=8).filter(lambda x: len(x) % 2 == 0)


class TestTokenizeDialogue:
    def test_goldens(self, golden, golden_tokenizer):
        for case in golden["tokenize_dialogue"]:
            golden_tokenizer.truncation_side = case["truncation_side"]
            out = tokenize_dialogue(case["dialogue"], golden_tokenizer, case["max_length"])
            assert [[m.is_output, list(m.tokens)] for m in out] == case["out"], case["index"]

    def test_keeps_an_eos_that_is_there(self, golden_tokenizer):
        assert tokenize_dialogue("a$", golden_tokenizer, 8) == tokenize_dialogue("a", golden_tokenizer, 8)

    def test_without_bos_token_starts_with_eos(self, tokenizer):
        tokenizer = type(tokenizer)(tokenizer_object=tokenizer._tokenizer, eos_token="<|im_end|>")
        out = tokenize_dialogue(["", "a"], tokenizer, 8)
        assert out[0] == DialogMessage(False, (tokenizer.eos_token_id,))

    @pytest.mark.parametrize(
        "dialogue, match", [(["a"], "even number"), ([], "even number"), (["a", None], "strings")]
    )
    def test_bad_dialogue_raises(self, golden_tokenizer, dialogue, match):
        with pytest.raises(ValueError, match=match):
            tokenize_dialogue(dialogue, golden_tokenizer, 8)

    @settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
    @given(phrases=PHRASES, max_length=st.integers(1, 30), side=st.sampled_from(["left", "right"]))
    def test_cut_is_a_window_of_the_whole(self, golden_tokenizer, phrases, max_length, side):
        golden_tokenizer.truncation_side = side
        whole = [t for m in tokenize_dialogue(phrases, golden_tokenizer) for t in m.tokens]
        cut_messages = tokenize_dialogue(phrases, golden_tokenizer, max_length)
        cut = [t for m in cut_messages for t in m.tokens]
        assert len(cut) <= max_length
        assert not cut_messages[0].is_output
        body = cut[1:] if cut[0] == golden_tokenizer.bos_token_id else cut
        whole = whole[1:] if whole[0] == golden_tokenizer.bos_token_id else whole
        assert body == (whole[: len(body)] if side == "right" else whole[len(whole) - len(body) :])
        for start, end in output_spans(cut_messages):
            assert 0 < start < end <= len(cut)


class TestMakeExperience:
    @pytest.mark.parametrize("key", EXPERIENCES)
    def test_goldens(self, golden, golden_tokenizer, key):
        case = golden[key]
        golden_tokenizer.truncation_side = case["truncation_side"]
        elements = make_experience(case["samples"], case["rewards"], golden_tokenizer, case["max_length"])
        for element, expected in zip(elements, case["elements"], strict=True):
            for field in FIELDS:
                dtype = torch.float32 if field == "rewards" else torch.long
                torch.testing.assert_close(
                    getattr(element, field), torch.tensor(expected[field], dtype=dtype), rtol=0, atol=1e-7
                )

    def test_collated_golden(self, golden, golden_tokenizer):
        case = golden["make_experience"]
        elements = make_experience(case["samples"], case["rewards"], golden_tokenizer, case["max_length"])
        batch = DataCollatorForILQL()([vars(element) for element in elements])
        for field in FIELDS:
            expected = torch.tensor(case["collated"][field], dtype=batch[field].dtype)
            torch.testing.assert_close(batch[field], expected, rtol=0, atol=1e-7)

    def test_equal_rewards_give_zero(self, golden_tokenizer):
        elements = make_experience(["a", "b", "c"], [0.1] * 3, golden_tokenizer, 8)
        assert all(element.rewards.abs().max() < 1e-12 for element in elements)

    def test_no_action_after_truncation_raises(self, golden_tokenizer):
        with pytest.raises(ValueError, match="Sample 1 has no output token left within max_length=4"):
            make_experience([["a", "b"], ["abcdef", "g"]], [0.0, 1.0], golden_tokenizer, 4)

    def test_count_mismatch_raises(self, golden_tokenizer):
        with pytest.raises(ValueError, match="2 samples and 1 rewards"):
            make_experience(["a", "b"], [1.0], golden_tokenizer, 8)

    def test_no_samples(self, golden_tokenizer):
        assert make_experience([], [], golden_tokenizer, 8) == []
