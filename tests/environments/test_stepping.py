# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""`call_step` brings whatever an environment returns into one shape, or says what is wrong with it."""

import ast
import math

import numpy as np
import pytest
import torch

from hf_qrl.environments import EnvironmentFailure, EnvironmentInterface, EnvironmentReturn, call_step


LOG = [
    {"role": "user", "content": "q", "token_ids": torch.tensor([1])},
    {"role": "assistant", "content": "a", "generation_logprobs": torch.tensor([0.1])},
]
OBSERVATION = {"role": "environment", "content": "o"}


class Returns(EnvironmentInterface):
    """Returns what it is told to."""

    def __init__(self, function=None, **fields):
        self.function, self.fields = function, fields

    def step(self, logs, env_infos):
        self.seen = logs, env_infos
        if self.function:
            self.function(logs, env_infos)
        size = len(logs)
        defaults = {
            "observations": [OBSERVATION] * size,
            "metadata": list(env_infos),
            "next_stop_strings": None,
            "rewards": torch.zeros(size),
            "terminateds": torch.zeros(size),
            "answers": None,
        }
        return EnvironmentReturn(**{**defaults, **self.fields})

    def global_post_process_and_metrics(self, batch):
        return batch, {}


def step(size=2, function=None, **fields):
    return call_step(Returns(function, **fields), [LOG] * size, [{"old": i} for i in range(size)])


