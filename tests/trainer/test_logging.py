# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_qrl.trainer import ilql_trainer
from hf_qrl.trainer.metrics import MetricSums


ACCELERATOR = SimpleNamespace(reduce=lambda x, reduction: x)
LOGGED = [
    "loss", "loss/q", "loss/v", "loss/cql", "loss/awac", "values/mean", "q/mean", "q/target_gap", "advantage/mean",
    "advantage/std", "awac_weight/mean", "awac_weight/clipped", "truncated_fraction",
]  # fmt: skip


class Reads(TorchDispatchMode):
    """Counts the operations that wait for the device to hand over a number."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default)
        return func(*args, **(kwargs or {}))


class TestMetricSums:
    def test_sums_since_last_read(self):
        sums = MetricSums()
        sums.add({"a": torch.tensor(1.0), "b": torch.tensor(2.0)})
        sums.add({"a": torch.tensor(10.0), "b": torch.tensor(0.5)})
        assert sums.pop(ACCELERATOR) == {"a": 11.0, "b": 2.5}
        assert sums.pop(ACCELERATOR) == {}
        sums.add({"c": torch.tensor(3, dtype=torch.int64)})
        assert sums.pop(ACCELERATOR) == {"c": 3.0}

    def test_long_sums_do_not_stall(self):
        sums = MetricSums()
        sums.add({"a": torch.tensor(2.0**24)})
        for _ in range(10):
            sums.add({"a": torch.tensor(1.0)})
        assert sums.pop(ACCELERATOR) == {"a": 2.0**24 + 10}

    def test_adding_never_reads(self):
        """A tensor on the meta device has no numbers: reading one raises."""
        sums = MetricSums()
        for _ in range(3):
            sums.add({"a": torch.zeros((), device="meta"), "b": torch.zeros((), device="meta")})
        with pytest.raises(Exception, match="meta"):
            sums.pop(ACCELERATOR)

    def test_keeps_no_graph(self):
        sums = MetricSums()
        sums.add({"a": torch.ones((), requires_grad=True) * 2})
        assert not sums._totals.requires_grad


class TestLog:
    def test_logs_every_term(self, make_trainer, make_dataset):
        data = make_dataset(truncated=True)
        trainer = make_trainer(train_dataset=data, logging_strategy="steps", logging_steps=2, max_steps=4)
        trainer.train()
        entries = [x for x in trainer.state.log_history if "loss" in x]
        assert [x["step"] for x in entries] == [2, 4]
        for entry in entries:
            assert set(LOGGED) <= entry.keys()
            assert all(isinstance(entry[name], float) for name in LOGGED)

    def test_averages_over_actions_of_the_interval(self, make_trainer, make_dataset):
        """With nothing learned, the log of an epoch is the evaluation of its data, uneven as the batches are."""
        data = make_dataset(14, weight=True, truncated=True)
        trainer = make_trainer(
            train_dataset=data, logging_strategy="steps", logging_steps=4, max_steps=8, learning_rate=0.0, alpha=0.0
        )
        trainer.train()
        entries = [x for x in trainer.state.log_history if "loss" in x]
        expected = trainer.evaluate(data)
        assert len(entries) == 2
        for entry in entries:
            for name in set(LOGGED) - {"loss"}:
                assert entry[name] == pytest.approx(expected[f"eval_{name}"], rel=1e-5, abs=1e-6), name

    def test_first_step_loss_is_sum_of_terms(self, make_trainer):
        trainer = make_trainer(logging_strategy="steps", logging_steps=1, max_steps=1, cql_scale=0.3, awac_scale=0.7)
        trainer.train()
        x = trainer.state.log_history[0]
        terms = x["loss/q"] + x["loss/v"] + 0.3 * x["loss/cql"] + 0.7 * x["loss/awac"]
        assert x["loss"] == pytest.approx(terms, rel=1e-5)

    def test_final_log_of_training_has_no_terms(self, make_trainer):
        trainer = make_trainer()
        trainer.train()
        assert "train_loss" in trainer.state.log_history[-1]
        assert not any("/" in name for name in trainer.state.log_history[-1])

    def test_steps_that_do_not_log_read_nothing(self, make_trainer, monkeypatch):
        trainer = make_trainer(max_steps=4, logging_strategy="steps", logging_steps=4)
        reads = Reads()

        def watched(function):
            def call(*args, **kwargs):
                with reads:
                    return function(*args, **kwargs)

            return call

        # What the language model itself does in its forward is not ours.
        monkeypatch.setattr(ilql_trainer, "ilql_loss_from_states", watched(ilql_trainer.ilql_loss_from_states))
        monkeypatch.setattr(MetricSums, "add", watched(MetricSums.add))
        monkeypatch.setattr(trainer, "_get_num_items_in_batch", watched(trainer._get_num_items_in_batch))
        for callback in trainer.callback_handler.callbacks:
            if type(callback).__module__.startswith("hf_qrl"):
                monkeypatch.setattr(callback, "on_step_end", watched(callback.on_step_end))
        popped = []
        pop = trainer._pop_metrics
        monkeypatch.setattr(
            trainer, "_pop_metrics", lambda mode: popped.append(trainer.state.global_step) or pop(mode)
        )
        trainer.train()
        assert reads.count == 0
        assert popped == [4]
