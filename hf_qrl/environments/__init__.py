# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""Environments: the interface, the ones most users write, and adapters of other libraries' environments."""

from .adapters import (
    from_gymnasium,
    from_lmrl,
    from_openenv,
    from_reward_function,
    from_skyrl,
    from_textarena,
    from_trl_environment,
    to_trl_environment,
    with_private_random,
)
from .failures import EnvironmentFailure, FailureClass, ReplayMismatch
from .interfaces import EnvironmentInterface, EnvironmentReturn, MetadataT
from .resetting import EnvironmentReset, EpisodeSource, SupportsReset, call_reset
from .seeding import episode_seed, policy_seed_sequence
from .sessions import TextEnvironment, as_environment
from .stepping import StepResult, call_step
from .text_env import Replay, TextEnv, TextEnvFactory, observation_hash, replay
from .utils import create_env, plain_class, register_env


__all__ = [
    "EnvironmentFailure",
    "EnvironmentInterface",
    "EnvironmentReset",
    "EnvironmentReturn",
    "EpisodeSource",
    "FailureClass",
    "MetadataT",
    "Replay",
    "ReplayMismatch",
    "StepResult",
    "SupportsReset",
    "TextEnv",
    "TextEnvFactory",
    "TextEnvironment",
    "as_environment",
    "call_reset",
    "call_step",
    "create_env",
    "episode_seed",
    "from_gymnasium",
    "from_lmrl",
    "from_openenv",
    "from_reward_function",
    "from_skyrl",
    "from_textarena",
    "from_trl_environment",
    "observation_hash",
    "plain_class",
    "policy_seed_sequence",
    "register_env",
    "replay",
    "to_trl_environment",
    "with_private_random",
]
