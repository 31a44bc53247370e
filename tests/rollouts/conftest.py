# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""Tokenizers of one token per character and models that know them."""

import string

import pytest
import torch
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from hf_qrl import AutoModelForCausalLMWithILQLHeads, AutoModelForSeq2SeqLMWithILQLHeads
from hf_qrl.rollouts import ScriptedPolicy, player
from tests.environments.games_for_tests import hunt


CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = {"pad_token": "<pad>", "unk_token": "<unk>", "bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(player, "BACK_OFF_SECONDS", 0.0)


@pytest.fixture(scope="session")
def make_tokenizer():
    """Returns a function from a chat template to a tokenizer; further texts become tokens of their own."""

    def make(chat_template: str | None = None, more: tuple[str, ...] = ()) -> PreTrainedTokenizerFast:
        vocabulary = {token: i for i, token in enumerate([*SPECIAL.values(), *string.printable, *more])}
        backend = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
        backend.pre_tokenizer = Split(Regex(r"[\s\S]"), behavior="isolated")
        backend.decoder = Fuse()
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **SPECIAL)
        tokenizer.chat_template = chat_template
        return tokenizer

    return make


@pytest.fixture(scope="session")
def tokenizer(make_tokenizer):
    return make_tokenizer(CHATML)


@pytest.fixture(scope="session")
def plain_tokenizer(make_tokenizer):
    return make_tokenizer(None)


@pytest.fixture(scope="session")
def make_model(tokenizer):
    """Returns a function that makes a tiny Llama that talks nonsense; with heads if it has arguments for them."""

    def make(seed: int = 0, max_position_embeddings: int = 512, **head_arguments):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            config = LlamaConfig(
                vocab_size=len(tokenizer),
                hidden_size=16,
                intermediate_size=24,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=2,
                max_position_embeddings=max_position_embeddings,
                initializer_range=0.5,
                bos_token_id=tokenizer.bos_token_id,
                eos_token_id=tokenizer.eos_token_id,
                pad_token_id=tokenizer.pad_token_id,
            )
            base = LlamaForCausalLM(config).eval()
            if not head_arguments:
                return base
            return AutoModelForCausalLMWithILQLHeads.from_pretrained(base, **head_arguments).eval()

    return make


@pytest.fixture(scope="session")
def make_seq2seq_model(tokenizer):
    """Returns a function that makes a tiny BART, whose positions are counted from the first token, with heads."""

    def make(**head_arguments):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            sizes = {"layers": 1, "attention_heads": 2, "ffn_dim": 24}
            config = BartConfig(
                vocab_size=len(tokenizer),
                d_model=16,
                max_position_embeddings=512,
                init_std=0.5,
                decoder_start_token_id=tokenizer.bos_token_id,
                bos_token_id=tokenizer.bos_token_id,
                pad_token_id=tokenizer.pad_token_id,
                eos_token_id=tokenizer.eos_token_id,
                forced_eos_token_id=None,
                **{f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in sizes.items()},
            )
            base = BartForConditionalGeneration(config).eval()
            return AutoModelForSeq2SeqLMWithILQLHeads.from_pretrained(base, **head_arguments).eval()

    return make


@pytest.fixture
def hunter() -> ScriptedPolicy:
    """Plays the treasure hunt as well as one can."""
    return ScriptedPolicy(lambda messages: hunt(messages[-1]["content"]), name="hunter")
