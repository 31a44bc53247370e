# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""
A policy whose Q is linear in the hidden state is a language model.

With logits `s W h + b` (s is 1 but for the few models that scale), Q-heads `W_k A_k h + offset_k(h)` and their mean,

    logits + beta (Q - V) = s (W + beta / s mean_k W_k A_k) h + b + (a number per state),

and the softmax does not see the number per state.
"""

import copy
import math
import os
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import ModelCard, ModelCardData
from torch import nn

from .heads import NONLINEAR_STEMS, ILQLHeads
from .lm_head import LMHead


@torch.no_grad()
def fold_policy(model: Any, beta: float | None = None) -> Any:
    """
    The policy of a model with ILQL heads as a language model without any.

    Args:
        model ([`ILQLForCausalLM`] or [`ILQLForSeq2SeqLM`]): The model; it is not changed.
        beta (`float`, *optional*): Weight of the advantage; `model.config.beta` if not given.

    Returns:
        `PreTrainedModel` of the class of `model.base`: a copy with other output embeddings, in the dtype of the
        model's, no longer tied to the input embeddings.

    Raises:
        `ValueError`: if the policy is not linear in the hidden state.
    """
    beta = model.config.beta if beta is None else beta
    lm_head = LMHead(model.base)
    check_foldable(model, lm_head, beta)
    old = lm_head.module
    dtype = torch.promote_types(old.weight.dtype, torch.float32)
    q = torch.zeros_like(old.weight, dtype=dtype)
    for head in model.heads.target_q:
        projection = (old.weight if head.weight is None else head.weight).to(dtype)
        q += projection if isinstance(head.stem, nn.Identity) else projection @ head.stem.weight.to(dtype)
    weight = old.weight.to(dtype) + beta / (lm_head.scale * len(model.heads.target_q)) * q

    folded = copy.deepcopy(model.base)
    new = nn.Linear(old.in_features, old.out_features, bias=old.bias is not None, device="meta")
    new.weight = nn.Parameter(weight.to(old.weight.dtype), requires_grad=old.weight.requires_grad)
    if old.bias is not None:
        new.bias = nn.Parameter(old.bias.clone(), requires_grad=old.bias.requires_grad)
    folded.set_output_embeddings(new)
    name = next(name for name, module in folded.named_modules() if module is new) + ".weight"
    folded.all_tied_weights_keys = {
        target: source for target, source in folded.all_tied_weights_keys.items() if name not in (target, source)
    }
    if not folded.config.is_encoder_decoder:
        # An encoder-decoder ties its two input embeddings too, under this one name.
        folded.config.tie_word_embeddings = folded.config.get_text_config().tie_word_embeddings = False
    folded.generation_config = copy.deepcopy(model.generation_config)
    folded.add_model_tags(["hf_qrl", "ilql"])
    return folded.eval()


def check_foldable(model: Any, lm_head: LMHead, beta: float) -> None:
    """Raises a `ValueError` that says why a policy does not fold and what to do instead."""
    config = model.config
    if not isinstance(model.heads, ILQLHeads):
        raise ValueError("The heads belong to an adapter: fold what `merge_and_unload()` returns.")
    if not math.isfinite(beta):
        raise ValueError(f"`beta` must be a finite number, got {beta}.")
    if config.head_stem in NONLINEAR_STEMS:
        raise ValueError(
            f'The Q-heads (`head_type="{config.head_type}"`, `head_stem="{config.head_stem}"`) are not linear in the '
            "hidden state, so their policy is no language model of this architecture. Decode with the model itself, "
            'or train heads that fold: `head_type="linear"` or `"tied"`, or `"dueling"` with `head_stem="identity"`.'
        )
    if len(model.heads.target_q) > 1 and model.heads.q_reduction != "mean":
        raise ValueError(
            f"The policy takes the minimum of {len(model.heads.target_q)} Q-heads, which is not linear. Train with "
            '`num_q_heads=1` or `q_reduction="mean"`; a model loaded with `q_reduction="mean"` folds, but acts by the '
            "mean."
        )
    if lm_head.softcap is not None:
        raise ValueError(
            f"{type(model.base).__name__} caps its logits (at {lm_head.softcap}), and the advantage comes on top of "
            "the capped ones. Decode with the model itself."
        )
    if config.policy_top_k is not None:
        raise ValueError(
            f"`policy_top_k={config.policy_top_k}` keeps the likeliest tokens of the language model, which a folded "
            "policy does not know. Set `model.config.policy_top_k = None` if you can do without, or decode with the "
            "model itself."
        )


CARD = """---
{metadata}
---

# {title}

The policy `softmax(logits + beta * (Q - V))` of {source} at `beta = {beta:g}`, folded into a plain {architecture}:
the Q-heads are linear in the hidden state, so their part of the policy was added to the output embeddings. The values
are not in this checkpoint, and `beta` is fixed.

```python
from transformers import {auto_class}, AutoTokenizer

model = {auto_class}.from_pretrained("{title}")
tokenizer = AutoTokenizer.from_pretrained("{title}")
```

Any server for {architecture} checkpoints serves it; sample at temperature 1 for the policy itself.
"""


def save_folded_policy(
    model: Any, save_directory: str | os.PathLike, beta: float | None = None, processing_class: Any = None
) -> Any:
    """
    Saves the folded policy with its generation configuration, a model card and a tokenizer.

    Args:
        model: The model with ILQL heads.
        save_directory (`str`): Where to.
        beta (`float`, *optional*): Weight of the advantage; `model.config.beta` if not given.
        processing_class (`PreTrainedTokenizerBase`, *optional*): Tokenizer to save beside it.

    Returns:
        The folded model.
    """
    folded = fold_policy(model, beta)
    folded.save_pretrained(save_directory)
    if processing_class is not None:
        processing_class.save_pretrained(save_directory)
    source = model.config._name_or_path
    on_hub = bool(source) and not Path(source).exists()
    task = "text2text-generation" if folded.config.is_encoder_decoder else "text-generation"
    metadata = ModelCardData(
        library_name="transformers",
        pipeline_tag=task,
        base_model=source if on_hub else None,
        tags=["hf_qrl", "ilql"],
    )
    card = CARD.format(
        metadata=metadata.to_yaml(),
        title=Path(save_directory).resolve().name,
        source=f"[{source}](https://huggingface.co/{source})" if on_hub else f"an {type(model).__name__}",
        beta=model.config.beta if beta is None else beta,
        architecture=type(folded).__name__,
        auto_class="AutoModelForSeq2SeqLM" if folded.config.is_encoder_decoder else "AutoModelForCausalLM",
    )
    ModelCard(card).save(Path(save_directory) / "README.md")
    return folded


__all__ = ["fold_policy", "save_folded_policy"]
