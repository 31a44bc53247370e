# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""Training arguments of [`ILQLTrainer`]."""

from dataclasses import dataclass, field
from typing import ClassVar

from .q_learning_config import QLearningConfig


@dataclass
class ILQLConfig(QLearningConfig):
    r"""
    Configuration of the [`ILQLTrainer`]. It adds to [`QLearningConfig`], which has the arguments of the model, the
    data and the logging, and to [`~transformers.TrainingArguments`]:

    Args:
        tau (`float`, *optional*, defaults to 0.7):
            Expectile of the value head: 0.5 is the mean over actions, 1 their maximum.
        target (`str`, *optional*, defaults to `"td"`):
            Regression target of Q: `"td"`, `"utterance"` (a backup to the end of the utterance), or `"mc"` (returns of
            the data; takes one Q-head).
        cql_scale (`float`, *optional*, defaults to 0.1):
            Weight of the conservative term, which lowers the Q-values of tokens the data does not take.
        awac_scale (`float`, *optional*, defaults to 1.0):
            Weight of the cloning term, which trains the language model.
        awac_beta (`float`, *optional*, defaults to 0.0):
            Inverse temperature of the advantage weights of the cloning term; 0 is plain behaviour cloning.
        awac_weight_clip (`float`, *optional*):
            Largest advantage weight.
        alpha (`float`, *optional*, defaults to 0.005):
            Fraction of the way the targets move towards the online heads at each update. With `target="mc"` they are
            copies.
        steps_for_target_q_sync (`int`, *optional*, defaults to 1):
            Number of optimizer steps between updates of the targets.

    > `awac_scale=0` needs `freeze_base=True`: nothing would hold the language model to the data.
    """

    cloning_argument: ClassVar[str] = "awac_scale"

    tau: float = field(default=0.7, metadata={"help": "Expectile of the value head."})
    target: str = field(
        default="td", metadata={"help": "Regression target of Q.", "choices": ["td", "utterance", "mc"]}
    )
    cql_scale: float = field(default=0.1, metadata={"help": "Weight of the conservative term."})
    awac_scale: float = field(default=1.0, metadata={"help": "Weight of the cloning term."})
    awac_beta: float = field(default=0.0, metadata={"help": "Inverse temperature of the cloning weights."})
    awac_weight_clip: float | None = field(default=None, metadata={"help": "Largest cloning weight."})
    alpha: float = field(default=0.005, metadata={"help": "Step of the targets towards the online heads."})
    steps_for_target_q_sync: int = field(
        default=1, metadata={"help": "Number of optimizer steps between updates of the targets."}
    )

    def __post_init__(self):
        super().__post_init__()
        self._check_between("alpha", 0.0, 1.0)
        for name in ("cql_scale", "awac_scale", "awac_beta"):
            self._check_not_negative(name)
        if self.awac_weight_clip is not None and not self.awac_weight_clip > 0:
            raise ValueError(f"`awac_weight_clip` must be positive, got {self.awac_weight_clip}.")
        self._check_at_least_one("steps_for_target_q_sync")


__all__ = ["ILQLConfig"]
