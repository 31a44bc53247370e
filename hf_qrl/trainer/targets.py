# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""Target networks: a Polyak step after the optimizer's."""

from typing import Any

from accelerate.utils import broadcast
from transformers import Trainer, TrainerCallback


class TargetUpdateCallback(TrainerCallback):
    """
    Moves the target heads once per `every` optimizer steps, before logging, evaluation and saving, so that a
    checkpoint holds targets that belong to its weights. All processes begin with the targets of the first.

    Args:
        trainer (`Trainer`): The trainer of the model; knows whether the optimizer's step was skipped.
        alpha (`float`): Fraction of the way to the online heads; 1 copies them.
        every (`int`): Number of optimizer steps between updates.
    """

    def __init__(self, trainer: Trainer, alpha: float, every: int):
        self.trainer, self.alpha, self.every = trainer, alpha, every

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # DeepSpeed and FSDP2 start from the parameters of the first process, and leave buffers as each process made
        # them.
        for buffer in self.trainer.bare_model.buffers():
            broadcast(buffer)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % self.every == 0 and not self.trainer.accelerator.optimizer_step_was_skipped:
            self.trainer.bare_model.heads.update_targets(self.alpha)


__all__ = ["TargetUpdateCallback"]
