# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""
What PPO is trained on: rollouts of the policy as it is, one after the other, each gone through `ppo_epochs` times.
"""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.utils import logging

from ..data import collate_ppo
from ..data.ppo_types import PPORLBatch, PPORLElement
from ..rollouts.store import RolloutStore


logger = logging.get_logger(__name__)


@dataclasses.dataclass
class Progress:
    """
    How far the training has come.

    Args:
        rollouts (`int`): Number of rollouts that were begun.
        epoch (`int`): Passes over the latest one that are complete.
        minibatch (`int`): Optimizer steps of the present pass that are done.
        episodes (`int`): Episodes played.
        steps (`int`): Turns played in the environment.
        kl_coef (`float`): Weight of the penalty for leaving the reference policy.
    """

    rollouts: int = 0
    epoch: int = 0
    minibatch: int = 0
    episodes: int = 0
    steps: int = 0
    kl_coef: float = 0.0


class RolloutBatches:
    """
    The micro-batches of all optimizer steps, as a dataloader without a length: a new rollout is played when the latest
    has been gone through. Every process has the whole rollout, and takes its part of each step.

    Args:
        trainer ([`PPOTrainer`]): The trainer; `trainer.rollout()` plays, scores and returns the next [`RolloutStore`].
    """

    progress_file = "ppo_progress.json"
    rollout_file = "rollout.safetensors"

    def __init__(self, trainer: Any):
        self.trainer = trainer
        self.progress = Progress(kl_coef=trainer.args.kl_coef)
        self.store: RolloutStore | None = None

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        args, progress = self.trainer.args, self.progress
        while True:
            if self.store is None:
                self.store = self.trainer.rollout(progress)
                progress.rollouts += 1
                self._check_steps(len(self.store))
            while progress.epoch < args.ppo_epochs:
                minibatches = self.minibatches(len(self.store))
                while progress.minibatch < len(minibatches):
                    micro_batches = self.micro_batches(minibatches[progress.minibatch])
                    # The step is done by the time that anybody looks again.
                    progress.minibatch += 1
                    yield from micro_batches
                progress.epoch, progress.minibatch = progress.epoch + 1, 0
            progress.epoch, self.store = 0, None

    def _check_steps(self, size: int) -> None:
        """Warns, at the first rollout, if training ends before it has been gone through."""
        steps = self.trainer.args.ppo_epochs * -(-size // self.trainer.turns_per_step)
        if self.progress.rollouts == 1 and steps > self.trainer.args.max_steps:
            logger.warning(
                "The first rollout has %d turns, which are %d optimizer steps in %d passes, and `max_steps` is %d: "
                "the policy would not play again. Raise `max_steps` or `per_device_train_batch_size`, or play fewer "
                "episodes.",
                *(size, steps, self.trainer.args.ppo_epochs, self.trainer.args.max_steps),
            )

    def minibatches(self, size: int) -> list[np.ndarray]:
        """The turns of each optimizer step of a pass, in an order that the seed and the pass decide."""
        args, progress = self.trainer.args, self.progress
        order = np.random.default_rng([args.seed, progress.rollouts, progress.epoch]).permutation(size)
        return np.array_split(order, -(-size // self.trainer.turns_per_step))

    def micro_batches(self, minibatch: np.ndarray) -> list[dict[str, torch.Tensor]]:
        """This process's part of an optimizer step, in as many micro-batches as there are to a step."""
        assert self.store is not None
        elements = self.store.elements
        # Rows of about the same length need little padding.
        by_length = sorted(minibatch, key=lambda i: len(elements[i].query_tensor) + len(elements[i].response_tensor))
        args = self.trainer.args
        parts = np.array_split(np.asarray(by_length), args.gradient_accumulation_steps * args.world_size)
        own = parts[args.process_index :: args.world_size]
        return [self.collate([elements[i] for i in part], elements[by_length[0]]) for part in own]

    def collate(self, elements: list[PPORLElement], filler: PPORLElement) -> dict[str, torch.Tensor]:
        """A batch as a dict; without elements a row without actions, for other processes wait for its forward."""
        batch = collate_ppo(elements or [filler], self.trainer.pad_token_id)
        if not elements:
            nothing = torch.zeros_like(batch.response_tensors, dtype=torch.bool)
            batch = dataclasses.replace(batch, response_mask=nothing)
        return {field.name: getattr(batch, field.name) for field in dataclasses.fields(PPORLBatch)}

    def settings(self) -> dict[str, float]:
        """What the place in a run depends on."""
        args = self.trainer.args
        names = ("episodes_per_rollout", "ppo_epochs", "seed", "kl_coef")
        return {**{name: getattr(args, name) for name in names}, "turns_per_step": self.trainer.turns_per_step}

    def save(self, directory: str | Path) -> None:
        """Saves the progress, and the rollout if it has not been gone through."""
        if self.store is not None:
            self.store.save(Path(directory) / self.rollout_file)
        progress = {**dataclasses.asdict(self.progress), "has_rollout": self.store is not None}
        progress["settings"] = self.settings()
        (Path(directory) / self.progress_file).write_text(json.dumps(progress), encoding="utf-8")

    def load(self, directory: str | Path) -> None:
        """Raises a `ValueError` if there is no progress to go on from in the directory."""
        file = Path(directory) / self.progress_file
        if not file.is_file():
            raise ValueError(
                f"The checkpoint {str(directory)!r} is of no `PPOTrainer`: there is no {file.name} in it."
            )
        progress = json.loads(file.read_text(encoding="utf-8"))
        has_rollout, settings = progress.pop("has_rollout"), progress.pop("settings")
        changed = {name: f"{settings[name]}, not {x}" for name, x in self.settings().items() if x != settings[name]}
        if changed:
            raise ValueError(
                f"The checkpoint {str(directory)!r} is of a run with other settings: {changed}. Its place in the "
                "episodes and in the rollout would be another: resume with those that the run began with."
            )
        for name, value in progress.items():
            setattr(self.progress, name, value)
        rollout = Path(directory) / self.rollout_file
        if has_rollout and not rollout.is_file():
            raise ValueError(
                f"The checkpoint {str(directory)!r} has lost its {rollout.name}: resume from another one."
            )
        self.store = RolloutStore.load(rollout) if has_rollout else None


__all__ = ["Progress", "RolloutBatches"]
