# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""Executors with real workers: every task has its outcome, whatever happens to the worker that has it."""

import contextlib
import functools
import importlib.util
import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from hf_qrl.distributed.executors import LocalExecutor, ProcessExecutor, RayExecutor, Task, WorkerStartError
from tests.rollouts import worker_objects
from tests.rollouts.worker_objects import BreaksAfterFirst, Timeout, Troubled, alive, wait_until


ROOT = Path(__file__).parents[2]
HAS_RAY = importlib.util.find_spec("ray") is not None

# A copied process is there in milliseconds; the others import torch anew for each worker, or start a cluster.
WORKERS = [
    pytest.param("forkserver", id="forkserver"),
    pytest.param("spawn", id="spawn", marks=pytest.mark.slow),
    pytest.param(
        "ray",
        id="ray",
        marks=[
            pytest.mark.slow,
            pytest.mark.skipif(not HAS_RAY, reason="Ray is not installed: pip install hf_qrl[ray]"),
        ],
    ),
]
PROCESSES = WORKERS[:2]
LOCAL_TOO = [pytest.param("local", id="local"), *WORKERS]


@pytest.fixture(scope="module")
def cluster():
    import ray

    ray.init(log_to_driver=False, include_dashboard=False)
    yield
    ray.shutdown()


@pytest.fixture
def make(request):
    """Makes executors, and closes them."""
    with contextlib.ExitStack() as stack:

        def make(kind, factory=Troubled, num_workers=2, **kwargs):
            if kind == "local":
                return stack.enter_context(LocalExecutor(factory))
            if kind == "ray":
                request.getfixturevalue("cluster")
                return stack.enter_context(RayExecutor(factory, num_workers, **kwargs))
            return stack.enter_context(ProcessExecutor(factory, num_workers, start_method=kind, **kwargs))

        yield make


def run(executor, *tasks):
    """Outcomes by key, one for each task."""
    outcomes = list(executor.run(tasks))
    assert sorted(outcome.key for outcome in outcomes) == sorted(task.key for task in tasks)
    return {outcome.key: outcome for outcome in outcomes}


def values(outcomes):
    assert [outcome.failure for outcome in outcomes.values() if outcome.failure] == []
    return {key: outcome.value for key, outcome in outcomes.items()}


def pids(executor) -> list[int]:
    tasks = [Task(f"pid of {slot}", "pid", slot=slot) for slot in range(executor.num_slots)]
    return list(values(run(executor, *tasks)).values())


@pytest.mark.parametrize("kind", WORKERS)
def test_44_tasks_all_accounted_for(make, tmp_path, kind):
    executor = make(kind, timeout=3.0)
    tasks = [Task(str(i), "echo", (i, 0.02)) for i in range(40)]
    tasks[3:3] = [
        Task("raises", "raises"),
        Task("kills", "kill"),
        Task("kills once", "kill_once", (str(tmp_path / "killed"), "alive")),
        Task("hangs", "hang"),
    ]
    outcomes = run(executor, *tasks)
    failures = {key: (o.failure.kind, o.failure.attempts) for key, o in outcomes.items() if o.failure is not None}
    assert failures == {"raises": ("error", 1), "kills": ("crashed", 3), "hangs": ("timeout", 2)}
    assert {key: o.value for key, o in outcomes.items() if o.failure is None} == {
        **{str(i): i for i in range(40)},
        "kills once": "alive",
    }
    assert executor.workers_lost == 6
    assert isinstance(outcomes["raises"].failure.error, KeyError)
    assert 'raise KeyError("no such thing")' in outcomes["raises"].failure.traceback_text
    # It is as good as new.
    assert values(run(executor, *(Task(f"again {i}", "echo", (i,)) for i in range(10)))) == {
        f"again {i}": i for i in range(10)
    }
    assert executor.workers_lost == 6


