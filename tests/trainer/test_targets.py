# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
import copy
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback

from hf_qrl import LlamaDuelingQForCausalLM
from hf_qrl.models.heads import ILQLHeads
from hf_qrl.trainer.targets import ModelAverage, TargetUpdateCallback


class HeadsRecorder(TrainerCallback):
    """Copies the heads after each optimizer step, and at each micro-batch before it."""

    def __init__(self):
        self.heads: list[dict[str, torch.Tensor]] = []
        self.substeps: list[dict[str, torch.Tensor]] = []

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.heads.append(self.copy(model))

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.heads.append(self.copy(model))

    def on_substep_end(self, args, state, control, model=None, **kwargs):
        self.substeps.append(self.copy(model))

    @staticmethod
    def copy(model) -> dict[str, torch.Tensor]:
        return {name: x.detach().clone() for name, x in model.heads.state_dict().items()}


@pytest.fixture
def record(make_trainer):
    """Returns a function that trains and returns the heads after 0, 1, ... optimizer steps."""

    def run(**kwargs):
        recorder = HeadsRecorder()
        trainer = make_trainer(optim="sgd", learning_rate=0.5, **kwargs)
        trainer.add_callback(recorder)
        trainer.train()
        return trainer, recorder

    return run


def targets_of(heads: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: x for name, x in heads.items() if name.startswith("target_q.")}


