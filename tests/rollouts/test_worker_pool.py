# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""The scheduling of workers, with workers that follow a script and a clock that costs no time."""

import pickle

import pytest

from hf_qrl.distributed import worker_pool
from hf_qrl.distributed.executors import Task, WorkerStartError
from hf_qrl.distributed.worker_pool import Event, Worker, WorkerPool


class ScriptedWorker(Worker):
    def __init__(self, pool: "ScriptedPool", slot: int) -> None:
        self.pool, self.slot, self.killed = pool, slot, False

    def send(self, attempt: int, call: bytes) -> bool:
        method, _, _ = pickle.loads(call)
        reactions = self.pool.script.get(method, [])
        reaction = reactions.pop(0) if reactions else "answer"
        self.pool.log.append((self.pool.clock.now, self.slot, method, reaction))
        if reaction == "found dead":
            return False
        answer = Event("answer", attempt, pickle.dumps((f"{method} {attempt}", None)))
        if reaction == "answer":
            self.pool.events.append((self, answer))
        elif reaction == "die":
            self.pool.events.append((self, Event("died", message="boom")))
        elif reaction == "unreachable":
            self.pool.events.append((self, Event("unreachable", message="no network")))
        else:
            assert reaction == "hang"
            self.pool.late.append((self.slot, answer))
        return True

    def kill(self) -> None:
        self.killed = True


class ScriptedPool(WorkerPool):
    """`script` says what each call of a method does, in turn; `starts` what happens to each worker that starts."""

    def __init__(self, clock, script=None, starts=(), num_workers=1, timeout=None, **kwargs) -> None:
        settings = {"max_crashes": 2, "max_timeouts": 1, "start_timeout": 60.0, "max_starts": 3, "backoff": 0.5}
        super().__init__(num_workers, timeout, **{**settings, **kwargs})
        self.clock, self.script, self.starts = clock, script or {}, list(starts)
        self.events, self.late, self.log, self.started = [], [], [], []

    def _start(self, slot):
        worker = ScriptedWorker(self, slot)
        self.started.append((self.clock.now, slot))
        fate = self.starts.pop(0) if self.starts else "ready"
        if fate == "ready":
            self.events.append((worker, Event("ready")))
        elif fate == "broken":
            self.events.append((worker, Event("died", message="Traceback: the factory is broken")))
        elif fate == "no process":
            raise BlockingIOError("too many processes")
        else:
            assert fate == "hang"
        return worker

    def _wait(self, workers, timeout):
        events = [(worker.slot, event) for worker, event in self.events if workers.get(worker.slot) is worker]
        self.events.clear()
        if not events:
            self.clock.now += timeout
        return events

    def _stop(self, workers):
        for worker in workers:
            worker.kill()


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(worker_pool, "monotonic", clock)
    return clock


def run(pool, *tasks):
    outcomes = list(pool.run([task if isinstance(task, Task) else Task(task, task) for task in tasks]))
    assert sorted(outcome.key for outcome in outcomes) == sorted(
        task.key if isinstance(task, Task) else task for task in tasks
    )
    return {outcome.key: outcome for outcome in outcomes}


def test_late_answers_are_dropped(clock):
    pool = ScriptedPool(clock, {"a": ["hang"]}, timeout=5.0)
    run_of_a = pool.run([Task("a", "a"), Task("b", "b")])
    assert next(run_of_a).value == "b 2"
    # What the killed attempt might still send, through the worker that replaced it.
    [(slot, late)] = pool.late
    while pool._slots[0].entry is None:
        pool._turn()
    pool._handle(pool._slots[slot], late)
    assert [outcome.value for outcome in run_of_a] == ["a 3"]
    assert pool.workers_lost == 1


def test_retries_are_counted_apart_and_end(clock):
    script = {"crash": ["die"] * 9, "once": ["die"], "slow": ["hang"] * 9, "both": ["die", "hang", "die"]}
    pool = ScriptedPool(clock, script, timeout=5.0, num_workers=2)
    outcomes = run(pool, "crash", "once", "slow", "both", "fine")
    assert outcomes["crash"].failure.kind == "crashed"
    assert outcomes["crash"].failure.attempts == 3
    assert outcomes["slow"].failure.kind == "timeout"
    assert outcomes["slow"].failure.attempts == 2
    assert [outcomes[key].failure for key in ("once", "both", "fine")] == [None] * 3
    assert pool.workers_lost == 3 + 1 + 2 + 3


