# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""A tiny Llama, uneven tokenised rows, and trainers that make no noise."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hf_qrl import AutoModelForCausalLMWithILQLHeads, ILQLConfig, ILQLTrainer


VOCAB_SIZE = 24
SCRIPT = Path(__file__).parent / "scripts" / "train.py"
QUIET = {
    "report_to": "none",
    "use_cpu": True,
    "disable_tqdm": True,
    "save_strategy": "no",
    "logging_strategy": "no",
    "per_device_train_batch_size": 4,
    "max_steps": 2,
}


def draw_rows(num_rows: int, seed: int = 0, weight: bool = False, truncated: bool = False) -> list[dict]:
    """Tokenised rows of 3 to 14 tokens, of which between one and all but the first are actions."""
    generator = random.Random(seed)
    rows = []
    for i in range(num_rows):
        length = generator.randint(3, 14)
        actions = sorted(generator.sample(range(length - 1), generator.randint(1, length - 1)))
        turns = [
            sum(b - a > 1 for a, b in zip(actions[:j], actions[1 : j + 1], strict=True)) for j in range(len(actions))
        ]
        row = {
            "input_ids": [generator.randrange(1, VOCAB_SIZE) for _ in range(length)],
            "attention_mask": [1] * length,
            "rewards": [round(generator.gauss(0, 1), 3) for _ in actions],
            "states_ixs": [*actions, length - 1],
            "actions_ixs": actions,
            "dones": [1] * len(actions) + [0],
            "turn_ixs": turns,
        }
        if truncated:
            row["truncated"] = i % 3 == 0
        if weight:
            row["weight"] = round(generator.uniform(0.25, 2.0), 3)
        rows.append(row)
    return rows


@pytest.fixture(scope="session")
def make_rows():
    return draw_rows


@pytest.fixture(scope="session")
def make_dataset():
    """Returns a function that makes a dataset of uneven rows; see `draw_rows`."""

    def make(num_rows: int = 16, **kwargs) -> Dataset:
        return Dataset.from_list(draw_rows(num_rows, **kwargs))

    return make


@pytest.fixture(scope="session")
def make_base():
    """Returns a function that makes a tiny Llama without heads."""

    def make(seed: int = 0, **config) -> LlamaForCausalLM:
        torch.manual_seed(seed)
        defaults = {
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "max_position_embeddings": 64,
            "bos_token_id": None,
            "eos_token_id": None,
        }
        return LlamaForCausalLM(LlamaConfig(**{**defaults, **config}))

    return make


@pytest.fixture(scope="session")
def make_model(make_base):
    """Returns a function that makes a tiny Llama with heads, the same at every call."""

    def make(seed: int = 0, config: dict | None = None, **head_arguments):
        base = make_base(seed, **(config or {}))
        return AutoModelForCausalLMWithILQLHeads.from_pretrained(base, **head_arguments)

    return make


@pytest.fixture
def make_trainer(tmp_path, make_model, make_dataset):
    """Returns a function that makes a trainer; keyword arguments that `ILQLTrainer` lacks go into its `args`."""

    def make(model=None, train_dataset=None, output_dir=None, trainer_kwargs=None, **args) -> ILQLTrainer:
        return ILQLTrainer(
            make_model() if model is None else model,
            args=ILQLConfig(str(output_dir or tmp_path / "out"), **{**QUIET, **args}),
            train_dataset=make_dataset() if train_dataset is None else train_dataset,
            **(trainer_kwargs or {}),
        )

    return make


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    words = ["<pad>", "<unk>", "<eos>", *"a b c d e f g h i j k l m n o p q r s t u".split()]
    backend = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", unk_token="<unk>", eos_token="<eos>")


@pytest.fixture(scope="session")
def state_of():
    """Returns a function that copies parameters and buffers of a trainer's model."""

    def copy(trainer: ILQLTrainer) -> dict[str, torch.Tensor]:
        return {k: x.detach().clone() for k, x in trainer.accelerator.unwrap_model(trainer.model).state_dict().items()}

    return copy


@pytest.fixture
def run_script(tmp_path):
    """Returns a function that trains in processes of its own; see `scripts/train.py` for the options."""

    def run(model, dataset, args: dict, output_dir, num_processes: int = 1, **options) -> subprocess.CompletedProcess:
        work = tmp_path / "script"
        model.save_pretrained(work / "model")
        dataset.save_to_disk(work / "data")
        arguments = {**QUIET, **args, "output_dir": str(output_dir)}
        spec = {"model": str(work / "model"), "data": str(work / "data"), "args": arguments, **options}
        (work / "spec.json").write_text(json.dumps(spec))
        launcher = []
        if num_processes > 1:
            launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(num_processes)]
        return subprocess.run(
            [sys.executable, *launcher, str(SCRIPT), str(work / "spec.json")],
            env={**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads()), "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            timeout=300,
        )

    return run
