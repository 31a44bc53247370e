# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""Episodes: one row each, raw text, a reward per turn, and how it ended. `ILQLTrainer` trains on them as they are."""

import inspect
import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, Features, Json, List, Value

from .chat import ROLES, Message
from .rewards import turn_rewards as check_turn_rewards


SCHEMA_VERSION = "1"
TRUNCATION_REASONS = ("max_turns", "max_seq_len", "length", "env_limit")

# Messages one after the other and nothing between them: what models without a chat template read. As a tokenizer's
# `chat_template` it makes training read the same.
PLAIN_CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}{% endgeneration %}"
    "{% else %}{{ message['content'] }}{% endif %}{% endfor %}"
)

_OPTIONAL_COLUMNS: dict[str, Any] = {
    "schema_version": SCHEMA_VERSION,
    "episode_id": "",
    "run_id": "",
    "env_id": "",
    "env_kwargs": None,
    "task": "",
    "seed": None,
    "tools": None,
    "turn_reward_components": None,
    "turn_finish": None,
    "truncation_reason": None,
    "success": None,
    "policy": None,
    "turn_legal_actions": None,
    "metadata": None,
    "info": None,
}
_TOKEN_COLUMNS: dict[str, Any] = {
    "turn_token_ids": None,
    "turn_logprobs": None,
    "turn_prompt_ids": None,
    "tokenizer_id": None,
}
_JSON_COLUMNS = ("env_kwargs", "tools", "turn_reward_components", "policy", "turn_legal_actions", "metadata", "info")
_REQUIRED_COLUMNS = ("messages", "turn_rewards", "terminated", "truncated", "return")
# What a text that cannot be stored may hide in.
_TEXT_COLUMNS = ("messages", "task", "turn_finish", *_JSON_COLUMNS)
_WORDS = (str, bool, type(None))
_write = json.JSONEncoder(ensure_ascii=False).encode
# Of other columns than `messages`, one entry per assistant message.
_TURN_COLUMNS = (
    *("turn_finish", "turn_reward_components", "turn_legal_actions"),
    *("turn_token_ids", "turn_logprobs", "turn_prompt_ids"),
)


def episode_features(structured_messages: bool = False, tokens: bool = False) -> Features:
    """
    Returns the columns of a dataset of episodes.

    Args:
        structured_messages (`bool`, *optional*, defaults to `False`):
            Whether messages hold more than the strings "role" and "content", tool calls for instance.
        tokens (`bool`, *optional*, defaults to `False`):
            Whether the sampled tokens, their log-probabilities and the tokens they were sampled after are stored.

    Returns:
        [`~datasets.Features`]: `schema_version`, `episode_id`, `run_id` (strings); `env_id` (string), `env_kwargs`
        (JSON), `task` (string); `seed` (int64); `messages`, `tools` (JSON); `turn_rewards` (float64, one per assistant
        message), `turn_reward_components` (JSON: one dict per turn), `turn_finish` (`"eos"`, `"stop:..."` or
        `"length"`); `terminated`, `truncated` (bool), `truncation_reason`; `return` (float64), `success` (bool);
        `policy` (JSON), `turn_legal_actions` (JSON), `metadata`, `info` (JSON).

        Numbers inside of JSON columns may lose their last digits when they are read; those that are learned from have
        columns of their own.
    """
    message = Json() if structured_messages else {"role": Value("string"), "content": Value("string")}
    features = {
        "schema_version": Value("string"),
        "episode_id": Value("string"),
        "run_id": Value("string"),
        "env_id": Value("string"),
        "env_kwargs": Json(),
        "task": Value("string"),
        "seed": Value("int64"),
        "messages": List(message),
        "tools": Json(),
        "turn_rewards": List(Value("float64")),
        "turn_reward_components": Json(),
        "turn_finish": List(Value("string")),
        "terminated": Value("bool"),
        "truncated": Value("bool"),
        "truncation_reason": Value("string"),
        "return": Value("float64"),
        "success": Value("bool"),
        "policy": Json(),
        "turn_legal_actions": Json(),
        "metadata": Json(),
        "info": Json(),
    }
    if tokens:
        features |= {
            "turn_token_ids": List(List(Value("int64"))),
            "turn_logprobs": List(List(Value("float64"))),
            "turn_prompt_ids": List(List(Value("int64"))),
            "tokenizer_id": Value("string"),
        }
    return Features(features)


