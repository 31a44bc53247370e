# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""Plays a game to its end and writes the episode down as a dataset row."""

import random
from collections.abc import Callable
from typing import Any

from ..seeding import episode_seed
from ..text_env import TextEnv, observation_messages


def play_episode(
    env: TextEnv, act: Callable[[], str], *, seed: int, options: dict[str, Any] | None = None
) -> dict[str, Any]:
    """
    Plays one episode until the game ends.

    Args:
        env ([`TextEnv`]):
            The game.
        act (`Callable[[], str]`):
            Returns the next action. The behaviour policies of the data look at the state of the game, not at its text.
        seed (`int`):
            Seed of the game.
        options (`dict`, *optional*):
            Options for `env.reset`.

    Returns:
        `dict`: `messages` (observations are the user's, actions the assistant's, the final observation is kept),
        `turn_rewards` (one for each action), `return` (their sum), `terminated`, `truncated` and `seed`.
    """
    observation, _ = env.reset(seed=seed, options=options)
    messages = observation_messages(observation)
    rewards: list[float] = []
    terminated = truncated = False
    while not (terminated or truncated):
        action = act()
        observation, reward, terminated, truncated, _ = env.step(action)
        messages += [{"role": "assistant", "content": action}, *observation_messages(observation)]
        rewards.append(reward)
    return {
        "messages": messages,
        "turn_rewards": rewards,
        "return": sum(rewards),
        "terminated": terminated,
        "truncated": truncated,
        "seed": seed,
    }


def draw_seed(rng: random.Random) -> int:
    """A seed from those of the training split, so that no episode of the data starts like one of an evaluation."""
    return episode_seed(rng.randrange(2**30))
