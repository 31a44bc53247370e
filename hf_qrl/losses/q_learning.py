# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""
Autoregressive Q-learning (Q-Transformer, Chebotar et al., 2023, arXiv 2309.10150), with an utterance for the action
and its tokens for the action's dimensions.

[`autoregressive_q_learn`] is the definition, on dense Q-values of rows with one utterance each. Training uses
[`q_learning_loss_from_states`].
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .backups import utterance_ends


def autoregressive_q_learn(
    model: Callable[[torch.Tensor], Any],
    ema_model: Callable[[torch.Tensor], Any],
    states: torch.Tensor,
    prompt_len: torch.Tensor,
    next_states: torch.Tensor,
    rewards: torch.Tensor,
    eos_id: int | None = None,
    discount_gamma: float = 0.998,
    *,
    attention_mask: torch.Tensor | None = None,
    discount_on: str = "utterance",
    terminated: torch.Tensor | None = None,
) -> torch.Tensor:
    r"""
    The loss of autoregressive Q-learning on dense Q-values.

    With `x = [states, next_states]`, step `t` reads `x[0..t]` and emits `x[t+1]`; `Qbar` is the target network:

        act_t  = x[t+1] was generated, is not padding, and no eos was generated before it
        term_t = x[t+1] is the generated eos, or the last token of a row that `terminated`
        d_t    = gamma at the last token of the utterance, 1 within it    (eq. 2; gamma at each of `"token"`)
        y_t    = r_t + d_t (1 - term_t) max_a Qbar(x[0..t+1])_a
        L      = mean over act of (Q(x[0..t])[x[t+1]] - y_t)^2 / 2        (eq. 1)

    A row that ends with neither was cut: its last step bootstraps from all of x. Rewards of either sign count, and
    those within an utterance, too.

    Args:
        model (`Callable`):
            `model(states)` returns Q-values `(b, n, A)`, or an output with such a field `q_values`. Logits of a
            language model are no Q-values and never read.
        ema_model (`Callable`): The target network, likewise; called on `x`, and no gradient goes into it.
        states (`torch.LongTensor` of shape `(b, n)`): Tokens, padded on the right.
        prompt_len (`torch.LongTensor` of shape `(b,)`): Length of the prompts, 1 to n + 1.
        next_states (`torch.LongTensor` of shape `(b,)`): The token after `states`.
        rewards (`torch.Tensor` of shape `(b, n)`): Reward of emitting `x[t+1]`.
        eos_id (`int`, *optional*):
            Token that ends a row where it is *generated*. In a prompt it is a token like others.
        discount_gamma (`float`, *optional*, defaults to 0.998): Discount.
        attention_mask (`torch.Tensor` of shape `(b, n + 1)`, *optional*):
            1 on tokens of `x`, 0 on padding, which may be any token; no padding if not given.
        discount_on (`str`, *optional*, defaults to `"utterance"`): `"utterance"` or `"token"`.
        terminated (`torch.BoolTensor` of shape `(b,)`, *optional*):
            Rows whose last token ended the episode, with eos or without.

    Returns:
        The loss, a scalar; 0, with gradients of 0, where there is no step to learn from.
    """
    terms = autoregressive_q_terms(
        model,
        ema_model,
        states,
        prompt_len,
        next_states,
        rewards,
        eos_id,
        discount_gamma,
        attention_mask=attention_mask,
        discount_on=discount_on,
        terminated=terminated,
    )
    return terms.losses.sum() / terms.act.sum().clamp(min=1)


class AutoregressiveQTerms(NamedTuple):
    """What [`autoregressive_q_learn`] averages, all `(b, n)`; of meaning where `act`."""

    q: torch.Tensor
    y: torch.Tensor
    losses: torch.Tensor
    act: torch.Tensor
    term: torch.Tensor
    ends: torch.Tensor


