# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.

import json

import pytest
import torch
from huggingface_hub.errors import StrictDataclassFieldValidationError
from transformers import AutoConfig, GenerationConfig, GPT2Config, LlamaConfig

from hf_qrl import ILQLCausalLMConfig, ILQLForCausalLM


FIELDS = {
    "head_type": "dueling",
    "head_stem": "identity",
    "head_init": "zero",
    "head_expansion": 3,
    "num_q_heads": 3,
    "q_reduction": "mean",
    "beta": 2.5,
    "policy_top_k": 7,
    "history_window": 2,
    "reward_mean": -1.5,
    "reward_std": 0.5,
}


class TestILQLCausalLMConfig:
    def test_config_round_trip(self, make_base, architecture, tmp_path):
        base = make_base(architecture)
        config = ILQLCausalLMConfig(text_config=base.config, **FIELDS)
        config.save_pretrained(tmp_path)
        written = json.loads((tmp_path / "config.json").read_text())
        assert written["model_type"] == "hf_qrl_ilql_causal_lm"
        assert written["text_config"]["model_type"] == base.config.model_type
        for loaded in (ILQLCausalLMConfig.from_pretrained(tmp_path), AutoConfig.from_pretrained(tmp_path)):
            assert type(loaded) is ILQLCausalLMConfig
            assert type(loaded.text_config) is type(base.config)
            assert loaded.get_text_config() is loaded.text_config
            assert {name: getattr(loaded, name) for name in FIELDS} == FIELDS
            assert {**loaded.to_dict(), "_name_or_path": ""} == config.to_dict()
            # What generation, caches and the Trainer read from the outer configuration.
            assert loaded.tie_word_embeddings == base.config.tie_word_embeddings
            assert (loaded.bos_token_id, loaded.eos_token_id, loaded.pad_token_id) == (1, 2, 0)
            assert not loaded.is_encoder_decoder

    def test_config_accepts_text_config_as_dict(self):
        nested = LlamaConfig(hidden_size=32, vocab_size=61, tie_word_embeddings=True).to_dict()
        config = ILQLCausalLMConfig(text_config=nested)
        assert type(config.text_config) is LlamaConfig
        assert (config.text_config.hidden_size, config.text_config.vocab_size) == (32, 61)
        assert config.tie_word_embeddings is True

    def test_text_config_stays_the_live_object(self, make_base, architecture, tmp_path):
        base = make_base(architecture)
        model = ILQLForCausalLM.from_base(base)
        assert model.config.text_config is model.base.config is base.config
        model.save_pretrained(tmp_path)
        loaded = ILQLForCausalLM.from_pretrained(tmp_path)
        assert loaded.base.config is loaded.config.text_config
        loaded.set_attn_implementation("eager")
        assert loaded.base.config._attn_implementation == "eager"

    @pytest.mark.parametrize("implementation", ["eager", "sdpa"])
    def test_config_keeps_attention_implementation(self, implementation):
        text_config = LlamaConfig(attn_implementation=implementation)
        assert text_config._attn_implementation == implementation
        config = ILQLCausalLMConfig(text_config=text_config)
        assert text_config._attn_implementation == implementation
        assert config._attn_implementation == implementation

    def test_special_tokens_given_win(self):
        config = ILQLCausalLMConfig(text_config=GPT2Config(), eos_token_id=[3, 4], pad_token_id=5)
        assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (50256, [3, 4], 5)

    def test_config_accepts_int_beta(self):
        config = ILQLCausalLMConfig(text_config=GPT2Config(), beta=4, reward_mean=1, reward_std=2)
        for name, value in {"beta": 4.0, "reward_mean": 1.0, "reward_std": 2.0}.items():
            assert type(getattr(config, name)) is float
            assert getattr(config, name) == value

    def test_text_config_is_required(self, make_base, tmp_path):
        with pytest.raises(ValueError, match="needs `text_config`"):
            ILQLCausalLMConfig()
        # A plain checkpoint read with this class would otherwise be a random GPT-2.
        make_base("llama").save_pretrained(tmp_path)
        with pytest.raises(ValueError, match="needs `text_config`"):
            ILQLForCausalLM.from_pretrained(tmp_path)

    @pytest.mark.parametrize(
        ("head_type", "stem", "init"),
        [
            ("mlp", "relu", "default"),
            ("linear", "identity", "zero"),
            ("tied", "linear", "default"),
            ("dueling", "silu", "default"),
        ],
    )
    def test_defaults_follow_head_type(self, head_type, stem, init):
        config = ILQLCausalLMConfig(text_config=GPT2Config(), head_type=head_type)
        assert (config.head_stem, config.head_init) == (stem, init)
        assert (config.num_q_heads, config.q_reduction, config.beta, config.policy_top_k) == (2, "min", 1.0, None)

    @pytest.mark.parametrize(
        ("arguments", "error", "message"),
        [
            ({"head_type": "tied", "head_stem": "relu"}, ValueError, "takes a `head_stem` out of"),
            ({"head_type": "tied", "head_stem": "silu"}, ValueError, "takes a `head_stem` out of"),
            ({"head_type": "tied", "head_stem": "identity", "head_init": "zero"}, ValueError, "head_init"),
            ({"head_type": "MLP"}, StrictDataclassFieldValidationError, "head_type"),
            ({"head_stem": "gelu"}, StrictDataclassFieldValidationError, "head_stem"),
            ({"head_init": "ones"}, StrictDataclassFieldValidationError, "head_init"),
            ({"q_reduction": "max"}, StrictDataclassFieldValidationError, "q_reduction"),
            ({"beta": "4"}, StrictDataclassFieldValidationError, "beta"),
            ({"num_q_heads": 0}, ValueError, "`num_q_heads` must be at least 1, got 0"),
            ({"head_expansion": 0}, ValueError, "`head_expansion` must be at least 1, got 0"),
            ({"policy_top_k": 0}, ValueError, "`policy_top_k` must be at least 1, or None .* got 0"),
            ({"history_window": 0}, ValueError, "`history_window` .* got 0"),
            ({"reward_std": 0.0}, ValueError, "`reward_std` must be positive, got 0.0"),
        ],
    )
    def test_config_bad_values_refused(self, arguments, error, message):
        with pytest.raises(error, match=message):
            ILQLCausalLMConfig(text_config=GPT2Config(), **arguments)

    def test_fields_are_no_generation_parameters(self):
        # transformers drops keywords of those names from configurations without a word.
        assert not set(FIELDS) & set(GenerationConfig().to_dict())

    def test_dtype_travels_with_config(self, make_base, tmp_path):
        model = ILQLForCausalLM.from_base(make_base("llama").to(torch.bfloat16))
        assert model.config.dtype == torch.bfloat16
        model.config.save_pretrained(tmp_path)
        assert AutoConfig.from_pretrained(tmp_path).dtype == torch.bfloat16
