# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""
Implicit language Q-learning (Snell et al., 2022, arXiv 2206.11871), with the conventions of trlX.

[`ilql_loss`] is the definition, on dense Q-values. [`ilql_loss_from_states`] is what training uses: the same numbers
from hidden states and heads, without a tensor of (actions, vocabulary).
"""

from functools import partial

import torch

from ..data.ilql_types import ILQLBatch, ILQLSeq2SeqBatch
from ..models.heads import ILQLHeads, candidate_values, gather_states
from ..models.lm_head import LMHead
from .backups import bootstrapped_targets
from .vocabulary import vocabulary_loss


def ilql_loss(
    logits: torch.Tensor,
    qs: tuple[torch.Tensor, ...],
    target_qs: tuple[torch.Tensor, ...],
    value: torch.Tensor,
    batch: ILQLBatch | ILQLSeq2SeqBatch,
    *,
    tau: float,
    gamma: float,
    cql_scale: float,
    awac_scale: float,
    awac_beta: float,
    target: str = "td",
    n_step: int = 1,
    discount_on: str = "token",
    value_min: float | None = None,
    value_max: float | None = None,
    awac_weight_clip: float | None = None,
    q_reduction: str = "min",
    next_value: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    r"""
    The loss of ILQL on dense Q-values.

    With `Q_i` the online heads at the taken tokens, `Qhat` the minimum of the targets there, `V`, `V'` the values
    before and after a step, `w` the weight of a step and means over the N steps of the batch:

        y      = r + d f V'                                    (targets; see `bootstrapped_targets`)
        L_Q    = sum_i mean (Q_i - y)^2
        L_V    = mean |tau - [Qhat < V]| (Qhat - V)^2          (expectile regression, eq. 4)
        L_CQL  = sum_i mean (logsumexp q_i - Q_i)
        L_AWAC = mean exp(awac_beta (Qhat - V)) CE(logits, a)
        L      = L_Q + L_V + cql_scale L_CQL + awac_scale L_AWAC

    Args:
        logits (`torch.Tensor` of shape `(B, n, V)`): Logits of the language model on the whole row.
        qs (`tuple` of `torch.Tensor` of shape `(B, T, V)`): Online Q-heads at `batch.actions_ixs`.
        target_qs (`tuple` of `torch.Tensor` of shape `(B, T, V)`): Their targets; no gradient goes into them.
        value (`torch.Tensor` of shape `(B, S)` or `(B, S, 1)`): V at `batch.states_ixs`, `S = T + 1`.
        batch ([`ILQLBatch`] or [`ILQLSeq2SeqBatch`]):
            Indices, rewards and `dones` (1 = not terminal); `truncated`, `weight` and `turn_ixs` where given.
        tau (`float`): Expectile of V, in (0, 1).
        gamma (`float`): Discount per token, or per utterance with `discount_on="utterance"`.
        cql_scale (`float`), awac_scale (`float`): Weights of the two terms.
        awac_beta (`float`): Inverse temperature of the cloning weight; 0 is plain behaviour cloning.
        target (`str`, *optional*, defaults to `"td"`):
            `"td"`, `"utterance"` (backup to the end of the utterance), or `"mc"`: one Q-head regressed on returns with
            `L_Q = mean (Q - G)^2 / 2`, no value loss.
        n_step (`int`, *optional*, defaults to 1): Steps of the `"td"` target.
        discount_on (`str`, *optional*, defaults to `"token"`): `"token"` or `"utterance"`.
        value_min (`float`, *optional*), value_max (`float`, *optional*): Bounds on `y` and `Qhat`.
        awac_weight_clip (`float`, *optional*): Largest cloning weight.
        q_reduction (`str`, *optional*, defaults to `"min"`): `"min"` or `"mean"` over the targets.
        next_value (`torch.Tensor` of shape `(B,)`, *optional*):
            V of the rows in `batch.next_input_ids`, the states after a history window.

    Returns:
        The loss, a scalar, and a dictionary of its terms and statistics (scalars without gradient).
    """
    check_options(tau=tau, target=target, n_step=n_step, discount_on=discount_on, num_q_heads=len(qs))
    value = value.squeeze(-1) if value.dim() == 3 else value
    tokens = batch.decoder_input_ids if isinstance(batch, ILQLSeq2SeqBatch) else batch.input_ids
    m = batch.dones[:, :-1].to(value.dtype)
    actions = tokens.gather(1, batch.actions_ixs + 1) * m.long()
    w = m if batch.weight is None else m * batch.weight.to(m.dtype).unsqueeze(1)
    total = w.sum()
    n = torch.where(total > 0, total, torch.ones_like(total))

    def take(x: torch.Tensor) -> torch.Tensor:
        return x.gather(2, actions.unsqueeze(2)).squeeze(2)

    q = [take(x) for x in qs]
    q_hat = torch.stack([take(x) for x in target_qs]).detach()
    q_hat = q_hat.mean(0) if q_reduction == "mean" else q_hat.amin(0)
    v = value[:, :-1]
    y = bootstrapped_targets(
        batch.rewards.to(value.dtype),
        value,
        m,
        gamma=gamma,
        truncated=batch.truncated,
        turn_ixs=turn_ixs(batch),
        next_value=next_value,
        has_next=has_next_row(batch),
        target=target,
        n_step=n_step,
        discount_on=discount_on,
    )
    y, q_hat = clamp(y, value_min, value_max), clamp(q_hat, value_min, value_max)
    advantage = q_hat - v
    expectile = torch.where(advantage.detach() >= 0, tau, 1 - tau)
    omega = clamp((awac_beta * advantage.detach()).exp(), None, awac_weight_clip)
    action_logits = logits.gather(1, batch.actions_ixs.unsqueeze(2).expand(-1, -1, logits.shape[2]))

    loss_q = sum((w * (x - y).square()).sum() for x in q) / n
    loss_v = (w * expectile * advantage.square()).sum() / n
    loss_cql = sum((w * (dense.logsumexp(2) - x)).sum() for dense, x in zip(qs, q, strict=True)) / n
    loss_awac = (w * omega * (action_logits.logsumexp(2) - take(action_logits))).sum() / n
    if target == "mc":
        loss_q, loss_v = loss_q / 2, 0.0 * loss_v
    loss = loss_q + loss_v + cql_scale * loss_cql + awac_scale * loss_awac

    metrics = {"loss/q": loss_q, "loss/v": loss_v, "loss/cql": loss_cql, "loss/awac": loss_awac}
    for name, x in [
        ("values", v),
        *((f"qvalues/{i}", x) for i, x in enumerate(q)),
        ("awac_weight", omega),
        ("advantage", advantage),
    ]:
        metrics |= {f"{name}/{statistic}": number for statistic, number in statistics(x, w, m, n).items()}
    return loss, {name: torch.as_tensor(x).detach() for name, x in metrics.items()}


def statistics(x: torch.Tensor, w: torch.Tensor, m: torch.Tensor, n: torch.Tensor) -> dict[str, torch.Tensor]:
    """Weighted mean and deviation, minimum and maximum of `x (B, T)` over real steps."""
    mean = (w * x).sum() / n
    std = ((w * (x - mean).square()).sum() / n).sqrt()
    infinity = torch.full_like(x, torch.inf)
    return {
        "mean": mean,
        "std": std,
        "min": torch.where(m.bool(), x, infinity).amin(),
        "max": torch.where(m.bool(), x, -infinity).amax(),
    }


def check_options(*, tau: float, target: str, n_step: int, discount_on: str, num_q_heads: int) -> None:
    """Raises a `ValueError` for options that contradict each other."""
    if not 0 < tau < 1:
        raise ValueError(f"`tau` is an expectile and must lie strictly between 0 and 1, got {tau}.")
    if target not in ("td", "utterance", "mc"):
        raise ValueError(f'`target` must be "td", "utterance" or "mc", got {target!r}.')
    if discount_on not in ("token", "utterance"):
        raise ValueError(f'`discount_on` must be "token" or "utterance", got {discount_on!r}.')
    if n_step < 1:
        raise ValueError(f"`n_step` must be at least 1, got {n_step}.")
    if n_step > 1 and target != "td":
        raise ValueError(f'`n_step={n_step}` goes with `target="td"`, got `target={target!r}`.')
    if target == "mc" and num_q_heads != 1:
        raise ValueError(
            f'`target="mc"` regresses one Q-head on returns, and the model has {num_q_heads}: build it with '
            "`num_q_heads=1`."
        )


def has_next_row(batch: ILQLBatch | ILQLSeq2SeqBatch) -> torch.Tensor | None:
    """`(B,)` bool: the rows whose next state is a row of its own; None if no row can have one."""
    return None if batch.next_attention_mask is None else batch.next_attention_mask.any(1)


def turn_ixs(batch: ILQLBatch | ILQLSeq2SeqBatch) -> torch.Tensor:
    """`(B, T)`: the utterance of each step; where the batch does not say, a run of neighbouring own tokens is one."""
    if batch.turn_ixs is not None:
        return batch.turn_ixs
    gaps = (batch.actions_ixs.diff(dim=1) != 1).long()
    return torch.nn.functional.pad(gaps.cumsum(1), (1, 0))


def ilql_loss_from_states(
    hidden_states: torch.Tensor,
    heads: ILQLHeads,
    lm_head: LMHead,
    batch: ILQLBatch | ILQLSeq2SeqBatch,
    next_hidden_state: torch.Tensor | None = None,
    *,
    num_items: torch.Tensor | float | None = None,
    tau: float,
    gamma: float,
    cql_scale: float,
    awac_scale: float,
    awac_beta: float,
    target: str = "td",
    n_step: int = 1,
    discount_on: str = "token",
    value_min: float | None = None,
    value_max: float | None = None,
    awac_weight_clip: float | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """
    [`ilql_loss`] from hidden states: the target heads read one row of their projection per action, each online head
    and the LM head make one chunked pass over the vocabulary, and padding costs nothing.

    Args:
        hidden_states (`torch.Tensor` of shape `(B, n, d)`): Inputs of the LM head.
        heads ([`ILQLHeads`]): The heads.
        lm_head ([`~models.lm_head.LMHead`]):
            `lm_head(rows, evaluate)` calls `evaluate(z, weight, bias, None, softcap=...)` with the projection of the
            language model, whose weight it lends to `"tied"` heads.
        batch ([`ILQLBatch`] or [`ILQLSeq2SeqBatch`]): As in [`ilql_loss`].
        next_hidden_state (`torch.Tensor` of shape `(B, d)`, *optional*):
            Last hidden states of `batch.next_input_ids`.
        num_items (`torch.Tensor` or `float`, *optional*):
            The (weighted) number of actions to divide by; that of the batch if not given. Over gradient accumulation
            and several processes it is that of the whole optimizer step.

    Returns:
        The loss, a scalar, and sums over the actions of this batch, for [`metrics_from_sums`].
    """
    tokens = batch.decoder_input_ids if isinstance(batch, ILQLSeq2SeqBatch) else batch.input_ids
    mask = batch.dones[:, :-1].bool()
    value = heads.v(gather_states(hidden_states, batch.states_ixs))
    value = value.to(torch.promote_types(value.dtype, batch.rewards.dtype))
    next_value = None
    if next_hidden_state is not None:
        with torch.no_grad():
            next_value = heads.v(next_hidden_state).to(value.dtype)
    y = bootstrapped_targets(
        batch.rewards.to(value.dtype),
        value,
        mask,
        gamma=gamma,
        truncated=batch.truncated,
        turn_ixs=turn_ixs(batch),
        next_value=next_value,
        has_next=has_next_row(batch),
        target=target,
        n_step=n_step,
        discount_on=discount_on,
    )

    # From here on one row per action, (N,) or (N, d).
    rows = gather_states(hidden_states, batch.actions_ixs)[mask]
    actions = tokens.gather(1, batch.actions_ixs + 1)[mask]
    y, v = clamp(y[mask], value_min, value_max), value[:, :-1][mask]
    w = torch.ones_like(y) if batch.weight is None else batch.weight.to(y.dtype).unsqueeze(1).expand_as(mask)[mask]
    count = w.sum()
    n = count if num_items is None else torch.as_tensor(num_items, dtype=w.dtype, device=w.device)
    n = torch.where(n > 0, n, torch.ones_like(n))

    taken = partial(candidate_values, candidates=actions.unsqueeze(1))
    with torch.no_grad():
        target_q = [head.on_language_model(rows, lm_head, taken).squeeze(1).to(y.dtype) for head in heads.target_q]
        q_hat = clamp(heads.reduce(target_q), value_min, value_max)
    advantage = q_hat - v
    expectile = torch.where(advantage.detach() >= 0, tau, 1 - tau)
    omega = (awac_beta * advantage.detach()).exp()
    clipped = torch.zeros_like(omega) if awac_weight_clip is None else (omega > awac_weight_clip).to(omega.dtype)
    omega = clamp(omega, None, awac_weight_clip)

    # Each step's share of the means: within the rows' losses it spares backward the scaling of large gradients.
    share = w / n
    loss_v = (share * expectile * advantage.square()).sum()
    td_scale = 0.5 if target == "mc" else 1.0

    def q_row_loss(q_a, lse, y, share):
        return share * (td_scale * (q_a - y).square() + cql_scale * (lse - q_a))

    loss_q_cql, q, cql = torch.zeros_like(loss_v), [], torch.zeros_like(count)
    for head in heads.q:
        if cql_scale == 0:
            q_a = head.on_language_model(rows, lm_head, taken).squeeze(1).to(y.dtype)
            head_loss = q_row_loss(q_a, q_a, y, share).sum()
        else:
            evaluate = partial(vocabulary_loss, actions=actions, row_loss=q_row_loss, row_inputs=(y, share))
            head_loss, q_a, lse = head.on_language_model(rows, lm_head, evaluate)
            cql = cql + (w * (lse - q_a)).sum()
        loss_q_cql = loss_q_cql + head_loss
        q.append(q_a.detach())

    loss = loss_q_cql + (loss_v if target != "mc" else 0.0 * loss_v)
    awac = torch.zeros_like(count)
    if awac_scale != 0:
        evaluate = partial(
            vocabulary_loss,
            actions=actions,
            row_loss=lambda l_a, lse, weight: weight * (lse - l_a),
            row_inputs=(awac_scale * share * omega,),
        )
        lm_loss, l_a, lse = lm_head(rows, evaluate)
        awac = (w * omega * (lse - l_a)).sum()
        loss = loss + lm_loss

    def rows_with(flag: torch.Tensor) -> torch.Tensor:
        return (flag.bool() & mask.any(1)).sum().to(count)

    with torch.no_grad():
        q_mean = torch.stack(q).mean(0)
        td = sum((w * (x - y).square()).sum() for x in q) * td_scale
        sums = {
            "loss/q": td,
            "loss/v": loss_v * n if target != "mc" else torch.zeros_like(count),
            "loss/cql": cql,
            "loss/awac": awac,
            "values/mean": (w * v).sum(),
            "q/mean": (w * q_mean).sum(),
            "q/target_gap": (w * (heads.reduce(q) - q_hat)).sum(),
            "advantage/mean": (w * advantage).sum(),
            "advantage/square": (w * advantage.square()).sum(),
            "awac_weight/mean": (w * omega).sum(),
            "awac_weight/clipped": (w * clipped).sum(),
            "actions": count,
            "truncated_rows": torch.zeros_like(count) if batch.truncated is None else rows_with(batch.truncated),
            "rows": rows_with(torch.ones_like(mask[:, 0])),
        }
    return loss, {name: x.detach() for name, x in sums.items()}


def metrics_from_sums(sums: dict[str, float], *, cql_scale: float, awac_scale: float) -> dict[str, float]:
    """Means over actions (or rows) of the sums of [`ilql_loss_from_states`], added up over batches and processes."""
    actions = sums["actions"] or 1.0
    means = {name: x / actions for name, x in sums.items() if name not in ("actions", "truncated_rows", "rows")}
    square = means.pop("advantage/square")
    means["advantage/std"] = max(square - means["advantage/mean"] ** 2, 0.0) ** 0.5
    means["truncated_fraction"] = sums["truncated_rows"] / (sums["rows"] or 1.0)
    means["loss"] = means["loss/q"] + means["loss/v"] + cql_scale * means["loss/cql"] + awac_scale * means["loss/awac"]
    return means


def clamp(x: torch.Tensor, low: float | None, high: float | None) -> torch.Tensor:
    """`x.clamp`, which takes no open interval on both sides."""
    return x if low is None and high is None else x.clamp(low, high)


__all__ = ["ilql_loss", "ilql_loss_from_states", "metrics_from_sums"]
