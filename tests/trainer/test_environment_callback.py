# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
import random

import numpy as np
import pytest
import torch
from transformers import EarlyStoppingCallback

from hf_qrl.environments import TextEnv, episode_seed
from hf_qrl.rollouts import ModelPolicy, evaluate_policy
from hf_qrl.trainer import environment_callback
from hf_qrl.trainer.environment_callback import EnvironmentEvaluationCallback


class SayA(TextEnv):
    """One turn; the reward is the share of the letter a in it. It draws from global random state, as it should not."""

    def reset(self, *, seed, options=None):
        random.random(), np.random.random(), torch.rand(1)
        return "b c", {}

    def step(self, action):
        words = action.split()
        return "d", words.count("a") / max(len(words), 1), True, False, {"success": "a" in words}


@pytest.fixture
def make_played_trainer(make_trainer, make_dataset, tokenizer):
    """Returns a function from arguments of the callback and the trainer to a trainer with it, and the callback."""

    def make(every=None, seeds=4, callbacks=(), trainer_kwargs=None, **args):
        trainer = make_trainer(
            trainer_kwargs={
                "processing_class": tokenizer,
                "eval_dataset": make_dataset(4, seed=1),
                "callbacks": list(callbacks),
                **(trainer_kwargs or {}),
            },
            **args,
        )
        callback = EnvironmentEvaluationCallback(
            trainer, SayA, seeds, every, policy_kwargs={"max_new_tokens": 4, "beta": 2.0}, max_turns=1
        )
        trainer.add_callback(callback)
        return trainer, callback

    return make


def logged(trainer, key="eval_env/return"):
    return [(entry["step"], entry[key]) for entry in trainer.state.log_history if key in entry]


def test_metrics_are_those_of_the_policy(make_played_trainer, tokenizer):
    trainer, callback = make_played_trainer()
    metrics = trainer.evaluate()
    policy = ModelPolicy(trainer.bare_model, tokenizer, max_new_tokens=4, beta=2.0)
    expected = evaluate_policy(policy, SayA, 4, max_turns=1)
    assert {key: value for key, value in metrics.items() if key.startswith("eval_env/")} == {
        f"eval_env/{key}": value for key, value in expected.metrics().items()
    }
    assert callback.result.transcripts.to_list() == expected.transcripts.to_list()
    assert logged(trainer) == [(0, expected.mean_return.mean)]
    assert "eval_loss" in metrics and len(callback.result.transcripts) == 4


def test_training_does_not_notice(make_played_trainer, make_trainer, make_dataset, state_of, assert_same_bits):
    args = {"max_steps": 4, "learning_rate": 1e-2, "eval_strategy": "steps", "eval_steps": 2}
    played, callback = make_played_trainer(every=1, **args)
    played.train()
    assert [step for step, _ in logged(played)] == [1, 2, 3, 4]
    plain = make_trainer(trainer_kwargs={"eval_dataset": make_dataset(4, seed=1)}, **args)
    plain.train()
    assert_same_bits(state_of(played), state_of(plain))
    assert played.model.training == plain.model.training


def test_state_of_the_random_generators_and_the_mode_stay(make_played_trainer):
    trainer, _ = make_played_trainer()
    trainer.model.train()
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    trainer.callback_handler.on_evaluate(trainer.args, trainer.state, trainer.control, {})
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before
    assert trainer.model.training


class FakeEvaluation:
    """Returns, one after the other, the returns that it is given."""

    def __init__(self, returns):
        self.returns = iter(returns)

    def __call__(self, *args, **kwargs):
        self.value = next(self.returns)
        return self

    def metrics(self):
        return {"return": self.value}


BEST = {
    "metric_for_best_model": "eval_env/return",
    "greater_is_better": True,
    "load_best_model_at_end": True,
    "save_strategy": "steps",
    "eval_strategy": "steps",
    "eval_steps": 1,
    "save_steps": 1,
    "learning_rate": 1e-2,
}


def test_the_best_checkpoint_is_that_of_the_best_return(make_played_trainer, monkeypatch, state_of, assert_same_bits):
    monkeypatch.setattr(environment_callback, "evaluate_policy", FakeEvaluation([0.1, 0.9, 0.4]))
    trainer, _ = make_played_trainer(max_steps=3, **BEST)
    states = []
    step_end = trainer._maybe_log_save_evaluate

    def noting(*args, **kwargs):
        states.append(state_of(trainer))
        return step_end(*args, **kwargs)

    monkeypatch.setattr(trainer, "_maybe_log_save_evaluate", noting)
    trainer.train()
    assert trainer.state.best_metric == 0.9 and trainer.state.best_global_step == 2
    assert_same_bits(state_of(trainer), states[1])
    assert logged(trainer) == [(1, 0.1), (2, 0.9), (3, 0.4)]


def test_early_stopping_watches_it_whatever_the_order(make_played_trainer, monkeypatch):
    monkeypatch.setattr(environment_callback, "evaluate_policy", FakeEvaluation([0.5, 0.4, 0.3, 0.2, 0.1]))
    trainer, _ = make_played_trainer(max_steps=5, callbacks=[EarlyStoppingCallback(2)], **BEST)
    trainer.train()
    assert trainer.state.global_step == 3


def test_several_evaluation_sets_are_played_once_in_training(make_played_trainer, make_dataset):
    sets = {"one": make_dataset(4, seed=1), "two": make_dataset(4, seed=2)}
    trainer, _ = make_played_trainer(
        max_steps=2, eval_strategy="steps", eval_steps=2, trainer_kwargs={"eval_dataset": sets}
    )
    trainer.train()
    assert len(logged(trainer)) == 1


def test_contradictions(make_trainer, make_played_trainer):
    with pytest.raises(ValueError, match="tokenizer"):
        EnvironmentEvaluationCallback(make_trainer(), SayA, 4)
    with pytest.raises(ValueError, match="every"):
        make_played_trainer(every=0)
    for seeds in (0, True, [], 2.5, "12"):
        with pytest.raises(ValueError, match="seed"):
            make_played_trainer(seeds=seeds)
    trainer, _ = make_played_trainer()
    with pytest.raises(ValueError, match="callback.result.transcripts"):
        EnvironmentEvaluationCallback(trainer, SayA, 4, output_dir="out")
    assert EnvironmentEvaluationCallback(trainer, SayA, np.int64(4)).seeds == [
        episode_seed(i, "validation") for i in range(4)
    ]
    assert EnvironmentEvaluationCallback(trainer, SayA, iter([1, np.int64(2)])).seeds == [1, 2]
