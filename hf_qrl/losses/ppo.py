# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""
Proximal policy optimisation (Schulman et al., 2017, arXiv 1707.06347) on the tokens of responses.

With the ratio `rho = exp(log pi - log pi_old)` of a token, its advantage A and its return R,

    L_pi = mean max(-A rho, -A clip(rho, 1 - eps, 1 + eps))                          (equation 7)
    L_V  = mean 1/2 max((V - R)^2, (clip(V, V_old - eps_v, V_old + eps_v) - R)^2)
    L    = L_pi + vf_coef L_V - entropy_coef mean H                                  (equation 9)

where the means are over all tokens of an optimizer step.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ..data.ppo_types import PPORLBatch
from .vocabulary import vocabulary_loss


def policy_terms(
    logprobs: torch.Tensor, old_logprobs: torch.Tensor, advantages: torch.Tensor, cliprange: float
) -> torch.Tensor:
    """`max(-A rho, -A clip(rho, 1 - eps, 1 + eps))` of each token."""
    ratio = (logprobs - old_logprobs).exp()
    return torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - cliprange, 1 + cliprange))


def value_terms(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, cliprange_value: float | None
) -> torch.Tensor:
    """`1/2 max((V - R)^2, (clip(V, V_old - eps_v, V_old + eps_v) - R)^2)` of each token."""
    errors = (values - returns).square()
    if cliprange_value is not None:
        clipped = values.clamp(old_values - cliprange_value, old_values + cliprange_value)
        errors = torch.maximum(errors, (clipped - returns).square())
    return errors / 2


