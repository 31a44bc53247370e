# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""Losses: pure functions on tensors. Each file reads like its paper."""

from .advantages import generalized_advantage_estimation
from .conservative import conservative_regularization_loss
from .ilql import ilql_loss
from .ppo import ppo_loss
from .q_learning import autoregressive_q_learn


__all__ = [
    "autoregressive_q_learn",
    "conservative_regularization_loss",
    "generalized_advantage_estimation",
    "ilql_loss",
    "ppo_loss",
]
