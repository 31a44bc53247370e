# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""Tokenizers of one token per character, so that expected rows can be written down by hand."""

import json
import string
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast


CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHATML_TAGGED = (
    "{% if tools %}{{ '[' + tools[0]['function']['name'] + ']' }}{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ message['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Counts the messages first, so earlier turns are rendered differently once later ones exist.
CHATML_NO_PREFIX = "{{ messages | length }}" + CHATML


def character_tokenizer(alphabet: str, special: dict[str, str]) -> PreTrainedTokenizerFast:
    names = [token for token in special.values() if len(token) > 1]
    vocab = {token: i for i, token in enumerate([*names, *alphabet])}
    backend = Tokenizer(WordLevel(vocab, unk_token=special["unk_token"]))
    backend.pre_tokenizer = Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)


@pytest.fixture
def golden() -> dict:
    return json.loads((Path(__file__).parents[1] / "goldens" / "trlx-ilql.json").read_text())


@pytest.fixture
def golden_tokenizer(golden) -> PreTrainedTokenizerFast:
    special = {"pad_token": "~", "unk_token": "~", "bos_token": "^", "eos_token": "$"}
    return character_tokenizer(golden["tokenizer"]["vocab"], special)


@pytest.fixture(scope="session")
def make_tokenizer():
    """Returns a function from a chat template to a character tokenizer with ChatML's special tokens."""

    def make(chat_template: str | None = None) -> PreTrainedTokenizerFast:
        special = {
            "pad_token": "<pad>",
            "unk_token": "<unk>",
            "bos_token": "<|im_start|>",
            "eos_token": "<|im_end|>",
        }
        tokenizer = character_tokenizer(string.printable, special)
        tokenizer.chat_template = chat_template
        return tokenizer

    return make


@pytest.fixture(scope="session", params=["untagged", "tagged"])
def chat_tokenizer(request, make_tokenizer) -> PreTrainedTokenizerFast:
    return make_tokenizer({"untagged": CHATML, "tagged": CHATML_TAGGED}[request.param])


@pytest.fixture(scope="session")
def tokenizer(make_tokenizer) -> PreTrainedTokenizerFast:
    return make_tokenizer(CHATML)


@pytest.fixture(scope="session")
def tagged_tokenizer(make_tokenizer) -> PreTrainedTokenizerFast:
    return make_tokenizer(CHATML_TAGGED)


@pytest.fixture(scope="session")
def no_prefix_tokenizer(make_tokenizer) -> PreTrainedTokenizerFast:
    return make_tokenizer(CHATML_NO_PREFIX)


@pytest.fixture(scope="session")
def no_template_tokenizer(make_tokenizer) -> PreTrainedTokenizerFast:
    return make_tokenizer(None)


@pytest.fixture(scope="session")
def make_seq2seq_tokenizer():
    """Returns a function from what a tokenizer puts around a text, `"$A </s>"` for T5, to a character tokenizer."""

    def make(template: str | None = None, chatml: bool = False) -> PreTrainedTokenizerFast:
        special = {"pad_token": "<pad>", "unk_token": "<unk>", "eos_token": "</s>", "bos_token": "<s>"}
        tokenizer = character_tokenizer(string.printable, special)
        if template is not None:
            tokens = [(token, tokenizer.convert_tokens_to_ids(token)) for token in ("</s>", "<s>")]
            tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=template, special_tokens=tokens)
        tokenizer.chat_template = CHATML if chatml else None
        return tokenizer

    return make
