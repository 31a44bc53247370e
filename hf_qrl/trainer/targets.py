# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""Target networks: a Polyak step after the optimizer's, of the heads alone or of the whole model."""

from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import Trainer, TrainerCallback

from .weight_copy import WeightCopy


class TargetUpdateCallback(TrainerCallback):
    """
    Moves the target heads once per `every` optimizer steps, before logging, evaluation and saving, so that a
    checkpoint holds targets that belong to its weights. All processes begin with the targets of the first.

    Args:
        trainer (`Trainer`): The trainer of the model; knows whether the optimizer's step was skipped.
        alpha (`float`): Fraction of the way to the online heads; 1 copies them.
        every (`int`): Number of optimizer steps between updates.
        warmup_steps (`int`): Number of optimizer steps during which the targets are copies.
    """

    def __init__(self, trainer: Trainer, alpha: float, every: int, warmup_steps: int = 0):
        self.trainer, self.alpha, self.every, self.warmup_steps = trainer, alpha, every, warmup_steps

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # DeepSpeed and FSDP2 start from the parameters of the first process, and leave buffers as each process made
        # them.
        for buffer in self.trainer.bare_model.buffers():
            broadcast(buffer)
        if state.global_step < self.warmup_steps:
            self.trainer.bare_model.heads.update_targets(1.0)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.trainer.accelerator.optimizer_step_was_skipped:
            return
        if state.global_step <= self.warmup_steps:
            self.update(1.0)
        elif state.global_step % self.every == 0:
            self.update(self.alpha)

    def update(self, alpha: float) -> None:
        self.trainer.bare_model.heads.update_targets(alpha)


class ModelTargetUpdateCallback(TargetUpdateCallback):
    """[`TargetUpdateCallback`] that makes and moves `trainer.average`, the language model under the target heads."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        super().on_train_begin(args, state, control, **kwargs)
        if self.trainer.average is None:  # otherwise it comes from the checkpoint, or from training before
            self.trainer.average = ModelAverage(self.trainer.accelerator.unwrap_model(self.trainer.model))

    def update(self, alpha: float) -> None:
        super().update(alpha)
        self.trainer.average.update(alpha)


class ModelAverage(WeightCopy):
    """
    Moving average of the weights of a language model that are trained, in float32; weights that are not are shared
    with it, so that of an adapter only the adapter is kept twice. The heads have targets of their own.

    Args:
        model (`PreTrainedModel` or `peft.PeftModel`): The model with its heads, not wrapped for several processes.
    """

    file_name = "target_network.safetensors"

    def __init__(self, model: nn.Module):
        super().__init__(model, torch.float32)

    @torch.no_grad()
    def update(self, alpha: float) -> None:
        """Moves the average a fraction `alpha` of the way to the weights."""
        for name, average in self.weights.items():
            average.lerp_(self.trained[name].to(average.dtype), alpha)

    def hidden_states(self, **inputs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """
        What the averaged model hands to a `loss_fn`: hidden states `(B, n, d)`, and those of the next rows `(B, d)` if
        the inputs of `forward` have such.
        """
        return self.forward(
            **inputs, loss_fn=lambda hidden_states, heads, lm_head, next_state: (hidden_states, next_state)
        ).loss

    def save(self, directory: str | Path) -> None:
        save_file({name: x.contiguous() for name, x in self.weights.items()}, Path(directory) / self.file_name)

    def load(self, directory: str | Path) -> None:
        """Raises a `ValueError` if the checkpoint in the directory holds no average, or that of other weights."""
        file = Path(directory) / self.file_name
        saved = load_file(file) if file.is_file() else {}
        if {name: x.shape for name, x in saved.items()} != {name: x.shape for name, x in self.weights.items()}:
            raise ValueError(
                f"The checkpoint {str(directory)!r} does not hold the averaged weights of this model in {file.name}: "
                'it is of a run with `target_network="head"` or of another model, and targets would jump. Resume '
                "with the arguments that the run began with."
            )
        for name, average in self.weights.items():
            average.copy_(saved[name])


__all__ = ["ModelAverage", "ModelTargetUpdateCallback", "TargetUpdateCallback"]
