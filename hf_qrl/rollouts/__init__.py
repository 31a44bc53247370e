# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""Policies play environments: episodes to train on, and evaluations."""

from .collect import CollectionReport, TooManyFailures, collect_episodes
from .evaluate import Comparison, EvaluationResult, compare_policies, evaluate_policy
from .exploration import EpsilonGreedyPolicy
from .host import EnvironmentHost, host_factory
from .intervals import Interval, bootstrap_mean
from .model_policy import ModelPolicy
from .player import EpisodeFailure
from .policy import Action, Policy, RandomPolicy, ScriptedPolicy
from .store import RolloutStore


__all__ = [
    "Action",
    "CollectionReport",
    "Comparison",
    "EnvironmentHost",
    "EpisodeFailure",
    "EpsilonGreedyPolicy",
    "EvaluationResult",
    "Interval",
    "ModelPolicy",
    "Policy",
    "RandomPolicy",
    "RolloutStore",
    "ScriptedPolicy",
    "TooManyFailures",
    "bootstrap_mean",
    "collect_episodes",
    "compare_policies",
    "evaluate_policy",
    "host_factory",
]