class TestTargetUpdates:
    def test_ema_once_per_optimizer_step(self, record, monkeypatch):
        updates = []
        update = ILQLHeads.update_targets
        trainer, recorder = None, None
        with monkeypatch.context() as patch:
            patch.setattr(ILQLHeads, "update_targets", lambda self, a: (updates.append(a), update(self, a)))
            trainer, recorder = record(
                per_device_train_batch_size=1, gradient_accumulation_steps=4, max_steps=5, alpha=0.25
            )
        # The first copies the fresh heads of the fixture's model.
        assert [alpha for alpha in updates if alpha != 1.0] == [0.25] * 5
        assert len(recorder.heads) == 6 and len(recorder.substeps) == 15
        for before, after in zip(recorder.heads[:-1], recorder.heads[1:], strict=True):
            for name, target in targets_of(after).items():
                online = after[name.removeprefix("target_")]
                assert not torch.equal(online, before[name.removeprefix("target_")])
                assert torch.equal(target, torch.lerp(before[name], online, 0.25))
                torch.testing.assert_close(target, 0.75 * before[name] + 0.25 * online)
        for i, substep in enumerate(recorder.substeps):
            for name, target in targets_of(substep).items():
                assert torch.equal(target, recorder.heads[i // 3][name])

    def test_period_counts_optimizer_steps(self, record):
        _, recorder = record(
            per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=7, steps_for_target_q_sync=3
        )
        moved = [
            any(not torch.equal(after[name], before[name]) for name in targets_of(after))
            for before, after in zip(recorder.heads[:-1], recorder.heads[1:], strict=True)
        ]
        assert moved == [False, False, True, False, False, True, False]

    def test_targets_of_returns_are_copies(self, record, make_model):
        _, recorder = record(model=make_model(num_q_heads=1), target="mc", alpha=0.01, max_steps=3)
        for heads in recorder.heads:
            for name, target in targets_of(heads).items():
                assert torch.equal(target, heads[name.removeprefix("target_")])

    def test_skipped_optimizer_step_moves_nothing(self):
        updates = []
        accelerator = SimpleNamespace(optimizer_step_was_skipped=True)
        model = SimpleNamespace(heads=SimpleNamespace(update_targets=updates.append))
        callback = TargetUpdateCallback(SimpleNamespace(accelerator=accelerator, bare_model=model), 0.5, 1)
        callback.on_step_end(None, SimpleNamespace(global_step=1), None)
        assert updates == []
        accelerator.optimizer_step_was_skipped = False
        callback.on_step_end(None, SimpleNamespace(global_step=2), None)
        assert updates == [0.5]

    @pytest.mark.parametrize("head_type", ["mlp", "linear", "tied", "dueling"])
    def test_targets_are_not_trained(self, make_trainer, make_model, head_type):
        trainer = make_trainer(make_model(head_type=head_type), alpha=0.0, max_steps=3, weight_decay=0.5)
        before = {k: x.clone() for k, x in trainer.model.heads.target_q.named_buffers()}
        trainer.train()
        assert before and not list(trainer.model.heads.target_q.parameters())
        held = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
        for name, target in trainer.model.heads.target_q.named_buffers():
            assert torch.equal(target, before[name])
            assert target.grad is None and not target.requires_grad and id(target) not in held

    def test_checkpoint_holds_targets_of_its_step(self, record):
        trainer, recorder = record(max_steps=4, alpha=0.25, save_strategy="steps", save_steps=2)
        for step in (2, 4):
            saved = load_file(f"{trainer.args.output_dir}/checkpoint-{step}/model.safetensors")
            for name, x in recorder.heads[step].items():
                assert torch.equal(saved[f"heads.{name}"], x)


class TestSchedule:
    @pytest.mark.parametrize(
        ("every", "warmup_steps", "expected"),
        [
            (1, 0, [0.25] * 6),
            (2, 0, [0, 0.25, 0, 0.25, 0, 0.25]),
            (1, 2, [1, 1, 0.25, 0.25, 0.25, 0.25]),
            (3, 2, [1, 1, 0.25, 0, 0, 0.25]),
        ],
    )
    def test_copies_then_averages(self, every, warmup_steps, expected):
        updates = []
        model = SimpleNamespace(heads=SimpleNamespace(update_targets=updates.append))
        accelerator = SimpleNamespace(optimizer_step_was_skipped=False)
        trainer = SimpleNamespace(accelerator=accelerator, bare_model=model)
        callback = TargetUpdateCallback(trainer, 0.25, every, warmup_steps)
        got = []
        for step in range(1, 7):
            callback.on_step_end(None, SimpleNamespace(global_step=step), None)
            got.append(updates.pop() if updates else 0)
        assert got == expected

    @pytest.mark.parametrize(("step", "copied"), [(0, True), (1, True), (2, False)])
    def test_warm_up_begins_with_a_copy(self, make_dueling, step, copied):
        model = make_dueling()
        target = model.heads.target_q[0].weight.add_(1.0)
        callback = TargetUpdateCallback(SimpleNamespace(bare_model=model), 0.25, 1, warmup_steps=2)
        callback.on_train_begin(None, SimpleNamespace(global_step=step), None)
        assert torch.equal(target, model.heads.q[0].weight) == copied


@pytest.fixture
def make_dueling(make_base):
    def make(**config) -> LlamaDuelingQForCausalLM:
        return LlamaDuelingQForCausalLM.from_base(make_base(initializer_range=0.3, **config))

    return make


@torch.no_grad()
def shift(model, by: float = 0.1) -> None:
    """Changes every weight that is trained, but for the heads."""
    for name, x in model.named_parameters():
        if x.requires_grad and "heads." not in name:
            x.add_(by)


class TestModelAverage:
    INPUTS = {"input_ids": torch.arange(1, 9).reshape(2, 4), "attention_mask": torch.ones(2, 4, dtype=torch.long)}

    def test_rule(self, make_dueling):
        model = make_dueling()
        average = ModelAverage(model)
        expected = {name: x.detach().double() for name, x in model.named_parameters() if "heads." not in name}
        assert average.weights.keys() == expected.keys()
        for alpha in (0.25, 0.5, 0.0):
            shift(model)
            average.update(alpha)
            for name, x in model.named_parameters():
                if name in expected:
                    expected[name] = (1 - alpha) * expected[name] + alpha * x.detach().double()
                    torch.testing.assert_close(average.weights[name].double(), expected[name], rtol=1e-6, atol=1e-6)
        average.update(1.0)
        assert all(torch.equal(x, model.get_parameter(name)) for name, x in average.weights.items())

    def test_small_steps_of_half_precision_are_not_lost(self, make_dueling):
        model = make_dueling()
        model.model.to(torch.bfloat16)
        average = ModelAverage(model)
        name = "model.norm.weight"
        start = average.weights[name].clone()
        shift(model, 1.0)
        for _ in range(100):
            average.update(1e-3)
        assert average.weights[name].dtype == torch.float32
        torch.testing.assert_close(average.weights[name], start + 1 - 0.999**100, rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize("tied", [False, True])
    def test_hidden_states_are_those_of_a_model_of_the_average(self, make_dueling, tied):
        model = make_dueling(tie_word_embeddings=tied, attention_dropout=0.5).train()
        average = ModelAverage(model)
        assert [name for name in average.weights if "embed" in name or "lm_head" in name] == (
            ["model.embed_tokens.weight"] if tied else ["model.embed_tokens.weight", "lm_head.weight"]
        )
        shift(model)
        average.update(0.5)
        before = {name: x.clone() for name, x in model.state_dict().items()}
        rows = {"next_input_ids": self.INPUTS["input_ids"][:, 1:], "next_attention_mask": torch.ones(2, 3).long()}
        states, next_state = average.hidden_states(**self.INPUTS, **rows)
        assert model.training and not states.requires_grad and not next_state.requires_grad
        assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())

        other = copy.deepcopy(model).eval()
        current = other.hidden_states(**self.INPUTS)
        other.load_state_dict(average.weights, strict=False)
        torch.testing.assert_close(states, other.hidden_states(**self.INPUTS))
        torch.testing.assert_close(next_state, other.hidden_states(input_ids=rows["next_input_ids"])[:, -1])
        assert not torch.allclose(states, current, atol=1e-2)
        assert average.hidden_states(**self.INPUTS)[1] is None

    def test_only_what_is_trained_is_kept(self, make_dueling):
        model = make_dueling()
        for name, x in model.named_parameters():
            x.requires_grad_("layers.1" in name)
        assert all("layers.1" in name for name in ModelAverage(model).weights)

    def test_save_and_load(self, make_dueling, tmp_path):
        model = make_dueling()
        average = ModelAverage(model)
        shift(model)
        average.update(0.5)
        average.save(tmp_path)
        loaded = ModelAverage(model)
        loaded.load(tmp_path)
        assert all(torch.equal(x, loaded.weights[name]) for name, x in average.weights.items())
        for other in (make_dueling(num_hidden_layers=1), make_dueling(intermediate_size=8)):
            with pytest.raises(ValueError, match="does not hold the averaged weights of this model"):
                ModelAverage(other).load(tmp_path)
        with pytest.raises(ValueError, match="does not hold the averaged weights of this model"):
            loaded.load(tmp_path / "elsewhere")
