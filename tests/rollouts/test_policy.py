# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
import json
import logging
from collections import Counter
from functools import partial

import numpy as np
import pytest
import torch

from hf_qrl.rollouts import Action, Policy, RandomPolicy, ScriptedPolicy
from hf_qrl.rollouts.naming import names_everything
from hf_qrl.rollouts.policy import checked_actions


def seeds_of(count):
    return [np.random.SeedSequence(number) for number in range(count)]


def test_random_replies_follow_from_the_seeds():
    policy = RandomPolicy(["a", "b"])
    replies = policy.act([[]] * 400, [None] * 400, seeds_of(400))
    assert replies == policy.act([[]] * 400, [None] * 400, seeds_of(400))
    assert replies[7:] == policy.act([[]] * 393, [None] * 393, seeds_of(400)[7:])
    counts = Counter(reply.text for reply in replies)
    assert set(counts) == {"a", "b"} and 150 < counts["a"] < 250
    assert replies[0].finish == "eos" and replies[0].token_ids is None


def test_random_replies_are_legal_ones_unless_others_are_given():
    context = {"legal_actions": [["left"], ["right"]]}
    assert [a.text for a in RandomPolicy().act([[]] * 2, [None] * 2, seeds_of(2), **context)] == ["left", "right"]
    assert RandomPolicy(["dig"]).act([[]], [None], seeds_of(1), legal_actions=[["left"]])[0].text == "dig"
    for context in ({}, {"legal_actions": [None]}, {"legal_actions": [[]]}):
        with pytest.raises(ValueError, match="legal_actions"):
            RandomPolicy().act([[]], [None], seeds_of(1), **context)
    with pytest.raises(ValueError, match="empty"):
        RandomPolicy([])


def test_scripted_replies_end_where_generated_ones_would():
    policy = ScriptedPolicy(lambda messages: messages[-1]["content"] + "\nmore")
    conversations = [[{"role": "user", "content": "go"}]] * 2
    assert policy.act(conversations, [["\n"], None], seeds_of(2)) == [Action("go\n", "stop:\n"), Action("go\nmore")]
    assert ScriptedPolicy(str, name="mine").identity()["id"] == "scripted:mine"


@pytest.mark.parametrize(
    "actions, error",
    [("abc", TypeError), (b"abc", TypeError), ([1, 2], TypeError), (["a", None], TypeError), (["\ud800"], ValueError)],
)
def test_random_replies_are_made_of_strings(actions, error):
    with pytest.raises(error, match="actions"):
        RandomPolicy(actions)


@pytest.mark.parametrize("function, name", [("text", None), (None, None), (str, 5)])
def test_scripts_are_functions_with_a_name(function, name):
    with pytest.raises(TypeError, match="must"):
        ScriptedPolicy(function, name)


@pytest.mark.parametrize("strings", [None, ["\n"]])
@pytest.mark.parametrize("text", [None, 5, 1.5, b"bytes", ["list"], {"a": 1}])
def test_scripted_replies_are_strings(text, strings):
    with pytest.raises(TypeError, match="`ScriptedPolicy` says strings, got a `" + type(text).__name__):
        ScriptedPolicy(lambda messages: text).act([[]], [strings], seeds_of(1))


@pytest.mark.parametrize("policy", [RandomPolicy(["go", "dig"]), ScriptedPolicy(lambda messages: "go")])
def test_a_warning_tells_once_that_replies_do_not_end(policy, caplog):
    with caplog.at_level(logging.WARNING):
        policy.act([[]] * 2, [None, [""]], seeds_of(2))
        assert not caplog.records
        for _ in range(2):
            policy.act([[]] * 2, [["\n"]] * 2, seeds_of(2))
        (record,) = caplog.records
        assert type(policy).__name__ in record.getMessage() and r"['\n']" in record.getMessage()
        caplog.clear()
        ScriptedPolicy(lambda messages: "go\n").act([[]], [["\n"]], seeds_of(1))
        assert not caplog.records


# What comes back from a policy


def test_what_policies_return_becomes_plain():
    actions = [
        Action("a", "stop:a", np.arange(2), torch.tensor([-1.0, -0.5]), np.int64(2), 3),
        Action("", "overflow", (1, np.int32(2)), (np.float32(-1), 0)),
        Action("\0é\U0001f600", "length"),
    ]
    checked = checked_actions(RandomPolicy(), (action for action in actions), 3)
    assert checked[0] == Action("a", "stop:a", [0, 1], [-1.0, -0.5], 2, 3)
    assert checked[1] == Action("", "overflow", [1, 2], [-1.0, 0.0])
    assert checked[2] == actions[2]
    for action in checked[:2]:
        assert {type(token) for token in action.token_ids} == {int} and type(action.num_tokens) is int
        assert {type(number) for number in action.logprobs} == {float}


