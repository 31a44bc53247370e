# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""
Weights of llama-qrlhf's `Llama`, by the names they have here.

The two compute the same function. A matrix there may be several here, one below the other: queries, keys and values,
and the two halves of a GEGLU, of which the second is the gate. Rotary embeddings rotate the same pairs.
"""

import torch


# Computed there as here, and saved there.
FREQUENCIES = "rotary_emb.inv_freq"


def layout(depth: int) -> dict[str, tuple[str, ...]]:
    """For each weight of llama-qrlhf the names of those here that make it up, from the top row to the last."""
    names: dict[str, tuple[str, ...]] = {
        "token_emb.weight": ("model.embed_tokens.weight",),
        "final_norm.weight": ("model.norm.weight",),
    }
    for i in range(depth):
        there, here = f"layers.{i}", f"model.layers.{i}"
        names |= {
            f"{there}.0.to_qkv.0.weight": (f"{here}.input_layernorm.weight",),
            f"{there}.0.to_qkv.1.weight": tuple(f"{here}.self_attn.{x}_proj.weight" for x in "qkv"),
            f"{there}.0.to_out.1.weight": (f"{here}.self_attn.o_proj.weight",),
            f"{there}.1.0.weight": (f"{here}.post_attention_layernorm.weight",),
        }
        for tensor in ("weight", "bias"):
            names[f"{there}.1.1.{tensor}"] = (f"{here}.mlp.up_proj.{tensor}", f"{here}.mlp.gate_proj.{tensor}")
            names[f"{there}.1.3.{tensor}"] = (f"{here}.mlp.down_proj.{tensor}",)
    for tensor in ("weight", "bias"):
        names |= {
            f"to_logits.{tensor}": (f"lm_head.{tensor}",),
            f"to_q.stem.0.{tensor}": (f"heads.q.0.stem.0.{tensor}",),
            f"to_q.to_values.0.{tensor}": (f"heads.q.0.offset.{tensor}",),
            f"to_q.to_advantages.0.{tensor}": (f"heads.q.0.{tensor}",),
        }
    return names


def convert(
    state_dict: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], frequencies: torch.Tensor, depth: int
) -> dict[str, torch.Tensor]:
    """
    Args:
        state_dict (`dict`): That of llama-qrlhf's model.
        expected (`dict`): That of the model here, for its shapes.
        frequencies (`torch.Tensor` of shape `(dim_head / 2,)`): Of the rotary embedding here.
        depth (`int`): Number of layers.

    Returns:
        `dict`: the weights of all but the target head, by the names of `expected`.

    Raises:
        `ValueError`: if weights are missing, left over or of another shape.
    """
    names = layout(depth)
    needed = {
        key: (sum(len(expected[part]) for part in parts), *expected[parts[0]].shape[1:])
        for key, parts in names.items()
    }
    faults = {
        "are missing": [key for key in needed if key not in state_dict],
        "are left over": [key for key in state_dict if key not in needed and key != FREQUENCIES],
        "have another shape": [
            f"{key} has {tuple(state_dict[key].shape)}, not {shape}"
            for key, shape in needed.items()
            if key in state_dict and tuple(state_dict[key].shape) != shape
        ],
    }
    if any(faults.values()):
        listing = "; ".join(f"{len(keys)} {what} ({', '.join(keys[:5])})" for what, keys in faults.items() if keys)
        raise ValueError(
            f"These are not the weights of llama-qrlhf's `Llama` with these arguments: {listing}. Pass what "
            "`llama.state_dict()` returns and the arguments that it was built with. A model without "
            "`dueling_q_head=True` has a linear `to_q`, which is not supported."
        )
    found = state_dict.get(FREQUENCIES)
    if found is not None:
        here = frequencies.to(found)
        if found.shape != here.shape or not torch.allclose(found.float(), here.float(), rtol=1e-4, atol=0.0):
            raise ValueError(
                f"{FREQUENCIES!r} holds {found.flatten()[:4].tolist()}..., and llama-qrlhf's rotary embedding with "
                f"`dim_head={2 * len(here)}` and `theta=10000` {here[:4].tolist()}.... Other frequencies are not "
                "supported."
            )
    converted: dict[str, torch.Tensor] = {}
    for key, parts in names.items():
        pieces = state_dict[key].split([len(expected[part]) for part in parts])
        converted |= dict(zip(parts, pieces, strict=True))
    return converted


__all__ = ["convert"]
