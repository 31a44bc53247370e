# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""
Two hundred episodes in an environment that raises, crashes, hangs and is killed, collected by a program that is killed
too: none is lost, none is invented, and those that end are what they would have been without any of it.
"""

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from hf_qrl.distributed.executors import ProcessExecutor
from tests.rollouts.faults.troubled_game import FAILURES, SEEDS, collect, fault_of
from tests.rollouts.worker_objects import alive, wait_until


ROOT = Path(__file__).parents[3]
HAS_RAY = importlib.util.find_spec("ray") is not None
PROGRAM = """
import pathlib, sys
from tests.rollouts.faults.troubled_game import collect

if __name__ == "__main__":
    collect(pathlib.Path(sys.argv[1]), sys.argv[2])
"""

WORKERS = [
    "forkserver",
    "spawn",
    pytest.param("ray", marks=pytest.mark.skipif(not HAS_RAY, reason="Ray is not installed: pip install hf_qrl[ray]")),
]

# What depends on the seed, the environment and the policy. The rest names the run and its folder.
COLUMNS = [
    "seed",
    "messages",
    "turn_rewards",
    "turn_finish",
    "turn_legal_actions",
    "terminated",
    "truncated",
    "truncation_reason",
    "return",
    "success",
    "info",
]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Rows by seed of the run in which nothing goes wrong."""
    dataset, report = collect(tmp_path_factory.mktemp("undisturbed"), None)
    assert report.n_ok == len(SEEDS)
    return by_seed(dataset)


@contextlib.contextmanager
def killer(folder: Path):
    """Kills the processes that the game asks to be killed, from outside."""
    over = threading.Event()
    victims = []

    def watch():
        while not over.wait(0.05):
            for request in (folder / "marks").glob("kill-*[0-9]"):
                victims.append(int(request.name.removeprefix("kill-")))
                request.unlink()
                with contextlib.suppress(ProcessLookupError):
                    os.kill(victims[-1], signal.SIGKILL)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield victims
    finally:
        over.set()
        thread.join()


def by_seed(dataset):
    rows = {row["seed"]: {column: row[column] for column in COLUMNS} for row in dataset}
    assert len(rows) == len(dataset), "no episode twice"
    return rows


def journal_rows(folder: Path):
    lines = (folder / "run" / "episodes.jsonl").read_bytes().split(b"\n")
    return [json.loads(line) for line in lines[1:-1]]


def check(folder, dataset, report, undisturbed):
    """Everything is accounted for, on disk too, and what ended is what it would have been."""
    assert report.n_requested == report.n_ok + report.n_failed == len(SEEDS)
    assert report.n_pending == 0
    kinds = {failure.seed: failure.kind for failure in report.failures}
    assert len(kinds) == report.n_failed
    doomed = {seed for seed in SEEDS if fault_of(seed) in FAILURES}
    assert {seed: kind for seed, kind in kinds.items() if seed not in doomed} == {}, "neighbours do not suffer"
    assert set(kinds) == doomed
    for seed, kind in kinds.items():
        assert kind in FAILURES[fault_of(seed)]
    rows = by_seed(dataset)
    assert rows == {seed: row for seed, row in undisturbed.items() if seed not in doomed}
    assert list(rows) == sorted(rows), "in the order of the seeds"
    written = [row["seed"] for row in journal_rows(folder)]
    assert sorted(written) == sorted(rows)
    logged = {json.loads(line)["seed"] for line in (folder / "run" / "failures.jsonl").read_text().splitlines()}
    assert logged == doomed


@pytest.mark.parametrize("kind", WORKERS)
def test_nothing_is_lost_and_nothing_invented(tmp_path, undisturbed, kind):
    with killer(tmp_path) as victims:
        dataset, report = collect(tmp_path, kind)
    check(tmp_path, dataset, report, undisturbed)
    assert len(victims) == sum(fault_of(seed) == "is killed from outside" for seed in SEEDS)


def workers_of(pid: int) -> list[int]:
    """Processes that a process has started, and those that these have."""
    found = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(ValueError, OSError):
            child = int(folder.name)
            if int((folder / "stat").read_text().rpartition(")")[2].split()[1]) == pid:
                found += [child, *workers_of(child)]
    return found


@pytest.mark.parametrize("kind", WORKERS)
def test_a_collector_that_is_killed_goes_on(tmp_path, undisturbed, kind):
    journal = tmp_path / "run" / "episodes.jsonl"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with killer(tmp_path):
        for enough in (40, 100):
            collector = subprocess.Popen([sys.executable, "-c", PROGRAM, str(tmp_path), kind], env=environment)
            wait_until(
                lambda collector=collector, enough=enough: (
                    collector.poll() is not None or (journal.exists() and journal.read_bytes().count(b"\n") > enough)
                ),
                300,
            )
            assert collector.poll() is None, "it is killed in the middle"
            workers = workers_of(collector.pid)
            collector.kill()
            collector.wait()
            assert len(workers) >= 3
            # Ray notices late that its driver is gone, on a busy machine.
            assert wait_until(lambda workers=workers: not any(alive(pid) for pid in workers), 180)
            before = journal_rows(tmp_path)
            # As if it had been in the middle of a row.
            with journal.open("ab") as file:
                file.write(b'{"episode_id": "half a r')
        dataset, report = collect(tmp_path, kind)
    assert report.n_resumed == len(before) >= 100
    assert journal_rows(tmp_path)[: len(before)] == before
    check(tmp_path, dataset, report, undisturbed)


def test_two_collectors_cannot_write_one_run(tmp_path):
    from hf_qrl.rollouts.journal import FailureLog

    with FailureLog(tmp_path / "run" / "failures.jsonl"), pytest.raises(RuntimeError, match="another collector"):
        collect(tmp_path, "forkserver")


def test_the_executor_is_left_open_for_the_next_run(tmp_path, undisturbed):
    from functools import partial

    from hf_qrl.rollouts.collect import collect_episodes
    from hf_qrl.rollouts.host import host_factory
    from hf_qrl.rollouts.policy import RandomPolicy
    from tests.rollouts.faults.troubled_game import TroubledGame

    game = partial(TroubledGame, str(tmp_path), True)
    seeds = [3, 11, 0, 1]
    with ProcessExecutor(host_factory(game), 2, timeout=30.0, start_method="forkserver") as executor:
        for _ in range(2):
            dataset = collect_episodes(
                RandomPolicy(), game, seeds=seeds, executor=executor, max_error_rate=0.5, progress=False
            )
            assert by_seed(dataset) == {seed: undisturbed[seed] for seed in (11, 0, 1)}
