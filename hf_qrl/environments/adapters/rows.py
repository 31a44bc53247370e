# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""Which row of a dataset an episode plays."""

from collections.abc import Mapping, Sequence
from typing import Any

from ...data.chat import check_messages
from ..text_env import Message


Rows = Sequence[Mapping[str, Any]]


def check_rows(rows: Sequence[Any]) -> None:
    """Raises a `ValueError` if there are no rows."""
    if len(rows) == 0:
        raise ValueError("There are no rows: give the environment at least one prompt.")


def pick_row(rows: Sequence[Any], seed: int) -> tuple[int, Any]:
    """
    Returns the index and the row that an episode plays, `seed % len(rows)`: the seeds `range(len(rows))` play each row
    once, and those of [`~hf_qrl.environments.episode_seed`] are as good as random.
    """
    index = seed % len(rows)
    return index, rows[index]


def prompt_messages(prompt: Any, where: str) -> list[Message]:
    """Returns a prompt, a string or messages, as messages."""
    return (
        [{"role": "user", "content": prompt}] if isinstance(prompt, str) else check_messages(prompt, "prompt", where)
    )
