# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""A `TextEnv` on its own: seeds, hashes and replay."""

import math
from decimal import Decimal

import numpy as np
import pytest
import torch

from hf_qrl.environments import (
    EnvironmentFailure,
    ReplayMismatch,
    TextEnv,
    episode_seed,
    observation_hash,
    policy_seed_sequence,
    replay,
)
from hf_qrl.environments.seeding import SPLITS, check_seed
from hf_qrl.environments.text_env import checked_reset, checked_step
from tests.environments.games_for_tests import TreasureHunt, hunt


class Scripted(TextEnv):
    """Returns what it is told to."""

    def __init__(self, reset=("start", {}), step=("next", 0.0, False, False, {})):
        self.returned = reset, step

    def reset(self, *, seed, options=None):
        return self.returned[0]

    def step(self, action):
        if isinstance(self.returned[1], BaseException):
            raise self.returned[1]
        return self.returned[1]


def play(seed):
    """Plays the example to its end with the best policy."""
    env, actions = TreasureHunt(), []
    messages, _ = checked_reset(env, seed)
    hashes, rewards = [observation_hash(messages)], []
    while True:
        actions.append(hunt(messages[-1]["content"]))
        step = checked_step(env, actions[-1])
        messages = step.messages
        hashes.append(observation_hash(messages))
        rewards.append(step.reward)
        if step.terminated:
            return actions, rewards, hashes


class TestReplay:
    @pytest.mark.parametrize("seed", range(5))
    def test_replays_any_beginning(self, seed):
        actions, rewards, hashes = play(seed)
        for turns in range(len(actions) + 1):
            env = TreasureHunt()
            played = replay(env, seed, actions[:turns], observation_hashes=hashes[: turns + 1])
            assert played.rewards == rewards[:turns] and played.observation_hashes == hashes[: turns + 1]
            assert played.terminated == (turns == len(actions)) and not played.truncated
            assert [m["content"] for m in played.messages if m["role"] == "assistant"] == actions[:turns]
            if turns < len(actions):
                assert observation_hash(checked_step(env, actions[turns]).messages) == hashes[turns + 1]

    def test_another_course_raises(self):
        actions, _, hashes = play(0)
        other = next(seed for seed in range(20) if play(seed)[2][0] != hashes[0])
        with pytest.raises(ReplayMismatch, match="observed something else than was recorded after 0 actions"):
            replay(TreasureHunt(), other, actions, observation_hashes=hashes)
        with pytest.raises(ReplayMismatch, match="after 1 actions"):
            replay(TreasureHunt(), 0, ["nonsense", *actions], observation_hashes=hashes)
        with pytest.raises(ReplayMismatch, match="ended before action"):
            replay(TreasureHunt(), 0, [*actions, "dig"])


def test_observation_hash():
    text = observation_hash("caf\u00e9\n")
    assert text == observation_hash([{"role": "user", "content": "caf\u00e9\n", "name": "x"}]) and len(text) == 64
    assert text != observation_hash("caf\u00e9") and text != observation_hash(
        [{"role": "tool", "content": "caf\u00e9\n"}]
    )
    assert observation_hash([]) != observation_hash("")


