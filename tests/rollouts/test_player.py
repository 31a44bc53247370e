# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""What ends a run at once, and what runs with the same executor share."""

import numpy as np
import pytest

from hf_qrl.distributed.executors import LocalExecutor
from hf_qrl.environments import as_environment
from hf_qrl.rollouts import Action, Policy, RandomPolicy, ScriptedPolicy, collect_episodes, host_factory
from hf_qrl.rollouts.host import describe_environment
from hf_qrl.rollouts.player import Episode, EpisodePlan, Player
from tests.environments.games_for_tests import TreasureHunt
from tests.rollouts.games import Counting, Endless


def plans_of(count):
    return [EpisodePlan(f"episode-{seed}", seed, seed, np.random.SeedSequence(seed)) for seed in range(count)]


def player_of(policy, executor, **kwargs):
    arguments = {"batch_size": 2, "max_turns": 3, "max_seq_len": None, "on_length": "truncate", **kwargs}
    return Player(policy, executor, **arguments)


class Returning(Policy):
    """Returns what a function makes of the conversations, from the given call on; replies before."""

    def __init__(self, function, calls=0):
        self.function, self.calls = function, calls

    def act(self, conversations, stop_strings, seeds, **context):
        self.calls -= 1
        return self.function(conversations) if self.calls < 0 else [Action("dig\n") for _ in conversations]


@pytest.mark.parametrize(
    "function, error",
    [
        (lambda conversations: None, TypeError),
        (lambda conversations: ["dig\n"] * len(conversations), TypeError),
        (lambda conversations: [Action(None)] * len(conversations), TypeError),
        (lambda conversations: [Action(5)] * len(conversations), TypeError),
        (lambda conversations: [Action("\ud800")] * len(conversations), ValueError),
        (lambda conversations: [Action("a", "done")] * len(conversations), ValueError),
        (lambda conversations: [Action("a")] * (len(conversations) + 1), ValueError),
        (lambda conversations: [Action("a", token_ids=[1])] * len(conversations), ValueError),
    ],
)
def test_a_policy_that_does_not_reply_ends_the_run(function, error, tmp_path):
    env = as_environment(TreasureHunt)
    arguments = {"batch_size": 2, "progress": False, "output_dir": tmp_path}
    # Not one in two may fail, but these are no failures of episodes.
    with pytest.raises(error, match="`Returning.act`"):
        collect_episodes(Returning(function, calls=2), env, 10, max_error_rate=1.0, **arguments)
    assert len(env) == 0
    episodes, report = collect_episodes(Returning(function, calls=100), env, 10, return_report=True, **arguments)
    assert report.n_resumed == 4 and len(episodes) == 10


def test_tokens_of_any_kind_are_stored():
    def reply(conversations):
        return [Action("go.", "eos", np.arange(2), np.array([-1.0, -0.5], dtype=np.float32), np.int64(2))] * len(
            conversations
        )

    (row,) = collect_episodes(Returning(reply), Endless, 1, max_turns=1, keep_tokens=True, progress=False)
    assert row["turn_token_ids"] == [[0, 1]] and row["turn_logprobs"] == [[-1.0, -0.5]]
    assert row["info"]["num_tokens"] == [2]


class Noting(LocalExecutor):
    """Notes the keys of the tasks."""

    def __init__(self, factory):
        super().__init__(factory)
        self.keys = []

    def _run(self, tasks):
        self.keys += [task.key for task in tasks]
        yield from super()._run(tasks)


def test_runs_share_no_task():
    with Noting(host_factory(Endless)) as executor:
        for _ in range(2):
            assert len(list(player_of(ScriptedPolicy(lambda messages: "go."), executor).play(plans_of(3)))) == 3
    assert len(executor.keys) == len(set(executor.keys)) > 0


@pytest.mark.parametrize("env", [TreasureHunt, Counting(), as_environment(TreasureHunt), lambda: TreasureHunt()])
def test_workers_that_hold_the_environment(env):
    with LocalExecutor(host_factory(env)) as executor:
        player = player_of(RandomPolicy(["dig\n"]), executor, environment=describe_environment(env))
        assert all(isinstance(result, Episode) for result in player.play(plans_of(2)))


@pytest.mark.parametrize(
    "factory, error, message",
    [
        (host_factory(Endless), ValueError, "Endless.*TreasureHunt"),
        (host_factory(lambda: TreasureHunt()), ValueError, "lambda.*TreasureHunt"),
        (TreasureHunt, TypeError, "host_factory"),
        (dict, TypeError, "host_factory"),
    ],
)
def test_workers_that_hold_something_else(factory, error, message):
    with LocalExecutor(factory) as executor, pytest.raises(error, match=message):
        list(player_of(RandomPolicy(), executor, environment=describe_environment(TreasureHunt)).play(plans_of(2)))
