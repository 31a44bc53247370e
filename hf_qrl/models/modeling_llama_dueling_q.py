# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""A Llama with a dueling Q-head: the model of llama-qrlhf on the Llama of transformers."""

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import Cache
from transformers.modeling_utils import slice_logits_to_keep
from transformers.utils.deprecation import deprecate_kwarg
from transformers.utils.peft_utils import find_adapter_config_file

from .adapters import load_adapter
from .configuration_llama_dueling_q import LlamaDuelingQConfig
from .heads import QHeads
from .llama_qrlhf import convert
from .lm_head import LMHead
from .modeling_base import HUB_ARGUMENTS, check_bare
from .modeling_q import QPreTrainedModel, on_support
from .outputs import CausalQOutput
from .sharding import is_partitioned


HEAD_FIELDS = (
    "head_expansion",
    "head_init",
    "policy",
    "beta",
    "policy_top_k",
    "history_window",
    "reward_mean",
    "reward_std",
)


class LlamaDuelingQForCausalLM(QPreTrainedModel, LlamaForCausalLM):
    r"""
    A Llama with a dueling Q-head (Wang et al., 2016, arXiv 1511.06581) on the inputs of its LM head.

    `forward` returns the logits of the policy: the Q-values of the online head (`config.policy="q"`), or
    `logits + beta * (Q - V)` (`"lm"`). Every way of decoding that transformers knows acts by it.

    [`~LlamaDuelingQForCausalLM.from_pretrained`] loads a saved one, or any Llama, on which it puts a fresh head.

    Args:
        config ([`LlamaDuelingQConfig`]): Configuration of the Llama and the head.

    Example:

    ```python
    >>> from hf_qrl import LlamaDuelingQForCausalLM

    >>> model = LlamaDuelingQForCausalLM.from_pretrained("HuggingFaceTB/SmolLM2-135M")  # doctest: +SKIP
    ```
    """

    config: LlamaDuelingQConfig
    config_class = LlamaDuelingQConfig
    loading_advice = (
        "If it is another model, load it with its own class; if its head has another shape, with the configuration it "
        "was saved with."
    )
    policy_arguments = ("beta", "policy")
    language_model_policy = {"policy": "lm", "beta": 0.0}

    def __init__(self, config: LlamaDuelingQConfig):
        super().__init__(config)
        config.validate_heads()
        if config.lm_head_bias:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=True)
        self.heads = QHeads(
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
            head_type=config.head_type,
            head_stem=config.head_stem,
            head_expansion=config.head_expansion,
            num_q_heads=config.num_q_heads,
            q_reduction=config.q_reduction,
        )
        # A second time, after the parent's: modules that it has initialised stay as they are.
        self.post_init()
        self.add_model_tags(["hf_qrl", "dueling-q"])
        if not self.heads.q[0].weight.is_meta:  # as it is where a checkpoint is about to be loaded
            self.heads.reset(config.head_init)

    @property
    def acts_by_language_model(self) -> bool:  # type: ignore[override]
        return self.config.policy == "lm" or self.config.policy_top_k is not None

    # ------------------------------------------------------------------------------------------------ construction

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike, *args: Any, **kwargs: Any) -> Any:
        """
        Args:
            pretrained_model_name_or_path (`str` or `os.PathLike`):
                A model with a Q-head; a plain Llama, which gets a fresh one; or an adapter with a Q-head, which gives
                a `peft.PeftModel`.
            is_trainable (`bool`, *optional*, defaults to `False`), base_model_name_or_path (`str`, *optional*):
                As in [`AutoModelForCausalLMWithILQLHeads.from_pretrained`], of an adapter.
            kwargs:
                Fields of [`LlamaDuelingQConfig`], and whatever [`~transformers.PreTrainedModel.from_pretrained`]
                takes.
        """
        base_name, is_trainable = kwargs.pop("base_model_name_or_path", None), kwargs.pop("is_trainable", False)
        loading = {key: kwargs[key] for key in HUB_ARGUMENTS if key in kwargs}
        adapter = find_adapter_config_file(pretrained_model_name_or_path, **loading)
        if adapter is None:
            if base_name is not None:
                raise ValueError(
                    "`base_model_name_or_path` goes with an adapter, and "
                    f"{str(pretrained_model_name_or_path)!r} is none."
                )
            return super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        rest = {key: argument for key, argument in kwargs.items() if key not in HUB_ARGUMENTS}
        # `AutoModelForCausalLM` has read the configuration beside the adapter, and would have the adapter loaded too.
        rest.pop("adapter_kwargs", None)
        config = rest.pop("config", None)
        if config is not None:
            rest = {field: getattr(config, field) for field in HEAD_FIELDS} | rest
            if config._attn_implementation is not None:
                rest.setdefault("attn_implementation", config._attn_implementation)
        return load_adapter(
            cls.from_pretrained,
            cls.config_class,
            pretrained_model_name_or_path,
            adapter,
            HEAD_FIELDS,
            {field: rest.pop(field) for field in HEAD_FIELDS if field in rest},
            loading,
            base_name=base_name,
            is_trainable=is_trainable,
            **rest,
        )

    @classmethod
    def from_base(cls, base: LlamaForCausalLM, **head_arguments: Any) -> "LlamaDuelingQForCausalLM":
        """
        Puts a fresh head on a live Llama, whose modules are used as they are (not copied).

        Args:
            base ([`~transformers.LlamaForCausalLM`]): The Llama.
            head_arguments: Fields of [`LlamaDuelingQConfig`].
        """
        if not isinstance(base, LlamaForCausalLM):
            raise ValueError(
                f"{cls.__name__} takes a `LlamaForCausalLM`, got {type(base).__name__}. To put the same head on other "
                'models use `AutoModelForCausalLMWithILQLHeads` with `head_type="dueling"`, `num_q_heads=1`. If it is '
                "an adapter, merge it first (`merge_and_unload()`)."
            )
        check_bare(base)
        bias = base.lm_head.bias is not None
        config = LlamaDuelingQConfig.from_llama(base.config, dtype=base.dtype, lm_head_bias=bias, **head_arguments)
        with torch.device("meta"):
            model = cls(config)
        model.model, model.lm_head = base.model, base.lm_head
        model.heads.to_empty(device=base.device)
        model.heads.reset(config.head_init)
        model._take_over(base)
        return model

    @classmethod
    def from_config(cls, config: LlamaConfig, **head_arguments: Any) -> "LlamaDuelingQForCausalLM":
        """
        A model with random weights.

        Args:
            config ([`LlamaDuelingQConfig`] or [`~transformers.LlamaConfig`]): Configuration of the model.
            head_arguments: Fields of [`LlamaDuelingQConfig`], if `config` is that of a plain Llama.
        """
        if not isinstance(config, LlamaDuelingQConfig):
            return cls(LlamaDuelingQConfig.from_llama(config, **head_arguments))
        if head_arguments:
            raise ValueError(f"{sorted(head_arguments)} are set in the configuration, not beside it.")
        return cls(config)

    @classmethod
    def from_llama_qrlhf(cls, state_dict: dict[str, torch.Tensor], **arguments: Any) -> "LlamaDuelingQForCausalLM":
        """
        The model of llama-qrlhf with the same logits and Q-values.

        Args:
            state_dict (`dict[str, torch.Tensor]`): What `llama.state_dict()` returns there.
            arguments: Those that its `Llama` was built with (`num_tokens`, `dim`, `depth`, ...), and fields of
                [`LlamaDuelingQConfig`]; see [`LlamaDuelingQConfig.from_llama_qrlhf`].

        Returns:
            [`LlamaDuelingQForCausalLM`] in float32, in evaluation mode; its target head is a copy of the online head.
        """
        model = cls(LlamaDuelingQConfig.from_llama_qrlhf(**arguments))
        frequencies = model.model.rotary_emb.inv_freq
        converted = convert(state_dict, model.state_dict(), frequencies, model.config.num_hidden_layers)
        model.load_state_dict(converted, strict=False)  # the targets are not in it
        model.heads.update_targets(1.0)
        return model.eval()

    def _complete(self, missing: set[str]) -> set[str]:
        heads = {f"heads.{key}" for key in self.heads.state_dict()}
        if not heads <= missing or type(self).__name__ in (self.config.architectures or []):
            return missing
        # A plain Llama, and transformers has reported that these weights are new. It has made them in the dtype of the
        # others, which ZeRO-3 demands of parameters.
        partitioned = any(map(is_partitioned, self.heads.parameters()))
        (self.heads.target_q if partitioned else self.heads).float()
        self.heads.reset(self.config.head_init)
        self.made_from_base = True
        return missing - heads

    # ----------------------------------------------------------------------------------------------------- forward

    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
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
        policy: str | None = None,
        return_q_values: bool = False,
        next_input_ids: torch.LongTensor | None = None,
        next_attention_mask: torch.Tensor | None = None,
        loss_fn: Callable[..., torch.Tensor] | None = None,
        **kwargs: Any,
    ) -> CausalQOutput | tuple:
        r"""
        Policy logits by default, Q-values with `return_q_values=True`, a loss with `loss_fn`.

        Args:
            input_ids, attention_mask, position_ids, cache, inputs_embeds, use_cache, output_attentions,
            output_hidden_states, return_dict, logits_to_keep:
                As in [`~transformers.LlamaForCausalLM`]. There is no cache by default where Q-values are returned.
            labels (`torch.LongTensor`, *optional*):
                Refused; the loss of a Q-head is made of rewards.
            beta (`float`, *optional*):
                Weight of the advantage in the policy `"lm"`; `config.beta` if not given.
            policy (`str`, *optional*):
                `"q"` or `"lm"`; `config.policy` if not given.
            return_q_values (`bool`, *optional*, defaults to `False`):
                Whether to return `q_values` of the online head; `logits` are the language model's own then.
            next_input_ids (`torch.LongTensor` of shape `(B, n')`), next_attention_mask (same shape), *optional*:
                Rows whose last state follows the last action of each row; only for `loss_fn`.
            loss_fn (`Callable`, *optional*):
                Called as `loss_fn(hidden_states, heads, lm_head, next_hidden_state)` with the inputs of the LM head
                `(B, n, d)`; its scalar is returned as `loss`, and no logits are computed.

        Returns:
            [`CausalQOutput`], or its tuple with `return_dict=False`: `(logits, q_values)` with `return_q_values=True`.
        """
        if labels is not None:
            raise ValueError(
                "A model with a Q-head takes no `labels`: train it with `QRLHFTrainer`, or train the language model "
                "alone as a `LlamaForCausalLM`."
            )
        if loss_fn is not None:
            hidden_states = self.hidden_states(input_ids=input_ids, attention_mask=attention_mask)
            next_state = self._state_after(next_input_ids, next_attention_mask)
            output = CausalQOutput(loss=loss_fn(hidden_states, self.heads, LMHead(self), next_state))
        else:
            recorded = {"output_attentions": output_attentions, "output_hidden_states": output_hidden_states}
            kwargs |= {name: value for name, value in recorded.items() if value is not None}
            outputs = self.model(
                input_ids=input_ids,
                attention_mask=attention_mask,
                position_ids=position_ids,
                cache=cache,
                inputs_embeds=inputs_embeds,
                use_cache=False if use_cache is None and return_q_values else use_cache,
                return_dict=True,
                **kwargs,
            )
            states = slice_logits_to_keep(outputs.last_hidden_state, logits_to_keep)
            if return_q_values:
                fields = {"logits": self.lm_head(states), "q_values": self.heads.q[0](states)}
            else:
                fields = {"logits": self._policy_logits(states, beta, policy)}
            output = CausalQOutput(
                cache=outputs.cache, hidden_states=outputs.hidden_states, attentions=outputs.attentions, **fields
            )
        return_dict = self.config.return_dict if return_dict is None else return_dict
        return output if return_dict else output.to_tuple()

    def _policy_logits(self, states: torch.Tensor, beta: float | None, policy: str | None) -> torch.Tensor:
        """Q, or `logits + beta * (Q - V)`, on the support of the policy, -inf elsewhere."""
        policy = self.config.policy if policy is None else policy
        if policy not in ("q", "lm"):
            raise ValueError(f'`policy` must be "q" or "lm", got {policy!r}.')
        if policy == "q" and beta is not None:
            raise ValueError(
                f'`beta={beta}` weighs the advantage in the policy "lm", and the policy is "q", which has none. Pass '
                '`policy="lm"` with it, or leave it out.'
            )
        beta = self.config.beta if beta is None else beta
        head, top_k = self.heads.q[0], self.config.policy_top_k

        def score(logits: torch.Tensor, evaluate: Callable[..., Any] | None) -> torch.Tensor:
            if policy == "lm" and beta == 0:
                return logits
            q = head(states, None, evaluate)
            return q if policy == "q" else logits + beta * (q - head.value(states).unsqueeze(-1))

        if policy == "q" and top_k is None:
            return head(states)  # without the language model's logits, which decide the support only
        return on_support(self.lm_head(states), top_k, score)

    def hidden_states(self, **inputs: Any) -> torch.Tensor:
        return self.model(use_cache=False, return_dict=True, **inputs).last_hidden_state


__all__ = ["LlamaDuelingQForCausalLM"]
