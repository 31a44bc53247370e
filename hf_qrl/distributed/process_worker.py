# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""The inside of a worker process: it makes its object, answers calls, and dies with the process it works for."""

import faulthandler
import fcntl
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import threading
import traceback

from .tasks import load_target, serve_call


def worker_main(connection: multiprocessing.connection.Connection, factory: bytes, log: str) -> None:
    """
    Answers calls until the other end of the connection is closed.

    Args:
        connection (`multiprocessing.connection.Connection`):
            Calls come as pairs of attempt and bytes. What goes back are triples: `("ready", -1, b"")`, `("died", -1,
            traceback)` if the object cannot be made, `("answer", attempt, bytes)`.
        factory (`bytes`):
            The pickled factory of the object.
        log (`str`):
            Existing file for all output. It is deleted once it is open.
    """
    # A session of its own: the whole group can be killed, and Ctrl-C in the terminal goes to the executor alone.
    os.setsid()
    _die_with_parent()
    _redirect_output(log)
    try:
        target = load_target(factory)
    except BaseException:
        connection.send(("died", -1, traceback.format_exc().encode(errors="backslashreplace")))
        return
    connection.send(("ready", -1, b""))
    while True:
        try:
            attempt, call = connection.recv()
        except EOFError:
            return
        connection.send(("answer", attempt, serve_call(target, call)))


def _die_with_parent() -> None:
    """Has the group killed when the parent is gone. Nothing else would end a worker that hangs."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "a worker is a child"
    sentinel = parent.sentinel
    if sys.platform == "linux":
        # By the kernel: a thread would wait for the interpreter's lock, which code that hangs may hold.
        fcntl.fcntl(sentinel, fcntl.F_SETOWN, -os.getpgid(0))
        fcntl.fcntl(sentinel, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(sentinel, fcntl.F_SETFL, fcntl.fcntl(sentinel, fcntl.F_GETFL) | os.O_ASYNC)
        if multiprocessing.connection.wait([sentinel], 0):  # it was gone before
            os.killpg(0, signal.SIGKILL)
    else:
        threading.Thread(target=_kill_group_after, args=(sentinel,), daemon=True).start()


def _kill_group_after(sentinel: int) -> None:
    multiprocessing.connection.wait([sentinel])
    os.killpg(0, signal.SIGKILL)


def _redirect_output(log: str) -> None:
    fd = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.unlink(log)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.enable()
