# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""Models: `PreTrainedModel` subclasses, nothing that trains."""

from .configuration_ilql import ILQLCausalLMConfig, ILQLSeq2SeqLMConfig
from .configuration_llama_dueling_q import LlamaDuelingQConfig
from .configuration_value_head import ValueHeadCausalLMConfig, ValueHeadSeq2SeqLMConfig
from .heads import DuelingHead
from .modeling_ilql import (
    AutoModelForCausalLMWithILQLHeads,
    AutoModelForSeq2SeqLMWithILQLHeads,
    CausalILQLOutput,
    ILQLForCausalLM,
    ILQLForSeq2SeqLM,
    Seq2SeqILQLOutput,
)
from .modeling_llama_dueling_q import LlamaDuelingQForCausalLM
from .modeling_value_head import (
    AutoModelForCausalLMWithValueHead,
    AutoModelForSeq2SeqLMWithValueHead,
    CausalLMOutputWithValue,
    Seq2SeqLMOutputWithValue,
    ValueHeadForCausalLM,
    ValueHeadForSeq2SeqLM,
)
from .outputs import CausalQOutput


__all__ = [
    "AutoModelForCausalLMWithILQLHeads",
    "AutoModelForCausalLMWithValueHead",
    "AutoModelForSeq2SeqLMWithILQLHeads",
    "AutoModelForSeq2SeqLMWithValueHead",
    "CausalILQLOutput",
    "CausalLMOutputWithValue",
    "CausalQOutput",
    "DuelingHead",
    "ILQLCausalLMConfig",
    "ILQLForCausalLM",
    "ILQLForSeq2SeqLM",
    "ILQLSeq2SeqLMConfig",
    "LlamaDuelingQConfig",
    "LlamaDuelingQForCausalLM",
    "Seq2SeqILQLOutput",
    "Seq2SeqLMOutputWithValue",
    "ValueHeadCausalLMConfig",
    "ValueHeadForCausalLM",
    "ValueHeadForSeq2SeqLM",
    "ValueHeadSeq2SeqLMConfig",
]
