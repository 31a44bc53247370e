# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""Journals: what was written is there after any end, and nothing else is."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hf_qrl.environments.failures import FailureClass
from hf_qrl.rollouts.journal import FailureLog, Journal, config_digest
from tests.rollouts.worker_objects import wait_until


ROOT = Path(__file__).parents[2]
CONFIG = {"env": "game", "max_turns": 5, "options": {"sizes": [1, 2]}}
DIGEST = config_digest(CONFIG)


def row(name: str, **values):
    return {"episode_id": name, "return": 1.5, **values}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "new" / "episodes.jsonl"


def write(path, *names):
    with Journal(path, DIGEST, CONFIG) as journal:
        for name in names:
            journal.append(row(name))


def names(path):
    with Journal(path, DIGEST, CONFIG) as journal:
        return list(journal.completed())


def test_rows_come_back_as_they_were_and_in_order(path):
    rows = [
        row(
            "b", text='quotes " and \n lines', number=0.1 + 0.2, none=None, flag=True, big=2**63, nested={"a": [1, []]}
        ),
        row("a", text="日本語 \ud800 lone half"),
    ]
    with Journal(path, DIGEST, CONFIG) as journal:
        for each in rows:
            journal.append(each)
            assert journal.completed()[each["episode_id"]] == each
        assert len(journal) == 2
        assert "a" in journal and "c" not in journal
    with Journal(path, DIGEST, CONFIG) as journal:
        assert list(journal.completed().values()) == rows
        assert len(journal) == 2
        journal.append(row("c"))
    assert names(path) == ["b", "a", "c"]
    assert [len(json.loads(line)) > 0 for line in path.read_text().splitlines()] == [True] * 4


def test_a_row_is_on_disk_when_append_returns(path, monkeypatch):
    synced = []
    real = os.fsync

    def fsync(fd):
        synced.append(os.fstat(fd).st_size)
        real(fd)

    with Journal(path, DIGEST) as journal:
        monkeypatch.setattr(os, "fsync", fsync)
        journal.append(row("a"))
        assert synced == [path.stat().st_size]
        assert path.read_bytes().endswith(b"}\n")


@pytest.mark.parametrize("keep", range(0, 60, 7))
def test_a_torn_last_line_is_dropped_and_cut_off(path, keep, caplog):
    write(path, "a", "b")
    whole = path.read_bytes()
    torn = json.dumps(row("c" * 60)).encode()[:keep]
    path.write_bytes(whole + torn)
    with Journal(path, DIGEST, CONFIG) as journal:
        assert list(journal.completed()) == ["a", "b"]
        assert path.read_bytes() == whole
        journal.append(row("c"))
    assert names(path) == ["a", "b", "c"]
    assert ("torn" in caplog.text) == (keep > 0)


def test_a_last_line_of_garbage_is_torn_too(path):
    write(path, "a")
    whole = path.read_bytes()
    # What some file systems leave after a power failure.
    path.write_bytes(whole + b"\0" * 40 + b"\n")
    assert names(path) == ["a"]
    assert path.read_bytes() == whole


def test_a_torn_first_line_begins_the_journal_anew(path):
    write(path)
    header = path.read_bytes()
    for keep in (0, 1, 8, 30, len(header) - 1):
        path.write_bytes(header[:keep])
        assert names(path) == []
        assert path.read_bytes() == header


def test_a_damaged_line_in_the_middle_is_an_error(path):
    write(path, "a", "b")
    lines = path.read_bytes().splitlines(keepends=True)
    damaged = lines[0] + b'{"episode_id": "a", "ret\n' + lines[2]
    path.write_bytes(damaged)
    with pytest.raises(ValueError, match="Line 2 of .* is not a JSON object"):
        names(path)
    assert path.read_bytes() == damaged, "nothing was changed"


@pytest.mark.parametrize(
    "content", [b"my notes", b"my notes\n", b'{"episode_id": "a"}\n', b'{"journal": 99, "digest": ""}\n']
)
def test_another_file_is_refused_and_left_as_it_is(tmp_path, content):
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="not a `Journal`|does not begin as a journal"):
        Journal(path, DIGEST)
    assert path.read_bytes() == content


def test_a_failure_log_is_not_written_into_another_file(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"my notes")
    with pytest.raises(ValueError, match="not a `FailureLog`"):
        FailureLog(path)
    assert path.read_bytes() == b"my notes"


def test_another_configuration_is_refused_and_named(path):
    write(path, "a")
    before = path.read_bytes()
    other = {**CONFIG, "max_turns": 6, "split": "test"}
    with pytest.raises(
        ValueError, match='max_turns: 5 in the file, 6 now; split: nothing in the file, "test" now'
    ) as error:
        Journal(path, config_digest(other), other)
    assert "sizes" not in str(error.value), "only what differs"
    with pytest.raises(ValueError, match=DIGEST):
        Journal(path, "0" * 64)
    assert path.read_bytes() == before
    assert names(path) == ["a"], "the file was not kept locked"


def test_an_episode_is_written_once(path):
    with Journal(path, DIGEST, CONFIG) as journal:
        journal.append(row("a"))
        with pytest.raises(ValueError, match="'a' is in .* already"):
            journal.append(row("a"))
    with Journal(path, DIGEST, CONFIG) as journal:
        with pytest.raises(ValueError, match="already"):
            journal.append(row("a", other=1))
    assert names(path) == ["a"]
    with path.open("ab") as file:
        file.write(json.dumps(row("a")).encode() + b"\n")
    with pytest.raises(ValueError, match="already"):
        names(path)


