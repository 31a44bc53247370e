# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""
The conservative regulariser of Q-Transformer (Chebotar et al., 2023, arXiv 2309.10150, eq. 3): Q-values of tokens
that were not taken are pulled to the smallest value there is,

    C = [ sum_a (q_a - q_min)^2 - (q_taken - q_min)^2 ] / (A - 1)    over the A tokens of a state.

[`conservative_regularization_loss`] is the definition, on dense Q-values. [`conservative_loss`] is what training uses:
the same numbers from the inputs of a projection, without a tensor of (actions, vocabulary).
"""

import torch

from .vocabulary import (
    CHUNK_ELEMENTS,
    accumulation_dtype,
    chunk_length,
    keep_gradients,
    kept_gradients,
)


def conservative_regularization_loss(
    q_values: torch.Tensor,
    states_and_actions: torch.Tensor,
    action_mask: torch.Tensor,
    reward_min: float = 0.0,
) -> torch.Tensor:
    """
    The mean of C over the action steps, on dense Q-values.

    Args:
        q_values (`torch.Tensor` of shape `(b, n, A)`): Q of every token in the state of each step.
        states_and_actions (`torch.LongTensor` of shape `(b, n)`):
            The token *taken* at each step: of a sequence `x (b, n + 1)` that `q_values` have read up to its last
            token, `x[:, 1:]`. Entries outside of the mask are not read.
        action_mask (`torch.BoolTensor` of shape `(b, n)`): Steps that count; without any the loss is 0.
        reward_min (`float`, *optional*, defaults to 0.0):
            `q_min` itself, the value that other tokens are pulled to; it is not scaled by a length. It has to lie
            below every return of the data: above them, tokens that were never tried become the best ones. Rewards
            that are negative need a negative `reward_min`.

    Returns:
        The loss, a scalar. The weight alpha and the factor 1/2 of the paper are left to the caller.
    """
    if q_values.dim() != 3 or q_values.shape[2] < 2:
        raise ValueError(
            f"`q_values` must be of shape (b, n, A) with at least two tokens A, got {tuple(q_values.shape)}."
        )
    for name, x in (("states_and_actions", states_and_actions), ("action_mask", action_mask)):
        if x.shape != q_values.shape[:2]:
            raise ValueError(
                f"`{name}` must be of shape (b, n) = {tuple(q_values.shape[:2])} as `q_values` are, got "
                f"{tuple(x.shape)}: one entry for each step."
            )
    mask = action_mask.bool()
    taken = q_values.gather(2, states_and_actions.masked_fill(~mask, 0).unsqueeze(2)).squeeze(2)
    squares = (q_values - reward_min).square().sum(2)
    c = (squares - (taken - reward_min).square()) / (q_values.shape[2] - 1)
    return torch.where(mask, c, torch.zeros_like(c)).sum() / mask.sum().clamp(min=1)


def conservative_loss(
    z: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    offset: torch.Tensor | None,
    *,
    taken: torch.Tensor,
    share: torch.Tensor,
    q_min: float,
    vocab_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    `sum_n share_n C_n` over rows `q = W z + b + offset`.

    Args:
        z (`torch.Tensor` of shape `(N, D)`): Inputs of the projection.
        weight (`torch.Tensor` of shape `(V, D)`), bias (`torch.Tensor` of shape `(V,)`, *optional*): The projection.
        offset (`torch.Tensor` of shape `(N,)`, *optional*): A number added to every output of a row.
        taken (`torch.Tensor` of shape `(N,)`): Q of the token taken in each row, with its gradient.
        share (`torch.Tensor` of shape `(N,)`): Weight of each row; no gradient goes into it.
        q_min (`float`): Value that tokens that were not taken are pulled to.
        vocab_size (`int`, *optional*): Only the first so many tokens exist; all if not given.

    Returns:
        The loss, a scalar, and `C (N,)` without gradient.
    """
    others = len(weight[:vocab_size]) - 1
    if others < 1:
        raise ValueError("The conservative loss is about the tokens that were not taken, and there is one token only.")
    total, squares = sum_of_squares(
        z, weight, bias, offset, coefficients=share / others, q_min=q_min, vocab_size=vocab_size
    )
    of_taken = (taken - q_min).square()
    return total - (share / others * of_taken).sum(), (squares - of_taken.detach()) / others


