# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""Language models with ILQL heads: any causal or encoder-decoder model, heads on it, and a policy that uses both."""

import os
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, GenerationMixin
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutput

from .auto import AutoModelWithHeads
from .configuration_ilql import ILQLCausalLMConfig, ILQLSeq2SeqLMConfig
from .folding import fold_policy, save_folded_policy
from .heads import ILQLHeads, gather_states
from .lm_head import LMHead
from .modeling_q import QPreTrainedModel, on_support
from .modeling_wrapper import WrapperPreTrainedModel
from .outputs import CausalILQLOutput, Seq2SeqILQLOutput, causal_output, seq2seq_output


class ILQLPreTrainedModel(QPreTrainedModel, WrapperPreTrainedModel, GenerationMixin):
    """
    A language model (`base`) and the heads of ILQL on the inputs of its LM head (`heads`).
    """

    heads_title = "ILQL heads"
    trainer_name = "ILQLTrainer"
    heads_tag = "ilql"
    trlx_prefix = "ilql_heads."
    loading_advice = (
        "If it is a plain language model, use `AutoModelFor...WithILQLHeads.from_pretrained`, which puts fresh heads "
        "on it; if it has other heads, load it with the configuration it was saved with."
    )

    def _make_heads(self, hidden_size: int, vocab_size: int) -> ILQLHeads:
        return ILQLHeads(
            hidden_size=hidden_size,
            vocab_size=vocab_size,
            head_type=self.config.head_type,
            head_stem=str(self.config.head_stem),
            head_expansion=self.config.head_expansion,
            num_q_heads=self.config.num_q_heads,
            q_reduction=self.config.q_reduction,
        )

    # ----------------------------------------------------------------------------------------------------- forward

    def _logits_and_values(
        self, output_values: bool, beta: float | None, states_ixs: Any, actions_ixs: Any, **inputs: Any
    ) -> tuple[Any, dict[str, Any]]:
        """Runs the language model; returns its output, and `logits` of the policy or `logits` and values."""
        self._refuse_part_of_rows(inputs, states_ixs=states_ixs, actions_ixs=actions_ixs)
        base_output, hidden_states = self._run_base(**inputs)
        logits = base_output.logits
        if not output_values:
            return base_output, {"logits": self._policy_logits(logits, hidden_states, beta)}
        states = hidden_states if states_ixs is None else gather_states(hidden_states, states_ixs)
        value, qs, target_qs = LMHead(self.base).lend(
            hidden_states if actions_ixs is None else gather_states(hidden_states, actions_ixs),
            lambda action_states, lm_weight: self.heads(action_states, states, lm_weight),
        )
        return base_output, {"logits": logits, "value": value, "qs": qs, "target_qs": target_qs}

    def _policy_logits(self, logits: torch.Tensor, hidden_states: torch.Tensor, beta: float | None) -> torch.Tensor:
        """`logits + beta * (Q - V)` on the support of the policy, -inf elsewhere."""
        beta = self.config.beta if beta is None else beta

        def score(logits: torch.Tensor, evaluate: Callable[..., Any] | None) -> torch.Tensor:
            if beta == 0:
                return logits
            lm_head = LMHead(self.base)
            qs = [head.on_language_model(hidden_states, lm_head, evaluate) for head in self.heads.target_q]
            return logits + beta * (self.heads.reduce(qs) - self.heads.v(hidden_states).unsqueeze(-1))

        return on_support(logits, self.config.policy_top_k, score)

    # -------------------------------------------------------------------------------------------------- generation

    def fold_policy(self, beta: float | None = None) -> Any:
        """
        The policy at `beta` (`config.beta` if not given) as a plain language model: a copy of `base` with other output
        embeddings, which decodes the same with `transformers` alone, or in any server, at no extra cost. See
        [`~models.folding.fold_policy`] for what folds.
        """
        return fold_policy(self, beta)

    def save_folded_policy(
        self, save_directory: str | os.PathLike, beta: float | None = None, processing_class: Any = None
    ) -> Any:
        """Saves [`fold_policy`]'s model with its generation configuration, a card and a tokenizer; returns it."""
        return save_folded_policy(self, save_directory, beta, processing_class)


