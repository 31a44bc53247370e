# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
import asyncio
import inspect

import pytest

from hf_qrl.environments import (
    EnvironmentFailure,
    as_environment,
    call_reset,
    call_step,
    from_trl_environment,
    to_trl_environment,
)
from hf_qrl.environments.adapters.trl import parse_tool_calls
from tests.environments.games_for_tests import TreasureHunt, hunt


class Counter:
    """An environment as TRL documents them: reach the target with two tools."""

    def reset(self, start: int = 0, target: int = 2, **kwargs) -> str | None:
        self.value, self.target = start, target
        return None if kwargs.get("quiet") else f" The counter is {start}."

    def add(self, amount: int) -> int:
        """
        Adds to the counter.

        Args:
            amount: How much to add.

        Returns:
            The new value.
        """
        self.value += amount
        return self.value

    async def double(self) -> int:
        """
        Doubles the counter.

        Returns:
            The new value.
        """
        self.value *= 2
        return self.value

    def get_reward(self) -> float:
        return float(self.value == self.target)

    def _private(self):
        raise AssertionError


PROMPT = [{"role": "system", "content": "Count."}, {"role": "user", "content": "Reach 6."}]
ADD = '<tool_call>\n{"name": "add", "arguments": {"amount": 2}}\n</tool_call>'
DOUBLE = '{"name": "double", "arguments": {}}'


def play(factory, replies, seed=0):
    env = as_environment(factory)
    logs, metadata, _ = call_reset(env, [seed])
    log, first, results = logs[0], metadata[0], []
    for reply in replies:
        log = [*log, {"role": "assistant", "content": reply}]
        result = call_step(env, [log], metadata)
        log, metadata = log + result.observations[0], result.metadata
        results.append(result)
    return log, first, results


def test_episode_with_tools():
    rows = [{"prompt": PROMPT, "start": 1, "target": 6}]
    log, first, results = play(from_trl_environment(Counter, rows), [ADD, DOUBLE, "Done."])
    assert log[1] == {"role": "user", "content": "Reach 6. The counter is 1."} and PROMPT[1]["content"] == "Reach 6."
    assert results[0].observations == [[{"role": "tool", "name": "add", "content": "3"}]]
    assert results[1].observations == [[{"role": "tool", "name": "double", "content": "6"}]]
    assert results[2].observations == [[]]
    assert [result.rewards.item() for result in results] == [0.0, 0.0, 1.0]
    assert [result.terminateds.item() for result in results] == [False, False, True]
    assert [tool["function"]["name"] for tool in first["_tools"]] == ["add", "double"]
    assert first["_tools"][0]["function"]["parameters"]["properties"]["amount"]["type"] == "integer"


def test_mistakes_are_told():
    calls = ['<tool_call>{"name": "fly"}</tool_call>', '<tool_call>{"name": "add", "arguments": {}}</tool_call>', ADD]
    _, _, results = play(from_trl_environment(Counter), [calls[0] + calls[2], calls[1], "<tool_call>{no json"])
    assert [m["content"] for m in results[0].observations[0]] == [
        "{'error': \"Tool fly not found. There are ['add', 'double'].\"}",
        "2",
    ]
    assert "missing 1 required positional argument" in results[1].observations[0][0]["content"]
    assert "A tool call is a JSON object" in results[2].observations[0][0]["content"]
    assert all(result.metadata[0]["_info"] == {"invalid_action": True} for result in results)


@pytest.mark.parametrize(
    "error, infra", [(ConnectionResetError("gone"), True), (TimeoutError(), True), (KeyError("no key"), False)]
)
def test_a_lost_connection_is_no_mistake_of_the_model(error, infra):
    class Remote(Counter):
        def add(self, amount: int) -> int:
            """
            Adds to the counter.

            Args:
                amount: How much to add.
            """
            raise error

    factory = from_trl_environment(Remote)
    if not infra:
        assert "no key" in play(factory, [ADD])[2][0].observations[0][0]["content"]
        return
    with pytest.raises(EnvironmentFailure, match="`TRLTextEnv.step` raised") as caught:
        play(factory, [ADD])
    assert caught.value.failure_class == "INFRA"


