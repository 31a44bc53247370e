# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""PPO in two processes on CPUs plays the episodes and takes the steps of one process, with partitioned weights too."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from hf_qrl import AutoModelForCausalLMWithValueHead
from tests.distributed.conftest import SCRIPTS, Records, deepspeed_config, launch


pytestmark = pytest.mark.slow

BACKENDS = ["ddp", "zero2", "zero3"]
ARGUMENTS = {
    **{"report_to": "none", "use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1},
    **{"episodes_per_rollout": 10, "ppo_epochs": 2, "max_completion_length": 2, "max_turns": 3, "max_grad_norm": 0.0},
    **{"kl_coef": 0.2, "vf_coef": 0.5, "entropy_coef": 0.01, "optim": "sgd", "learning_rate": 0.05, "max_steps": 7},
}


def runs_of(model: Path, output: Path, num_processes: int) -> list[dict[str, Any]]:
    """The same optimizer steps of 12 turns."""
    batch = {"per_device_train_batch_size": 12 // num_processes // 2, "gradient_accumulation_steps": 2}
    batch = {**ARGUMENTS, **batch, "model_init_kwargs": {"head_init": "zero"}}
    saving = {"save_strategy": "steps", "save_steps": 3}
    adamw = {"optim": "adamw_torch", "learning_rate": 1e-3}
    runs: list[dict[str, Any]] = [
        {"name": "sgd", "args": {**batch, **saving}},
        {"name": "resumed", "args": {**batch, **saving}, "resume": str(output / "sgd" / "checkpoint-3")},
        {"name": "peft", "args": {**batch, **adamw}, "peft": {"r": 4, "target_modules": ["q_proj", "v_proj"]}},
    ]
    for run in runs:
        run |= {"model": str(model), "save": str(output / f"saved_{run['name']}")}
        run["args"] = {**run["args"], "output_dir": str(output / run["name"])}
    return runs


@pytest.fixture(scope="module")
def trained(shared, inputs):
    """Returns a function from a backend (`one`, `ddp`, `zero2`, `zero3`) to its records."""

    def make_model(directory: Path) -> None:
        base = LlamaForCausalLM.from_pretrained(inputs / "base")
        tokenizer = AutoTokenizer.from_pretrained(inputs / "tokenizer")
        base.generation_config.eos_token_id = tokenizer.eos_token_id
        base.save_pretrained(directory)
        tokenizer.save_pretrained(directory)

    def run(backend: str) -> Records:
        num_processes = 1 if backend == "one" else 2
        model = shared("ppo_model", make_model)

        def make(directory: Path) -> None:
            zero = deepspeed_config(int(backend[-1])) if backend.startswith("zero") else None
            spec = {"record": str(directory), "deepspeed": zero, "runs": runs_of(model, directory, num_processes)}
            launch(SCRIPTS / "train_ppo.py", spec, num_processes)

        return Records(shared(f"ppo_{backend}", make))

    return run


def assert_equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], tolerance: float) -> None:
    assert ours.keys() == theirs.keys()
    for name, x in theirs.items():
        torch.testing.assert_close(ours[name], x, rtol=0, atol=tolerance, msg=name)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("name", "tolerance"), [("sgd", 1e-5), ("peft", 1e-4)])
def test_two_processes_do_what_one_does(trained, backend, name, tolerance):
    one, first, second = trained("one")(name), trained(backend)(name), trained(backend)(name, 1)
    assert [len(turns) for _, _, turns in one["episodes"]] and one["progress"]["rollouts"] >= 2
    assert first["episodes"] == second["episodes"] == one["episodes"], "the same, in the same order, on both"
    assert first["progress"] == second["progress"] == one["progress"]
    assert_equal(first["state"], one["state"], tolerance)
    assert_equal(second["state"], first["state"], 0.0)
    for ours, theirs in zip(first["log"], one["log"], strict=True):
        for metric in ("loss/policy", "policy/kl", "values/explained_variance", "env/return", "policy/kl_ref"):
            if metric in theirs:
                assert ours[metric] == pytest.approx(theirs[metric], abs=1e-3), metric
    if backend == "zero3":
        assert min(first["shares"].values()) < 1, "partitioned"


@pytest.mark.parametrize("backend", ["one", *BACKENDS])
def test_a_run_goes_on(trained, backend):
    run = trained(backend)
    assert run("resumed")["progress"] == run("sgd")["progress"]
    assert_equal(run("resumed")["state"], run("sgd")["state"], 1e-6)


@pytest.mark.parametrize("backend", ["one", *BACKENDS])
@pytest.mark.parametrize("name", ["sgd", "peft"])
def test_saved_models_are_what_was_trained(trained, backend, name):
    run = trained(backend)
    state = run(name)["state"]
    model = AutoModelForCausalLMWithValueHead.from_pretrained(run.directory / f"saved_{name}")
    own = (model.get_base_model() if name == "peft" else model).state_dict()
    assert_equal(own, state, 1e-6)
