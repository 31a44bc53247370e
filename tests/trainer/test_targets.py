# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback

from hf_qrl.models.heads import ILQLHeads
from hf_qrl.trainer.targets import TargetUpdateCallback


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
