# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""Whole parameters where DeepSpeed ZeRO-3 or FSDP2 keep a part of each on every process."""

import json
import os
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch.distributed.tensor import DTensor
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file


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


def check_ties(model: Any, name: str | os.PathLike, **loading: Any) -> None:
    """
    Raises a `ValueError` if loading under ZeRO-3 has tied weights that differ in the checkpoint: transformers ties
    what its configuration calls tied unless the two differ, and there both are empty when they are compared. Flan-T5
    and mT5 have such an LM head of their own.

    Args:
        model (`PreTrainedModel`): What was loaded.
        name (`str`): From where.
        loading: `revision`, `token` and so on, as in `from_pretrained`.
    """
    if not is_deepspeed_zero3_enabled():
        return
    optional = {"_raise_exceptions_for_missing_entries": False, **loading}
    files = {}
    index = cached_file(name, SAFE_WEIGHTS_INDEX_NAME, **optional)
    if index is not None:
        weight_map = json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"]
        files = {key: cached_file(name, filename, **loading) for key, filename in weight_map.items()}
    elif (weights := cached_file(name, SAFE_WEIGHTS_NAME, **optional)) is not None:
        with safe_open(weights, "pt") as file:
            files = dict.fromkeys(file.keys(), weights)

    def read(key: str) -> torch.Tensor:
        with safe_open(files[key], "pt") as file:
            return file.get_tensor(key)

    for pair in model.all_tied_weights_keys.items():
        if all(key in files for key in pair) and not torch.equal(*map(read, pair)):
            raise ValueError(
                f"In the checkpoint {str(name)!r} {pair[0]} and {pair[1]} differ, and transformers has tied them as "
                "it loaded the model under ZeRO-3: one is lost. Load the model before the training arguments are made "
                "and pass it live, or use ZeRO-2."
            )


__all__ = ["check_ties", "full_tensor", "gathered", "is_partitioned"]
