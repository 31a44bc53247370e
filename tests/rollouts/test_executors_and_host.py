# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""Environments in other processes, that die and come back; and what a worker holds."""

import random
from functools import partial

import pytest

from hf_qrl.distributed.executors import LocalExecutor, Outcome, ProcessExecutor, TaskFailure
from hf_qrl.environments import EpisodeSource, TextEnv, as_environment
from hf_qrl.rollouts import (
    EnvironmentHost,
    RandomPolicy,
    TooManyFailures,
    collect_episodes,
    evaluate_policy,
    host_factory,
)
from hf_qrl.rollouts.host import describe_environment
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
    with Forgetful(host_factory(Forgotten), [1]) as executor, pytest.raises(TooManyFailures) as error:
        collect_episodes(RandomPolicy(), Forgotten, 4, executor=executor, max_error_rate=0.9, **QUIET)
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
