# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""Configuration of the language models with ILQL heads."""

from typing import Any, Literal

from huggingface_hub.dataclasses import strict

from .configuration_base import HeadsConfigBase, Seq2SeqHeadsConfigBase


# What may lie between the hidden state and the projection onto the vocabulary; the first is the default.
# A stem of a tied head ends in a vector of the width of the embedding; a linear head is linear.
STEMS = {
    "mlp": ("relu", "silu"),
    "linear": ("identity", "linear"),
    "tied": ("linear", "identity"),
    "dueling": ("silu", "relu", "linear", "identity"),
}
# The start that learned faster on random walks; the figures are in `model_cards/random_walks.md`.
DEFAULT_INITS: dict[str, Any] = {"mlp": "default", "linear": "zero", "tied": "default", "dueling": "default"}

# What saved heads are, which cannot be chosen when they are loaded: some kinds have tensors of the same shapes.
KINDS_OF_HEADS = ("head_type", "head_stem", "head_expansion")


@strict
class ILQLConfigBase(HeadsConfigBase):
    """
    What a causal and a seq2seq model with ILQL heads have in common. See [`ILQLCausalLMConfig`].
    """

    auto_suffix = "WithILQLHeads"
    head_arguments = (
        *KINDS_OF_HEADS,
        *("head_init", "num_q_heads", "q_reduction", "beta", "policy_top_k"),
        *("history_window", "reward_mean", "reward_std"),
    )
    kinds_of_heads = KINDS_OF_HEADS

    head_type: Literal["mlp", "linear", "tied", "dueling"] = "mlp"
    head_stem: Literal["identity", "linear", "relu", "silu"] | None = None
    head_init: Literal["default", "zero"] | None = None
    num_q_heads: int = 2
    q_reduction: Literal["min", "mean"] = "min"
    beta: float | int = 1.0
    policy_top_k: int | None = None

    def __post_init__(self, **kwargs: Any):
        super().__post_init__(**kwargs)
        self.beta = float(self.beta)
        self.head_stem = self.head_stem or STEMS[self.head_type][0]  # type: ignore[assignment]
        self.head_init = self.head_init or DEFAULT_INITS[self.head_type]
        self.validate_heads()

    def validate_heads(self) -> None:
        """Raises a `ValueError` for heads that cannot be built, also after single fields were changed."""
        HeadsConfigBase.validate_heads(self)  # not `super()`: the configuration of a dueling head uses this too
        if self.num_q_heads < 1:
            raise ValueError(f"`num_q_heads` must be at least 1, got {self.num_q_heads}.")
        if self.policy_top_k is not None and self.policy_top_k < 1:
            raise ValueError(
                f"`policy_top_k` must be at least 1, or None to keep every token, got {self.policy_top_k}."
            )
        if self.head_stem not in STEMS[self.head_type]:
            raise ValueError(
                f"`head_type={self.head_type!r}` takes a `head_stem` out of {STEMS[self.head_type]}, got "
                f"{self.head_stem!r}. If these are the heads of a saved model, load it without `head_type`."
            )
        if self.head_type == "tied" and self.head_stem == "identity" and self.head_init == "zero":
            # Without a layer to set to zero, Q starts as the logits of the language model.
            raise ValueError('`head_type="tied"` with `head_stem="identity"` takes `head_init` "default", got "zero".')


@strict
class ILQLCausalLMConfig(ILQLConfigBase):
    r"""
    Configuration of an [`ILQLForCausalLM`]: the configuration of the language model and of the heads on it.

    Args:
        text_config (`PreTrainedConfig` or `dict`):
            Configuration of the causal language model under the heads.
        head_type (`str`, *optional*, defaults to `"mlp"`):
            What a Q-head is. `"mlp"`: `d -> 2d -> V` with a ReLU (ILQL, trlX). `"linear"`: `d -> V`, which folds into
            the language model. `"tied"`: a linear map of the hidden state, projected by the model's own (detached)
            output embedding, plus a learned scalar per state; it has no parameters of the size of the vocabulary.
            `"dueling"`: `V + A - mean A` on a SiLU stem (Wang et al., 2016).
        head_stem (`str`, *optional*):
            The part of a Q-head below its projection: `"relu"` or `"silu"` for `"mlp"`, `"identity"` or `"linear"` for
            `"linear"` and `"tied"`, any of these for `"dueling"`. By default what `head_type` says.
        head_init (`str`, *optional*):
            `"default"`: PyTorch's initialisation of linear layers. `"zero"`: the last layer is zero, and the trainer
            sets its bias to the mean return of the data. By default whichever learned faster for the head type.
        head_expansion (`int`, *optional*, defaults to 2):
            Width of a `"relu"` or `"silu"` stem (and of the value head) in units of the hidden size.
        num_q_heads (`int`, *optional*, defaults to 2):
            Number of Q-heads, each with a target of its own.
        q_reduction (`str`, *optional*, defaults to `"min"`):
            How the target heads are combined, `"min"` (double Q) or `"mean"`.
        beta (`float`, *optional*, defaults to 1.0):
            Weight of the advantage in the policy, `logits + beta * (Q - V)`.
        policy_top_k (`int`, *optional*):
            The policy's support: the `policy_top_k` likeliest tokens of the language model. By default every token.
        history_window (`int`, *optional*):
            Number of most recent turns the policy reads, the current one included. By default all of them.
        reward_mean (`float`, *optional*, defaults to 0.0), reward_std (`float`, *optional*, defaults to 1.0):
            Standardisation of the returns the heads were trained on: `Q * reward_std + reward_mean` is in the
            user's units.

    Example:

    ```python
    >>> from transformers import LlamaConfig
    >>> from hf_qrl import ILQLCausalLMConfig, ILQLForCausalLM

    >>> text_config = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
    >>> model = ILQLForCausalLM(ILQLCausalLMConfig(text_config=text_config, head_type="linear"))
    ```
    """

    model_type = "hf_qrl_ilql_causal_lm"


@strict
class ILQLSeq2SeqLMConfig(Seq2SeqHeadsConfigBase, ILQLConfigBase):
    r"""
    Configuration of an [`ILQLForSeq2SeqLM`]: that of the encoder-decoder model and of the heads on its decoder.

    Args:
        text_config (`PreTrainedConfig` or `dict`):
            Configuration of the encoder-decoder model under the heads.
        kwargs:
            The fields of [`ILQLCausalLMConfig`].

    Example:

    ```python
    >>> from transformers import T5Config
    >>> from hf_qrl import ILQLForSeq2SeqLM, ILQLSeq2SeqLMConfig

    >>> text_config = T5Config(d_model=64, d_ff=128, d_kv=16, num_layers=2, num_heads=4, decoder_start_token_id=0)
    >>> model = ILQLForSeq2SeqLM(ILQLSeq2SeqLMConfig(text_config=text_config, head_type="linear"))
    ```
    """

    model_type = "hf_qrl_ilql_seq2seq_lm"


__all__ = ["ILQLCausalLMConfig", "ILQLSeq2SeqLMConfig"]
