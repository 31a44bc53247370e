# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""Failures are typed, picklable, and never rewards."""

import asyncio
import pickle
import subprocess
import urllib.error

import pytest

from hf_qrl.environments.failures import EnvironmentFailure, FailureClass, ReplayMismatch, call_guarded, classify


class Timeout(BaseException):
    """As math-verify raises it: not an `Exception`."""


class Unpicklable(Exception):
    def __init__(self, one, two):
        super().__init__(lambda: None)

    def __str__(self):
        raise RuntimeError("no text")


def http_error(status):
    return urllib.error.HTTPError("http://localhost", status, "message", None, None)


def requests_error(status):
    requests = pytest.importorskip("requests", reason="requests comes with other packages")
    response = requests.Response()
    response.status_code = status
    return requests.HTTPError(response=response)


@pytest.mark.parametrize(
    "error, expected",
    [
        (ValueError("x"), "DATA"),
        (SyntaxError("x"), "DATA"),
        (Timeout(), "DATA"),
        (asyncio.CancelledError(), "DATA"),
        (TimeoutError(), "INFRA"),
        (ConnectionResetError(), "INFRA"),
        (MemoryError(), "INFRA"),
        (subprocess.TimeoutExpired("x", 1), "INFRA"),
        (urllib.error.URLError("refused"), "INFRA"),
        (EnvironmentFailure("x", FailureClass.INFRA), "INFRA"),
        (ReplayMismatch("x"), "DATA"),
        *[(http_error(status), "INFRA") for status in (408, 429, 500, 503)],
        *[(http_error(status), "DATA") for status in (400, 404)],
    ],
    ids=repr,
)
def test_classes(error, expected):
    assert classify(error) is FailureClass(expected)


def test_classes_of_other_packages():
    requests = pytest.importorskip("requests", reason="requests comes with other packages")
    assert classify(requests.ConnectionError()) is FailureClass.INFRA
    assert classify(requests.ReadTimeout()) is FailureClass.INFRA
    assert classify(requests_error(502)) is FailureClass.INFRA
    assert classify(requests_error(422)) is FailureClass.DATA
    assert classify(requests.HTTPError()) is FailureClass.DATA


def test_classes_of_httpx():
    httpx = pytest.importorskip("httpx", reason="httpx comes with other packages")
    request = httpx.Request("GET", "http://localhost")
    assert classify(httpx.ConnectError("x")) is FailureClass.INFRA
    assert classify(httpx.ReadTimeout("x")) is FailureClass.INFRA
    for status, expected in ((503, FailureClass.INFRA), (404, FailureClass.DATA)):
        error = httpx.HTTPStatusError("x", request=request, response=httpx.Response(status))
        assert classify(error) is expected


def test_classes_of_ray():
    exceptions = pytest.importorskip("ray.exceptions", reason="ray is an optional extra, hf_qrl[ray]")
    for name in ("ActorDiedError", "ActorUnavailableError", "WorkerCrashedError", "OutOfMemoryError"):
        error = getattr(exceptions, name)
        assert classify(error.__new__(error)) is FailureClass.INFRA
    assert classify(exceptions.GetTimeoutError()) is FailureClass.INFRA
    wrapped = exceptions.RayTaskError("f", "traceback", ValueError("x")).as_instanceof_cause()
    assert classify(wrapped) is FailureClass.DATA


def test_call_guarded_keeps_the_cause_as_text():
    def broken(text):
        return int(text)

    with pytest.raises(EnvironmentFailure) as caught:
        call_guarded("`step`", broken, "seven")
    failure = caught.value
    assert str(failure).startswith("`step` raised ValueError: invalid literal")
    assert failure.failure_class == "DATA" and failure.cause == "ValueError"
    assert "return int(text)" in failure.traceback_text and "return int(text)" in failure.__notes__[0]
    assert failure.__cause__ is None and failure.__context__ is None
    again = pickle.loads(pickle.dumps(failure))
    assert type(again) is EnvironmentFailure and str(again) == str(failure)
    for name in ("failure_class", "cause", "traceback_text", "__notes__"):
        assert getattr(again, name) == getattr(failure, name)


def test_call_guarded_beyond_exception_and_unpicklable():
    def call(error):
        raise error

    for error in (Timeout(), Unpicklable(1, 2), GeneratorExit()):
        with pytest.raises(EnvironmentFailure) as caught:
            call_guarded("`step`", call, error)
        assert type(error).__qualname__ in pickle.loads(pickle.dumps(caught.value)).cause
    for error in (KeyboardInterrupt(), SystemExit()):
        with pytest.raises(type(error)):
            call_guarded("`step`", call, error)
    mismatch = ReplayMismatch("other course")
    with pytest.raises(ReplayMismatch) as caught:
        call_guarded("`step`", call, mismatch)
    assert caught.value is mismatch and isinstance(pickle.loads(pickle.dumps(mismatch)), ReplayMismatch)


def test_call_guarded_returns():
    assert call_guarded("f", lambda a, b: a + b, 1, b=2) == 3