def test_spawned_processes_survive_their_crash(make, tmp_path):
    executor = make("spawn", num_workers=1)
    assert values(run(executor, Task("a", "kill_once", (str(tmp_path / "killed"), "alive")))) == {"a": "alive"}


@pytest.mark.parametrize("kind", LOCAL_TOO)
def test_pinned_tasks_find_their_state(make, kind):
    executor = make(kind)
    slots = range(executor.num_slots)
    tasks = [Task(f"{slot} {i}", "increase", slot=slot) for i in range(5) for slot in slots]
    assert values(run(executor, *tasks)) == {f"{slot} {i}": i + 1 for i in range(5) for slot in slots}
    assert values(run(executor, Task("more", "increase", slot=0))) == {"more": 6}
    with pytest.raises(ValueError, match="pinned to slot"):
        executor.run([Task("a", "increase", slot=executor.num_slots)])


@pytest.mark.parametrize("kind", WORKERS)
@pytest.mark.parametrize(("method", "failure"), [("kill", "lost"), ("hang", "timeout")])
def test_pinned_tasks_are_lost_with_their_worker(make, kind, method, failure):
    executor = make(kind, timeout=3.0)
    run(executor, *(Task(f"first {slot}", "increase", slot=slot) for slot in range(2)))
    outcomes = run(
        executor,
        Task("bad", method, slot=0),
        Task("behind it", "increase", slot=0),
        Task("neighbour", "increase", slot=1),
    )
    assert outcomes["bad"].failure.kind == failure
    assert outcomes["behind it"].failure.kind == "lost"
    assert outcomes["neighbour"].value == 2
    assert values(run(executor, *(Task(f"last {slot}", "increase", slot=slot) for slot in range(2)))) == {
        "last 0": 1,
        "last 1": 3,
    }


@pytest.mark.parametrize("kind", WORKERS)
def test_a_call_that_took_too_long_does_not_answer_late(make, tmp_path, kind):
    executor = make(kind, timeout=2.0)
    outcomes = list(executor.run([Task("a", "hang_once", (str(tmp_path / "hung"), "fresh", 4.0))]))
    outcomes += list(executor.run([Task("b", "echo", ("b", 0.0)), Task("c", "echo", ("c", 1.0))]))
    assert {outcome.key: outcome.value for outcome in outcomes} == {"a": "fresh", "b": "b", "c": "c"}
    assert len(outcomes) == 3


@pytest.mark.parametrize("kind", WORKERS)
def test_a_busy_worker_killed_from_outside(make, tmp_path, kind):
    executor = make(kind)
    path = tmp_path / "pid"

    def kill():
        wait_until(path.exists)
        os.kill(int(path.read_text()), signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    outcomes = run(
        executor, Task("a", "announce_and_hang", (str(path),)), *(Task(str(i), "echo", (i,)) for i in range(5))
    )
    killer.join()
    assert values(outcomes) == {"a": "done", **{str(i): i for i in range(5)}}
    assert executor.workers_lost == 1


@pytest.mark.parametrize("kind", WORKERS)
def test_an_idle_worker_killed_from_outside(make, kind):
    executor = make(kind, max_crashes=1)
    for pid in pids(executor):
        os.kill(pid, signal.SIGKILL)
        assert wait_until(lambda pid=pid: not alive(pid))
    assert values(run(executor, *(Task(str(i), "echo", (i,)) for i in range(5)))) == {str(i): i for i in range(5)}
    run(executor, *(Task(f"begin {slot}", "increase", slot=slot) for slot in range(2)))
    for pid in pids(executor):
        os.kill(pid, signal.SIGKILL)
        assert wait_until(lambda pid=pid: not alive(pid))
    outcomes = run(executor, *(Task(f"go on {slot}", "increase", slot=slot) for slot in range(2)))
    assert [outcome.failure.kind for outcome in outcomes.values()] == ["lost", "lost"]
    assert values(run(executor, Task("fresh", "increase", slot=0))) == {"fresh": 1}


PARENT = """
import sys
from hf_qrl.distributed.executors import ProcessExecutor, RayExecutor, Task
from tests.rollouts.worker_objects import Troubled

if __name__ == "__main__":
    kind = sys.argv[1]
    if kind == "ray":
        executor = RayExecutor(Troubled, 3)
    else:
        executor = ProcessExecutor(Troubled, 3, start_method=kind)
    first = [Task(f"pid {slot}", "pid", slot=slot) for slot in range(3)]
    if kind != "ray":
        first.append(Task("program", "start_program", slot=0))
    for outcome in executor.run(first):
        print(outcome.value, flush=True)
    print("ready", flush=True)
    if sys.argv[2] == "busy":
        list(executor.run([Task("hang", "hang", slot=0), Task("lock", "hang_with_lock", slot=1)]))
    elif sys.argv[2] == "forgets":
        sys.exit(0)
"""


def start_parent(kind, what):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, kind, what], stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT
    )
    lines = []
    for line in parent.stdout:
        if line.strip() == "ready":
            break
        if line.strip().isdigit():
            lines.append(int(line))
    assert len(lines) == (3 if kind == "ray" else 4), lines
    return parent, lines


