# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
import json
import math

import pytest
import torch
from datasets import Dataset, DatasetDict
from transformers import TrainingArguments

from hf_qrl import AutoModelForCausalLMWithILQLHeads, ILQLConfig, ILQLForCausalLM, ILQLTrainer


RAW = {
    "prompt": ["a b", "c", "d e f", "g"] * 2,
    "completion": [" c d", " h i j k", " l", " m n o"] * 2,
    "reward": [1.0, -0.5, 0.25, 2.0, 3.0, 0.0, 1.5, -1.0],
}
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}b "
    "{% generation %}{{ message['content'] }} <eos>{% endgeneration %} "
    "{% else %}a {{ message['content'] }} {% endif %}{% endfor %}{% if add_generation_prompt %}b {% endif %}"
)


@pytest.fixture
def raw() -> Dataset:
    return Dataset.from_dict(RAW)


def changed(trainer, before: dict[str, torch.Tensor]) -> set[str]:
    return {k for k, x in trainer.model.state_dict().items() if not torch.equal(x, before[k])}


class TestModel:
    def test_plain_model_gets_heads(self, make_trainer, make_base):
        trainer = make_trainer(make_base(), model_init_kwargs={"head_type": "linear", "num_q_heads": 1})
        assert isinstance(trainer.model, ILQLForCausalLM)
        assert (trainer.model.config.head_type, trainer.model.config.num_q_heads) == ("linear", 1)
        trainer.train()
        assert trainer.state.global_step == 2

    def test_model_by_name(self, make_trainer, make_base, tmp_path):
        base = make_base().to(torch.bfloat16)
        base.save_pretrained(tmp_path / "base")
        trainer = make_trainer(str(tmp_path / "base"), model_init_kwargs={"head_type": "tied"})
        assert trainer.model.config.head_type == "tied"
        assert {x.dtype for x in trainer.model.state_dict().values()} == {torch.float32}
        trainer.train()

    def test_dtype_of_named_model_casts_base_only(self, make_trainer, make_base, tmp_path):
        make_base().save_pretrained(tmp_path / "base")
        trainer = make_trainer(str(tmp_path / "base"), model_init_kwargs={"dtype": "bfloat16"})
        assert {x.dtype for x in trainer.model.base.parameters()} == {torch.bfloat16}
        assert {x.dtype for x in trainer.model.heads.state_dict().values()} == {torch.float32}
        trainer.train()

    def test_saved_model_continues(self, make_trainer, make_model, tmp_path):
        first = make_trainer(make_model(head_type="dueling"))
        first.train()
        first.save_model(tmp_path / "saved")
        again = make_trainer(str(tmp_path / "saved"))
        for name, x in first.model.state_dict().items():
            assert torch.equal(again.model.state_dict()[name], x)

    def test_fresh_heads_follow_the_seed(self, make_trainer, make_base):
        heads = []
        for seed in (0, 0, 1):
            torch.manual_seed(len(heads))
            heads.append(make_trainer(make_base(), seed=seed).model.heads.q[0].weight.detach())
        assert torch.equal(heads[0], heads[1]) and not torch.equal(heads[0], heads[2])

    def test_init_kwargs_with_live_heads_raise(self, make_trainer):
        with pytest.raises(ValueError, match="`model_init_kwargs` goes with a model given by name"):
            make_trainer(model_init_kwargs={"head_type": "tied"})

    def test_half_precision_targets_raise(self, make_trainer, make_model):
        with pytest.raises(ValueError, match="must be float32"):
            make_trainer(make_model().to(torch.bfloat16))

    def test_args_are_optional(self, make_model, make_dataset, monkeypatch, tmp_path):
        monkeypatch.chdir(tmp_path)
        trainer = ILQLTrainer(make_model(), train_dataset=make_dataset())
        assert isinstance(trainer.args, ILQLConfig) and trainer.args.output_dir.endswith("-ILQL")

    def test_several_gpus_in_one_process_raise(self, make_trainer, monkeypatch):
        monkeypatch.setattr(TrainingArguments, "n_gpu", property(lambda self: 2))
        with pytest.raises(ValueError, match="(?s)2 GPUs.*accelerate launch.*torchrun.*CUDA_VISIBLE_DEVICES"):
            make_trainer()

    def test_tags(self, make_trainer):
        assert {"hf_qrl", "ilql"} <= set(make_trainer().model.model_tags)