def autoregressive_q_terms(
    model: Callable[[torch.Tensor], Any],
    ema_model: Callable[[torch.Tensor], Any],
    states: torch.Tensor,
    prompt_len: torch.Tensor,
    next_states: torch.Tensor,
    rewards: torch.Tensor,
    eos_id: int | None = None,
    discount_gamma: float = 0.998,
    *,
    attention_mask: torch.Tensor | None = None,
    discount_on: str = "utterance",
    terminated: torch.Tensor | None = None,
) -> AutoregressiveQTerms:
    """The terms of [`autoregressive_q_learn`], step by step."""
    check_q_learning_options(discount_on=discount_on)
    check_rows(states, prompt_len, next_states, rewards, attention_mask, terminated)
    x = torch.cat([states, next_states.unsqueeze(1)], 1)
    emitted, steps = x[:, 1:], torch.arange(states.shape[1], device=x.device)
    real = torch.ones_like(emitted).bool() if attention_mask is None else attention_mask[:, 1:].bool()

    gen = steps >= prompt_len.unsqueeze(1) - 1
    emit = gen & (emitted == eos_id) if eos_id is not None else torch.zeros_like(gen)
    emit_before = emit.cumsum(1) - emit.long() > 0
    act = gen & ~emit_before & real
    ends = utterance_ends(act, None)
    term = act & emit if terminated is None else act & emit | ends & terminated.bool().unsqueeze(1)

    q = q_values_of(model(states), "model", states).gather(2, emitted.masked_fill(~act, 0).unsqueeze(2)).squeeze(2)
    with torch.no_grad():
        best = q_values_of(ema_model(x), "ema_model", x)[:, 1:].amax(2)
    d = torch.full_like(best, discount_gamma)
    if discount_on == "utterance":
        d = d.masked_fill(~ends, 1.0)
    y = rewards.to(q.dtype) + (d * best).masked_fill(term, 0.0).to(q.dtype)
    losses = (q - y).masked_fill(~act, 0.0).square() / 2
    return AutoregressiveQTerms(q, y, losses, act, term, ends)


def q_values_of(output: Any, name: str, tokens: torch.Tensor) -> torch.Tensor:
    """The Q-values `(b, n, A)` a network returned for `tokens (b, n)`."""
    q = output if isinstance(output, torch.Tensor) else getattr(output, "q_values", None)
    if not isinstance(q, torch.Tensor):
        raise ValueError(
            f"`{name}` must return Q-values, a tensor of shape (b, n, A), or an output with a field `q_values`; got "
            f"{type(output).__name__} without one. The logits of a language model are no Q-values: give it a Q-head."
        )
    if q.dim() != 3 or q.shape[:2] != tokens.shape:
        raise ValueError(
            f"`{name}` must return Q-values of shape (b, n, A) for tokens (b, n) = {tuple(tokens.shape)}, got "
            f"{tuple(q.shape)}."
        )
    return q


def check_rows(
    states: torch.Tensor,
    prompt_len: torch.Tensor,
    next_states: torch.Tensor,
    rewards: torch.Tensor,
    attention_mask: torch.Tensor | None,
    terminated: torch.Tensor | None,
) -> None:
    """Raises a `ValueError` for tensors that do not fit together."""
    if states.dim() != 2:
        raise ValueError(f"`states` must be tokens of shape (b, n), got {tuple(states.shape)}.")
    b, n = states.shape
    expected = {
        "prompt_len": (prompt_len, (b,), "one length per row"),
        "next_states": (next_states, (b,), "the token after each row of `states`"),
        "rewards": (rewards, (b, n), "one reward per step"),
        "attention_mask": (attention_mask, (b, n + 1), "one entry per token of `states` and one for `next_states`"),
        "terminated": (terminated, (b,), "one flag per row"),
    }
    for name, (x, shape, meaning) in expected.items():
        if x is not None and x.shape != shape:
            raise ValueError(
                f"`{name}` must be of shape {shape} for `states` of shape {(b, n)}, got {tuple(x.shape)}: {meaning}."
            )
    if b and not (1 <= prompt_len.min() and prompt_len.max() <= n + 1):
        raise ValueError(
            f"`prompt_len` must lie between 1 and n + 1 = {n + 1}, got {prompt_len.tolist()}: the first token of a "
            "row is read before anything is emitted."
        )
    if attention_mask is not None and bool((attention_mask.bool().diff(dim=1) & attention_mask[:, 1:].bool()).any()):
        raise ValueError("`attention_mask` must be ones followed by zeros in each row: pad `states` on the right.")


def check_q_learning_options(
    *,
    discount_on: str = "utterance",
    n_step: int = 1,
    q_min: float | None = 0.0,
    conservative_scale: float = 0.0,
    cloning_scale: float = 0.0,
) -> None:
    """Raises a `ValueError` for options that do not make sense."""
    if discount_on not in ("token", "utterance"):
        raise ValueError(f'`discount_on` must be "token" or "utterance", got {discount_on!r}.')
    if n_step < 1:
        raise ValueError(f"`n_step` must be at least 1, got {n_step}.")
    for name, scale in (("conservative_scale", conservative_scale), ("cloning_scale", cloning_scale)):
        if not scale >= 0:
            raise ValueError(f"`{name}` must be at least 0, got {scale}.")
    if conservative_scale > 0 and (q_min is None or not abs(q_min) < float("inf")):
        raise ValueError(
            f"`conservative_scale={conservative_scale}` pulls tokens that were not taken to `q_min`, got "
            f"`q_min={q_min}`: set it to a number below every return-to-go of the data, or `conservative_scale=0`."
        )


__all__ = ["autoregressive_q_learn"]
