# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
import doctest

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_qrl.data import DataCollatorForILQL, ILQLBatch
from hf_qrl.data.rows import build_row


def row(length, **extra):
    return {**build_row(list(range(3, 3 + length)), [(1, length)], [1.0], terminated=True), **extra}


class TestDataCollatorForILQL:
    def test_docstring(self):
        text = DataCollatorForILQL.__doc__.replace("```python", "").replace("```", "")
        example = doctest.DocTestParser().get_doctest(text, {}, "DataCollatorForILQL", None, None)
        assert doctest.DocTestRunner().run(example).failed == 0

    def test_dtypes_and_batch_fields(self):
        batch = DataCollatorForILQL()([row(4, weight=2.0, next_input_ids=[1], next_attention_mask=[1]), row(3)][:1])
        dtypes = {name: tensor.dtype for name, tensor in batch.items()}
        assert dtypes == {
            "input_ids": torch.long,
            "attention_mask": torch.long,
            "rewards": torch.float32,
            "states_ixs": torch.long,
            "actions_ixs": torch.long,
            "dones": torch.long,
            "truncated": torch.bool,
            "weight": torch.float32,
            "turn_ixs": torch.long,
            "next_input_ids": torch.long,
            "next_attention_mask": torch.long,
        }
        ILQLBatch(**batch)

    def test_next_rows(self):
        examples = [
            row(3, next_input_ids=[7, 8], next_attention_mask=[1, 1]),
            row(3, next_input_ids=[], next_attention_mask=[]),
        ]
        batch = DataCollatorForILQL(pad_token_id=9)(examples)
        assert batch["next_input_ids"].tolist() == [[7, 8], [9, 9]]
        assert batch["next_attention_mask"].tolist() == [[1, 1], [0, 0]]
        batch = DataCollatorForILQL(pad_token_id=9)(examples[1:])
        assert batch["next_attention_mask"].tolist() == [[0]]

    def test_attention_mask_defaults_to_ones_over_tokens(self):
        examples = [row(4), row(2)]
        for example in examples:
            del example["attention_mask"]
        assert DataCollatorForILQL()(examples)["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]

    @pytest.mark.parametrize("name", ["input_ids", "rewards", "states_ixs", "actions_ixs", "dones"])
    def test_missing_rewards_raise(self, name):
        example = row(3)
        del example[name]
        with pytest.raises(KeyError, match=name):
            DataCollatorForILQL()([example])

    @settings(max_examples=50, deadline=None)
    @given(lengths=st.lists(st.integers(2, 9), min_size=1, max_size=5), multiple=st.none() | st.integers(1, 8))
    def test_padding(self, lengths, multiple):
        examples = [row(length) for length in lengths]
        batch = DataCollatorForILQL(pad_token_id=1, pad_to_multiple_of=multiple)(examples)
        width = batch["input_ids"].shape[1]
        assert max(lengths) <= width < max(lengths) + (multiple or 1)
        assert width % (multiple or 1) == 0
        for i, example in enumerate(examples):
            for name, values in example.items():
                if name == "truncated":
                    continue
                padded = batch[name][i]
                assert padded[: len(values)].tolist() == values
                assert (padded[len(values) :] == (1 if name == "input_ids" else 0)).all()
        mask = batch["dones"][:, :-1].bool()
        taken = batch["input_ids"].gather(1, batch["actions_ixs"] + 1)
        assert mask.sum(1).tolist() == [length - 1 for length in lengths]
        assert (taken[mask] >= 4).all()
