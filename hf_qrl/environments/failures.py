# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""Whatever goes wrong in an environment becomes one typed, picklable exception: a failure is never a reward of 0."""

import traceback
from collections.abc import Callable
from enum import StrEnum
from typing import Any, TypeVar


T = TypeVar("T")


class FailureClass(StrEnum):
    """
    Who is to blame: `DATA`, the environment's code or this input, and the same call would fail again; `INFRA`, the
    machinery around it, and another attempt may succeed. What is not known to be `INFRA` is `DATA`.
    """

    DATA = "DATA"
    INFRA = "INFRA"


# By name, so that none of the packages is imported to look.
_INFRA_TYPES = frozenset(
    {
        "ConnectionError",
        "MemoryError",
        "TimeoutError",
        "subprocess.TimeoutExpired",
        "multiprocessing.context.TimeoutError",
        "concurrent.futures.process.BrokenProcessPool",
        "ray.exceptions.RayActorError",
        "ray.exceptions.WorkerCrashedError",
        "ray.exceptions.NodeDiedError",
        "ray.exceptions.LocalRayletDiedError",
        "ray.exceptions.ObjectLostError",
        "ray.exceptions.OutOfMemoryError",
        "ray.exceptions.RpcError",
        "ray.exceptions.RaySystemError",
        "urllib.error.URLError",
        "aiohttp.client_exceptions.ClientConnectionError",
        "requests.exceptions.ConnectionError",
        "requests.exceptions.Timeout",
        "httpx.TransportError",
        "httpcore.NetworkError",
        "httpcore.TimeoutException",
        "websockets.exceptions.ConnectionClosed",
    }
)
_INFRA_STATUS = frozenset({408, 429, *range(500, 600)})


class EnvironmentFailure(Exception):
    """
    A failure of an environment. It survives pickling, whatever its cause was: the cause is kept as text.

    Args:
        message (`str`):
            What happened.
        failure_class (`FailureClass`, *optional*, defaults to `DATA`):
            Whether another attempt makes sense.
        cause (`str`, *optional*, defaults to `""`):
            Full name of the exception's type, `""` if there was none.
        traceback_text (`str`, *optional*, defaults to `""`):
            Its traceback.
    """

    def __init__(
        self,
        message: str,
        failure_class: FailureClass = FailureClass.DATA,
        cause: str = "",
        traceback_text: str = "",
    ) -> None:
        super().__init__(message)
        self.message = message
        self.failure_class = FailureClass(failure_class)
        self.cause = cause
        self.traceback_text = traceback_text
        if traceback_text:
            self.add_note("The environment's own traceback:\n" + traceback_text)

    def __reduce__(self) -> tuple:
        return type(self), (self.message, self.failure_class, self.cause, self.traceback_text)

    @classmethod
    def from_exception(cls, error: BaseException, where: str) -> "EnvironmentFailure":
        """
        Returns the failure that an exception means; one that already is a failure is returned unchanged.

        Args:
            error (`BaseException`):
                What was raised.
            where (`str`):
                The call that raised it, for the message.
        """
        if isinstance(error, EnvironmentFailure):
            return error
        cause = _full_name(type(error))
        text = "".join(traceback.format_exception(error))
        return cls(f"{where} raised {cause}: {_text(error)}", classify(error), cause, text)


class ReplayMismatch(EnvironmentFailure):
    """A replayed episode took another course than the recorded one, so it must not be continued."""


def classify(error: BaseException) -> FailureClass:
    """
    Returns the class of an exception: `INFRA` for lost connections, processes and actors, exhausted memory, timeouts
    and the HTTP statuses 408, 429 and 5xx, else `DATA`.

    A timeout that derives from `BaseException` only, as math-verify's, is about the input: `DATA`.
    """
    if isinstance(error, EnvironmentFailure):
        return error.failure_class
    names = {_full_name(base) for base in type(error).__mro__}
    status = _http_status(error, names)
    infra = status in _INFRA_STATUS if status is not None else not names.isdisjoint(_INFRA_TYPES)
    return FailureClass.INFRA if infra else FailureClass.DATA


def call_guarded(where: str, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """
    Calls a function of an environment.

    Args:
        where (`str`):
            Name of the call in messages.
        function (`Callable`):
            What to call, with the further arguments.

    Raises:
        EnvironmentFailure: For any exception, those beyond `Exception` included: some timeouts derive from
            `BaseException`. Only `KeyboardInterrupt` and `SystemExit` pass.
    """
    try:
        return function(*args, **kwargs)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        failure = EnvironmentFailure.from_exception(error, where)
    # Raised out here and without a traceback of its own, a failure does not keep the environment's frames alive.
    raise failure.with_traceback(None)


def _http_status(error: BaseException, names: set[str]) -> int | None:
    status: Any = None
    if "urllib.error.HTTPError" in names:
        status = error.code  # type: ignore[attr-defined]
    elif "aiohttp.client_exceptions.ClientResponseError" in names:
        status = error.status  # type: ignore[attr-defined]
    elif not names.isdisjoint({"requests.exceptions.HTTPError", "httpx.HTTPStatusError"}):
        response = error.response  # type: ignore[attr-defined]
        status = None if response is None else response.status_code
    return status


def _full_name(kind: type) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as broken:  # an exception whose own text fails must not hide what happened
        return f"<its text cannot be made: {type(broken).__name__}>"
