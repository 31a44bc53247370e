# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""Training arguments that all trainers here share."""

import math
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, ClassVar

from transformers import TrainingArguments


@dataclass
class BaseConfig(TrainingArguments):
    r"""
    What the configurations of hf_qrl add to [`~transformers.TrainingArguments`] alike.

    Args:
        > Parameters that control the model

        model_init_kwargs (`dict[str, Any]`, *optional*):
            Arguments of `from_pretrained` of the model, if it is given by name:
            `{"head_type": "tied", "dtype": "bfloat16"}`.
        disable_dropout (`bool`, *optional*, defaults to `True`):
            Whether to set every dropout probability to zero.
        history_window (`int`, *optional*):
            Number of most recent turns that the policy reads, the current one included. Stored in the model's
            configuration.

        > Parameters that control the logging

        log_completions (`bool`, *optional*, defaults to `False`):
            Whether to print a table of completions sampled from the policy.
        log_completions_steps (`int`, *optional*):
            Number of optimizer steps between two tables; that of `logging_steps` if not given.
        num_completions_to_print (`int`, *optional*, defaults to 4):
            Number of completions in a table.
        max_completion_length (`int`, *optional*, defaults to 64):
            Longest completion, in tokens.

    > These defaults differ from [`~transformers.TrainingArguments`]: `logging_steps=10`, and
    > `logging_nan_inf_filter=False`, so that a run that has diverged shows it.
    """

    # The argument that weighs the term which holds the language model to what it was.
    cloning_argument: ClassVar[str]

    _VALID_DICT_FIELDS = TrainingArguments._VALID_DICT_FIELDS + ["model_init_kwargs"]

    logging_steps: float = field(default=10, metadata={"help": "Number of steps (or share of all) between two logs."})
    logging_nan_inf_filter: bool = field(
        default=False, metadata={"help": "Whether to log the mean of the other losses in the place of NaN."}
    )

    model_init_kwargs: dict[str, Any] | str | None = field(
        default=None,
        metadata={"help": "Arguments of `from_pretrained`, for a model given by name."},
    )
    disable_dropout: bool = field(default=True, metadata={"help": "Whether to set dropout probabilities to zero."})
    history_window: int | None = field(
        default=None, metadata={"help": "Number of most recent turns a row reads, the current one included."}
    )

    log_completions: bool = field(default=False, metadata={"help": "Whether to print tables of completions."})
    log_completions_steps: int | None = field(
        default=None, metadata={"help": "Number of steps between two tables; `logging_steps` if unset."}
    )
    num_completions_to_print: int = field(default=4, metadata={"help": "Number of completions in a table."})
    max_completion_length: int = field(default=64, metadata={"help": "Longest completion, in tokens."})

    def __post_init__(self):
        if self.greater_is_better is None and "loss/" in (self.metric_for_best_model or ""):
            # The parent class takes only names that *end* with "loss" for losses.
            self.greater_is_better = False
        if self.ddp_broadcast_buffers is None:
            # Targets move alike on every process; sending them at each forward would be for nothing.
            self.ddp_broadcast_buffers = False
        super().__post_init__()
        if self.deepspeed and self.use_cpu:
            # Without a GPU transformers starts the processes' group past DeepSpeed, which has to know it by the time
            # a model is loaded in parts.
            import_module("deepspeed").init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
        for name in ("fp16_full_eval", "bf16_full_eval"):
            if getattr(self, name):
                raise ValueError(
                    f"`{name}` casts the whole model, heads included, in which small steps are lost afterwards. "
                    "Leave it out; evaluation runs in the precision of training (`bf16=True`)."
                )
        if self.label_smoothing_factor != 0:
            raise ValueError("`label_smoothing_factor` has no meaning for the losses of hf_qrl; leave it out.")
        for name in ("log_completions_steps", "num_completions_to_print", "max_completion_length"):
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


__all__ = ["BaseConfig"]