def test_the_environment_gets_text_only_and_copies():
    def spoil(logs, metadata):
        logs[0].append(OBSERVATION)
        logs[0][0]["content"] = "changed"
        metadata[0]["old"] = 7
        metadata[1] = None

    env, metadata, logs = Returns(spoil), [{"old": 0}, {"old": 1}], [LOG, LOG]
    call_step(env, logs, metadata)
    assert metadata == [{"old": 0}, {"old": 1}] and len(LOG) == 2 and LOG[0]["content"] == "q"
    assert env.seen[0][1] == [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


@pytest.mark.parametrize(
    "rewards",
    [
        torch.tensor([1.0, -2.0], requires_grad=True),
        torch.tensor([1, -2]),
        torch.tensor([1.0, -2.0], dtype=torch.bfloat16),
        [1.0, -2],
        np.array([1, -2]),
    ],
    ids=["float", "int", "bfloat16", "list", "array"],
)
@pytest.mark.parametrize(
    "terminateds", [torch.tensor([1.0, 0.0]), torch.tensor([True, False]), torch.tensor([1, 0]), [True, False]]
)
def test_dtypes(rewards, terminateds):
    result = step(rewards=rewards, terminateds=terminateds)
    assert result.rewards.dtype == torch.float64 and result.rewards.tolist() == [1.0, -2.0]
    assert result.terminateds.dtype == torch.bool and result.terminateds.tolist() == [True, False]
    assert not result.truncateds.any() and not result.rewards.requires_grad and result.reward_components == {}


def test_none_fields_become_lists():
    result = step()
    assert result.next_stop_strings == [None, None] == result.answers == result.failures
    assert result.observations == [[OBSERVATION], [OBSERVATION]]
    result = step(next_stop_strings=[["x"], None], answers=["1", None])
    assert result.next_stop_strings == [["x"], None] and result.answers == ["1", None]


def test_observations_of_several_messages_and_none():
    tools = [{"role": "tool", "name": "look", "content": "1"}, {"role": "tool", "content": "2"}]
    assert step(observations=[tools, []]).observations == [tools, []]


def test_metadata_none_keeps_the_old_one_while_the_episode_goes_on():
    assert step(metadata=[{"a": 1}, {"a": 2}], terminateds=torch.ones(2)).metadata == [{"a": 1}, {"a": 2}]
    env = Returns(metadata=[None, None], terminateds=torch.tensor([0.0, 1.0]))
    assert call_step(env, [LOG, LOG], [{"a": 1}, {"a": 2}]).metadata == [{"a": 1}, None]
    result = call_step(Returns(metadata=[None]), [LOG], [None])
    assert result.metadata == [None]


def test_truncation_by_the_environment():
    given = [{"_truncated": True, "a": 1}, {"_truncated": True}, {"_truncated": False}, {"b": 1}]
    env = Returns(metadata=given, terminateds=torch.tensor([False, True, False, False]))
    result = call_step(env, [LOG] * 4, [None] * 4)
    assert result.truncateds.tolist() == [True, False, False, False]
    assert result.terminateds.tolist() == [False, True, False, False]
    assert result.metadata == [{"a": 1}, {}, {}, {"b": 1}]
    assert given[0]["_truncated"]  # the environment's own


def test_rewards_with_components():
    rewards = {"format": torch.tensor([0.5, 0.25]), "reward/answer": torch.tensor([1, -1])}
    result = step(rewards=rewards)
    assert list(result.reward_components) == ["reward/format", "reward/answer"]
    assert result.reward_components["reward/answer"].dtype == torch.float64
    assert result.rewards.tolist() == [1.5, -0.75]


def test_the_reward_is_not_rounded():
    assert step(rewards=torch.tensor([0.1, 0.2], dtype=torch.float64)).rewards.tolist() == [0.1, 0.2]


@pytest.mark.parametrize(
    "fields, match",
    [
        ({"observations": [OBSERVATION]}, "`observations` must be a list with one entry for each of 2 rows"),
        ({"observations": None}, "`observations` must be a list"),
        ({"observations": ["text", "text"]}, "must be a message or a list, got a `str`: 'text'"),
        ({"observations": [{"role": "user"}] * 2}, 'strings "role" and "content"'),
        ({"observations": [{"role": "user", "content": None}] * 2}, 'strings "role" and "content"'),
        ({"observations": [{"role": "assistant", "content": "x"}] * 2}, "has the role 'assistant', allowed are"),
        ({"metadata": [None]}, "`metadata` must be a list"),
        ({"metadata": {"a": 1, "b": 2}}, "`metadata` must be a list"),
        ({"metadata": [{"_failure": "text"}, None]}, "must be an `EnvironmentFailure`"),
        ({"next_stop_strings": [["x"]]}, "`next_stop_strings` must be a list"),
        ({"next_stop_strings": ["x", "y"]}, "The stop strings of row 0 must be a list of strings"),
        ({"rewards": torch.zeros(3)}, r"`rewards` must have the shape \(2,\), one entry per row, got \(3,\)"),
        ({"rewards": torch.zeros(2, 1)}, r"got \(2, 1\)"),
        ({"rewards": torch.tensor(1.0)}, r"got \(\)"),
        ({"rewards": None}, "Reading what `step` returned raised"),
        ({"rewards": {}}, "`rewards` is an empty dict"),
        ({"rewards": {"a": torch.zeros(3)}}, r"`rewards\['a'\]` must have the shape"),
        ({"rewards": {"a": torch.zeros(2), "reward/a": torch.zeros(2)}}, "two components of the name 'reward/a'"),
        ({"rewards": torch.tensor([0.0, math.nan])}, "The reward of row 1 is nan"),
        ({"rewards": torch.tensor([math.inf, 0.0])}, "The reward of row 0 is inf"),
        ({"rewards": {"a": torch.tensor([math.inf, 0.0]), "b": torch.tensor([-math.inf, 0.0])}}, "row 0 is nan"),
        ({"terminateds": torch.zeros(1)}, "`terminateds` must have the shape"),
        ({"answers": ["x"]}, "`answers` must be a list"),
    ],
)
def test_malformed_returns_are_data_failures(fields, match):
    with pytest.raises(EnvironmentFailure, match=match) as caught:
        step(**fields)
    assert caught.value.failure_class == "DATA"


@pytest.mark.parametrize("returned", [None, (1, 2), [1, 2, 3, 4, 5, 6]], ids=["none", "pair", "list"])
def test_other_returns(returned):
    env = Returns()
    env.step = lambda logs, metadata: returned
    with pytest.raises(EnvironmentFailure, match="needed is an `EnvironmentReturn`"):
        call_step(env, [LOG], [None])


class Deadline(BaseException):
    pass


def _raise(error):
    def function(logs, metadata):
        raise error

    return function


@pytest.mark.parametrize(
    "function, cause, failure_class",
    [
        (lambda logs, metadata: ast.parse("x="), "SyntaxError", "DATA"),
        (_raise(Deadline("late")), "Deadline", "DATA"),
        (_raise(ConnectionError("gone")), "ConnectionError", "INFRA"),
        (_raise(AssertionError()), "AssertionError", "DATA"),
    ],
    ids=["syntax", "deadline", "connection", "assert"],
)
def test_exceptions_are_typed(function, cause, failure_class):
    with pytest.raises(EnvironmentFailure, match="The environment's `step` raised") as caught:
        step(function=function)
    assert caught.value.cause.endswith(cause) and caught.value.failure_class == failure_class


def test_interrupts_pass():
    for error in (KeyboardInterrupt(), SystemExit()):
        with pytest.raises(type(error)):
            step(function=_raise(error))


def test_failures_of_single_rows():
    failure = EnvironmentFailure("lost")
    rewards = torch.tensor([1.0, math.nan, 2.0])
    flags = torch.tensor([False, True, False])
    metadata = [{"a": 1}, {"_failure": failure, "_truncated": True}, {"a": 3}]
    env = Returns(metadata=metadata, rewards=rewards, terminateds=flags)
    result = call_step(env, [LOG] * 3, [None] * 3)
    assert result.failures == [None, failure, None]
    assert result.rewards[[0, 2]].tolist() == [1.0, 2.0] and result.rewards[1].isnan()
    assert not result.terminateds.any() and not result.truncateds.any()
    # A failed row cannot pass for one with a reward, even if the environment gave it one.
    env = Returns(metadata=[{"_failure": failure}, {}], rewards=torch.zeros(2))
    assert call_step(env, [LOG] * 2, [None] * 2).rewards[0].isnan()
    with pytest.raises(EnvironmentFailure) as caught:
        call_step(Returns(metadata=[{"_failure": failure}]), [LOG], [None])
    assert caught.value is failure


@pytest.mark.parametrize(
    "logs, metadata, match",
    [
        ([], [], "at least one conversation"),
        ([LOG], [], "got 1 conversations and 0 metadata"),
        ([[]], [None], "Conversation 0 does not end with an assistant message"),
        ([LOG, LOG[:1]], [None, None], "Conversation 1 does not end with an assistant message"),
    ],
)
def test_bad_calls(logs, metadata, match):
    with pytest.raises(ValueError, match=match):
        call_step(Returns(), logs, metadata)


@pytest.mark.parametrize("reward", [1e39, -1e39, math.nan, math.inf])
def test_rewards_beyond_what_training_can_hold(reward):
    with pytest.raises(EnvironmentFailure, match="within the range of float32"):
        step(rewards=torch.tensor([1.0, reward], dtype=torch.float64))
    with pytest.raises(EnvironmentFailure, match="within the range of float32"):
        step(rewards={"a": torch.tensor([3e38, 1.0]).double(), "b": torch.tensor([3e38, reward]).double()})
