# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""
Q-heads, and the heads of ILQL.

A Q-head is a stem and a projection onto the vocabulary: `z = stem(h)`, `Q(s, .) = z W^T + b + offset(s)`, where the
offset is one number per state. The kinds differ in what stem, `W` and offset are:

| kind    | stem              | W                                   | offset                       |
|---------|-------------------|-------------------------------------|------------------------------|
| mlp     | d -> 2d, ReLU     | own                                 | none                         |
| linear  | identity          | own                                 | learned, linear in h         |
| tied    | d -> d            | the output embedding, detached      | learned, linear in h         |
| dueling | d -> 2d, SiLU     | own (the advantages A)              | V(z) - mean of A over tokens |

`b` is there only above a nonlinear stem: a policy whose Q is linear in h folds into the language model, and most
language models have no bias per token to take it up. An offset drops out of the softmax.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from .layers import BufferLinear, HeadLinear, build_stem
from .sharding import full_tensor, gathered
from .value_head import ValueHead


NONLINEAR_STEMS = ("relu", "silu")


class QHead(nn.Module):
    """
    One Q-function over the whole vocabulary, online (parameters) or target (buffers).

    The weights of the projection belong to this module and are touched only in its `forward`, where DDP, FSDP and
    DeepSpeed have them gathered; whoever wants something other than all Q-values hands in `evaluate`.

    Args:
        kind (`str`): `"mlp"`, `"linear"`, `"tied"` or `"dueling"`.
        stem (`str`): `"identity"`, `"linear"`, `"relu"` or `"silu"`.
        hidden_size (`int`): Width d of the hidden states.
        vocab_size (`int`): Number of tokens V.
        expansion (`float`): Width of a `"relu"` or `"silu"` stem in units of `hidden_size`, rounded down.
        target (`bool`): Whether this is a target network.
    """

    # Parameters online, buffers in a target; a tied head has no projection, and few heads an offset.
    weight: Any
    bias: Any
    offset: Any

    def __init__(
        self, kind: str, stem: str, hidden_size: int, vocab_size: int, expansion: float, target: bool = False
    ):
        super().__init__()
        self.kind, self.target = kind, target
        linear = BufferLinear if target else HeadLinear
        self.stem, width = build_stem(stem, hidden_size, expansion, linear)
        has_bias = stem in NONLINEAR_STEMS
        # A target keeps V - mean A of a dueling head as one linear map of z.
        self.offset = None
        if kind == "dueling":
            self.offset = linear(width, 1)
        elif not has_bias:
            self.offset = linear(hidden_size, 1)
        if kind == "tied":
            self.weight, self.bias = None, None
        elif target:
            self.register_buffer("weight", torch.zeros(vocab_size, width))
            self.register_buffer("bias", torch.zeros(vocab_size) if has_bias else None)
        else:
            self.weight = nn.Parameter(torch.empty(vocab_size, width))
            self.bias = nn.Parameter(torch.empty(vocab_size)) if has_bias else None

    def forward(
        self,
        hidden_states: torch.Tensor,
        lm_weight: Any = None,
        evaluate: Callable[..., Any] | None = None,
    ) -> Any:
        """
        Args:
            hidden_states (`torch.Tensor` of shape `(..., d)`):
                Inputs of the LM head.
            lm_weight (`torch.Tensor` of shape `(V, d)`, *optional*):
                The output embedding, needed by `"tied"` heads; no gradient goes into it.
            evaluate (`Callable`, *optional*):
                Called as `evaluate(z, weight, bias, offset)` with `z (..., width)`, `weight (V, width)`, `bias (V,)`
                or None and `offset (...)` or None; its result is returned.

        Returns:
            `torch.Tensor` of shape `(..., V)`: all Q-values, or what `evaluate` returned.
        """
        # Values stay in float32 under mixed precision: targets move by less than bfloat16 resolves.
        with torch.autocast(hidden_states.device.type, enabled=False):
            z = self.stem(hidden_states)
            weight, bias, offset = self.weight, self.bias, None
            if self.kind == "tied":
                weight = lm_weight.detach()
            z = z.to(weight.dtype)
            if self.offset is not None:
                offset = self.offset(z if self.kind == "dueling" else hidden_states).squeeze(-1)
            if self.kind == "dueling" and not self.target:
                # The gradient of a sum over rows is a view of one row; that of `mean` is a second (V, width).
                offset = offset - z @ (weight.sum(0) / len(weight)) - (0.0 if bias is None else bias.mean())
            return (evaluate or all_values)(z, weight, bias, offset)

    def on_language_model(self, rows: torch.Tensor, lm_head: Any, evaluate: Callable[..., Any] | None = None) -> Any:
        """`forward`, with the output embedding lent by the [`LMHead`] that owns it where the head projects with it."""
        if self.kind != "tied":
            return self(rows, None, evaluate)
        return lm_head.lend(rows, partial(self, evaluate=evaluate))

    def value(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The state value V(z) `(...)` of an online dueling head, the mean of its Q-values over the vocabulary."""
        with torch.autocast(hidden_states.device.type, enabled=False):
            return self.offset(self.stem(hidden_states)).squeeze(-1)

    @torch.no_grad()
    def reset(self, init: str) -> None:
        """Initialises an online head: `"default"` as `nn.Linear` does, `"zero"` with a last layer of zeros."""
        for module in self.modules():
            if isinstance(module, HeadLinear):
                module.reset_parameters()
        if self.weight is not None:
            nn.init.kaiming_uniform_(self.weight, a=5**0.5)
        if self.bias is not None:
            bound = self.weight.shape[1] ** -0.5
            nn.init.uniform_(self.bias, -bound, bound)
        if init == "zero":
            for tensor in self._last_layer():
                tensor.zero_()

    def _last_layer(self) -> list[torch.Tensor]:
        """What has to be zero for Q to be one constant."""
        tensors = [self.weight, self.bias]
        if self.offset is not None:
            tensors += [self.offset.weight, self.offset.bias]
        if self.kind == "tied" and isinstance(self.stem, HeadLinear):
            tensors.append(self.stem.weight)
        return [tensor for tensor in tensors if tensor is not None]

    def is_constant(self) -> bool:
        """Whether the last layer is zero, that is, `"zero"` initialisation and no training since."""
        return not any(bool(tensor.any()) for tensor in self._last_layer())

    @torch.no_grad()
    def set_constant(self, value: float) -> None:
        """Makes a head with a last layer of zeros predict `value` everywhere."""
        (self.bias if self.offset is None else self.offset.bias).fill_(value)

    @torch.no_grad()
    def resize(self, vocab_size: int) -> None:
        """Grows or shrinks the vocabulary; a new token starts as the mean of the old ones."""
        if self.kind == "tied" or vocab_size == self.weight.shape[0]:
            return
        for name in ("weight", "bias"):
            old = getattr(self, name)
            if old is None:
                continue
            mean = old.mean(0, keepdim=True)
            new = torch.cat([old[:vocab_size], mean.expand(max(0, vocab_size - len(old)), *old.shape[1:])])
            if self.kind == "dueling" and not self.target:
                # The state value takes up what the mean of the advantages loses, so that no Q-value changes.
                getattr(self.offset, name).add_(new.mean(0) - mean[0])
            setattr(self, name, nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new)

    @torch.no_grad()
    def update_target(self, target: "QHead", alpha: float) -> None:
        """
        Polyak step, `target <- (1 - alpha) target + alpha self`, on every tensor of the target (all float32). A
        sharded online head is gathered for it.
        """
        online = {name: full_tensor(parameter) for name, parameter in self.named_parameters()}
        for name, moving in target.named_buffers():
            if alpha == 1:
                moving.copy_(online[name])  # whatever it was, and fresh memory can be NaN
            else:
                moving.lerp_(online[name].to(moving.dtype), alpha)
        if self.kind == "dueling":
            # Means are linear, so the moving average of V - mean A is that of V minus that of the mean of A.
            for name in ("weight", "bias"):
                if name in online:
                    moving = getattr(target.offset, name)
                    moving.sub_(online[name].mean(0, dtype=moving.dtype), alpha=alpha)


class DuelingHead(QHead):
    """
    The dueling head of llama-qrlhf (Wang et al., 2016, arXiv 1511.06581), by its arguments.

    With `z = silu(x W0^T + b0)`, advantages `A = z Wa^T + ba` and a state value `V = z . wv + bv`, all learned,

        Q = V + A - mean of A over the tokens.

    Args:
        dim (`int`): Width of the hidden states.
        num_tokens (`int`): Number of tokens.
        expansion_factor (`float`, *optional*, defaults to 2): Width of z in units of `dim`.

    Example:

    ```python
    >>> import torch
    >>> from hf_qrl import DuelingHead

    >>> DuelingHead(dim=8, num_tokens=50)(torch.randn(2, 3, 8)).shape
    torch.Size([2, 3, 50])
    ```
    """

    def __init__(self, dim: int, num_tokens: int, expansion_factor: float = 2):
        super().__init__("dueling", "silu", dim, num_tokens, expansion_factor)
        self.reset("default")

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # The names of llama-qrlhf's own head are taken too.
        for old, new in (("to_values.0.", "offset."), ("to_advantages.0.", "")):
            for name in ("weight", "bias"):
                if f"{prefix}{old}{name}" in state_dict:
                    state_dict[f"{prefix}{new}{name}"] = state_dict.pop(f"{prefix}{old}{name}")
        super()._load_from_state_dict(state_dict, prefix, *args)


class QHeads(nn.Module):
    """
    Online Q-heads and their targets.

    All of them live in this one module, so that PEFT can save it (`modules_to_save=["heads"]`).
    """

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        head_type: str,
        head_stem: str,
        head_expansion: float,
        num_q_heads: int,
        q_reduction: str,
    ):
        super().__init__()
        self.q_reduction = q_reduction
        shape = (head_type, head_stem, hidden_size, vocab_size, head_expansion)
        self.q: Any = nn.ModuleList([QHead(*shape) for _ in range(num_q_heads)])
        self.target_q: Any = nn.ModuleList([QHead(*shape, target=True) for _ in range(num_q_heads)])

    def forward(self, states: torch.Tensor, lm_weight: torch.Tensor | None = None) -> Any:
        """
        All Q-values, dense.

        Args:
            states (`torch.Tensor` of shape `(B, T, d)`): Hidden states in which actions are scored.
            lm_weight (`torch.Tensor` of shape `(V, d)`, *optional*): The output embedding, for `"tied"` heads.

        Returns:
            `qs` and `target_qs`, tuples of `(B, T, V)`.
        """
        qs = tuple(head(states, lm_weight) for head in self.q)
        with torch.no_grad():
            target_qs = tuple(head(states, lm_weight) for head in self.target_q)
        return qs, target_qs

    def reduce(self, qs: tuple[torch.Tensor, ...] | list[torch.Tensor]) -> torch.Tensor:
        """Minimum or mean over the heads, by `q_reduction`."""
        stacked = torch.stack(tuple(qs))
        return stacked.mean(0) if self.q_reduction == "mean" else stacked.amin(0)

    def online(self) -> list[Any]:
        """The heads that are trained."""
        return list(self.q)

    # What follows writes or reads whole heads. Where they are partitioned over processes, all must call it.

    def reset(self, init: str) -> None:
        """Initialises the online heads and copies them into the targets."""
        with gathered(self.parameters(), modify=True):
            for head in self.online():
                head.reset(init)
        self.update_targets(1.0)

    def is_constant(self) -> bool:
        """Whether every Q-head still is as `"zero"` initialisation left it."""
        with gathered(self.parameters()):
            return all(head.is_constant() for head in self.q)

    def set_constant(self, value: float) -> None:
        """Start value of every head with a last layer of zeros; the targets follow."""
        with gathered(self.parameters(), modify=True):
            for head in self.online():
                head.set_constant(value)
        self.update_targets(1.0)

    def update_targets(self, alpha: float) -> None:
        """Moves the targets a fraction `alpha` of the way to the online heads; `alpha=1` copies."""
        for head, target in zip(self.q, self.target_q, strict=True):
            with gathered(head.parameters()):
                head.update_target(target, alpha)


class ILQLHeads(QHeads):
    """
    The heads of ILQL (arXiv 2206.11871): online Q-heads, their targets, and the value head.
    """

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        head_type: str,
        head_stem: str,
        head_expansion: int,
        num_q_heads: int,
        q_reduction: str,
    ):
        super().__init__(hidden_size, vocab_size, head_type, head_stem, head_expansion, num_q_heads, q_reduction)
        self.v = ValueHead(hidden_size, head_expansion)

    def forward(  # type: ignore[override]
        self,
        action_states: torch.Tensor,
        states: torch.Tensor | None = None,
        lm_weight: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        """
        All values, dense.

        Args:
            action_states (`torch.Tensor` of shape `(B, T, d)`): Hidden states in which actions are scored.
            states (`torch.Tensor` of shape `(B, S, d)`, *optional*): Hidden states to value; `action_states` if None.
            lm_weight (`torch.Tensor` of shape `(V, d)`, *optional*): The output embedding, for `"tied"` heads.

        Returns:
            `value (B, S)`, `qs` and `target_qs`, tuples of `(B, T, V)`.
        """
        value = self.v(action_states if states is None else states)
        qs, target_qs = super().forward(action_states, lm_weight)
        return value, qs, target_qs

    def online(self) -> list[Any]:
        return [*self.q, self.v]


def gather_states(hidden_states: torch.Tensor, ixs: torch.Tensor) -> torch.Tensor:
    """`hidden_states (B, n, d)` at positions `ixs (B, T)`, `(B, T, d)`."""
    return hidden_states.gather(1, ixs.unsqueeze(2).expand(-1, -1, hidden_states.shape[2]))


def all_values(
    z: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, offset: torch.Tensor | None
) -> torch.Tensor:
    """Q-values of every token, `(..., V)`."""
    values = nn.functional.linear(z, weight, bias)
    return values if offset is None else values + offset.unsqueeze(-1)


def candidate_values(
    z: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    offset: torch.Tensor | None,
    *,
    candidates: torch.Tensor,
) -> torch.Tensor:
    """
    Q-values of some tokens, by gathering their rows of the projection: O(k d) per state instead of O(V d).

    Args:
        candidates (`torch.LongTensor` of shape `(..., k)`): Token ids, for each state its own.

    Returns:
        `torch.Tensor` of shape `(..., k)`.
    """
    rows = nn.functional.embedding(candidates, weight)
    values = (rows @ z.unsqueeze(-1)).squeeze(-1)
    if bias is not None:
        values = values + bias[candidates]
    return values if offset is None else values + offset.unsqueeze(-1)


__all__ = [
    "DuelingHead",
    "ILQLHeads",
    "QHead",
    "QHeads",
    "ValueHead",
    "all_values",
    "candidate_values",
    "gather_states",
]