def make_episode(
    messages: list[Message],
    turn_rewards: list[float],
    *,
    terminated: bool,
    truncated: bool | None = None,
    **columns: Any,
) -> dict[str, Any]:
    """
    Makes a checked row of an episode.

    Args:
        messages (`list[dict]`):
            The conversation, with the observation after the last action.
        turn_rewards (`list[float]`):
            One reward per assistant message.
        terminated (`bool`):
            Whether the episode came to its end.
        truncated (`bool`, *optional*):
            Whether it was cut off; `not terminated` if not given.
        columns:
            Further columns of [`episode_features`].

    Raises:
        ValueError: If [`validate_episode`] does, or a column is unknown.

    Examples:

    ```python
    >>> messages = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
    >>> make_episode(messages, [1.0], terminated=True)["return"]
    1.0
    ```
    """
    unknown = sorted(set(columns) - set(_OPTIONAL_COLUMNS) - set(_TOKEN_COLUMNS))
    if unknown:
        raise ValueError(f"Episodes have no columns {unknown}. Put what is not in the schema into `info`.")
    row = {
        **_OPTIONAL_COLUMNS,
        **{name: plain_json(value) if name in _JSON_COLUMNS else value for name, value in columns.items()},
        "messages": plain_json(messages),
        "turn_rewards": [float(reward) for reward in turn_rewards],
        "terminated": terminated,
        "truncated": not terminated if truncated is None else truncated,
        "return": math.fsum(turn_rewards),
    }
    return validate_episode(row)


def validate_episode(row: Mapping[str, Any], where: str = "The episode") -> dict[str, Any]:
    """
    Checks the row of a finished episode, and returns it as a dict.

    Args:
        row (`Mapping`):
            Row with the columns of [`episode_features`]; those that may be None may also be missing.
        where (`str`, *optional*, defaults to `"The episode"`):
            Name of the row in error messages.

    Raises:
        ValueError: If a column is missing, a role is unknown, the lists of turns do not have one entry per assistant
            message, a reward is not finite, `return` is not their sum, the episode is not exactly one of terminated
            and truncated, the reason of its truncation is missing or unknown, or a text cannot be stored.
    """
    missing = [name for name in _REQUIRED_COLUMNS if name not in row]
    if missing:
        raise ValueError(f"{where} has no {', '.join(f'`{name}`' for name in missing)}, which every episode has.")
    messages = row["messages"]
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"{where}: `messages` must be a list of at least one message, got {messages!r}.")
    for message in messages:
        if not isinstance(message, Mapping):
            raise ValueError(f"{where}: a message is a dict, got {message!r}.")
        if message.get("role") not in ROLES:
            raise ValueError(f"{where}: unknown role {message.get('role')!r}, known roles are {ROLES}.")
    num_turns = sum(message["role"] == "assistant" for message in messages)
    if num_turns == 0:
        raise ValueError(f"{where}: no assistant message, so nothing was done in it. Drop it.")
    rewards = check_turn_rewards(row["turn_rewards"], "turn_rewards", num_turns, where)
    total = row["return"]
    if isinstance(total, bool) or not isinstance(total, Real):
        raise ValueError(f"{where}: `return` must be a number, got {total!r}.")
    if not math.isclose(total, math.fsum(rewards), rel_tol=1e-9, abs_tol=1e-9):
        raise ValueError(f"{where}: `return` is {total}, the sum of `turn_rewards` is {math.fsum(rewards)}.")
    for name in _TURN_COLUMNS:
        value = row.get(name)
        if value is not None and len(value) != num_turns:
            raise ValueError(f"{where}: `{name}` has {len(value)} entries for {num_turns} assistant messages.")
    for name in ("terminated", "truncated"):
        if not isinstance(row[name], bool):
            raise ValueError(f"{where}: `{name}` must be True or False, got {row[name]!r}.")
    if row["terminated"] == row["truncated"]:
        raise ValueError(
            f"{where}: exactly one of `terminated` and `truncated` must be True, got {row['terminated']} for both. An "
            "episode that came to its end at a limit is terminated; one that goes on is no row yet."
        )
    reason = row.get("truncation_reason")
    if row["truncated"] and reason not in TRUNCATION_REASONS:
        raise ValueError(
            f"{where}: `truncation_reason` of a truncated episode is one of {TRUNCATION_REASONS}, got {reason!r}."
        )
    if row["terminated"] and reason is not None:
        raise ValueError(f"{where}: it terminated, so `truncation_reason` must be None, got {reason!r}.")
    if _storing_error([row.get(name) for name in _TEXT_COLUMNS]) is not None:
        for name in _TEXT_COLUMNS:
            error = _storing_error(row.get(name))
            if error is not None:
                raise ValueError(f"{where}: `{name}` cannot be stored ({type(error).__name__}: {error}).")
    return dict(row)


def _storing_error(value: Any) -> Exception | None:
    try:
        _write(value).encode()
    except (TypeError, ValueError, RecursionError) as error:  # half of a surrogate pair, for instance
        return error
    return None


