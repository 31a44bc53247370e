# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""
Which checkpoints are whole.

A checkpoint is many files. One that is being written carries a marker file, which is removed when the last file is
in place; a directory that a killed process left behind keeps it and is never resumed from.
"""

from pathlib import Path

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR


MARKER = "INCOMPLETE"


def mark_incomplete(checkpoint: str | Path) -> None:
    """To be called before the first file of a checkpoint is written."""
    Path(checkpoint).mkdir(parents=True, exist_ok=True)
    (Path(checkpoint) / MARKER).write_text("This checkpoint is being written, or its writing was interrupted.\n")


def mark_complete(checkpoint: str | Path) -> None:
    """To be called after the last file of a checkpoint was written."""
    (Path(checkpoint) / MARKER).unlink(missing_ok=True)


def is_complete(checkpoint: str | Path) -> bool:
    return not (Path(checkpoint) / MARKER).exists()


def last_complete_checkpoint(output_dir: str | Path) -> str | None:
    """The checkpoint of the most steps in `output_dir` that is whole, or None."""
    steps = {}
    for path in Path(output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
        step = path.name.removeprefix(f"{PREFIX_CHECKPOINT_DIR}-")
        if path.is_dir() and step.isdigit() and is_complete(path):
            steps[int(step)] = str(path)
    return steps[max(steps)] if steps else None


__all__ = ["is_complete", "last_complete_checkpoint", "mark_complete", "mark_incomplete"]
