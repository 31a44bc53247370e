# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""What lies between the last hidden state of a language model and its logits."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel


# One at a time: two that overlap would restore each other's forward.
_LENDING = threading.RLock()


class LMHead:
    """
    The projection of a language model onto its vocabulary, as the losses use it: in chunks, on chosen rows.

    Besides the linear layer, three things lie between a hidden state and a logit in some models: a scale (Cohere,
    Granite), a soft cap (Gemma), and a bias beside the layer (BART).
    """

    def __init__(self, base: PreTrainedModel):
        self.module = base.get_output_embeddings()
        self.shared = getattr(base.get_input_embeddings(), "weight", None) is self.module.weight
        self.extra_bias = dict(base.named_buffers(recurse=False)).get("final_logits_bias")
        config = base.config.get_text_config()
        self.softcap = getattr(config, "final_logit_softcapping", None)
        self.scale = getattr(config, "logit_scale", None) or 1.0 / (getattr(config, "logits_scaling", None) or 1.0)

    def lend(self, rows: torch.Tensor, function: Callable[[torch.Tensor, torch.Tensor], Any]) -> Any:
        """
        `function(rows, weight)`. Where the weight lies elsewhere between forwards (DeepSpeed ZeRO-3, FSDP2, offloading
        by accelerate) it runs in the place of the layer's own forward, around which it is fetched and put back.
        """
        module = self.module
        offloaded = "_hf_hook" in vars(module)
        if not (offloaded or isinstance(module, FSDPModule) or hasattr(module.weight, "ds_numel")):
            return function(rows, module.weight)
        # accelerate's hook is in `forward` itself, and calls what was there before.
        name = "_old_forward" if offloaded else "forward"
        with _LENDING:
            own, original, thread = vars(module).get(name), getattr(module, name), threading.get_ident()

            def borrowed(given: torch.Tensor) -> Any:
                if threading.get_ident() != thread:
                    return original(given)
                return function(rows if self.shared else given, module.weight)

            setattr(module, name, borrowed)
            try:
                # FSDP2 reduces the gradients of a module once that of its input is there: too early, and without a
                # word, for a weight to which the input embedding has yet to add its own.
                return module(rows.detach() if self.shared else rows)
            finally:
                if own is None:
                    delattr(module, name)
                else:
                    setattr(module, name, own)

    def __call__(self, rows: torch.Tensor, evaluate: Callable[..., Any]) -> Any:
        """`evaluate(z, weight, bias, None, softcap=...)` with `z (N, d)` scaled such that logits are `W z + b`."""
        return self.lend(rows, partial(self._project, evaluate=evaluate))

    def _project(self, rows: torch.Tensor, weight: torch.Tensor, evaluate: Callable[..., Any]) -> Any:
        bias = self.module.bias
        if self.extra_bias is not None:
            extra = self.extra_bias.reshape(-1).to(weight.dtype)
            bias = extra if bias is None else bias + extra
        if torch.is_autocast_enabled(rows.device.type):
            # The largest product of a step runs in the precision that the linear layer itself would run in.
            dtype = torch.get_autocast_dtype(rows.device.type)
            weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
        z = rows.to(weight.dtype)
        if self.scale != 1.0:
            z = z * self.scale
        return evaluate(z, weight, bias, None, softcap=self.softcap)


@contextmanager
def capture_input(module: nn.Module, project: bool = True) -> Iterator[list[torch.Tensor]]:
    """
    Collects the inputs of a module: the hidden states as the LM head sees them, whatever the architecture. Calls of
    other threads, which may run the same model, are none of its business.

    With `project=False` the module itself gets no positions to project: `(B, 0, d)` in the place of `(B, n, d)`.
    """
    captured: list[torch.Tensor] = []
    thread = threading.get_ident()

    def hook(_module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
        if threading.get_ident() != thread:
            return None
        captured.append(args[0])
        return None if project else (args[0][:, :0].detach(), *args[1:])

    handle = module.register_forward_pre_hook(hook, prepend=True)
    try:
        yield captured
    finally:
        handle.remove()


__all__ = ["LMHead", "capture_input"]
