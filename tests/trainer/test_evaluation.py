# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
import math

import numpy as np
import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file


RAW = {
    "prompt": ["a b", "c", "d e f", "g"],
    "completion": [" c d", " h i j k", " l", " m n o"],
    "reward": [1.0, -0.5, 0.25, 2.0],
}
LOSSES = ["loss", "loss/q", "loss/v", "loss/cql", "loss/awac"]


@pytest.fixture
def raw() -> Dataset:
    return Dataset.from_dict(RAW)


class TestEvaluate:
    def test_eval_independent_of_batch_size(self, make_trainer, make_dataset):
        data = make_dataset(11, seed=5, weight=True, truncated=True)
        results = []
        for batch_size in (2, 4, 8, 11):
            trainer = make_trainer(per_device_eval_batch_size=batch_size, trainer_kwargs={"eval_dataset": data})
            metrics = trainer.evaluate()
            results.append({k: x for k, x in metrics.items() if k == "eval_loss" or "/" in k or "fraction" in k})
        assert {f"eval_{name}" for name in LOSSES} <= results[0].keys()
        for other in results[1:]:
            assert other == pytest.approx(results[0], rel=1e-5, abs=1e-6)
        assert results[0]["eval_truncated_fraction"] == pytest.approx(4 / 11)

    def test_eval_loss_is_the_loss_of_one_batch(self, make_trainer, make_dataset):
        data = make_dataset(7)
        trainer = make_trainer(per_device_eval_batch_size=3)
        metrics = trainer.evaluate(data)
        trainer.model.eval()
        with torch.no_grad():
            loss = trainer.compute_loss(trainer.model, trainer.data_collator(data.to_list()))
        assert metrics["eval_loss"] == pytest.approx(loss.item(), rel=1e-5)

    def test_eval_loss_is_the_sum_of_its_terms(self, make_trainer, make_dataset):
        m = make_trainer(cql_scale=0.2, awac_scale=0.5).evaluate(make_dataset(5))
        terms = m["eval_loss/q"] + m["eval_loss/v"] + 0.2 * m["eval_loss/cql"] + 0.5 * m["eval_loss/awac"]
        assert m["eval_loss"] == pytest.approx(terms, rel=1e-6)

    def test_each_evaluation_starts_anew(self, make_trainer, make_dataset):
        trainer = make_trainer()
        first, second = (trainer.evaluate(make_dataset(5)) for _ in range(2))
        assert second["eval_loss/q"] == first["eval_loss/q"]
        assert trainer.evaluate(make_dataset(5, seed=9))["eval_loss/q"] != first["eval_loss/q"]

    def test_evaluation_leaves_training_as_it_is(self, make_trainer, make_dataset, state_of, assert_same_bits):
        states, logs = [], []
        for strategy in ("no", "steps"):
            trainer = make_trainer(
                max_steps=4, eval_strategy=strategy, eval_steps=1, logging_strategy="steps", logging_steps=2,
                trainer_kwargs={"eval_dataset": make_dataset(5)},
            )  # fmt: skip
            trainer.train()
            states.append(state_of(trainer))
            logs.append([x["loss/q"] for x in trainer.state.log_history if "loss/q" in x])
        assert_same_bits(*states)
        assert logs[0] == logs[1] and len(logs[0]) == 2

    def test_dict_of_sets_names_each(self, make_trainer, make_dataset):
        sets = {"a": make_dataset(4, seed=1), "b": make_dataset(4, seed=2)}
        trainer = make_trainer(trainer_kwargs={"eval_dataset": sets})
        metrics = trainer.evaluate()
        for name, data in sets.items():
            alone = trainer.evaluate(data)
            for loss in LOSSES:
                assert metrics[f"eval_{name}_{loss}"] == pytest.approx(alone[f"eval_{loss}"], rel=1e-6)

    def test_raw_data(self, make_trainer, raw, tokenizer):
        trainer = make_trainer(
            train_dataset=raw, trainer_kwargs={"processing_class": tokenizer, "eval_dataset": {"named": raw}}
        )
        expected = trainer.evaluate(raw)
        assert math.isfinite(expected["eval_loss"])
        prepared = trainer._prepare_dataset(raw, "eval")
        # The losses of a batch sum the same numbers in whatever form the data comes.
        for data, prefix in (
            (prepared, "eval"),
            (raw.to_iterable_dataset(), "eval"),
            ({"x": raw}, "eval_x"),
            ("named", "eval"),
            (None, "eval_named"),
        ):
            metrics = trainer.evaluate(data)
            for loss in LOSSES:
                assert metrics[f"{prefix}_{loss}"] == pytest.approx(expected[f"eval_{loss}"], rel=1e-6)

    def test_wrong_type_raises(self, make_trainer):
        with pytest.raises(ValueError, match="must be a single `Dataset`"):
            make_trainer().evaluate([{"prompt": "a"}])


