# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""What PPO keeps of played episodes."""

import pytest
import torch

from hf_qrl.rollouts import ModelPolicy, RandomPolicy, collect_episodes
from hf_qrl.rollouts.store import RolloutStore
from tests.environments.games_for_tests import TreasureHunt
from tests.rollouts.games import Endless


def episode(name, turns, rewards, truncated=False):
    return {
        "episode_id": name,
        "turn_prompt_ids": [[7] * (i + 1) for i in range(len(turns))],
        "turn_token_ids": turns,
        "turn_logprobs": [[-0.5] * len(turn) for turn in turns],
        "turn_rewards": rewards,
        "truncated": truncated,
    }


EPISODES = [
    episode("a", [[1, 2], [3], [4, 5, 6]], [1.0, -2.0, 0.5]),
    episode("b", [[8]], [3.0]),
    episode("c", [[9, 1], [2]], [0.0, 4.0], truncated=True),
]


def scored_store(seed=0):
    store = RolloutStore.from_episodes(EPISODES)
    generator = torch.Generator().manual_seed(seed)
    for i, element in enumerate(store.elements):
        n = len(element.response_tensor)
        store.set_scores(i, *(torch.randn(n, generator=generator) for _ in range(3)))
    store.bootstrap_values["c"] = 1.5
    return store


def test_turns_of_played_episodes(make_model, tokenizer):
    policy = ModelPolicy(make_model(), tokenizer, max_new_tokens=5)
    options = {"max_turns": 3, "on_length": "continue", "keep_tokens": True, "progress": False}
    episodes = collect_episodes(policy, Endless, 4, **options)
    store = RolloutStore.from_episodes(episodes)
    assert len(store) == 12 and store.turns == [0, 1, 2] * 4
    place = 0
    for row in episodes:
        starts = [i for i, message in enumerate(row["messages"]) if message["role"] == "assistant"]
        for turn, start in enumerate(starts):
            element = store.elements[place]
            assert store.episode_ids[place] == row["episode_id"]
            assert element.query_tensor.tolist() == policy.prompt(row["messages"][:start])
            assert element.response_tensor.tolist() == row["turn_token_ids"][turn]
            assert element.rewards.tolist() == [0.0] * (len(element.rewards) - 1) + [row["turn_rewards"][turn]]
            place += 1
    assert set(store.bootstrap_values) == set(episodes["episode_id"]), "all were cut"


@pytest.mark.parametrize("discount_on", ["token", "utterance"])
@pytest.mark.parametrize("kl_coef", [0.0, 0.3])
def test_advantages_run_over_the_turns_of_an_episode(discount_on, kl_coef):
    store = scored_store()
    gamma, lam, scale = 0.9, 0.8, 2.0
    store.compute_advantages(
        gamma=gamma, lam=lam, discount_on=discount_on, reward_scale=scale, kl_coef=kl_coef, whiten_advantages=False
    )
    for row in EPISODES:
        own = [i for i, name in enumerate(store.episode_ids) if name == row["episode_id"]]
        values, rewards, discounts = [], [], []
        for i, reward in zip(own, row["turn_rewards"], strict=True):
            element = store.elements[i]
            n = len(element.response_tensor)
            kl = (element.logprobs - store.ref_logprobs[i]).tolist()
            values += element.values.tolist()
            rewards += [-kl_coef * kl[t] + (scale * reward if t == n - 1 else 0.0) for t in range(n)]
            discounts += [gamma if discount_on == "token" or t == n - 1 else 1.0 for t in range(n)]
        values.append(1.5 if row["truncated"] else 0.0)
        advantage, expected = 0.0, []
        for t in reversed(range(len(rewards))):
            delta = rewards[t] + discounts[t] * values[t + 1] - values[t]
            advantage = delta + discounts[t] * lam * advantage
            expected.insert(0, advantage)
        found = torch.cat([store.elements[i].advantages for i in own])
        torch.testing.assert_close(found, torch.tensor(expected), rtol=0, atol=1e-5)
        returns = torch.cat([store.elements[i].returns for i in own])
        torch.testing.assert_close(returns, found + torch.tensor(values[:-1]), rtol=0, atol=1e-5)
        of_tokens = torch.cat([store.elements[i].rewards for i in own])
        torch.testing.assert_close(of_tokens, torch.tensor(rewards), rtol=0, atol=1e-6)


