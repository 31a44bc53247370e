# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""Training arguments of [`PPOTrainer`]."""

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar, get_args

from ..losses.advantages import KLEstimator
from .base_config import BaseConfig


# What of `collect_episodes` the trainer decides.
OWN_ARGUMENTS = {
    *("policy", "env", "num_episodes", "seeds", "split", "source", "max_turns", "batch_size", "executor"),
    *("output_dir", "keep_tokens", "run_seed", "progress", "return_report"),
}


@dataclass
class PPOConfig(BaseConfig):
    r"""
    Configuration of the [`PPOTrainer`]. It adds to [`BaseConfig`], which has the arguments of the model and the
    logging, and to [`~transformers.TrainingArguments`].

    An optimizer step takes `per_device_train_batch_size * gradient_accumulation_steps` turns of each process; how many
    steps there are to a rollout depends on how many turns its episodes take.

    Args:
        > Parameters that control the rollouts

        episodes_per_rollout (`int`, *optional*, defaults to 64):
            Number of episodes, over all processes, that are played with the policy before it is trained on them.
        generation_batch_size (`int`, *optional*, defaults to 32):
            Largest number of conversations that each process generates for, or scores, at once.
        max_turns (`int`, *optional*):
            Number of turns after which an episode is truncated. Needed for an environment that may never end one.
        temperature (`float`, *optional*, defaults to 1.0):
            What the logits are divided by, in sampling and in the loss.
        eval_episodes (`int`, *optional*, defaults to 64):
            Number of episodes of an environment that each evaluation plays, with `eval_strategy`.
        collect_kwargs (`dict[str, Any]`, *optional*):
            Further arguments of [`collect_episodes`], plain JSON: `max_seq_len`, `options`, `max_error_rate`, ... A
            reply that is cut does not end its episode, unless `on_length="truncate"`.

        > Parameters that control the rewards

        reward_scale (`float`, *optional*, defaults to 1.0):
            What rewards are multiplied by. Values are learned best where returns are about as large as 1.
        gamma (`float`, *optional*, defaults to 1.0):
            Discount.
        discount_on (`str`, *optional*, defaults to `"token"`):
            `"token"` discounts after each token, `"utterance"` after the last token of each turn.
        lam (`float`, *optional*, defaults to 0.95):
            Lambda of the generalised advantage estimation.
        whiten_advantages (`bool`, *optional*, defaults to `True`):
            Whether advantages are shifted and scaled to mean 0 and variance 1 over the tokens of a rollout.
        kl_coef (`float`, *optional*, defaults to 0.05):
            Weight of the penalty for leaving the reference policy, which is part of each token's reward. With 0 there
            is no reference policy.
        kl_estimator (`str`, *optional*, defaults to `"k1"`):
            Estimate of the divergence at a token: `"k1"`, the log-ratio; `"k2"`, half its square; `"k3"`, which is
            unbiased and never negative; or `"abs"`.
        kl_target (`float`, *optional*):
            Divergence, summed over a turn, that `kl_coef` is adapted to. By default it is fixed.
        kl_horizon (`int`, *optional*, defaults to 10000):
            Number of turns over which it is adapted.

        > Parameters that control the training

        ppo_epochs (`int`, *optional*, defaults to 4):
            Number of passes over the turns of a rollout.
        cliprange (`float`, *optional*, defaults to 0.2):
            How far the ratio of new to old probabilities is followed away from 1.
        cliprange_value (`float`, *optional*, defaults to 0.2):
            How far values are followed away from the old ones; `None` for no limit.
        vf_coef (`float`, *optional*, defaults to 0.1):
            Weight of the value loss.
        entropy_coef (`float`, *optional*, defaults to 0.0):
            Weight of the entropy bonus.
        num_layers_unfrozen (`int`, *optional*):
            Number of upper decoder blocks to train, the lower ones being shared with the reference policy. By default
            all are trained.

    > These defaults differ from [`~transformers.TrainingArguments`]: `learning_rate=1e-5` and
    > `lr_scheduler_type="constant"`.
    """

    cloning_argument: ClassVar[str] = "kl_coef"

    _VALID_DICT_FIELDS = BaseConfig._VALID_DICT_FIELDS + ["collect_kwargs"]

    learning_rate: float = field(default=1e-5, metadata={"help": "The initial learning rate."})
    lr_scheduler_type: str = field(default="constant", metadata={"help": "The learning rate schedule."})

    episodes_per_rollout: int = field(default=64, metadata={"help": "Number of episodes between two trainings."})
    generation_batch_size: int = field(default=32, metadata={"help": "Largest number of rows generated for at once."})
    max_turns: int | None = field(default=None, metadata={"help": "Number of turns that truncate an episode."})
    temperature: float = field(default=1.0, metadata={"help": "Temperature of sampling, and of the loss."})
    eval_episodes: int = field(default=64, metadata={"help": "Number of episodes of an evaluation."})
    collect_kwargs: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Further arguments of `collect_episodes`."}
    )

    reward_scale: float = field(default=1.0, metadata={"help": "What rewards are multiplied by."})
    gamma: float = field(default=1.0, metadata={"help": "Discount."})
    discount_on: str = field(
        default="token", metadata={"help": "What is discounted.", "choices": ["token", "utterance"]}
    )
    lam: float = field(default=0.95, metadata={"help": "Lambda of the generalised advantage estimation."})
    whiten_advantages: bool = field(default=True, metadata={"help": "Whether to standardise advantages."})
    kl_coef: float = field(default=0.05, metadata={"help": "Weight of the divergence from the reference policy."})
    kl_estimator: str = field(
        default="k1", metadata={"help": "Estimate of the divergence.", "choices": list(get_args(KLEstimator))}
    )
    kl_target: float | None = field(default=None, metadata={"help": "Divergence that `kl_coef` is adapted to."})
    kl_horizon: int = field(default=10_000, metadata={"help": "Number of turns over which it is adapted."})

    ppo_epochs: int = field(default=4, metadata={"help": "Number of passes over a rollout."})
    cliprange: float = field(default=0.2, metadata={"help": "Range of the probability ratio around 1."})
    cliprange_value: float | None = field(default=0.2, metadata={"help": "Range of values around the old ones."})
    vf_coef: float = field(default=0.1, metadata={"help": "Weight of the value loss."})
    entropy_coef: float = field(default=0.0, metadata={"help": "Weight of the entropy bonus."})
    num_layers_unfrozen: int | None = field(
        default=None, metadata={"help": "Number of upper decoder blocks to train; all if unset."}
    )

    def __post_init__(self):
        super().__post_init__()
        for name in ("gamma", "lam"):
            self._check_between(name, 0.0, 1.0)
        for name in ("kl_coef", "vf_coef", "entropy_coef"):
            self._check_not_negative(name)
        for name in ("cliprange", "cliprange_value", "temperature", "kl_target"):
            self._check_positive(name)
        for name in (
            *("episodes_per_rollout", "generation_batch_size", "max_turns", "eval_episodes"),
            *("ppo_epochs", "kl_horizon", "num_layers_unfrozen"),
        ):
            self._check_at_least_one(name)
        if not math.isfinite(self.reward_scale) or self.reward_scale == 0:
            raise ValueError(f"`reward_scale` must be finite and not 0, got {self.reward_scale}.")
        if self.kl_target is not None and self.kl_coef == 0:
            raise ValueError("`kl_target` adapts `kl_coef`, and with `kl_coef=0` there is no penalty. Leave out one.")
        if isinstance(self.collect_kwargs, dict):
            own = sorted(self.collect_kwargs.keys() & OWN_ARGUMENTS)
            if own:
                raise ValueError(f"`collect_kwargs` has {own}, which other arguments of PPO decide. Leave them out.")
        if self.discount_on not in ("token", "utterance"):
            raise ValueError(f'`discount_on` must be "token" or "utterance", got {self.discount_on!r}.')
        if self.kl_estimator not in get_args(KLEstimator):
            raise ValueError(f"`kl_estimator` must be one of {get_args(KLEstimator)}, got {self.kl_estimator!r}.")

    def _check_positive(self, name: str) -> None:
        if getattr(self, name) is not None and not 0 < getattr(self, name) < math.inf:
            raise ValueError(f"`{name}` must be finite and above 0, got {getattr(self, name)}.")


__all__ = ["PPOConfig"]
