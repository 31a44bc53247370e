# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""What functions, classes and arguments are called in records: the same in every process, and never an address."""

import dataclasses
import enum
import inspect
import json
import os
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from datasets import Dataset

from ..data.episodes import plain_json
from ..environments.sessions import TextEnvironment
from ..environments.utils import plain_class


def describe(value: Any) -> Any:
    """
    Returns what a value is, as plain JSON.

    Functions and classes are their module and qualified name, a `datasets.Dataset` is its fingerprint, and the fields
    of a dataclass are described in turn, as are the items of containers and the parts of a `functools.partial`.
    **Where names do not tell what something is, its description has `"unnamed": True`**: lambdas, local functions and
    classes, and objects that only their memory knows.

    Examples:

    ```python
    >>> describe([1, json.dumps, lambda: 1])
    [1, 'json.dumps', {'name': '__main__.<lambda>', 'unnamed': True}]
    ```
    """
    if isinstance(value, enum.Enum):
        return f"{_name(type(value))}.{value.name}"
    if isinstance(value, np.ndarray | torch.Tensor):
        value = value.tolist()
    if value is None or isinstance(value, str | bytes | bool | int | float | complex | range | np.generic):
        return plain_json(value)
    if isinstance(value, os.PathLike):
        return str(os.fspath(value))
    if isinstance(value, Mapping):
        return {
            key if isinstance(key, str) else json.dumps(describe(key)): describe(item) for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [describe(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(map(describe, value), key=json.dumps)
    described = describe_object(value)
    return described["name"] if list(described) == ["name"] else described


def describe_object(value: Any) -> dict[str, Any]:
    """Returns the `name` of a class, a function or an object's class, and what else there is to say of it."""
    value = plain_class(value)
    if isinstance(value, TextEnvironment):
        return describe_object(value._factory)
    if isinstance(value, partial):
        return {**describe_object(value.func), "args": describe(value.args), "kwargs": describe(value.keywords)}
    if isinstance(value, type) or inspect.isfunction(value):
        return {"name": _name(value), **({} if _is_found(value) else {"unnamed": True})}
    if inspect.isbuiltin(value) and inspect.ismodule(value.__self__):
        return {"name": _name(value)}
    if inspect.ismethod(value) or inspect.isbuiltin(value):
        owner = value.__self__
        name = f"{_name(owner if isinstance(owner, type) else type(owner))}.{value.__name__}"
        return {"name": name, "self": describe(owner)}
    if isinstance(value, Dataset):
        return {"name": _name(type(value)), "fingerprint": value._fingerprint, "num_rows": len(value)}
    if dataclasses.is_dataclass(value):
        fields = {field.name: describe(getattr(value, field.name, None)) for field in dataclasses.fields(value)}
        return {**describe_object(type(value)), "fields": fields}
    return {"name": _name(type(value)), "unnamed": True}


def names_everything(*descriptions: Any) -> bool:
    """
    Whether descriptions tell what they describe, so that equal ones mean equal things.

    Args:
        descriptions:
            What [`describe`], [`describe_environment`] or [`Policy.identity`] returned.
    """
    for description in descriptions:
        items = description.values() if isinstance(description, dict) else description
        if isinstance(description, dict) and description.get("unnamed") is True:
            return False
        if isinstance(description, dict | list | tuple) and not names_everything(*items):
            return False
    return True


def same_description(first: Any, second: Any) -> bool:
    """
    Whether two descriptions say the same. One may come from a process that cannot look a name up, as it was sent the
    definition: what is marked as unnamed is compared by its name.
    """
    return _unmarked(first) == _unmarked(second)


def _unmarked(description: Any) -> Any:
    if isinstance(description, dict):
        kept = {key: _unmarked(item) for key, item in description.items() if key != "unnamed"}
        return kept["name"] if list(kept) == ["name"] else kept or None
    if isinstance(description, list | tuple):
        return [_unmarked(item) for item in description]
    return description


def _name(value: Any) -> str:
    # What a spawned process calls the script that started it.
    module = "__main__" if value.__module__ == "__mp_main__" else value.__module__
    return f"{module}.{value.__qualname__}"


def _is_found(value: Any) -> bool:
    """Whether a class or a function is what its name stands for."""
    found: Any = sys.modules.get(value.__module__)
    for part in value.__qualname__.split("."):
        found = getattr(found, part, None)
    return plain_class(found) is value
