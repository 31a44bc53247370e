# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""Tiny models, from configurations, with weights large enough for every part of them to matter."""

import logging

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    BartConfig,
    CohereConfig,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    GraniteConfig,
    LlamaConfig,
    MT5Config,
    OPTConfig,
    Qwen3Config,
    T5Config,
)
from transformers.utils import logging as transformers_logging

from hf_qrl import ILQLForCausalLM, ILQLForSeq2SeqLM, ValueHeadForCausalLM, ValueHeadForSeq2SeqLM


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
T5 = {**TOKENS, "d_model": 24, "d_ff": 32, "d_kv": 12, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0}
T5 |= {"decoder_start_token_id": 0}
BART = {**TOKENS, "d_model": 24, "max_position_embeddings": 64, "dropout": 0.0, "init_std": 0.3}
BART |= {"decoder_start_token_id": 2, "forced_eos_token_id": None}
BART_SIZES = {"layers": 2, "attention_heads": 2, "ffn_dim": 32}
BART |= {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in BART_SIZES.items()}
SEQ2SEQ_BASES = {
    "t5": (T5Config, T5),
    # Its checkpoint has an LM head of its own, whose input is not scaled.
    "flan_t5": (T5Config, {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "mt5": (MT5Config, {**T5, "feed_forward_proj": "gated-gelu"}),
    "bart": (BartConfig, BART),
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


@pytest.fixture(scope="session", params=SEQ2SEQ_BASES)
def seq2seq_architecture(request) -> str:
    return request.param


@pytest.fixture(scope="session")
def make_seq2seq_base():
    """Returns a function from an architecture's name to a random encoder-decoder model, the same one at each call."""

    def make(name: str, **overrides):
        config_class, arguments = SEQ2SEQ_BASES[name]
        with torch.random.fork_rng():
            torch.manual_seed(7)
            base = AutoModelForSeq2SeqLM.from_config(config_class(**{**arguments, **overrides})).eval()
            if name != "bart":
                # A T5 as it is drawn repeats its last token for ever.
                for parameter in (*base.encoder.block.parameters(), *base.decoder.block.parameters()):
                    parameter.data *= 3 if parameter.dim() == 2 else 1
            if name == "flan_t5":
                base.lm_head.weight = torch.nn.Parameter(torch.randn_like(base.lm_head.weight))
                base.all_tied_weights_keys.pop("lm_head.weight")
            if name == "bart":
                base.final_logits_bias.normal_()
                base.generation_config.forced_bos_token_id = 1
        return base

    return make


@pytest.fixture(scope="session")
def make_seq2seq_model(make_seq2seq_base, scramble_heads):
    """Returns a function from an architecture's name to such a model with random heads."""

    def make(name: str = "t5", **head_arguments) -> ILQLForSeq2SeqLM:
        return scramble_heads(ILQLForSeq2SeqLM.from_base(make_seq2seq_base(name), **head_arguments))

    return make


@pytest.fixture(scope="session")
def make_seq2seq_inputs(make_ids):
    """Returns a function to inputs of two rows, the second one shorter in the encoder."""

    def make(model, length: int = 9, decoder_length: int = 6, seed: int = 0) -> dict[str, torch.Tensor]:
        mask = torch.ones(2, length, dtype=torch.long)
        mask[1, length - 3 :] = 0
        decoder = make_ids(2, decoder_length, seed + 1)
        decoder[:, 0] = model.config.decoder_start_token_id
        return {"input_ids": make_ids(2, length, seed), "attention_mask": mask, "decoder_input_ids": decoder}

    return make


@pytest.fixture(scope="session", params=[*BASES, *SEQ2SEQ_BASES])
def any_architecture(request) -> str:
    return request.param


@pytest.fixture(scope="session")
def make_any_base(make_base, make_seq2seq_base):
    """Returns a function from the name of a causal or an encoder-decoder architecture to such a language model."""

    def make(name: str, **overrides):
        return make_base(name, **overrides) if name in BASES else make_seq2seq_base(name, **overrides)

    return make


@pytest.fixture(scope="session")
def make_value_model(make_any_base, scramble_heads):
    """Returns a function from an architecture's name to such a model with a random value head."""

    def make(name: str = "llama", **head_arguments) -> ValueHeadForCausalLM | ValueHeadForSeq2SeqLM:
        cls = ValueHeadForCausalLM if name in BASES else ValueHeadForSeq2SeqLM
        return scramble_heads(cls.from_base(make_any_base(name), **head_arguments))

    return make


@pytest.fixture(scope="session")
def make_inputs(make_ids, make_seq2seq_inputs):
    """Returns a function to inputs of two rows for a causal or an encoder-decoder model, the second row shorter."""

    def make(model, length: int = 9, seed: int = 0) -> dict[str, torch.Tensor]:
        if model.config.is_encoder_decoder:
            return make_seq2seq_inputs(model, length, seed=seed)
        mask = torch.ones(2, length, dtype=torch.long)
        mask[1, length - 3 :] = 0
        return {"input_ids": make_ids(2, length, seed), "attention_mask": mask}

    return make


@pytest.fixture(scope="session")
def relative_error():
    """Returns the distance of two dictionaries of tensors relative to the norm of the second."""

    def error(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
        assert got.keys() == expected.keys()
        distance = sum((got[name].double() - x.double()).square().sum() for name, x in expected.items())
        return (distance / sum(x.double().square().sum() for x in expected.values())).sqrt().item()

    return error


@pytest.fixture(scope="session")
def assert_same_bits():
    def check(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
        assert got.keys() == expected.keys()
        different = [name for name in expected if not torch.equal(got[name], expected[name])]
        assert not different, f"{len(different)} of {len(expected)} tensors differ: {different[:5]}"

    return check
