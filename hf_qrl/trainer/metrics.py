# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""Metrics as sums over actions, so that means do not depend on how the data was split into batches."""

import torch
from accelerate import Accelerator


class MetricSums:
    """
    Adds up named scalars on the device and reads them only when asked: a training step that does not log does not
    wait for the device.
    """

    def __init__(self) -> None:
        self._names: list[str] = []
        self._totals: torch.Tensor | None = None

    def add(self, sums: dict[str, torch.Tensor]) -> None:
        """Adds scalars; the names must be the same at every call."""
        values = torch.stack([x.detach().float() for x in sums.values()])
        if self._totals is None:
            # Apple's GPUs have no float64.
            self._names, self._totals = list(sums), values if values.device.type == "mps" else values.double()
        else:
            self._totals += values

    def pop(self, accelerator: Accelerator) -> dict[str, float]:
        """Sums over all processes since the last call; empty if nothing was added on this one."""
        if self._totals is None:
            return {}
        totals = accelerator.reduce(self._totals, reduction="sum").tolist()
        self._totals = None
        return dict(zip(self._names, totals, strict=True))


__all__ = ["MetricSums"]
