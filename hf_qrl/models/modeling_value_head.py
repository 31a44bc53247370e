# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""Language models with a value head: any causal or encoder-decoder model as it is, and the values of its states."""

from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, GenerationMixin
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutput

from .auto import AutoModelWithHeads
from .configuration_value_head import ValueHeadCausalLMConfig, ValueHeadSeq2SeqLMConfig
from .freezing import freeze_lower_layers
from .heads import gather_states
from .modeling_wrapper import WrapperPreTrainedModel
from .outputs import CausalLMOutputWithValue, Seq2SeqLMOutputWithValue, causal_output, seq2seq_output
from .value_head import ValueHeads


class ValueHeadPreTrainedModel(WrapperPreTrainedModel, GenerationMixin):
    """
    A language model (`base`) and a value head on the inputs of its LM head (`heads.v`).
    """

    heads_title = "a value head"
    trainer_name = "PPOTrainer"
    heads_tag = "value-head"
    trlx_prefix = "v_head."
    loading_advice = (
        "If it is a plain language model, use `AutoModelFor...WithValueHead.from_pretrained`, which puts a fresh head "
        "on it; if it has other heads, load it with its own class, and pass the `base` of that."
    )

    def _make_heads(self, hidden_size: int, vocab_size: int) -> ValueHeads:
        return ValueHeads(hidden_size, self.config.head_expansion)

    def _logits_and_values(self, output_values: bool, states_ixs: Any, **inputs: Any) -> tuple[Any, dict[str, Any]]:
        """Runs the language model; returns its output, and its `logits` or these and the values."""
        if not output_values:
            base_output = self.base(return_dict=True, **inputs)
            return base_output, {"logits": base_output.logits}
        self._refuse_part_of_rows(inputs, states_ixs=states_ixs)
        base_output, hidden_states = self._run_base(**inputs)
        states = hidden_states if states_ixs is None else gather_states(hidden_states, states_ixs)
        return base_output, {"logits": base_output.logits, "value": self.heads(states)}

    def freeze_lower_layers(self, num_layers_unfrozen: int) -> None:
        """
        Freezes the embeddings, all but the top decoder blocks, and the encoder if there is one. An LM head that shares
        the weight of the input embedding is frozen with it; the norm below the LM head and the value head are not.

        Args:
            num_layers_unfrozen (`int`): Number of blocks, counted from the top, that stay as they are.

        Raises:
            `ValueError`: if the language model has fewer blocks.
        """
        freeze_lower_layers(self.base, num_layers_unfrozen)


class ValueHeadForCausalLM(ValueHeadPreTrainedModel, GenerationMixin):
    r"""
    A causal language model with a value head, as it is trained by PPO (Schulman et al., 2017, arXiv 1707.06347).

    `forward` returns the logits of the language model, which is the policy; `base` is that language model, and
    `base.save_pretrained` saves it alone.

    Make one with [`AutoModelForCausalLMWithValueHead`].

    Args:
        config ([`ValueHeadCausalLMConfig`]): Configuration of the language model and the head.
        base (`PreTrainedModel`, *optional*): A live language model to put the head on; built from
            `config.text_config` if not given.
    """

    config_class = ValueHeadCausalLMConfig
    base_auto_class = AutoModelForCausalLM
    kind = "causal"

    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        output_values: bool = False,
        states_ixs: torch.LongTensor | None = None,
        next_input_ids: torch.LongTensor | None = None,
        next_attention_mask: torch.Tensor | None = None,
        loss_fn: Callable[..., torch.Tensor] | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithValue | tuple:
        r"""
        Logits by default, values too with `output_values=True`, a loss alone with `loss_fn`.

        Args:
            input_ids, attention_mask, position_ids, cache, inputs_embeds, use_cache, output_attentions,
            output_hidden_states, return_dict, logits_to_keep:
                As in transformers' causal language models, and handed on to the one under the head. A batch padded
                on the left needs `position_ids` (`generate` makes them).
            labels (`torch.LongTensor`, *optional*):
                Refused; the loss of PPO is made of rewards.
            output_values (`bool`, *optional*, defaults to `False`):
                Whether to return `value`.
            states_ixs (`torch.LongTensor` of shape `(B, S)`, *optional*):
                Positions of the states to value; all if not given.
            next_input_ids (`torch.LongTensor` of shape `(B, n')`), next_attention_mask (same shape), *optional*:
                Rows whose last state follows the last action of each row; only for `loss_fn`.
            loss_fn (`Callable`, *optional*):
                Called as `loss_fn(hidden_states, heads, lm_head, next_hidden_state)` with the inputs of the LM head
                `(B, n, d)`; what it returns is returned as `loss`, and no logits are computed.

        Returns:
            [`CausalLMOutputWithValue`], or its tuple with `return_dict=False`.
        """
        self._refuse_labels(labels)
        if loss_fn is not None:
            rows = {"input_ids": input_ids, "attention_mask": attention_mask}
            output = CausalLMOutputWithValue(loss=self._loss(loss_fn, next_input_ids, next_attention_mask, **rows))
        else:
            base_output, fields = self._logits_and_values(
                output_values,
                states_ixs,
                input_ids=input_ids,
                attention_mask=attention_mask,
                position_ids=position_ids,
                cache=cache,
                inputs_embeds=inputs_embeds,
                use_cache=use_cache,
                output_attentions=output_attentions,
                output_hidden_states=output_hidden_states,
                logits_to_keep=logits_to_keep,
                **kwargs,
            )
            output = causal_output(CausalLMOutputWithValue, base_output, **fields)
        return_dict = self.config.return_dict if return_dict is None else return_dict
        return output if return_dict else output.to_tuple()


