# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""OpenEnv's clients, as text environments."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from ..failures import EnvironmentFailure, FailureClass, classify
from ..text_env import Observation, TextEnv, TextEnvFactory, TextStep


class OpenEnvTextEnv(TextEnv):
    """
    Plays one session of an OpenEnv server. See [`from_openenv`] for the arguments.
    """

    def __init__(
        self,
        make_client: Callable[[], Any],
        action_parser: Callable[[str], Any],
        obs_to_text: Callable[[Any], Observation],
        *,
        invalid_observation: str = "This is not a valid action.",
        invalid_reward: float = 0.0,
        connect_attempts: int = 5,
        retry_delay: float = 1.0,
    ) -> None:
        self.make_client = make_client
        self.action_parser = action_parser
        self.obs_to_text = obs_to_text
        self.invalid_observation = invalid_observation
        self.invalid_reward = invalid_reward
        self.connect_attempts = connect_attempts
        self.retry_delay = retry_delay
        self.client: Any = None

    def reset(self, *, seed: int, options: dict[str, Any] | None = None) -> tuple[Observation, dict[str, Any]]:
        # A server that is full refuses the reset and closes the connection; nothing has happened yet, so try again.
        for attempt in range(1, self.connect_attempts + 1):
            self.close()
            try:
                self.client = self.make_client()
                result = self.client.reset(seed=seed, **(options or {}))
                return self.obs_to_text(result.observation), {}
            except Exception as error:
                self.close()
                if attempt == self.connect_attempts or not _is_infra(error):
                    raise _failure(error, "reset") from None
                time.sleep(self.retry_delay)
        raise ValueError(f"`connect_attempts` must be at least 1, got {self.connect_attempts}.")

    def step(self, action: str) -> TextStep:
        parsed = self.action_parser(action)
        if parsed is None:
            return self.invalid_observation, self.invalid_reward, False, False, {"invalid_action": True}
        if self.client is None:
            raise EnvironmentFailure(
                "The connection to the OpenEnv server is gone. Replay the episode in a new session.",
                FailureClass.INFRA,
            )
        try:
            result = self.client.step(parsed)
        except BaseException as error:
            # Replies carry no number: after a timeout the next call would get the reply of this one. And whether the
            # server has taken the action is not known, so it is not sent again.
            self.close()
            if isinstance(error, Exception):
                raise _failure(error, "step") from None
            raise
        # The server may leave out the reward of a turn.
        reward = 0.0 if result.reward is None else result.reward
        return self.obs_to_text(result.observation), reward, bool(result.done), False, {}

    def close(self) -> None:
        client, self.client = self.client, None
        if client is not None:
            client.close()


def from_openenv(
    make_client: Callable[[], Any],
    action_parser: Callable[[str], Any],
    obs_to_text: Callable[[Any], Observation],
    *,
    invalid_observation: str = "This is not a valid action.",
    invalid_reward: float = 0.0,
    connect_attempts: int = 5,
    retry_delay: float = 1.0,
) -> TextEnvFactory:
    """
    Makes a text environment of an OpenEnv server. Each conversation has a client of its own, hence a session of the
    server, which is closed with it and after any error.

    A server accepts one session at a time unless it was started with `max_concurrent_envs`. Its `done` is taken for an
    end, and a turn without a reward for a reward of 0.

    Args:
        make_client (`Callable[[], Any]`):
            Makes a **synchronous** client: `lambda: GenericEnvClient("http://localhost:8000").sync()`.
        action_parser (`Callable[[str], Any]`):
            Makes the server's action of a reply: `lambda text: {"message": text}`. `None` if it is none.
        obs_to_text (`Callable[[Any], str | list[dict]]`):
            Describes an observation.
        invalid_observation (`str`, *optional*, defaults to `"This is not a valid action."`):
            Answer to a reply that is no action. The server does not see such a turn.
        invalid_reward (`float`, *optional*, defaults to 0.0):
            Reward of such a turn.
        connect_attempts (`int`, *optional*, defaults to 5):
            How often a reset is tried when the server is full or cannot be reached.
        retry_delay (`float`, *optional*, defaults to 1.0):
            Seconds between the attempts.

    Returns:
        `Callable[[], TextEnv]`: makes text environments.

    Raises:
        ValueError: If `connect_attempts` is less than 1.
    """
    if connect_attempts < 1:
        raise ValueError(f"`connect_attempts` must be at least 1, got {connect_attempts}.")
    return partial(
        OpenEnvTextEnv,
        make_client,
        action_parser,
        obs_to_text,
        invalid_observation=invalid_observation,
        invalid_reward=invalid_reward,
        connect_attempts=connect_attempts,
        retry_delay=retry_delay,
    )


def _is_infra(error: Exception) -> bool:
    # The server's own errors all arrive as `RuntimeError`, with a code in the text.
    if isinstance(error, RuntimeError):
        return "code: CAPACITY_REACHED" in str(error) or "code: SESSION_ERROR" in str(error)
    return classify(error) is FailureClass.INFRA


def _failure(error: Exception, call: str) -> EnvironmentFailure:
    failure = EnvironmentFailure.from_exception(error, f"The OpenEnv client's `{call}`")
    if _is_infra(error):
        failure.failure_class = FailureClass.INFRA
    return failure
