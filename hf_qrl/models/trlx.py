# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""
Checkpoints saved by trlX: a language model under `base_model.`, and two-layer heads under `ilql_heads.`, or a value
head alone under `v_head.` where it was trained by PPO.
"""

import json
import os
import pickle
import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import GenerationConfig, PreTrainedConfig
from transformers.utils import GENERATION_CONFIG_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_NAME, cached_file
from transformers.utils.hub import has_file


BASE, ILQL_HEADS, VALUE_HEAD = "base_model.", "ilql_heads.", "v_head."
# A head of trlX is a `Sequential` of a linear layer, a ReLU and a linear layer.
NAMES = [
    (re.compile(r"(?:ilql_heads\.)?v_head\.0\.(weight|bias)"), r"v.stem.0.\1"),
    (re.compile(r"(?:ilql_heads\.)?v_head\.2\.(weight|bias)"), r"v.projection.\1"),
    (re.compile(r"ilql_heads\.q_heads\.(\d+)\.0\.(weight|bias)"), r"q.\1.stem.0.\2"),
    (re.compile(r"ilql_heads\.q_heads\.(\d+)\.2\.(weight|bias)"), r"q.\1.\2"),
    (re.compile(r"ilql_heads\.target_q_heads\.(\d+)\.0\.(weight|bias)"), r"target_q.\1.stem.0.\2"),
    (re.compile(r"ilql_heads\.target_q_heads\.(\d+)\.2\.(weight|bias)"), r"target_q.\1.\2"),
]
# What has to be there, by the prefix of the heads.
PARTS = {ILQL_HEADS: ("v.", "q.0.", "target_q.0."), VALUE_HEAD: ("v.",)}


def read_trlx(name: str | os.PathLike, heads: str, **loading: Any) -> dict[str, torch.Tensor] | None:
    """
    The weights of a checkpoint saved by trlX with such heads, or None for any other.

    Args:
        name (`str`): Directory, or repository of the Hub.
        heads (`str`): How the names of the heads' weights begin, `"ilql_heads."` or `"v_head."`.
        loading: `cache_dir`, `token`, `revision`, `subfolder` and so on, as in `from_pretrained`.

    Raises:
        `ValueError`: if a pickle holds anything but tensors.
    """
    folder = loading.pop("subfolder", None) or ""

    def exists(filename: str) -> bool:
        return has_file(name, os.path.join(folder, filename), **_where(loading))

    def fetch(filename: str) -> str:
        return str(cached_file(name, filename, subfolder=folder, **loading))

    # The first that is there is the one that `from_pretrained` would read.
    for single in (SAFE_WEIGHTS_NAME, WEIGHTS_NAME):
        if exists(single):
            files = [single]
            break
        if exists(f"{single}.index.json"):
            weight_map = json.loads(Path(fetch(f"{single}.index.json")).read_text(encoding="utf-8"))["weight_map"]
            if not any(key.startswith(heads) for key in weight_map):
                return None
            files = sorted(set(weight_map.values()))
            break
    else:
        return None
    if single == SAFE_WEIGHTS_NAME:
        with ExitStack() as stack:
            opened = [stack.enter_context(safe_open(fetch(filename), "pt")) for filename in files]
            if not any(key.startswith(heads) for file in opened for key in file.keys()):
                return None
            return {key: file.get_tensor(key) for file in opened for key in file.keys()}
    state_dict: dict[str, torch.Tensor] = {}
    for filename in files:
        try:
            state_dict |= torch.load(fetch(filename), map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise ValueError(
                f"{filename} of {str(name)!r} holds more than tensors, and running what a pickle says is not safe. If "
                "you trust it, load it yourself with `torch.load(..., weights_only=False)` and save its tensors alone."
            ) from error
    return state_dict if any(key.startswith(heads) for key in state_dict) else None


def split_trlx(
    state_dict: dict[str, torch.Tensor], prefix: str
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Weights of the language model and of the heads, by the names they have in `transformers` and here."""
    base = {key.removeprefix(BASE): tensor for key, tensor in state_dict.items() if key.startswith(BASE)}
    heads = {}
    for key, tensor in state_dict.items():
        if not key.startswith(prefix):
            continue
        matches = [pattern.sub(new, key) for pattern, new in NAMES if pattern.fullmatch(key)]
        if not matches:
            raise ValueError(f"Unknown weight {key!r} among the heads of a trlX checkpoint.")
        heads[matches[0]] = tensor
    other = [key for key in state_dict if not key.startswith((BASE, prefix))]
    if other or not base:
        raise ValueError(
            f"A checkpoint with {prefix}* weights needs its language model under {BASE}*, and all else is unknown; "
            f"got {len(base)} such weights and {len(other)} others ({', '.join(sorted(other)[:3])})."
        )
    return base, heads


