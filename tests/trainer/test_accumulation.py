# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""
However the rows of an optimizer step are split into micro-batches and processes, it is the same step.

SGD is linear in the gradient; AdamW would turn rounding errors of gradients near zero into whole steps.
"""

import pytest
import torch
from transformers import TrainerCallback


TOLERANCE = 1e-6
SGD = {"optim": "sgd", "learning_rate": 0.1, "logging_strategy": "steps", "logging_steps": 1, "max_steps": 5}
LAYOUTS = {"4x4": (4, 4), "8x2": (8, 2), "2x8": (2, 8), "1x16": (1, 16)}
# Two epochs of steps of 16, 16 and 8 rows.
NUM_ROWS = 40


class Recorder(TrainerCallback):
    """Copies the gradients that each optimizer step acts on."""

    def __init__(self):
        self.gradients = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.gradients.append({k: p.grad.clone() for k, p in model.named_parameters() if p.grad is not None})


@pytest.fixture
def train(make_trainer, make_dataset):
    def run(recorder, batch_size, accumulation, **args):
        data = make_dataset(NUM_ROWS, weight=True, truncated=True)
        trainer = make_trainer(
            train_dataset=data,
            trainer_kwargs={"callbacks": [recorder]},
            per_device_train_batch_size=batch_size,
            gradient_accumulation_steps=accumulation,
            **{**SGD, **args},
        )
        trainer.train()
        return trainer, [entry for entry in trainer.state.log_history if "loss" in entry]

    return run


def same_numbers(got: list[dict], expected: list[dict]) -> None:
    assert len(got) == len(expected) == SGD["max_steps"]
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.keys() == theirs.keys()
        for name in set(theirs) - {"epoch", "learning_rate"}:
            assert ours[name] == pytest.approx(theirs[name], rel=2e-6, abs=1e-6), name


class TestGradientAccumulation:
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_gradient_accumulation_exact(self, train, state_of, relative_error, layout):
        runs = []
        for batch_size, accumulation in ((16, 1), LAYOUTS[layout]):
            recorder = Recorder()
            trainer, log = train(recorder, batch_size, accumulation)
            runs.append((recorder.gradients, state_of(trainer), log))
        (gradients, state, log), (other_gradients, other_state, other_log) = runs
        assert len(gradients) == len(other_gradients) == SGD["max_steps"]
        for got, expected in zip(other_gradients, gradients, strict=True):
            assert relative_error(got, expected) <= TOLERANCE
        assert relative_error(other_state, state) <= TOLERANCE
        targets = [{k: x for k, x in s.items() if "target_q" in k} for s in (other_state, state)]
        assert relative_error(*targets) <= TOLERANCE
        same_numbers(other_log, log)

    def test_adamw_takes_the_same_steps(self, train, state_of, relative_error):
        states = []
        for batch_size, accumulation in ((16, 1), (4, 4)):
            trainer, _ = train(Recorder(), batch_size, accumulation, optim="adamw_torch", learning_rate=1e-3)
            states.append(state_of(trainer))
        assert relative_error(*states) <= 1e-4


class TestTwoProcesses:
    def test_two_processes_equal_one(self, tmp_path, train, make_model, make_dataset, make_trainer, run_script,
                                     state_of, relative_error, assert_same_bits):  # fmt: skip
        recorder = Recorder()
        trainer, log = train(recorder, 16, 1)
        args = {**SGD, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
        data = make_dataset(NUM_ROWS, weight=True, truncated=True)
        result = run_script(
            make_model(),
            data,
            {**args, "per_device_eval_batch_size": 2},
            tmp_path / "two",
            num_processes=2,
            record=str(tmp_path),
            num_eval_rows=7,
            stream_steps=2,
        )
        assert result.returncode == 0, result.stderr[-4000:]
        first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(2))

        # Both processes end up with the same parameters and targets, without any being sent back.
        assert_same_bits(first["state"], second["state"])
        for got, expected in zip(first["gradients"], recorder.gradients, strict=True):
            assert relative_error(got, expected) <= TOLERANCE
        state = state_of(trainer)
        assert relative_error(first["state"], state) <= TOLERANCE
        same_numbers([entry for entry in first["log"] if "loss" in entry], log)

        # Seven rows do not fill the last round of two batches of two; no row may count twice.
        expected = trainer.evaluate(data.select(range(7)))
        for name in [k for k in expected if k == "eval_loss" or "/" in k or "fraction" in k]:
            assert first["eval"][name] == second["eval"][name] == pytest.approx(expected[name], rel=1e-5, abs=1e-6)

        # A stream of rows of different lengths is read by both.
        assert first["stream_steps"] == second["stream_steps"] == 2
        assert_same_bits(first["stream_state"], second["stream_state"])


class TestNumItemsInBatch:
    def test_num_items_counts_actions(self, make_trainer, make_dataset):
        data = make_dataset(6)
        trainer = make_trainer(train_dataset=data)
        batches = [trainer.data_collator(data.select(part).to_list()) for part in (range(4), range(4, 6))]
        num_items = trainer._get_num_items_in_batch(batches, torch.device("cpu"))
        assert num_items.item() == sum(len(row["actions_ixs"]) for row in data)

    def test_num_items_counts_weights(self, make_trainer, make_dataset):
        data = make_dataset(6, weight=True)
        trainer = make_trainer(train_dataset=data)
        num_items = trainer._get_num_items_in_batch([trainer.data_collator(data.to_list())], torch.device("cpu"))
        assert num_items.item() == pytest.approx(sum(len(row["actions_ixs"]) * row["weight"] for row in data))

    def test_no_batches_have_no_count(self, make_trainer):
        assert make_trainer()._get_num_items_in_batch([], torch.device("cpu")) is None

    def test_missing_count_in_training_raises(self, make_trainer, make_dataset):
        trainer = make_trainer()
        batch = trainer.data_collator(make_dataset(4).to_list())
        trainer.model.train()
        with pytest.raises(ValueError, match="number of actions of the optimizer step is unknown"):
            trainer.compute_loss(trainer.model, batch)

    def test_loss_is_the_sum_over_actions_divided_by_count(self, make_trainer, make_dataset):
        trainer = make_trainer()
        batch = trainer.data_collator(make_dataset(4).to_list())
        count = batch["dones"].sum()
        trainer.model.eval()
        mean = trainer.compute_loss(trainer.model, dict(batch))
        trainer.model.train()
        torch.testing.assert_close(trainer.compute_loss(trainer.model, dict(batch), False, count), mean)
        torch.testing.assert_close(trainer.compute_loss(trainer.model, dict(batch), False, 4 * count), mean / 4)