@pytest.mark.parametrize(
    ("wrong", "error", "where"),
    [
        ({"rewards": [1.0, math.nan]}, ValueError, r"row\['rewards'\]\[1\]` is nan"),
        ({"info": {"score": -math.inf}}, ValueError, r"row\['info'\]\['score'\]` is -inf"),
        ({"x": np.float32(1)}, TypeError, r"row\['x'\]` is a `float32`"),
        ({"x": (1, 2)}, TypeError, "`tuple`"),
        ({"x": {1: 2}}, TypeError, "Keys must be strings"),
    ],
)
def test_what_json_would_change_is_refused(path, wrong, error, where):
    with Journal(path, DIGEST, CONFIG) as journal:
        before = path.read_bytes()
        with pytest.raises(error, match=where):
            journal.append(row("a", **wrong))
        assert path.read_bytes() == before
        journal.append(row("a"))


@pytest.mark.parametrize("name", [None, 3])
def test_rows_need_a_name(path, name):
    with Journal(path, DIGEST, CONFIG) as journal, pytest.raises(ValueError, match="episode_id"):
        journal.append({"episode_id": name})


def test_a_full_disk_leaves_no_half_line(path, monkeypatch):
    real = os.write
    with Journal(path, DIGEST, CONFIG) as journal:
        journal.append(row("a"))

        def full(fd, data):
            if len(data) < 10:
                raise OSError(28, "No space left on device")
            return real(fd, data[: len(data) // 2])

        monkeypatch.setattr(os, "write", full)
        with pytest.raises(OSError, match="No space"):
            journal.append(row("b"))
        monkeypatch.setattr(os, "write", real)
        assert "b" not in journal
        journal.append(row("b"))
    assert names(path) == ["a", "b"]


def test_two_writers_are_refused_and_the_lock_ends_with_its_process(path):
    with Journal(path, DIGEST, CONFIG) as journal:
        with pytest.raises(RuntimeError, match="another collector"):
            Journal(path, DIGEST, CONFIG)
        journal.append(row("a"))
    code = (
        "import sys, time\n"
        "from hf_qrl.rollouts.journal import Journal\n"
        "journal = Journal(sys.argv[1], sys.argv[2])\n"
        "journal.append({'episode_id': 'from there'})\n"
        "time.sleep(3600)\n"
    )
    other = subprocess.Popen([sys.executable, "-c", code, str(path), DIGEST], cwd=ROOT)
    try:
        assert wait_until(lambda: b"from there" in path.read_bytes(), 120)
        with pytest.raises(RuntimeError, match="another collector"):
            names(path)
    finally:
        other.kill()
        other.wait()
    assert names(path) == ["a", "from there"]


def test_closed_journals_refuse_rows(path):
    journal = Journal(path, DIGEST, CONFIG)
    journal.close()
    journal.close()
    with pytest.raises(RuntimeError, match="closed"):
        journal.append(row("a"))
    assert names(path) == []


def test_failures_are_kept_with_all_that_is_known(tmp_path):
    path = tmp_path / "failures.jsonl"
    failure = {"episode_id": "a", "kind": "error", "attempts": 1, "seed": 3, "message": "broken"}
    for _ in range(2):
        with FailureLog(path) as log:
            log.append(**failure, failure_class=FailureClass.DATA, traceback_text="Traceback ...")
            with pytest.raises(RuntimeError, match="another collector"):
                FailureLog(path)
    with path.open("ab") as file:
        file.write(b'{"episode')
    with FailureLog(path) as log:
        assert log.rows() == [{**failure, "class": "DATA", "traceback": "Traceback ..."}] * 2


def test_the_digest_is_of_the_values_alone():
    assert config_digest({"a": 1, "b": {"c": 2, "d": 3}}) == config_digest({"b": {"d": 3, "c": 2}, "a": 1})
    digests = [config_digest({"a": value}) for value in (1, 2, "1", 1.0, None, [1], {"b": 1}, True)]
    assert len(set(digests)) == len(digests)
    code = "from hf_qrl.rollouts.journal import config_digest; print(config_digest({'a': {'b': ['x', 1.5]}}))"
    there = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert there.split()[-1] == config_digest({"a": {"b": ["x", 1.5]}})
    with pytest.raises(ValueError, match=r"config\['a'\]` is nan"):
        config_digest({"a": math.nan})
    with pytest.raises(TypeError, match="`set`"):
        config_digest({"a": {1}})


def test_keeping_the_first_rows(tmp_path):
    with Journal(tmp_path / "a.jsonl", "digest") as journal:
        for name in "abc":
            journal.append({"episode_id": name})
        with pytest.raises(ValueError, match="has 3 episodes, and 4 were to be kept"):
            journal.keep(4)
        journal.keep(1)
        assert list(journal.completed()) == ["a"] and len(journal) == 1 and "b" not in journal
        journal.append({"episode_id": "b"})
    with Journal(tmp_path / "a.jsonl", "digest") as journal:
        assert list(journal.completed()) == ["a", "b"]
        journal.keep(0)
        assert len(journal) == 0
