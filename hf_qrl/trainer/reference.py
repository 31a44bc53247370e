# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""The reference policy of PPO: what the policy was before it was trained, at the least cost."""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from peft import LoraConfig, PeftConfig
from transformers.integrations import is_deepspeed_zero3_enabled

from .weight_copy import WeightCopy


class ReferencePolicy(Protocol):
    """Evaluates a `loss_fn` in the forward of the reference policy; every process must call it."""

    def __call__(self, inputs: dict[str, Any], loss_fn: Callable[..., Any]) -> Any: ...


class WithoutAdapter:
    """The language model under an adapter that began as no change of it."""

    def __init__(self, trainer: Any):
        self.trainer = trainer

    @torch.no_grad()
    def __call__(self, inputs: dict[str, Any], loss_fn: Callable[..., Any]) -> Any:
        with self.trainer.accelerator.unwrap_model(self.trainer.model).disable_adapter():
            return self.trainer.model_wrapped(**inputs, loss_fn=loss_fn).loss


class CopiedWeights:
    """The model with a copy of the weights that are trained."""

    def __init__(self, trainer: Any):
        self.accelerator = trainer.accelerator
        self.copy = WeightCopy(self.accelerator.unwrap_model(trainer.model))

    def __call__(self, inputs: dict[str, Any], loss_fn: Callable[..., Any]) -> Any:
        with self.accelerator.autocast():  # as around the forward of the policy
            return self.copy.forward(**inputs, loss_fn=loss_fn).loss


class SeparateModel:
    """A model of its own, with a value head that is not read; frozen."""

    def __init__(self, trainer: Any, model: Any):
        model.requires_grad_(False)
        model.eval()
        if trainer.is_deepspeed_enabled:
            from trl.models.utils import prepare_deepspeed

            self.model = prepare_deepspeed(model, trainer.accelerator)
        else:
            self.model = trainer.accelerator.prepare_model(model, evaluation_mode=True)

    @torch.no_grad()
    def __call__(self, inputs: dict[str, Any], loss_fn: Callable[..., Any]) -> Any:
        return self.model(**inputs, loss_fn=loss_fn).loss


def reference_policy(trainer: Any, ref_model: Any, fresh_adapter: bool) -> ReferencePolicy | None:
    """
    The reference policy of a trainer whose model is about to be trained; None where nothing is penalised.

    Args:
        trainer ([`PPOTrainer`]): The trainer.
        ref_model ([`ValueHeadForCausalLM`] or its twin, *optional*): A model to stay close to that is another one.
        fresh_adapter (`bool`): Whether the model has an adapter that was put on it just now.
    """
    if trainer.args.kl_coef == 0:
        return None
    if ref_model is not None:
        return SeparateModel(trainer, ref_model)
    if fresh_adapter:
        return WithoutAdapter(trainer)
    if is_deepspeed_zero3_enabled():
        raise ValueError(
            "ZeRO-3 spreads the weights over the processes, where no copy of them can be kept for the reference "
            "policy. Pass it as `ref_model`, train a fresh adapter (`peft_config=`), or set `kl_coef=0`."
        )
    return CopiedWeights(trainer)


def begins_as_no_change(peft_config: PeftConfig | None) -> bool:
    """Whether an adapter, as long as it is fresh, leaves a model as it is, and does so again where it is disabled."""
    return (
        isinstance(peft_config, LoraConfig)
        and peft_config.bias == "none"
        and peft_config.init_lora_weights in (True, "gaussian")
    )


__all__ = ["ReferencePolicy", "begins_as_no_change", "reference_policy"]
