# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""Which task runs where and when, and what follows when workers die: the same for processes and for Ray."""

import pickle
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from time import monotonic
from typing import Literal, NamedTuple

from .tasks import Executor, Outcome, Task, TaskFailure, WorkerStartError, error_failure, read_answer


# Longest wait for events. Deaths that no event tells of are noticed this late.
_TICK = 0.5
_MAX_DELAY = 30.0


class Event(NamedTuple):
    """
    What a worker reports, or what is found out about it.

    Args:
        kind (`str`):
            `"ready"`, its object is made; `"answer"`, a call is done; `"died"`, it is gone; `"unreachable"`, it may
            live, but nobody knows what became of the call.
        attempt (`int`, *optional*):
            Number of the attempt that is answered.
        data (`bytes`, *optional*):
            The answer, for [`read_answer`].
        message (`str`, *optional*):
            What happened to a worker, and the last it wrote.
    """

    kind: Literal["ready", "answer", "died", "unreachable"]
    attempt: int = -1
    data: bytes = b""
    message: str = ""


class Worker(ABC):
    """A worker, seen from the executor."""

    @abstractmethod
    def send(self, attempt: int, call: bytes) -> bool:
        """Hands over a call, and returns `False` if the worker is found dead: then the call has not begun."""

    @abstractmethod
    def kill(self) -> None:
        """Ends the worker with all that it started, at once and whatever it does."""


@dataclass
class _Entry:
    """A task without an outcome, and what it has been through."""

    task: Task
    attempts: int = 0
    crashes: int = 0
    timeouts: int = 0
    unreachable: int = 0


@dataclass
class _Slot:
    """A place for workers, one after the other."""

    number: int
    worker: Worker | None = None
    ready: bool = False
    entry: _Entry | None = None
    attempt: int = -1
    deadline: float = float("inf")
    not_before: float = 0.0
    troubles: int = 0  # without a finished call in between
    failed_starts: int = 0  # workers in a row that began no call, in this run
    start_error: str = ""
    state_lost: bool = False  # and nobody was told
    pinned: deque[_Entry] = field(default_factory=deque)


