# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""
Losses over the vocabulary, and its maximum, without a tensor of (rows, vocabulary).

Every loss here is a function of a few statistics of each row `q = W z + b` of vocabulary-sized outputs: the output of
the token that was taken, `q_a`, `logsumexp(q)`, and the entropy `H` of `p = softmax(q)`. With `L_s` the derivative of
the loss by statistic s,

    dq_v = L_qa [v = a] + L_lse p_v - L_H p_v (log p_v + H),    dz = W^T dq,    dW = sum dq z^T,    db = sum dq,

so the rows can be evaluated a chunk at a time, the gradients formed while the chunk is at hand, and the chunk thrown
away. The price is that targets, weights and the normaliser must be known beforehand, and that the loss can be
differentiated once.
"""

from collections.abc import Callable
from typing import Any

import torch


# Elements of a chunk of outputs: large enough for the matrix products to run at full speed, small beside (N, V).
CHUNK_ELEMENTS = 1 << 24


def vocabulary_loss(
    z: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    offset: torch.Tensor | None,
    *,
    actions: torch.Tensor,
    row_loss: Callable[..., torch.Tensor],
    row_inputs: tuple[torch.Tensor, ...] = (),
    softcap: float | None = None,
    with_entropy: bool = False,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> tuple[torch.Tensor, ...]:
    """
    `sum_n row_loss(q_a, lse, *row_inputs)` over rows `q = W z + b + offset`, and the statistics.

    Args:
        z (`torch.Tensor` of shape `(N, D)`): Inputs of the projection.
        weight (`torch.Tensor` of shape `(V, D)`), bias (`torch.Tensor` of shape `(V,)`, *optional*): The projection.
        offset (`torch.Tensor` of shape `(N,)`, *optional*): A number added to every output of a row.
        actions (`torch.LongTensor` of shape `(N,)`): The token taken in each row.
        row_loss (`Callable`):
            Maps `(taken, logsumexp, *row_inputs)`, with `with_entropy` `(taken, logsumexp, entropy, *row_inputs)`,
            tensors of shape `(C,)`, to losses of shape `(C,)`; rows must not depend on each other.
        row_inputs (`tuple` of `torch.Tensor` of shape `(N,)`): Targets and weights; no gradient goes into them.
        softcap (`float`, *optional*): Outputs are `softcap * tanh(q / softcap)`, as in Gemma's logits.
        with_entropy (`bool`, *optional*, defaults to `False`): Whether the entropy of a row is one of its statistics.
        chunk_elements (`int`): Size of the largest temporary tensor.

    Returns:
        The loss, a scalar with gradients to `z`, `weight`, `bias` and `offset`, and without gradient `taken (N,)`,
        `logsumexp (N,)` and, with `with_entropy`, `entropy (N,)`. All are float32, or float64 for float64 weights.
    """
    options = (softcap, with_entropy, chunk_elements, torch.is_grad_enabled())
    return _VocabularyLoss.apply(z, weight, bias, offset, actions, row_loss, row_inputs, *options)


def vocabulary_maximum(
    z: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    offset: torch.Tensor | None,
    *,
    vocab_size: int | None = None,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    `max_v q_v` and its token, over rows `q = W z + b + offset`.

    Args:
        z, weight, bias, offset: As in [`vocabulary_loss`].
        vocab_size (`int`, *optional*): Only the first so many tokens are allowed; all if not given.
        chunk_elements (`int`): Size of the largest temporary tensor.

    Returns:
        The maximum `(N,)`, float32, or float64 for float64 weights, and the token `(N,)`, both without gradient.
    """
    weight, bias = weight[:vocab_size], None if bias is None else bias[:vocab_size]
    rows, vocab = z.shape[0], weight.shape[0]
    chunk = chunk_length(rows, vocab, chunk_elements)
    top = torch.empty(rows, dtype=accumulation_dtype(weight), device=z.device)
    token = torch.empty(rows, dtype=torch.long, device=z.device)
    buffer = torch.empty(chunk, vocab, dtype=weight.dtype, device=z.device)
    with torch.no_grad(), torch.autocast(z.device.type, enabled=False):
        for start in range(0, rows, chunk):
            part = slice(start, min(start + chunk, rows))
            q = torch.mm(z[part], weight.t(), out=buffer[: part.stop - start])
            if bias is not None:
                q += bias
            top[part], token[part] = q.max(1)
        return top if offset is None else top + offset, token


