# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""Losses: pure functions on tensors. Each file reads like its paper."""

from .ilql import ilql_loss


__all__ = ["ilql_loss"]