def test_what_crashed_is_tried_again_in_another_run(clock):
    pool = ScriptedPool(clock, {"a": ["die"] * 4})
    assert run(pool, "a")["a"].failure.kind == "crashed"
    calls = len(pool.log)
    assert run(pool, "a")["a"].failure is None
    assert len(pool.log) == calls + 2


def test_a_retry_waits_behind_the_others(clock):
    pool = ScriptedPool(clock, {"poison": ["die"] * 3})
    run(pool, "poison", "a", "b")
    assert [method for _, _, method, _ in pool.log] == ["poison", "a", "b", "poison", "poison"]


def test_only_repeated_deaths_make_the_pool_wait(clock):
    pool = ScriptedPool(clock, {"a": ["die"] * 5}, max_crashes=4, backoff=1.0)
    run(pool, "a")
    assert [time for time, _ in pool.started] == [0.0, 0.0, 1.0, 3.0, 7.0]
    run(pool, "b", "c")
    assert pool.started[-1][0] == 15.0
    pool.script["d"] = ["die"]
    run(pool, "d")
    assert pool.started[-1][0] == 15.0, "a finished call begins the count anew"


def test_pinned_tasks_go_to_their_slot_in_order(clock):
    pool = ScriptedPool(clock, num_workers=3)
    run(pool, *(Task(f"{slot}-{i}", f"{slot}-{i}", slot=slot) for i in range(4) for slot in range(3)))
    for slot in range(3):
        assert [method for _, s, method, _ in pool.log if s == slot] == [f"{slot}-{i}" for i in range(4)]


@pytest.mark.parametrize(("reaction", "kind"), [("die", "lost"), ("hang", "timeout"), ("unreachable", "lost")])
def test_pinned_tasks_are_never_tried_again(clock, reaction, kind):
    pool = ScriptedPool(clock, {"a": [reaction]}, num_workers=2, timeout=5.0)
    outcomes = run(pool, Task("a", "a", slot=0), Task("b", "b", slot=0), Task("c", "c", slot=1))
    assert outcomes["a"].failure.kind == kind
    assert outcomes["a"].failure.attempts == 1
    assert outcomes["c"].failure is None
    if reaction == "unreachable":  # the state may be there
        assert outcomes["b"].failure is None
    else:
        assert outcomes["b"].failure.kind == "lost"
        assert outcomes["b"].failure.attempts == 0, "it was not begun"
    # The fresh worker has the same slot, and nobody is told twice.
    assert run(pool, Task("d", "d", slot=0))["d"].slot == 0


def test_state_that_was_lost_in_silence_is_reported(clock):
    pool = ScriptedPool(clock)
    run(pool, Task("a", "a", slot=0))
    pool.events.append((pool._slots[0].worker, Event("died", message="killed from outside")))
    outcomes = run(pool, Task("b", "b", slot=0), Task("c", "c", slot=0))
    assert [outcome.failure.kind for outcome in outcomes.values()] == ["lost", "lost"]
    assert run(pool, Task("d", "d", slot=0))["d"].failure is None


def test_what_a_fresh_worker_began_is_not_reported_lost(clock):
    pool = ScriptedPool(clock, {"a": ["die"]})
    assert run(pool, "a")["a"].failure is None
    assert run(pool, Task("b", "b", slot=0))["b"].failure is None


def test_a_worker_found_dead_costs_its_task_nothing(clock):
    pool = ScriptedPool(clock, {"a": ["found dead", "die", "die"]})
    outcome = run(pool, "a")["a"]
    assert outcome.failure is None
    assert [reaction for *_, reaction in pool.log] == ["found dead", "die", "die", "answer"]