TOKENS = {"token_ids": [1, 2], "logprobs": [-1.0, -1.0]}


@pytest.mark.parametrize(
    "replies, error, message",
    [
        (None, TypeError, "a list of `Action`s"),
        ("a", TypeError, "a list of `Action`s"),
        (Action("a"), TypeError, "a list of `Action`s"),
        ([], ValueError, "0 actions for 1"),
        ([Action("a")] * 2, ValueError, "2 actions for 1"),
        (["a"], TypeError, "such as `Action.text.`, got a `str`: 'a'"),
        ({"a": 1}, TypeError, "got a `str`"),
        *(([Action(text)], TypeError, "must be a string") for text in (None, 5, 1.5, b"a", ["a"], {"a": 1})),
        ([Action("\ud800x")], ValueError, "surrogate"),
        *(([Action("a", finish)], ValueError, "finish") for finish in (None, 5, "", "stop", "stop:", "done", ["eos"])),
        *(([Action("a", num_tokens=n)], TypeError, "num_tokens") for n in (None, 1.0, "1", True)),
        ([Action("a", num_prompt_tokens=None)], TypeError, "num_prompt_tokens"),
        ([Action("a", token_ids=[1])], ValueError, "only one of"),
        ([Action("a", logprobs=[-1.0])], ValueError, "only one of"),
        ([Action("a", token_ids=[1], logprobs=[-1.0] * 2)], ValueError, "1 `token_ids` and 2"),
        *(
            ([Action("a", **{**TOKENS, "token_ids": ids})], TypeError, "token_ids")
            for ids in ("12", [1.0, 2.0], [[1, 2]], ["1", "2"], np.ones(2), 5, [True, False])
        ),
        *(
            ([Action("a", **{**TOKENS, "logprobs": numbers})], TypeError, "logprobs")
            for numbers in ("12", [None, None], [float("nan"), 0.0], [-float("inf"), 0.0], {1: 2}, np.ones((2, 1)))
        ),
    ],
)
def test_what_is_no_reply_is_refused(replies, error, message):
    with pytest.raises(error, match=message) as raised:
        checked_actions(RandomPolicy(), replies, 1)
    assert "`RandomPolicy.act`" in str(raised.value)


# Identities


def reply(messages, what="a"):
    return what


class Silent(Policy):
    def act(self, conversations, stop_strings, seeds, **context):
        return [Action("") for _ in conversations]


class Loud(Silent):
    def __init__(self, volume):
        self.volume = volume


class Named(Loud):
    def identity(self):
        return {"id": "loud", "revision": None, "sampling": {"volume": self.volume}}


def test_identities_tell_policies_apart_or_that_they_cannot():
    assert RandomPolicy(["a"]).identity() != RandomPolicy(["b"]).identity() != RandomPolicy().identity()
    assert ScriptedPolicy(reply).identity() == {
        "id": f"scripted:{__name__}.reply",
        "revision": None,
        "sampling": None,
        "function": f"{__name__}.reply",
    }
    assert Silent().identity() == {"id": f"{__name__}.Silent", "revision": None, "sampling": None}
    telling = [
        RandomPolicy(),
        RandomPolicy(["a"]),
        ScriptedPolicy(reply),
        ScriptedPolicy(partial(reply, what="b")),
        ScriptedPolicy(partial(reply, what="c")),
        ScriptedPolicy(lambda messages: "a", name="mine"),
        Silent(),
        Named(1),
        Named(2),
    ]
    assert len({json.dumps(policy.identity()) for policy in telling}) == len(telling)
    assert all(names_everything(policy.identity()) for policy in telling)

    class Local(Silent):
        pass

    class Callable:
        def __call__(self, messages):
            return ""

    for policy in (
        ScriptedPolicy(lambda messages: "a"),
        ScriptedPolicy(partial(lambda messages, what: what, what="b")),
        ScriptedPolicy(Callable()),
        ScriptedPolicy(Callable().__call__),
        Local(),
        Loud(1),
    ):
        assert not names_everything(policy.identity())
        assert " at 0x" not in json.dumps(policy.identity())
