# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""Q-learning for language models, the Hugging Face way."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from .models import (
    AutoModelForCausalLMWithILQLHeads,
    AutoModelForCausalLMWithValueHead,
    AutoModelForSeq2SeqLMWithILQLHeads,
    AutoModelForSeq2SeqLMWithValueHead,
    CausalILQLOutput,
    CausalLMOutputWithValue,
    DuelingHead,
    ILQLCausalLMConfig,
    ILQLForCausalLM,
    ILQLForSeq2SeqLM,
    ILQLSeq2SeqLMConfig,
    LlamaDuelingQConfig,
    LlamaDuelingQForCausalLM,
    Seq2SeqILQLOutput,
    Seq2SeqLMOutputWithValue,
    ValueHeadCausalLMConfig,
    ValueHeadForCausalLM,
    ValueHeadForSeq2SeqLM,
    ValueHeadSeq2SeqLMConfig,
)


if TYPE_CHECKING:
    from .environments import EnvironmentInterface, EnvironmentReturn, TextEnv
    from .rollouts import collect_episodes, evaluate_policy
    from .trainer.ilql_config import ILQLConfig
    from .trainer.ilql_trainer import ILQLTrainer
    from .trainer.ppo_config import PPOConfig
    from .trainer.ppo_trainer import PPOTrainer
    from .trainer.qrlhf_config import QRLHFConfig
    from .trainer.qrlhf_trainer import QRLHFTrainer


__version__ = "0.1.0.dev0"

AutoConfig.register(ILQLCausalLMConfig.model_type, ILQLCausalLMConfig)
AutoModel.register(ILQLCausalLMConfig, ILQLForCausalLM)
AutoModelForCausalLM.register(ILQLCausalLMConfig, ILQLForCausalLM)
AutoConfig.register(ILQLSeq2SeqLMConfig.model_type, ILQLSeq2SeqLMConfig)
AutoModel.register(ILQLSeq2SeqLMConfig, ILQLForSeq2SeqLM)
AutoModelForSeq2SeqLM.register(ILQLSeq2SeqLMConfig, ILQLForSeq2SeqLM)
AutoConfig.register(LlamaDuelingQConfig.model_type, LlamaDuelingQConfig)
AutoModel.register(LlamaDuelingQConfig, LlamaDuelingQForCausalLM)
AutoModelForCausalLM.register(LlamaDuelingQConfig, LlamaDuelingQForCausalLM)
AutoConfig.register(ValueHeadCausalLMConfig.model_type, ValueHeadCausalLMConfig)
AutoModel.register(ValueHeadCausalLMConfig, ValueHeadForCausalLM)
AutoModelForCausalLM.register(ValueHeadCausalLMConfig, ValueHeadForCausalLM)
AutoConfig.register(ValueHeadSeq2SeqLMConfig.model_type, ValueHeadSeq2SeqLMConfig)
AutoModel.register(ValueHeadSeq2SeqLMConfig, ValueHeadForSeq2SeqLM)
AutoModelForSeq2SeqLM.register(ValueHeadSeq2SeqLMConfig, ValueHeadForSeq2SeqLM)

# Loaded on first use: trainers import more than a user who only loads a model needs.
_LAZY = {
    "EnvironmentInterface": "hf_qrl.environments",
    "EnvironmentReturn": "hf_qrl.environments",
    "ILQLConfig": "hf_qrl.trainer.ilql_config",
    "ILQLTrainer": "hf_qrl.trainer.ilql_trainer",
    "PPOConfig": "hf_qrl.trainer.ppo_config",
    "PPOTrainer": "hf_qrl.trainer.ppo_trainer",
    "QRLHFConfig": "hf_qrl.trainer.qrlhf_config",
    "QRLHFTrainer": "hf_qrl.trainer.qrlhf_trainer",
    "TextEnv": "hf_qrl.environments",
    "collect_episodes": "hf_qrl.rollouts",
    "evaluate_policy": "hf_qrl.rollouts",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__


__all__ = [
    "AutoModelForCausalLMWithILQLHeads",
    "AutoModelForCausalLMWithValueHead",
    "AutoModelForSeq2SeqLMWithILQLHeads",
    "AutoModelForSeq2SeqLMWithValueHead",
    "CausalILQLOutput",
    "CausalLMOutputWithValue",
    "DuelingHead",
    "EnvironmentInterface",
    "EnvironmentReturn",
    "ILQLCausalLMConfig",
    "ILQLConfig",
    "ILQLForCausalLM",
    "ILQLForSeq2SeqLM",
    "ILQLSeq2SeqLMConfig",
    "ILQLTrainer",
    "LlamaDuelingQConfig",
    "LlamaDuelingQForCausalLM",
    "PPOConfig",
    "PPOTrainer",
    "QRLHFConfig",
    "QRLHFTrainer",
    "Seq2SeqILQLOutput",
    "Seq2SeqLMOutputWithValue",
    "TextEnv",
    "ValueHeadCausalLMConfig",
    "ValueHeadForCausalLM",
    "ValueHeadForSeq2SeqLM",
    "ValueHeadSeq2SeqLMConfig",
    "collect_episodes",
    "evaluate_policy",
]
