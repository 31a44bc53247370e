# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""
FSDP2 by hand, `fully_shard` on layers, heads and model, on CPUs; `test_trainer.py` has the trainer's. The tolerance is
that of the order of float32 sums (seen: 2e-7 of the norm).
"""

import pytest
import torch
from safetensors.torch import load_file

from hf_qrl import AutoModelForCausalLMWithILQLHeads


ALPHA = 0.2
TOLERANCE = 1e-6


@pytest.fixture(scope="module", params=["mlp", "linear", "tied", "dueling"])
def head_type(request) -> str:
    return request.param


@pytest.fixture(scope="module", params=["", "_tied"], ids=["own embeddings", "tied embeddings"])
def embeddings(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def run(head_type, embeddings) -> str:
    return f"{head_type}{embeddings}"


class TestFSDP2:
    def test_steps_equal_one_process(self, sharded, relative_error, run):
        got, expected = sharded(2)(run), sharded(1)(run)
        assert got["parameters"] and got["sharded"] == got["parameters"] and not expected["sharded"]
        assert relative_error(got["state"], expected["state"]) <= TOLERANCE
        for ours, theirs in zip(got["heads"], expected["heads"], strict=True):
            targets = [{k: x for k, x in heads.items() if "target_q" in k} for heads in (ours, theirs)]
            assert relative_error(*targets) <= TOLERANCE
        assert got["losses"] == pytest.approx(expected["losses"], rel=1e-5)
        moved = relative_error(got["heads"][-1], got["heads"][0])
        assert moved > 100 * TOLERANCE

    def test_processes_agree(self, sharded, assert_same_bits, run):
        assert_same_bits(sharded(2)(run)["state"], sharded(2)(run, rank=1)["state"])

    def test_targets_move_by_the_rule(self, sharded, polyak_error, run):
        heads = sharded(2)(run)["heads"]
        assert polyak_error(heads, ALPHA) <= 1e-6
        assert polyak_error(heads, 0.0) > 1e-4

    def test_generation_and_logits(self, sharded, run):
        got, expected = sharded(2)(run), sharded(1)(run)
        assert torch.equal(got["generated"], expected["generated"])
        torch.testing.assert_close(got["logits"], expected["logits"], rtol=0, atol=1e-4)

    def test_full_state_dict_is_a_model(self, sharded, assert_same_bits, run):
        records = sharded(2)
        directory, state = records.directory / f"saved_{run}", records(run)["state"]
        assert all(x.numel() > 0 for x in load_file(directory / "model.safetensors").values())
        assert_same_bits(dict(AutoModelForCausalLMWithILQLHeads.from_pretrained(directory).state_dict()), state)

    def test_partitioned_model_refuses_to_save_itself(self, sharded, run):
        assert "partitioned over processes" in sharded(2)(run)["save_error"]
