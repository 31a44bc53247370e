# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""Environments that draw from Python's and NumPy's global generators, as if each had its own."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from ..text_env import Observation, TextEnv, TextEnvFactory, TextStep


class PrivateRandomTextEnv(TextEnv):
    """
    Plays a text environment with global random state of its own, which it starts from the seed and puts in place
    around each call. Several such environments can then alternate in a thread, and episodes can be replayed. It does
    not help against other **threads**, which share the global state meanwhile: give such environments processes of
    their own.

    Args:
        env (`TextEnv`):
            Environment to play.
    """

    def __init__(self, env: TextEnv) -> None:
        self.env = env
        self._state: tuple[Any, Any] | None = None

    @contextmanager
    def _own_state(self, seed: int | None = None) -> Iterator[None]:
        callers = random.getstate(), np.random.get_state()
        try:
            if seed is not None:
                random.seed(seed)
                np.random.seed(seed)
            elif self._state is not None:
                random.setstate(self._state[0])
                np.random.set_state(self._state[1])
            yield
            self._state = random.getstate(), np.random.get_state()
        finally:
            random.setstate(callers[0])
            np.random.set_state(callers[1])

    def reset(self, *, seed: int, options: dict[str, Any] | None = None) -> tuple[Observation, dict[str, Any]]:
        with self._own_state(seed):
            returned = self.env.reset(seed=seed, options=options)
        self.stop_strings, self.tools = self.env.stop_strings, self.env.tools
        return returned

    def step(self, action: str) -> TextStep:
        with self._own_state():
            returned = self.env.step(action)
        self.stop_strings = self.env.stop_strings
        return returned

    def legal_actions(self) -> list[str] | None:
        with self._own_state():
            return self.env.legal_actions()

    def close(self) -> None:
        self.env.close()


def with_private_random(factory: TextEnvFactory) -> TextEnvFactory:
    """
    Gives each environment of a factory global random state of its own ([`PrivateRandomTextEnv`]).

    Args:
        factory (`Callable[[], TextEnv]`):
            Makes environments that use `random` or `numpy.random` without a generator of their own.

    Returns:
        `Callable[[], TextEnv]`: makes the same environments, reproducible.
    """
    return partial(_make, factory)


def _make(factory: TextEnvFactory) -> TextEnv:
    return PrivateRandomTextEnv(factory())
