# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""What a worker holds: one environment of any kind, whose episodes are started and played one call at a time."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..data.chat import Message
from ..data.episodes import plain_json
from ..distributed.batched_data_dict import BatchedDataDict
from ..environments.failures import EnvironmentFailure, call_guarded
from ..environments.interfaces import EnvironmentInterface
from ..environments.resetting import EpisodeSource, call_reset
from ..environments.sessions import TextEnvironment
from ..environments.stepping import FAILURE_KEY, call_step
from ..environments.text_env import TextEnv
from ..environments.utils import plain_class
from .naming import describe, describe_object, names_everything


__all__ = [
    "EnvironmentHost",
    "HostStart",
    "HostStep",
    "describe_environment",
    "host_factory",
    "names_everything",
]


@dataclass
class HostStart:
    """
    Start of an episode.

    Args:
        messages (`list[dict]`):
            What the policy sees first.
        metadata (`Any`):
            State for the first step.
        stop_strings (`list[str]`, *optional*):
            Strings that end the first reply.
        stateful (`bool`):
            Whether the episode lives in this worker. Its steps must come here then, and need the last message only.
    """

    messages: list[Message]
    metadata: Any
    stop_strings: list[str] | None
    stateful: bool


@dataclass
class HostStep:
    """A turn: the row of a [`~hf_qrl.environments.StepResult`] in plain values."""

    observation: list[Message]
    metadata: Any
    stop_strings: list[str] | None
    reward: float
    reward_components: dict[str, float]
    terminated: bool
    truncated: bool


