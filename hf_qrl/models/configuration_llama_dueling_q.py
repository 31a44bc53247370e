# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""Configuration of the Llama with a dueling Q-head."""

import os
from typing import Any, Literal

import torch
from huggingface_hub.dataclasses import strict
from transformers import LlamaConfig

from .configuration_ilql import KINDS_OF_HEADS, ILQLConfigBase


@strict
class LlamaDuelingQConfig(LlamaConfig):
    r"""
    Configuration of a [`LlamaDuelingQForCausalLM`]: that of a Llama, and of the Q-head on it.

    Args:
        head_expansion (`float`, *optional*, defaults to 2):
            Width of the Q-head's hidden layer in units of the hidden size.
        head_init (`str`, *optional*, defaults to `"default"`):
            `"default"`: PyTorch's initialisation of linear layers. `"zero"`: the last layer is zero.
        policy (`str`, *optional*, defaults to `"q"`):
            What the logits of the model are. `"q"`: the Q-values, so that sampling at temperature T (with `top_k=0`,
            which is not the default of `generate`) is `softmax(Q / T)`. `"lm"`: `logits + beta * (Q - V)` with the
            logits of the language model.
        beta (`float`, *optional*, defaults to 1.0):
            Weight of the advantage in the policy `"lm"`; at 0 it is the language model itself.
        policy_top_k (`int`, *optional*):
            The policy's support: the `policy_top_k` likeliest tokens of the language model. By default every token.
        history_window (`int`, *optional*):
            Number of most recent turns the policy reads, the current one included. By default all of them.
        reward_mean (`float`, *optional*, defaults to 0.0), reward_std (`float`, *optional*, defaults to 1.0):
            Standardisation of the returns the head was trained on: `Q * reward_std + reward_mean` is in the user's
            units.
        lm_head_bias (`bool`, *optional*, defaults to `False`):
            Whether the projection onto the vocabulary has a bias, as llama-qrlhf's has.
        kwargs:
            The fields of [`~transformers.LlamaConfig`].

    Example:

    ```python
    >>> from hf_qrl import LlamaDuelingQConfig, LlamaDuelingQForCausalLM

    >>> config = LlamaDuelingQConfig(
    ...     hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, policy="lm", beta=2.0
    ... )
    >>> model = LlamaDuelingQForCausalLM(config)
    ```
    """

    model_type = "hf_qrl_llama_dueling_q"

    # What the head is, under the names that heads of other kinds have in their configurations.
    head_type = "dueling"
    head_stem = "silu"
    num_q_heads = 1
    q_reduction = "min"
    kinds_of_heads = KINDS_OF_HEADS

    head_expansion: int | float = 2
    head_init: Literal["default", "zero"] = "default"
    policy: Literal["q", "lm"] = "q"
    beta: float | int = 1.0
    policy_top_k: int | None = None
    history_window: int | None = None
    reward_mean: float | int = 0.0
    reward_std: float | int = 1.0
    lm_head_bias: bool = False

    def __post_init__(self, **kwargs: Any):
        super().__post_init__(**kwargs)
        self.beta, self.reward_mean, self.reward_std = (
            float(self.beta),
            float(self.reward_mean),
            float(self.reward_std),
        )
        self.validate_heads()

    # The fields that have bounds are those of every model with Q-heads.
    validate_heads = ILQLConfigBase.validate_heads
    check_kind_of_heads = ILQLConfigBase.check_kind_of_heads

    def validate_architecture(self) -> None:
        """Takes attention heads of any width: that of the hidden state need not be a multiple of their number."""

    @classmethod
    def get_config_dict(cls, pretrained_model_name_or_path: str | os.PathLike, **kwargs: Any) -> tuple[dict, dict]:
        """As [`~transformers.PreTrainedConfig.get_config_dict`]; the configuration of a plain Llama is taken too."""
        content, kwargs = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        return {**content, "model_type": cls._check_model_type(content, pretrained_model_name_or_path)}, kwargs

    @classmethod
    def from_llama(cls, config: LlamaConfig, **fields: Any) -> "LlamaDuelingQConfig":
        """
        The configuration of a Llama with a head on it.

        Args:
            config ([`~transformers.LlamaConfig`]): That of the Llama.
            fields: Fields of this class, and others that are to differ.
        """
        content = config.to_dict()
        content["model_type"] = cls._check_model_type(content, type(config).__name__)
        content |= {"attn_implementation": config._attn_implementation, "name_or_path": config._name_or_path}
        return cls.from_dict({**content, **fields})

    @classmethod
    def _check_model_type(cls, content: dict[str, Any], name: str | os.PathLike) -> str:
        """Raises a `ValueError` for the one of another architecture, whose weights might fit all the same."""
        model_type = content.get("model_type", "llama")
        if model_type not in ("llama", cls.model_type):
            raise ValueError(
                f"{str(name)!r} is a model of type {model_type!r}, and {cls.__name__} takes 'llama'. To put the same "
                'head on any architecture use `AutoModelForCausalLMWithILQLHeads` with `head_type="dueling"`, '
                "`num_q_heads=1`."
            )
        return cls.model_type

    @classmethod
    def from_llama_qrlhf(
        cls,
        *,
        num_tokens: int,
        dim: int,
        depth: int,
        dim_head: int = 64,
        heads: int = 8,
        ff_mult: float = 4,
        dueling_q_head: bool = True,
        dueling_q_head_expansion_factor: float = 2,
        **fields: Any,
    ) -> "LlamaDuelingQConfig":
        """
        The configuration of the model that llama-qrlhf's `Llama` builds of the same arguments.

        Its feed-forward layers have biases and GELU gates, its projection onto the vocabulary has a bias, and the
        epsilon of its normalisation is PyTorch's for float32.

        Args:
            num_tokens (`int`): Number of tokens.
            dim (`int`): Width of the hidden states.
            depth (`int`): Number of layers.
            dim_head (`int`, *optional*, defaults to 64): Width of an attention head.
            heads (`int`, *optional*, defaults to 8): Number of attention heads.
            ff_mult (`float`, *optional*, defaults to 4): Feed-forward layers are `int(dim * ff_mult * 2 / 3)` wide.
            dueling_q_head (`bool`, *optional*, defaults to `True`): Whether the Q-head is a dueling one.
            dueling_q_head_expansion_factor (`float`, *optional*, defaults to 2): Width of its hidden layer / `dim`.
            fields: Further fields of this class, such as `eos_token_id` or `max_position_embeddings`. llama-qrlhf has
                no special tokens, so there are none by default.
        """
        if not dueling_q_head:
            raise ValueError(
                "`dueling_q_head=False` is a model with a linear Q-head, and this class has the dueling one. For the "
                "language model alone use `transformers.LlamaForCausalLM`; for a linear Q-head on it "
                '`AutoModelForCausalLMWithILQLHeads` with `head_type="linear"`.'
            )
        shape = {
            "vocab_size": num_tokens,
            "hidden_size": dim,
            "num_hidden_layers": depth,
            "head_dim": dim_head,
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "intermediate_size": int(dim * ff_mult * 2 / 3),
            "hidden_act": "gelu",
            "attention_bias": False,
            "mlp_bias": True,
            "lm_head_bias": True,
            "rms_norm_eps": torch.finfo(torch.float32).eps,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "tie_word_embeddings": False,
            "head_expansion": dueling_q_head_expansion_factor,
        }
        taken = sorted(shape.keys() & fields)
        if taken:
            raise ValueError(f"{taken} follow from llama-qrlhf's arguments; leave them out.")
        return cls(**shape, **{"bos_token_id": None, "eos_token_id": None, **fields})


__all__ = ["LlamaDuelingQConfig"]