class ILQLForCausalLM(ILQLPreTrainedModel, GenerationMixin):
    r"""
    A causal language model with ILQL heads (Snell et al., 2022, arXiv 2206.11871).

    `forward` returns the logits of the policy, `logits + beta * (Q - V)` with Q the minimum (or mean) of the target
    Q-heads, so every way of decoding that transformers knows acts by the policy.

    Make one with [`AutoModelForCausalLMWithILQLHeads`].

    Args:
        config ([`ILQLCausalLMConfig`]): Configuration of the language model and the heads.
        base (`PreTrainedModel`, *optional*): A live language model to put the heads on; built from
            `config.text_config` if not given.
    """

    config_class = ILQLCausalLMConfig
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
        beta: float | None = None,
        output_values: bool = False,
        states_ixs: torch.LongTensor | None = None,
        actions_ixs: torch.LongTensor | None = None,
        next_input_ids: torch.LongTensor | None = None,
        next_attention_mask: torch.Tensor | None = None,
        loss_fn: Callable[..., torch.Tensor] | None = None,
        **kwargs: Any,
    ) -> CausalILQLOutput | tuple:
        r"""
        Policy logits by default, values with `output_values=True`, a loss with `loss_fn`.

        Args:
            input_ids, attention_mask, position_ids, cache, inputs_embeds, use_cache, output_attentions,
            output_hidden_states, return_dict, logits_to_keep:
                As in transformers' causal language models, and handed on to the one under the heads. A batch padded
                on the left needs `position_ids` (`generate` makes them).
            labels (`torch.LongTensor`, *optional*):
                Refused; the ILQL loss is made of rewards.
            beta (`float`, *optional*):
                Weight of the advantage in the policy; `config.beta` if not given. 0 is the language model itself.
            output_values (`bool`, *optional*, defaults to `False`):
                Whether to return `value`, `qs` and `target_qs`; `logits` are the language model's own then.
            states_ixs (`torch.LongTensor` of shape `(B, S)`, *optional*):
                Positions of the states to value; all if not given.
            actions_ixs (`torch.LongTensor` of shape `(B, T)`, *optional*):
                Positions of the states whose actions to score; all if not given.
            next_input_ids (`torch.LongTensor` of shape `(B, n')`), next_attention_mask (same shape), *optional*:
                Rows whose last state follows the last action of each row; only for `loss_fn`.
            loss_fn (`Callable`, *optional*):
                Called as `loss_fn(hidden_states, heads, lm_head, next_hidden_state)` with the inputs of the LM head
                `(B, n, d)`; its scalar is returned as `loss`, and no logits are computed.

        Returns:
            [`CausalILQLOutput`], or its tuple with `return_dict=False`.
        """
        self._refuse_labels(labels)
        if loss_fn is not None:
            rows = {"input_ids": input_ids, "attention_mask": attention_mask}
            output = CausalILQLOutput(loss=self._loss(loss_fn, next_input_ids, next_attention_mask, **rows))
        else:
            base_output, fields = self._logits_and_values(
                output_values,
                beta,
                states_ixs,
                actions_ixs,
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
            output = causal_output(CausalILQLOutput, base_output, **fields)
        return_dict = self.config.return_dict if return_dict is None else return_dict
        return output if return_dict else output.to_tuple()


class ILQLForSeq2SeqLM(ILQLPreTrainedModel, GenerationMixin):
    r"""
    An encoder-decoder language model with ILQL heads on its decoder; otherwise as [`ILQLForCausalLM`].

    Make one with [`AutoModelForSeq2SeqLMWithILQLHeads`].

    Args:
        config ([`ILQLSeq2SeqLMConfig`]): Configuration of the language model and the heads.
        base (`PreTrainedModel`, *optional*): A live language model to put the heads on; built from
            `config.text_config` if not given.
    """

    config_class = ILQLSeq2SeqLMConfig
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
        beta: float | None = None,
        output_values: bool = False,
        states_ixs: torch.LongTensor | None = None,
        actions_ixs: torch.LongTensor | None = None,
        next_input_ids: torch.LongTensor | None = None,
        next_attention_mask: torch.Tensor | None = None,
        loss_fn: Callable[..., torch.Tensor] | None = None,
        **kwargs: Any,
    ) -> Seq2SeqILQLOutput | tuple:
        r"""
        Policy logits by default, values with `output_values=True`, a loss with `loss_fn`.

        Args:
            input_ids, attention_mask, decoder_input_ids, decoder_attention_mask, encoder_outputs, cache,
            inputs_embeds, decoder_inputs_embeds, use_cache, output_attentions, output_hidden_states, return_dict:
                As in transformers' encoder-decoder models, and handed on to the one under the heads.
                `decoder_input_ids (B, m)` begin with the decoder start token.
            states_ixs (`torch.LongTensor` of shape `(B, S)`), actions_ixs (shape `(B, T)`), *optional*:
                Positions in `decoder_input_ids`; all if not given.
            next_input_ids (`torch.LongTensor` of shape `(B, n')`), next_attention_mask (same shape), *optional*:
                The encoder's rows in the state that follows the last action of each row, which is the decoder's first
                on them; only for `loss_fn`.
            labels, beta, output_values, loss_fn:
                As in [`ILQLForCausalLM.forward`].

        Returns:
            [`Seq2SeqILQLOutput`], or its tuple with `return_dict=False`.
        """
        self._refuse_labels(labels)
        if loss_fn is not None:
            rows = {"input_ids": input_ids, "attention_mask": attention_mask, "decoder_input_ids": decoder_input_ids}
            output = Seq2SeqILQLOutput(loss=self._loss(loss_fn, next_input_ids, next_attention_mask, **rows))
        else:
            base_output, fields = self._logits_and_values(
                output_values,
                beta,
                states_ixs,
                actions_ixs,
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
            output = seq2seq_output(Seq2SeqILQLOutput, base_output, **fields)
        return_dict = self.config.return_dict if return_dict is None else return_dict
        return output if return_dict else output.to_tuple()


class AutoModelForCausalLMWithILQLHeads(AutoModelWithHeads):
    """
    Puts ILQL heads on any causal language model of the Hub, or loads one that has them.

    Example:

    ```python
    >>> from hf_qrl import AutoModelForCausalLMWithILQLHeads

    >>> model = AutoModelForCausalLMWithILQLHeads.from_pretrained("Qwen/Qwen3-0.6B", head_type="tied", beta=4.0)
    ```
    """

    model_class = ILQLForCausalLM


class AutoModelForSeq2SeqLMWithILQLHeads(AutoModelWithHeads):
    """
    Puts ILQL heads on any encoder-decoder language model of the Hub, or loads one that has them.

    Example:

    ```python
    >>> from hf_qrl import AutoModelForSeq2SeqLMWithILQLHeads

    >>> model = AutoModelForSeq2SeqLMWithILQLHeads.from_pretrained("google/flan-t5-small", head_type="tied")
    ```
    """

    model_class = ILQLForSeq2SeqLM


__all__ = [
    "AutoModelForCausalLMWithILQLHeads",
    "AutoModelForSeq2SeqLMWithILQLHeads",
    "CausalILQLOutput",
    "ILQLForCausalLM",
    "ILQLForSeq2SeqLM",
    "Seq2SeqILQLOutput",
]
