# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""A text environment as one of the batched interface: its conversations are sessions, and live here."""

from collections.abc import Sequence
from copy import deepcopy
from typing import Any, NamedTuple
from uuid import uuid4

import numpy as np
import torch

from ..data.chat import Message
from ..data.interfaces import LLMMessageLogType
from ..distributed.batched_data_dict import BatchedDataDict
from .failures import EnvironmentFailure, FailureClass, call_guarded
from .interfaces import EnvironmentInterface, EnvironmentReturn
from .resetting import EnvironmentReset
from .seeding import check_seed
from .stepping import FAILURE_KEY, TRUNCATED_KEY, string_list
from .text_env import CheckedStep, Replay, TextEnv, TextEnvFactory, checked_reset, checked_step, replay, short


SessionMetadata = dict[str, Any]


class SessionStep(NamedTuple):
    """A turn of one conversation: what its [`TextEnv`] answered, the metadata and the stop strings to go on with."""

    step: CheckedStep
    metadata: SessionMetadata
    stop_strings: list[str] | None


class TextEnvironment(EnvironmentInterface[SessionMetadata]):
    """
    An [`EnvironmentInterface`] with `reset` whose conversations are each played in a [`TextEnv`] of their own.

    The metadata of a conversation names its session and holds plain values only: `_session`, `_seed`, `_options`,
    `_info` (what the `TextEnv` returned, without what JSON has no word for), and, if there are any, `_legal_actions`
    and, at the start, `_tools`. A session is closed when its episode ends or fails (`_close_failure` tells if that
    went wrong); [`~TextEnvironment.release`] closes one that is given up.

    Conversations of a batch are played one after the other, and **one that fails does not touch the others**: its
    metadata carries the failure, its reward is NaN, and [`call_step`] sorts it out. Sessions stay in the process that
    began them; one that is not there any more is an `INFRA` failure, after which [`~TextEnvironment.restore`] plays it
    again.

    A subclass that changes what a turn does overrides [`~TextEnvironment.play`]: rollouts play one conversation at a
    time, and do not go through `step`.

    Args:
        factory (`Callable[[], TextEnv]`):
            Makes the environment of a conversation, a class for instance: a new one each time.
        keep_ended (`bool`, *optional*, defaults to `False`):
            Whether a session whose episode came to its end stays open until it is released. An environment that hangs
            when it is closed then does so in a call of its own, which cannot take the last turn with it.
    """

    def __init__(self, factory: TextEnvFactory, *, keep_ended: bool = False) -> None:
        self._factory = factory
        self._keep_ended = keep_ended
        self._sessions: dict[str, TextEnv] = {}
        self._prefix = uuid4().hex[:12]
        self._started = 0

    def reset(self, seeds: list[int], options: list[dict[str, Any]] | None = None) -> EnvironmentReset:
        """
        Starts a session per seed.

        Raises:
            EnvironmentFailure: If one of them cannot start. The others of this call are closed.
            ValueError: If a seed is out of range, or there is not one of the options per seed.
        """
        if options is not None and len(options) != len(seeds):
            raise ValueError(f"Got {len(options)} options for {len(seeds)} seeds, needed is one each.")
        logs: list[LLMMessageLogType] = []
        metadata: list[SessionMetadata] = []
        try:
            for i, seed in enumerate(seeds):
                row = self._open(seed, None if options is None else options[i])
                metadata.append(row)
                env = self._sessions[row["_session"]]
                messages, info = checked_reset(env, seed, row["_options"])
                logs.append(messages)
                row["_info"] = _plain_info(env, info)
                self._describe_start(row, env)
            strings = [self._stop_strings(row) for row in metadata]
        except BaseException:
            self.release(metadata)
            raise
        return EnvironmentReset(logs, metadata, strings)

    def step(
        self, message_log_batch: list[LLMMessageLogType], metadata: list[SessionMetadata]
    ) -> EnvironmentReturn[SessionMetadata]:
        """
        [`~TextEnvironment.play`]s each conversation on. Failures are in the metadata, never raised.
        """
        played = [self.play(log[-1], old) for log, old in zip(message_log_batch, metadata, strict=True)]
        steps = [step for step, _, _ in played]
        return EnvironmentReturn(
            # One message is what other loops know.
            observations=[step.messages[0] if len(step.messages) == 1 else step.messages for step in steps],
            metadata=[{**row, TRUNCATED_KEY: True} if step.truncated else row for step, row, _ in played],
            next_stop_strings=[strings for _, _, strings in played],
            rewards=torch.tensor([step.reward for step in steps], dtype=torch.float64),
            terminateds=torch.tensor([step.terminated for step in steps]),
            answers=None,
        )

    def play(self, message: Message, metadata: SessionMetadata) -> SessionStep:
        """
        Plays a message in its session. A failure is in the new metadata, and is not raised.

        Args:
            message (`dict`):
                The reply.
            metadata (`dict`):
                The conversation's. It is not changed.
        """
        row = {key: metadata[key] for key in ("_session", "_seed", "_options")}
        strings = None
        try:
            env = self._session(row)
            step = checked_step(env, str(message["content"]))
            row["_info"] = _plain_info(env, step.info)
            over = step.terminated or step.truncated
            if not over:
                self._describe_state(row, env)
                strings = self._stop_strings(row)
        except EnvironmentFailure as failure:
            row[FAILURE_KEY] = failure
            step, over = CheckedStep([], float("nan"), True, False, {}), True
        if over and (FAILURE_KEY in row or not self._keep_ended):
            # The game is over either way: that it cannot be put away is no reason to lose the episode.
            self.release([row])
        return SessionStep(step, row, strings)

    def restore(
        self,
        seed: int,
        actions: Sequence[str],
        *,
        options: dict[str, Any] | None = None,
        observation_hashes: Sequence[str] | None = None,
    ) -> tuple[SessionMetadata, Replay]:
        """
        Plays a lost episode again in a new session, with the arguments of [`replay`].

        Returns:
            `tuple[dict, Replay]`: metadata to go on with, and the episode so far.

        Raises:
            ReplayMismatch: If it takes another course.
            EnvironmentFailure: If the environment fails.
        """
        row = self._open(seed, options)
        try:
            env = self._sessions[row["_session"]]
            played = replay(env, seed, actions, options=options, observation_hashes=observation_hashes)
            self._describe_start(row, env)
        except BaseException:
            self.release([row])
            raise
        return row, played

    def release(self, metadata: Sequence[SessionMetadata]) -> None:
        """Closes the sessions of conversations that will not go on. Those that are closed already are passed over."""
        for row in metadata:
            env = self._sessions.pop(row["_session"], None)
            if env is not None:
                try:
                    call_guarded(f"`{type(env).__name__}.close`", env.close)
                except EnvironmentFailure as failure:
                    row["_close_failure"] = str(failure)

    def shutdown(self) -> None:
        """Closes every session."""
        self.release([{"_session": session} for session in list(self._sessions)])

    def global_post_process_and_metrics(self, batch: BatchedDataDict) -> tuple[BatchedDataDict, dict]:
        """Returns the batch as it is, and no metrics."""
        return batch, {}

    def __len__(self) -> int:
        """Number of open sessions."""
        return len(self._sessions)

    def _open(self, seed: int, options: dict[str, Any] | None) -> SessionMetadata:
        check_seed(seed)
        env = call_guarded("The factory of the environment", self._factory)
        if not isinstance(env, TextEnv):
            raise EnvironmentFailure(
                f"The factory must make a `TextEnv`, it made a `{type(env).__name__}`. For other kinds of "
                "environments use one of the adapters, such as `from_gymnasium`."
            )
        if any(env is held for held in self._sessions.values()):
            raise EnvironmentFailure(
                f"The factory made a `{type(env).__name__}` in which another conversation is being played, they would "
                "mix. It must make a new one each time: give the class, or a function that calls it."
            )
        session = f"{self._prefix}-{self._started}"
        self._started += 1
        self._sessions[session] = env
        return {"_session": session, "_seed": seed, "_options": deepcopy(options)}

    def _session(self, row: SessionMetadata) -> TextEnv:
        session = row["_session"]
        if session in self._sessions:
            return self._sessions[session]
        if session.startswith(self._prefix + "-"):
            raise EnvironmentFailure(f"Session {session} has ended: its episode is over, or was given up.")
        raise EnvironmentFailure(
            f"Session {session} is not in this process: the one that began it is gone, or the conversation was sent "
            "to another one. Play it again with `restore`.",
            FailureClass.INFRA,
        )

    def _describe_start(self, row: SessionMetadata, env: TextEnv) -> None:
        if env.tools is not None:
            if not isinstance(env.tools, list | tuple) or not all(isinstance(tool, dict) for tool in env.tools):
                raise EnvironmentFailure(
                    f"`{type(env).__name__}.tools` must be a list of JSON schemas, got {short(env.tools)}."
                )
            row["_tools"] = list(env.tools)
        self._describe_state(row, env)

    def _describe_state(self, row: SessionMetadata, env: TextEnv) -> None:
        name = f"`{type(env).__name__}.legal_actions`"
        legal = string_list(f"What {name} returns", call_guarded(name, env.legal_actions))
        if legal is not None:
            row["_legal_actions"] = legal

    def _stop_strings(self, row: SessionMetadata) -> list[str] | None:
        env = self._sessions[row["_session"]]
        return string_list(f"`{type(env).__name__}.stop_strings`", env.stop_strings)


def as_environment(factory: TextEnvFactory) -> TextEnvironment:
    """
    Makes an [`EnvironmentInterface`] of a [`TextEnv`], to collect episodes and evaluate policies in.

    Args:
        factory (`Callable[[], TextEnv]`):
            Makes one environment per conversation: the class itself, or what an adapter returns.

    Examples:

    ```python
    >>> env = as_environment(MyGame)
    >>> logs, metadata, stop_strings = env.reset([0, 1])
    ```
    """
    return TextEnvironment(factory)


_DROP = object()


def _plain_info(env: TextEnv, info: dict[str, Any]) -> dict[str, Any]:
    return call_guarded(f"Reading the information of `{type(env).__name__}`", _plain, info)


def _plain(value: Any) -> Any:
    """Keeps what JSON can say, so that metadata can always be stored and sent."""
    if isinstance(value, np.generic | np.ndarray | torch.Tensor):
        value = value.tolist()
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, dict):
        items = {str(key): _plain(item) for key, item in value.items()}
        return {key: item for key, item in items.items() if item is not _DROP}
    if isinstance(value, list | tuple):
        return [item for item in map(_plain, value) if item is not _DROP]
    return _DROP
