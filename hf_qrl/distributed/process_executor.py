# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""Workers that are processes: whatever hangs or crashes in one can be killed, and touches no other."""

import atexit
import contextlib
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import tempfile
import time
from collections.abc import Callable
from typing import Any, cast

from .process_worker import worker_main
from .worker_pool import Event, Worker, WorkerPool


_LAST_OUTPUT = 2000
# For idle workers, to end the way programs do: what they have registered for their exit is run.
_GRACE = 5.0


class ProcessExecutor(WorkerPool):
    """
    Runs calls in processes of this machine. A call that takes too long, or kills its process, costs nothing but
    itself; no worker outlives this process, however it ends.

    A worker ends with its process group. Programs that it has started in a session or group of their own
    (`subprocess.Popen(..., start_new_session=True)`, daemons) are not in it: they go on, also after `close`, unless
    the object ends them when its episode is closed.

    What workers print is kept apart, and its end is part of the message when one dies.

    Scripts that use it need `if __name__ == "__main__":` around what they run, as with `multiprocessing`.

    Args:
        factory (`Callable[[], Any]`):
            Makes the object of a worker, in the worker. It is pickled: a class or function of a module, or a
            `functools.partial` of one.
        num_workers (`int`):
            Number of processes. They start when there is work for them.
        timeout (`float`, *optional*):
            Seconds that a call may take. After that the process is killed with its group.
        max_crashes (`int`, *optional*, defaults to 2):
            How often a call that killed its process is tried again. After that it is `"crashed"`.
        max_timeouts (`int`, *optional*, defaults to 1):
            How often a call that took too long is tried again.
        start_timeout (`float`, *optional*, defaults to 300.0):
            Seconds that a process may take to start and make its object.
        max_starts (`int`, *optional*, defaults to 3):
            How often in a row a process may fail to start, once any has started, before its slot is given up for the
            run.
        backoff (`float`, *optional*, defaults to 0.5):
            Seconds of waiting when a process is replaced twice without finishing a call; they double from there.
        start_method (`str`, *optional*, defaults to `"spawn"`):
            `"spawn"` begins each process anew: importing torch takes it seconds. `"forkserver"` imports once and
            copies that, which takes milliseconds: for objects that do not mind, and hold no threads when imported.

    Examples:

    ```python
    >>> with ProcessExecutor(MyGame, num_workers=4, timeout=30.0) as executor:
    ...     for outcome in executor.run(Task(str(seed), "play", (seed,)) for seed in range(100)):
    ...         print(outcome.key, outcome.value if outcome.failure is None else outcome.failure.message)
    ```
    """

    def __init__(
        self,
        factory: Callable[[], Any],
        num_workers: int,
        timeout: float | None = None,
        max_crashes: int = 2,
        max_timeouts: int = 1,
        start_timeout: float = 300.0,
        max_starts: int = 3,
        backoff: float = 0.5,
        start_method: str = "spawn",
    ) -> None:
        super().__init__(num_workers, timeout, max_crashes, max_timeouts, start_timeout, max_starts, backoff)
        if start_method not in ("spawn", "forkserver"):
            raise ValueError(
                f'Got start_method={start_method!r}, needed is "spawn" or "forkserver". "fork" would copy the locks '
                "of threads that are not there in the copy."
            )
        try:
            self._factory = pickle.dumps(factory)
        except Exception as error:
            raise ValueError(
                f"The factory {factory!r} cannot be pickled ({error}), so it cannot be sent to a process. Give a "
                "class or function at the top level of a module, or a `functools.partial` of one."
            ) from error
        self._context = multiprocessing.get_context(start_method)
        if start_method == "forkserver":
            self._context.set_forkserver_preload([__name__])
        self._owner = os.getpid()
        # Before `multiprocessing` waits for its processes at exit: idle ones would wait for us.
        atexit.register(self.close)

    def close(self) -> None:
        if os.getpid() == self._owner:  # a forked copy of this object owns nothing
            super().close()
            atexit.unregister(self.close)

    def _start(self, slot: int) -> Worker:
        return _Process(self._context, self._factory, slot)

    def _wait(self, workers: dict[int, Worker], timeout: float) -> list[tuple[int, Event]]:
        processes = cast(dict[int, _Process], workers)
        sources = [source for process in processes.values() for source in process.sources]
        if sources:
            multiprocessing.connection.wait(sources, timeout)
        else:
            time.sleep(timeout)
        events = ((number, process.poll()) for number, process in processes.items())
        return [(number, event) for number, event in events if event is not None]

    def _stop(self, workers: list[Worker]) -> None:
        processes = cast(list[_Process], workers)
        for process in processes:
            process.dismiss()
        end = time.monotonic() + _GRACE
        for process in processes:
            process.join(max(0.0, end - time.monotonic()))
            process.kill()


class _Process(Worker):
    def __init__(self, context: Any, factory: bytes, slot: int) -> None:
        self._log, self._log_path = tempfile.mkstemp(prefix="hf_qrl-worker-", suffix=".log")
        self._connection, other_end = context.Pipe()
        # Not a daemon: daemons may not have processes of their own.
        self._process = context.Process(
            target=worker_main,
            args=(other_end, factory, self._log_path),
            name=f"hf_qrl-worker-{slot}",
            daemon=False,
        )
        try:
            self._process.start()
        except BaseException:
            self._close_files()
            raise
        finally:
            # Only the worker may hold its end, else its death does not close the connection.
            other_end.close()

    @property
    def sources(self) -> list[Any]:
        return [self._connection, self._process.sentinel]

    def send(self, attempt: int, call: bytes) -> bool:
        if self._process.exitcode is not None:
            return False
        # What is left in the log at a death is what this call wrote.
        os.ftruncate(self._log, 0)
        try:
            self._connection.send((attempt, call))
        except OSError:
            return False
        return True

    def poll(self) -> Event | None:
        # Asked first, looked at last: what a process sent before its death counts.
        dead = self._process.exitcode is not None
        try:
            if self._connection.poll():
                kind, attempt, data = self._connection.recv()
                if kind == "died":
                    return Event("died", message=data.decode() + self._last_output())
                return Event(kind, attempt, data)
        except (EOFError, OSError):
            dead = True
        # A child of the worker may hold its connection open, so that its end is not seen there.
        return Event("died", message=self._describe_death()) if dead else None

    def dismiss(self) -> None:
        self._connection.close()

    def join(self, timeout: float) -> None:
        self._process.join(timeout)

    def kill(self) -> None:
        # The group too when the process is dead: it may have left children.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.join(_GRACE)
        self._connection.close()
        self._close_files()

    def _close_files(self) -> None:
        os.close(self._log)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._log_path)

    def _describe_death(self) -> str:
        self._process.join(1.0)
        code = self._process.exitcode
        if code is None:
            reason = "it closed its connection"
        elif code < 0:
            reason = f"it was killed by {_signal_name(-code)}"
        else:
            reason = f"it ended with exit code {code}"
        return f"The process: {reason}.{self._last_output()}"

    def _last_output(self) -> str:
        size = os.fstat(self._log).st_size
        output = os.pread(self._log, _LAST_OUTPUT, max(0, size - _LAST_OUTPUT)).decode(errors="replace").strip()
        return f" The last it wrote: {output}" if output else ""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # only the first and the last of the real-time signals have names
        return f"signal {number}"
