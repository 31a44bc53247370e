# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""Training arguments that the Q-learning trainers share."""

import math
from dataclasses import dataclass, field

from .base_config import BaseConfig


@dataclass
class QLearningConfig(BaseConfig):
    r"""
    What [`ILQLConfig`] and [`QRLHFConfig`] add alike to [`BaseConfig`], which has the arguments of the model and of
    the logging, and to [`~transformers.TrainingArguments`].

    Args:
        freeze_base (`bool`, *optional*, defaults to `False`):
            Whether to train the heads only; the language model stays frozen afterwards.

        > Parameters that control the data preprocessing

        max_length (`int`, *optional*, defaults to 1024):
            Longest row in tokens; `None` for no limit. A longer row is cut, see `truncation_side`. With an
            encoder-decoder model it limits the prompt, which is cut on the left, and the reply, cut on the right.
        truncation_side (`str`, *optional*, defaults to `"right"`):
            `"right"` keeps the beginning: the row becomes truncated and bootstraps from the value of its last state.
            `"left"` keeps the end; encoder-decoder models do not take it.
        history_window (`int`, *optional*):
            Train one row per turn, which reads this many most recent turns (the current one included). Stored in the
            model's configuration.
        reward_scaling (`str`, *optional*):
            `"standardize"` subtracts the mean return of the training data and divides by its standard deviation; both
            are stored in the model's configuration. By default rewards are used as they are.
        dataset_num_proc (`int`, *optional*):
            Number of processes that prepare the data.

        > Parameters that control the training

        gamma (`float`, *optional*, defaults to 0.99):
            Discount, per token or per utterance by `discount_on`.
        discount_on (`str`, *optional*, defaults to `"token"`):
            `"token"` discounts after each token, `"utterance"` after the last token of each utterance.
        n_step (`int`, *optional*, defaults to 1):
            Number of steps until a target bootstraps.
        value_min (`float`, *optional*), value_max (`float`, *optional*):
            Bounds of the targets. By default derived from the rewards of the training data and `gamma`; infinite for
            streamed data.

    > This default differs from [`~transformers.TrainingArguments`]: `learning_rate=1e-4`.
    """

    learning_rate: float = field(default=1e-4, metadata={"help": "The initial learning rate."})
    freeze_base: bool = field(default=False, metadata={"help": "Whether to train the heads only."})
    max_length: int | None = field(default=1024, metadata={"help": "Longest row in tokens; None for no limit."})
    truncation_side: str = field(
        default="right",
        metadata={"help": "Which side of a too long row is cut off.", "choices": ["right", "left"]},
    )
    reward_scaling: str | None = field(
        default=None, metadata={"help": "`standardize` to standardise returns over the training data."}
    )
    dataset_num_proc: int | None = field(default=None, metadata={"help": "Number of processes preparing the data."})

    gamma: float = field(default=0.99, metadata={"help": "Discount."})
    discount_on: str = field(
        default="token", metadata={"help": "What is discounted.", "choices": ["token", "utterance"]}
    )
    n_step: int = field(default=1, metadata={"help": "Number of steps of the `td` target."})
    value_min: float | None = field(default=None, metadata={"help": "Lower bound of targets; from the data if unset."})
    value_max: float | None = field(default=None, metadata={"help": "Upper bound of targets; from the data if unset."})

    @property
    def clones(self) -> bool:
        """Whether the language model is trained on the data."""
        return getattr(self, self.cloning_argument) > 0

    def __post_init__(self):
        super().__post_init__()
        self._check_between("gamma", 0.0, 1.0)
        for name in ("value_min", "value_max"):
            if getattr(self, name) is not None and math.isnan(getattr(self, name)):
                raise ValueError(f"`{name}` must be a number, got NaN.")
        if self.value_min is not None and self.value_max is not None and self.value_min >= self.value_max:
            raise ValueError(f"`value_min` {self.value_min} must be smaller than `value_max` {self.value_max}.")
        if self.reward_scaling not in (None, "standardize"):
            raise ValueError(f'`reward_scaling` must be None or "standardize", got {self.reward_scaling!r}.')
        if self.truncation_side not in ("right", "left"):
            raise ValueError(f'`truncation_side` must be "right" or "left", got {self.truncation_side!r}.')
        if self.discount_on not in ("token", "utterance"):
            raise ValueError(f'`discount_on` must be "token" or "utterance", got {self.discount_on!r}.')
        self._check_at_least_one("n_step")


__all__ = ["QLearningConfig"]
