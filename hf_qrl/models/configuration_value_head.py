# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""Configuration of the language models with a value head."""

from typing import Any, Literal

from huggingface_hub.dataclasses import strict

from .configuration_base import HeadsConfigBase, Seq2SeqHeadsConfigBase


@strict
class ValueHeadConfigBase(HeadsConfigBase):
    """
    What a causal and a seq2seq model with a value head have in common. See [`ValueHeadCausalLMConfig`].
    """

    auto_suffix = "WithValueHead"
    head_arguments = ("head_expansion", "head_init", "history_window", "reward_mean", "reward_std")

    # What the head is, under the name that Q-heads have for it in their configurations.
    head_stem = "relu"

    head_init: Literal["default", "zero"] = "default"

    def __post_init__(self, **kwargs: Any):
        super().__post_init__(**kwargs)
        self.validate_heads()


@strict
class ValueHeadCausalLMConfig(ValueHeadConfigBase):
    r"""
    Configuration of a [`ValueHeadForCausalLM`]: the configuration of the language model and of the value head on it.

    Args:
        text_config (`PreTrainedConfig` or `dict`):
            Configuration of the causal language model under the head.
        head_init (`str`, *optional*, defaults to `"default"`):
            `"default"`: PyTorch's initialisation of linear layers. `"zero"`: the last layer is zero, and so are all
            values until the head is trained.
        head_expansion (`int`, *optional*, defaults to 2):
            Width of the hidden layer of the head in units of the hidden size.
        history_window (`int`, *optional*):
            Number of most recent turns the policy reads, the current one included. By default all of them.
        reward_mean (`float`, *optional*, defaults to 0.0), reward_std (`float`, *optional*, defaults to 1.0):
            Standardisation of the returns the head was trained on: `V * reward_std + reward_mean` is in the user's
            units.

    Example:

    ```python
    >>> from transformers import LlamaConfig
    >>> from hf_qrl import ValueHeadCausalLMConfig, ValueHeadForCausalLM

    >>> text_config = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
    >>> model = ValueHeadForCausalLM(ValueHeadCausalLMConfig(text_config=text_config))
    ```
    """

    model_type = "hf_qrl_value_head_causal_lm"


@strict
class ValueHeadSeq2SeqLMConfig(Seq2SeqHeadsConfigBase, ValueHeadConfigBase):
    r"""
    Configuration of a [`ValueHeadForSeq2SeqLM`]: that of the encoder-decoder model and of the value head on its
    decoder.

    Args:
        text_config (`PreTrainedConfig` or `dict`):
            Configuration of the encoder-decoder model under the head.
        kwargs:
            The fields of [`ValueHeadCausalLMConfig`].

    Example:

    ```python
    >>> from transformers import T5Config
    >>> from hf_qrl import ValueHeadForSeq2SeqLM, ValueHeadSeq2SeqLMConfig

    >>> text_config = T5Config(d_model=64, d_ff=128, d_kv=16, num_layers=2, num_heads=4, decoder_start_token_id=0)
    >>> model = ValueHeadForSeq2SeqLM(ValueHeadSeq2SeqLMConfig(text_config=text_config))
    ```
    """

    model_type = "hf_qrl_value_head_seq2seq_lm"


__all__ = ["ValueHeadCausalLMConfig", "ValueHeadSeq2SeqLMConfig"]
