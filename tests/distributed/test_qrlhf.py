# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""
Autoregressive Q-learning in two processes on CPUs takes the steps of one process, as ILQL does; `test_trainer.py` says
where the tolerances come from.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from hf_qrl import AutoModelForCausalLMWithILQLHeads, LlamaDuelingQForCausalLM
from tests.distributed.conftest import CHUNK_ELEMENTS, SCRIPTS, Records, deepspeed_config, launch


pytestmark = pytest.mark.slow

EMA_BETA = 0.9
TOLERANCE = {"sgd": 1e-6, "adamw": 1e-5}
BACKENDS = ["ddp", "zero2", "zero3", "fsdp2"]
RUNS = {
    "sgd": "sgd",
    "fresh": "adamw",
    "wrapped": "sgd",
    "no_cloning": "sgd",
    "peft": "adamw",
    "peft_resumed": "adamw",
}
AVERAGED = ["average", "average_resumed", "peft_average"]
QUIET = {"report_to": "none", "use_cpu": True, "disable_tqdm": True, "save_strategy": "no"}
BASIC = {"gamma": 0.9, "conservative_scale": 0.5, "cloning_scale": 0.7, "ema_beta": EMA_BETA, "q_min": -9.0}
LOGGING = {"logging_strategy": "steps", "logging_steps": 1}
SGD = {"optim": "sgd", "learning_rate": 0.05, **LOGGING}
ADAMW = {"optim": "adamw_torch", "learning_rate": 1e-3, **LOGGING}
SAVING = {"save_strategy": "steps", "save_steps": 2}


def make_models(inputs: Path, directory: Path) -> None:
    """A Llama with a dueling head and a model with one ILQL head, whose targets are no copies."""
    torch.manual_seed(0)
    for suffix in ("", "_tied"):
        base = LlamaForCausalLM.from_pretrained(inputs / f"base{suffix}")
        wrapped = {"head_type": "dueling", "num_q_heads": 1}
        for name, model in {
            "wrapped": AutoModelForCausalLMWithILQLHeads.from_pretrained(base, **wrapped),
            "dueling": LlamaDuelingQForCausalLM.from_base(base),
        }.items():
            for buffer in model.heads.target_q.buffers():
                buffer.add_(0.05 * torch.randn_like(buffer))
            model.save_pretrained(directory / f"{name}{suffix}")