class ValueHeadForSeq2SeqLM(ValueHeadPreTrainedModel, GenerationMixin):
    r"""
    An encoder-decoder language model with a value head on its decoder; otherwise as [`ValueHeadForCausalLM`].

    Make one with [`AutoModelForSeq2SeqLMWithValueHead`].

    Args:
        config ([`ValueHeadSeq2SeqLMConfig`]): Configuration of the language model and the head.
        base (`PreTrainedModel`, *optional*): A live language model to put the head on; built from
            `config.text_config` if not given.
    """

    config_class = ValueHeadSeq2SeqLMConfig
    base_auto_class = AutoModelForSeq2SeqLM
    kind = "an encoder-decoder"

    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.LongTensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        encoder_outputs: BaseModelOutput | tuple | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        decoder_inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        output_values: bool = False,
        states_ixs: torch.LongTensor | None = None,
        next_input_ids: torch.LongTensor | None = None,
        next_attention_mask: torch.Tensor | None = None,
        loss_fn: Callable[..., torch.Tensor] | None = None,
        **kwargs: Any,
    ) -> Seq2SeqLMOutputWithValue | tuple:
        r"""
        Logits by default, values too with `output_values=True`, a loss alone with `loss_fn`.

        Args:
            input_ids, attention_mask, decoder_input_ids, decoder_attention_mask, encoder_outputs, cache,
            inputs_embeds, decoder_inputs_embeds, use_cache, output_attentions, output_hidden_states, return_dict:
                As in transformers' encoder-decoder models, and handed on to the one under the head.
                `decoder_input_ids (B, m)` begin with the decoder start token.
            states_ixs (`torch.LongTensor` of shape `(B, S)`, *optional*):
                Positions in `decoder_input_ids`; all if not given.
            next_input_ids (`torch.LongTensor` of shape `(B, n')`), next_attention_mask (same shape), *optional*:
                The encoder's rows in the state that follows the last action of each row, which is the decoder's first
                on them; only for `loss_fn`.
            labels, output_values, loss_fn:
                As in [`ValueHeadForCausalLM.forward`].

        Returns:
            [`Seq2SeqLMOutputWithValue`], or its tuple with `return_dict=False`.
        """
        self._refuse_labels(labels)
        if loss_fn is not None:
            rows = {"input_ids": input_ids, "attention_mask": attention_mask, "decoder_input_ids": decoder_input_ids}
            output = Seq2SeqLMOutputWithValue(loss=self._loss(loss_fn, next_input_ids, next_attention_mask, **rows))
        else:
            base_output, fields = self._logits_and_values(
                output_values,
                states_ixs,
                input_ids=input_ids,
                attention_mask=attention_mask,
                decoder_input_ids=decoder_input_ids,
                decoder_attention_mask=decoder_attention_mask,
                encoder_outputs=encoder_outputs,
                cache=cache,
                inputs_embeds=inputs_embeds,
                decoder_inputs_embeds=decoder_inputs_embeds,
                use_cache=use_cache,
                output_attentions=output_attentions,
                output_hidden_states=output_hidden_states,
                **kwargs,
            )
            output = seq2seq_output(Seq2SeqLMOutputWithValue, base_output, **fields)
        return_dict = self.config.return_dict if return_dict is None else return_dict
        return output if return_dict else output.to_tuple()


class AutoModelForCausalLMWithValueHead(AutoModelWithHeads):
    """
    Puts a value head on any causal language model of the Hub, or loads one that has it.

    Example:

    ```python
    >>> from hf_qrl import AutoModelForCausalLMWithValueHead

    >>> model = AutoModelForCausalLMWithValueHead.from_pretrained("Qwen/Qwen3-0.6B")
    ```
    """

    model_class = ValueHeadForCausalLM


class AutoModelForSeq2SeqLMWithValueHead(AutoModelWithHeads):
    """
    Puts a value head on any encoder-decoder language model of the Hub, or loads one that has it.

    Example:

    ```python
    >>> from hf_qrl import AutoModelForSeq2SeqLMWithValueHead

    >>> model = AutoModelForSeq2SeqLMWithValueHead.from_pretrained("google/flan-t5-small")
    ```
    """

    model_class = ValueHeadForSeq2SeqLM


__all__ = [
    "AutoModelForCausalLMWithValueHead",
    "AutoModelForSeq2SeqLMWithValueHead",
    "CausalLMOutputWithValue",
    "Seq2SeqLMOutputWithValue",
    "ValueHeadForCausalLM",
    "ValueHeadForSeq2SeqLM",
]