def test_a_worker_out_of_reach_is_kept_and_its_task_tried_again_later(clock):
    pool = ScriptedPool(clock, {"a": ["unreachable"] * 2, "b": ["unreachable"] * 3}, backoff=1.0)
    outcomes = run(pool, "a", "b")
    assert outcomes["a"].failure is None
    assert outcomes["b"].failure.kind == "lost"
    assert pool.workers_lost == 0
    assert clock.now > 0


def test_a_factory_that_never_works_is_not_tried_for_ever(clock):
    pool = ScriptedPool(clock, starts=["broken"] * 99, num_workers=3)
    with pytest.raises(WorkerStartError, match="the factory is broken"):
        list(pool.run([Task(str(i), "a") for i in range(9)]))
    assert len(pool.started) == 3, "each was tried once"
    with pytest.raises(RuntimeError, match="closed"):
        list(pool.run([Task("b", "b")]))


def test_workers_that_fail_to_start_are_tried_again_once_one_has_worked(clock):
    pool = ScriptedPool(clock, {"a": ["die"]}, starts=["ready", "broken", "no process", "ready"])
    assert run(pool, "a")["a"].failure is None
    assert clock.now > 0, "it waits in between"


def test_all_slots_given_up_is_an_error(clock):
    pool = ScriptedPool(clock, {"a": ["die"]}, starts=["ready", *["broken"] * 99])
    with pytest.raises(WorkerStartError, match="the factory is broken"):
        list(pool.run([Task("a", "a")]))
    assert len(pool.started) == 4


def test_one_slot_given_up_leaves_the_others_working(clock):
    starts = ["ready", "ready", "broken", "broken", "broken"]
    pool = ScriptedPool(clock, {"a": ["die"]}, starts=starts, num_workers=2)
    outcomes = run(pool, Task("a", "a", slot=0), Task("b", "b", slot=1))
    assert outcomes["a"].failure.kind == "lost"
    outcomes = run(pool, Task("c", "c", slot=0), Task("d", "d", slot=1), "e")
    assert outcomes["c"].failure.kind == "lost"
    assert "the factory is broken" in outcomes["c"].failure.message
    assert outcomes["d"].failure is outcomes["e"].failure is None


def test_a_worker_that_does_not_get_ready_is_given_up(clock):
    pool = ScriptedPool(clock, starts=["hang"])
    with pytest.raises(WorkerStartError, match="not ready after 60 seconds"):
        list(pool.run([Task("a", "a")]))


def test_workers_that_die_idle_again_and_again_are_given_up(clock):
    pool = ScriptedPool(clock, {"a": ["found dead"] * 99})
    with pytest.raises(WorkerStartError, match="found dead"):
        list(pool.run([Task("a", "a")]))


def test_workers_start_only_for_work(clock):
    pool = ScriptedPool(clock, num_workers=8)
    run(pool, "a")
    assert len(pool.started) == 1
    run(pool, "b", "c", "d")
    assert len(pool.started) == 3
    run(pool, Task("e", "e", slot=7))
    assert pool.started[-1][1] == 7


def test_a_run_that_is_given_up_leaves_nothing_behind(clock):
    pool = ScriptedPool(clock, {"a": ["hang"] * 9}, num_workers=2)
    outcomes = pool.run([Task("a", "a"), Task("b", "b"), Task("c", "c"), Task("d", "d", slot=0)])
    assert next(outcomes).key == "d"
    hanging = next(slot.worker for slot in pool._slots if slot.entry is not None and slot.entry.task.key == "a")
    outcomes.close()
    assert hanging.killed
    assert run(pool, "e")["e"].value.startswith("e ")


def test_one_run_at_a_time(clock):
    pool = ScriptedPool(clock)
    first = pool.run([Task("a", "a"), Task("b", "b")])
    next(first)
    with pytest.raises(RuntimeError, match="has not ended"):
        next(pool.run([Task("c", "c")]))
    assert len(list(first)) == 1
    assert run(pool, "d")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"num_workers": 0}, "num_workers=0"),
        ({"timeout": 0}, "timeout=0"),
        ({"max_crashes": -1}, "max_crashes=-1"),
        ({"max_starts": 0}, "max_starts=0"),
    ],
)
def test_settings_are_checked(clock, wrong, message):
    with pytest.raises(ValueError, match=message):
        ScriptedPool(clock, **wrong)