class TestFreezing:
    def test_free_trunk_without_cloning_raises(self, make_trainer):
        with pytest.raises(ValueError, match="awac_scale=0.*freeze_base=True"):
            make_trainer(awac_scale=0.0)

    @pytest.mark.parametrize("awac_scale", [0.0, 1.0])
    def test_frozen_base_stays_as_it_is(self, make_trainer, awac_scale):
        trainer = make_trainer(awac_scale=awac_scale, freeze_base=True, learning_rate=1e-2, weight_decay=0.1)
        before = {k: x.clone() for k, x in trainer.model.state_dict().items()}
        trainer.train()
        assert changed(trainer, before) == {k for k in before if k.startswith("heads.")}

    def test_everything_is_trained_by_default(self, make_trainer):
        trainer = make_trainer(learning_rate=1e-2)
        before = {k: x.clone() for k, x in trainer.model.state_dict().items()}
        trainer.train()
        assert changed(trainer, before) == set(before)

    @pytest.mark.parametrize("disable", [True, False])
    def test_disable_dropout(self, make_trainer, make_model, make_dataset, disable):
        trainer = make_trainer(make_model(config={"attention_dropout": 0.5}), disable_dropout=disable)
        batch = trainer.data_collator(make_dataset(4).to_list())
        trainer.model.train()
        losses = {
            trainer.compute_loss(trainer.model, dict(batch), False, batch["dones"].sum()).item() for _ in range(3)
        }
        assert len(losses) == (1 if disable else 3)


