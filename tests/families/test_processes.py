# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""
The table of the README, model family by layout of processes: two processes take the steps of one, and save a model
that loads in one. What is peculiar to a layout has tests of its own, in `tests/distributed`.
"""

import pytest
import torch
from datasets import Dataset

from hf_qrl import AutoModelForCausalLMWithILQLHeads, AutoModelForSeq2SeqLMWithILQLHeads
from tests.conftest import BASES, SEQ2SEQ_BASES
from tests.distributed.conftest import (  # noqa: F401
    CHUNK_ELEMENTS,
    SCRIPTS,
    Records,
    deepspeed_config,
    launch,
    shared,
)
from tests.families.conftest import FAMILIES, QUIET, draw_rows


# In units of the norm: see `tests/distributed/test_trainer.py`.
TOLERANCE = 1e-6
SHARDING = {
    "one": {},
    "ddp": {},
    "zero2": {"deepspeed": deepspeed_config(2)},
    "zero3": {"deepspeed": deepspeed_config(3)},
    "fsdp2": {"fsdp": {"version": 2}},
}


@pytest.fixture(scope="session")
def family_inputs(shared, make_model, make_seq2seq_model):  # noqa: F811
    def make(directory):
        for name in FAMILIES:
            model = make_seq2seq_model(name) if name in SEQ2SEQ_BASES else make_model(name)
            model.save_pretrained(directory / name)
            rows = draw_rows(name in SEQ2SEQ_BASES, num_rows=16)
            for row in rows if name == "bart" else ():
                row["decoder_input_ids"][0] = 2
            Dataset.from_list(rows).save_to_disk(directory / f"{name}_rows")

    return shared("family_inputs", make)


@pytest.fixture(scope="session")
def trained(shared, family_inputs):  # noqa: F811
    """Returns a function from a layout to the records of its processes."""

    def run(layout: str) -> Records:
        num_processes = 1 if layout == "one" else 2
        args = {**QUIET, "optim": "sgd", "learning_rate": 1e-3, "max_grad_norm": 1.0}
        args |= {"logging_strategy": "steps", "logging_steps": 1, "per_device_train_batch_size": 8 // num_processes}

        def make(directory):
            runs = [
                {
                    "name": name,
                    # ZeRO-3 cannot load an LM head of its own under a name that is called tied; see `check_ties`.
                    "live" if name == "flan_t5" else "model": str(family_inputs / name),
                    "data": str(family_inputs / f"{name}_rows"),
                    "args": {**args, "output_dir": str(directory / name)},
                    "save": str(directory / f"saved_{name}"),
                }
                for name in FAMILIES
                if not (layout == "fsdp2" and name in SEQ2SEQ_BASES)
            ]
            spec = {"record": str(directory), "chunk_elements": CHUNK_ELEMENTS, "deepspeed": None, "fsdp": None}
            launch(SCRIPTS / "train.py", {**spec, **SHARDING[layout], "runs": runs}, num_processes)

        return Records(shared(f"families_{layout}", make))

    return run


@pytest.fixture
def check(trained, family, relative_error):
    """Returns a function that compares a layout with one process."""

    def compare(layout: str) -> None:
        expected, records = trained("one")(family), trained(layout)
        got = records(family)
        assert relative_error(got["start"], expected["start"]) == 0
        assert relative_error(got["trained"], expected["trained"]) <= TOLERANCE
        assert relative_error(expected["trained"], expected["start"]) > 10 * TOLERANCE
        targets = [{k: x for k, x in side["heads"][-1].items() if "target_q" in k} for side in (got, expected)]
        assert relative_error(*targets) <= TOLERANCE
        losses = [[entry["loss"] for entry in side["log"] if "loss" in entry] for side in (got, expected)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-5) and len(losses[0]) == 2

        seq2seq = family in SEQ2SEQ_BASES
        auto_class = AutoModelForSeq2SeqLMWithILQLHeads if seq2seq else AutoModelForCausalLMWithILQLHeads
        saved = auto_class.from_pretrained(records.directory / f"saved_{family}").state_dict()
        assert saved.keys() == got["trained"].keys()
        assert not [name for name, tensor in got["trained"].items() if not torch.equal(saved[name], tensor)]

    return compare


def test_ddp(check):
    check("ddp")


@pytest.mark.slow
def test_zero2(check):
    check("zero2")


def test_zero3(check):
    check("zero3")


@pytest.mark.parametrize("family", BASES)  # encoder-decoder models are refused, see `check_processes`
def test_fsdp2(check, family):
    check("fsdp2")