def test_whitened_over_all_tokens():
    plain, white = scored_store(), scored_store()
    plain.compute_advantages(whiten_advantages=False)
    white.compute_advantages()
    advantages = torch.cat([element.advantages for element in plain.elements])
    found = torch.cat([element.advantages for element in white.elements])
    torch.testing.assert_close(found, (advantages - advantages.mean()) / advantages.std(), rtol=0, atol=1e-4)
    for a, b in zip(plain.elements, white.elements, strict=True):
        assert torch.equal(a.returns, b.returns)


@pytest.mark.parametrize("state", ["fresh", "scored", "computed"])
def test_saved_and_loaded(tmp_path, state):
    store = RolloutStore.from_episodes(EPISODES) if state == "fresh" else scored_store()
    if state == "computed":
        store.compute_advantages(kl_coef=0.1)
    path = tmp_path / "store.safetensors"
    path.write_bytes(b"an older one")
    store.save(path)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    again = RolloutStore.load(path)
    for name in ("episode_ids", "turns", "turn_rewards", "num_turns", "bootstrap_values"):
        assert getattr(again, name) == getattr(store, name)
    assert [x.tolist() for x in again.ref_logprobs] == [x.tolist() for x in store.ref_logprobs]
    for a, b in zip(again.elements, store.elements, strict=True):
        for name, x in vars(b).items():
            assert (x is None) == (getattr(a, name) is None)
            if x is not None:
                assert torch.equal(getattr(a, name), x) and getattr(a, name).dtype == x.dtype, name


@pytest.mark.parametrize(
    ("episodes", "message"),
    [
        ([{**EPISODES[0], "turn_token_ids": None}], "without its tokens"),
        ([EPISODES[0], EPISODES[0]], "there twice"),
        ([episode("d", [[1], []], [0.0, 0.0])], "Nothing was sampled in turn 1 of episode 'd'"),
    ],
)
def test_episodes_that_cannot_be_learned_from(episodes, message):
    with pytest.raises(ValueError, match=message):
        RolloutStore.from_episodes(episodes)


def test_policies_without_tokens():
    episodes = collect_episodes(RandomPolicy(), TreasureHunt, 2, progress=False)
    with pytest.raises(ValueError, match="without its tokens"):
        RolloutStore.from_episodes(episodes)


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (0, "Turn 1 of episode 'a' does not follow"),
        (1, "Turn 2 of episode 'a' does not follow"),
        (2, "Episode 'a' has 3 turns, and 2 are here"),
        (5, "Episode 'c' has 2 turns, and 1 are here"),
    ],
)
def test_a_turn_that_is_missing(place, message):
    store = scored_store()
    for column in (store.elements, store.episode_ids, store.turns, store.turn_rewards, store.ref_logprobs):
        del column[place]
    with pytest.raises(ValueError, match=message):
        store.compute_advantages()


def test_nothing_played(tmp_path):
    store = RolloutStore.from_episodes([])
    store.compute_advantages()
    store.save(tmp_path / "store")
    assert vars(RolloutStore.load(tmp_path / "store")) == vars(store) == vars(RolloutStore())


def test_arguments_that_make_no_sense():
    store = scored_store()
    with pytest.raises(ValueError, match="`discount_on` must be"):
        store.compute_advantages(discount_on="turn")
    # One number would do for both tokens, without a word.
    with pytest.raises(ValueError, match="`ref_logprobs` must have one number to each of the 2"):
        store.set_scores(0, torch.zeros(2), torch.zeros(2), torch.zeros(1))


def test_some_elements_scored_anew(tmp_path):
    store = scored_store()
    store.compute_advantages()
    store.set_scores(0, torch.zeros(2), torch.zeros(2))
    with pytest.raises(ValueError, match="have no `advantages`, and others do"):
        store.save(tmp_path / "store")
    assert not list(tmp_path.iterdir())
