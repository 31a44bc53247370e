# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""
Regression targets for Q: one step, n steps, to the end of the utterance, and Monte-Carlo returns.

Indices: a row has T action steps; `values[:, j]` is V in the state of step j and `values[:, j + 1]` in the state after
it; `mask` is 1 on real steps, which come first.
"""

import torch


def utterance_ends(mask: torch.Tensor, turn_ixs: torch.Tensor | None) -> torch.Tensor:
    """`(B, T)` bool: the real steps that emit the last token of their utterance; without `turn_ixs`, of their row."""
    real = mask.bool()
    follows = torch.zeros_like(real)
    follows[:, :-1] = real[:, 1:]
    if turn_ixs is not None:
        follows[:, :-1] &= turn_ixs[:, 1:] == turn_ixs[:, :-1]
    return real & ~follows


def bootstrapped_states(
    mask: torch.Tensor, truncated: torch.Tensor | None, has_next: torch.Tensor | None
) -> torch.Tensor:
    """
    `(B, T + 1)` bool: the states whose values [`bootstrapped_targets`] may read: those of the real steps, and the last
    one of a row that is truncated and has no next row.
    """
    after_last = torch.nn.functional.pad(utterance_ends(mask, None), (1, 0))
    cut = torch.zeros_like(mask[:, 0]).bool() if truncated is None else truncated.bool()
    cut = cut if has_next is None else cut & ~has_next
    return torch.nn.functional.pad(mask.bool(), (0, 1)) | after_last & cut.unsqueeze(1)


def discounted_sum(rewards: torch.Tensor, discounts: torch.Tensor) -> torch.Tensor:
    """
    `y_j = r_j + d_j y_{j+1}` with `y_T = 0`, for `(B, T)` tensors, in log2(T) steps.

    Composes neighbouring affine maps, so no power of the discount is ever divided by another.
    """
    y, d = rewards, discounts
    step = 1
    while step < rewards.shape[1]:
        shifted_y, shifted_d = torch.zeros_like(y), torch.zeros_like(d)
        shifted_y[:, :-step], shifted_d[:, :-step] = y[:, step:], d[:, step:]
        y, d = y + d * shifted_y, d * shifted_d
        step *= 2
    return y


def bootstrapped_targets(
    rewards: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    *,
    gamma: float,
    truncated: torch.Tensor | None = None,
    turn_ixs: torch.Tensor | None = None,
    next_value: torch.Tensor | None = None,
    has_next: torch.Tensor | None = None,
    target: str = "td",
    n_step: int = 1,
    discount_on: str = "token",
) -> torch.Tensor:
    r"""
    `y_j = sum_{k=j}^{K-1} c_{j,k} r_k + c_{j,K} f_K V(p_K)`, where `c` are products of the discounts between two steps
    and `f` is 0 in the terminal state of a row and 1 elsewhere.

    Args:
        rewards (`torch.Tensor` of shape `(B, T)`): Reward of each step.
        values (`torch.Tensor` of shape `(B, T + 1)`): State values; no gradient goes through them.
        mask (`torch.Tensor` of shape `(B, T)`): 1 on real steps.
        gamma (`float`): Discount, per token or per utterance by `discount_on`.
        truncated (`torch.Tensor` of shape `(B,)`, *optional*):
            Rows that did not end: their last step bootstraps from the value of the last state.
        turn_ixs (`torch.Tensor` of shape `(B, T)`, *optional*): Utterance each step belongs to.
        next_value (`torch.Tensor` of shape `(B,)`, *optional*):
            Value of the state after the row, where that state is a row of its own.
        has_next (`torch.Tensor` of shape `(B,)`, *optional*): Rows for which `next_value` holds.
        target (`str`): `"td"`: `K = j + n_step`; `"utterance"`: K is the end of step j's utterance; `"mc"`: the end
            of the row.
        n_step (`int`): Steps of the `"td"` target.
        discount_on (`str`): `"token"`: every step is discounted; `"utterance"`: only the last of an utterance.

    Returns:
        `torch.Tensor` of shape `(B, T)`, without gradient. Entries on padding have no meaning.
    """
    values, real = values.detach(), mask.bool()
    last = utterance_ends(mask, None)
    ends = utterance_ends(mask, turn_ixs)
    discounts = torch.full_like(rewards, gamma)
    if discount_on == "utterance":
        discounts = torch.where(ends, discounts, torch.ones_like(discounts))
    elif discount_on != "token":
        raise ValueError(f'`discount_on` must be "token" or "utterance", got {discount_on!r}.')

    final_value = torch.zeros_like(values[:, 1:])
    if truncated is not None:
        final_value = torch.where(truncated.bool().unsqueeze(1), values[:, 1:], final_value)
    if next_value is not None and has_next is not None:
        final_value = torch.where(has_next.bool().unsqueeze(1), next_value.detach().unsqueeze(1), final_value)
    next_values = torch.where(last, final_value, values[:, 1:])
    one_step = rewards + discounts * next_values

    if target == "td" and n_step == 1:
        return one_step
    if target == "td":
        y = one_step
        for _ in range(n_step - 1):
            later = torch.zeros_like(y)
            later[:, :-1] = y[:, 1:]
            y = torch.where(last, one_step, rewards + discounts * later)
        return y
    if target not in ("utterance", "mc"):
        raise ValueError(f'`target` must be "td", "utterance" or "mc", got {target!r}.')
    stop = ends if target == "utterance" else last
    zeros = torch.zeros_like(rewards)
    return discounted_sum(
        torch.where(stop, one_step, torch.where(real, rewards, zeros)), torch.where(stop | ~real, zeros, discounts)
    )