@pytest.mark.parametrize("kind", WORKERS)
def test_no_worker_outlives_a_parent_that_is_killed(kind):
    parent, workers = start_parent(kind, "busy")
    assert all(alive(pid) for pid in workers)
    # Long enough for the call that holds the interpreter's lock to begin.
    assert not wait_until(lambda: parent.poll() is not None, 1.0)
    parent.kill()
    parent.wait()
    gone = wait_until(lambda: not any(alive(pid) for pid in workers), 30)
    for pid in workers:  # what should not be there must not burn the machine either
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert gone


@pytest.mark.parametrize("kind", PROCESSES)
def test_a_program_that_forgets_to_close_still_ends(kind):
    parent, workers = start_parent(kind, "forgets")
    assert parent.wait(timeout=120) == 0
    assert wait_until(lambda: not any(alive(pid) for pid in workers))


@pytest.mark.parametrize("kind", WORKERS)
def test_what_cannot_travel_becomes_an_error(make, kind):
    executor = make(kind)
    outcomes = run(
        executor,
        Task("result", "unpicklable"),
        Task("exception", "raises_unreadable"),
        Task("arguments", "echo", (threading.Lock(),)),
        Task("good", "echo", (1,)),
    )
    assert outcomes["good"].value == 1
    failures = {key: outcome.failure for key, outcome in outcomes.items() if key != "good"}
    assert {failure.kind for failure in failures.values()} == {"error"}
    assert "result of `unpicklable`, a `lock`, cannot be pickled" in failures["result"].message
    assert failures["exception"].error is None
    assert failures["exception"].message == "Unreadable: cannot come back"
    assert "raise Unreadable(" in failures["exception"].traceback_text
    assert "arguments of the call cannot be pickled" in failures["arguments"].message
    assert executor.workers_lost == 0


@pytest.mark.parametrize("kind", LOCAL_TOO)
def test_exceptions_are_outcomes(make, kind):
    executor = make(kind)
    outcomes = run(executor, Task("a", "raises"), Task("b", "raises_beyond"), Task("c", "nothing"), Task("d", "pid"))
    assert [outcome.failure and outcome.failure.kind for key, outcome in sorted(outcomes.items())] == [
        "error",
        "error",
        "error",
        None,
    ]
    assert isinstance(outcomes["a"].failure.error, KeyError)
    assert outcomes["a"].failure.error.__traceback__ is None
    assert outcomes["b"].failure.error is None
    assert outcomes["b"].failure.message == "Timeout: took too long"
    assert Timeout.__name__ in outcomes["b"].failure.traceback_text
    assert isinstance(outcomes["c"].failure.error, AttributeError)
    assert executor.workers_lost == 0


