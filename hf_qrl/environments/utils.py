# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""Helpers of environments, under NeMo-RL's names."""

import sys
from importlib import import_module
from typing import Any, TypedDict

from .interfaces import EnvironmentInterface


class EnvRegistryEntry(TypedDict):
    """Where the class of a registered environment is: `"package.module.Class"`."""

    actor_class_fqn: str


ENV_REGISTRY: dict[str, EnvRegistryEntry] = {}


def register_env(env_name: str, actor_class_fqn: str) -> None:
    """
    Gives an environment's class a name for [`create_env`].

    Args:
        env_name (`str`):
            Name.
        actor_class_fqn (`str`):
            Full name of the class, `"package.module.Class"`. It is imported by `create_env`, not now.

    Raises:
        ValueError: If the name is taken.
    """
    if env_name in ENV_REGISTRY:
        raise ValueError(
            f"The name {env_name!r} is taken by {ENV_REGISTRY[env_name]['actor_class_fqn']!r}. Use another one."
        )
    ENV_REGISTRY[env_name] = {"actor_class_fqn": actor_class_fqn}


def create_env(env_name: str, env_configs: dict[str, Any]) -> EnvironmentInterface:
    """
    Makes a registered environment from its part of a configuration.

    Unlike NeMo-RL's it is an object of this process, not a handle of a Ray actor: call `env.step(...)`.

    Args:
        env_name (`str`):
            Name given to [`register_env`].
        env_configs (`dict`):
            Configurations by name; `env_configs[env_name]` is the argument of the class.

    Raises:
        ValueError: If the name is not registered.
        KeyError: If `env_configs` has no entry for it.
    """
    if env_name not in ENV_REGISTRY:
        raise ValueError(
            f"No environment is registered as {env_name!r}, known are {sorted(ENV_REGISTRY)}. "
            "Call `register_env` first."
        )
    module, _, name = ENV_REGISTRY[env_name]["actor_class_fqn"].rpartition(".")
    return plain_class(getattr(import_module(module), name))(env_configs[env_name])


def plain_class(env_class: Any) -> Any:
    """
    Returns the class behind `@ray.remote`, so that an environment written as an actor runs in this process, without
    `ray.init`. Any other class is returned as it is.

    An environment that makes actors of its own still needs a running Ray.
    """
    # A decorated class can only exist once ray.actor is imported, so nothing is imported to look.
    actor_module = sys.modules.get("ray.actor")
    if actor_module is not None and isinstance(env_class, actor_module.ActorClass):
        return env_class.__ray_metadata__.modified_class
    return env_class


def chunk_list_to_workers(to_chunk: list[Any], num_workers: int) -> list[list[Any]]:
    """
    Splits a list over workers, in order.

    Args:
        to_chunk (`list`):
            Items.
        num_workers (`int`):
            Number of workers.

    Returns:
        `list[list]`: with at most one item per worker, one list each, empty ones at the end; else chunks of the size
        that is needed, rounded up, so that the last is smaller and **there may be fewer than** `num_workers`.

    Examples:

    ```python
    >>> chunk_list_to_workers([1, 2, 3, 4, 5], 3), chunk_list_to_workers([1], 2)
    ([[1, 2], [3, 4], [5]], [[1], []])
    ```
    """
    if len(to_chunk) <= num_workers:
        return [[item] for item in to_chunk] + [[] for _ in range(num_workers - len(to_chunk))]
    rows = -(-len(to_chunk) // num_workers)
    return [to_chunk[start : start + rows] for start in range(0, len(to_chunk), rows)]