class TestData:
    @pytest.mark.parametrize(
        "dataset", [[{"prompt": "a"}], DatasetDict(), {"prompt": ["a"]}], ids=lambda x: type(x).__name__
    )
    def test_wrong_type_raises(self, make_trainer, dataset):
        with pytest.raises(ValueError, match="`train_dataset` must be a `datasets.Dataset`"):
            make_trainer(train_dataset=dataset)

    @pytest.mark.parametrize(("eval_dataset", "name"), [([1], "eval_dataset"), ({"a": [1]}, "eval_dataset")])
    def test_wrong_type_of_eval_set_raises(self, make_trainer, eval_dataset, name):
        with pytest.raises(ValueError, match=name):
            make_trainer(trainer_kwargs={"eval_dataset": eval_dataset})

    def test_missing_rewards_raise(self, make_trainer, make_dataset):
        with pytest.raises(ValueError, match="(?s)Missing columns.*rewards"):
            make_trainer(train_dataset=make_dataset().remove_columns("rewards"))

    def test_collator_misses_rewards(self, make_trainer, make_dataset):
        rows = make_dataset(2).remove_columns("rewards").to_list()
        with pytest.raises(KeyError, match="rewards"):
            make_trainer().data_collator(rows)

    def test_row_without_actions_raises(self, make_trainer, make_rows):
        rows = make_rows(4)
        rows[2].update(actions_ixs=[], rewards=[], turn_ixs=[], states_ixs=[0], dones=[0])
        with pytest.raises(ValueError, match="Row 2: no action tokens"):
            make_trainer(train_dataset=Dataset.from_list(rows))

    def test_row_without_actions_after_cut_raises(self, make_trainer, raw, tokenizer):
        with pytest.raises(ValueError, match="Row 2: no action tokens are left"):
            make_trainer(train_dataset=raw, trainer_kwargs={"processing_class": tokenizer}, max_length=3)

    def test_token_outside_vocabulary_raises(self, make_trainer, make_rows):
        rows = make_rows(4)
        rows[1]["input_ids"][0] = 24
        with pytest.raises(ValueError, match="Row 1: token id 24"):
            make_trainer(train_dataset=Dataset.from_list(rows))

    def test_batches_hold_the_columns_of_the_loss(self, make_trainer, make_dataset):
        data = make_dataset(weight=True, truncated=True).add_column("note", ["x"] * 16)
        batch = next(iter(make_trainer(train_dataset=data).get_train_dataloader()))
        assert set(batch) == {
            "input_ids", "attention_mask", "rewards", "states_ixs", "actions_ixs", "dones", "turn_ixs", "truncated",
            "weight",
        }  # fmt: skip

    def test_raw_text(self, make_trainer, raw, tokenizer):
        trainer = make_trainer(train_dataset=raw, trainer_kwargs={"processing_class": tokenizer})
        assert len(trainer.train_dataset) == len(raw)
        assert sum(map(sum, trainer.train_dataset["rewards"])) == pytest.approx(sum(RAW["reward"]))
        trainer.train()

    def test_text_without_tokenizer_raises(self, make_trainer, raw):
        with pytest.raises(ValueError, match="pass `processing_class`"):
            make_trainer(train_dataset=raw)

    def test_tokenizer_of_the_model_is_used(self, make_trainer, make_base, raw, tokenizer, tmp_path):
        for saver in (make_base(), tokenizer):
            saver.save_pretrained(tmp_path / "base")
        first = make_trainer(str(tmp_path / "base"), raw)
        first.train()
        assert first.processing_class.get_vocab() == tokenizer.get_vocab()

        # With the model of a run comes the tokenizer of that run, or else that of its base.
        first.processing_class.add_special_tokens({"bos_token": "a"})
        first.save_model(tmp_path / "with")
        first.model.save_pretrained(tmp_path / "without")
        bos = [make_trainer(str(tmp_path / x), raw).processing_class.bos_token for x in ("with", "without")]
        assert bos == ["a", None]

    @pytest.mark.parametrize("tokenized", [True, False])
    def test_stream(self, make_trainer, make_dataset, raw, tokenizer, tokenized):
        data = (make_dataset() if tokenized else raw).to_iterable_dataset()
        trainer = make_trainer(
            train_dataset=data, max_steps=6, trainer_kwargs={"processing_class": None if tokenized else tokenizer}
        )
        assert trainer.value_min is None and trainer.value_max is None
        trainer.train()
        assert trainer.state.global_step == 6

    def test_stream_trains_as_the_same_rows_in_order(self, make_trainer, make_dataset, state_of):
        data = make_dataset(8)
        bounds = {"value_min": -5.0, "value_max": 5.0}
        stream = make_trainer(train_dataset=data.to_iterable_dataset(), **bounds)
        stream.train()
        mapped = make_trainer(train_dataset=data, train_sampling_strategy="sequential", **bounds)
        mapped.train()
        for name, x in state_of(mapped).items():
            torch.testing.assert_close(state_of(stream)[name], x)

    def test_history_window_is_stored(self, make_trainer, tokenizer, tmp_path):
        tokenizer.chat_template = CHAT_TEMPLATE
        talk = [{"role": role, "content": x} for role, x in zip(["user", "assistant"] * 3, "cdefgh", strict=True)]
        data = Dataset.from_dict({"messages": [talk, talk[:4]], "rewards": [[0.0, 0.5, 1.0], [0.25, 0.75]]})
        try:
            trainer = make_trainer(
                train_dataset=data, history_window=1, trainer_kwargs={"processing_class": tokenizer}
            )
        finally:
            tokenizer.chat_template = None
        assert len(trainer.train_dataset) == 5
        assert [len(x) > 0 for x in trainer.train_dataset["next_input_ids"]] == [True, True, False, True, False]
        trainer.train()
        trainer.save_model(tmp_path / "saved")
        again = AutoModelForCausalLMWithILQLHeads.from_pretrained(tmp_path / "saved")
        assert again.config.history_window == trainer.model.config.history_window == 1


