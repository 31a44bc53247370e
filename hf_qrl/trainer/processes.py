# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""Which ways of spreading a model and its training over processes are supported: the others are refused."""

import os
from typing import Any

import torch
from accelerate.utils import DistributedType, broadcast, str_to_bool
from torch import nn
from torch.distributed.tensor import DTensor

from .ilql_config import ILQLConfig


def fsdp_setting(args: ILQLConfig, name: str, default: Any) -> Any:
    """What the training arguments say of FSDP, or else `accelerate launch`, by way of the environment."""
    given = args.fsdp_plugin_args or {}
    return given.get(name, os.environ.get(f"FSDP_{name.removeprefix('fsdp_').upper()}", default))


def fsdp_is_asked_for(args: ILQLConfig) -> bool:
    return bool(args.fsdp) or str_to_bool(os.environ.get("ACCELERATE_USE_FSDP", "false")) == 1


def check_fsdp_settings(args: ILQLConfig) -> None:
    """Raises a `ValueError` for what must not even load a model."""
    if not fsdp_is_asked_for(args):
        return
    if int(fsdp_setting(args, "fsdp_version", 1)) == 1:
        raise ValueError(
            "FSDP of version 1 flattens the heads into one parameter with the language model and is not supported. "
            'Ask for version 2: `fsdp_config={"version": 2}`, or `fsdp_version: 2` in the configuration of '
            "`accelerate launch` (`hf_qrl/accelerate_configs/fsdp2.yaml`)."
        )
    if str_to_bool(str(fsdp_setting(args, "cpu_ram_efficient_loading", "false"))) == 1:
        raise ValueError(
            "`cpu_ram_efficient_loading` sends parameters from the first process to the others and has no place for "
            "the target heads, which are buffers. Set it to false."
        )


def check_processes(trainer: Any) -> None:
    """Raises a `ValueError` for a layout of processes that would not train what it says, or could not save it."""
    args, accelerator = trainer.args, trainer.accelerator
    if args.n_gpu > 1:
        raise ValueError(
            f"{args.n_gpu} GPUs are visible to one process, which would be `nn.DataParallel`. Start one "
            "process per GPU with `accelerate launch` or `torchrun`, or show it one GPU with CUDA_VISIBLE_DEVICES."
        )
    if fsdp_is_asked_for(args):
        if accelerator.distributed_type != DistributedType.FSDP:
            raise ValueError(
                f"FSDP is asked for, and accelerate runs {accelerator.distributed_type.value} in its place, as it "
                "does without accelerators. On CPUs train with plain data parallelism: leave out `fsdp`."
            )
        if trainer.bare_model.config.is_encoder_decoder:
            raise ValueError(
                "accelerate shards an encoder-decoder model such that its embedding, which encoder and decoder share, "
                "is in two units of FSDP2, which PyTorch refuses. Use ZeRO-3."
            )
        if "FULL_STATE_DICT" not in str(accelerator.state.fsdp_plugin.state_dict_type):
            raise ValueError(
                "With sharded state dicts of FSDP `save_model` writes no weights. Set `state_dict_type` to "
                '"FULL_STATE_DICT".'
            )
    deepspeed = getattr(args, "hf_deepspeed_config", None)
    gather = "zero_optimization.stage3_gather_16bit_weights_on_model_save"
    if deepspeed is not None and deepspeed.is_zero3() and not deepspeed.is_true(gather):
        raise ValueError(
            f"With ZeRO-3 a model is saved only if its weights are gathered for it. Set `{gather}` to true in the "
            "configuration of DeepSpeed (`zero3_save_16bit_model: true` in that of `accelerate launch`)."
        )
    parallelism = accelerator.parallelism_config
    sizes = {"tensor": trainer.get_tp_size()}
    if parallelism is not None:
        sizes |= {"context": parallelism.cp_size, "sequence": parallelism.sp_size}
    for kind, size in sizes.items():
        if size > 1:
            raise ValueError(
                f"The {kind} parallelism of {size} processes is not supported: heads and losses need whole rows and "
                "the whole output embedding. Use ZeRO-3 or FSDP2 for a model that does not fit one device."
            )
    if trainer.is_distributed_loading_by_transformers:
        raise ValueError(
            "The model was sharded while it was loaded, and its heads were not. Load it without a distributed "
            "configuration, and use ZeRO-3 or FSDP2 through the training arguments."
        )


@torch.no_grad()
def begin_alike(model: nn.Module, device: torch.device) -> None:
    """Gives every process the parameters of the first: FSDP2 would shard what each has, such as heads drawn apart."""
    for parameter in model.parameters():
        if not isinstance(parameter, DTensor):  # as they are where training goes on
            sent = parameter.to(device, copy=True)
            broadcast(sent)
            parameter.copy_(sent)


__all__ = ["begin_alike", "check_fsdp_settings", "check_processes"]
