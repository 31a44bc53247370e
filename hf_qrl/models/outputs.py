# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""What models with heads return; the fields of those with ILQL heads are trlX's."""

from dataclasses import dataclass
from typing import Any, TypeVar

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


@dataclass
class CausalLMOutputWithValue(ModelOutput):
    """
    Output of a causal language model with a value head.

    Args:
        logits (`torch.FloatTensor` of shape `(B, n, V)`):
            Logits of the language model.
        value (`torch.FloatTensor` of shape `(B, S)`, *optional*):
            State values, with `output_values=True`.
        cache (`Cache`, *optional*):
            Keys and values of the attention blocks. Also reached as `past_key_values`.
        hidden_states (`tuple(torch.FloatTensor)`, *optional*):
            Hidden states of every layer of the language model, with `output_hidden_states=True`.
        loss (`torch.FloatTensor` of shape `()`, *optional*):
            What `loss_fn` returned.
    """

    logits: torch.Tensor | None = None
    value: torch.Tensor | None = None
    cache: Cache | None = None
    hidden_states: tuple[torch.FloatTensor, ...] | None = None
    loss: torch.Tensor | None = None

    # Attention weights with `output_attentions=True`, for `generate`.
    attentions = None


@dataclass
class Seq2SeqLMOutputWithValue(ModelOutput):
    """
    Output of an encoder-decoder model with a value head. States are positions of the decoder.

    Args:
        logits (`torch.FloatTensor` of shape `(B, m, V)`):
            Logits of the language model.
        value, loss (*optional*):
            As in [`CausalLMOutputWithValue`].
        cache (`Cache`, *optional*):
            Keys and values of the decoder's attention blocks. Also reached as `past_key_values`.
        hidden_states (`tuple(torch.FloatTensor)`, *optional*):
            Hidden states of every layer of the decoder, with `output_hidden_states=True`.
        encoder_outputs (`BaseModelOutput`, *optional*):
            Output of the encoder, to be handed back to `forward` for the next step.
    """

    logits: torch.Tensor | None = None
    value: torch.Tensor | None = None
    cache: Cache | None = None
    hidden_states: tuple[torch.FloatTensor, ...] | None = None
    encoder_outputs: BaseModelOutput | None = None
    loss: torch.Tensor | None = None

    # What `generate` reads under these names.
    decoder_hidden_states = None
    decoder_attentions = None
    cross_attentions = None


Output = TypeVar("Output", CausalILQLOutput, CausalLMOutputWithValue)
Seq2SeqOutput = TypeVar("Seq2SeqOutput", Seq2SeqILQLOutput, Seq2SeqLMOutputWithValue)


def causal_output(output_class: type[Output], base_output: Any, **fields: Any) -> Output:
    """The output of a model with heads, with what that of its language model has besides logits."""
    output = output_class(cache=base_output.cache, hidden_states=base_output.hidden_states, **fields)
    output.attentions = base_output.attentions
    return output


def seq2seq_output(output_class: type[Seq2SeqOutput], base_output: Any, **fields: Any) -> Seq2SeqOutput:
    """As [`causal_output`], for encoder-decoder models."""
    encoder_outputs = BaseModelOutput(
        last_hidden_state=base_output.encoder_last_hidden_state,
        hidden_states=base_output.encoder_hidden_states,
        attentions=base_output.encoder_attentions,
    )
    output = output_class(
        cache=base_output.cache,
        hidden_states=base_output.decoder_hidden_states,
        encoder_outputs=encoder_outputs,
        **fields,
    )
    output.decoder_hidden_states = base_output.decoder_hidden_states
    output.decoder_attentions = base_output.decoder_attentions
    output.cross_attentions = base_output.cross_attentions
    return output


__all__ = [
    "CausalILQLOutput",
    "CausalLMOutputWithValue",
    "CausalQOutput",
    "Seq2SeqILQLOutput",
    "Seq2SeqLMOutputWithValue",
]