def episodes_dataset(rows: Iterable[Mapping[str, Any]]) -> Dataset:
    """
    Makes a dataset of episodes, each checked.

    Args:
        rows (`Iterable[Mapping]`):
            Rows of [`make_episode`], or loaded ones.

    Returns:
        [`~datasets.Dataset`]: with [`episode_features`], the columns of tokens where a row has some.

    Raises:
        ValueError: If a row is malformed.
    """
    return dataset_of_checked([validate_episode(row, f"Episode {i}") for i, row in enumerate(rows)])


def dataset_of_checked(episodes: list[dict[str, Any]]) -> Dataset:
    """Makes the [`episodes_dataset`] of rows that [`make_episode`] or [`validate_episode`] returned."""
    tokens = any(row.get(name) is not None for row in episodes for name in _TOKEN_COLUMNS)
    structured = any(
        set(message) - {"role", "content"} or not isinstance(message.get("content"), str)
        for row in episodes
        for message in row["messages"]
    )
    features = episode_features(structured, tokens)
    columns: dict[str, list] = {name: [row.get(name) for row in episodes] for name in features}
    for name in _JSON_COLUMNS:
        # Written here: the library's own writer rounds numbers.
        columns[name] = [None if value is None else json.dumps(value) for value in columns[name]]
    return Dataset.from_dict(columns, features=features)


def to_jsonl(dataset: Dataset, path: str | os.PathLike) -> None:
    """Writes episodes as one JSON object per line, numbers with all their digits; [`from_jsonl`] reads them."""
    with Path(path).open("w", encoding="utf-8") as file:
        for row in dataset.with_format(None):
            file.write(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")


def from_jsonl(path: str | os.PathLike) -> Dataset:
    """
    Reads what [`to_jsonl`] wrote, or the `episodes.jsonl` of a collection.

    Raises:
        ValueError: If a line is no JSON, or no episode.
    """
    with Path(path).open(encoding="utf-8") as file:
        rows = ((number, json.loads(line)) for number, line in enumerate(file, start=1) if line.strip())
        # A collection's journal begins with its settings.
        return dataset_of_checked(
            [validate_episode(row, f"Line {number} of {path}") for number, row in rows if "journal" not in row]
        )


def filter_by_return(dataset: Dataset, *, top: float | None = None, minimum: float | None = None) -> Dataset:
    """
    Keeps the best episodes, to imitate them (filtered behavioural cloning).

    Args:
        dataset ([`~datasets.Dataset`]):
            Episodes, or any rows with a `return`.
        top (`float`, *optional*):
            Share of the episodes to keep, `0 < top <= 1`, at least one. Of equal returns the first ones are kept.
        minimum (`float`, *optional*):
            Smallest return to keep.

    Returns:
        [`~datasets.Dataset`]: the kept rows, in their order.

    Raises:
        ValueError: If not exactly one of `top` and `minimum` is given, or `top` is out of range.
    """
    if (top is None) == (minimum is None):
        raise ValueError("Give either `top`, the share to keep, or `minimum`, the smallest return to keep.")
    returns = np.asarray(dataset["return"], dtype=np.float64)
    if minimum is not None:
        return dataset.select(np.flatnonzero(returns >= minimum))
    if top is None or not 0 < top <= 1:
        raise ValueError(f"`top` is a share, 0 < top <= 1, got {top}.")
    # Ten percent of ten are one, whatever the product's last bit.
    count = max(1, math.floor(top * len(returns) + 1e-9))
    best = np.argsort(-returns, kind="stable")[:count]
    return dataset.select(np.sort(best))


def successes(dataset: Dataset) -> Dataset:
    """Keeps the episodes whose `success` is True, in their order."""
    return dataset.select([i for i, success in enumerate(dataset["success"]) if success is True])


def success_rate(successes: Iterable[bool | None]) -> float | None:
    """Share of successes among episodes, of which one that does not tell is none; `None` if none of them tells."""
    told = list(successes)
    return told.count(True) / len(told) if any(success is not None for success in told) else None


def plain_json(value: Any) -> Any:
    """
    Returns a copy of what JSON can say of a value, the same in each process as far as possible. Integers of more than
    64 bits, which not every reader can read, become strings; functions and classes their names; the rest is written as
    its `repr`, without addresses.
    """
    if isinstance(value, _WORDS):
        return value
    # What a conversation is made of, before what takes longer to ask.
    if type(value) is dict:
        return {str(key): plain_json(item) for key, item in value.items()}
    if type(value) is list:
        return [plain_json(item) for item in value]
    if isinstance(value, int):
        return value if -(2**63) <= value < 2**64 else str(value)
    if isinstance(value, (np.generic, np.ndarray)):
        value = value.tolist()
    if isinstance(value, int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    if isinstance(value, Mapping):
        return {str(key): plain_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_json(item) for item in value]
    if isinstance(value, type) or inspect.isfunction(value) or inspect.ismethod(value) or inspect.isbuiltin(value):
        return f"{value.__module__}.{value.__qualname__}"
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))
