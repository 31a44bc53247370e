# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""
The loss of autoregressive Q-learning as training uses it: the numbers of [`autoregressive_q_learn`] and
[`conservative_regularization_loss`] from hidden states and heads, on rows of any number of utterances, without a
tensor of (actions, vocabulary).
"""

from functools import partial

import torch

from ..data.ilql_types import ILQLBatch, ILQLSeq2SeqBatch
from ..models.heads import QHeads, candidate_values, gather_states
from ..models.lm_head import LMHead
from .backups import bootstrapped_states, bootstrapped_targets
from .conservative import conservative_loss
from .ilql import clamp, has_next_row, turn_ixs
from .q_learning import check_q_learning_options
from .vocabulary import vocabulary_loss, vocabulary_maximum, vocabulary_mean


def q_learning_loss_from_states(
    hidden_states: torch.Tensor,
    heads: QHeads,
    lm_head: LMHead,
    batch: ILQLBatch | ILQLSeq2SeqBatch,
    next_hidden_state: torch.Tensor | None = None,
    *,
    num_items: torch.Tensor | float | None = None,
    target_hidden_states: torch.Tensor | None = None,
    target_next_hidden_state: torch.Tensor | None = None,
    gamma: float,
    discount_on: str = "utterance",
    n_step: int = 1,
    mc_floor: bool = False,
    q_min: float | None,
    conservative_scale: float,
    cloning_scale: float,
    value_min: float | None = None,
    value_max: float | None = None,
    double_q: bool = False,
    vocab_size: int | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """
    The loss of autoregressive Q-learning from hidden states: with `Q` the online head at the taken tokens, `M` the
    maximum of the target head in the state after a step, and means over the N steps of the batch,

        y        = r + d f M                                           (targets; see `bootstrapped_targets`)
        L_TD     = mean (Q - y)^2 / 2                                  (eq. 1-2)
        L_C      = mean [ sum_a (q_a - q_min)^2 - (Q - q_min)^2 ] / (A - 1)     (eq. 3; see `conservative_loss`)
        L_clone  = mean CE(logits, a)
        L        = L_TD + conservative_scale / 2 L_C + cloning_scale L_clone

    The online head reads one row of its projection per action and makes one product for L_C, the target head makes
    one chunked pass over the vocabulary, and padding costs nothing.

    Args:
        hidden_states (`torch.Tensor` of shape `(B, n, d)`): Inputs of the LM head.
        heads ([`QHeads`]): The heads, of which the first Q-head and its target are used.
        lm_head ([`~models.lm_head.LMHead`]): The projection of the language model, as in `ilql_loss_from_states`.
        batch ([`ILQLBatch`] or [`ILQLSeq2SeqBatch`]):
            Indices, rewards and `dones` (1 = not terminal); `truncated`, `weight` and `turn_ixs` where given.
        next_hidden_state (`torch.Tensor` of shape `(B, d)`, *optional*):
            Last hidden states of `batch.next_input_ids`; needed where the batch has them.
        num_items (`torch.Tensor` or `float`, *optional*):
            The (weighted) number of actions to divide by; that of the batch if not given. Over gradient accumulation
            and several processes it is that of the whole optimizer step.
        target_hidden_states (`torch.Tensor` of shape `(B, n, d)`, *optional*), target_next_hidden_state
            (`torch.Tensor` of shape `(B, d)`, *optional*):
            The same of a moving average of the language model, for the target head; those of the model if not given.
        gamma (`float`): Discount per utterance, or per token with `discount_on="token"`.
        discount_on (`str`, *optional*, defaults to `"utterance"`): `"utterance"` or `"token"`.
        n_step (`int`, *optional*, defaults to 1): Steps of the target.
        mc_floor (`bool`, *optional*, defaults to `False`):
            Whether targets are at least the return the data went on to get. That return is known where a row
            terminated. Where it was cut or goes on in another row, what it was paid so far can be more than its
            return, so there is no floor.
        q_min (`float`): Value that tokens that were not taken are pulled to: at most the smallest return of the data.
        conservative_scale (`float`), cloning_scale (`float`): Weights of the two terms, which cost nothing at 0.
        value_min (`float`, *optional*), value_max (`float`, *optional*): Bounds on `y`.
        double_q (`bool`, *optional*, defaults to `False`):
            Whether the online head chooses the token whose value the target head tells.
        vocab_size (`int`, *optional*):
            Only the first so many tokens exist; the rest of the projection fills it up to a round size, and takes no
            part in `M` and `L_C`.

    Returns:
        The loss, a scalar, and sums over the actions of this batch, for [`q_learning_metrics_from_sums`].
    """
    check_q_learning_options(
        discount_on=discount_on,
        n_step=n_step,
        q_min=q_min,
        conservative_scale=conservative_scale,
        cloning_scale=cloning_scale,
    )
    check_states(batch, next_hidden_state, target_hidden_states, target_next_hidden_state, double_q)
    tokens = batch.decoder_input_ids if isinstance(batch, ILQLSeq2SeqBatch) else batch.input_ids
    mask, has_next = batch.dones[:, :-1].bool(), has_next_row(batch)

    if target_hidden_states is None:
        target_hidden_states, target_next_hidden_state = hidden_states, next_hidden_state
    target_head = heads.target_q[0]

    # The values that are bootstrapped from: (R,) in the states that some target needs, then (B, T + 1) and (B,).
    needed = bootstrapped_states(mask, batch.truncated, has_next)
    maximum = partial(vocabulary_maximum, vocab_size=vocab_size)
    with torch.no_grad():
        rows = rows_of(target_hidden_states, target_next_hidden_state, batch.states_ixs, needed, has_next)
        if double_q:
            online_rows = rows_of(hidden_states, next_hidden_state, batch.states_ixs, needed, has_next)
            _, choice = heads.q[0].on_language_model(online_rows, lm_head, maximum)
            of_choice = partial(candidate_values, candidates=choice.unsqueeze(1))
            best = target_head.on_language_model(rows, lm_head, of_choice).squeeze(1)
        else:
            best, _ = target_head.on_language_model(rows, lm_head, maximum)
        best = best.to(torch.promote_types(best.dtype, batch.rewards.dtype))
        values, next_value, own = best.new_zeros(needed.shape), best.new_zeros(len(mask)), int(needed.sum())
        values[needed] = best[:own]
        if has_next is not None:
            next_value[has_next] = best[own:]

    targets = partial(
        bootstrapped_targets,
        batch.rewards.to(values.dtype),
        values,
        mask,
        gamma=gamma,
        truncated=batch.truncated,
        turn_ixs=turn_ixs(batch),
        next_value=next_value,
        has_next=has_next,
        discount_on=discount_on,
    )
    y = targets(target="td", n_step=n_step)
    returns = targets(target="mc")
    terminated = mask.any(1)
    for goes_on in (batch.truncated, has_next):
        terminated = terminated if goes_on is None else terminated & ~goes_on.bool()
    if mc_floor:
        y = torch.where(terminated.unsqueeze(1), torch.maximum(y, returns), y)

    # From here on one row per action, (N,) or (N, d).
    rows = gather_states(hidden_states, batch.actions_ixs)[mask]
    actions = tokens.gather(1, batch.actions_ixs + 1)[mask]
    y = clamp(y[mask], value_min, value_max)
    w = torch.ones_like(y) if batch.weight is None else batch.weight.to(y.dtype).unsqueeze(1).expand_as(mask)[mask]
    count = w.sum()
    n = count if num_items is None else torch.as_tensor(num_items, dtype=w.dtype, device=w.device)
    # Each step's share of the means.
    share = w / torch.where(n > 0, n, torch.ones_like(n))

    def evaluate(z, weight, bias, offset):
        """The terms of Q, in one visit to the head: `L_TD + conservative_scale / 2 L_C`, and three numbers a row."""
        q_a = candidate_values(z, weight, bias, offset, candidates=actions.unsqueeze(1)).squeeze(1).to(y.dtype)
        mean = vocabulary_mean(z, weight, bias, offset, vocab_size=vocab_size)
        loss, c = (share * (q_a - y).square()).sum() / 2, torch.zeros_like(y)
        if conservative_scale > 0:
            scale = conservative_scale / 2 * share
            regulariser, c = conservative_loss(
                z, weight, bias, offset, taken=q_a, share=scale, q_min=q_min, vocab_size=vocab_size
            )
            loss = loss + regulariser
        size = len(weight[:vocab_size])
        return loss, q_a.detach(), (size * mean - q_a.detach()) / max(1, size - 1), c

    loss, q, unseen, c = heads.q[0].on_language_model(rows, lm_head, evaluate)
    cloning = torch.zeros_like(count)
    if cloning_scale > 0:
        lm_loss, l_a, lse = lm_head(
            rows,
            partial(
                vocabulary_loss,
                actions=actions,
                row_loss=lambda l_a, lse, weight: weight * (lse - l_a),
                row_inputs=(cloning_scale * share,),
            ),
        )
        cloning = (w * (lse - l_a)).sum()
        loss = loss + lm_loss

    def rows_with(flag: torch.Tensor) -> torch.Tensor:
        return (flag.bool() & mask.any(1)).sum().to(count)

    with torch.no_grad():
        sums = {
            "loss/td": (w * (q - y).square()).sum() / 2,
            "loss/conservative": (w * c).sum(),
            "loss/cloning": cloning,
            "q/taken": (w * q).sum(),
            "q/unseen": (w * unseen).sum(),
            "q/max": (w * values[:, :-1][mask]).sum(),
            "td_error/abs": (w * (q - y).abs()).sum(),
            "returns/mc": torch.where(terminated, returns[:, 0], 0).sum(),
            "overestimation": torch.where(terminated, values[:, 0] - returns[:, 0], 0).sum(),
            "actions": count,
            "terminated_rows": rows_with(terminated),
            "truncated_rows": torch.zeros_like(count) if batch.truncated is None else rows_with(batch.truncated),
            "rows": rows_with(torch.ones_like(mask[:, 0])),
        }
    return loss, {name: x.detach() for name, x in sums.items()}


def check_states(
    batch: ILQLBatch | ILQLSeq2SeqBatch,
    next_hidden_state: torch.Tensor | None,
    target_hidden_states: torch.Tensor | None,
    target_next_hidden_state: torch.Tensor | None,
    double_q: bool,
) -> None:
    """Raises a `ValueError` for missing hidden states."""
    read = {}
    if target_hidden_states is None or double_q:
        read["next_hidden_state"] = next_hidden_state
    if target_hidden_states is not None:
        read["target_next_hidden_state"] = target_next_hidden_state
    for name, states in read.items():
        if batch.next_attention_mask is not None and states is None:
            raise ValueError(
                "The batch has rows whose next state is a row of its own (`next_input_ids`), got no "
                f"`{name}`: give the last hidden states of those rows; without them the episodes would be taken to "
                "end."
            )


def rows_of(
    hidden_states: torch.Tensor,
    next_hidden_state: torch.Tensor | None,
    states_ixs: torch.Tensor,
    needed: torch.Tensor,
    has_next: torch.Tensor | None,
) -> torch.Tensor:
    """`(R, d)`: hidden states in the needed states, and after them those of the next rows."""
    rows = gather_states(hidden_states, states_ixs)[needed]
    if next_hidden_state is None or has_next is None:
        return rows
    return torch.cat([rows, next_hidden_state[has_next].to(rows.dtype)])


def q_learning_metrics_from_sums(
    sums: dict[str, float], *, conservative_scale: float, cloning_scale: float
) -> dict[str, float]:
    """
    Means of the sums of [`q_learning_loss_from_states`], added up over batches and processes.

    Returns:
        `dict`: means over actions of
        - `loss/td`, `loss/conservative`, `loss/cloning`: the terms, without their scales, and their sum `loss`;
        - `q/taken`, `q/unseen`: online Q of the data's tokens, and of all other tokens;
        - `q/max`: what the target network bootstraps from in the state of an action;
        - `td_error/abs`: distance of Q from its target;

        over rows that terminated, where there are any, of
        - `returns/mc`: the discounted return of the row;
        - `overestimation`: `q/max` in the first state of the row, less that return. Far above 0, the maximum has found
          tokens that the data does not support;

        and `truncated_fraction` of rows.
    """
    counts = ("actions", "terminated_rows", "truncated_rows", "rows")
    of_rows = ("returns/mc", "overestimation")
    actions = sums["actions"] or 1.0
    means = {name: x / actions for name, x in sums.items() if name not in (*counts, *of_rows)}
    if sums["terminated_rows"] > 0:
        means |= {name: sums[name] / sums["terminated_rows"] for name in of_rows}
    means["truncated_fraction"] = sums["truncated_rows"] / (sums["rows"] or 1.0)
    means["loss"] = (
        means["loss/td"] + conservative_scale / 2 * means["loss/conservative"] + cloning_scale * means["loss/cloning"]
    )
    return means


__all__ = ["q_learning_loss_from_states", "q_learning_metrics_from_sums"]