@pytest.mark.parametrize("kind", LOCAL_TOO)
def test_the_order_of_tasks_does_not_matter(make, kind):
    executor = make(kind)
    results = []
    for round in range(3):
        tasks = [Task(f"{round} {i}", "echo", (i,)) for i in range(20)] + [Task(f"{round} bad", "raises")]
        random.Random(round).shuffle(tasks)
        outcomes = run(executor, *tasks)
        results.append({key[2:]: (o.value, o.failure and o.failure.message) for key, o in outcomes.items()})
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("kind", WORKERS)
def test_a_slow_task_does_not_hold_up_others(make, tmp_path, kind):
    executor = make(kind)
    signal_file = tmp_path / "go on"
    tasks = [Task("slow", "wait_for", (str(signal_file),)), *(Task(str(i), "echo", (i,)) for i in range(20))]
    seen = []
    for outcome in executor.run(tasks):
        seen.append(outcome.key)
        if len(seen) == 20:
            signal_file.touch()
    assert seen[-1] == "slow"


@pytest.mark.parametrize("kind", WORKERS)
def test_closing_while_busy(make, kind):
    executor = make(kind)
    workers = pids(executor)
    outcomes = executor.run([Task("hangs", "hang"), Task("quick", "echo", (1,)), Task("hangs too", "hang")])
    assert next(outcomes).key == "quick"
    executor.close()
    assert wait_until(lambda: not any(alive(pid) for pid in workers))
    with pytest.raises(RuntimeError, match="closed"):
        list(outcomes)
    with pytest.raises(RuntimeError, match="closed"):
        next(executor.run([Task("late", "pid")]))
    executor.close()


@pytest.mark.parametrize("kind", WORKERS)
def test_a_run_that_is_left_early(make, kind):
    executor = make(kind)
    for outcome in executor.run([Task("hangs", "hang"), *(Task(str(i), "echo", (i,)) for i in range(20))]):
        if outcome.key == "5":
            break
    assert values(run(executor, *(Task(f"new {i}", "echo", (i,)) for i in range(4)))) == {
        f"new {i}": i for i in range(4)
    }


@pytest.mark.parametrize("kind", WORKERS)
@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (worker_objects.broken_factory, "the database is not there"),
        (worker_objects.dying_factory, "exit code 5|SYSTEM_ERROR|died"),
        (worker_objects.hanging_factory, "not ready after"),
    ],
)
def test_a_factory_that_fails_is_a_loud_error(make, kind, factory, message):
    wait = 1.0 if factory is worker_objects.hanging_factory else 120.0
    executor = make(kind, factory, start_timeout=wait)
    with pytest.raises(WorkerStartError, match=message):
        run(executor, *(Task(str(i), "pid") for i in range(4)))
    with pytest.raises(RuntimeError, match="closed"):
        run(executor, Task("a", "pid"))


@pytest.mark.parametrize("kind", WORKERS)
def test_a_factory_that_stops_working_is_not_tried_for_ever(make, tmp_path, kind):
    executor = make(kind, functools.partial(BreaksAfterFirst, str(tmp_path / "made")), num_workers=1, backoff=0.01)
    assert values(run(executor, Task("a", "increase"))) == {"a": 1}
    with pytest.raises(WorkerStartError, match="only once"):
        run(executor, Task("b", "kill"))
    assert executor.workers_lost == 4


def test_a_factory_that_cannot_be_sent_is_refused():
    with pytest.raises(ValueError, match="top level of a module"):
        ProcessExecutor(lambda: None, 1)
    with pytest.raises(ValueError, match="spawn"):
        ProcessExecutor(Troubled, 1, start_method="fork")


@pytest.mark.parametrize("kind", WORKERS)
def test_what_workers_print_is_apart(make, capfd, kind):
    executor = make(kind, num_workers=1)
    run(executor, Task("a", "prints", ("a line of the worker",)))
    outcome = run(executor, Task("b", "kill", ("last words",), slot=0))["b"]
    executor.close()
    captured = capfd.readouterr()
    assert "a line of the worker" not in captured.out + captured.err
    if kind != "ray":  # Ray keeps the output in its own files
        assert "last words" in outcome.failure.message
        assert "SIGKILL" in outcome.failure.message
        assert "a line of the worker" not in outcome.failure.message, "it was another call's"


