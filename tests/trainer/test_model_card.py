# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from hf_qrl.trainer.model_card import last_metrics


@pytest.fixture
def trained(make_trainer, make_model, make_dataset, tmp_path):
    model = make_model()
    model.config.text_config._name_or_path = "organisation/tiny-llama"
    trainer = make_trainer(
        model,
        make_dataset(12),
        tmp_path / "walker",
        {"eval_dataset": make_dataset(4, seed=1)},
        logging_strategy="steps",
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=2,
        tau=0.875,
    )
    trainer.train()
    return trainer


class TestModelCard:
    def test_card_is_written_on_save_and_parses(self, trained, tmp_path):
        trained.save_model(tmp_path / "saved")
        card = ModelCard.load(tmp_path / "saved" / "README.md")
        assert card.data.library_name == "hf_qrl"
        assert card.data.pipeline_tag == "text-generation"
        assert card.data.base_model == "organisation/tiny-llama"
        assert {"hf_qrl", "ilql"} <= set(card.data.tags)
        results = {x.metric_type: x.metric_value for x in card.data.eval_results}
        evaluation = next(x for x in reversed(trained.state.log_history) if "eval_loss" in x)
        assert results["eval_loss/q"] == pytest.approx(evaluation["eval_loss/q"])

    def test_card_has_its_sections(self, trained):
        trained.create_model_card(dataset_name="organisation/walks")
        text = (Path(trained.args.output_dir) / "README.md").read_text()
        for heading in ("# walker", "## Use", "## Training", "## Versions", "## Citation"):
            assert f"\n{heading}\n" in text
        for content in (
            "AutoModelForCausalLMWithILQLHeads.from_pretrained(", "organisation/walks, 12 rows", "Steps: 2.",
            "| tau | `0.875` |", "| head_type | `mlp` |", "| learning_rate | `0.0001` |", "| loss/q |", "2206.11871",
        ):  # fmt: skip
            assert content in text, content
        assert "None" not in ModelCard(text).data.to_yaml()

    def test_names_and_tags(self, trained):
        trained.create_model_card(model_name="My model", dataset_name=["a/b", "c/d"], tags="extra")
        card = ModelCard.load(Path(trained.args.output_dir) / "README.md")
        assert "# My model" in card.text
        assert card.data.datasets == ["a/b", "c/d"]
        assert set(card.data.tags) == {"extra", "hf_qrl", "ilql"}

    def test_every_checkpoint_has_one(self, make_trainer):
        trainer = make_trainer(save_strategy="steps", save_steps=1)
        trainer.train()
        for step in (1, 2):
            card = ModelCard.load(Path(trainer.args.output_dir) / f"checkpoint-{step}" / "README.md")
            assert f"Steps: {step}." in card.text
            # Nothing was evaluated, and the base has no name.
            assert not card.data.eval_results and card.data.base_model is None

    def test_local_directory_is_no_base_model(self, make_trainer, make_base, tmp_path):
        make_base().save_pretrained(tmp_path / "base")
        trainer = make_trainer(str(tmp_path / "base"))
        trainer.create_model_card()
        card = ModelCard.load(tmp_path / "out" / "README.md")
        assert card.data.base_model is None and str(tmp_path) not in card.content

    def test_units_and_window_are_told(self, make_trainer, make_model):
        trainer = make_trainer(make_model(reward_mean=0.5, reward_std=2.0))
        trainer.model.config.history_window = 3
        trainer.create_model_card()
        text = (Path(trainer.args.output_dir) / "README.md").read_text()
        assert "Q * 2.0 + 0.5" in text and "last 3 turns" in text

    def test_streamed_data_has_no_count(self, make_trainer, make_dataset):
        trainer = make_trainer(train_dataset=make_dataset().to_iterable_dataset())
        trainer.create_model_card()
        assert " rows" not in (Path(trainer.args.output_dir) / "README.md").read_text()


class TestLastMetrics:
    def test_takes_the_latest_of_each(self):
        history = [
            {"loss": 3.0, "loss/q": 1.0, "step": 1},
            {"eval_loss": 2.0, "eval_runtime": 1.0, "step": 1},
            {"loss": 2.5, "loss/q": 0.5, "step": 2},
        ]
        assert last_metrics(history) == {"loss": 2.5, "loss/q": 0.5, "eval_loss": 2.0}


class TestRestoredModel:
    def test_metrics_are_those_of_the_best_step(self, make_trainer, make_model, make_dataset, tmp_path):
        trainer = make_trainer(
            make_model(),
            make_dataset(12),
            tmp_path / "best",
            {"eval_dataset": make_dataset(4, seed=1)},
            max_steps=3,
            eval_strategy="steps",
            eval_steps=1,
            save_strategy="steps",
            save_steps=1,
            logging_strategy="steps",
            logging_steps=1,
            load_best_model_at_end=True,
            metric_for_best_model="eval_values/mean",
            greater_is_better=True,
        )
        trainer.train()
        trainer.save_model(tmp_path / "saved")
        card = ModelCard.load(tmp_path / "saved" / "README.md")
        history = [entry for entry in trainer.state.log_history if "eval_values/mean" in entry]
        best = max(history, key=lambda entry: entry["eval_values/mean"])
        results = {x.metric_type: x.metric_value for x in card.data.eval_results}
        assert results["eval_values/mean"] == pytest.approx(best["eval_values/mean"])
        assert results["eval_loss/q"] == pytest.approx(best["eval_loss/q"])
        assert f"Steps: {best['step']}." in card.text