def runs_of(inputs: Path, models: Path, output: Path, num_processes: int) -> list[dict[str, Any]]:
    """The same optimizer steps of 16 rows, in one process or in two that accumulate two micro-batches of 4."""
    batch = {**QUIET, **BASIC, "per_device_train_batch_size": 16}
    if num_processes == 2:
        batch |= {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    evaluation = {"eval_strategy": "steps", "eval_steps": 3, "per_device_eval_batch_size": 2}
    averaging = {"target_network": "model", "ema_warmup_steps": 1, "max_steps": 4}
    lora = {"r": 4, "init_lora_weights": False}
    runs: list[dict[str, Any]] = [
        {
            "name": "sgd",
            "model": str(models / "dueling"),
            "num_eval_rows": 7,
            "args": {**batch, **SGD, **evaluation, "max_steps": 5, "double_q": True, "mc_floor": True, "n_step": 2},
        },
        {"name": "fresh", "model": str(inputs / "base_tied"), "args": {**batch, **ADAMW, "max_steps": 3}},
        {
            "name": "wrapped",
            "model": str(models / "wrapped"),
            "args": {**batch, **SGD, "max_steps": 2, "activation_checkpointing": True},
        },
        {
            "name": "no_cloning",
            "model": str(models / "dueling"),
            "args": {**batch, **SGD, "max_steps": 2, "activation_checkpointing": True, "cloning_scale": 0.0},
        },
        {
            "name": "peft",
            "model": str(models / "dueling"),
            "peft": lora,
            "args": {**batch, **ADAMW, **SAVING, "max_steps": 4},
        },
        {
            "name": "peft_resumed",
            "model": str(models / "dueling"),
            "peft": lora,
            "lora_seed": 1,
            "resume": str(output / "peft" / "checkpoint-2"),
            "args": {**batch, **ADAMW, **SAVING, "max_steps": 4},
        },
        {
            "name": "average",
            "model": str(models / "dueling_tied"),
            "args": {**batch, **SGD, **SAVING, **averaging},
        },
        {
            "name": "average_resumed",
            "model": str(inputs / "base_tied"),
            "resume": str(output / "average" / "checkpoint-2"),
            "args": {**batch, **SGD, **SAVING, **averaging},
        },
        {
            "name": "peft_average",
            "model": str(models / "dueling"),
            "peft": lora,
            "args": {**batch, **SGD, **averaging},
        },
    ]
    for run in runs:
        run |= {"algorithm": "qrlhf", "data": str(inputs / "rows")}
        run["args"]["output_dir"] = str(output / run["name"])
        if run["name"] not in AVERAGED:
            run["save"] = str(output / f"saved_{run['name']}")
    return runs


@pytest.fixture(scope="session")
def models(shared, inputs) -> Path:
    return shared("qrlhf_models", lambda directory: make_models(inputs, directory))


@pytest.fixture(scope="session")
def trained(shared, inputs, models):
    """Returns a function from a backend (`one`, `ddp`, `zero2`, `zero3`, `fsdp2`) to its records."""

    def run(backend: str) -> Records:
        num_processes = 1 if backend == "one" else 2

        def make(directory: Path) -> None:
            runs = runs_of(inputs, models, directory, num_processes)
            spec: dict[str, Any] = {
                "record": str(directory),
                "chunk_elements": CHUNK_ELEMENTS,
                "deepspeed": deepspeed_config(int(backend[-1])) if backend.startswith("zero") else None,
                "fsdp": {"version": 2} if backend == "fsdp2" else None,
                "runs": [x for x in runs if backend not in ("zero3", "fsdp2") or x["name"] not in AVERAGED],
            }
            if backend in ("zero3", "fsdp2"):
                spec["runs"].append(
                    {**runs[0], "name": "refused", "args": {**runs[0]["args"], "target_network": "model"}}
                )
            launch(SCRIPTS / "train.py", spec, num_processes)

        return Records(shared(f"qrlhf_{backend}", make))

    return run


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def records(trained, backend) -> Records:
    return trained(backend)


@pytest.fixture(scope="module")
def single(trained) -> Records:
    return trained("one")


@pytest.fixture(params=[*RUNS, *AVERAGED])
def run(request, backend) -> str:
    if request.param in AVERAGED and backend in ("zero3", "fsdp2"):
        pytest.skip("refused, see below")
    return request.param


class TestSteps:
    def test_equal_one_process(self, records, single, relative_error, run):
        got, expected = records(run), single(run)
        tolerance = TOLERANCE[RUNS.get(run, "sgd")]
        assert relative_error(got["start"], expected["start"]) <= (tolerance if "resumed" in run else 0)
        assert len(got["heads"]) == len(expected["heads"])
        for ours, theirs in zip(got["heads"], expected["heads"], strict=True):
            assert relative_error(ours, theirs) <= tolerance
            targets = [{k: x for k, x in heads.items() if "target_q" in k} for heads in (ours, theirs)]
            assert relative_error(*targets) <= tolerance
        assert relative_error(got["trained"], expected["trained"]) <= tolerance
        assert relative_error(got["trained"], got["start"]) > 10 * tolerance
        logs = [[x for x in side(run)["log"] if "loss" in x] for side in (records, single)]
        assert len(logs[0]) == len(logs[1]) > 0
        for ours, theirs in zip(*logs, strict=True):
            assert {**ours, "epoch": 0} == pytest.approx({**theirs, "epoch": 0}, rel=1e-4, abs=1e-5)

    def test_processes_agree(self, records, assert_same_bits, run):
        first, second = records(run), records(run, rank=1)
        for name in ("start", "trained", "state", "average"):
            assert_same_bits(first[name], second[name])

    @pytest.mark.parametrize("name", RUNS)
    def test_targets_move_by_the_rule(self, records, polyak_error, name):
        heads = records(name)["heads"]
        assert polyak_error(heads, 1 - EMA_BETA) <= 1e-6
        assert polyak_error(heads, 0.0) > 1e-5

    def test_weights_are_partitioned(self, records, backend):
        shares = records("sgd")["shares"].values()
        if backend == "fsdp2":
            assert max(shares) <= 1 and sorted(shares)[len(shares) // 2] == 0.5
        else:
            assert set(shares) == {0.0 if backend == "zero3" else 1.0}

    def test_value_head_is_left_alone(self, records):
        record = records("wrapped")
        values = [name for name in record["start"] if ".v." in name]
        assert values and all(torch.equal(record["trained"][name], record["start"][name]) for name in values)

    def test_evaluation_equals_that_of_one_process(self, records, single):
        entries = [[e for e in side("sgd")["log"] if "eval_loss" in e] for side in (records, single)]
        assert len(entries[0]) == len(entries[1]) == 2
        for ours, theirs in zip(*entries, strict=True):
            for name in [name for name in theirs if name == "eval_loss" or "/" in name or "fraction" in name]:
                assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-5), name


class TestAverageOfTheModel:
    def test_needs_whole_weights(self, records, backend):
        if backend not in ("zero3", "fsdp2"):
            pytest.skip("weights are whole")
        with pytest.raises(pytest.fail.Exception, match="which ZeRO-3 and FSDP spread over the processes"):
            records("refused")

    @pytest.mark.parametrize("name", AVERAGED)
    def test_equals_that_of_one_process(self, records, single, backend, relative_error, name):
        if backend in ("zero3", "fsdp2"):
            pytest.skip("refused")
        got, expected = records(name)["average"], single(name)["average"]
        assert relative_error(got, expected) <= TOLERANCE["sgd"]
        trained = records(name)["trained"]
        if name.startswith("peft"):
            assert got and all("lora_" in key for key in got)
        else:
            assert relative_error(got, {key: trained[key] for key in got}) > 1e-4

    def test_resumed_run_is_exact(self, records, backend, assert_same_bits):
        if backend in ("zero3", "fsdp2"):
            pytest.skip("refused")
        unbroken, resumed = records("average"), records("average_resumed")
        assert_same_bits(resumed["heads"][0], unbroken["heads"][2])
        for name in ("trained", "average"):
            assert_same_bits(resumed[name], unbroken[name])


class TestSaving:
    @pytest.mark.parametrize("name", ["sgd", "fresh", "wrapped"])
    def test_saved_model_loads_in_one_process(self, records, assert_same_bits, name):
        directory, state = records.directory / f"saved_{name}", records(name)["state"]
        assert all(x.numel() > 0 for x in load_file(directory / "model.safetensors").values())
        loader = AutoModelForCausalLMWithILQLHeads if name == "wrapped" else AutoModelForCausalLM
        model = loader.from_pretrained(directory)
        assert name == "wrapped" or type(model) is LlamaDuelingQForCausalLM
        assert_same_bits(dict(model.state_dict()), state)

    def test_saved_adapter_loads_alone(self, records, assert_same_bits):
        model = LlamaDuelingQForCausalLM.from_pretrained(records.directory / "saved_peft")
        state, got = records("peft")["state"], dict(model.get_base_model().state_dict())
        names = [name for name in got if "lora_" in name or "heads.modules_to_save" in name]
        assert any("lora_" in name for name in names) and any("target_q" in name for name in names)
        assert_same_bits({name: got[name] for name in names}, {name: state[name] for name in names})

    def test_resumed_adapter_is_exact(self, records, assert_same_bits):
        unbroken, resumed = records("peft"), records("peft_resumed")
        assert_same_bits(resumed["heads"][0], unbroken["heads"][2])
        assert_same_bits(resumed["trained"], unbroken["trained"])
