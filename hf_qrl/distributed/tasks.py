# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""What executors run, and what comes of it: every task has exactly one outcome, and failures are values."""

import pickle
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Task:
    """
    One call of a method of the object that a worker holds.

    Args:
        key (`str`):
            Name of the task, unique among those of a `run`: outcomes are matched by it.
        method (`str`):
            Method to call.
        args (`tuple`, *optional*, defaults to `()`):
            Its arguments by position.
        kwargs (`dict`, *optional*, defaults to `{}`):
            Its arguments by name.
        slot (`int`, *optional*):
            The one worker that has the state the call needs. `None` leaves it to any.
    """

    key: str
    method: str
    args: tuple = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    slot: int | None = None


@dataclass(frozen=True)
class TaskFailure:
    """
    Why a task has no value.

    Args:
        kind (`str`):
            `"error"`, the method raised; `"crashed"`, it killed its worker too often; `"timeout"`, it was not done in
            time; `"lost"`, the worker with the state it needed is gone, or could not be reached.
        error (`Exception` or `None`):
            The exception of an `"error"`, if it can be brought here and is an `Exception`.
        message (`str`):
            What happened.
        traceback_text (`str`):
            Traceback from the worker, `""` if there is none.
        attempts (`int`):
            How often the task was begun.
    """

    kind: str
    error: Exception | None
    message: str
    traceback_text: str
    attempts: int


@dataclass(frozen=True)
class Outcome:
    """
    What became of a task.

    Args:
        key (`str`):
            The task's.
        slot (`int`):
            Worker that ended it; -1 if none had begun it.
        value (`Any`):
            What the method returned.
        failure (`TaskFailure`, *optional*):
            Why there is no value.
    """

    key: str
    slot: int
    value: Any = None
    failure: TaskFailure | None = None


class WorkerStartError(RuntimeError):
    """No worker can be started, so that nothing would ever be done; with the traceback of the factory."""


class Executor(ABC):
    """
    Workers, each holding an object of its own, that call methods of it. A context manager: leaving it closes it.

    An exception of a method is an outcome and never a reason to stop, or to try again: that is for the caller to
    decide. A worker that is replaced keeps its slot number, and begins with a fresh object.

    Attributes:
        num_slots (`int`):
            Number of workers; tasks are pinned to slots `0 ... num_slots - 1`.
        workers_lost (`int`):
            Workers that died or were killed so far.
    """

    num_slots: int
    workers_lost: int = 0
    _running = False
    _closed = False

    def run(self, tasks: Iterable[Task]) -> Iterator[Outcome]:
        """
        Runs tasks and yields their outcomes as they complete, in any order. Stopping early gives up what is left.

        Args:
            tasks (`Iterable[Task]`):
                Tasks, all of them taken before the first is run.

        Raises:
            WorkerStartError: If no worker can be started.
            ValueError: If two tasks have one key, or a task is pinned to a slot that does not exist.
            RuntimeError: If the executor is closed, or another `run` has not ended.
        """
        todo = list(tasks)
        seen = set()
        for task in todo:
            if task.key in seen:
                raise ValueError(f"Two tasks have the key {task.key!r}. Give each its own.")
            seen.add(task.key)
            if task.slot is not None and not 0 <= task.slot < self.num_slots:
                raise ValueError(
                    f"Task {task.key!r} is pinned to slot {task.slot}, this executor has the slots 0 to "
                    f"{self.num_slots - 1}."
                )
        return self._guarded_run(todo)

    @abstractmethod
    def close(self) -> None:
        """Ends all workers, busy ones too. A second call does nothing."""

    @abstractmethod
    def _run(self, tasks: list[Task]) -> Iterator[Outcome]:
        """Yields one outcome per task."""

    def _guarded_run(self, tasks: list[Task]) -> Iterator[Outcome]:
        self._check_open()
        if self._running:
            raise RuntimeError("Another `run` of this executor has not ended. Take all its outcomes, or close it.")
        self._running = True
        try:
            yield from self._run(tasks)
        except GeneratorExit:
            raise
        except BaseException:  # an interrupt among them: no worker must outlive the run it belongs to
            self.close()
            raise
        finally:
            self._running = False

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError(f"This `{type(self).__name__}` is closed. Make a new one.")

    def __enter__(self):
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def call_method(target: Any, method: str, args: tuple, kwargs: dict[str, Any]) -> tuple[Any, TaskFailure | None]:
    """
    Calls a method of a worker's object.

    Returns:
        `tuple[Any, TaskFailure | None]`: its value, or why there is none. Exceptions beyond `Exception` are caught
        too, some timeouts are; only `KeyboardInterrupt` and `SystemExit` pass, and end the worker.
    """
    try:
        return getattr(target, method)(*args, **kwargs), None
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        return None, error_failure(error)


def error_failure(error: BaseException, what: str = "") -> TaskFailure:
    """Returns the failure that an exception means; `what` is put before its text."""
    text = "".join(traceback.format_exception(error))
    kept = error.with_traceback(None) if isinstance(error, Exception) else None
    try:
        message = f"{type(error).__name__}: {error}"
    except Exception as broken:  # an exception whose own text fails must not hide what happened
        message = f"{type(error).__name__} <its text cannot be made: {type(broken).__name__}>"
    return TaskFailure("error", kept, what + message, text, 1)


def load_target(data: bytes) -> Any:
    """Makes a worker's object from its pickled factory."""
    factory: Callable[[], Any] = pickle.loads(data)
    return factory()


def serve_call(target: Any, data: bytes) -> bytes:
    """
    Runs a call that came as bytes, in a worker. Nothing that it returns or raises can break the way back: what cannot
    be pickled becomes an error with its text.
    """
    try:
        method, args, kwargs = pickle.loads(data)
    except Exception as error:
        return _pack_failure(
            error_failure(error, f"The arguments of the call cannot be read in the worker ({error}): ")
        )
    value, failure = call_method(target, method, args, kwargs)
    if failure is not None:
        return _pack_failure(failure)
    try:
        return pickle.dumps((value, None))
    except Exception as error:
        return _pack_failure(
            error_failure(error, f"The result of `{method}`, a `{type(value).__name__}`, cannot be pickled: ")
        )


def read_answer(data: bytes) -> tuple[Any, TaskFailure | None]:
    """Reads what [`serve_call`] returned, in the process of the executor."""
    try:
        return pickle.loads(data)
    except Exception as error:
        return None, error_failure(error, "The result was pickled in the worker, but cannot be read here: ")


def _pack_failure(failure: TaskFailure) -> bytes:
    # Many exceptions pickle and then cannot be read, so both are tried; the text remains in any case.
    for error in (failure.error, None):
        packed = (None, TaskFailure(failure.kind, error, failure.message, failure.traceback_text, failure.attempts))
        try:
            data = pickle.dumps(packed)
            pickle.loads(data)
        except Exception:
            continue
        return data
    raise AssertionError("text can always be pickled")
