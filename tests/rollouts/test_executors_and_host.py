# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""Environments in other processes, that die and come back; and what a worker holds."""

import json
import math
import random
import subprocess
import sys
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset

from hf_qrl.distributed.executors import LocalExecutor, Outcome, ProcessExecutor, TaskFailure
from hf_qrl.environments import EnvironmentFailure, EpisodeSource, TextEnv, as_environment
from hf_qrl.environments.adapters import from_reward_function, from_trl_environment, with_private_random
from hf_qrl.rollouts import (
    EnvironmentHost,
    RandomPolicy,
    TooManyFailures,
    collect_episodes,
    evaluate_policy,
    host_factory,
)
from hf_qrl.rollouts.host import describe_environment
from hf_qrl.rollouts.naming import names_everything, same_description
from tests.environments.games_for_tests import TreasureHunt
from tests.environments.nemo_style import Maths
from tests.rollouts.games import Counting, Crashing, Endless


QUIET = {"progress": False}


class Forgetful(LocalExecutor):
    """Loses its worker, and every episode in it, before the tasks of the given runs."""

    def __init__(self, factory, runs):
        super().__init__(factory)
        self.runs_to_lose, self.count, self.restored = set(runs), 0, 0

    def _run(self, tasks):
        self.restored += sum(task.method == "restore" for task in tasks)
        if self.count in self.runs_to_lose:
            self._started = False
        self.count += 1
        yield from super()._run(tasks)


@pytest.mark.parametrize("runs", [[3], [1, 2, 4, 7], list(range(2, 200, 25))])
def test_lost_episodes_are_played_again(runs):
    expected = collect_episodes(RandomPolicy(), TreasureHunt, 20, batch_size=5, **QUIET)
    with Forgetful(host_factory(TreasureHunt), runs) as executor:
        episodes = collect_episodes(RandomPolicy(), TreasureHunt, 20, batch_size=5, executor=executor, **QUIET)
    assert executor.restored > 0
    assert episodes.to_list() == expected.to_list()


class Forgotten(TreasureHunt):
    """What it shows depends on more than the seed."""

    def reset(self, *, seed, options=None):
        super().reset(seed=seed)
        return f"{self._look()} {random.random()}", {}


def test_an_episode_that_takes_another_course_is_a_failure():
    with Forgetful(host_factory(Forgotten), [2]) as executor, pytest.raises(TooManyFailures) as error:
        collect_episodes(RandomPolicy(), Forgotten, 4, executor=executor, **QUIET)
    assert {failure.kind for failure in error.value.report.failures} == {"error:replay_mismatch"}


class Hanging(LocalExecutor):
    """Reports that each step took too long."""

    steps = 0

    def _run(self, tasks):
        for task in tasks:
            if task.method == "step":
                self.steps += 1
                yield Outcome(task.key, 0, failure=TaskFailure("timeout", None, "too slow", "", 1))
            else:
                yield from super()._run([task])


@pytest.mark.parametrize("env, steps", [(TreasureHunt, 2), (Counting, 1)])
def test_what_hangs_is_tried_once_more_if_the_executor_could_not(env, steps):
    with Hanging(host_factory(env)) as executor, pytest.raises(TooManyFailures) as error:
        collect_episodes(RandomPolicy(["dig\n"]), env, 1, executor=executor, **QUIET)
    (failure,) = error.value.report.failures
    assert (failure.kind, failure.failure_class, failure.attempts) == ("timeout", "INFRA", steps)
    assert executor.steps == steps


class Scripted(LocalExecutor):
    """Reports that its first steps failed, as told."""

    def __init__(self, factory, kinds):
        super().__init__(factory)
        self.kinds = list(kinds)

    def _run(self, tasks):
        for task in tasks:
            if task.method == "step" and self.kinds:
                failure = TaskFailure(self.kinds.pop(0), None, "told so", "", 1)
                yield Outcome(task.key, 0, failure=failure)
            else:
                yield from super()._run([task])


@pytest.mark.parametrize(
    ("kinds", "end"),
    [
        (["lost"], "ok"),
        (["timeout"], "ok"),
        (["lost", "lost"], "ok"),
        # Lost with another's episode, it has not hung yet.
        (["lost", "timeout"], "ok"),
        (["timeout", "lost"], "ok"),
        (["timeout", "timeout"], "timeout"),
        (["lost", "timeout", "timeout"], "timeout"),
        (["timeout", "lost", "timeout"], "timeout"),
        (["lost", "lost", "lost"], "crashed"),
    ],
)
def test_an_episode_is_given_up_for_what_it_did_itself(kinds, end):
    with Scripted(host_factory(TreasureHunt), kinds) as executor:
        dataset, report = collect_episodes(
            RandomPolicy(), TreasureHunt, 1, executor=executor, max_error_rate=1.0, return_report=True, **QUIET
        )
    assert not executor.kinds
    if end == "ok":
        expected = collect_episodes(RandomPolicy(), TreasureHunt, 1, **QUIET)
        assert dataset.to_list() == expected.to_list()
    else:
        (failure,) = report.failures
        assert (failure.kind, failure.attempts) == (end, len(kinds))


