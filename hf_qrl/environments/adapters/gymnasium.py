# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""gymnasium's environments, and those of its shape, as text environments."""

from collections.abc import Callable
from functools import partial
from typing import Any

from ..text_env import Observation, TextEnv, TextEnvFactory, TextStep


class GymnasiumTextEnv(TextEnv):
    """
    Plays one environment of gymnasium's shape. See [`from_gymnasium`] for the arguments.
    """

    def __init__(
        self,
        make_env: Callable[[], Any],
        action_parser: Callable[[str], Any],
        obs_to_text: Callable[[Any], Observation],
        *,
        invalid_observation: str = "This is not a valid action.",
        invalid_reward: float = 0.0,
    ) -> None:
        self.env = make_env()
        self.action_parser = action_parser
        self.obs_to_text = obs_to_text
        self.invalid_observation = invalid_observation
        self.invalid_reward = invalid_reward

    def reset(self, *, seed: int, options: dict[str, Any] | None = None) -> tuple[Observation, dict[str, Any]]:
        # Packages of this shape, such as GEM, know no options: only those given are passed on.
        observation, info = self.env.reset(seed=seed, **({} if options is None else {"options": options}))
        return self.obs_to_text(observation), info

    def step(self, action: str) -> TextStep:
        parsed = self.action_parser(action)
        if parsed is None:
            return self.invalid_observation, self.invalid_reward, False, False, {"invalid_action": True}
        observation, reward, terminated, truncated, info = self.env.step(parsed)
        return self.obs_to_text(observation), reward, terminated, truncated, info

    def close(self) -> None:
        self.env.close()


def from_gymnasium(
    env: str | Callable[[], Any],
    action_parser: Callable[[str], Any],
    obs_to_text: Callable[[Any], Observation],
    *,
    invalid_observation: str = "This is not a valid action.",
    invalid_reward: float = 0.0,
) -> TextEnvFactory:
    """
    Makes a text environment of one of gymnasium's shape: `reset(seed=...) -> (observation, info)` and
    `step(action) -> (observation, reward, terminated, truncated, info)`.

    Args:
        env (`str` or `Callable[[], gymnasium.Env]`):
            Name for `gymnasium.make`, or a function that makes one environment per conversation. An environment that
            is already made would be shared by all of them.
        action_parser (`Callable[[str], Any]`):
            Finds the action in a reply, `None` if there is none.
        obs_to_text (`Callable[[Any], str | list[dict]]`):
            Describes an observation.
        invalid_observation (`str`, *optional*, defaults to `"This is not a valid action."`):
            Answer to a reply without an action. The environment does not see such a turn.
        invalid_reward (`float`, *optional*, defaults to 0.0):
            Reward of such a turn.

    Returns:
        `Callable[[], TextEnv]`: makes text environments.

    Raises:
        TypeError: If `env` is neither a name nor a function.

    Examples:

    ```python
    moves = {"left": 0, "down": 1, "right": 2, "up": 3}
    env = as_environment(
        from_gymnasium(
            "FrozenLake-v1",
            action_parser=lambda text: moves.get(text.strip().lower()),
            obs_to_text=lambda cell: f"You are in row {cell // 4}, column {cell % 4}.",
        )
    )
    ```

    GEM has gymnasium's shape on strings, but seeds the global generators:
    `with_private_random(from_gymnasium(lambda: gem.make("game:GuessTheNumber-v0"), str, str))`, in processes of its
    own if there are threads.
    """
    if not isinstance(env, str) and not callable(env):
        raise TypeError(
            f"`env` must be the name of a gymnasium environment or a function that makes one, got an object of type "
            f"`{type(env).__name__}`. Conversations need one each: pass `lambda: gymnasium.make(...)`."
        )
    return partial(
        GymnasiumTextEnv,
        partial(_make, env) if isinstance(env, str) else env,
        action_parser,
        obs_to_text,
        invalid_observation=invalid_observation,
        invalid_reward=invalid_reward,
    )


def _make(name: str) -> Any:
    import gymnasium

    return gymnasium.make(name)