class WorkerPool(Executor):
    """
    The scheduling of executors whose workers can be killed.

    One task at a time per worker. The clock of a task begins when a worker that is ready gets it, and is looked at
    whenever the caller asks for the next outcome.

    Args:
        num_workers (`int`):
            Number of workers. They start when there is work for them.
        timeout (`float`, *optional*):
            Seconds that a call may take. After that its worker is killed, and replaced.
        max_crashes (`int`):
            How often a task that killed its worker is tried again, before it is given up as `"crashed"`.
        max_timeouts (`int`):
            How often a task that took too long is tried again.
        start_timeout (`float`):
            Seconds that a worker may take to start and make its object.
        max_starts (`int`):
            How often in a row a worker may fail to start before its slot is given up for this run.
        backoff (`float`):
            Seconds before a worker is replaced for the second time without finishing a call; they double from there.
    """

    def __init__(
        self,
        num_workers: int,
        timeout: float | None,
        max_crashes: int,
        max_timeouts: int,
        start_timeout: float,
        max_starts: int,
        backoff: float,
    ) -> None:
        if num_workers < 1:
            raise ValueError(f"Got num_workers={num_workers}, at least one is needed.")
        if timeout is not None and timeout <= 0:
            raise ValueError(f"Got timeout={timeout}. Give seconds above 0, or `None` for no deadline.")
        if max_crashes < 0 or max_timeouts < 0 or max_starts < 1:
            raise ValueError(
                f"Got max_crashes={max_crashes}, max_timeouts={max_timeouts}, max_starts={max_starts}; needed are at "
                "least 0, 0 and 1."
            )
        self.num_slots = num_workers
        self.workers_lost = 0
        self._timeout = timeout
        self._max_crashes = max_crashes
        self._max_timeouts = max_timeouts
        self._start_timeout = start_timeout
        self._max_starts = max_starts
        self._backoff = backoff
        self._slots = [_Slot(number) for number in range(num_workers)]
        self._queue: deque[_Entry] = deque()
        self._done: deque[Outcome] = deque()
        self._attempts = 0
        self._ever_ready = False

    @abstractmethod
    def _start(self, slot: int) -> Worker:
        """Starts a worker, without waiting for it."""

    @abstractmethod
    def _wait(self, workers: dict[int, Worker], timeout: float) -> list[tuple[int, Event]]:
        """Waits until one of the workers (by slot, starting and idle ones too) has an event, or the time is over."""

    @abstractmethod
    def _stop(self, workers: list[Worker]) -> None:
        """Lets idle workers end as programs do, and kills those that do not."""

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        idle = []
        for slot in self._slots:
            if slot.worker is not None and slot.ready and slot.entry is None:
                idle.append(slot.worker)
            elif slot.worker is not None:
                slot.worker.kill()
            slot.worker = None
            self._free(slot)
        self._stop(idle)

    def _run(self, tasks: list[Task]) -> Iterator[Outcome]:
        try:
            self._begin(tasks)
            # An outcome per task, by construction: the loop has no other end.
            for _ in tasks:
                while not self._done:
                    self._check_open()
                    self._turn()
                # Workers must not wait while the caller looks at an outcome.
                if not self._closed:
                    self._start_workers()
                    self._hand_out()
                yield self._done.popleft()
        finally:
            self._end()

    def _begin(self, tasks: list[Task]) -> None:
        # The dead must be known before the first task is handed out: state that is gone cannot be asked for.
        for number, event in self._wait(self._workers(), 0):
            self._handle(self._slots[number], event)
        gone = {slot.number for slot in self._slots if slot.state_lost}
        for task in tasks:
            entry = _Entry(task)
            slot = None if task.slot is None else self._slots[task.slot]
            if slot is None:
                self._queue.append(entry)
            elif slot.number in gone:
                self._fail(entry, slot.number, "lost", "The worker in its slot died before, and the state with it.")
            else:
                slot.pinned.append(entry)
        for slot in self._slots:
            slot.failed_starts = 0

    def _end(self) -> None:
        """Gives up what an early end of the run has left."""
        for slot in self._slots:
            if slot.entry is not None:
                self._discard_worker(slot)
            slot.pinned.clear()
        self._queue.clear()
        self._done.clear()

    def _turn(self) -> None:
        self._check_hope()
        self._start_workers()
        self._hand_out()
        if self._done:
            return
        times = [slot.deadline for slot in self._slots if slot.worker is not None]
        times += [slot.not_before for slot in self._slots if slot.not_before > monotonic()]
        pause = max(0.0, min([_TICK, *(time - monotonic() for time in times)]))
        for number, event in self._wait(self._workers(), pause):
            self._handle(self._slots[number], event)
        # After the events: an answer that is there counts, however late it is looked at.
        for slot in self._slots:
            if slot.worker is not None and monotonic() >= slot.deadline:
                self._deadline_passed(slot)

    def _start_workers(self) -> None:
        waiting = len(self._queue)
        for slot in self._slots:
            free = slot.entry is None
            if slot.worker is None and (slot.pinned or waiting > 0) and self._usable(slot):
                slot.ready = False
                slot.deadline = monotonic() + self._start_timeout
                try:
                    slot.worker = self._start(slot.number)
                except OSError as error:  # no memory or no more processes: maybe later
                    self._start_failed(slot, f"{type(error).__name__}: {error}")
            if slot.worker is not None and free and not slot.pinned:
                waiting -= 1

    def _usable(self, slot: _Slot) -> bool:
        return slot.failed_starts < self._max_starts and monotonic() >= slot.not_before

    def _hand_out(self) -> None:
        for slot in self._slots:
            while slot.worker is not None and slot.ready and slot.entry is None and monotonic() >= slot.not_before:
                source = slot.pinned or self._queue
                if not source:
                    break
                entry = source.popleft()
                try:
                    call = pickle.dumps((entry.task.method, entry.task.args, entry.task.kwargs))
                except Exception as error:
                    failure = error_failure(error, "The arguments of the call cannot be pickled: ")
                    self._done.append(Outcome(entry.task.key, -1, failure=failure))
                    continue
                self._attempts += 1
                if slot.worker.send(self._attempts, call):
                    entry.attempts += 1
                    slot.failed_starts = 0
                    slot.entry, slot.attempt = entry, self._attempts
                    slot.deadline = float("inf") if self._timeout is None else monotonic() + self._timeout
                else:
                    source.appendleft(entry)
                    self._handle(slot, Event("died", message="It was found dead."))

    def _handle(self, slot: _Slot, event: Event) -> None:
        if event.kind == "ready":
            slot.ready = self._ever_ready = True
            slot.deadline = float("inf")
        elif event.kind == "answer":
            self._answered(slot, event)
        elif not slot.ready:
            self._start_failed(slot, event.message)
        elif event.kind == "unreachable":
            self._unreachable(slot, event.message)
        else:
            self._died(slot, event.message)

    def _answered(self, slot: _Slot, event: Event) -> None:
        entry = slot.entry
        if entry is None or event.attempt != slot.attempt:
            return  # the answer to an attempt that was given up
        self._free(slot)
        slot.troubles = 0
        if entry.task.slot is None:
            # It may have begun something here that is not lost. Who mixes both kinds has to tell old state from new.
            slot.state_lost = False
        value, failure = read_answer(event.data)
        if failure is not None:
            failure = TaskFailure("error", failure.error, failure.message, failure.traceback_text, entry.attempts)
        self._done.append(Outcome(entry.task.key, slot.number, value, failure))

    def _died(self, slot: _Slot, message: str) -> None:
        entry = slot.entry
        self._discard_worker(slot)
        if entry is None:
            self._count_failed_start(slot, message)
        elif entry.task.slot is not None:
            self._fail(entry, slot.number, "lost", f"Its worker died, and the state it needs with it. {message}")
        else:
            entry.crashes += 1
            if entry.crashes <= self._max_crashes:
                self._queue.append(entry)
            else:
                text = f"It killed its worker {entry.crashes} times. {message}"
                self._fail(entry, slot.number, "crashed", text)
        self._lose_pinned(slot, message)

    def _deadline_passed(self, slot: _Slot) -> None:
        if not slot.ready:
            self._start_failed(slot, f"It was not ready after {self._start_timeout:g} seconds.")
            return
        entry = slot.entry
        assert entry is not None, "an idle worker has no deadline"
        self._discard_worker(slot)
        entry.timeouts += 1
        if entry.task.slot is None and entry.timeouts <= self._max_timeouts:
            self._queue.append(entry)
        else:
            self._fail(
                entry,
                slot.number,
                "timeout",
                f"The call of `{entry.task.method}` was not done after {self._timeout:g} seconds, "
                f"{entry.timeouts} times. Its worker was killed.",
            )
        self._lose_pinned(slot, "It was killed because another call took too long.")

    def _unreachable(self, slot: _Slot, message: str) -> None:
        entry = slot.entry
        self._free(slot)
        self._delay(slot)
        if entry is None:
            return
        entry.unreachable += 1
        # A call that may have changed the state is not made twice.
        if entry.task.slot is None and entry.unreachable <= self._max_crashes:
            self._queue.append(entry)
        else:
            self._fail(entry, slot.number, "lost", f"Its worker cannot be reached. {message}")

    def _start_failed(self, slot: _Slot, message: str) -> None:
        if slot.worker is not None:
            self._discard_worker(slot)
        else:
            self._delay(slot)
        self._count_failed_start(slot, message)

    def _count_failed_start(self, slot: _Slot, message: str) -> None:
        slot.start_error = message
        slot.failed_starts += 1
        if slot.failed_starts >= self._max_starts:
            self._lose_pinned(slot, f"No worker can be started in slot {slot.number}: {message}")

    def _check_hope(self) -> None:
        """Stops when nothing can be done any more, instead of starting workers for ever."""
        failed = [slot for slot in self._slots if slot.failed_starts > 0]
        never = not self._ever_ready and all(slot in failed for slot in self._slots if slot.worker is not None)
        given_up = all(slot.failed_starts >= self._max_starts for slot in self._slots)
        if (never and failed) or given_up:
            raise WorkerStartError(
                f"No worker can be started. {len(failed)} of {self.num_slots} failed, the last with:\n"
                f"{failed[-1].start_error}\nThe factory must be able to make its object in a new process, which "
                "begins by importing the main script: what starts workers there belongs under `if __name__ == "
                "'__main__':`. Try the factory alone, or with `LocalExecutor(factory)`."
            )

    def _lose_pinned(self, slot: _Slot, message: str) -> None:
        while slot.pinned:
            self._fail(slot.pinned.popleft(), slot.number, "lost", f"Its worker died before it. {message}")

    def _fail(self, entry: _Entry, slot: int, kind: str, message: str) -> None:
        failure = TaskFailure(kind, None, message, "", entry.attempts)
        self._done.append(Outcome(entry.task.key, slot, failure=failure))
        if entry.task.slot is not None:
            self._slots[slot].state_lost = False

    def _discard_worker(self, slot: _Slot) -> None:
        assert slot.worker is not None, "there is a worker to discard"
        slot.worker.kill()
        slot.worker = None
        slot.state_lost |= slot.ready
        slot.ready = False
        self.workers_lost += 1
        self._free(slot)
        self._delay(slot)

    def _free(self, slot: _Slot) -> None:
        slot.entry, slot.attempt, slot.deadline = None, -1, float("inf")

    def _delay(self, slot: _Slot) -> None:
        slot.troubles += 1
        # The first time at once: one bad task is no sign of a bad machine.
        delay = 0.0 if slot.troubles == 1 else min(self._backoff * 2 ** (slot.troubles - 2), _MAX_DELAY)
        slot.not_before = monotonic() + delay

    def _workers(self) -> dict[int, Worker]:
        return {slot.number: slot.worker for slot in self._slots if slot.worker is not None}
