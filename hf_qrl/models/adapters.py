# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""Adapters (PEFT) on models with heads: their files, and how they are loaded again."""

import json
import os
from collections.abc import Callable, Iterable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.utils import CONFIG_NAME, GENERATION_CONFIG_NAME, cached_file

from .sharding import gathered


# The module of the heads, which an adapter keeps a whole copy of.
HEADS = "heads"


class AdapterWithHeads:
    """
    What is added to the models of PEFT, so that an adapter can be loaded alone.

    Its own files say nothing of the heads but their weights; the configuration of the model with heads says the rest.
    """

    def save_pretrained(self, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> None:
        """As [`~peft.PeftModel.save_pretrained`], with the configuration of the model under the adapter."""
        super().save_pretrained(save_directory, *args, **kwargs)  # type: ignore[misc]
        if kwargs.get("is_main_process", True):
            save_configuration(self, save_directory)

    def merge_and_unload(self, *args: Any, **kwargs: Any) -> Any:
        """As that of PEFT's models; the result has no name until it is saved, for its weights are those of no file."""
        names = kwargs.get("adapter_names")
        if names is not None and list(names) != list(self.active_adapters):  # type: ignore[attr-defined]
            raise ValueError(
                f"The heads are those of the active adapter {self.active_adapters}, "  # type: ignore[attr-defined]
                f"and {names} would be merged. Activate it first: `model.set_adapter(...)`."
            )
        model = self.base_model.merge_and_unload(*args, **kwargs)  # type: ignore[attr-defined]
        model.name_or_path = model.config._name_or_path = ""
        model.made_from_base = False
        return model

    def add_weighted_adapter(self, *args: Any, **kwargs: Any) -> Any:
        """Refused."""
        raise ValueError(
            "Adapters with heads cannot be combined: PEFT would combine their layers and leave the heads."
        )


def save_configuration(model: Any, directory: str | os.PathLike) -> None:
    """Writes the configuration of the model under the adapters beside each of them."""
    base = model.get_base_model()
    for name in model.peft_config:
        folder = Path(directory) / ("" if name == "default" else name)
        base.config.save_pretrained(folder)
        if base.generation_config is not None:
            base.generation_config.save_pretrained(folder)


@cache
def adapter_class(task_type: str) -> Any:
    """PEFT's class for models of a task, with what [`AdapterWithHeads`] adds."""
    peft = import_module("peft")
    parent = {"CAUSAL_LM": peft.PeftModelForCausalLM, "SEQ_2_SEQ_LM": peft.PeftModelForSeq2SeqLM}[task_type]
    return type(f"{parent.__name__}WithHeads", (AdapterWithHeads, parent), {"__module__": __name__})


def task_type_of(model: Any) -> str:
    return "SEQ_2_SEQ_LM" if model.config.is_encoder_decoder else "CAUSAL_LM"


@torch.no_grad()
def silence_original_heads(model: Any) -> None:
    """
    Sets the heads that act while the adapter is disabled to zero, if the model under it is a plain language model with
    fresh heads. They are in no file; with Q = V = 0 the policy without the adapter is that language model itself, the
    same after every loading. (`"tied"` heads without a stem have no such zero: their Q is the logits then.)
    """
    base = model.get_base_model()
    if base.made_from_base:
        original = base.heads.original_module
        with gathered(original.parameters(), modify=True):
            for tensor in (*original.parameters(), *original.buffers()):
                tensor.zero_()


def refuse_mixture(directory: str | os.PathLike) -> None:
    """Raises a `ValueError` for a directory with an adapter and a whole model, of which one is of another run."""
    directory = Path(directory)
    whole = [name for name in ("model.safetensors", "model.safetensors.index.json") if (directory / name).is_file()]
    if whole and (directory / "adapter_config.json").is_file():
        raise ValueError(
            f"The directory {str(directory)!r} holds both an adapter ('adapter_config.json') and a whole model "
            f"({whole[0]!r}), left by different runs. Remove the files of the one that is not meant."
        )


def load_adapter(
    load: Callable[..., Any],
    config_class: Any,
    name: str | os.PathLike,
    config_file: str | os.PathLike,
    head_fields: Iterable[str],
    head_arguments: dict[str, Any],
    loading: dict[str, Any],
    base_name: str | os.PathLike | None = None,
    is_trainable: bool = False,
    **kwargs: Any,
) -> Any:
    """
    A model with an adapter, from the files of the adapter.

    Args:
        load (`Callable`): Loads the model under the adapter, a `from_pretrained`.
        config_class (`type`): The class of its configuration.
        name (`str` or `os.PathLike`): Name or directory of the adapter.
        config_file (`str` or `os.PathLike`): Its `adapter_config.json` on this machine.
        head_fields (iterable of `str`): What of the saved configuration describes the heads.
        head_arguments (`dict`): Such fields as the caller wants them.
        loading (`dict`): Which files of the Hub are meant, and how to get them.
        base_name (`str` or `os.PathLike`, *optional*): The model under the adapter, if not where the adapter says.
        is_trainable (`bool`): Whether the adapter is to be trained on.
        kwargs: Further arguments for loading the model under the adapter.

    Returns:
        `peft.PeftModel`: PEFT's model, with the model with heads in it.
    """
    peft = import_module("peft")
    # What of the Hub is needed lies together on this machine when this has been fetched.
    directory, title = Path(config_file).parent, str(name)
    refuse_mixture(directory)
    peft_config = peft.PeftConfig.from_pretrained(str(directory))
    if HEADS not in (peft_config.modules_to_save or []):
        raise ValueError(
            f"The adapter {title!r} has no heads. To put heads on what it adapts, merge it "
            "(`peft.AutoPeftModelForCausalLM.from_pretrained(...).merge_and_unload()`), save the result, and load "
            "that; then train with `ILQLTrainer(..., peft_config=...)`."
        )
    cached_file(title, "adapter_model.safetensors", **loading)
    for optional in (CONFIG_NAME, GENERATION_CONFIG_NAME):
        cached_file(title, optional, _raise_exceptions_for_missing_entries=False, **loading)
    base_name = base_name or peft_config.base_model_name_or_path
    if not base_name:
        raise ValueError(
            f"The adapter {title!r} does not say which model it was trained on (its `base_model_name_or_path` is "
            "empty): pass `base_model_name_or_path=`."
        )
    config = read_configuration(config_class, directory, title)
    if config is not None:
        config.check_kind_of_heads(head_arguments, title)
        head_arguments = {**{field: getattr(config, field) for field in head_fields}, **head_arguments}
    elsewhere = {key: loading[key] for key in loading if key not in ("revision", "subfolder")}
    if peft_config.revision:
        elsewhere["revision"] = peft_config.revision
    try:
        base = load(base_name, **elsewhere, **kwargs, **head_arguments)
    except OSError as error:
        raise OSError(
            f"The adapter {title!r} was trained on {str(base_name)!r}, which cannot be loaded: {error} If it is "
            "somewhere else now, pass `base_model_name_or_path=`."
        ) from error
    check_base(base, base_name, title, config)
    peft_config.inference_mode = not is_trainable
    model = adapter_class(task_type_of(base))(base, peft_config)
    check_heads(model, peft, title, directory)
    result = model.load_adapter(str(directory), "default", is_trainable=is_trainable)
    if result.missing_keys or result.unexpected_keys:
        raise ValueError(
            f"The adapter {title!r} does not fit {str(base_name)!r}: {len(result.missing_keys)} of its weights are "
            f"missing ({', '.join(result.missing_keys[:3])}) and {len(result.unexpected_keys)} are left over "
            f"({', '.join(result.unexpected_keys[:3])})."
        )
    silence_original_heads(model)
    if (directory / GENERATION_CONFIG_NAME).is_file():
        model.generation_config = base.generation_config = GenerationConfig.from_pretrained(str(directory))
    return model


def read_configuration(config_class: Any, directory: Path, name: str) -> Any:
    """The configuration of the model with heads that lies beside an adapter, or None."""
    file = directory / CONFIG_NAME
    content = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    model_type = content.get("model_type", "")
    if model_type == config_class.model_type:
        return config_class.from_dict(content)
    if model_type.startswith("hf_qrl_"):
        raise ValueError(
            f"The adapter {name!r} is one of a model of type {model_type!r}, whose heads it holds, and one of type "
            f"{config_class.model_type!r} is asked for. Load it with the class it was trained with."
        )
    return None


def check_base(base: Any, base_name: str | os.PathLike, name: str, config: Any) -> None:
    """Raises a `ValueError` if this is not the model that the adapter was trained on."""
    if isinstance(base, AdapterWithHeads):
        raise ValueError(
            f"The adapter {name!r} was trained on {str(base_name)!r}, which is an adapter itself. Merge that one, "
            "save the result, and pass it as `base_model_name_or_path=`."
        )
    if config is None:
        if base.made_from_base:
            raise ValueError(
                f"Beside the adapter {name!r} there is no 'config.json' of a model with heads, and its base "
                f"{str(base_name)!r} is a plain language model: what kind of heads these are is unknown. Save the "
                "adapter with `trainer.save_model()`, or `model.get_base_model().config` beside it."
            )
        return
    saved, found = (x.get_text_config().vocab_size for x in (config, base.config))
    if saved != found:
        raise ValueError(
            f"The adapter {name!r} was trained on a vocabulary of {saved} tokens, and {str(base_name)!r} has {found}: "
            "its embeddings were resized before training, and the new ones are not in the adapter. Save the resized "
            "model, and train an adapter on that."
        )


def check_heads(model: Any, peft: Any, name: str, directory: Path) -> None:
    """Raises a `ValueError` unless the file of the adapter holds every tensor of the heads, and no others."""
    prefix = f"base_model.model.{HEADS}."
    expected = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
    saved = peft.load_peft_weights(str(directory), device="cpu")
    expected, saved = (
        {key: tensor.shape for key, tensor in tensors.items() if key.startswith(prefix)}
        for tensors in (expected, saved)
    )
    faults = {
        "are missing": expected.keys() - saved.keys(),
        "are left over": saved.keys() - expected.keys(),
        "have another shape": {key for key in expected.keys() & saved.keys() if expected[key] != saved[key]},
    }
    if any(faults.values()):
        names = {
            what: [key.removeprefix("base_model.model.") for key in sorted(keys)] for what, keys in faults.items()
        }
        listing = "; ".join(
            f"{len(keys)} weights {what} ({', '.join(keys[:3])})" for what, keys in names.items() if keys
        )
        raise ValueError(
            f"The adapter {name!r} does not hold these heads: {listing}. Load it with the configuration and the base "
            "model it was trained with."
        )


__all__ = [
    "HEADS",
    "AdapterWithHeads",
    "adapter_class",
    "load_adapter",
    "refuse_mixture",
    "save_configuration",
    "silence_original_heads",
    "task_type_of",
]
