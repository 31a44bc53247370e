# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""Sampling in which a row's tokens follow from its own seed, whatever the other rows of the batch are."""

from collections.abc import Sequence

import numpy as np
import torch
from transformers import LogitsProcessor, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper


class RowSampler(LogitsProcessor):
    """
    Chooses the next token of each row itself, for `generate(do_sample=False)` to take.

    Every row has uniform numbers of its own, one per token, and takes the token in whose part of the unit interval,
    divided by the probabilities, its number falls. So a row needs no random state of the batch or the device.

    Args:
        seeds (`Sequence[np.random.SeedSequence]` of length `B`):
            Seed of each row.
        prompt_length (`int`):
            Number of tokens before the reply, padding included.
        max_new_tokens (`int`):
            Largest number of tokens.
        do_sample (`bool`, *optional*, defaults to `True`):
            Whether to sample, rather than to take the most probable token.
        temperature (`float`, *optional*, defaults to 1.0), top_k (`int`, *optional*), top_p (`float`, *optional*):
            What the logits are divided by, and how many of the most probable tokens, or how much of their
            probability, are kept.
    """

    def __init__(
        self,
        seeds: Sequence[np.random.SeedSequence],
        prompt_length: int,
        max_new_tokens: int,
        do_sample: bool = True,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
    ) -> None:
        self.prompt_length = prompt_length
        self.warpers: list[LogitsProcessor] = []
        self.uniforms: torch.Tensor | None = None
        if do_sample:
            numbers = np.stack([np.random.default_rng(seed).random(max_new_tokens) for seed in seeds])
            self.uniforms = torch.from_numpy(numbers)
            if temperature != 1.0:
                self.warpers.append(TemperatureLogitsWarper(temperature))
            if top_k is not None:
                self.warpers.append(TopKLogitsWarper(top_k))
            if top_p is not None and top_p < 1.0:
                self.warpers.append(TopPLogitsWarper(top_p))
        self._logprobs: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Returns scores `(B, V)` of 0 for the chosen tokens and minus infinity elsewhere."""
        for warper in self.warpers:
            scores = warper(input_ids, scores)
        logprobs = torch.log_softmax(scores.float(), dim=-1)
        if self.uniforms is None:
            chosen = logprobs.argmax(-1, keepdim=True)
        else:
            numbers = self.uniforms[:, input_ids.shape[1] - self.prompt_length, None].to(scores.device)
            # The sum needs the digits, its terms do not: they have no more than the logits.
            cumulated = logprobs.exp().double().cumsum(-1)
            # Rounding leaves the sum a little off 1; tokens of no probability end where the one before them does.
            chosen = torch.searchsorted(cumulated, numbers * cumulated[:, -1:], right=True)
            chosen = chosen.clamp(max=scores.shape[-1] - 1)
        self._logprobs.append(logprobs.gather(-1, chosen).squeeze(-1))
        return torch.full_like(scores, -torch.inf).scatter(-1, chosen, 0.0)

    def logprobs(self) -> list[list[float]]:
        """Log-probability of each chosen token under what it was chosen from, a list per row."""
        return torch.stack(self._logprobs, dim=1).tolist()
