# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""What lies between the last hidden state of a language model and its logits."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel


class LMHead:
    """
    The projection of a language model onto its vocabulary, as the losses use it: in chunks, on chosen rows.

    Besides the linear layer, two things lie between a hidden state and a logit in some models: a scale (Cohere,
    Granite) and a soft cap (Gemma).
    """

    def __init__(self, base: PreTrainedModel):
        self.module = base.get_output_embeddings()
        config = base.config.get_text_config()
        self.softcap = getattr(config, "final_logit_softcapping", None)
        self.scale = getattr(config, "logit_scale", None) or 1.0 / (getattr(config, "logits_scaling", None) or 1.0)

    @property
    def weight(self) -> torch.Tensor:
        return self.module.weight

    def __call__(self, rows: torch.Tensor, evaluate: Callable[..., Any]) -> Any:
        """`evaluate(z, weight, bias, None, softcap=...)` with `z (N, d)` scaled such that logits are `W z + b`."""
        weight, bias = self.module.weight, self.module.bias
        if torch.is_autocast_enabled(rows.device.type):
            # The largest product of a step runs in the precision that the linear layer itself would run in.
            dtype = torch.get_autocast_dtype(rows.device.type)
            weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
        z = rows.to(weight.dtype)
        if self.scale != 1.0:
            z = z * self.scale
        return evaluate(z, weight, bias, None, softcap=self.softcap)


@contextmanager
def capture_input(module: nn.Module) -> Iterator[list[torch.Tensor]]:
    """
    Collects the inputs of a module: the hidden states as the LM head sees them, whatever the architecture. Calls of
    other threads, which may run the same model, are none of its business.
    """
    captured: list[torch.Tensor] = []
    thread = threading.get_ident()

    def hook(_module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        if threading.get_ident() == thread:
            captured.append(args[0])

    handle = module.register_forward_pre_hook(hook)
    try:
        yield captured
    finally:
        handle.remove()


__all__ = ["LMHead", "capture_input"]
