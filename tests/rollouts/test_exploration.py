# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
import numpy as np
import pytest

from hf_qrl.environments.games import GuessNumberEnv
from hf_qrl.rollouts import EpsilonGreedyPolicy, Policy, RandomPolicy, ScriptedPolicy, collect_episodes


LEGAL = ["a", "b", "c", "d"]


def seeds_of(count):
    return [np.random.SeedSequence(7, spawn_key=(number,)) for number in range(count)]


def act(epsilon, count=4000, first=0):
    policy = EpsilonGreedyPolicy(ScriptedPolicy(lambda messages: "stay", name="stay"), epsilon)
    seeds = seeds_of(count)[first:]
    actions = policy.act([[]] * len(seeds), [None] * len(seeds), seeds, legal_actions=[LEGAL] * len(seeds))
    return [action.text for action in actions]


@pytest.mark.parametrize("epsilon", [0.1, 0.5])
def test_share_of_random_actions(epsilon):
    texts = act(epsilon)
    # Three standard deviations.
    assert sum(text != "stay" for text in texts) == pytest.approx(4000 * epsilon, abs=3 * np.sqrt(1000))
    counts = [texts.count(action) for action in LEGAL]
    expected = 4000 * epsilon / 4
    assert counts == pytest.approx([expected] * 4, abs=3.5 * np.sqrt(expected))


def test_extremes():
    assert set(act(0.0, 200)) == {"stay"}
    assert set(act(1.0, 200)) == set(LEGAL)


def test_actions_follow_from_the_seeds():
    assert act(0.5, 300) == act(0.5, 300)
    assert act(0.5, 300)[100:] == act(0.5, 300, first=100)


def test_the_other_policy_sees_its_own_conversations_only():
    class Noting(Policy):
        def act(self, conversations, stop_strings, seeds, **context):
            self.seen = conversations, stop_strings, seeds, context
            return ScriptedPolicy(lambda messages: messages[0]["content"]).act(conversations, stop_strings, seeds)

    inner, seeds = Noting(), seeds_of(20)
    conversations = [[{"role": "user", "content": str(i)}] for i in range(20)]
    actions = EpsilonGreedyPolicy(inner, 0.5).act(
        conversations, [[str(i)] for i in range(20)], seeds, legal_actions=[LEGAL] * 20, max_seq_len=9
    )
    kept = [i for i, action in enumerate(actions) if action.text not in LEGAL]
    assert 0 < len(kept) < 20
    assert inner.seen[0] == [conversations[i] for i in kept] and inner.seen[1] == [[str(i)] for i in kept]
    assert inner.seen[2] == [seeds[i] for i in kept]
    assert inner.seen[3] == {"legal_actions": [LEGAL] * len(kept), "max_seq_len": 9}
    assert [actions[i].text for i in kept] == [str(i) for i in kept]


def test_it_is_named_by_what_it_does():
    policy = EpsilonGreedyPolicy(ScriptedPolicy(lambda messages: "stay", name="stay"), 0.25)
    sampling = policy.identity()["sampling"]
    assert sampling["epsilon"] == 0.25 and sampling["policy"]["id"] == "scripted:stay"


def test_episodes():
    policy = EpsilonGreedyPolicy(RandomPolicy(["1\n"]), 0.0)
    episodes = collect_episodes(policy, GuessNumberEnv, 3, max_turns=2, progress=False)
    assert len(episodes) == 3 and episodes[0]["policy"]["id"] == "epsilon-greedy"


def test_errors():
    for epsilon in (-0.1, 1.5, float("nan")):
        with pytest.raises(ValueError, match="`epsilon` is a probability"):
            EpsilonGreedyPolicy(RandomPolicy(), epsilon)
    with pytest.raises(TypeError, match="must be a `Policy`"):
        EpsilonGreedyPolicy(None, 0.1)
    policy = EpsilonGreedyPolicy(ScriptedPolicy(lambda messages: "stay"), 1.0)
    with pytest.raises(ValueError, match="names no legal actions"):
        policy.act([[]], [None], seeds_of(1), legal_actions=[None])