def ppo_loss(
    logprobs: torch.Tensor,
    values: torch.Tensor,
    old_logprobs: torch.Tensor,
    old_values: torch.Tensor,
    advantages: torch.Tensor,
    returns: torch.Tensor,
    mask: torch.Tensor,
    *,
    cliprange: float = 0.2,
    cliprange_value: float | None = 0.2,
    vf_coef: float = 1.0,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """
    The readable definition of the loss: `L_pi + vf_coef L_V`.

    Args:
        logprobs, values (`torch.Tensor` of shape `(B, T)`):
            Log-probabilities of the tokens, and values of the states they were sampled in.
        old_logprobs, old_values (`torch.Tensor` of shape `(B, T)`):
            Those of the policy that sampled them.
        advantages, returns (`torch.Tensor` of shape `(B, T)`):
            Those of [`generalized_advantage_estimation`]; no gradient goes into them, nor into what is old.
        mask (`torch.Tensor` of shape `(B, T)`):
            1 for tokens, 0 for padding.
        cliprange (`float`, *optional*, defaults to 0.2):
            How far the ratio is followed away from 1.
        cliprange_value (`float`, *optional*, defaults to 0.2):
            How far values are followed away from the old ones; `None` for no limit.
        vf_coef (`float`, *optional*, defaults to 1.0):
            Weight of the value loss.

    Returns:
        The loss, and metrics: those of [`ppo_metrics_from_sums`], and `mean`, `min`, `max` and `std` of `values`,
        `old_values` and `returns`. `policy/kl` is the mean over tokens; trlX divides by padding too.
    """
    mask, dtype = mask.bool(), logprobs.dtype
    # Padding is left out rather than multiplied by 0, which would make a NaN of a ratio that overflowed there.
    logprobs, values = logprobs[mask], values[mask]
    old_logprobs, old_values, advantages, returns = (
        x.detach()[mask] for x in (old_logprobs, old_values, advantages, returns)
    )
    policy = policy_terms(logprobs, old_logprobs, advantages, cliprange)
    value = value_terms(values, old_values, returns, cliprange_value)
    loss = (policy + vf_coef * value).sum() / max(1, len(policy))
    sums = token_sums(
        *(logprobs.detach(), values.detach(), old_logprobs, old_values, advantages, returns),
        cliprange=cliprange,
        cliprange_value=cliprange_value,
    )
    numbers = {name: x.item() for name, x in sums.items()}
    metrics: dict[str, Any] = dict(ppo_metrics_from_sums(numbers, vf_coef=vf_coef))
    for name, x in (("values", values.detach()), ("old_values", old_values), ("returns", returns)):
        if len(x):
            metrics |= {f"{name}/mean": x.mean(), f"{name}/min": x.min(), f"{name}/max": x.max()}
            metrics[f"{name}/std"] = x.std(correction=0)
    metrics["padding_percentage"] = 1 - len(policy) / max(1, mask.numel())
    return loss, {name: torch.as_tensor(x, dtype=dtype) for name, x in metrics.items()}


def ppo_loss_from_states(
    states: torch.Tensor,
    heads: Any,
    lm_head: Callable[..., Any],
    batch: PPORLBatch,
    *,
    num_items: torch.Tensor | int | None = None,
    cliprange: float = 0.2,
    cliprange_value: float | None = 0.2,
    vf_coef: float = 1.0,
    entropy_coef: float = 0.0,
    temperature: float = 1.0,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """
    The loss of [`ppo_loss`], less the entropy bonus, from hidden states, without a tensor of (tokens, vocabulary).

    Args:
        states (`torch.Tensor` of shape `(B, R, d)`):
            Inputs of the LM head in the states in which the response tokens were sampled.
        heads (`nn.Module`):
            With the value head `v`.
        lm_head ([`LMHead`]):
            The projection onto the vocabulary.
        batch ([`PPORLBatch`]):
            With `response_mask`, `advantages` and `returns`.
        num_items (`torch.Tensor` or `int`, *optional*):
            Number of response tokens of the whole optimizer step; those of the batch if not given.
        cliprange, cliprange_value, vf_coef:
            As in [`ppo_loss`].
        entropy_coef (`float`, *optional*, defaults to 0.0):
            Weight of the entropy bonus.
        temperature (`float`, *optional*, defaults to 1.0):
            What logits are divided by.

    Returns:
        The loss, and sums over the tokens for [`ppo_metrics_from_sums`].
    """
    if batch.response_mask is None or batch.advantages is None or batch.returns is None:
        raise ValueError(
            "The batch has no `response_mask`, `advantages` or `returns`: `RolloutStore.compute_advantages` gives its "
            "elements advantages, and `collate_ppo` makes masks."
        )
    mask = batch.response_mask.bool()
    rows = states[mask]
    values = heads.v(rows)
    # Ratios and sums of tokens need more than the eight bits of a bfloat16 model.
    values = values.to(torch.promote_types(values.dtype, torch.float32))
    old_logprobs, old_values, advantages, returns = (
        x[mask].to(values.dtype) for x in (batch.logprobs, batch.values, batch.advantages, batch.returns)
    )
    count = len(rows) if num_items is None else num_items
    share = torch.ones_like(old_values) / torch.as_tensor(count, device=values.device).clamp(min=1)

    def row_loss(q_a, lse, *rest):
        entropy, (old, advantage, weight) = (rest[0], rest[1:]) if entropy_coef != 0 else (0.0, rest)
        return weight * (policy_terms(q_a - lse, old, advantage, cliprange) - entropy_coef * entropy)

    policy_loss, *statistics = lm_head(
        rows,
        partial(
            at_temperature(vocabulary_loss, temperature),
            actions=batch.response_tensors[mask],
            row_loss=row_loss,
            row_inputs=(old_logprobs, advantages, share),
            with_entropy=entropy_coef != 0,
        ),
    )
    value_loss = (share * value_terms(values, old_values, returns, cliprange_value)).sum()
    logprobs = (statistics[0] - statistics[1]).to(values.dtype)
    sums = token_sums(
        *(logprobs, values.detach(), old_logprobs, old_values, advantages, returns),
        cliprange=cliprange,
        cliprange_value=cliprange_value,
    )
    if entropy_coef != 0:
        sums["policy/entropy"] = statistics[2].sum()
    return policy_loss + vf_coef * value_loss, sums


@torch.no_grad()
def score_tokens_from_states(
    states: torch.Tensor, lm_head: Callable[..., Any], batch: PPORLBatch, temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Log-probabilities of response tokens and the entropy of the policy where they were sampled, without gradients.

    Args:
        states, lm_head, batch, temperature: As in [`ppo_loss_from_states`].

    Returns:
        Two tensors `(B, R)`, 0 on padding.
    """
    assert batch.response_mask is not None, "collation makes masks"
    mask = batch.response_mask.bool()
    _, taken, lse, entropy = lm_head(
        states[mask],
        partial(
            at_temperature(vocabulary_loss, temperature),
            actions=batch.response_tensors[mask],
            row_loss=lambda q_a, lse, entropy: 0 * q_a,
            with_entropy=True,
        ),
    )
    rows = taken.new_zeros(2, *mask.shape)
    rows[:, mask] = torch.stack([taken - lse, entropy])
    return rows[0], rows[1]


def at_temperature(evaluate: Callable[..., Any], temperature: float) -> Callable[..., Any]:
    """`evaluate` of outputs divided by a temperature, a soft cap `c` included: `(c / T) tanh((q / T) / (c / T))`."""

    def scaled(z, weight, bias, offset, softcap=None, **options):
        if temperature != 1.0:
            z, bias = z / temperature, None if bias is None else bias / temperature
            softcap = None if softcap is None else softcap / temperature
        return evaluate(z, weight, bias, offset, softcap=softcap, **options)

    return scaled


@torch.no_grad()
def token_sums(
    logprobs: torch.Tensor,
    values: torch.Tensor,
    old_logprobs: torch.Tensor,
    old_values: torch.Tensor,
    advantages: torch.Tensor,
    returns: torch.Tensor,
    *,
    cliprange: float,
    cliprange_value: float | None,
) -> dict[str, torch.Tensor]:
    """Sums over tokens `(N,)`, from which [`ppo_metrics_from_sums`] makes means over any number of batches."""
    log_ratio = logprobs - old_logprobs
    ratio = log_ratio.exp()
    errors = (values - returns).square()
    policy = policy_terms(logprobs, old_logprobs, advantages, cliprange)
    value = value_terms(values, old_values, returns, cliprange_value)
    residual = returns - old_values
    return {
        "loss/policy": policy.sum(),
        "loss/value": value.sum(),
        "policy/kl": (ratio - 1 - log_ratio).sum(),
        "policy/clipfrac": (policy > -advantages * ratio).sum().to(policy.dtype),
        "policy/ratio": ratio.sum(),
        "values/mean": values.sum(),
        "values/error": errors.sum(),
        "values/clipfrac": (2 * value > errors).sum().to(policy.dtype),
        "returns/mean": returns.sum(),
        "returns/squares": returns.square().sum(),
        "residual": residual.sum(),
        "residual/squares": residual.square().sum(),
        "tokens": values.new_tensor(len(values)),
    }


def ppo_metrics_from_sums(
    sums: dict[str, float], *, vf_coef: float = 1.0, entropy_coef: float = 0.0
) -> dict[str, float]:
    """
    Means of the sums of [`ppo_loss_from_states`], added up over batches and processes.

    Returns:
        `dict[str, float]`: empty without tokens, else

        - `loss`, `loss/policy`, `loss/value`, and `policy/entropy` where it is part of the loss;
        - `policy/kl`: the divergence from the policy that sampled, `rho - 1 - log rho` (Schulman's k3);
        - `policy/clipfrac`, `values/clipfrac`: shares of the tokens whose clipped term is the larger one;
        - `policy/ratio`: the mean of rho;
        - `values/mean`, `returns/mean`, `values/error`: mean V, R and `(V - R)^2`;
        - `values/explained_variance`: `1 - Var(R - V_old) / Var(R)`, 0 where all returns are about equal.
    """
    count = sums.get("tokens", 0)
    if count == 0:
        return {}
    means = {name: x / count for name, x in sums.items()}
    variance = max(0.0, means["returns/squares"] - means["returns/mean"] ** 2)
    unexplained = max(0.0, means["residual/squares"] - means["residual"] ** 2)
    loss = means["loss/policy"] + vf_coef * means["loss/value"] - entropy_coef * means.get("policy/entropy", 0.0)
    # Less is rounding: a variance is here a difference of two sums of float32.
    varied = variance > 1e-5 * means["returns/squares"]
    hidden = ("returns/squares", "residual", "residual/squares", "tokens")
    return {
        "loss": loss,
        **{name: x for name, x in means.items() if name not in hidden},
        "values/explained_variance": 1 - unexplained / variance if varied else 0.0,
    }


__all__ = ["ppo_loss", "ppo_loss_from_states", "ppo_metrics_from_sums", "score_tokens_from_states"]
