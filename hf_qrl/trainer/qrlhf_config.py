# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""Training arguments of [`QRLHFTrainer`]."""

import math
from dataclasses import dataclass, field
from typing import ClassVar

from .q_learning_config import QLearningConfig


@dataclass
class QRLHFConfig(QLearningConfig):
    r"""
    Configuration of the [`QRLHFTrainer`]. It adds to [`QLearningConfig`], which has the arguments of the model, the
    data and the logging, and to [`~transformers.TrainingArguments`]:

    Args:
        mc_floor (`bool`, *optional*, defaults to `False`):
            Whether a target is at least the return that followed in the data, in rows that terminated
            (Q-Transformer, section 4.3).
        double_q (`bool`, *optional*, defaults to `False`):
            Whether the online head chooses the token whose target Q-value is bootstrapped from.
        conservative_scale (`float`, *optional*, defaults to 1.0):
            Weight alpha of the conservative term, `alpha / 2` times the mean squared distance of the Q-values of the
            tokens not taken from `q_min`.
        q_min (`float`, *optional*):
            Where the conservative term pulls the Q-values of tokens that the data does not take: at most the smallest
            return-to-go of the data, which it is by default. Needed for streamed data.
        cloning_scale (`float`, *optional*, defaults to 1.0):
            Weight of the cloning term, which trains the language model. A model that acts by Q alone
            (`policy="q"`) can do without it.
        target_network (`str`, *optional*, defaults to `"head"`):
            What the target network averages: the Q-head (`"head"`), on the hidden states of the model in training, or
            the whole model (`"model"`), whose average the trainer keeps and saves beside its checkpoints. The latter
            takes one more copy of what is trained, in float32, and one more forward pass.
        ema_beta (`float`, *optional*, defaults to 0.995):
            Share that the average keeps at each update.
        ema_warmup_steps (`int`, *optional*, defaults to 0):
            Number of optimizer steps during which the target network is a copy.
        ema_update_every (`int`, *optional*, defaults to 1):
            Number of optimizer steps between updates.

    > These defaults differ from [`QLearningConfig`]: `gamma=0.998` and `discount_on="utterance"`, as in Q-Transformer
    > and llama-qrlhf.
    """

    cloning_argument: ClassVar[str] = "cloning_scale"

    gamma: float = field(default=0.998, metadata={"help": "Discount."})
    discount_on: str = field(
        default="utterance", metadata={"help": "What is discounted.", "choices": ["token", "utterance"]}
    )
    mc_floor: bool = field(default=False, metadata={"help": "Whether returns of the data bound targets from below."})
    double_q: bool = field(default=False, metadata={"help": "Whether the online head chooses the next token."})
    conservative_scale: float = field(default=1.0, metadata={"help": "Weight of the conservative term."})
    q_min: float | None = field(
        default=None, metadata={"help": "Where Q of tokens not taken is pulled to; from the data if unset."}
    )
    cloning_scale: float = field(default=1.0, metadata={"help": "Weight of the cloning term."})
    target_network: str = field(
        default="head", metadata={"help": "What the target network averages.", "choices": ["head", "model"]}
    )
    ema_beta: float = field(default=0.995, metadata={"help": "Share that the average keeps at each update."})
    ema_warmup_steps: int = field(default=0, metadata={"help": "Number of steps in which the targets are copies."})
    ema_update_every: int = field(default=1, metadata={"help": "Number of steps between updates of the targets."})

    def __post_init__(self):
        super().__post_init__()
        self._check_between("ema_beta", 0.0, 1.0)
        for name in ("conservative_scale", "cloning_scale", "ema_warmup_steps"):
            self._check_not_negative(name)
        self._check_at_least_one("ema_update_every")
        if self.q_min is not None and not math.isfinite(self.q_min):
            raise ValueError(f"`q_min` must be a finite number, got {self.q_min}.")
        if self.target_network not in ("head", "model"):
            raise ValueError(f'`target_network` must be "head" or "model", got {self.target_network!r}.')
        if self.target_network == "model" and self.save_only_model and self.load_best_model_at_end:
            raise ValueError(
                "`load_best_model_at_end` restores the target network with the model, and `save_only_model` does not "
                'save it. Leave one of them out, or use `target_network="head"`.'
            )


__all__ = ["QRLHFConfig"]
