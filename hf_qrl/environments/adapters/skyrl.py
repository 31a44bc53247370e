# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""Environments of SkyRL-gym's shape, as text environments."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ..text_env import Observation, TextEnv, TextEnvFactory, TextStep
from .rows import Rows, check_rows, pick_row, prompt_messages


class SkyRLTextEnv(TextEnv):
    """
    Plays rows in environments of SkyRL-gym's shape. See [`from_skyrl`] for the arguments.
    """

    def __init__(
        self,
        make_env: Callable[[Mapping[str, Any]], Any],
        rows: Rows,
        truncated_when: Callable[[Any], bool] | None = None,
    ) -> None:
        check_rows(rows)
        self.make_env = make_env
        self.rows = rows
        self.truncated_when = truncated_when
        self.env: Any = None

    def reset(self, *, seed: int, options: dict[str, Any] | None = None) -> tuple[Observation, dict[str, Any]]:
        self.close()
        index, row = pick_row(self.rows, seed)
        self.env = self.make_env(row)
        messages, info = self.env.init(prompt_messages(row["prompt"], f"Row {index}"))
        return list(messages), {**info, "row": index}

    def step(self, action: str) -> TextStep:
        output = self.env.step(action)
        done = bool(output["done"])
        cut = done and self.truncated_when is not None and self.truncated_when(self.env)
        return list(output["observations"]), output["reward"], done and not cut, cut, output["metadata"] or {}

    def close(self) -> None:
        if self.env is not None:
            self.env.close()
        self.env = None


def from_skyrl(
    make_env: Callable[[Mapping[str, Any]], Any],
    rows: Rows,
    *,
    truncated_when: Callable[[Any], bool] | None = None,
) -> TextEnvFactory:
    """
    Makes a text environment of one of SkyRL-gym's shape: `init(prompt) -> (messages, info)` and
    `step(text) -> {"observations", "reward", "done", "metadata"}`.

    Args:
        make_env (`Callable[[Mapping], Any]`):
            Makes the environment of a row, which holds the answer: `lambda row: GSM8kEnv(extras=row)`.
        rows (`Sequence[Mapping]`):
            Rows with a `prompt`; an episode plays row `seed % len(rows)`.
        truncated_when (`Callable[[Any], bool]`, *optional*):
            Says of the environment, once it is done, whether that was only a limit: `lambda env: env.turns >=
            env.max_turns`. By default `done` is an end.

    Returns:
        `Callable[[], TextEnv]`: makes text environments.

    Raises:
        ValueError: If there are no rows.
    """
    check_rows(rows)
    return partial(SkyRLTextEnv, make_env, rows, truncated_when)
