# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""One tiny model of each family, and rows to train it on."""

import random

import pytest
from datasets import Dataset

from hf_qrl import ILQLConfig, ILQLTrainer
from tests.conftest import BASES, SEQ2SEQ_BASES, VOCAB_SIZE


FAMILIES = [*BASES, *SEQ2SEQ_BASES]
QUIET = {
    "report_to": "none",
    "use_cpu": True,
    "disable_tqdm": True,
    "save_strategy": "no",
    "logging_strategy": "no",
    "per_device_train_batch_size": 4,
    "learning_rate": 1e-2,
    "alpha": 0.3,
    "max_steps": 2,
}


def draw_rows(seq2seq: bool, num_rows: int = 16, seed: int = 0) -> list[dict]:
    """Tokenised rows of uneven lengths; every third one is truncated."""
    generator = random.Random(seed)
    rows = []
    for i in range(num_rows):
        tokens = [generator.randrange(3, VOCAB_SIZE) for _ in range(generator.randint(4, 12))]
        actions = list(range(0 if seq2seq else generator.randint(0, 2), len(tokens) - 1))
        row = {
            "rewards": [round(generator.gauss(0, 1), 3) for _ in actions],
            "states_ixs": [*actions, len(tokens) - 1],
            "actions_ixs": actions,
            "dones": [1] * len(actions) + [0],
            "truncated": i % 3 == 0,
        }
        if seq2seq:
            prompt = [generator.randrange(3, VOCAB_SIZE) for _ in range(generator.randint(3, 9))]
            row |= {"input_ids": prompt, "decoder_input_ids": [0, *tokens[1:]]}
        else:
            row["input_ids"] = tokens
        row["attention_mask"] = [1] * len(row["input_ids"])
        rows.append(row)
    return rows


@pytest.fixture(params=FAMILIES)
def family(request) -> str:
    return request.param


@pytest.fixture
def base(family, make_base, make_seq2seq_base):
    return make_seq2seq_base(family) if family in SEQ2SEQ_BASES else make_base(family)


@pytest.fixture
def model(family, make_model, make_seq2seq_model):
    return make_seq2seq_model(family) if family in SEQ2SEQ_BASES else make_model(family)


@pytest.fixture
def inputs(family, model, make_ids, make_seq2seq_inputs):
    return make_seq2seq_inputs(model) if family in SEQ2SEQ_BASES else {"input_ids": make_ids()}


@pytest.fixture
def make_trainer(family, model, tmp_path):
    """Returns a function that makes a trainer; its keyword arguments are training arguments."""

    def make(trained=None, peft_config=None, output_dir=None, **args) -> ILQLTrainer:
        rows = draw_rows(family in SEQ2SEQ_BASES)
        if family == "bart":
            for row in rows:
                row["decoder_input_ids"][0] = 2
        return ILQLTrainer(
            model if trained is None else trained,
            args=ILQLConfig(str(output_dir or tmp_path / "out"), **{**QUIET, **args}),
            train_dataset=Dataset.from_list(rows),
            peft_config=peft_config,
        )

    return make
