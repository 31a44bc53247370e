# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""Language models with ILQL heads: any causal or encoder-decoder model, heads on it, and a policy that uses both."""

import os
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils.peft_utils import find_adapter_config_file

from .adapters import load_adapter
from .configuration_ilql import ILQLCausalLMConfig, ILQLSeq2SeqLMConfig
from .modeling_base import HUB_ARGUMENTS, ILQLPreTrainedModel, attend_somewhere
from .outputs import CausalILQLOutput, Seq2SeqILQLOutput
from .sharding import check_ties
from .trlx import from_trlx, read_trlx


HEAD_ARGUMENTS = (
    "head_type",
    "head_stem",
    "head_init",
    "head_expansion",
    "num_q_heads",
    "q_reduction",
    "beta",
    "policy_top_k",
    "history_window",
    "reward_mean",
    "reward_std",
)


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
            hidden_states = self.hidden_states(input_ids=input_ids, attention_mask=attention_mask)
            next_state = self._state_after(next_input_ids, next_attention_mask)
            output = CausalILQLOutput(loss=self._loss(loss_fn, hidden_states, next_state))
        else:
            base_output, fields = self._run_base(
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
            output = CausalILQLOutput(cache=base_output.cache, hidden_states=base_output.hidden_states, **fields)
            output.attentions = base_output.attentions
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
            hidden_states = self.hidden_states(
                input_ids=input_ids, attention_mask=attention_mask, decoder_input_ids=decoder_input_ids
            )
            next_state = None
            if next_input_ids is not None and next_attention_mask is not None:
                start = next_input_ids.new_full((len(next_input_ids), 1), self.config.decoder_start_token_id)
                with torch.no_grad():
                    next_state = self.hidden_states(
                        input_ids=next_input_ids,
                        attention_mask=attend_somewhere(next_attention_mask),
                        decoder_input_ids=start,
                    )[:, 0]
            output = Seq2SeqILQLOutput(loss=self._loss(loss_fn, hidden_states, next_state))
        else:
            base_output, fields = self._run_base(
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
            encoder_outputs = BaseModelOutput(
                last_hidden_state=base_output.encoder_last_hidden_state,
                hidden_states=base_output.encoder_hidden_states,
                attentions=base_output.encoder_attentions,
            )
            output = Seq2SeqILQLOutput(
                cache=base_output.cache,
                hidden_states=base_output.decoder_hidden_states,
                encoder_outputs=encoder_outputs,
                **fields,
            )
            output.decoder_hidden_states = base_output.decoder_hidden_states
            output.decoder_attentions = base_output.decoder_attentions
            output.cross_attentions = base_output.cross_attentions
        return_dict = self.config.return_dict if return_dict is None else return_dict
        return output if return_dict else output.to_tuple()


class _AutoModelWithILQLHeads:
    """What the two Auto classes share."""

    model_class: ClassVar[type[ILQLPreTrainedModel]]

    def __init__(self, *args: Any, **kwargs: Any):
        raise OSError(
            f"{type(self).__name__} is made with `{type(self).__name__}.from_pretrained(...)` or `.from_config(...)`."
        )

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | os.PathLike | PreTrainedModel, *model_args: Any, **kwargs: Any
    ) -> Any:
        """
        Args:
            pretrained_model_name_or_path (`str` or `PreTrainedModel`):
                A plain language model (fresh heads are put on it) or one saved with ILQL heads, by name or directory;
                one that trlX saved (its heads are kept, safetensors are written when it is saved again); an adapter
                with heads, which gives a `peft.PeftModel` with the model with heads in it; or a live language model.
            is_trainable (`bool`, *optional*, defaults to `False`):
                Whether an adapter is to be trained on.
            base_model_name_or_path (`str`, *optional*):
                The model under an adapter, if it is not where the adapter says.
            kwargs:
                Fields of [`ILQLCausalLMConfig`] (`head_type`, `num_q_heads`, `beta`, ...), and whatever
                [`~transformers.PreTrainedModel.from_pretrained`] takes.
        """
        head_arguments = {name: kwargs.pop(name) for name in HEAD_ARGUMENTS if name in kwargs}
        adapter_arguments = {
            "base_name": kwargs.pop("base_model_name_or_path", None),
            "is_trainable": kwargs.pop("is_trainable", False),
        }
        if not isinstance(pretrained_model_name_or_path, (str, os.PathLike)):
            if model_args or kwargs:
                raise ValueError(f"A live model takes no loading arguments, got {sorted(kwargs)}.")
            return cls.model_class.from_base(pretrained_model_name_or_path, **head_arguments)
        name, loading = pretrained_model_name_or_path, {key: kwargs[key] for key in HUB_ARGUMENTS if key in kwargs}
        adapter = find_adapter_config_file(name, **loading)
        if adapter is not None:
            rest = {key: argument for key, argument in kwargs.items() if key not in HUB_ARGUMENTS}
            return load_adapter(
                cls.from_pretrained,
                cls.model_class.config_class,
                name,
                adapter,
                HEAD_ARGUMENTS,
                head_arguments,
                loading,
                **adapter_arguments,
                **rest,
            )
        if adapter_arguments["base_name"] is not None:
            raise ValueError(f"`base_model_name_or_path` goes with an adapter, and {str(name)!r} is none.")
        config = kwargs.get("config")
        if config is None:
            more = {key: kwargs[key] for key in ("gguf_file", "trust_remote_code") if key in kwargs}
            config = AutoConfig.from_pretrained(name, **loading, **more)
        cls.model_class.check_kind(config, f"{str(name)!r}")
        if isinstance(config, cls.model_class.config_class):
            loaded = cls.model_class.from_pretrained(name, *model_args, **kwargs, **head_arguments)
            check_ties(loaded[0] if kwargs.get("output_loading_info") else loaded, name, **loading)
            return loaded
        state_dict = None if "gguf_file" in kwargs else read_trlx(name, **loading)
        if state_dict is not None:
            rest = {key: argument for key, argument in kwargs.items() if key not in (*HUB_ARGUMENTS, "config")}
            return from_trlx(cls.model_class, name, state_dict, config, head_arguments, loading, **rest)
        kwargs["output_loading_info"] = True
        base, info = cls.model_class.base_auto_class.from_pretrained(name, *model_args, **kwargs)
        if info["missing_keys"]:
            keys = sorted(info["missing_keys"])
            raise ValueError(
                f"{len(keys)} weights of the {type(base).__name__} are missing from {str(name)!r} "
                f"({', '.join(keys[:3])}) and would be random. Load a checkpoint of the whole language model."
            )
        check_ties(base, name, **loading)
        return cls.model_class.from_base(base, **head_arguments)

    @classmethod
    def from_config(cls, config: PreTrainedConfig, **kwargs: Any) -> Any:
        """
        A model with random weights.

        Args:
            config (`PreTrainedConfig`): One of the model with heads, or that of a language model.
            kwargs: Fields of [`ILQLCausalLMConfig`], if `config` is that of a language model.
        """
        cls.model_class.check_kind(config, type(config).__name__)
        if isinstance(config, cls.model_class.config_class):
            if kwargs:
                raise ValueError(f"{sorted(kwargs)} are set in the configuration, not beside it.")
            return cls.model_class(config)
        head_arguments = {name: kwargs.pop(name) for name in HEAD_ARGUMENTS if name in kwargs}
        base = cls.model_class.base_auto_class.from_config(config, **kwargs)
        return cls.model_class.from_base(base, **head_arguments)


class AutoModelForCausalLMWithILQLHeads(_AutoModelWithILQLHeads):
    """
    Puts ILQL heads on any causal language model of the Hub, or loads one that has them.

    Example:

    ```python
    >>> from hf_qrl import AutoModelForCausalLMWithILQLHeads

    >>> model = AutoModelForCausalLMWithILQLHeads.from_pretrained("Qwen/Qwen3-0.6B", head_type="tied", beta=4.0)
    ```
    """

    model_class = ILQLForCausalLM


class AutoModelForSeq2SeqLMWithILQLHeads(_AutoModelWithILQLHeads):
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
