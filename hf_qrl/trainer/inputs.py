# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""What users hand to a trainer: names or live models, tokenizers, datasets; loaded, checked and made ready."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, IterableDataset
from peft import PeftConfig, PeftModel
from torch import nn
from transformers import (
    AutoConfig,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    set_seed,
)
from transformers.utils import CONFIG_NAME, cached_file
from transformers.utils.peft_utils import find_adapter_config_file

from ..models.modeling_base import HUB_ARGUMENTS, PreTrainedModelWithHeads
from ..models.modeling_q import QPreTrainedModel
from .base_config import BaseConfig
from .q_learning_config import QLearningConfig


def check_dataset_type(name: str, dataset: Any) -> None:
    """Raises a `ValueError` for anything that is neither a dataset nor None."""
    if dataset is not None and not isinstance(dataset, (Dataset, IterableDataset)):
        raise ValueError(
            f"`{name}` must be a `datasets.Dataset` or `datasets.IterableDataset`, got {type(dataset).__name__}. "
            "Build one with `Dataset.from_list(...)` or `load_dataset(...)` (and take one of its splits)."
        )


def load_model(
    model: str | PreTrainedModel,
    args: BaseConfig,
    put_heads: Callable[[str | PreTrainedModel, PreTrainedConfig, dict[str, Any]], Any],
    quantization_config: Any = None,
) -> Any:
    """
    The model with its heads, perhaps with an adapter; fresh heads are drawn with the run's seed.

    Args:
        model (`str` or `PreTrainedModel`): A name, or a live model with or without heads.
        args ([`BaseConfig`]): Training arguments.
        put_heads (`Callable`):
            Called as `put_heads(model, config, arguments)` for a name or a live model without heads; loads a name, or
            puts heads on the model.
        quantization_config (`BitsAndBytesConfig`, *optional*): For a model given by name.
    """
    if quantization_config is not None and not isinstance(model, str):
        raise ValueError(
            "`quantization_config` goes with a model given by name, and the model is live: load it quantised."
        )
    if isinstance(model, (PreTrainedModelWithHeads, PeftModel)):
        if args.model_init_kwargs:
            raise ValueError("`model_init_kwargs` goes with a model given by name, and the model is live.")
        return model
    set_seed(args.seed)
    # `TrainingArguments` has parsed what the command line gives as JSON.
    model_init_kwargs: dict[str, Any] = dict(args.model_init_kwargs or {})  # type: ignore[arg-type]
    if isinstance(model, str):
        model_init_kwargs.setdefault("dtype", torch.float32)
        model_init_kwargs.setdefault("is_trainable", True)  # if it is an adapter
        if quantization_config is not None:
            if "quantization_config" in model_init_kwargs:
                raise ValueError("`quantization_config` is given twice, also in `model_init_kwargs`; leave one out.")
            model_init_kwargs["quantization_config"] = quantization_config
    return put_heads(model, configuration_of(model, model_init_kwargs), model_init_kwargs)


def configuration_of(model: str | PreTrainedModel, model_init_kwargs: dict[str, Any]) -> Any:
    """The configuration of a live model, of one of that name, or of the one under an adapter of that name."""
    if not isinstance(model, str):
        return model.config
    if model_init_kwargs.get("config") is not None:
        return model_init_kwargs["config"]
    loading = {name: model_init_kwargs[name] for name in HUB_ARGUMENTS if name in model_init_kwargs}
    more = {name: model_init_kwargs[name] for name in ("gguf_file", "trust_remote_code") if name in model_init_kwargs}
    adapter = find_adapter_config_file(model, **loading)
    if (
        adapter is not None
        and cached_file(model, CONFIG_NAME, _raise_exceptions_for_missing_entries=False, **loading) is None
    ):
        peft_config = PeftConfig.from_pretrained(str(Path(adapter).parent))
        model = model_init_kwargs.get("base_model_name_or_path") or str(peft_config.base_model_name_or_path)
        loading.pop("revision", None)
    return AutoConfig.from_pretrained(model, **loading, **more)


