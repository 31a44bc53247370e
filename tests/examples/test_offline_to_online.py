# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""A run of a few steps, from the data to the table."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from hf_qrl.data.episodes import from_jsonl


EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("offline_to_online_example", EXAMPLES / "offline_to_online.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    sys.path.insert(0, str(EXAMPLES))  # as for a script
    spec.loader.exec_module(module)
    yield module
    sys.path.remove(str(EXAMPLES))
    del sys.modules[spec.name], sys.modules["maze"]


@pytest.fixture(scope="module")
def arguments(example, tmp_path_factory):
    return example.ScriptArguments(
        output_dir=tmp_path_factory.mktemp("online"),
        seeds=[0],
        steps=2,
        online_steps=4,
        collect_every=2,
        episodes_per_collect=2,
        online_rows=8,
        episodes=12,
        processes=1,
    )


def test_thirds(example, arguments):
    episodes = example.maze.make_episodes(arguments)
    thirds = example.thirds(episodes)
    assert [len(third) for third in thirds.values()] == [4, 4]
    assert thirds["one T"]["success"] == [False] * 4  # none leads to the goal
    all_data, *others = example.make_runs(arguments)
    assert all_data.budget == 0 and all_data.offline_steps == example.num_steps(episodes)
    assert [run.offline_steps + run.budget for run in others] == [all_data.offline_steps] * 2


def test_run(example, arguments, monkeypatch, capsys):
    class InThisProcess:
        def __init__(self, *args, **kwargs):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *exception):
            pass

        map = staticmethod(map)

    monkeypatch.setattr(example, "ProcessPoolExecutor", InThisProcess)
    results = example.main(arguments)
    assert list(results) == [
        "all data, seed 0",
        "a mixed third, seed 0",
        "a mixed third + online, seed 0",
        "one T, seed 0",
        "one T + online, seed 0",
    ]
    played = from_jsonl(arguments.output_dir / "one_T-seed_0-online" / "replay" / "episodes.jsonl")
    row = results["one T + online, seed 0"]
    assert row["online_steps"] == sum(map(len, played["turn_rewards"])) > 0
    assert row["online_steps"] <= results["all data, seed 0"]["offline_steps"] - row["offline_steps"]
    assert -500 < row["return"] < -6.8
    assert json.loads((arguments.output_dir / "results.json").read_text()) == results
    assert "online steps" in capsys.readouterr().out
