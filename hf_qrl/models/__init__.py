# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""Models: `PreTrainedModel` subclasses, nothing that trains."""

from .configuration_ilql import ILQLCausalLMConfig, ILQLSeq2SeqLMConfig
from .modeling_ilql import (
    AutoModelForCausalLMWithILQLHeads,
    AutoModelForSeq2SeqLMWithILQLHeads,
    CausalILQLOutput,
    ILQLForCausalLM,
    ILQLForSeq2SeqLM,
    Seq2SeqILQLOutput,
)


__all__ = [
    "AutoModelForCausalLMWithILQLHeads",
    "AutoModelForSeq2SeqLMWithILQLHeads",
    "CausalILQLOutput",
    "ILQLCausalLMConfig",
    "ILQLForCausalLM",
    "ILQLForSeq2SeqLM",
    "ILQLSeq2SeqLMConfig",
    "Seq2SeqILQLOutput",
]
