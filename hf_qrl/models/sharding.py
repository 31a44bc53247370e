# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""Whole parameters where DeepSpeed ZeRO-3 or FSDP2 keep a part of each on every process."""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module

import torch
from torch.distributed.tensor import DTensor
from transformers.integrations import is_deepspeed_zero3_enabled


def is_partitioned(parameter: torch.nn.Parameter) -> bool:
    """Whether this process holds a part of it only: FSDP2's are a type, DeepSpeed's are marked and empty."""
    return isinstance(parameter, DTensor) or (parameter.numel() == 0 and hasattr(parameter, "ds_numel"))


def gathered(parameters: Iterable[torch.nn.Parameter], modify: bool = False) -> AbstractContextManager:
    """
    Context in which parameters that ZeRO-3 has partitioned are whole on every process; all of them must enter it.

    Args:
        parameters (`Iterable` of `torch.nn.Parameter`): The parameters.
        modify (`bool`): Whether to keep, on leaving, what the first process wrote into them.
    """
    if not is_deepspeed_zero3_enabled():
        return nullcontext()
    zero = import_module("deepspeed").zero
    return zero.GatheredParameters(list(parameters), modifier_rank=0 if modify else None)


def full_tensor(parameter: torch.Tensor) -> torch.Tensor:
    """The whole of a parameter that FSDP2 has sharded; all processes must call it."""
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


__all__ = ["full_tensor", "gathered", "is_partitioned"]
