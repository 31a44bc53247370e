# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
import asyncio
from functools import partial

import pytest
from datasets import Dataset

from hf_qrl.environments import EnvironmentFailure, as_environment, call_reset, call_step, from_reward_function


def play(factory, seed, reply):
    env = as_environment(factory)
    logs, metadata, _ = call_reset(env, [seed])
    result = call_step(env, [[*logs[0], {"role": "assistant", "content": reply}]], metadata)
    assert result.terminateds.item() and result.observations == [[]] and len(env) == 0
    return logs[0], result.rewards.item()


def test_plain_function():
    factory = from_reward_function(lambda prompt, completion: len(prompt) + len(completion), ["one", "three"])
    assert play(factory, 0, "ab") == ([{"role": "user", "content": "one"}], 5.0)
    assert play(factory, 3, "ab") == ([{"role": "user", "content": "three"}], 7.0)


def test_trl_signature_with_strings_and_columns():
    def reward(prompts, completions, answer, **kwargs):
        assert prompts == ["2+2?"] and kwargs == {"level": [1]}
        return [float(completion == given) for completion, given in zip(completions, answer, strict=True)]

    rows = Dataset.from_list([{"prompt": "2+2?", "answer": "4", "level": 1}])
    factory = from_reward_function(reward, rows, trl_signature=True)
    assert play(factory, 9, "4")[1] == 1.0 and play(factory, 9, "5")[1] == 0.0


def test_trl_signature_with_messages():
    async def reward(prompts, completions, **kwargs):
        assert prompts[0][0]["role"] == "system"
        return [len(completion[0]["content"]) / 2 for completion in completions]

    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    factory = from_reward_function(reward, [{"prompt": messages}], trl_signature=True)
    assert play(factory, 0, "abc") == (messages, 1.5)


def test_reward_functions_of_trl():
    rewards = pytest.importorskip("trl.rewards", reason="trl is a dependency, but slow to import where it is broken")
    messages = [{"role": "user", "content": "u"}]
    factory = from_reward_function(rewards.think_format_reward, [{"prompt": messages}], trl_signature=True)
    assert play(factory, 0, "<think>\nhm\n</think>\nyes")[1] == 1.0 and play(factory, 0, "yes")[1] == 0.0


@pytest.mark.parametrize("returned", [[None], [1.0, 2.0], []])
def test_no_single_number_is_a_failure(returned):
    factory = from_reward_function(lambda **kwargs: returned, ["x"], trl_signature=True)
    with pytest.raises(EnvironmentFailure, match="must return one number for one completion"):
        play(factory, 0, "y")


def test_no_prompts():
    with pytest.raises(ValueError, match="at least one prompt"):
        from_reward_function(len, [])


class Waiting:
    async def __call__(self, prompt, completion):
        await asyncio.sleep(0)
        return 2.0


async def waiting(prompt, completion):
    return await Waiting()(prompt, completion)


@pytest.mark.parametrize("reward_fn", [waiting, Waiting(), partial(waiting), lambda *args: waiting(*args)])
def test_coroutines_in_a_loop_that_is_running_and_without_one(reward_fn):
    async def notebook():
        return play(from_reward_function(reward_fn, ["x"]), 0, "y")[1]

    assert play(from_reward_function(reward_fn, ["x"]), 0, "y")[1] == 2.0
    assert asyncio.run(notebook()) == 2.0


def test_a_number_as_text_is_a_failure():
    with pytest.raises(EnvironmentFailure, match="Rewards must be numbers"):
        play(from_reward_function(lambda prompt, completion: "1", ["x"]), 0, "y")
