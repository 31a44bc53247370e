# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""Training the upper layers of a language model only."""

from torch import nn
from transformers import PreTrainedModel


# What some models have between their embeddings and their first block (a norm, a projection), by parts of its name.
BELOW_THE_BLOCKS = ("emb", "project_in")


def freeze_lower_layers(model: PreTrainedModel, num_layers_unfrozen: int) -> None:
    """
    Freezes the embeddings of a language model, all but its top decoder blocks, and its encoder if it has one.

    The norm above the blocks and an LM head with a weight of its own stay as they are; an LM head that shares the
    weight of the input embedding is frozen with it. Nothing is thawed.

    Args:
        model (`PreTrainedModel`): The language model, of any architecture.
        num_layers_unfrozen (`int`): Number of blocks, counted from the top, that stay as they are.

    Raises:
        `ValueError`: if the model has fewer blocks, or no list of blocks.
    """
    decoder = model.get_decoder()
    blocks = find_blocks(decoder)
    if not 0 <= num_layers_unfrozen <= len(blocks):
        raise ValueError(
            f"`num_layers_unfrozen` counts decoder blocks, of which this {type(model).__name__} has {len(blocks)}: it "
            f"must lie between 0 and {len(blocks)}, got {num_layers_unfrozen}. To train all layers, freeze none."
        )
    for block in blocks[: len(blocks) - num_layers_unfrozen]:
        block.requires_grad_(False)
    if model.config.is_encoder_decoder:
        model.get_encoder().requires_grad_(False)
    in_blocks = set(blocks.modules())
    for name, module in decoder.named_modules():
        below = isinstance(module, nn.Embedding) or any(part in name for part in BELOW_THE_BLOCKS)
        if below and module not in in_blocks:
            module.requires_grad_(False)
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    embedding.requires_grad_(False)
    if output.weight is embedding.weight:
        output.requires_grad_(False)


def find_blocks(decoder: nn.Module) -> nn.ModuleList:
    """The blocks of a decoder: the longest list of modules in it, of those that are not in another list."""
    lists: list[nn.ModuleList] = []
    for module in decoder.modules():
        if isinstance(module, nn.ModuleList) and not any(module in outer.modules() for outer in lists):
            lists.append(module)
    if not lists:
        raise ValueError(f"A {type(decoder).__name__} has no list of blocks whose lower ones could be frozen.")
    return max(lists, key=len)


__all__ = ["freeze_lower_layers"]
