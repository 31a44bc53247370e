# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""What models with heads return; the fields of those with ILQL heads are trlX's."""

from dataclasses import dataclass

import torch
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils import ModelOutput


@dataclass
class CausalILQLOutput(ModelOutput):
    """
    Output of a causal language model with ILQL heads.

    Args:
        logits (`torch.FloatTensor` of shape `(B, n, V)`):
            Logits of the policy; those of the language model if `output_values=True`.
        cache (`Cache`, *optional*):
            Keys and values of the attention blocks. Also reached as `past_key_values`.
        hidden_states (`tuple(torch.FloatTensor)`, *optional*):
            Hidden states of every layer of the language model, with `output_hidden_states=True`.
        value (`torch.FloatTensor` of shape `(B, S)`, *optional*):
            State values, with `output_values=True`.
        qs (`tuple(torch.FloatTensor)` of shape `(B, T, V)`, *optional*):
            Q-values of each online head, with `output_values=True`.
        target_qs (`tuple(torch.FloatTensor)` of shape `(B, T, V)`, *optional*):
            Q-values of each target head, with `output_values=True`.
        loss (`torch.FloatTensor` of shape `()`, *optional*):
            What `loss_fn` returned.
    """

    logits: torch.Tensor | None = None
    cache: Cache | None = None
    hidden_states: tuple[torch.FloatTensor, ...] | None = None
    value: torch.Tensor | None = None
    qs: tuple[torch.Tensor, ...] | None = None
    target_qs: tuple[torch.Tensor, ...] | None = None
    loss: torch.Tensor | None = None

    # Attention weights with `output_attentions=True`, for `generate`; no field, for the fields are trlX's.
    attentions = None


@dataclass
class Seq2SeqILQLOutput(ModelOutput):
    """
    Output of an encoder-decoder model with ILQL heads. States and actions are positions of the decoder.

    Args:
        logits (`torch.FloatTensor` of shape `(B, m, V)`):
            Logits of the policy; those of the language model if `output_values=True`.
        cache (`Cache`, *optional*):
            Keys and values of the decoder's attention blocks. Also reached as `past_key_values`.
        hidden_states (`tuple(torch.FloatTensor)`, *optional*):
            Hidden states of every layer of the decoder, with `output_hidden_states=True`.
        value, qs, target_qs (*optional*):
            As in [`CausalILQLOutput`].
        encoder_outputs (`BaseModelOutput`, *optional*):
            Output of the encoder, to be handed back to `forward` for the next step.
        loss (`torch.FloatTensor` of shape `()`, *optional*):
            What `loss_fn` returned.
    """

    logits: torch.Tensor | None = None
    cache: Cache | None = None
    hidden_states: tuple[torch.FloatTensor, ...] | None = None
    value: torch.Tensor | None = None
    qs: tuple[torch.Tensor, ...] | None = None
    target_qs: tuple[torch.Tensor, ...] | None = None
    encoder_outputs: BaseModelOutput | None = None
    loss: torch.Tensor | None = None

    # What `generate` reads under these names; no fields, for the fields are trlX's.
    decoder_hidden_states = None
    decoder_attentions = None
    cross_attentions = None


@dataclass
class CausalQOutput(ModelOutput):
    """
    Output of a causal language model with one Q-head.

    Args:
        logits (`torch.FloatTensor` of shape `(B, n, V)`):
            Logits of the policy; those of the language model if `return_q_values=True`.
        q_values (`torch.FloatTensor` of shape `(B, n, V)`, *optional*):
            Q-values of the online head, with `return_q_values=True`.
        cache (`Cache`, *optional*):
            Keys and values of the attention blocks. Also reached as `past_key_values`.
        hidden_states (`tuple(torch.FloatTensor)`, *optional*):
            Hidden states of every layer, with `output_hidden_states=True`.
        attentions (`tuple(torch.FloatTensor)`, *optional*):
            Attention weights of every layer, with `output_attentions=True`.
        loss (`torch.FloatTensor` of shape `()`, *optional*):
            What `loss_fn` returned.
    """

    logits: torch.Tensor | None = None
    q_values: torch.Tensor | None = None
    cache: Cache | None = None
    hidden_states: tuple[torch.FloatTensor, ...] | None = None
    attentions: tuple[torch.FloatTensor, ...] | None = None
    loss: torch.Tensor | None = None


__all__ = ["CausalILQLOutput", "CausalQOutput", "Seq2SeqILQLOutput"]
