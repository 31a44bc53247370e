# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""What users hand to a trainer: names or live models, tokenizers, datasets; loaded, checked and made ready."""

from typing import Any

import torch
from datasets import Dataset, IterableDataset
from torch import nn
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, set_seed

from ..models import AutoModelForCausalLMWithILQLHeads, ILQLForCausalLM
from .ilql_config import ILQLConfig


def check_dataset_type(name: str, dataset: Any) -> None:
    """Raises a `ValueError` for anything that is neither a dataset nor None."""
    if dataset is not None and not isinstance(dataset, (Dataset, IterableDataset)):
        raise ValueError(
            f"`{name}` must be a `datasets.Dataset` or `datasets.IterableDataset`, got {type(dataset).__name__}. "
            "Build one with `Dataset.from_list(...)` or `load_dataset(...)` (and take one of its splits)."
        )


def load_model(model: str | PreTrainedModel, args: ILQLConfig) -> ILQLForCausalLM:
    """The model with its heads; fresh heads are drawn with the run's seed."""
    if isinstance(model, ILQLForCausalLM):
        if args.model_init_kwargs:
            raise ValueError("`model_init_kwargs` goes with a model given by name, and the model is live.")
        return model
    set_seed(args.seed)
    # `TrainingArguments` has parsed what the command line gives as JSON.
    model_init_kwargs: dict[str, Any] = dict(args.model_init_kwargs or {})  # type: ignore[arg-type]
    if isinstance(model, str):
        model_init_kwargs.setdefault("dtype", torch.float32)
    return AutoModelForCausalLMWithILQLHeads.from_pretrained(model, **model_init_kwargs)


def load_tokenizer(model: ILQLForCausalLM) -> PreTrainedTokenizerBase:
    """The tokenizer saved with the model, or else that of the language model under the heads."""
    error = None
    for name in (model.config._name_or_path, model.config.text_config._name_or_path):
        if name:
            try:
                return AutoTokenizer.from_pretrained(name)
            except (OSError, ValueError) as cause:
                error = cause
    raise ValueError("The data is text, and there is no tokenizer with the model: pass `processing_class`.") from error


def freeze_and_check(model: ILQLForCausalLM, args: ILQLConfig) -> None:
    """Freezes what is not trained and refuses a model that cannot be trained."""
    if args.freeze_base:
        model.base.requires_grad_(False)
    if args.disable_dropout:
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
            # Attention keeps its probability as a number.
            for name, number in list(vars(module).items()):
                if "dropout" in name and isinstance(number, float):
                    setattr(module, name, 0.0)
    dtypes = {x.dtype for x in model.heads.target_q.buffers()}
    if dtypes - {torch.float32, torch.float64}:
        raise ValueError(
            f"The target heads are {sorted(map(str, dtypes))}, in which small steps are lost; they must be float32. "
            "Do not cast a model with ILQL heads as a whole; load it with `dtype=`, which casts the language model."
        )
    if args.awac_scale == 0 and any(x.requires_grad for x in model.base.parameters()):
        raise ValueError(
            "With `awac_scale=0` nothing holds the language model to the data while its weights serve the heads, and "
            "the policy's prior would drift. Set `freeze_base=True` to train the heads only, or raise `awac_scale`."
        )


__all__ = ["check_dataset_type", "freeze_and_check", "load_model", "load_tokenizer"]
