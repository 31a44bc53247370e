# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""Three ways to run calls: here, in processes that can be killed, or in Ray actors. One interface."""

from collections.abc import Callable, Iterator
from typing import Any

from .process_executor import ProcessExecutor
from .ray_executor import RayExecutor
from .tasks import Executor, Outcome, Task, TaskFailure, WorkerStartError, call_method


class LocalExecutor(Executor):
    """
    Runs calls in this process, one after the other: the fastest way for objects that neither hang nor crash.

    Args:
        factory (`Callable[[], Any]`):
            Makes the object whose methods are called, at the first call.
        timeout (`None`, *optional*):
            Refused, with advice.

    Examples:

    ```python
    >>> with LocalExecutor(list) as executor:
    ...     outcomes = list(executor.run([Task("a", "count", (1,)), Task("b", "index", (1,))]))
    >>> outcomes[0].value, outcomes[1].failure.message
    (0, 'ValueError: 1 is not in list')
    ```
    """

    num_slots = 1

    def __init__(self, factory: Callable[[], Any], timeout: float | None = None) -> None:
        if timeout is not None:
            raise ValueError(
                f"Got timeout={timeout}, but a call in this process cannot be stopped from outside. Use "
                "`ProcessExecutor(factory, num_workers=..., timeout=...)`."
            )
        self._factory = factory
        self._target: Any = None
        self._started = False

    def close(self) -> None:
        self._closed = True
        self._target = None

    def _run(self, tasks: list[Task]) -> Iterator[Outcome]:
        if not self._started:
            try:
                self._target = self._factory()
            except Exception as error:
                raise WorkerStartError(f"The factory raised {type(error).__name__}: {error}") from error
            self._started = True
        for task in tasks:
            self._check_open()
            value, failure = call_method(self._target, task.method, task.args, task.kwargs)
            yield Outcome(task.key, 0, value, failure)
            # Not kept until the next call is done.
            del value, failure


__all__ = [
    "Executor",
    "LocalExecutor",
    "Outcome",
    "ProcessExecutor",
    "RayExecutor",
    "Task",
    "TaskFailure",
    "WorkerStartError",
]
