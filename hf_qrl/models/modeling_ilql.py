# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""Causal language models with ILQL heads: any `AutoModelForCausalLM`, heads on it, and a policy that uses both."""

import math
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationMixin,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.utils import ModelOutput

from .configuration_ilql import ILQLCausalLMConfig
from .heads import BufferLinear, HeadLinear, ILQLHeads, QHead, candidate_values, gather_states
from .lm_head import LMHead, capture_input
from .saving import move_checkpoint


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


class ILQLForCausalLM(PreTrainedModel, GenerationMixin):
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
    base_model_prefix = "base"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _keep_in_fp32_modules_strict = {"heads"}
    # The loss is a sum over actions divided by the number of actions of the whole optimizer step.
    accepts_loss_kwargs = True

    def __init__(self, config: ILQLCausalLMConfig, base: PreTrainedModel | None = None):
        super().__init__(config)
        config.validate_heads()
        if base is None:
            base = AutoModelForCausalLM.from_config(config.text_config)
        self.base = base
        output: Any = base.get_output_embeddings()
        if output is None:
            raise ValueError(
                f"{type(base).__name__} has no output embeddings to take the width of the heads from; ILQL heads need "
                "a model with a language modelling head."
            )
        self.heads = ILQLHeads(
            hidden_size=output.in_features,
            vocab_size=output.out_features,
            head_type=config.head_type,
            head_stem=str(config.head_stem),
            head_expansion=config.head_expansion,
            num_q_heads=config.num_q_heads,
            q_reduction=config.q_reduction,
        )
        self.post_init()
        if not self.heads.v.projection.weight.is_meta:
            self.heads.reset(str(config.head_init))

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        # Reached for what a checkpoint lacks; the constructor initialises fresh heads itself (targets are copies of
        # the online heads, which no leaf can know), and loading with missing heads is refused.
        if isinstance(module, (HeadLinear, BufferLinear)):
            init.zeros_(module.weight)
            init.zeros_(module.bias)
        elif isinstance(module, QHead) and module.weight is not None:
            init.zeros_(module.weight)
            init.zeros_(module.bias)

    # ------------------------------------------------------------------------------------------------ construction

    @classmethod
    def from_base(cls, base: PreTrainedModel, **head_arguments: Any) -> "ILQLForCausalLM":
        """
        Puts fresh heads on a live causal language model, which is used as it is (not copied).

        Args:
            base (`PreTrainedModel`): The language model.
            head_arguments: Fields of [`ILQLCausalLMConfig`].
        """
        if not isinstance(base, PreTrainedModel):
            raise ValueError(
                f"ILQL heads go on a `PreTrainedModel`, got {type(base).__name__}. Adapters are not "
                "supported yet: merge one into its base model (`merge_and_unload()`) and put the heads on that."
            )
        if isinstance(base, cls):
            raise ValueError("The model already has ILQL heads.")
        if base.config.is_encoder_decoder:
            raise ValueError(f"{type(base).__name__} is an encoder-decoder; {cls.__name__} takes causal models only.")
        # The constructor initialises modules that are not marked as initialised, such as an embedding that was
        # resized or replaced since loading.
        for module in base.modules():
            module._is_hf_initialized = True  # type: ignore[assignment]
        config = cls.config_class(text_config=base.config, dtype=base.dtype, **head_arguments)
        model = cls(config, base=base)
        model.heads.to(device=base.device)
        model.generation_config = base.generation_config
        model.train(base.training)
        return model

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike, *args: Any, **kwargs: Any) -> Any:
        """
        As [`~transformers.PreTrainedModel.from_pretrained`], for a checkpoint that has its heads.

        Raises:
            `ValueError`: if weights are missing from the checkpoint or have another shape, or if it has heads that are
            not in the configuration.
        """
        return_info = kwargs.pop("output_loading_info", False)
        ignore_mismatched_sizes = kwargs.pop("ignore_mismatched_sizes", False)
        model, info = super().from_pretrained(
            pretrained_model_name_or_path, *args, output_loading_info=True, ignore_mismatched_sizes=True, **kwargs
        )
        faults = {
            "are missing": info["missing_keys"],
            "have another shape": [
                key for key, _, _ in info["mismatched_keys"] if key.startswith("heads.") or not ignore_mismatched_sizes
            ],
            "of heads are left over": [key for key in info["unexpected_keys"] if key.startswith("heads.")],
        }
        if any(faults.values()):
            listing = "; ".join(
                f"{len(keys)} weights {what} ({', '.join(sorted(keys)[:3])})" for what, keys in faults.items() if keys
            )
            raise ValueError(
                f"The checkpoint {str(pretrained_model_name_or_path)!r} does not hold this {cls.__name__}: {listing}. "
                "If it is a plain language model, use `AutoModelForCausalLMWithILQLHeads.from_pretrained`, which puts "
                "fresh heads on it; if it has other heads, load it with the configuration it was saved with."
            )
        return (model, info) if return_info else model

    def save_pretrained(self, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> None:
        """
        As [`~transformers.PreTrainedModel.save_pretrained`]. Files are written beside the old ones and moved over
        them when complete, so that a kill leaves the checkpoint that was there.
        """
        directory = Path(save_directory)
        if directory.is_file() or kwargs.get("is_main_process", True) is False:
            return super().save_pretrained(save_directory, *args, **kwargs)
        directory.mkdir(parents=True, exist_ok=True)
        if kwargs.get("push_to_hub"):
            kwargs.setdefault("repo_id", directory.name)
        with tempfile.TemporaryDirectory(prefix=".saving-", dir=directory) as staging:
            super().save_pretrained(staging, *args, **kwargs)
            move_checkpoint(Path(staging), directory, kwargs.get("variant"))

    # -------------------------------------------------------------------------------------------------- embeddings

    def get_input_embeddings(self) -> nn.Module:
        return self.base.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.base.set_input_embeddings(value)

    def get_output_embeddings(self) -> Any:
        return self.base.get_output_embeddings()

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.base.set_output_embeddings(new_embeddings)

    def resize_token_embeddings(self, new_num_tokens: int | None = None, *args: Any, **kwargs: Any) -> nn.Embedding:
        """
        Resizes the embeddings and the Q-heads; in each Q-head a new token starts as the mean of the old ones.
        """
        embeddings = self.base.resize_token_embeddings(new_num_tokens, *args, **kwargs)
        vocab_size = self.get_output_embeddings().weight.shape[0]
        for head in (*self.heads.q, *self.heads.target_q):
            head.resize(vocab_size)
        return embeddings

    # ----------------------------------------------------------------------------------------------------- forward

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
        if labels is not None:
            raise ValueError(
                "A model with ILQL heads takes no `labels`: train it with `ILQLTrainer`, or train the language model "
                "alone through `model.base`."
            )
        return_dict = self.config.return_dict if return_dict is None else return_dict
        if loss_fn is not None:
            output = CausalILQLOutput(
                loss=self._loss(loss_fn, input_ids, attention_mask, next_input_ids, next_attention_mask)
            )
            return output if return_dict else output.to_tuple()

        with capture_input(self.get_output_embeddings()) as captured:
            base_output = self.base(
                input_ids=input_ids,
                attention_mask=attention_mask,
                position_ids=position_ids,
                cache=cache,
                inputs_embeds=inputs_embeds,
                use_cache=use_cache,
                output_attentions=output_attentions,
                output_hidden_states=output_hidden_states,
                return_dict=True,
                logits_to_keep=logits_to_keep,
                **kwargs,
            )
        hidden_states, logits = captured[0], base_output.logits
        output = CausalILQLOutput(logits=logits, cache=base_output.cache, hidden_states=base_output.hidden_states)
        output.attentions = base_output.attentions
        if output_values:
            output.value, output.qs, output.target_qs = self.heads(
                hidden_states if actions_ixs is None else gather_states(hidden_states, actions_ixs),
                hidden_states if states_ixs is None else gather_states(hidden_states, states_ixs),
                self.get_output_embeddings().weight,
            )
        else:
            output.logits = self._policy_logits(logits, hidden_states, self.config.beta if beta is None else beta)
        return output if return_dict else output.to_tuple()

    def _policy_logits(self, logits: torch.Tensor, hidden_states: torch.Tensor, beta: float) -> torch.Tensor:
        """`logits + beta * (Q - V)` on the support of the policy, -inf elsewhere."""
        top_k = self.config.policy_top_k
        support = None
        evaluate = None
        if top_k is not None and top_k < logits.shape[-1]:
            support = logits.topk(top_k, dim=-1).indices
            evaluate = partial(candidate_values, candidates=support)
        if beta != 0:
            lm_weight = self.get_output_embeddings().weight
            qs = [head(hidden_states, lm_weight, evaluate) for head in self.heads.target_q]
            advantage = self.heads.reduce(qs) - self.heads.v(hidden_states).unsqueeze(-1)
        if support is None:
            return logits + beta * advantage if beta != 0 else logits
        kept = logits.gather(-1, support)
        if beta != 0:
            kept = kept + beta * advantage
        return torch.full_like(logits, -torch.inf, dtype=kept.dtype).scatter_(-1, support, kept)

    def _loss(self, loss_fn, input_ids, attention_mask, next_input_ids, next_attention_mask) -> torch.Tensor:
        # Rows are padded on the right, so positions and the hidden states of real tokens do not depend on padding.
        hidden_states = self.base.base_model(
            input_ids=input_ids, attention_mask=attention_mask, use_cache=False
        ).last_hidden_state
        next_hidden_state = None
        if next_input_ids is not None:
            # A row without a next state attends to its padding, for attention over nothing is NaN; it is not used.
            last = (next_attention_mask.sum(1) - 1).clamp(min=0)
            mask = next_attention_mask.clone()
            mask[:, 0] = 1
            with torch.no_grad():
                next_states = self.base.base_model(
                    input_ids=next_input_ids, attention_mask=mask, use_cache=False
                ).last_hidden_state
                next_hidden_state = next_states[torch.arange(len(last), device=last.device), last]
        return loss_fn(hidden_states, self.heads, LMHead(self.base), next_hidden_state)

    @torch.no_grad()
    def check_lm_head(self, input_ids: torch.Tensor) -> None:
        """
        Compares the logits that training computes in chunks with those of the model itself.

        Raises:
            `ValueError`: if they differ, for then the model does something between its last hidden state and its
            logits that hf_qrl does not know.
        """
        was_training = self.training
        self.eval()
        logits = self.base(input_ids=input_ids, use_cache=False).logits.float()
        states = self.base.base_model(input_ids=input_ids, use_cache=False).last_hidden_state
        self.train(was_training)

        def dense(z, weight, bias, offset, softcap):
            values = nn.functional.linear(z, weight, bias).float()
            return values if softcap is None else softcap * torch.tanh(values / softcap)

        difference = (LMHead(self.base)(states, dense) - logits).abs().max().item()
        scale = max(1.0, logits.abs().max().item())
        if difference > (1e-3 if self.dtype == torch.float32 else 5e-2) * scale:
            raise ValueError(
                f"The logits of {type(self.base).__name__} are not the projection of its last hidden state (they "
                f"differ by {difference:.3g}). Training would optimise something else than what the model decodes; "
                "this architecture is not supported."
            )

    # -------------------------------------------------------------------------------------------------- generation

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """As [`~transformers.GenerationMixin.generate`]; `beta=` overrides `config.beta` for this call."""
        beta = kwargs.get("beta")
        if beta is not None and not (isinstance(beta, (int, float)) and math.isfinite(beta)):
            raise ValueError(f"`beta` must be a finite number, the same for all rows, got {beta!r}.")
        if beta is not None and kwargs.get("guidance_scale") is not None:
            raise ValueError("Guidance runs the model a second time without `beta`; set `model.config.beta` instead.")
        if beta is not None and kwargs.get("assistant_model") is not None:
            raise ValueError(
                "Assisted decoding hands every argument to the draft model too, which has no `beta`; set "
                "`model.config.beta` instead."
            )
        if self.config.policy_top_k is not None:
            processors = kwargs.get("logits_processor") or []
            kwargs["logits_processor"] = LogitsProcessorList([*processors, SupportCheck()])
        return super().generate(*args, **kwargs)

    def generate_batch(self, *args: Any, **kwargs: Any) -> Any:
        """As [`~transformers.GenerationMixin.generate_batch`], with `config.beta`."""
        if "beta" in kwargs:
            raise ValueError("`generate_batch` would ignore `beta`; set `model.config.beta` instead.")
        return super().generate_batch(*args, **kwargs)


class SupportCheck(LogitsProcessor):
    """Stops when other processors (bad words, a minimal length) have forbidden all that `policy_top_k` left."""

    def __call__(self, input_ids: torch.LongTensor, scores: torch.Tensor) -> torch.Tensor:
        if not (scores > -torch.inf).any(-1).all():
            raise ValueError(
                "Every token in the support of the policy is forbidden by arguments of `generate` (`bad_words_ids`, "
                "`min_new_tokens`, ...). Raise `model.config.policy_top_k`."
            )
        return scores


class AutoModelForCausalLMWithILQLHeads:
    """
    Puts ILQL heads on any causal language model of the Hub, or loads one that has them.

    Example:

    ```python
    >>> from hf_qrl import AutoModelForCausalLMWithILQLHeads

    >>> model = AutoModelForCausalLMWithILQLHeads.from_pretrained("Qwen/Qwen3-0.6B", head_type="tied", beta=4.0)
    ```
    """

    def __init__(self, *args: Any, **kwargs: Any):
        raise OSError(
            f"{type(self).__name__} is made with `{type(self).__name__}.from_pretrained(...)` or `.from_config(...)`."
        )

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | os.PathLike | PreTrainedModel, *model_args: Any, **kwargs: Any
    ) -> ILQLForCausalLM:
        """
        Args:
            pretrained_model_name_or_path (`str` or `PreTrainedModel`):
                A plain causal language model (fresh heads are put on it) or one saved with ILQL heads, by name or
                directory; or a live causal language model.
            kwargs:
                Fields of [`ILQLCausalLMConfig`] (`head_type`, `num_q_heads`, `beta`, ...), and whatever
                [`~transformers.PreTrainedModel.from_pretrained`] takes.
        """
        head_arguments = {name: kwargs.pop(name) for name in HEAD_ARGUMENTS if name in kwargs}
        if not isinstance(pretrained_model_name_or_path, (str, os.PathLike)):
            if model_args or kwargs:
                raise ValueError(f"A live model takes no loading arguments, got {sorted(kwargs)}.")
            return ILQLForCausalLM.from_base(pretrained_model_name_or_path, **head_arguments)
        config = kwargs.get("config")
        if config is None:
            names = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder", "gguf_file")
            loading = {name: kwargs[name] for name in (*names, "trust_remote_code") if name in kwargs}
            config = AutoConfig.from_pretrained(pretrained_model_name_or_path, **loading)
        if isinstance(config, ILQLCausalLMConfig):
            return ILQLForCausalLM.from_pretrained(
                pretrained_model_name_or_path, *model_args, **kwargs, **head_arguments
            )
        base = AutoModelForCausalLM.from_pretrained(pretrained_model_name_or_path, *model_args, **kwargs)
        return ILQLForCausalLM.from_base(base, **head_arguments)

    @classmethod
    def from_config(cls, config: PreTrainedConfig, **kwargs: Any) -> ILQLForCausalLM:
        """
        A model with random weights.

        Args:
            config (`PreTrainedConfig`): An [`ILQLCausalLMConfig`], or the configuration of a causal language model.
            kwargs: Fields of [`ILQLCausalLMConfig`], if `config` is not one.
        """
        if isinstance(config, ILQLCausalLMConfig):
            if kwargs:
                raise ValueError(f"{sorted(kwargs)} are set in the configuration, not beside it.")
            return ILQLForCausalLM(config)
        head_arguments = {name: kwargs.pop(name) for name in HEAD_ARGUMENTS if name in kwargs}
        return ILQLForCausalLM.from_base(AutoModelForCausalLM.from_config(config, **kwargs), **head_arguments)


__all__ = ["AutoModelForCausalLMWithILQLHeads", "CausalILQLOutput", "ILQLForCausalLM"]
