# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""The layers that heads are built of."""

import torch
from torch import nn


class HeadLinear(nn.Linear):
    """A linear layer that takes inputs of any floating point dtype: heads stay in float32 above a bfloat16 trunk."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input.to(self.weight.dtype))


class BufferLinear(nn.Module):
    """
    The linear layer of a target network: its weight and bias are buffers.

    Nothing that handles parameters (optimizers, PEFT's `modules_to_save`, the frozen parameters a DeepSpeed checkpoint
    leaves out) can then train, thaw or drop a target, and it is saved like any other weight.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, in_features: int, out_features: int, bias: bool = True):
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.register_buffer("weight", torch.zeros(out_features, in_features))
        self.register_buffer("bias", torch.zeros(out_features) if bias else None)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(input.to(self.weight.dtype), self.weight, self.bias)


def build_stem(kind: str, hidden_size: int, expansion: float, linear: type[nn.Module]) -> tuple[nn.Module, int]:
    """Returns the stem and the width of its output."""
    if kind == "identity":
        return nn.Identity(), hidden_size
    if kind == "linear":
        return linear(hidden_size, hidden_size, bias=False), hidden_size
    width = int(expansion * hidden_size)
    activation = {"relu": nn.ReLU, "silu": nn.SiLU}[kind]()
    return nn.Sequential(linear(hidden_size, width), activation), width


__all__ = ["BufferLinear", "HeadLinear", "build_stem"]
