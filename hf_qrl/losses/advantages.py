# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""Advantages for policy gradients, and the rewards that hold a policy to its reference."""

from typing import Literal

import torch


KLEstimator = Literal["k1", "k2", "k3", "abs"]


def generalized_advantage_estimation(
    values: torch.Tensor,
    rewards: torch.Tensor,
    gamma: float | torch.Tensor,
    lam: float,
    mask: torch.Tensor | None = None,
    *,
    last_values: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Generalised advantage estimation (Schulman et al., 2015, arXiv 1506.02438, equations 11 to 16),

        delta_t = r_t + gamma V_{t+1} - V_t,    A_t = delta_t + gamma lam A_{t+1},    R_t = A_t + V_t.

    Args:
        values, rewards (`torch.Tensor` of shape `(B, T)`):
            Values of the states, and rewards of the actions taken in them.
        gamma (`float` or `torch.Tensor` of shape `(B, T)`):
            Discount, or that of each step.
        lam (`float`):
            Lambda: 0 bootstraps after one step, 1 not before the end.
        mask (`torch.Tensor` of shape `(B, T)`, *optional*):
            1 for steps, 0 for the padding after them.
        last_values (`torch.Tensor` of shape `(B,)`, *optional*):
            Value of the state after the last step, 0 (the episode terminated) if not given.

    Returns:
        `advantages` and `returns`, `(B, T)`, 0 on padding.
    """
    mask = torch.ones_like(values, dtype=torch.bool) if mask is None else mask.bool()
    discounts = torch.as_tensor(gamma, dtype=values.dtype, device=values.device).expand_as(values)
    next_values = torch.zeros_like(values[:, 0]) if last_values is None else last_values.to(values.dtype)
    advantage = torch.zeros_like(next_values)
    advantages = torch.zeros_like(values)
    for t in range(values.shape[1] - 1, -1, -1):
        real = mask[:, t]
        delta = rewards[:, t] + discounts[:, t] * next_values - values[:, t]
        advantage = torch.where(real, delta + discounts[:, t] * lam * advantage, advantage)
        next_values = torch.where(real, values[:, t], next_values)
        advantages[:, t] = torch.where(real, advantage, 0)
    return advantages, torch.where(mask, advantages + values, 0)


def whiten(x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """
    `(x - mean) / sqrt(variance + 1e-8)` with the moments of the entries that the mask holds, the variance divided by
    their number less 1; 0 elsewhere. A single entry becomes 0.

    Args:
        x (`torch.Tensor`): Numbers.
        mask (`torch.Tensor` of the same shape, *optional*): 1 for those that count.
    """
    mask = torch.ones_like(x, dtype=torch.bool) if mask is None else mask.bool()
    chosen = x[mask]
    mean = chosen.sum() / max(1, len(chosen))
    variance = (chosen - mean).square().sum() / max(1, len(chosen) - 1)
    return torch.where(mask, (x - mean) / (variance + 1e-8).sqrt(), 0)


def kl_estimate(logprobs: torch.Tensor, ref_logprobs: torch.Tensor, estimator: KLEstimator = "k1") -> torch.Tensor:
    """
    Estimates of the divergence `KL(pi || pi_ref)` at sampled tokens (Schulman, "Approximating KL divergence", 2020).

    Args:
        logprobs, ref_logprobs (`torch.Tensor` of one shape): Log-probabilities of the tokens under both.
        estimator (`str`, *optional*, defaults to `"k1"`):
            With `d = log pi - log pi_ref`: `"k1"`, `d`; `"k2"`, `d^2 / 2`; `"k3"`, `exp(-d) - 1 + d`; `"abs"`, `|d|`.
    """
    difference = logprobs - ref_logprobs
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    if estimator == "k3":
        return torch.expm1(-difference) + difference
    if estimator == "abs":
        return difference.abs()
    raise ValueError(f'`estimator` must be "k1", "k2", "k3" or "abs", got {estimator!r}.')


def adapted_kl_coef(kl_coef: float, kl: float, *, target: float, horizon: int, num_items: int) -> float:
    """
    The weight of the divergence after a measurement of it (Ziegler et al., 2019, arXiv 1909.08593, section 2.2):
    `kl_coef (1 + clip(kl / target - 1, -0.2, 0.2) num_items / horizon)`.

    Args:
        kl_coef (`float`): The weight before.
        kl (`float`): The divergence that was measured.
        target (`float`): What it should be.
        horizon (`int`): Number of items over which the weight moves by up to a fifth.
        num_items (`int`): Number of items that it was measured on.
    """
    error = min(max(kl / target - 1, -0.2), 0.2)
    return kl_coef * (1 + error * num_items / horizon)


__all__ = ["KLEstimator", "adapted_kl_coef", "generalized_advantage_estimation", "kl_estimate", "whiten"]
