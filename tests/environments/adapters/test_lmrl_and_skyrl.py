# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
from dataclasses import dataclass

import pytest

from hf_qrl.environments import as_environment, call_reset, call_step, from_lmrl, from_skyrl, replay


@dataclass(frozen=True)
class Text:
    text: str
    is_action: bool


class Echo:
    """The shape of LMRL-Gym's text environments: answers twice, then is done; `window` keeps the observation only."""

    def __init__(self, window=False):
        self.window, self.closed = window, False

    def reset(self, seed=None, options=None):
        self.turns, self.limit = 0, (options or {}).get("limit", 2)
        return (Text("Header\n", False), Text(f"seed {seed}\n", False))

    def step(self, text_history):
        assert text_history[-1].is_action and not text_history[-2].is_action
        self.turns += 1
        answer = (Text(text_history[-1].text.upper(), False), Text("!\n", False))
        history = answer if self.window else (*text_history, *answer)
        return history, -1.0, self.turns == self.limit

    def close(self):
        self.closed = True


@pytest.mark.parametrize("window", [False, True])
@pytest.mark.parametrize("arguments", [{}, {"make_text": Text}], ids=["own", "theirs"])
def test_lmrl(window, arguments):
    played = replay(from_lmrl(lambda: Echo(window), **arguments)(), 5, ["a\n", "b\n"])
    assert [m["content"] for m in played.messages] == ["Header\nseed 5\n", "a\n", "A\n!\n", "b\n", "B\n!\n"]
    assert played.rewards == [-1.0, -1.0] and played.terminated and not played.truncated


def test_lmrl_limits_and_close():
    made = []

    def make():
        made.append(Echo())
        return made[-1]

    env = as_environment(from_lmrl(make, truncated_when=lambda env: env.turns >= 3))
    logs, metadata, _ = call_reset(env, [0, 1], options=[{"limit": 1}, {"limit": 3}])
    logs = [[*log, {"role": "assistant", "content": "x"}] for log in logs]
    result = call_step(env, logs, metadata)
    assert result.terminateds.tolist() == [True, False]
    log, metadata = logs[1] + result.observations[1], result.metadata[1:]
    for _ in range(2):
        log = [*log, {"role": "assistant", "content": "x"}]
        result = call_step(env, [log], metadata)
        log, metadata = log + result.observations[0], result.metadata
    assert result.truncateds.tolist() == [True] and result.terminateds.tolist() == [False]
    assert all(env.closed for env in made)


class Search:
    """The shape of SkyRL-gym's text environments."""

    def __init__(self, row):
        self.row, self.turns, self.max_turns, self.closed = row, 0, 2, False

    def init(self, prompt):
        return prompt, {"level": 1}

    def step(self, action):
        self.turns += 1
        if action == self.row["answer"]:
            return {"observations": [], "reward": 1.0, "done": True, "metadata": {"ok": True}}
        message = {"role": "user", "content": "Again."}
        return {"observations": [message], "reward": 0, "done": self.turns == 2, "metadata": None}

    def close(self):
        self.closed = True


ROWS = [{"prompt": "2+2?", "answer": "4"}, {"prompt": [{"role": "user", "content": "3+3?"}], "answer": "6"}]


def test_skyrl():
    factory = from_skyrl(Search, ROWS, truncated_when=lambda env: env.turns >= env.max_turns)
    played = replay(factory(), 3, ["5", "7"])
    assert [m["content"] for m in played.messages] == ["3+3?", "5", "Again.", "7", "Again."]
    assert played.rewards == [0.0, 0.0] and played.truncated and not played.terminated
    assert replay(factory(), 0, ["4"]).messages[-1] == {"role": "assistant", "content": "4"}
    env = factory()
    assert env.reset(seed=0)[1] == {"level": 1, "row": 0}
    inner = env.env
    assert env.step("4") == ([], 1.0, True, False, {"ok": True})
    env.close()
    env.close()
    assert inner.closed
    with pytest.raises(ValueError, match="There are no rows"):
        from_skyrl(Search, [])


def test_gsm8k_of_skyrl_gym():
    gsm8k = pytest.importorskip("skyrl_gym.envs.gsm8k.env", reason="skyrl-gym is not a dependency")
    rows = [{"prompt": "6*7? End with ####.", "reward_spec": {"ground_truth": "42"}}]
    factory = from_skyrl(lambda row: gsm8k.GSM8kEnv(extras=row), rows)
    assert replay(factory(), 0, ["It is\n#### 42"]).rewards == [1.0]
    played = replay(factory(), 0, ["#### 41"])
    assert played.rewards == [0.0] and played.terminated
