# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""Metrics that environments share, under NeMo-RL's names."""

import torch
from torch import Tensor


def calculate_pass_rate_per_prompt(prompts: Tensor, is_correct: Tensor) -> float:
    """
    Share of the prompts that at least one of their replies solved.

    Args:
        prompts (`torch.Tensor` of shape `(B, S)`):
            Token ids; equal rows are the same prompt.
        is_correct (`torch.Tensor` of shape `(B,)`):
            Whether the reply of the row is correct: greater than 0.

    Returns:
        `float`: number of distinct rows with a correct reply, divided by the number of distinct rows.

    Examples:

    ```python
    >>> calculate_pass_rate_per_prompt(torch.tensor([[1], [1], [2]]), torch.tensor([0.0, 1.0, 0.0]))
    0.5
    ```
    """
    unique, prompt_of_row = torch.unique(prompts, dim=0, return_inverse=True)
    solved = torch.zeros(len(unique), dtype=torch.bool, device=prompts.device)
    solved[prompt_of_row[is_correct > 0]] = True
    return solved.double().mean().item()
