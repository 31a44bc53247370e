# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""How an episode starts: by the environment's own `reset`, or from a dataset of starts."""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any, NamedTuple, Protocol, runtime_checkable

from ..data.chat import check_messages
from ..data.interfaces import LLMMessageLogType
from .failures import EnvironmentFailure, call_guarded
from .seeding import check_seed
from .stepping import string_list
from .text_env import checked_messages


class EnvironmentReset(NamedTuple):
    """
    Starts of B episodes.

    Args:
        message_logs (`list[LLMMessageLogType]`):
            Messages each policy sees first.
        metadata (`list`):
            State of each, for the first step.
        stop_strings (`list[list[str] | None]`):
            Strings that end each first reply.
    """

    message_logs: list[LLMMessageLogType]
    metadata: list[Any]
    stop_strings: list[list[str] | None]


@runtime_checkable
class SupportsReset(Protocol):
    """An environment that starts episodes itself. NeMo-RL's interface has no reset; this adds it."""

    def reset(self, seeds: list[int], options: list[dict[str, Any]] | None = None) -> EnvironmentReset:
        """Starts an episode per seed, the same one for the same seed and options."""
        ...


class EpisodeSource:
    """
    Starts of episodes for an environment that has no `reset`.

    Args:
        starts (`Callable`, or a sequence of rows such as a `datasets.Dataset`):
            Either a function `(seed, index) -> row`, or the rows, of which episode `index` takes row
            `index % len(rows)`: past the end they are played again. A row is a dict with `messages` (or
            `message_log`), and optionally `metadata` (or `extra_env_info`) and `stop_strings`: a NeMo-RL datum without
            its tensors.

    Raises:
        ValueError: If there are no rows.

    Examples:

    ```python
    >>> source = EpisodeSource([{"messages": [{"role": "user", "content": "1+1?"}], "metadata": {"answer": "2"}}])
    >>> source.start(seed=0, index=5)["metadata"]
    {'answer': '2'}
    ```
    """

    def __init__(self, starts: Callable[[int, int], Mapping[str, Any]] | Sequence[Mapping[str, Any]]) -> None:
        self._function = starts if callable(starts) else None
        self._rows: Sequence[Mapping[str, Any]] = [] if callable(starts) else starts
        if self._function is None and len(self._rows) == 0:
            raise ValueError("The rows of an `EpisodeSource` are empty: it needs at least one start.")

    def start(self, seed: int, index: int) -> dict[str, Any]:
        """
        Returns the start of an episode: `messages`, `metadata` and `stop_strings`.

        Raises:
            ValueError: If the row has no messages, or malformed ones.
        """
        row = self._function(seed, index) if self._function else self._rows[index % len(self._rows)]
        messages = row.get("messages", row.get("message_log"))
        texts = [
            {key: value for key, value in message.items() if key in ("role", "content")} for message in messages or []
        ]
        return {
            "messages": check_messages(texts, "messages", f"Start of episode {index}"),
            "metadata": row.get("metadata", row.get("extra_env_info")),
            "stop_strings": row.get("stop_strings"),
        }


class NumberedStarts(EpisodeSource):
    """
    The starts of the episodes with these numbers, in the place of the first ones.

    Args:
        source ([`EpisodeSource`]): All starts.
        numbers (`Sequence[int]`): Number of each episode.
    """

    def __init__(self, source: EpisodeSource, numbers: Sequence[int]) -> None:
        self.source, self.numbers = source, numbers

    def start(self, seed: int, index: int) -> dict[str, Any]:
        """Returns the start of an episode."""
        return self.source.start(seed, self.numbers[index])


def call_reset(
    env: Any,
    seeds: Sequence[int],
    *,
    indices: Sequence[int] | None = None,
    options: Sequence[dict[str, Any]] | None = None,
    source: EpisodeSource | None = None,
) -> EnvironmentReset:
    """
    Starts one episode per seed.

    Args:
        env (`EnvironmentInterface`):
            Environment in this process.
        seeds (`Sequence[int]`):
            Seeds, `0 <= seed < 2**32`.
        indices (`Sequence[int]`, *optional*):
            Numbers of the episodes, which `source` picks rows by; by default they count from 0.
        options (`Sequence[dict]`, *optional*):
            Options of each reset. The environment gets copies: what it changes in them is not changed for others.
        source (`EpisodeSource`, *optional*):
            Where the starts come from. If it is not given the environment needs a `reset` ([`SupportsReset`]).

    Returns:
        `EnvironmentReset`: the starts.

    Raises:
        EnvironmentFailure: If the environment or the source raises, or the starts are malformed.
        TypeError: If there is neither a source nor a `reset`.
        ValueError: If a seed is out of range.
    """
    seeds = [check_seed(seed) for seed in seeds]
    if source is not None:
        numbers = range(len(seeds)) if indices is None else indices
        starts = [
            call_guarded("The episode source", source.start, seed, i) for seed, i in zip(seeds, numbers, strict=True)
        ]
        logs, metadata, strings = (
            [start[key] for start in starts] for key in ("messages", "metadata", "stop_strings")
        )
        return _checked(logs, metadata, strings)
    if not isinstance(env, SupportsReset):
        raise TypeError(
            f"`{type(env).__name__}` cannot start episodes: it has no `reset(seeds, options)`. Pass the starts as "
            "`source=EpisodeSource(rows)`, or write the environment as a `TextEnv`."
        )
    copies = None if options is None else [deepcopy(option) for option in options]
    returned = call_guarded("The environment's `reset`", env.reset, seeds, copies)
    if not isinstance(returned, tuple) or len(returned) != 3 or any(len(column) != len(seeds) for column in returned):
        raise EnvironmentFailure(
            f"`reset` must return message_logs, metadata and stop_strings with one entry for each of {len(seeds)} "
            f"seeds, got {returned!r}."
        )
    logs = [
        call_guarded("Reading what `reset` returned", check_messages, log, "message_logs", f"Episode {i}")
        for i, log in enumerate(returned[0])
    ]
    return _checked(logs, list(returned[1]), list(returned[2]))


def _checked(logs: list[LLMMessageLogType], metadata: list[Any], stop_strings: list[Any]) -> EnvironmentReset:
    """What the first observations and stop strings may be is what those of a step may be."""
    return EnvironmentReset(
        [checked_messages(log, f"The first observation of episode {i}") for i, log in enumerate(logs)],
        metadata,
        [string_list(f"The stop strings of episode {i}", strings) for i, strings in enumerate(stop_strings)],
    )