class TestTargetsOfReturns:
    def test_two_heads_raise(self, make_trainer):
        with pytest.raises(ValueError, match="num_q_heads=1"):
            make_trainer(target="mc")

    def test_truncated_rows_raise(self, make_trainer, make_model, make_dataset):
        with pytest.raises(ValueError, match="37.5% of the rows are truncated"):
            make_trainer(make_model(num_q_heads=1), make_dataset(16, truncated=True), target="mc")
        stream = make_dataset(16).to_iterable_dataset()
        with pytest.raises(ValueError, match="which a stream cannot tell beforehand"):
            make_trainer(make_model(num_q_heads=1), stream, target="mc", max_steps=1)

    def test_trains(self, make_trainer, make_model):
        trainer = make_trainer(make_model(num_q_heads=1), target="mc", logging_strategy="steps", logging_steps=1)
        trainer.train()
        assert trainer.state.log_history[0]["loss/v"] == 0.0
        assert trainer.state.log_history[0]["loss/q"] > 0.0


class TestOptions:
    @pytest.mark.parametrize(
        ("options", "message"),
        [({"tau": 1.0}, "`tau`"), ({"n_step": 0}, "`n_step`"), ({"n_step": 2, "target": "utterance"}, "goes with")],
    )
    def test_contradiction_raises(self, make_trainer, options, message):
        with pytest.raises(ValueError, match=message):
            make_trainer(**options)

    @pytest.mark.parametrize(
        "options",
        [
            {"target": "utterance", "discount_on": "utterance"},
            {"n_step": 3, "awac_beta": 1.0, "awac_weight_clip": 2.0},
            {"cql_scale": 0.0},
            {"bf16": True},
            {"activation_checkpointing": True},
            {"max_grad_norm": 0.0},
        ],
        ids=str,
    )
    def test_trains(self, make_trainer, options):
        trainer = make_trainer(**options)
        before = {k: x.clone() for k, x in trainer.model.state_dict().items()}
        trainer.train()
        assert all(torch.isfinite(x).all() for x in trainer.model.state_dict().values())
        assert changed(trainer, before) == set(before)

    def test_activation_checkpointing_changes_nothing(self, make_trainer, state_of, relative_error):
        states = []
        for on in (True, False):
            trainer = make_trainer(activation_checkpointing=on, optim="sgd", learning_rate=0.1)
            trainer.train()
            states.append(state_of(trainer))
        assert relative_error(*states) <= 1e-6

    @pytest.mark.parametrize("head_type", ["mlp", "linear", "tied", "dueling"])
    def test_loss_falls(self, make_trainer, make_model, make_dataset, head_type):
        data = make_dataset(4)
        trainer = make_trainer(make_model(head_type=head_type), data, learning_rate=1e-2, max_steps=30)
        before = trainer.evaluate(data)
        trainer.train()
        after = trainer.evaluate(data)
        for name in ("eval_loss", "eval_loss/q", "eval_loss/awac"):
            assert after[name] < 0.8 * before[name]