def vocabulary_mean(
    z: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    offset: torch.Tensor | None,
    *,
    vocab_size: int | None = None,
) -> torch.Tensor:
    """
    The mean over tokens of rows `q = W z + b + offset`, `(N,)` without gradient, from the mean of the projection.

    Args:
        z, weight, bias, offset, vocab_size: As in [`vocabulary_maximum`].
    """
    weight, dtype = weight[:vocab_size], accumulation_dtype(weight)
    with torch.no_grad(), torch.autocast(z.device.type, enabled=False):
        mean = z.to(dtype) @ (weight.sum(0, dtype=dtype) / len(weight))
        if bias is not None:
            mean += bias[:vocab_size].mean(dtype=dtype)
        return mean if offset is None else mean + offset


def accumulation_dtype(weight: torch.Tensor) -> torch.dtype:
    return torch.float64 if weight.dtype == torch.float64 else torch.float32


def chunk_length(rows: int, width: int, chunk_elements: int) -> int:
    """Rows of `width` elements to a chunk: about `chunk_elements` in all, and all chunks about as long."""
    chunks = max(1, -(-rows * width // chunk_elements))
    return max(1, -(-rows // chunks))


def keep_gradients(ctx: Any, gradients: tuple[torch.Tensor | None, ...], inputs: tuple[torch.Tensor | None, ...]):
    """Keeps the gradients of a scalar, formed in its forward pass, for [`kept_gradients`]."""
    ctx.gradients = [g if g is None or of is None else g.to(of.dtype) for g, of in zip(gradients, inputs, strict=True)]


def kept_gradients(ctx: Any, grad_loss: torch.Tensor) -> list[torch.Tensor | None]:
    """The gradients of [`keep_gradients`] times that of the scalar; once."""
    # `once_differentiable` looks at `grad_loss` alone, and would make the gradients constants without a word.
    if torch.is_grad_enabled():
        raise RuntimeError("The loss over the vocabulary has no second derivative (`create_graph=True`).")
    if ctx.gradients is None:
        raise RuntimeError("The loss over the vocabulary was already differentiated; evaluate it again.")
    gradients, ctx.gradients = ctx.gradients, None
    # A pass over (V, D) less where it is free to look at the number; another device would have to be waited for.
    if grad_loss.device.type != "cpu" or grad_loss.item() != 1.0:
        gradients = [None if g is None else g.mul_(grad_loss.to(g.dtype)) for g in gradients]
    return gradients


class _VocabularyLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z, *arguments):
        with torch.autocast(z.device.type, enabled=False):
            return _VocabularyLoss._forward(ctx, z, *arguments)

    @staticmethod
    def _forward(
        ctx,
        z,
        weight,
        bias,
        offset,
        actions,
        row_loss,
        row_inputs,
        softcap,
        with_entropy,
        chunk_elements,
        grad_enabled,
    ):
        rows, vocab = z.shape[0], weight.shape[0]
        accumulate = accumulation_dtype(weight)
        chunk = chunk_length(rows, vocab, chunk_elements)
        needs = [grad_enabled and needed for needed in ctx.needs_input_grad[:4]]

        loss = torch.zeros((), dtype=accumulate, device=z.device)
        taken = torch.empty(rows, dtype=accumulate, device=z.device)
        lse = torch.empty_like(taken)
        entropy = torch.empty_like(taken) if with_entropy else None
        grad_z = torch.empty_like(z) if needs[0] else None
        # The first chunk writes the gradient of the weight, the others add to it: a pass over (V, D) less.
        fill = torch.empty if rows else torch.zeros
        grad_weight = fill(weight.shape, dtype=accumulate, device=z.device) if needs[1] else None
        grad_bias = torch.zeros(vocab, dtype=accumulate, device=z.device) if needs[2] else None
        grad_offset = torch.empty_like(taken) if needs[3] else None
        buffer = torch.empty(chunk, vocab, dtype=weight.dtype, device=z.device)
        surprises = torch.empty(chunk, vocab, dtype=accumulate, device=z.device) if with_entropy else None
        # Probabilities and shares of a mean are smaller than float16 resolves.
        factor = weight.float() if weight.dtype == torch.float16 else weight

        for start in range(0, rows, chunk):
            part = slice(start, min(start + chunk, rows))
            z_part, a_part = z[part], actions[part, None]
            q = buffer[: z_part.shape[0]]
            torch.mm(z_part, weight.t(), out=q)
            if bias is not None:
                q += bias
            q = q.to(accumulate)
            slope = None
            if softcap is not None:
                q.div_(softcap).tanh_()
                slope = 1 - q.square()
                q.mul_(softcap)

            q_a = q.gather(1, a_part).squeeze(1)
            top = q.amax(1)
            # One fused, vectorised kernel that ends with the softmax in place of the outputs; the largest probability
            # is at least 1 / V, so the normaliser can be read from it without loss.
            p = torch.softmax(q, 1, out=q)
            normaliser = top - p.amax(1).log()
            if offset is not None:
                q_a, normaliser = q_a + offset[part], normaliser + offset[part]
            taken[part], lse[part] = q_a, normaliser
            statistics = [q_a, normaliser]
            if entropy is not None:
                surprise = torch.special.entr(p, out=surprises[: len(p)])  # -p log p
                entropy[part] = surprise.sum(1)
                statistics.append(entropy[part])

            with torch.enable_grad():
                statistics = [x.detach().requires_grad_() for x in statistics]
                part_loss = row_loss(*statistics, *(x[part] for x in row_inputs)).sum()
                slopes = torch.autograd.grad(part_loss, statistics, allow_unused=True, materialize_grads=True)
            loss += part_loss.detach()
            if not any(needs):
                continue
            by_taken, by_lse = slopes[:2]
            if grad_offset is not None:
                grad_offset[part] = by_taken + by_lse
            if entropy is not None:
                by_entropy = slopes[2]
                p.mul_((by_lse - by_entropy * entropy[part])[:, None]).addcmul_(surprise, by_entropy[:, None])
                by_lse = torch.ones_like(by_lse)
            if slope is not None:
                by_taken = by_taken * slope.gather(1, a_part).squeeze(1)
                p.mul_(slope)
            # The scale of a row is applied to the small side of each product instead of to its V probabilities.
            p = p.to(factor.dtype)
            if grad_z is not None:
                grad_z[part] = (p @ factor).to(accumulate) * by_lse[:, None] + weight[a_part[:, 0]] * by_taken[:, None]
            if grad_weight is not None:
                scaled = (z_part.to(accumulate) * by_lse[:, None]).to(factor.dtype)
                if factor.dtype == accumulate:
                    grad_weight.addmm_(p.t(), scaled, beta=0 if start == 0 else 1)
                elif start == 0:
                    grad_weight.copy_(p.t() @ scaled)
                else:
                    grad_weight += p.t() @ scaled
                grad_weight.index_add_(0, a_part[:, 0], z_part.to(accumulate) * by_taken[:, None])
            if grad_bias is not None:
                grad_bias += p.t().to(accumulate) @ by_lse
                grad_bias.index_add_(0, a_part[:, 0], by_taken)

        keep_gradients(ctx, (grad_z, grad_weight, grad_bias, grad_offset), (z, weight, bias, offset))
        found = (taken, lse) if entropy is None else (taken, lse, entropy)
        ctx.mark_non_differentiable(*found)
        return loss, *found

    @staticmethod
    def backward(ctx, grad_loss, *_grad_statistics):
        return (*kept_gradients(ctx, grad_loss), None, None, None, None, None, None, None)
