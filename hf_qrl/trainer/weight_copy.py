# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""A second set of weights for a model in training: of what is trained, the rest being shared."""

from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from .adapters import base_of


class ForwardOfClass(nn.Module):
    """
    A model with the `forward` of its class. That of the object may have accelerate's autocast around it, which must
    not be entered again within itself: autocast would stay on after it.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, **inputs: Any) -> Any:
        base = base_of(self.model)
        return type(base).forward(base, **inputs)


class WeightCopy:
    """
    A copy of the weights of a language model that are trained. Those that are not are shared with it: of an adapter
    only the adapter is there twice, of a model with frozen lower layers only the upper ones. Heads are not copied.

    Args:
        model (`PreTrainedModel` or `peft.PeftModel`): The model with its heads, not wrapped for several processes.
        dtype (`torch.dtype`, *optional*): Type of the copies; that of the weights if not given.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype | None = None):
        self.model = model
        heads = {id(x) for x in base_of(model).heads.parameters()}
        self.trained = {name: x for name, x in model.named_parameters() if x.requires_grad and id(x) not in heads}
        self.weights = {name: x.detach().to(dtype or x.dtype, copy=True) for name, x in self.trained.items()}

    @torch.no_grad()
    def forward(self, **inputs: Any) -> Any:
        """What `forward` of the model returns with the copied weights, in evaluation mode."""
        weights = {f"model.{name}": x.to(self.trained[name].dtype) for name, x in self.weights.items()}
        training = self.model.training
        self.model.eval()
        try:
            return functional_call(ForwardOfClass(self.model), weights, kwargs=inputs)
        finally:
            self.model.train(training)


__all__ = ["ForwardOfClass", "WeightCopy"]
