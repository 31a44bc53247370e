# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""Training arguments that the Q-learning trainers share."""

import math
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, ClassVar

from transformers import TrainingArguments


@dataclass
class QLearningConfig(TrainingArguments):
    r"""
    What [`ILQLConfig`] and [`QRLHFConfig`] add to [`~transformers.TrainingArguments`] alike.

    Args:
        > Parameters that control the model

        model_init_kwargs (`dict[str, Any]`, *optional*):
            Arguments of `from_pretrained` of the model, if it is given by name:
            `{"head_type": "tied", "dtype": "bfloat16"}`.
        freeze_base (`bool`, *optional*, defaults to `False`):
            Whether to train the heads only; the language model stays frozen afterwards.
        disable_dropout (`bool`, *optional*, defaults to `True`):
            Whether to set every dropout probability to zero.

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

        > Parameters that control the logging

        log_completions (`bool`, *optional*, defaults to `False`):
            Whether to print a table of completions sampled from the policy, with their Q-values.
        log_completions_steps (`int`, *optional*):
            Number of optimizer steps between two tables; that of `logging_steps` if not given.
        num_completions_to_print (`int`, *optional*, defaults to 4):
            Number of completions in a table.
        max_completion_length (`int`, *optional*, defaults to 64):
            Longest completion in a table, in tokens.

    > These defaults differ from [`~transformers.TrainingArguments`]: `learning_rate=1e-4`, `logging_steps=10`, and
    > `logging_nan_inf_filter=False`, so that a run that has diverged shows it.
    """

    # The argument that weighs the term which holds the language model to the data.
    cloning_argument: ClassVar[str]

    _VALID_DICT_FIELDS = TrainingArguments._VALID_DICT_FIELDS + ["model_init_kwargs"]

    learning_rate: float = field(default=1e-4, metadata={"help": "The initial learning rate."})
    logging_steps: float = field(default=10, metadata={"help": "Number of steps (or share of all) between two logs."})

    logging_nan_inf_filter: bool = field(
        default=False, metadata={"help": "Whether to log the mean of the other losses in the place of NaN."}
    )

    model_init_kwargs: dict[str, Any] | str | None = field(
        default=None,
        metadata={"help": "Arguments of `from_pretrained`, for a model given by name."},
    )
    freeze_base: bool = field(default=False, metadata={"help": "Whether to train the heads only."})
    disable_dropout: bool = field(default=True, metadata={"help": "Whether to set dropout probabilities to zero."})

    max_length: int | None = field(default=1024, metadata={"help": "Longest row in tokens; None for no limit."})
    truncation_side: str = field(
        default="right",
        metadata={"help": "Which side of a too long row is cut off.", "choices": ["right", "left"]},
    )
    history_window: int | None = field(
        default=None, metadata={"help": "Number of most recent turns a row reads, the current one included."}
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

    log_completions: bool = field(default=False, metadata={"help": "Whether to print tables of completions."})
    log_completions_steps: int | None = field(
        default=None, metadata={"help": "Number of steps between two tables; `logging_steps` if unset."}
    )
    num_completions_to_print: int = field(default=4, metadata={"help": "Number of completions in a table."})
    max_completion_length: int = field(default=64, metadata={"help": "Longest completion in a table, in tokens."})

    @property
    def clones(self) -> bool:
        """Whether the language model is trained on the data."""
        return getattr(self, self.cloning_argument) > 0

    def __post_init__(self):
        if self.greater_is_better is None and "loss/" in (self.metric_for_best_model or ""):
            # The parent class takes only names that *end* with "loss" for losses.
            self.greater_is_better = False
        if self.ddp_broadcast_buffers is None:
            # The targets move alike on every process; sending them at each forward would be for nothing.
            self.ddp_broadcast_buffers = False
        super().__post_init__()
        if self.deepspeed and self.use_cpu:
            # Without a GPU transformers starts the processes' group past DeepSpeed, which has to know it by the time
            # a model is loaded in parts.
            import_module("deepspeed").init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
        for name in ("fp16_full_eval", "bf16_full_eval"):
            if getattr(self, name):
                raise ValueError(
                    f"`{name}` casts the whole model, targets included, in which small steps are lost afterwards. "
                    "Leave it out; evaluation runs in the precision of training (`bf16=True`)."
                )
        if self.label_smoothing_factor != 0:
            raise ValueError("`label_smoothing_factor` has no meaning for the losses of Q-learning; leave it out.")
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
        for name in ("n_step", "log_completions_steps", "num_completions_to_print"):
            self._check_at_least_one(name)

    def _check_between(self, name: str, low: float, high: float) -> None:
        if not low <= getattr(self, name) <= high:
            raise ValueError(f"`{name}` must lie between {low:g} and {high:g}, got {getattr(self, name)}.")

    def _check_not_negative(self, name: str) -> None:
        if not 0 <= getattr(self, name) < math.inf:
            raise ValueError(f"`{name}` must be finite and not negative, got {getattr(self, name)}.")

    def _check_at_least_one(self, name: str) -> None:
        if getattr(self, name) is not None and getattr(self, name) < 1:
            raise ValueError(f"`{name}` must be at least 1, got {getattr(self, name)}.")


__all__ = ["QLearningConfig"]