class TestBestModel:
    ARGS = {
        "max_steps": 6,
        "learning_rate": 0.5,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
        "load_best_model_at_end": True,
        "greater_is_better": False,
    }

    @pytest.mark.parametrize("metric", ["eval_loss/q", "loss/cql", "eval_loss", "eval_advantage/std"])
    def test_best_model_on_metric(self, make_trainer, make_dataset, state_of, metric):
        trainer = make_trainer(
            metric_for_best_model=metric, trainer_kwargs={"eval_dataset": make_dataset(6, seed=3)}, **self.ARGS
        )
        self.check(trainer, metric if metric.startswith("eval_") else f"eval_{metric}", state_of)

    def test_best_model_on_named_eval_set(self, make_trainer, make_dataset, state_of):
        sets = {"a": make_dataset(4, seed=1), "b": make_dataset(4, seed=2)}
        trainer = make_trainer(
            metric_for_best_model="eval_a_loss/q", trainer_kwargs={"eval_dataset": sets}, **self.ARGS
        )
        self.check(trainer, "eval_a_loss/q", state_of)

    def check(self, trainer, metric, state_of):
        trainer.train()
        history = {entry["step"]: entry[metric] for entry in trainer.state.log_history if metric in entry}
        assert sorted(history) == [1, 2, 3, 4, 5, 6]
        best = min(history, key=history.get)
        assert trainer.state.best_model_checkpoint.endswith(f"checkpoint-{best}")
        saved = load_file(f"{trainer.state.best_model_checkpoint}/model.safetensors")
        state = state_of(trainer)
        assert any("target_q" in name for name in saved)
        for name, x in saved.items():
            assert torch.equal(state[name], x)


class TestPredictions:
    @pytest.mark.parametrize("beta", [0.0, 2.0])
    def test_compute_metrics_gets_policy_logits_and_labels(self, make_trainer, make_model, make_dataset, beta):
        seen = {}

        def compute_metrics(prediction):
            seen["logits"], seen["labels"] = prediction.predictions, prediction.label_ids
            return {"count": int((prediction.label_ids != -100).sum())}

        data = make_dataset(5)
        model = make_model(beta=beta)
        trainer = make_trainer(
            model, per_device_eval_batch_size=2, trainer_kwargs={"compute_metrics": compute_metrics}
        )
        metrics = trainer.evaluate(data)
        assert metrics["eval_count"] == sum(len(row["actions_ixs"]) for row in data)
        assert metrics["eval_loss"] == pytest.approx(make_trainer(model).evaluate(data)["eval_loss"], rel=1e-6)
        model.eval()
        for i, row in enumerate(data):
            labels = np.full(seen["labels"].shape[1], -100)
            positions = [p + 1 for p in row["actions_ixs"]]
            labels[positions] = [row["input_ids"][p] for p in positions]
            assert seen["labels"][i].tolist() == labels.tolist()
            with torch.no_grad():
                logits = model(torch.tensor([row["input_ids"]])).logits[0]
            np.testing.assert_allclose(seen["logits"][i, : len(logits)], logits, atol=1e-5)

    def test_preprocess_logits(self, make_trainer, make_dataset):
        def accuracy(prediction):
            taken = prediction.label_ids[:, 1:]
            return {"accuracy": float((prediction.predictions[:, :-1] == taken)[taken != -100].mean())}

        trainer = make_trainer(
            trainer_kwargs={
                "compute_metrics": accuracy,
                "preprocess_logits_for_metrics": lambda logits, labels: logits.argmax(-1),
            }
        )
        assert 0 <= trainer.evaluate(make_dataset(5))["eval_accuracy"] <= 1

    def test_predict(self, make_trainer, raw, tokenizer):
        trainer = make_trainer(train_dataset=raw, trainer_kwargs={"processing_class": tokenizer})
        output = trainer.predict(raw)
        assert output.predictions.shape[0] == output.label_ids.shape[0] == len(raw)
        assert output.predictions.shape[2] == 24
        assert output.metrics["test_loss/q"] == pytest.approx(trainer.evaluate(raw)["eval_loss/q"], rel=1e-6)