def sum_of_squares(
    z: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    offset: torch.Tensor | None,
    *,
    coefficients: torch.Tensor,
    q_min: float,
    vocab_size: int | None = None,
    method: str | None = None,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> tuple[torch.Tensor, torch.Tensor]:
    r"""
    `sum_n c_n R_n` with `R_n = sum_a (q_na - q_min)^2` over rows `q = W z + b + offset`.

    With `w, beta` the means of W and b over the A tokens, `Wc, bc` what is left of them, and `mu` how far the mean Q
    of a row lies above q_min, the sum is that of a spread and a distance, and no product of the two is left:

        mu = w z + beta + offset - q_min
        R  = |Wc z + bc|^2 + A mu^2 = z'G z + 2 z'u + |bc|^2 + A mu^2,    G = Wc'Wc,  u = Wc'bc

    G costs 2 A D^2 operations once, a row D^2. With `H = sum c z z'`, `g = sum c z`, `k = sum c mu z`:

        dz  = 2 c (G z + u + A mu w)        doffset = 2 c A mu
        dWa = 2 (H Wca + bca g + k)         dba = 2 (Wca g + bca sum c + sum c mu)

    However large q_min is, it enters through `mu` alone, so it costs no digits.

    Args:
        z, weight, bias, offset, q_min, vocab_size: As in [`conservative_loss`].
        coefficients (`torch.Tensor` of shape `(N,)`): `c`; no gradient goes into it.
        method (`str`, *optional*):
            `"gram"` as above, or `"rows"`, which evaluates all outputs of a few rows at a time; the one with fewer
            operations if not given: from about N = 2 D / 3 on that is `"gram"`.
        chunk_elements (`int`): Size of the largest temporary tensor.

    Returns:
        The loss, a scalar with gradients to `z`, `weight`, `bias` and `offset`, which can be differentiated once, and
        `R (N,)` without gradient. Both are float32, or float64 for float64 weights.
    """
    if method not in (None, "gram", "rows"):
        raise ValueError(f'`method` must be "gram", "rows" or None, got {method!r}.')
    if vocab_size is not None and vocab_size < len(weight):
        weight, bias = weight[:vocab_size], None if bias is None else bias[:vocab_size]
    dtype = accumulation_dtype(weight)
    bias = torch.zeros(len(weight), dtype=dtype, device=z.device) if bias is None else bias
    level = torch.full((len(z),), -q_min, dtype=dtype, device=z.device) if offset is None else offset.to(dtype) - q_min
    return _SumOfSquares.apply(
        z, weight, bias, level, coefficients.to(dtype), method, chunk_elements, torch.is_grad_enabled()
    )


class _SumOfSquares(torch.autograd.Function):
    """`sum_n c_n sum_a q_na^2` over rows `q = W z + b + level`, and the inner sums."""

    @staticmethod
    def forward(ctx, z, weight, bias, level, coefficients, method, chunk_elements, grad_enabled):
        needs = [grad_enabled and needed for needed in ctx.needs_input_grad[:4]]
        if method is None:
            # A product is 2 A D^2 operations with the Gram matrix, and 2 A D N without.
            gram_cost, rows_cost = z.shape[1] * (1 + needs[1]), z.shape[0] * (1 + needs[0] + needs[1])
            method = "gram" if gram_cost <= rows_cost else "rows"
        evaluate = {"gram": _by_gram_matrix, "rows": _by_rows}[method]
        with torch.autocast(z.device.type, enabled=False):
            squares, gradients = evaluate(z, weight, bias, level, coefficients, needs, chunk_elements)
            loss = coefficients @ squares
        keep_gradients(ctx, gradients, (z, weight, bias, level))
        ctx.mark_non_differentiable(squares)
        return loss, squares

    @staticmethod
    def backward(ctx, grad_loss, _grad_squares):
        return (*kept_gradients(ctx, grad_loss), None, None, None, None)


def _by_gram_matrix(z, weight, bias, level, c, needs, chunk_elements):
    dtype, (tokens, width) = c.dtype, weight.shape
    z = z.to(dtype)
    w, beta = weight.sum(0, dtype=dtype) / tokens, bias.mean(dtype=dtype)
    mu = z @ w + beta + level
    chunk = chunk_length(tokens, width, chunk_elements)
    parts = [slice(start, min(start + chunk, tokens)) for start in range(0, tokens, chunk)]

    def centred(part):
        return weight[part].to(dtype) - w, bias[part].to(dtype) - beta

    gram = torch.zeros(width, width, dtype=dtype, device=z.device)
    u, of_bias = torch.zeros_like(w), torch.zeros_like(beta)
    for part in parts:
        wc, bc = centred(part)
        gram.addmm_(wc.t(), wc)
        u += bc @ wc
        of_bias += bc @ bc
    zg = z @ gram
    squares = (z * (zg + 2 * u)).sum(1) + of_bias + tokens * mu.square()
    if not any(needs):
        return squares, (None, None, None, None)

    c_mu = c * mu
    grad_z = 2 * (c[:, None] * (zg + u) + tokens * c_mu[:, None] * w) if needs[0] else None
    grad_level = 2 * tokens * c_mu if needs[3] else None
    grad_weight = torch.empty(weight.shape, dtype=dtype, device=z.device) if needs[1] else None
    grad_bias = torch.empty(tokens, dtype=dtype, device=z.device) if needs[2] else None
    if needs[1] or needs[2]:
        h, g, k = z.t() @ (c[:, None] * z), c @ z, c_mu @ z
        for part in parts:
            wc, bc = centred(part)
            if grad_weight is not None:
                torch.mm(wc, 2 * h, out=grad_weight[part]).addr_(bc, 2 * g).add_(2 * k)
            if grad_bias is not None:
                grad_bias[part] = 2 * (wc @ g + bc * c.sum() + c_mu.sum())
    return squares, (grad_z, grad_weight, grad_bias, grad_level)


def _by_rows(z, weight, bias, level, c, needs, chunk_elements):
    dtype, (rows, tokens) = c.dtype, (len(z), len(weight))
    chunk = chunk_length(rows, tokens, chunk_elements)
    squares = torch.empty(rows, dtype=dtype, device=z.device)
    grad_z = torch.empty(z.shape, dtype=dtype, device=z.device) if needs[0] else None
    grad_weight = torch.zeros(weight.shape, dtype=dtype, device=z.device) if needs[1] else None
    grad_bias = torch.zeros(tokens, dtype=dtype, device=z.device) if needs[2] else None
    grad_level = torch.empty(rows, dtype=dtype, device=z.device) if needs[3] else None
    buffer = torch.empty(chunk, tokens, dtype=weight.dtype, device=z.device)
    # Shares of a mean are smaller than float16 resolves.
    factor = weight.float() if weight.dtype == torch.float16 else weight
    for start in range(0, rows, chunk):
        part = slice(start, min(start + chunk, rows))
        q = torch.mm(z[part], weight.t(), out=buffer[: part.stop - start]).to(dtype)
        q += bias
        q += level[part, None]
        squares[part] = torch.linalg.vector_norm(q, dim=1).square()
        # The slopes 2 c q of a row; its scale is applied to the small side of each product.
        scale = 2 * c[part]
        if grad_level is not None:
            grad_level[part] = scale * q.sum(1)
        if grad_bias is not None:
            grad_bias += scale @ q
        q = q.to(factor.dtype)
        if grad_z is not None:
            grad_z[part] = (q @ factor).to(dtype) * scale[:, None]
        if grad_weight is not None:
            scaled = (z[part].to(dtype) * scale[:, None]).to(factor.dtype)
            if factor.dtype == dtype:
                grad_weight.addmm_(q.t(), scaled)
            else:
                grad_weight += q.t() @ scaled
    return squares, (grad_z, grad_weight, grad_bias, grad_level)


__all__ = ["conservative_loss", "conservative_regularization_loss", "sum_of_squares"]
