# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""Batches and workers, known to no environment and no model."""

from .batched_data_dict import BatchedDataDict, SlicedDataDict


__all__ = ["BatchedDataDict", "SlicedDataDict"]
