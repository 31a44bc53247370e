# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""Objects that workers hold in the tests: they do everything that a worker must survive, or must not."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path


class Timeout(BaseException):
    """As in some libraries, not an `Exception`."""


class Unreadable(Exception):
    """Pickles, and then cannot be read: its arguments are not those of its constructor."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


class Troubled:
    """Calls that go wrong in every way. A folder holds what must be remembered over deaths."""

    def __init__(self) -> None:
        self.count = 0

    def echo(self, value, seconds: float = 0.0):
        time.sleep(seconds)
        return value

    def pid(self, seconds: float = 0.0) -> int:
        time.sleep(seconds)
        return os.getpid()

    def increase(self) -> int:
        self.count += 1
        return self.count

    def raises(self):
        raise KeyError("no such thing")

    def raises_beyond(self):
        raise Timeout("took too long")

    def raises_unreadable(self):
        raise Unreadable("cannot", "come back")

    def unpicklable(self):
        return threading.Lock()

    def prints(self, text: str) -> None:
        print(text)
        os.system(f"echo {text}")

    def exits(self):
        sys.exit(3)

    def kill(self, text: str = "about to die") -> None:
        print(text)
        sys.stdout.flush()
        os.kill(os.getpid(), signal.SIGKILL)

    def kill_by(self, number: int) -> None:
        os.kill(os.getpid(), number)
        time.sleep(10)

    def kill_once(self, marker: str, value=None):
        if first_time(marker):
            self.kill()
        return value

    def hang(self) -> None:
        time.sleep(3600)

    def hang_with_lock(self) -> None:
        """In C code that does not let go of the interpreter."""
        3 ** (10**10)

    def hang_once(self, marker: str, value=None, seconds: float = 3600.0):
        if first_time(marker):
            time.sleep(seconds)
            return "late"
        return value

    def wait_for(self, path: str) -> str:
        if not wait_until(Path(path).exists, 120):
            raise TimeoutError(path)
        return "done"

    def announce_and_hang(self, path: str) -> str:
        """Writes its process's number and hangs; at the second try it returns."""
        if Path(path).exists():
            return "done"
        write_whole(path, str(os.getpid()))
        time.sleep(3600)
        return "never"

    def start_child(self) -> int:
        """A process that would outlive its parent, and holds all that a fork inherits."""
        child = os.fork()
        if child == 0:
            time.sleep(3600)
            os._exit(0)
        return child

    def fork_and_die(self) -> None:
        self.start_child()
        os._exit(7)

    def start_program(self) -> int:
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"]).pid


def first_time(marker: str) -> bool:
    """Whether nobody asked for this path before."""
    try:
        Path(marker).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def write_whole(path: str | Path, text: str) -> None:
    """Writes a file that is never seen half written."""
    part = Path(f"{path}.part")
    part.write_text(text)
    part.rename(path)


def broken_factory():
    raise OSError("the database is not there")


def dying_factory():
    os._exit(5)


def hanging_factory():
    time.sleep(3600)


class BreaksAfterFirst(Troubled):
    """Can be made once."""

    def __init__(self, marker: str) -> None:
        super().__init__()
        if not first_time(marker):
            raise OSError("only once")


def alive(pid: int) -> bool:
    """Whether a process runs; one that is dead and only not yet buried does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # gone before it was opened, or read
        return False
    return state not in "ZX"


def wait_until(condition, seconds: float = 60.0) -> bool:
    """Waits for a condition, generously, and returns whether it came true."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return bool(condition())
