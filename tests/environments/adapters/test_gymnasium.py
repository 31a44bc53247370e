# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
import pickle
import random

import numpy as np
import pytest

from hf_qrl.environments import EnvironmentFailure, as_environment, call_reset, call_step, from_gymnasium, replay
from hf_qrl.environments.adapters import with_private_random


MOVES = {"left": 0, "down": 1, "right": 2, "up": 3}


class Corridor:
    """The duck type of gymnasium: reach cell 3 of a corridor within five moves."""

    closed = 0

    def reset(self, *, seed=None, options=None):
        self.cell, self.moves = (options or {}).get("cell", seed % 3), 0
        return np.int64(self.cell), {"mask": np.array([1, 0])}

    def step(self, action):
        if action == 1:
            raise ValueError("no way down")
        self.moves += 1
        self.cell = max(0, self.cell + (1 if action == 2 else -1))
        return np.int64(self.cell), np.float32(self.cell == 3), np.bool_(self.cell == 3), self.moves == 5, {}

    def close(self):
        Corridor.closed += 1


def parse(text):
    return MOVES.get(text.strip())


def describe(cell):
    return f"cell {cell}"


def play(env, seed, actions, options=None):
    logs, metadata, _ = call_reset(env, [seed], options=options)
    log, results = logs[0], []
    for action in actions:
        log = [*log, {"role": "assistant", "content": action}]
        result = call_step(env, [log], metadata)
        log, metadata = log + result.observations[0], result.metadata
        results.append(result)
    return log, results


def test_episode():
    env = as_environment(from_gymnasium(Corridor, parse, describe, invalid_reward=-1.0))
    log, results = play(env, 1, ["right", "fly", "right"])
    texts = [message["content"] for message in log]
    assert texts == ["cell 1", "right", "cell 2", "fly", "This is not a valid action.", "right", "cell 3"]
    assert [result.rewards.item() for result in results] == [0.0, -1.0, 1.0]
    assert [result.terminateds.item() for result in results] == [False, False, True]
    assert results[1].metadata[0]["_info"] == {"invalid_action": True}


def test_truncation_options_and_close():
    env, before = as_environment(from_gymnasium(Corridor, parse, describe)), Corridor.closed
    _, results = play(env, 1, ["left"] * 5, options=[{"cell": 0}])
    assert [result.truncateds.item() for result in results] == [False] * 4 + [True]
    assert not any(result.terminateds.item() for result in results) and Corridor.closed == before + 1
    with pytest.raises(EnvironmentFailure, match="no way down"):
        play(env, 0, ["down"])
    assert Corridor.closed == before + 2


def test_an_instance_is_refused_and_the_factory_pickles():
    with pytest.raises(TypeError, match="Conversations need one each: pass `lambda"):
        from_gymnasium(Corridor(), parse, describe)
    assert pickle.loads(pickle.dumps(from_gymnasium(Corridor, parse, describe)))().env.closed >= 0


def test_frozen_lake():
    pytest.importorskip("gymnasium", reason="gymnasium is an optional extra, hf_qrl[gymnasium]")
    factory = from_gymnasium("FrozenLake-v1", parse, lambda cell: f"{cell}")
    actions = ["right", "down", "left", "down", "right"] * 3
    env = as_environment(factory)
    logs, metadata, _ = call_reset(env, [7, 8])
    log, observed, rewards = logs[0], [logs[0][0]["content"]], []
    for action in actions:
        log = [*log, {"role": "assistant", "content": action}]
        result = call_step(env, [log], metadata[:1])
        log, metadata = log + result.observations[0], result.metadata
        observed.append(result.observations[0][0]["content"])
        rewards.append(result.rewards.item())
        if result.terminateds.item():
            break
    import gymnasium

    reference = gymnasium.make("FrozenLake-v1")
    cells = [reference.reset(seed=7)[0]]
    for action in actions[: len(rewards)]:
        cell, reward, terminated, _, _ = reference.step(MOVES[action])
        cells.append(cell)
    assert observed == [str(cell) for cell in cells] and rewards[-1] == reward and terminated
    assert replay(factory(), 7, actions[: len(rewards)]).rewards == rewards


def test_cart_pole_truncates():
    gymnasium = pytest.importorskip("gymnasium", reason="gymnasium is an optional extra, hf_qrl[gymnasium]")
    factory = from_gymnasium(
        lambda: gymnasium.make("CartPole-v1", max_episode_steps=3), lambda text: int(text), lambda state: str(state)
    )
    _, results = play(as_environment(factory), 0, ["0", "1", "0"])
    assert [result.truncateds.item() for result in results] == [False, False, True]
    assert [result.rewards.item() for result in results] == [1.0] * 3


class GlobalDice:
    """Draws from the global generators, and does not even seed them."""

    def reset(self, *, seed=None):
        return self.draw(), {}

    def step(self, action):
        return self.draw(), 0.0, False, False, {}

    def draw(self):
        return f"{random.randint(0, 10**6)} {np.random.randint(10**6)}"

    def close(self):
        pass


def test_private_random_state():
    factory = with_private_random(from_gymnasium(GlobalDice, str, str))
    alone = [replay(factory(), seed, ["a", "b"]).messages for seed in (1, 2)]
    assert alone[0] != alone[1] and replay(factory(), 1, ["a", "b"]).messages == alone[0]
    random.seed(3)
    np.random.seed(3)
    expected = random.random(), np.random.rand()
    random.seed(3)
    np.random.seed(3)
    env = as_environment(factory)
    logs, metadata, _ = call_reset(env, [1, 2])
    for action in ("a", "b"):
        logs = [[*log, {"role": "assistant", "content": action}] for log in logs]
        result = call_step(env, logs, metadata)
        metadata = result.metadata
        logs = [log + messages for log, messages in zip(logs, result.observations, strict=True)]
    assert logs == alone
    assert (random.random(), np.random.rand()) == expected


def test_gem():
    gem = pytest.importorskip("gem", reason="gem-llm needs its own environment: it pins other versions")
    factory = with_private_random(from_gymnasium(lambda: gem.make("game:GuessTheNumber-v0-easy"), str, str))
    actions = ["\\boxed{5}", "\\boxed{3}"]
    first, again = replay(factory(), 3, actions[:1]), replay(factory(), 3, actions[:1])
    assert first == again and "guess" in first.messages[0]["content"].lower()