def test_coroutines_where_a_loop_is_running():
    async def notebook():
        return play(from_trl_environment(Counter, [{"start": 3}]), [DOUBLE])[2][0].observations

    assert asyncio.run(notebook()) == [[{"role": "tool", "name": "double", "content": "6"}]]


def test_rows_by_seed_quiet_resets_and_limit():
    rows = [{"prompt": "a", "quiet": True}, {"prompt": "b", "target": 4}]
    factory = from_trl_environment(Counter, rows, max_tool_calling_iterations=2)
    assert play(factory, [], seed=0)[0] == [{"role": "user", "content": "a"}]
    _, _, results = play(factory, [ADD, ADD, ADD], seed=1)
    assert [result.truncateds.item() for result in results] == [False, False, True]
    assert results[2].rewards.item() == 1.0 and not results[2].terminateds.item()


def test_reward_function_in_place_of_get_reward():
    class NoReward(Counter):
        get_reward = None

    with pytest.raises(TypeError, match="has no `get_reward`. Add it, or pass `reward_function`"):
        from_trl_environment(NoReward)()
    _, _, results = play(from_trl_environment(NoReward, reward_function=lambda env: env.value * 10), [ADD, "Done."])
    assert results[1].rewards.item() == 20.0
    with pytest.raises(TypeError, match="`dict` has no `reset`"):
        from_trl_environment(dict)()


@pytest.mark.parametrize(
    "text, calls",
    [
        ("Hello.", []),
        ("3", []),
        ('["a"]', []),
        ('{"answer": 3}', []),
        ("[]", []),
        ('{"name": "a"}', [{"name": "a", "arguments": {}}]),
        ('[{"name": "a"}, {"name": "b"}]', [{"name": "a", "arguments": {}}, {"name": "b", "arguments": {}}]),
        ('x <tool_call>{"name": "a"}</tool_call> y', [{"name": "a", "arguments": {}}]),
        ('<tool_call>{"name": "a"}', [{"name": "a", "arguments": {}}]),
    ],
)
def test_parse_tool_calls(text, calls):
    assert parse_tool_calls(text) == calls


@pytest.mark.parametrize("text", ["<tool_call>{</tool_call>", '{"name": 3}', '{"name": "a", "arguments": [1]}'])
def test_parse_tool_calls_with_mistakes(text):
    assert [list(call) for call in parse_tool_calls(text)] == [["error"]]


def test_deeply_nested_json_is_no_crash():
    assert parse_tool_calls("[" * 100_000) == []


class TestToTRL:
    def test_the_way_back(self):
        env = to_trl_environment(TreasureHunt)()
        text, total, steps = env.reset(prompt="ignored", seed=3), 0.0, 0
        while "Gold" not in text:
            text = env.act(hunt(text.splitlines()[-1]))
            steps += 1
        assert env.get_reward() == pytest.approx(1 - 0.1 * (steps - 1))
        with pytest.raises(ValueError, match="The episode is over"):
            env.act("dig")
        assert env.reset(seed=3) and env.get_reward() == 0.0 and total == 0.0
        with pytest.raises(ValueError, match="needs a column `seed`"):
            env.reset(prompt="x")

    def test_trl_finds_one_tool(self):
        get_json_schema = pytest.importorskip("transformers.utils").get_json_schema
        env = to_trl_environment(TreasureHunt)()
        # How TRL's trainers look for them.
        names = [name for name, _ in inspect.getmembers(type(env), predicate=inspect.isfunction) if name[0] != "_"]
        assert names == ["act", "get_reward", "reset"]
        assert get_json_schema(env.act)["function"]["parameters"]["required"] == ["action"]

    def test_there_and_back(self):
        factory = from_trl_environment(to_trl_environment(TreasureHunt), [{"prompt": "Play. "}])
        call = '{"name": "act", "arguments": {"action": "jump"}}'
        env = factory()
        messages, _ = env.reset(seed=0, options={"seed": 3})
        assert messages[0]["content"].startswith("Play. Say")
        assert env.step(call)[0][0]["content"].startswith("You stumble.")
        assert env.step("I give up.")[1:4] == (-0.5, True, False)
