# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""Workers that are Ray actors: for objects on other machines, or calls so slow that 5 ms more do not matter."""

import contextlib
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, cast

from .tasks import load_target, serve_call
from .worker_pool import Event, Worker, WorkerPool


class RayExecutor(WorkerPool):
    """
    Runs calls in Ray actors, with the rules of [`ProcessExecutor`]. Ray's own retries are off: with them a call that
    kills its actor never returns. Calls that run cannot be cancelled, so a deadline kills the actor.

    Needs `pip install hf_qrl[ray]`.

    Args:
        factory (`Callable[[], Any]`):
            Makes the object of a worker, in the actor. Ray pickles it, functions defined on the spot too.
        num_workers (`int`):
            Number of actors. They start when there is work for them.
        timeout (`float`, *optional*):
            Seconds that a call may take. After that the actor is killed.
        address (`str`, *optional*):
            Cluster to connect to, if Ray does not run in this process yet. `None` starts one here, which ends with
            the executor.
        actor_options (`dict`, *optional*):
            What an actor asks of the cluster, for instance `{"num_cpus": 1}`. By default no CPU is reserved, so that
            no actor waits for one.
        max_crashes (`int`, *optional*, defaults to 2):
            How often a call that killed its actor, or whose actor cannot be reached, is tried again.
        max_timeouts (`int`, *optional*, defaults to 1):
            How often a call that took too long is tried again.
        start_timeout (`float`, *optional*, defaults to 300.0):
            Seconds that an actor may take to start and make its object, waiting for resources included.
        max_starts (`int`, *optional*, defaults to 3):
            How often in a row an actor may fail to start, once any has started, before its slot is given up for the
            run.
        backoff (`float`, *optional*, defaults to 0.5):
            Seconds of waiting when an actor is replaced twice without finishing a call; they double from there.
    """

    def __init__(
        self,
        factory: Callable[[], Any],
        num_workers: int,
        timeout: float | None = None,
        address: str | None = None,
        actor_options: dict[str, Any] | None = None,
        max_crashes: int = 2,
        max_timeouts: int = 1,
        start_timeout: float = 300.0,
        max_starts: int = 3,
        backoff: float = 0.5,
    ) -> None:
        super().__init__(num_workers, timeout, max_crashes, max_timeouts, start_timeout, max_starts, backoff)
        try:
            import ray
            from ray import cloudpickle
        except ImportError as error:
            raise ImportError(
                "`RayExecutor` needs Ray: `pip install hf_qrl[ray]`. On one machine `ProcessExecutor` does the same."
            ) from error
        self._factory = cloudpickle.dumps(factory)
        self._owns_ray = not ray.is_initialized()
        if self._owns_ray:
            # The output of workers stays in Ray's logs, apart from ours.
            ray.init(address=address, log_to_driver=False, include_dashboard=False if address is None else None)
        # Off last, whatever the options say.
        options = {**(actor_options or {}), "max_restarts": 0, "max_task_retries": 0, "max_concurrency": 1}
        self._actor_class = ray.remote(_Target).options(**options)

    def close(self) -> None:
        if self._closed:
            return
        super().close()
        if self._owns_ray:
            import ray

            ray.shutdown()

    def _start(self, slot: int) -> Worker:
        return _Actor(self._actor_class.remote(), self._factory)

    def _wait(self, workers: dict[int, Worker], timeout: float) -> list[tuple[int, Event]]:
        import ray

        actors = cast(dict[int, _Actor], workers)
        waited_for = {actor.reference: number for number, actor in actors.items() if actor.reference is not None}
        if not waited_for:
            time.sleep(timeout)
            return []
        references = list(waited_for)
        ready, _ = ray.wait(references, num_returns=1, timeout=timeout)
        if ready:  # and what else is
            ready, _ = ray.wait(references, num_returns=len(references), timeout=0)
        return [(waited_for[reference], actors[waited_for[reference]].read()) for reference in ready]

    def _stop(self, workers: list[Worker]) -> None:
        for worker in workers:
            worker.kill()


class _Target:
    """What runs in the actor."""

    def start(self, factory: bytes, path: list[str]) -> str:
        # As for processes: what can be imported in the executor's process can be imported here, where it exists.
        sys.path += [folder for folder in path if folder not in sys.path]
        try:
            self._target = load_target(factory)
        except BaseException:
            return traceback.format_exc()
        return ""

    def call(self, data: bytes) -> bytes:
        return serve_call(self._target, data)


class _Actor(Worker):
    def __init__(self, actor: Any, factory: bytes) -> None:
        self._actor = actor
        self._attempt = -1
        self.reference: Any = actor.start.remote(factory, sys.path)

    def send(self, attempt: int, call: bytes) -> bool:
        self._attempt = attempt
        self.reference = self._actor.call.remote(call)
        return True

    def read(self) -> Event:
        import ray
        from ray.exceptions import ActorUnavailableError, RayError

        reference, self.reference = self.reference, None
        try:
            result = ray.get(reference)
        except ActorUnavailableError as error:  # a kind of actor error, but the actor may come back
            return Event("unreachable", message=str(error))
        except RayError as error:
            return Event("died", message=f"{type(error).__name__}: {error}")
        if self._attempt >= 0:
            return Event("answer", self._attempt, result)
        return Event("died", message=result) if result else Event("ready")

    def kill(self) -> None:
        import ray

        with contextlib.suppress(Exception):  # dead already, or out of reach
            ray.kill(self._actor, no_restart=True)
        self.reference = None
