# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
import numpy as np
import pytest

from hf_qrl.environments.games.arithmetic import ArithmeticEnv, make_dataset, q_value, solve


@pytest.mark.parametrize(
    "question, answer",
    [("What is 3 + 4?\n", 7), ("What is 3 - 4?", -1), ("What is 12 * 11?\n", 132), ("What is 0 * 5?\n", 0)],
)
def test_values(question, answer):
    assert solve(question) == answer
    assert q_value(question, f"{answer}\n") == q_value(question, f" {answer}") == 1.0
    for wrong in (f"{answer + 1}\n", "", "seven", f"{answer}.0", f"{answer} or {answer + 1}", "9" * 5000):
        assert q_value(question, wrong) == 0.0


def test_game():
    env = ArithmeticEnv(maximum=20)
    for seed in range(200):
        question, _ = env.reset(seed=seed)
        left, operation, right = question.removeprefix("What is ").removesuffix("?\n").split(" ")
        answer = {"+": int(left) + int(right), "-": int(left) - int(right), "*": int(left) * int(right)}[operation]
        assert 0 <= int(left) <= 20 and 0 <= int(right) <= 20
        assert env.step(f"{answer}\n") == ("Right.\n", 1.0, True, False, {"success": True, "invalid_action": False})
        env.reset(seed=seed)
        text, reward, terminated, truncated, info = env.step("none")
        assert (text, reward, terminated, truncated) == (f"Wrong, it is {answer}.\n", 0.0, True, False)
        assert info == {"success": False, "invalid_action": True}
    with pytest.raises(RuntimeError, match="call `reset`"):
        env.step("7")


def test_options():
    env = ArithmeticEnv(maximum=0, operations=["*"])
    assert {env.reset(seed=seed)[0] for seed in range(20)} == {"What is 0 * 0?\n"}
    with pytest.raises(ValueError, match="some of"):
        ArithmeticEnv(operations=["/"])
    with pytest.raises(ValueError, match="at least 0"):
        ArithmeticEnv(maximum=-1)
    with pytest.raises(ValueError, match="reads like"):
        solve("How are you?")


def test_data():
    episodes = make_dataset(4000)
    # The standard error is 0.008.
    assert np.mean([episode["return"] for episode in episodes]) == pytest.approx(0.5, abs=0.03)
    for episode in episodes[:200]:
        question, answer, _ = [message["content"] for message in episode["messages"]]
        assert episode["turn_rewards"] == [q_value(question, answer)]
        assert abs(int(answer) - solve(question)) <= 5
