# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""What PPO cannot train: models whose policy would not change, or samples by other probabilities than are trained."""

from typing import Any

from torch import nn


# Settings of `generate` that change probabilities, and what they are where they do not.
NEUTRAL: dict[str, Any] = {
    "repetition_penalty": 1.0,
    "encoder_repetition_penalty": 1.0,
    "guidance_scale": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "min_length": 0,
    "min_new_tokens": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "bad_words_ids": None,
    "sequence_bias": None,
    "exponential_decay_length_penalty": None,
}


def check_generation(config: Any) -> None:
    """Raises a `ValueError` for settings of a model that change the probabilities it samples by."""
    found = {name: x for name, off in NEUTRAL.items() if (x := getattr(config, name)) not in (None, [], off)}
    if found:
        raise ValueError(
            f"`model.generation_config` has {found}, with which tokens are sampled by other probabilities than those "
            "that are trained. Set them to None."
        )


def check_trainable(adapted: nn.Module, model: Any) -> None:
    """Raises a `ValueError` if nothing of the language model, or of the adapter on it, is trained."""
    heads = {id(x) for x in model.heads.parameters()}
    if not any(x.requires_grad for x in adapted.parameters() if id(x) not in heads):
        raise ValueError(
            "All weights of the language model are frozen, and the policy could not change: thaw them "
            "(`model.requires_grad_(True)`), or train an adapter (`peft_config=`)."
        )


__all__ = ["check_generation", "check_trainable"]
