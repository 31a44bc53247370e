# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
import os
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from hf_qrl.environments import EnvironmentFailure, as_environment, call_reset, call_step, from_openenv


class Server:
    """A server that takes one client at a time."""

    def __init__(self):
        self.clients, self.refusals = [], 0


class Client:
    """The duck type of OpenEnv's synchronous clients: counts to the limit."""

    def __init__(self, server, error=None):
        self.server, self.error, self.calls, self.closed = server, error, 0, 0
        server.clients.append(self)

    def reset(self, seed=None, **options):
        if self.server.refusals:
            self.server.refusals -= 1
            raise RuntimeError("Server error: full (code: CAPACITY_REACHED)")
        self.value, self.limit = seed, options.get("limit", seed + 2)
        return SimpleNamespace(observation={"value": self.value}, reward=None, done=False)

    def step(self, action):
        self.calls += 1
        if self.error:
            raise self.error
        self.value += action["add"]
        done = self.value >= self.limit
        return SimpleNamespace(observation={"value": self.value}, reward=1 if done else None, done=done)

    def close(self):
        self.closed += 1


def adapter(server, error=None, **kwargs):
    return from_openenv(
        lambda: Client(server, error),
        lambda text: {"add": int(text)} if text.isdigit() else None,
        lambda observation: f"{observation['value']}",
        retry_delay=0.0,
        **kwargs,
    )


def say(log, text):
    return [*log, {"role": "assistant", "content": text}]


def test_episode():
    server = Server()
    env = as_environment(adapter(server, invalid_reward=-1.0))
    (log,), metadata, _ = call_reset(env, [5], options=[{"limit": 7}])
    rewards = []
    for text in ("1", "one", "1"):
        result = call_step(env, [say(log, text)], metadata)
        log, metadata = say(log, text) + result.observations[0], result.metadata
        rewards.append(result.rewards.item())
    texts = [message["content"] for message in log]
    assert texts == ["5", "1", "6", "one", "This is not a valid action.", "1", "7"] and rewards == [0.0, -1.0, 1.0]
    assert result.terminateds.item() and [client.closed for client in server.clients] == [1]


def test_a_full_server_is_asked_again():
    server = Server()
    server.refusals = 2
    env = as_environment(adapter(server))
    call_reset(env, [0])
    assert [client.closed for client in server.clients] == [1, 1, 0]
    server.refusals = 9
    with pytest.raises(EnvironmentFailure, match="CAPACITY_REACHED") as caught:
        call_reset(as_environment(adapter(server, connect_attempts=2)), [0])
    assert caught.value.failure_class == "INFRA" and [client.closed for client in server.clients] == [1, 1, 0, 1, 1]


@pytest.mark.parametrize(
    "error, failure_class",
    [
        (TimeoutError("60 s"), "INFRA"),
        (ConnectionError("gone"), "INFRA"),
        (RuntimeError("Server error: 1/0 (code: EXECUTION_ERROR)"), "DATA"),
    ],
)
def test_after_an_error_the_client_is_never_used_again(error, failure_class):
    server = Server()
    env = adapter(server, error)()
    env.reset(seed=0)
    with pytest.raises(EnvironmentFailure) as caught:
        env.step("1")
    assert caught.value.failure_class == failure_class and "`step`" in str(caught.value)
    with pytest.raises(EnvironmentFailure, match="Replay the episode in a new session"):
        env.step("1")
    assert server.clients[0].calls == 1 and server.clients[0].closed == 1


def test_an_interrupt_closes_too():
    server = Server()
    env = adapter(server, KeyboardInterrupt())()
    env.reset(seed=0)
    with pytest.raises(KeyboardInterrupt):
        env.step("1")
    assert server.clients[0].closed == 1


def test_an_error_of_the_reset_is_not_repeated():
    class Broken(Client):
        def reset(self, **kwargs):
            raise RuntimeError("Server error: no such level (code: EXECUTION_ERROR)")

    server = Server()
    with pytest.raises(EnvironmentFailure, match="no such level") as caught:
        from_openenv(lambda: Broken(server), str, str)().reset(seed=0)
    assert caught.value.failure_class == "DATA" and len(server.clients) == 1
    with pytest.raises(ValueError, match="`connect_attempts` must be at least 1, got 0"):
        from_openenv(lambda: Broken(server), str, str, connect_attempts=0)


SERVER = """
import sys
import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

class Add(Action):
    amount: int

class Value(Observation):
    value: int

class Counter(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.start = self.value = seed or 0
        return Value(value=self.value)

    def step(self, action, timeout_s=None, **kwargs):
        if action.amount == 0:
            raise ValueError("nothing to add")
        self.value += action.amount
        return Value(value=self.value, reward=float(action.amount), done=self.value >= self.start + 3)

    @property
    def state(self):
        return State()

uvicorn.run(create_fastapi_app(Counter, Add, Value), host="127.0.0.1", port=int(sys.argv[1]), log_level="error")
"""


@pytest.mark.slow  # the server needs 15 s to start
def test_a_real_server():
    core = pytest.importorskip("openenv.core", reason="openenv-core is an optional extra, hf_qrl[openenv]")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, "-c", SERVER, str(port)], env={**os.environ, "PYTHONUNBUFFERED": "1"})
    try:
        for _ in range(240):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert process.poll() is None
            time.sleep(0.5)
        env = as_environment(
            from_openenv(
                lambda: core.GenericEnvClient(f"http://127.0.0.1:{port}").sync(),
                lambda text: {"amount": int(text)},
                lambda observation: str(observation["value"]),
                retry_delay=0.2,
            )
        )
        (log,), metadata, _ = call_reset(env, [5])
        assert log == [{"role": "user", "content": "5"}]
        # The server takes one session at a time.
        full = from_openenv(
            lambda: core.GenericEnvClient(f"http://127.0.0.1:{port}").sync(),
            str,
            str,
            connect_attempts=2,
            retry_delay=0.1,
        )
        with pytest.raises(EnvironmentFailure) as caught:
            full().reset(seed=0)
        assert caught.value.failure_class == "INFRA"
        result = call_step(env, [say(log, "1")], metadata)
        log = say(log, "1") + result.observations[0]
        result = call_step(env, [say(log, "2")], result.metadata)
        assert (
            result.observations[0][0]["content"] == "8" and result.rewards.item() == 2.0 and result.terminateds.item()
        )
        # Its place is free again, and an error of the environment is one of the data.
        (log,), metadata, _ = call_reset(env, [0])
        with pytest.raises(EnvironmentFailure, match="EXECUTION_ERROR") as caught:
            call_step(env, [say(log, "0")], metadata)
        assert caught.value.failure_class == "DATA" and len(env) == 0
    finally:
        process.terminate()
        process.wait(timeout=20)
