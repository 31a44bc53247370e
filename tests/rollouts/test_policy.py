# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
from collections import Counter

import numpy as np
import pytest

from hf_qrl.rollouts import Action, RandomPolicy, ScriptedPolicy


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
