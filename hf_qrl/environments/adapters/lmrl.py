# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""Environments of LMRL-Gym's shape, which step from one text history to the next."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from ..text_env import Observation, TextEnv, TextEnvFactory, TextStep


class Text(NamedTuple):
    """An entry of a text history, with the two attributes that LMRL-Gym's environments read."""

    text: str
    is_action: bool


class LMRLTextEnv(TextEnv):
    """
    Plays one environment of LMRL-Gym's shape. See [`from_lmrl`] for the arguments.
    """

    def __init__(
        self,
        make_env: Callable[[], Any],
        make_text: Callable[[str, bool], Any] = Text,
        truncated_when: Callable[[Any], bool] | None = None,
    ) -> None:
        self.env = make_env()
        self.make_text = make_text
        self.truncated_when = truncated_when
        self._history: tuple[Any, ...] = ()

    def reset(self, *, seed: int, options: dict[str, Any] | None = None) -> tuple[Observation, dict[str, Any]]:
        self._history = tuple(self.env.reset(seed=seed, options=options))
        return _since_last_action(self._history), {}

    def step(self, action: str) -> TextStep:
        history, reward, done = self.env.step((*self._history, self.make_text(action, True)))
        self._history = tuple(history)
        cut = bool(done) and self.truncated_when is not None and self.truncated_when(self.env)
        return _since_last_action(self._history), float(reward), bool(done) and not cut, cut, {}

    def close(self) -> None:
        self.env.close()


def from_lmrl(
    make_env: Callable[[], Any],
    *,
    make_text: Callable[[str, bool], Any] = Text,
    truncated_when: Callable[[Any], bool] | None = None,
) -> TextEnvFactory:
    """
    Makes a text environment of one of LMRL-Gym's shape: `reset(seed, options) -> history` and
    `step(history) -> (history, reward, done)`, histories being tuples of texts with `text` and `is_action`.

    What the environment appends after the last action is the observation; if it returns a window of the history or the
    observation alone, that works too. Some of these environments draw from the global generators: wrap the result in
    [`~hf_qrl.environments.adapters.with_private_random`].

    Args:
        make_env (`Callable[[], Any]`):
            Makes one environment per conversation.
        make_text (`Callable[[str, bool], Any]`, *optional*):
            Makes an entry of a history; the environment's own `Text` class, if it insists on it.
        truncated_when (`Callable[[Any], bool]`, *optional*):
            Says of the environment, once it is done, whether that was only a limit. By default `done` is an end.

    Returns:
        `Callable[[], TextEnv]`: makes text environments.
    """
    return partial(LMRLTextEnv, make_env, make_text, truncated_when)


def _since_last_action(history: tuple[Any, ...]) -> str:
    texts: list[str] = []
    for entry in reversed(history):
        if entry.is_action:
            break
        texts.append(entry.text)
    return "".join(reversed(texts))
