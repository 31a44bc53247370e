# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""Coroutines of other libraries' environments, in calls that do not wait for anything."""

import asyncio
from collections.abc import Awaitable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from inspect import isawaitable
from typing import Any


def finished(returned: Any) -> Any:
    """
    Returns what a call returned, or what comes of it if that is awaitable. Where a loop is running already, in a
    notebook for instance, it is awaited in a loop and a thread of its own.

    Args:
        returned (`Any`):
            What a function, or a coroutine function of whatever kind, returned.
    """
    if not isawaitable(returned):
        return returned
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(_wait(returned))
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(copy_context().run, asyncio.run, _wait(returned)).result()


async def _wait(awaitable: Awaitable[Any]) -> Any:
    return await awaitable