@pytest.mark.parametrize("kind", PROCESSES)
@pytest.mark.parametrize("number, name", [(signal.SIGUSR1, "SIGUSR1"), (signal.SIGRTMIN + 1, "signal")])
def test_signals_with_and_without_names(make, kind, number, name):
    outcomes = run(make(kind, max_crashes=0), Task("a", "kill_by", (int(number),)), Task("b", "echo", (1,)))
    assert f"it was killed by {name}" in outcomes["a"].failure.message and outcomes["b"].value == 1


@pytest.mark.parametrize("kind", WORKERS)
def test_exiting_is_a_crash(make, kind):
    executor = make(kind, max_crashes=0)
    outcomes = run(executor, Task("a", "exits"), Task("b", "echo", (1,)))
    assert outcomes["a"].failure.kind == "crashed"
    assert outcomes["b"].value == 1


@pytest.mark.parametrize("kind", PROCESSES)
def test_children_of_workers_end_with_them(make, kind):
    executor = make(kind, num_workers=1, timeout=60.0, max_crashes=0)
    outcome = run(executor, Task("child", "start_child"))["child"]
    program = run(executor, Task("program", "start_program"))["program"].value
    assert alive(outcome.value) and alive(program)
    # The child holds the worker's connections open, so only its death itself can be seen.
    assert run(executor, Task("die", "fork_and_die"))["die"].failure.kind == "crashed"
    assert wait_until(lambda: not alive(outcome.value) and not alive(program))


@pytest.mark.parametrize("kind", PROCESSES)
def test_an_interrupt_closes_everything(make, kind):
    executor = make(kind)
    workers = pids(executor)
    main = threading.main_thread().ident

    def interrupt():
        wait_until(lambda: any(slot.entry is not None for slot in executor._slots))
        signal.pthread_kill(main, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    # Where a shell has started the tests in the background, interrupts are ignored.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            run(executor, Task("a", "hang"))
    finally:
        signal.signal(signal.SIGINT, handler)
    thread.join()
    assert wait_until(lambda: not any(alive(pid) for pid in workers))
    with pytest.raises(RuntimeError, match="closed"):
        run(executor, Task("b", "pid"))


def test_closing_ends_a_local_run():
    executor = LocalExecutor(Troubled)
    outcomes = executor.run([Task("a", "pid"), Task("b", "pid")])
    next(outcomes)
    executor.close()
    with pytest.raises(RuntimeError, match="closed"):
        next(outcomes)


def test_local_executors_refuse_what_they_cannot_do():
    with pytest.raises(ValueError, match="ProcessExecutor"):
        LocalExecutor(Troubled, timeout=1.0)
    with LocalExecutor(worker_objects.broken_factory) as executor:
        with pytest.raises(WorkerStartError, match="the database is not there"):
            run(executor, Task("a", "pid"))


def test_only_interrupts_and_exits_pass_through_local_executors():
    with LocalExecutor(Troubled) as executor, pytest.raises(SystemExit):
        run(executor, Task("a", "exits"))
    with pytest.raises(RuntimeError, match="closed"):
        run(executor, Task("b", "pid"))


@pytest.mark.parametrize("kind", ["local", "forkserver"])
def test_keys_are_unique(make, kind):
    executor = make(kind)
    with pytest.raises(ValueError, match="key 'a'"):
        executor.run([Task("a", "pid"), Task("a", "pid")])
    assert run(executor) == {}


def test_without_ray_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"pip install hf_qrl\[ray\]"):
        RayExecutor(Troubled, 1)


def test_importing_executors_does_not_import_ray():
    code = "import sys, hf_qrl.distributed.executors; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