def from_trlx(
    model_class: Any,
    name: str | os.PathLike,
    state_dict: dict[str, torch.Tensor],
    config: PreTrainedConfig,
    head_arguments: dict[str, Any],
    loading: dict[str, Any],
    **kwargs: Any,
) -> Any:
    """
    A model with the weights of a trlX checkpoint: same logits, values and Q-values.

    Args:
        model_class: A class of models with such heads, such as [`ILQLForCausalLM`].
        name (`str`): Where the checkpoint lies.
        state_dict (`dict`): What [`read_trlx`] returned.
        config (`PreTrainedConfig`): Configuration of the language model.
        head_arguments (`dict`): Fields that describe the heads; their shapes are those of the checkpoint.
        loading (`dict`): Where to find files of the checkpoint, as for [`read_trlx`].
        kwargs: Arguments of `from_pretrained` of the language model, such as `dtype`.
    """
    if f"{VALUE_HEAD}summary.weight" in state_dict:
        raise ValueError(
            f"{str(name)!r} was saved by TRL, whose value head is a single linear layer (`v_head.summary`). That of "
            f"{model_class.__name__} has a hidden layer and cannot represent it. Load the language model alone with "
            f"`{model_class.base_auto_class.__name__}.from_pretrained`, and pass that to get a fresh value head."
        )
    prefix = model_class.trlx_prefix
    weights, heads = split_trlx(state_dict, prefix)
    missing = [part for part in PARTS[prefix] if not any(key.startswith(part) for key in heads)]
    if missing:
        raise ValueError(
            f"The trlX checkpoint {str(name)!r} lacks heads ({', '.join(missing)}); there are {sorted(heads)[:6]}. It "
            "was not saved whole."
        )
    stem = heads["v.stem.0.weight"]
    shape: dict[str, Any] = {"head_expansion": stem.shape[0] // stem.shape[1]}
    if prefix == ILQL_HEADS:
        num_q_heads = sum(bool(re.fullmatch(r"q\.\d+\.weight", key)) for key in heads)
        shape |= {"head_type": "mlp", "head_stem": "relu", "num_q_heads": num_q_heads}
    wrong = {key: number for key, number in head_arguments.items() if shape.get(key, number) != number}
    if wrong:
        raise ValueError(f"The heads of the trlX checkpoint {str(name)!r} are {shape}; leave out {wrong}.")
    with torch.device("meta"):  # only the Auto class knows the architecture, and it takes no state dict
        architecture: Any = type(model_class.base_auto_class.from_config(config))
    kwargs |= {"config": config, "state_dict": weights, "output_loading_info": True}
    base, info = architecture.from_pretrained(None, **kwargs)
    if info["missing_keys"] or info["mismatched_keys"]:
        raise ValueError(f"The trlX checkpoint {str(name)!r} lacks weights of its {architecture.__name__}: {info}.")
    base.name_or_path = base.config._name_or_path = str(name)
    if has_file(name, os.path.join(loading.get("subfolder") or "", GENERATION_CONFIG_NAME), **_where(loading)):
        base.generation_config = GenerationConfig.from_pretrained(name, **loading)
    model = model_class.from_base(base, **{**head_arguments, **shape})
    if getattr(config, "scale_decoder_outputs", False):
        # trlX's heads read the state before T5 scales it by d^-0.5, the LM head's input is the state after.
        for key in heads:
            if key.endswith("stem.0.weight"):
                heads[key] = heads[key].float() * config.d_model**0.5
    model.heads.load_state_dict(heads)
    return model


def _where(loading: dict[str, Any]) -> dict[str, Any]:
    return {key: loading[key] for key in ("revision", "token", "local_files_only", "cache_dir") if key in loading}


__all__ = ["from_trlx", "read_trlx"]
