# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""Q-learning for language models, the Hugging Face way."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from .models import (
    AutoModelForCausalLMWithILQLHeads,
    AutoModelForSeq2SeqLMWithILQLHeads,
    CausalILQLOutput,
    DuelingHead,
    ILQLCausalLMConfig,
    ILQLForCausalLM,
    ILQLForSeq2SeqLM,
    ILQLSeq2SeqLMConfig,
    LlamaDuelingQConfig,
    LlamaDuelingQForCausalLM,
    Seq2SeqILQLOutput,
)


if TYPE_CHECKING:
    from .environments import EnvironmentInterface, EnvironmentReturn, TextEnv
    from .rollouts import collect_episodes, evaluate_policy
    from .trainer.ilql_config import ILQLConfig
    from .trainer.ilql_trainer import ILQLTrainer
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

# Loaded on first use: trainers import more than a user who only loads a model needs.
_LAZY = {
    "EnvironmentInterface": "hf_qrl.environments",
    "EnvironmentReturn": "hf_qrl.environments",
    "ILQLConfig": "hf_qrl.trainer.ilql_config",
    "ILQLTrainer": "hf_qrl.trainer.ilql_trainer",
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
    "AutoModelForSeq2SeqLMWithILQLHeads",
    "CausalILQLOutput",
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
    "QRLHFConfig",
    "QRLHFTrainer",
    "Seq2SeqILQLOutput",
    "TextEnv",
    "collect_episodes",
    "evaluate_policy",
]
