# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""The value head, and the module of the heads of a model that has no others."""

import torch
from torch import nn

from .layers import HeadLinear, build_stem
from .sharding import gathered


class ValueHead(nn.Module):
    """State value V(s): `d -> 2d -> 1` with a ReLU, whatever the Q-heads are (it costs nothing and never folds)."""

    def __init__(self, hidden_size: int, expansion: int = 2):
        super().__init__()
        self.stem, width = build_stem("relu", hidden_size, expansion, HeadLinear)
        self.projection = HeadLinear(width, 1)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """`hidden_states (..., d)` to values of shape `(...)`."""
        with torch.autocast(hidden_states.device.type, enabled=False):
            return self.projection(self.stem(hidden_states)).squeeze(-1)

    @torch.no_grad()
    def reset(self, init: str) -> None:
        for module in self.modules():
            if isinstance(module, HeadLinear):
                module.reset_parameters()
        if init == "zero":
            self.projection.weight.zero_()
            self.projection.bias.zero_()

    @torch.no_grad()
    def set_constant(self, value: float) -> None:
        self.projection.bias.fill_(value)


class ValueHeads(nn.Module):
    """
    The heads of a model that has a value head only.

    They are one module with a `forward`, as Q-heads are, so that PEFT can save it (`modules_to_save=["heads"]`).
    """

    def __init__(self, hidden_size: int, head_expansion: int):
        super().__init__()
        self.v = ValueHead(hidden_size, head_expansion)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """State values `(B, S)` of hidden states `(B, S, d)`."""
        return self.v(states)

    def online(self) -> list[ValueHead]:
        """The heads that are trained."""
        return [self.v]

    def reset(self, init: str) -> None:
        """Initialises the head. Where it is partitioned over processes, all must call this."""
        with gathered(self.parameters(), modify=True):
            self.v.reset(init)


__all__ = ["ValueHead", "ValueHeads"]
