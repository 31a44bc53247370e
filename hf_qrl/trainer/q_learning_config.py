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

        > Parameters that control playing, for trainers with an `environment`

        collect_every (`int`, *optional*, defaults to 100):
            Number of optimizer steps between two collections; the first one is before the first step.
        episodes_per_collect (`int`, *optional*, defaults to 32):
            Number of episodes of each.
        replay_size (`int`, *optional*):
            Largest number of episodes that are trained on; the oldest go. By default all are kept.
        offline_fraction (`float`, *optional*, defaults to 0.5):
            Share of the rows of each batch that come from the `train_dataset`; without one it is 0.
        collect_temperature (`float`, *optional*, defaults to 1.0):
            Temperature that actions are sampled at.
        collect_epsilon (`float`, *optional*, defaults to 0.0):
            Probability of a uniformly random legal action in the place of a turn of the policy. The environment has to
            name its legal actions.
        max_online_steps (`int`, *optional*), max_online_episodes (`int`, *optional*):
            Budgets of environment steps (turns) and of episodes, failed ones included, which are never exceeded. The
            former needs `collect_max_turns`.
        collect_max_turns (`int`, *optional*):
            Number of turns after which an episode is truncated. Without it one that never ends is played for ever.
        collect_max_new_tokens (`int`, *optional*, defaults to 64):
            Longest reply in tokens.

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

    collect_every: int = field(default=100, metadata={"help": "Number of steps between two collections."})
    episodes_per_collect: int = field(default=32, metadata={"help": "Number of episodes of a collection."})
    replay_size: int | None = field(default=None, metadata={"help": "Largest number of episodes; all if unset."})
    offline_fraction: float = field(default=0.5, metadata={"help": "Share of rows from the training data."})
    collect_temperature: float = field(default=1.0, metadata={"help": "Temperature of the policy that plays."})
    collect_epsilon: float = field(default=0.0, metadata={"help": "Probability of a random legal action."})
    max_online_steps: int | None = field(default=None, metadata={"help": "Largest number of environment steps."})
    max_online_episodes: int | None = field(default=None, metadata={"help": "Largest number of online episodes."})
    collect_max_turns: int | None = field(default=None, metadata={"help": "Longest online episode, in turns."})
    collect_max_new_tokens: int = field(default=64, metadata={"help": "Longest reply when playing, in tokens."})

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
        self._check_playing()

    def _check_playing(self) -> None:
        for name in ("collect_every", "episodes_per_collect", "replay_size", "max_online_steps"):
            self._check_at_least_one(name)
        for name in ("max_online_episodes", "collect_max_turns", "collect_max_new_tokens"):
            self._check_at_least_one(name)
        self._check_between("offline_fraction", 0.0, 1.0)
        self._check_between("collect_epsilon", 0.0, 1.0)
        if not 0 < self.collect_temperature < math.inf:
            raise ValueError(f"`collect_temperature` must be positive, got {self.collect_temperature}.")
        if self.max_online_steps is not None and self.collect_max_turns is None:
            raise ValueError(
                "`max_online_steps` is kept to by playing as many episodes as fit: set `collect_max_turns`, the most "
                "turns that one can have."
            )


__all__ = ["QLearningConfig"]
