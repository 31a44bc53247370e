# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""
Two processes on CPUs take the steps that one process takes with the same rows, however the model is spread over them.
For FSDP2 accelerate is told that CPUs will do (`scripts/train.py`).

SGD is linear in the gradient, so what differs is the order of float32 sums: 2e-9 to 2e-8 of the weights' norm is seen,
1e-6 allowed. AdamW divides by the size of the gradient, which may turn the rounding of gradients near zero into whole
steps of the learning rate 1e-3: 1e-5 is allowed, 2e-8 seen. Targets follow the rule, replayed in float64 on the online
heads, to the rounding of float32.
"""

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file

from hf_qrl import AutoModelForCausalLMWithILQLHeads


ALPHA = 0.1
TOLERANCE = {"sgd": 1e-6, "adamw": 1e-5}
BACKENDS = [
    pytest.param("zero1", marks=pytest.mark.slow),
    "ddp",
    pytest.param("zero2", marks=pytest.mark.slow),
    "zero3",
    "fsdp2",
]
RUNS = {
    "sgd": "sgd",
    "adamw": "adamw",
    "fresh": "sgd",
    "live": "sgd",
    "only_heads": "sgd",
    "uneven": "sgd",
    "ragged": "sgd",
    "watched": "adamw",
    "resumed": "adamw",
    "peft": "adamw",
    "peft_resumed": "adamw",
}


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def records(trained, backend):
    return trained(backend)


@pytest.fixture(scope="module")
def single(trained):
    return trained("one")


def same_numbers(got: list[dict], expected: list[dict], tolerance: float) -> None:
    assert len(got) == len(expected) > 0
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.keys() == theirs.keys()
        # The number of batches in an epoch, and so its fraction, depends on their size.
        for name in set(theirs) - {"epoch"}:
            assert ours[name] == pytest.approx(theirs[name], rel=tolerance, abs=tolerance), name


class TestSteps:
    @pytest.mark.parametrize("run", RUNS)
    def test_equal_one_process(self, records, single, relative_error, run):
        got, expected = records(run), single(run)
        tolerance = TOLERANCE[RUNS[run]]
        assert relative_error(got["start"], expected["start"]) <= (tolerance if "resumed" in run else 0)
        assert len(got["heads"]) == len(expected["heads"])
        for ours, theirs in zip(got["heads"], expected["heads"], strict=True):
            assert relative_error(ours, theirs) <= tolerance
            targets = [{k: x for k, x in heads.items() if "target_q" in k} for heads in (ours, theirs)]
            assert relative_error(*targets) <= tolerance
        assert relative_error(got["trained"], expected["trained"]) <= tolerance
        # Every step moved the weights by more than could hide in the tolerance.
        assert relative_error(got["trained"], got["start"]) > 10 * tolerance

    @pytest.mark.parametrize("run", RUNS)
    def test_losses_equal_those_of_one_process(self, records, single, run):
        logs = [[entry for entry in side(run)["log"] if "loss" in entry] for side in (records, single)]
        same_numbers(*logs, tolerance={"sgd": 5e-6, "adamw": 1e-4}[RUNS[run]])

    @pytest.mark.parametrize("run", RUNS)
    def test_processes_agree(self, records, assert_same_bits, run):
        first, second = records(run), records(run, rank=1)
        for name in ("start", "trained", "state"):
            assert_same_bits(first[name], second[name])
        for ours, theirs in zip(first["heads"], second["heads"], strict=True):
            assert_same_bits(ours, theirs)

    @pytest.mark.parametrize("run", [name for name in RUNS if name != "only_heads"])
    def test_targets_move_by_the_rule(self, records, polyak_error, run):
        heads = records(run)["heads"]
        assert polyak_error(heads, ALPHA) <= 1e-6
        assert polyak_error(heads, 0.0) > 1e-4

    def test_targets_of_returns_are_copies(self, records):
        for heads in records("only_heads")["heads"][1:]:
            targets = {name: x for name, x in heads.items() if name.startswith("target_q")}
            assert targets and all(torch.equal(x, heads[name.removeprefix("target_")]) for name, x in targets.items())

    def test_frozen_language_model_stays(self, records):
        record = records("only_heads")
        base = [name for name in record["start"] if name.startswith("base.")]
        assert base and all(torch.equal(record["trained"][name], record["start"][name]) for name in base)


class TestHalfPrecision:
    def test_losses_are_near_those_of_one_process(self, records, single):
        losses = [[e["loss"] for e in side("half")["log"] if "loss" in e] for side in (records, single)]
        assert len(losses[0]) == 3 and losses[0] == pytest.approx(losses[1], rel=0.02)

    def test_targets_stay_float32(self, records, polyak_error, assert_same_bits):
        """DeepSpeed holds the online heads in bfloat16, and the numbers that it steps on in float32 besides."""
        first, second = records("half"), records("half", rank=1)
        targets = {name: x for name, x in first["state"].items() if ".target_q." in name}
        assert {x.dtype for x in targets.values()} == {torch.float32}
        assert polyak_error(first["heads"], ALPHA) <= 1e-6 < polyak_error(first["heads"], 0.0)
        assert_same_bits(first["state"], second["state"])


class TestLoading:
    @pytest.mark.parametrize("run", RUNS)
    def test_weights_are_partitioned(self, records, backend, run):
        """ZeRO-3 leaves nothing between forwards, FSDP2 each process its rows; a bias of one number is one's own."""
        shares = records(run)["shares"].values()
        if backend == "fsdp2":
            assert max(shares) <= 1 and sorted(shares)[len(shares) // 2] == 0.5
        else:
            assert set(shares) == {0.0 if backend == "zero3" else 1.0}

    def test_fresh_heads_are_drawn_as_in_one_process(self, records, single, assert_same_bits):
        start = records("fresh")["start"]
        assert_same_bits(start, single("fresh")["start"])
        assert all(bool(x.any()) for name, x in start.items() if name.startswith("heads."))
        targets = [name for name in start if ".target_q." in name and ".offset." not in name]
        assert targets and all(torch.equal(start[k], start[k.replace("target_q", "q")]) for k in targets)

    def test_heads_of_a_partitioned_model_grow(self, records, single, assert_same_bits):
        first, second = (records("resized", rank)["start"] for rank in range(2))
        assert_same_bits(first, second)
        heads = [{k: x for k, x in s.items() if k.startswith("heads.")} for s in (first, single("resized")["start"])]
        assert heads[0]["heads.q.0.weight"].shape[0] == heads[0]["heads.target_q.0.weight"].shape[0] == 24 + 5
        assert_same_bits(*heads)

    def test_processes_with_other_seeds_begin_with_the_first_ones_weights(self, records, single, assert_same_bits):
        expected = single("live")["start"]
        for rank in range(2):
            assert_same_bits(records("live", rank)["start"], expected)


class TestResuming:
    def test_resumed_run_is_exact(self, records, assert_same_bits):
        unbroken, resumed = records("watched"), records("resumed")
        # Right after loading, and at the end.
        assert_same_bits(resumed["heads"][0], unbroken["heads"][2])
        assert_same_bits(resumed["heads"][-1], unbroken["heads"][-1])
        assert_same_bits(resumed["trained"], unbroken["trained"])

    def test_resumed_adapter_is_exact(self, records, assert_same_bits):
        unbroken, resumed = records("peft"), records("peft_resumed")
        assert_same_bits(resumed["heads"][0], unbroken["heads"][2])
        assert_same_bits(resumed["trained"], unbroken["trained"])


class TestSaving:
    @pytest.mark.parametrize("run", ["sgd", "adamw"])
    def test_saved_model_loads_in_one_process(self, records, assert_same_bits, run):
        directory, state = records.directory / f"saved_{run}", records(run)["state"]
        saved = load_file(directory / "model.safetensors")
        assert all(x.numel() > 0 for x in saved.values())
        # A tied output embedding is saved once, or, by DeepSpeed, as a copy of the other.
        embedding = saved["base.model.embed_tokens.weight"]
        tied = torch.equal(saved.get("base.lm_head.weight", embedding), embedding)
        assert tied == (run == "adamw")
        assert set(state) - set(saved) <= {"base.lm_head.weight"}
        model = AutoModelForCausalLMWithILQLHeads.from_pretrained(directory)
        assert_same_bits(dict(model.state_dict()), state)

    def test_checkpoint_is_a_model_too(self, records, assert_same_bits):
        record = records("resumed")
        model = AutoModelForCausalLMWithILQLHeads.from_pretrained(records.directory / "resumed" / "checkpoint-4")
        assert_same_bits(dict(model.state_dict()), record["trained"])

    def test_saved_adapter_holds_the_whole_heads(self, records, inputs, assert_same_bits):
        directory, state = records.directory / "saved_peft", records("peft")["state"]
        saved = load_file(directory / "adapter_model.safetensors")
        assert all(x.numel() > 0 for x in saved.values())
        model = AutoModelForCausalLMWithILQLHeads.from_pretrained(inputs / "mlp")
        adapted = PeftModel.from_pretrained(model, directory)
        got = dict(adapted.get_base_model().state_dict())
        trained = [name for name in got if "lora_" in name or "heads.modules_to_save" in name]
        assert len(trained) > 20
        assert_same_bits({k: got[k] for k in trained}, {k: state[k] for k in trained})
        heads = [name for name in trained if ".q." in name and "modules_to_save" in name]
        first = records("peft")["start"]
        assert heads and all(not torch.equal(got[name], first[name]) for name in heads)

    def test_partitioned_model_refuses_to_save_itself(self, records, backend):
        error = records("sgd").get("save_error")
        if backend in ("zero3", "fsdp2"):
            assert "partitioned over processes" in error and "trainer.save_model" in error
        else:
            assert error is None


class TestWatching:
    def test_evaluation_equals_that_of_one_process(self, records, single):
        names = ("eval_loss", "eval_q/mean", "eval_advantage/std", "eval_truncated_fraction")
        entries = [[e for e in side("watched")["log"] if "eval_loss" in e] for side in (records, single)]
        assert len(entries[0]) == len(entries[1]) == 2
        for ours, theirs in zip(*entries, strict=True):
            for name in names:
                assert ours[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-4), name

    def test_best_model_is_loaded_at_the_end(self, records, assert_same_bits):
        record = records("watched")
        losses = {e["step"]: e["eval_loss/q"] for e in record["log"] if "eval_loss/q" in e}
        best = min(losses, key=lambda step: losses[step])
        assert Path(record["best"]).name == f"checkpoint-{best}"
        heads = {name.removeprefix("heads."): x for name, x in record["state"].items() if name.startswith("heads.")}
        assert_same_bits(heads, record["heads"][best])

    def test_completions_are_printed_once(self, records):
        records("watched")
        assert [records.log().count(f"Completions at step {step}") for step in (2, 4)] == [1, 1]

    def test_generation_in_a_callback(self, records, single):
        first, second = records("fresh")["generated"][0], records("fresh", rank=1)["generated"][0]
        # As many new tokens as each process asked for.
        assert (first.shape[1], second.shape[1]) == (3 + 4, 3 + 7)
        assert torch.equal(first, single("fresh")["generated"][0])


def test_models_saved_by_all_backends_are_alike(trained, relative_error):
    directories = [trained(backend).directory / "saved_sgd" for backend in ("one", "ddp", "zero3", "fsdp2")]
    first, *others = [load_file(directory / "model.safetensors") for directory in directories]
    assert all(relative_error(state, first) <= TOLERANCE["sgd"] for state in others)
    config, *others = [json.loads((directory / "config.json").read_text()) for directory in directories]
    assert all(other == config for other in others)


def test_targets_need_not_be_sent_at_each_forward(trained, assert_same_bits):
    """DDP does it by default, and the trainer does not."""
    records = trained("ddp")
    assert_same_bits(records("broadcast")["trained"], records("sgd")["trained"])