@pytest.mark.parametrize("always", [(), pytest.param((3,), marks=pytest.mark.slow)])
def test_processes_die_and_no_neighbour_is_lost(always, tmp_path):
    env = partial(Crashing, str(tmp_path / "marker"), always)
    expected = collect_episodes(RandomPolicy(), TreasureHunt, seeds=range(8), **QUIET)
    long = [seed for seed, rewards in zip(expected["seed"], expected["turn_rewards"], strict=True) if len(rewards) > 1]
    assert {3, 5} <= set(long)
    with ProcessExecutor(host_factory(env), num_workers=2, start_method="forkserver") as executor:
        episodes, report = collect_episodes(
            RandomPolicy(), env, seeds=range(8), executor=executor, max_error_rate=0.2, return_report=True, **QUIET
        )
        assert executor.workers_lost >= 1 + 3 * len(always)
    assert [(failure.seed, failure.kind) for failure in report.failures] == [(seed, "crashed") for seed in always]
    assert episodes["seed"] == [seed for seed in range(8) if seed not in always]
    assert episodes["messages"] == expected.filter(lambda row: row["seed"] not in always)["messages"]


def test_a_function_makes_the_executor(hunter):
    def forgetful(factory):
        return Forgetful(factory, [2])

    result = evaluate_policy(hunter, TreasureHunt, 6, executor=forgetful)
    assert result.n_ok == 6 and result.success_rate == 1.0


# The host


class Closing(TextEnv):
    made = closed = 0

    def __init__(self):
        type(self).made += 1

    def reset(self, *, seed, options=None):
        return "", {}

    def step(self, action):
        return "", 0.0, True, False, {}

    def close(self):
        type(self).closed += 1


def test_everything_that_is_made_is_closed():
    Closing.made = Closing.closed = 0
    collect_episodes(RandomPolicy(["x"]), lambda: Closing(), 5, batch_size=2, **QUIET)
    assert Closing.made == Closing.closed == 5
    EnvironmentHost(lambda: Closing()).close()
    assert Closing.made == Closing.closed == 6


def test_kinds_of_environments():
    assert EnvironmentHost(TreasureHunt).stateful
    assert EnvironmentHost(partial(TreasureHunt, rooms=3)).stateful
    assert EnvironmentHost(as_environment(TreasureHunt)).stateful
    assert not EnvironmentHost(Counting).stateful
    assert not EnvironmentHost(Counting()).stateful
    source = EpisodeSource([{"messages": [{"role": "user", "content": "1+1?"}], "metadata": {"ground_truth": "2"}}])
    start = EnvironmentHost(Maths, source).reset(0, 5)
    assert start.messages[0]["content"] == "1+1?" and start.metadata == {"ground_truth": "2"} and not start.stateful
    with pytest.raises(TypeError, match="from_gymnasium"):
        EnvironmentHost(3)
    with pytest.raises(TypeError, match="made a `dict`"):
        EnvironmentHost(dict)
    with pytest.raises(TypeError, match="nothing to restore"):
        EnvironmentHost(Counting).restore(0, [], [])


def test_names_of_environments():
    name = f"{Endless.__module__}.Endless"
    assert describe_environment(Endless) == (name, None)
    assert describe_environment(as_environment(Endless)) == (name, None)
    name, kwargs = describe_environment(partial(TreasureHunt, 3, max_moves=5))
    assert name.endswith("TreasureHunt") and kwargs == {"max_moves": 5, "args": [3]}
    assert describe_environment(Counting())[0].endswith("games.Counting")


def test_an_instance_is_no_class():
    with pytest.raises(TypeError, match="`TreasureHunt`: pass the class, not an instance"):
        EnvironmentHost(TreasureHunt())


class Unmakable(TreasureHunt):
    def __init__(self, error):
        raise error


@pytest.mark.parametrize(
    "error, failure_class, attempts", [(ValueError("no map"), "DATA", 1), (ConnectionError("no map"), "INFRA", 3)]
)
def test_factories_fail_as_classes_do(error, failure_class, attempts):
    class Raising(TreasureHunt):
        def __init__(self):
            raise error

    def function():
        raise error

    for env in (Raising, lambda: Raising(), function, partial(Unmakable, error)):
        with pytest.raises(TooManyFailures, match="no map") as raised:
            collect_episodes(RandomPolicy(), env, 2, **QUIET)
        failure = raised.value.report.failures[0]
        assert (failure.kind, failure.failure_class, failure.attempts) == ("error", failure_class, attempts)


