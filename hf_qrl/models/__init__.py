# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""Models: `PreTrainedModel` subclasses, nothing that trains."""

from .configuration_ilql import ILQLCausalLMConfig
from .modeling_ilql import AutoModelForCausalLMWithILQLHeads, CausalILQLOutput, ILQLForCausalLM


__all__ = ["AutoModelForCausalLMWithILQLHeads", "CausalILQLOutput", "ILQLCausalLMConfig", "ILQLForCausalLM"]