class TestBounds:
    def test_rewards_at_the_end_bound_values_by_returns(self, make_trainer, raw, tokenizer):
        trainer = make_trainer(train_dataset=raw, trainer_kwargs={"processing_class": tokenizer})
        assert (trainer.value_min, trainer.value_max) == (-1.0, 3.0)

    def test_rewards_along_the_way_bound_values_by_discount(self, make_trainer, make_dataset):
        data = make_dataset()
        rewards = [x for row in data["rewards"] for x in row]
        trainer = make_trainer(train_dataset=data, gamma=0.5)
        assert trainer.value_min == pytest.approx(2 * min(rewards))
        assert trainer.value_max == pytest.approx(2 * max(rewards))

    def test_given_bounds_win(self, make_trainer):
        trainer = make_trainer(value_max=0.125)
        assert trainer.value_max == 0.125 and trainer.value_min < 0

    def test_bounds_that_cross_raise(self, make_trainer):
        with pytest.raises(ValueError, match=r"The bounds of the values cross: \[1e\+06, "):
            make_trainer(value_min=1e6)

    def test_bounds_reach_the_loss(self, make_trainer, make_dataset):
        data = make_dataset(4)
        wide, narrow = (make_trainer(**x).evaluate(data) for x in ({}, {"value_min": 0.0, "value_max": 1e-6}))
        assert wide["eval_loss/q"] != pytest.approx(narrow["eval_loss/q"], rel=1e-3)

    def test_zero_heads_start_at_mean_return(self, make_trainer, make_model, make_dataset):
        data = make_dataset(seed=4)
        trainer = make_trainer(make_model(head_type="linear", head_init="zero"), data, gamma=0.9)
        returns = []
        for row in data:
            y = 0.0
            for reward in reversed(row["rewards"]):
                y = reward + 0.9 * y
                returns.append(y)
        mean = sum(returns) / len(returns)
        output = trainer.model(torch.tensor([data[0]["input_ids"]]), output_values=True)
        for x in (output.value, *output.qs, *output.target_qs):
            torch.testing.assert_close(x, torch.full_like(x, mean), rtol=0, atol=1e-5)

    def test_trained_heads_are_left_alone(self, make_trainer, make_model):
        model = make_model()
        before = {k: x.clone() for k, x in model.state_dict().items()}
        assert not changed(make_trainer(model), before)


class TestRewardScaling:
    def test_constants_are_stored(self, make_trainer, raw, tokenizer, tmp_path):
        trainer = make_trainer(
            train_dataset=raw, reward_scaling="standardize", trainer_kwargs={"processing_class": tokenizer}
        )
        rewards = torch.tensor(RAW["reward"], dtype=torch.float64)
        mean, std = rewards.mean().item(), rewards.std().item()
        assert trainer.model.config.reward_mean == pytest.approx(mean)
        assert trainer.model.config.reward_std == pytest.approx(std)
        got = [sum(row) for row in trainer.train_dataset["rewards"]]
        assert got == pytest.approx([(x - mean) / std for x in RAW["reward"]])
        trainer.save_model(tmp_path / "saved")
        config = json.loads((tmp_path / "saved" / "config.json").read_text())
        assert (config["reward_mean"], config["reward_std"]) == pytest.approx((mean, std))

        # Whoever loads it sees rewards in the same units.
        again = make_trainer(str(tmp_path / "saved"), raw.select([0]), trainer_kwargs={"processing_class": tokenizer})
        assert sum(again.train_dataset[0]["rewards"]) == pytest.approx((RAW["reward"][0] - mean) / std)

    def test_stream_raises(self, make_trainer, raw, tokenizer):
        with pytest.raises(ValueError, match="a stream cannot give"):
            make_trainer(
                train_dataset=raw.to_iterable_dataset(),
                reward_scaling="standardize",
                trainer_kwargs={"processing_class": tokenizer},
            )

    def test_tokenized_rows_raise(self, make_trainer):
        with pytest.raises(ValueError, match="tokenised columns are taken as they are"):
            make_trainer(reward_scaling="standardize")

    def test_off_by_default(self, make_trainer, raw, tokenizer):
        trainer = make_trainer(train_dataset=raw, trainer_kwargs={"processing_class": tokenizer})
        assert (trainer.model.config.reward_mean, trainer.model.config.reward_std) == (0.0, 1.0)
        assert math.isclose(sum(trainer.train_dataset[4]["rewards"]), 3.0)