@pytest.mark.parametrize("make", [TreasureHunt, Counting])
def test_a_factory_that_fails_for_a_moment_is_called_again(make):
    errors = [ConnectionError("busy")] * 2

    def factory():
        if errors:
            raise errors.pop()
        return make()

    host = EnvironmentHost(factory)
    with pytest.raises(EnvironmentFailure, match="busy"):
        host.reset(0)
    assert host.reset(0).stateful == host.stateful == (make is TreasureHunt)
    host.close()


def test_a_host_tells_what_it_holds():
    env = partial(TreasureHunt, rooms=3)
    for given in (env, as_environment(env)):
        assert host_factory(given)().description() == describe_environment(env)


# Names of environments


def score(prompt, completion):
    return 1.0


class Rooms(StrEnum):
    FEW = "few"


@dataclass
class Settings:
    rooms: int
    parser: object = score


class Shop:
    def reset(self, **row):
        return "hi"

    def get_reward(self):
        return 1.0

    @classmethod
    def parse(cls, text):
        return []


def rows_of(text):
    return Dataset.from_dict({"prompt": [text] * 3})


NAMED = {
    "class": lambda: TreasureHunt,
    "arguments": lambda: partial(TreasureHunt, rooms=3),
    "other arguments": lambda: partial(TreasureHunt, rooms=4),
    "reward function": lambda: from_reward_function(score, ["a"]),
    "other prompts": lambda: from_reward_function(score, ["b"]),
    "dataset": lambda: from_reward_function(score, rows_of("a")),
    "other dataset": lambda: from_reward_function(score, rows_of("b")),
    "partial": lambda: from_reward_function(partial(score, "a"), ["a"]),
    "other partial": lambda: from_reward_function(partial(score, "b"), ["a"]),
    "trl": lambda: from_trl_environment(Shop),
    "parser": lambda: from_trl_environment(Shop, tool_parser=Shop.parse),
    "private": lambda: with_private_random(TreasureHunt),
    "values": lambda: partial(TreasureHunt, {"a": {1, "b", None}, (1, 2): Path("x")}, np.arange(2), torch.ones(1)),
    "settings": lambda: partial(TreasureHunt, Settings(3), Rooms.FEW, len, math.sqrt, 2**70, float("nan"), b"x"),
    "other settings": lambda: partial(TreasureHunt, Settings(4), Rooms.FEW, len, math.sqrt, 2**70, float("nan"), b"x"),
}
UNNAMED = {
    "lambda": lambda: lambda: TreasureHunt(),
    "environment": lambda: Counting(),
    "made of a lambda": lambda: as_environment(lambda: TreasureHunt()),
    "lambda as a reward": lambda: from_reward_function(lambda prompt, completion: 1.0, ["a"]),
    "object": lambda: partial(TreasureHunt, rooms=[{"a": object()}]),
    "method": lambda: from_trl_environment(Shop().reset),
    "type": lambda: type("Made", (TreasureHunt,), {}),
    "partial of a lambda": lambda: partial(lambda rooms: TreasureHunt(), rooms=3),
    "settings": lambda: partial(TreasureHunt, Settings(3, object())),
}


def descriptions():
    makers = {f"named {name}": make for name, make in NAMED.items()} | UNNAMED
    return {name: describe_environment(make()) for name, make in makers.items()}


def test_names_are_the_same_in_every_process():
    found = {name: json.dumps(value) for name, value in descriptions().items()}
    code = f"import json; from {__name__} import descriptions; print(json.dumps(descriptions()))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert {name: json.dumps(value) for name, value in json.loads(out).items()} == found
    assert not any("0x" in text for text in found.values())
    named = [text for name, text in found.items() if name.startswith("named")]
    assert len(set(named)) == len(named)


@pytest.mark.parametrize("make", NAMED.values(), ids=NAMED)
def test_what_has_a_name(make):
    assert names_everything(*describe_environment(make()))


@pytest.mark.parametrize("make", UNNAMED.values(), ids=UNNAMED)
def test_what_has_no_name(make):
    assert not names_everything(*describe_environment(make()))


def test_marks_and_spawned_scripts_make_no_difference(monkeypatch):
    # A process to which a definition was sent cannot look it up.
    here = describe_environment(partial(TreasureHunt, score))
    monkeypatch.setattr(score, "__module__", "__mp_main__")
    there = describe_environment(partial(TreasureHunt, score))
    assert there[1] == {"args": [{"name": "__main__.score", "unnamed": True}]}
    assert same_description([here[0], {"args": ["__main__.score"]}], there)
    assert not same_description(here, there)