def decoder_start_token_id(model: Any) -> int | None:
    """The token that the decoder of an encoder-decoder model starts with; None for a causal model."""
    if not model.config.is_encoder_decoder:
        return None
    start, generated = model.config.decoder_start_token_id, model.generation_config.decoder_start_token_id
    if start is None or generated not in (None, start):
        raise ValueError(
            f"The decoder of {type(model.base).__name__} must start with one and the same token in training and in "
            f"generation; `model.config.decoder_start_token_id` is {start}, that of `model.generation_config` "
            f"{generated}. Set both."
        )
    return start


def load_tokenizer(model: Any, given: Any = None) -> PreTrainedTokenizerBase:
    """
    The tokenizer saved with the model, or else that of the language model under the heads. If the model was `given` by
    name, that may be the name of an adapter, which the model itself does not know.
    """
    error = None
    given = given if isinstance(given, str) else None
    for name in (given, model.config._name_or_path, model.config.get_text_config()._name_or_path):
        if name:
            try:
                return AutoTokenizer.from_pretrained(name)
            except (OSError, ValueError) as cause:
                error = cause
    raise ValueError("The data is text, and there is no tokenizer with the model: pass `processing_class`.") from error


def check_q_heads(model: Any) -> None:
    """Raises a `ValueError` for a model with a value head only."""
    if not isinstance(model, QPreTrainedModel):
        raise ValueError(
            f"A {type(model).__name__} has no Q-heads for Q-learning to train. Start from its language model "
            "(`model.base`), or train it with `PPOTrainer`."
        )


def freeze_and_check(model: Any, args: QLearningConfig) -> None:
    """Freezes what is not trained and refuses a model that cannot be trained."""
    if args.freeze_base:
        for parameter in model.language_model_parameters():
            parameter.requires_grad_(False)
    if args.disable_dropout:
        disable_dropout(model)
    dtypes = {x.dtype for x in model.heads.target_q.buffers()}
    if dtypes - {torch.float32, torch.float64}:
        raise ValueError(
            f"The target heads are {sorted(map(str, dtypes))}, in which small steps are lost; they must be float32. "
            "Do not cast a model with heads as a whole; load it with `dtype=`, which casts the language model."
        )
    trained = any(x.requires_grad for x in model.language_model_parameters())
    if trained and model.acts_by_language_model and not args.clones:
        raise ValueError(
            f"With `{args.cloning_argument}=0` nothing holds the language model to the data while its weights serve "
            "the heads, and the policy's prior would drift. Set `freeze_base=True` to train the heads only, or raise "
            f"`{args.cloning_argument}`."
        )


def pad_token_of(tokenizer: PreTrainedTokenizerBase | None, model: Any) -> int:
    """The token that fills up rows; raises a `ValueError` if the model does not know it."""
    pad_token_id = 0 if tokenizer is None or tokenizer.pad_token_id is None else tokenizer.pad_token_id
    vocab_size = model.get_output_embeddings().out_features
    if pad_token_id >= vocab_size:
        raise ValueError(
            f"The tokenizer's pad token {pad_token_id} lies outside the model's vocabulary of {vocab_size} tokens: "
            "call `model.resize_token_embeddings` first."
        )
    return pad_token_id


def disable_dropout(model: nn.Module) -> None:
    """Sets every dropout probability to zero."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        # Attention keeps its probability as a number, and so do stacks that drop whole layers.
        for name, number in list(vars(module).items()):
            if ("dropout" in name or "layerdrop" in name) and isinstance(number, float):
                setattr(module, name, 0.0)


__all__ = [
    "check_dataset_type",
    "check_q_heads",
    "disable_dropout",
    "freeze_and_check",
    "load_model",
    "load_tokenizer",
    "pad_token_of",
]
