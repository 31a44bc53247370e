# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""
Which checkpoints are whole.

A checkpoint is many files, and the last one written is the trainer's state. A directory without it is what a killed
process left behind, and is never resumed from.
"""

import json
from pathlib import Path

from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR


def mark_incomplete(checkpoint: str | Path) -> None:
    """To be called before the first file of a checkpoint is written, for there may be an older one in its place."""
    (Path(checkpoint) / TRAINER_STATE_NAME).unlink(missing_ok=True)


def is_complete(checkpoint: str | Path) -> bool:
    try:
        json.loads((Path(checkpoint) / TRAINER_STATE_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return True


def last_complete_checkpoint(output_dir: str | Path) -> str | None:
    """The checkpoint of the most steps in `output_dir` that is whole, or None."""
    steps = {}
    for path in Path(output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
        step = path.name.removeprefix(f"{PREFIX_CHECKPOINT_DIR}-")
        if path.is_dir() and step.isdigit() and is_complete(path):
            steps[int(step)] = str(path)
    return steps[max(steps)] if steps else None


__all__ = ["is_complete", "last_complete_checkpoint", "mark_incomplete"]