@pytest.mark.parametrize(
    "env, match",
    [
        (Scripted(step=("x", math.nan, False, False, {})), "returned the reward nan"),
        (Scripted(step=("x", 1e39, False, False, {})), "within the range of float32"),
        (Scripted(step=("x", 10**400, False, False, {})), "The reward of `Scripted.step` raised OverflowError"),
        (Scripted(step=("x", "1.5", False, False, {})), "the reward '1.5'. Rewards must be numbers"),
        (Scripted(step=("x", b"1", False, False, {})), "Rewards must be numbers"),
        (Scripted(step=("x", None, False, False, {})), "The reward of `Scripted.step` raised TypeError"),
        (Scripted(step=("x", 0.0, "False", False, {})), "`terminated` of `Scripted.step` must be True or False"),
        (Scripted(step=("x", 0.0, np.array([True, False]), False, {})), "`terminated` of `Scripted.step` must be"),
        (Scripted(step=("x", 0.0, False, None, {})), "`truncated` of `Scripted.step` must be True or False"),
        (Scripted(step=("x", 0.0, True, False, {"success": "yes"})), "`success` in .* must be True or False"),
        (Scripted(step=("x", 0.0, True, False, {"success": 0.5})), "`success` in .* must be True or False"),
        (Scripted(step=("x", 0.0, True, False, {"success": object()})), "`success` in .* must be True or False"),
        (Scripted(step=("\ud800", 0.0, False, False, {})), "The observation of `Scripted.step` holds what JSON"),
        (Scripted(step=([{"role": "tool", "content": "x", "n": {1}}], 0.0, False, False, {})), "holds what JSON"),
        (Scripted(step=([{"role": "assistant", "content": "x"}], 0.0, False, False, {})), "the role 'assistant'"),
        (Scripted(reset=("\ud800", {})), "The observation of `Scripted.reset` holds what JSON"),
        (Scripted(reset=([{"role": "user", "content": None}], {})), "the strings .role. and .content."),
        (Scripted(reset=([{"role": "user"}], {})), "the strings .role. and .content."),
        (
            Scripted(reset=([{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}], {})),
            "`Scripted.reset` has the role 'assistant'",
        ),
        (Scripted(step=("x", 0.0, False, {})), "must return .observation, reward, terminated, truncated, info dict."),
        (Scripted(step=(3, 0.0, False, False, {})), "An observation is a string or a list of messages, got a `int`"),
        (Scripted(step=SyntaxError("x")), "`Scripted.step` raised SyntaxError"),
        (Scripted(reset="start"), r"`Scripted.reset` must return the pair"),
        (Scripted(reset=(None, {})), "An observation is a string"),
    ],
)
def test_malformed_returns(env, match):
    with pytest.raises(EnvironmentFailure, match=match):
        replay(env, 0, ["a"])


@pytest.mark.parametrize(
    "reward", [1, True, np.float32(1), np.int64(1), np.array(1.0), torch.tensor(1.0), Decimal(1), 1.0]
)
def test_numbers_of_any_kind_are_rewards(reward):
    step = checked_step(Scripted(step=("x", reward, False, False, {})), "a")
    assert step.reward == 1.0 and type(step.reward) is float


@pytest.mark.parametrize("true", [True, np.True_, np.array(True), torch.tensor(True)])
def test_bools_of_any_kind_are_flags(true):
    step = checked_step(Scripted(step=("x", 0.0, true, np.False_, {"success": true})), "a")
    assert step.terminated is True and step.truncated is False and step.info == {"success": True}


@pytest.mark.parametrize("told, success", [(1, True), (0, False), (1.0, True), (None, None)])
def test_success_as_a_number(told, success):
    info = {"success": told, "other": [1]}
    step = checked_step(Scripted(step=("x", 0.0, True, False, info)), "a")
    assert step.info["success"] is success and info["success"] is told and step.info["other"] == [1]


def test_options_are_the_environments_own():
    class Taking(Scripted):
        def reset(self, *, seed, options=None):
            return f"level {options['levels'].pop()}", {}

    options = {"levels": [1, 2]}
    for _ in range(2):
        assert checked_reset(Taking(), 0, options)[0][0]["content"] == "level 2"
        assert replay(Taking(), 0, ["a"], options=options).messages[0]["content"] == "level 2"
    assert options == {"levels": [1, 2]}


def test_seeds_are_injective_and_disjoint():
    seeds = {(split, index): episode_seed(index, split) for split in SPLITS for index in (*range(5000), 2**30 - 1)}
    assert len(set(seeds.values())) == len(seeds)
    assert all(check_seed(seed) == seed for seed in seeds.values())
    quarters = {split: {seeds[key] >> 30 for key in seeds if key[0] == split} for split in SPLITS}
    assert [quarters[split] for split in SPLITS] == [{0}, {1}, {2}, {3}]
    assert len({episode_seed(index) % 10 for index in range(100)}) == 10
    assert [episode_seed(index) for index in (1, 2, 3)] == [episode_seed(index, "train") for index in (1, 2, 3)]


def test_policy_seeds():
    states = {
        tuple(policy_seed_sequence(run, i, split).generate_state(2))
        for run in (0, 1)
        for i in (0, 1)
        for split in SPLITS
    }
    assert len(states) == 16
    assert (policy_seed_sequence(1, 2).generate_state(2) == policy_seed_sequence(1, 2).generate_state(2)).all()


@pytest.mark.parametrize("seed", [-1, 2**32, 1.0, True, None, "1"])
def test_bad_seeds(seed):
    with pytest.raises(ValueError, match="0 <= seed < 2"):
        check_seed(seed)


def test_bad_episodes():
    with pytest.raises(ValueError, match="between 0 and 2"):
        episode_seed(2**30)
    with pytest.raises(ValueError, match="Unknown split 'tset'"):
        episode_seed(0, "tset")
