# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""Environments for NeMo-RL run here, plain or as Ray actors' classes, with only the package in the imports changed."""

import pytest
import torch

from hf_qrl.distributed.batched_data_dict import BatchedDataDict
from hf_qrl.environments import call_step, create_env, plain_class, register_env
from hf_qrl.environments.utils import ENV_REGISTRY
from tests.environments import nemo_style


def say(text):
    return {"role": "assistant", "content": text, "token_ids": torch.tensor([1])}


def ask(text):
    return {"role": "user", "content": text, "token_ids": torch.tensor([1])}


@pytest.fixture(params=["plain", "ray"])
def make_env(request):
    """Returns a function from a class and its configuration to the environment, undecorated or decorated."""

    def make(env_class, cfg=None):
        if request.param == "plain":
            return plain_class(env_class)(cfg)
        ray = pytest.importorskip("ray", reason="ray is an optional extra, hf_qrl[ray]")
        decorated = ray.remote(env_class)
        with pytest.raises(TypeError):
            decorated(cfg)
        assert not ray.is_initialized()
        env = plain_class(decorated)(cfg)
        assert not ray.is_initialized()
        return env

    return make


def test_sliding_puzzle(make_env):
    env = make_env(nemo_style.SlidingPuzzle, {"max_moves": 6})
    solved = [1, 2, 3, 4, 5, 6, 7, 8, 0]
    far = {"board": [0, 1, 2, 3, 4, 5, 6, 7, 8], "size": 3, "moves": 0}
    near = {"board": [1, 2, 3, 4, 5, 6, 7, 0, 8], "size": 3, "moves": 0}
    logs = [[ask("Solve it.")], [ask("Solve it.")]]
    logs[0].append(say("Slide 8: <action>8</action>"))
    logs[1].append(say("I do not know."))
    result = call_step(env, logs, [near, far])
    assert result.metadata[0]["board"] == solved
    assert result.metadata[1] == far  # None keeps the old one
    assert result.terminateds.tolist() == [True, False]
    assert result.rewards.tolist() == [1.0, 0.0] and result.rewards.dtype == torch.float64
    assert result.next_stop_strings == [None, ["</action>"]]
    assert result.observations[1] == [{"role": "environment", "content": "Say <action>tile</action>."}]
    assert result.answers == [None, None]
    assert near["board"] != solved  # the caller's own

    # On alone, until the environment's limit.
    log, metadata = logs[1], result.metadata[1]
    for turn, tile in enumerate([1, 2, 2, 1, 1, 1]):
        log = [*log, *result.observations[-1], say(f"<action>9</action><action>{tile}</action>")]
        result = call_step(env, [log], [metadata])
        metadata = result.metadata[0]
        assert metadata["moves"] == turn + 1 and "_truncated" not in metadata
        assert result.truncateds.tolist() == [turn == 5] and not result.terminateds.any()


def test_code_execution(make_env):
    env = make_env(nemo_style.CodeExecution, {"timeout": 1.0})
    replies = ["<code>print(6 * 7)</code>", "<code>x=</code>", "<code>while True: pass</code>", "none"]
    logs = [[ask("Print the answer."), say(reply)] for reply in replies]
    result = call_step(env, logs, [{"expected": "42\n"}] * 4)
    texts = [messages[0]["content"] for messages in result.observations]
    assert texts[0] == "<result>42\n</result>" and "SyntaxError" in texts[1]
    assert texts[2:] == ["<result>Timeout.</result>", "<result>No code.</result>"]
    assert result.terminateds.tolist() == [True, False, False, False]
    assert result.rewards.tolist() == [1.0, 0.0, 0.0, 0.0]
    assert result.metadata[1:] == [{"expected": "42\n"}] * 3
    assert result.next_stop_strings == [["</code>"]] * 4


def test_maths(make_env):
    env = make_env(nemo_style.Maths)
    logs = [[ask("1+1?"), say("1+1 = 2")], [ask("1+1?"), say("three")]]
    metadata = [{"ground_truth": "2.0"}, {"ground_truth": "2"}]
    result = call_step(env, logs, metadata)
    assert result.terminateds.tolist() == [True, True] and result.terminateds.dtype == torch.bool
    assert result.rewards.tolist() == [1.0, 0.0]
    assert result.answers == [None, None]
    assert env.step(logs, metadata, return_extracted_answer=True).answers == ["2", None]
    batch = BatchedDataDict({"text_ids": torch.tensor([[1, 2], [1, 2]]), "rewards": result.rewards})
    same, metrics = env.global_post_process_and_metrics(batch)
    assert same is batch and metrics["pass_rate"] == 1.0


def test_registered_environment(monkeypatch):
    monkeypatch.setattr("hf_qrl.environments.utils.ENV_REGISTRY", {})
    register_env("puzzle", "tests.environments.nemo_style.SlidingPuzzle")
    with pytest.raises(ValueError, match="The name 'puzzle' is taken by 'tests"):
        register_env("puzzle", "other.Class")
    env = create_env("puzzle", {"puzzle": {"max_moves": 3}})
    assert isinstance(env, nemo_style.SlidingPuzzle) and env.max_moves == 3
    with pytest.raises(ValueError, match=r"known are \['puzzle'\]"):
        create_env("other", {})
    assert "puzzle" not in ENV_REGISTRY


@pytest.mark.slow  # ray.init alone takes 10 s
def test_ray_actor_plays_the_same():
    ray = pytest.importorskip("ray", reason="ray is an optional extra, hf_qrl[ray]")
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    try:
        local = nemo_style.SlidingPuzzle()
        actor = ray.remote(nemo_style.SlidingPuzzle).remote()
        metadata = [nemo_style.SlidingPuzzle.start(seed) for seed in range(3)]
        logs = [[{"role": "user", "content": "Solve."}, {"role": "assistant", "content": "<action>8</action>"}]] * 3
        for _ in range(3):
            here, there = local.step(logs, metadata), ray.get(actor.step.remote(logs, metadata))
            assert here.observations == there.observations and here.metadata == there.metadata
            assert torch.equal(here.rewards, there.rewards) and torch.equal(here.terminateds, there.terminateds)
            metadata = [new or old for new, old in zip(here.metadata, metadata, strict=True)]
    finally:
        ray.shutdown()
