# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""A batch of queries and responses as the rows that a model reads, and where in them its states are."""

import torch

from ..data.ppo_types import PPORLBatch


def model_inputs(
    batch: PPORLBatch, pad_token_id: int, decoder_start_token_id: int | None = None
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """
    What `forward` takes, and the positions of the states in which the response tokens were sampled.

    A causal model reads the query and the response after it, without padding between them; an encoder-decoder model
    reads the query in its encoder. The last token of a response is not read: no state of the response lies after it.

    Args:
        batch ([`PPORLBatch`]): With its masks.
        pad_token_id (`int`): Token that fills up rows, on the right.
        decoder_start_token_id (`int`, *optional*): Token that the decoder begins with, of an encoder-decoder model.

    Returns:
        `input_ids (B, n)`, `attention_mask (B, n)` and, of an encoder-decoder model, `decoder_input_ids (B, R)`; and
        positions `(B, R)`.
    """
    query_mask, response_mask = batch.masks(pad_token_id)
    query_lengths, response_lengths = query_mask.sum(1), response_mask.sum(1)
    steps = torch.arange(response_mask.shape[1], device=response_mask.device).expand_as(response_mask)
    if decoder_start_token_id is None:
        lengths = query_lengths + (response_lengths - 1).clamp(min=0)
        tokens = torch.cat([batch.query_tensors, batch.response_tensors], 1)
        states = query_lengths.unsqueeze(1) - 1 + steps
        inputs = aligned_left(tokens, query_mask.shape[1] - query_lengths, lengths, pad_token_id)
        return inputs, states.clamp(max=inputs["input_ids"].shape[1] - 1)
    inputs = aligned_left(batch.query_tensors, query_mask.shape[1] - query_lengths, query_lengths, pad_token_id)
    start = torch.full_like(batch.response_tensors[:, :1], decoder_start_token_id)
    inputs["decoder_input_ids"] = torch.cat([start, batch.response_tensors[:, :-1]], 1)
    return inputs, steps


def aligned_left(
    tokens: torch.Tensor, starts: torch.Tensor, lengths: torch.Tensor, pad_token_id: int
) -> dict[str, torch.Tensor]:
    """Rows of `tokens (B, n)` from `starts (B,)` on, as many tokens as `lengths (B,)` says, padded on the right."""
    places = torch.arange(int(lengths.max()), device=tokens.device).expand(len(tokens), -1)
    mask = places < lengths.unsqueeze(1)
    rows = tokens.gather(1, (starts.unsqueeze(1) + places).clamp(max=tokens.shape[1] - 1))
    return {"input_ids": rows.masked_fill(~mask, pad_token_id), "attention_mask": mask.long()}


__all__ = ["model_inputs"]