class EnvironmentHost:
    """
    One environment, behind calls of plain values that can go to another process.

    Args:
        env:
            An [`EnvironmentInterface`], or what makes one or makes a [`TextEnv`] without arguments: a class, a Ray
            actor class, a function, a `functools.partial`.
        source ([`EpisodeSource`], *optional*):
            Where episodes start, for an environment without `reset`.

    Raises:
        TypeError: If `env` is neither an environment nor makes one.
    """

    def __init__(self, env: Any, source: EpisodeSource | None = None) -> None:
        self._spare: list[TextEnv] = []
        self._own = not isinstance(env, EnvironmentInterface)
        self._given = plain_class(env)
        self._env: EnvironmentInterface | None = None
        self.source = source
        # A factory that fails makes its episodes fail, as a class does, and not this object.
        with suppress(EnvironmentFailure):
            self._env = self._make(self._given)

    @property
    def env(self) -> EnvironmentInterface:
        """The environment, which is made again where that has failed."""
        if self._env is None:
            self._env = self._make(self._given)
        return self._env

    def description(self) -> tuple[str, dict[str, Any] | None]:
        """Returns the [`describe_environment`] of what is played here."""
        return describe_environment(self._given)

    def reset(self, seed: int, index: int = 0, options: dict[str, Any] | None = None) -> HostStart:
        """
        Starts an episode.

        Args:
            seed (`int`):
                Seed, `0 <= seed < 2**32`.
            index (`int`, *optional*, defaults to 0):
                Number of the episode, by which `source` picks a row.
            options (`dict`, *optional*):
                Options of the reset.

        Raises:
            EnvironmentFailure: If the environment fails.
        """
        start = call_reset(
            self.env,
            [seed],
            indices=[index],
            options=None if options is None else [options],
            source=self.source,
        )
        return HostStart(start.message_logs[0], start.metadata[0], start.stop_strings[0], self.stateful)

    def step(self, messages: list[Message], metadata: Any) -> HostStep:
        """
        Plays the last message.

        Raises:
            EnvironmentFailure: If the environment fails.
        """
        if isinstance(self.env, TextEnvironment):
            return self._play(self.env, messages[-1], metadata)
        result = call_step(self.env, [messages], [metadata])
        return HostStep(
            observation=result.observations[0],
            metadata=result.metadata[0],
            stop_strings=result.next_stop_strings[0],
            reward=result.rewards.item(),
            reward_components={name: values.item() for name, values in result.reward_components.items()},
            terminated=bool(result.terminateds),
            truncated=bool(result.truncateds),
        )

    def restore(
        self,
        seed: int,
        actions: Sequence[str],
        observation_hashes: Sequence[str],
        options: dict[str, Any] | None = None,
    ) -> Any:
        """
        Plays an episode again that was lost with its worker, and returns the metadata to go on with.

        Raises:
            ReplayMismatch: If it takes another course.
            EnvironmentFailure: If the environment fails.
        """
        if not isinstance(self.env, TextEnvironment):
            raise TypeError(f"`{type(self.env).__name__}` keeps no episodes, so there is nothing to restore.")
        metadata, _ = self.env.restore(seed, actions, options=options, observation_hashes=observation_hashes)
        return metadata

    def release(self, metadata: Any) -> None:
        """Gives up an episode; one that is not here is passed over."""
        if isinstance(self._env, TextEnvironment):
            self._env.release([metadata])

    def post_process(self, batch: dict[str, Any]) -> dict[str, Any]:
        """
        Returns what the environment measures on finished episodes, in plain values.

        Raises:
            EnvironmentFailure: If it fails.
        """
        name = "`global_post_process_and_metrics`"
        _, metrics = call_guarded(name, self.env.global_post_process_and_metrics, BatchedDataDict(batch))
        return call_guarded(f"Reading what {name} returned", plain_json, dict(metrics))

    def close(self) -> None:
        """Closes the episodes that are still open, unless the environment was made elsewhere."""
        for env in self._spare:
            env.close()
        self._spare.clear()
        if self._own and isinstance(self._env, TextEnvironment):
            self._env.shutdown()

    @property
    def stateful(self) -> bool:
        """Whether episodes live in this object, rather than in their metadata."""
        return isinstance(self.env, TextEnvironment)

    def _play(self, env: TextEnvironment, message: Message, metadata: Any) -> HostStep:
        # Not through `call_step`: its tensors of one row, and its checks of what is checked, take longer than a game.
        step, metadata, strings = call_guarded("The environment's `step`", env.play, message, metadata)
        if FAILURE_KEY in metadata:
            raise metadata[FAILURE_KEY]
        truncated = step.truncated and not step.terminated
        return HostStep(step.messages, metadata, strings, step.reward, {}, step.terminated, truncated)

    def _make(self, env: Any) -> EnvironmentInterface:
        if isinstance(env, EnvironmentInterface):
            return env
        if isinstance(env, type) and issubclass(env, TextEnv):
            return TextEnvironment(env, keep_ended=True)
        if isinstance(env, TextEnv):
            name = type(env).__name__
            raise TypeError(
                f"Got an instance of `{name}`: pass the class, not an instance. Each conversation is played in a "
                f"`TextEnv` of its own; one with arguments is made by `functools.partial({name}, ...)`."
            )
        if not callable(env):
            raise TypeError(
                f"Needed is an environment or what makes one without arguments (a `TextEnv` class, for instance), got "
                f"a `{type(env).__name__}`. Other libraries' environments have adapters, such as `from_gymnasium`."
            )
        made = call_guarded("The factory of the environment", env)
        if isinstance(made, EnvironmentInterface):
            return made
        if not isinstance(made, TextEnv):
            raise TypeError(
                f"The factory made a `{type(made).__name__}`, needed is a `TextEnv` or an `EnvironmentInterface`. "
                "Other libraries' environments have adapters, such as `from_gymnasium`."
            )
        # Making one told what it makes; it plays the first episode.
        self._spare.append(made)
        return TextEnvironment(lambda: self._spare.pop() if self._spare else env(), keep_ended=True)


def host_factory(env: Any, source: EpisodeSource | None = None) -> "partial[EnvironmentHost]":
    """
    Returns what an executor makes its workers' objects with.

    Examples:

    ```python
    >>> executor = ProcessExecutor(host_factory(MyGame), num_workers=4, timeout=10)
    ```
    """
    return partial(EnvironmentHost, env, source)


def describe_environment(env: Any) -> tuple[str, dict[str, Any] | None]:
    """
    Returns the name of an environment's class or factory, and [`describe`]s the arguments that a `functools.partial`
    holds. [`names_everything`] tells whether that says what is played: of an object that is no function or class only
    the class is known.
    """
    if isinstance(env, TextEnvironment):
        return describe_environment(env._factory)
    if isinstance(env, partial):
        env_id, kwargs = describe_environment(env.func)
        return env_id, {
            **(kwargs or {}),
            **describe(env.keywords),
            **({"args": describe(env.args)} if env.args else {}),
        }
    described = describe_object(env)
    return described.pop("name"), described or None
