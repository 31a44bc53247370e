# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""Tiny models, from configurations, with weights large enough for every part of them to matter."""

import logging

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    GraniteConfig,
    LlamaConfig,
    OPTConfig,
    Qwen3Config,
)
from transformers.utils import logging as transformers_logging

from hf_qrl import ILQLForCausalLM


VOCAB_SIZE = 61
TOKENS = {"vocab_size": VOCAB_SIZE, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
SIZES = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
LLAMA = {**TOKENS, **SIZES, "intermediate_size": 32, "num_key_value_heads": 1}
GPT2 = {"n_embd": 24, "n_layer": 2, "n_head": 2, "n_positions": 64, "initializer_range": 0.3}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
OPT = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 64}

BASES = {
    "gpt2": (GPT2Config, {**TOKENS, **GPT2, **NO_DROPOUT}),
    "llama": (LlamaConfig, {**LLAMA, "tie_word_embeddings": False}),
    "llama_tied": (LlamaConfig, {**LLAMA, "tie_word_embeddings": True}),
    "qwen3_tied": (Qwen3Config, {**LLAMA, "head_dim": 12, "tie_word_embeddings": True}),
    "gemma3": (Gemma3TextConfig, {**LLAMA, "head_dim": 12, "final_logit_softcapping": 2.0, "sliding_window": 8}),
    "opt": (OPTConfig, {**TOKENS, **OPT, "word_embed_proj_dim": 16, "ffn_dim": 32, "init_std": 0.3, "dropout": 0.0}),
    "gpt_neox": (GPTNeoXConfig, {**TOKENS, **SIZES, "intermediate_size": 32, "tie_word_embeddings": False}),
    "cohere": (CohereConfig, {**LLAMA, "logit_scale": 0.25}),
    "granite": (GraniteConfig, {**LLAMA, "logits_scaling": 3.0}),
}
HEAD_TYPES = ("mlp", "linear", "tied", "dueling")


class DropLoadReports(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return "LOAD REPORT" not in record.getMessage()


@pytest.fixture(scope="session", autouse=True)
def quiet_transformers():
    transformers_logging.disable_progress_bar()
    for handler in logging.getLogger("transformers").handlers:
        handler.addFilter(DropLoadReports())


@pytest.fixture(scope="session", params=BASES)
def architecture(request) -> str:
    return request.param


@pytest.fixture(scope="session", params=HEAD_TYPES)
def head_type(request) -> str:
    return request.param


@pytest.fixture(scope="session")
def make_base():
    """Returns a function from an architecture's name to a random language model, the same one at each call."""

    def make(name: str, **overrides):
        config_class, arguments = BASES[name]
        with torch.random.fork_rng():
            torch.manual_seed(7)
            return AutoModelForCausalLM.from_config(config_class(**{**arguments, **overrides})).eval()

    return make


@pytest.fixture(scope="session")
def scramble_heads():
    """Returns a function that gives every tensor of the heads random values: the targets differ from the heads."""

    @torch.no_grad()
    def scramble(model: ILQLForCausalLM, seed: int = 0) -> ILQLForCausalLM:
        generator = torch.Generator().manual_seed(seed)
        for tensor in (*model.heads.parameters(), *model.heads.buffers()):
            tensor.copy_(0.3 * torch.randn(tensor.shape, generator=generator))
        return model

    return scramble


@pytest.fixture(scope="session")
def make_model(make_base, scramble_heads):
    """Returns a function from an architecture's name to such a model with random heads."""

    def make(name: str = "llama", **head_arguments) -> ILQLForCausalLM:
        return scramble_heads(ILQLForCausalLM.from_base(make_base(name), **head_arguments))

    return make


@pytest.fixture(scope="session")
def make_ids():
    """Returns a function to random token ids, none of them a special token."""

    def make(rows: int = 2, length: int = 9, seed: int = 0) -> torch.Tensor:
        return torch.randint(3, VOCAB_SIZE, (rows, length), generator=torch.Generator().manual_seed(seed))

    return make
