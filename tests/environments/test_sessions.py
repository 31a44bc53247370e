# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""Text environments behind the batched interface, and how episodes start."""

import json
import pickle

import numpy as np
import pytest
from datasets import Dataset

from hf_qrl.environments import (
    EnvironmentFailure,
    EnvironmentReset,
    EpisodeSource,
    ReplayMismatch,
    SupportsReset,
    TextEnv,
    as_environment,
    call_reset,
    call_step,
    observation_hash,
)
from hf_qrl.environments.sessions import TextEnvironment
from tests.environments.games_for_tests import TreasureHunt, hunt
from tests.environments.nemo_style import Maths


def say(log, text):
    return [*log, {"role": "assistant", "content": text}]


class Fragile(TextEnv):
    """Does what it is told to, and counts how often it is closed."""

    closed = 0

    def reset(self, *, seed, options=None):
        if seed == 13:
            raise RuntimeError("unlucky")
        return "start", {"array": np.arange(2), "object": object(), "score": np.float32(0.5)}

    def step(self, action):
        if action == "fail":
            raise BaseException("broken")
        if action == "nan":
            return "x", float("nan"), False, False, {}
        if action == "two":
            return [{"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}], 1.0, False, False, {}
        self.stop_strings = ["?"]
        return "next", 1.0, action == "end", action in ("cut", "end"), {}

    def legal_actions(self):
        return None

    def close(self):
        Fragile.closed += 1
        if Fragile.closed == 3:
            raise RuntimeError("cannot close")


class TestPlay:
    def test_whole_episodes(self):
        env = as_environment(TreasureHunt)
        logs, metadata, stop_strings = call_reset(env, [0, 1, 2])
        assert stop_strings == [["\n"]] * 3 and len(env) == 3
        assert logs[0][0]["role"] == "system" and metadata[0]["_legal_actions"][-1] == "dig"
        logs, active, returns = list(logs), [0, 1, 2], np.zeros(3)
        states = list(metadata)
        while active:
            logs = [say(log, hunt(log[-1]["content"])) if i in active else log for i, log in enumerate(logs)]
            result = call_step(env, [logs[i] for i in active], pickle.loads(pickle.dumps([states[i] for i in active])))
            for row, i in enumerate(active):
                logs[i] = logs[i] + result.observations[row]
                states[i] = result.metadata[row]
                returns[i] += result.rewards[row].item()
            over = (result.terminateds | result.truncateds).tolist()
            active = [i for row, i in enumerate(active) if not over[row]]
        assert all(log[-1]["content"] == "Gold!" for log in logs) and len(env) == 0
        assert all(state["_info"] == {"success": True} and "_legal_actions" not in state for state in states)
        walks = [sum(m["role"] == "assistant" for m in log) - 1 for log in logs]
        assert returns == pytest.approx([1 - 0.1 * walk for walk in walks])
        json.dumps(states)

    def test_the_games_own_limit_truncates(self):
        env = as_environment(lambda: TreasureHunt(max_moves=2))
        (log,), metadata, _ = call_reset(env, [0])
        for turn in range(2):
            result = call_step(env, [say(log, "jump\n")], metadata)
            metadata = result.metadata
            assert result.truncateds.tolist() == [turn == 1] and not result.terminateds.any()
            assert metadata[0]["_info"] == {"invalid_action": True}
        assert len(env) == 0

    def test_information_is_plain(self):
        env = as_environment(Fragile)
        _, metadata, stop_strings = call_reset(env, [0])
        assert metadata[0]["_info"] == {"array": [0, 1], "score": 0.5} and stop_strings == [None]

    def test_several_messages_and_stop_strings_of_a_turn(self):
        env = as_environment(Fragile)
        (log,), metadata, _ = call_reset(env, [0])
        result = call_step(env, [say(log, "two")], metadata)
        assert [message["content"] for message in result.observations[0]] == ["1", "2"]
        assert result.next_stop_strings == [None]
        result = call_step(env, [say(log, "go")], result.metadata)
        assert result.next_stop_strings == [["?"]] and result.observations == [[{"role": "user", "content": "next"}]]
        assert env.step([say(log, "go")], result.metadata).observations == [{"role": "user", "content": "next"}]


class TestFailures:
    def test_one_failing_session_does_not_touch_the_others(self):
        env = as_environment(Fragile)
        logs, metadata, _ = call_reset(env, range(4))
        result = call_step(
            env, [say(log, text) for log, text in zip(logs, ["go", "fail", "nan", "cut"], strict=True)], metadata
        )
        assert [failure is not None for failure in result.failures] == [False, True, True, False]
        assert result.failures[1].cause == "BaseException" and "reward nan" in str(result.failures[2])
        assert result.rewards[[0, 3]].tolist() == [1.0, 1.0] and result.rewards[1:3].isnan().all()
        assert result.truncateds.tolist() == [False, False, False, True] and len(env) == 1
        again = call_step(env, [say(logs[0], "end")], result.metadata[:1])
        assert again.terminateds.tolist() == [True] and again.truncateds.tolist() == [False] and len(env) == 0

    def test_a_single_failure_is_raised(self):
        env = as_environment(Fragile)
        (log,), metadata, _ = call_reset(env, [0])
        with pytest.raises(EnvironmentFailure, match="`Fragile.step` raised BaseException: broken"):
            call_step(env, [say(log, "fail")], metadata)
        assert len(env) == 0

    def test_a_reset_that_fails_closes_the_others(self):
        env, before = as_environment(Fragile), Fragile.closed
        with pytest.raises(EnvironmentFailure, match="`Fragile.reset` raised RuntimeError: unlucky"):
            call_reset(env, [0, 13])
        assert len(env) == 0 and Fragile.closed == before + 2

    def test_every_session_is_closed_once_even_if_that_fails(self):
        Fragile.closed = 0
        env = as_environment(Fragile)
        logs, metadata, _ = call_reset(env, range(5))
        result = call_step(
            env, [say(log, text) for log, text in zip(logs[:3], ["end", "fail", "cut"], strict=True)], metadata[:3]
        )
        assert Fragile.closed == 3 and result.failures[2] is None
        assert "cannot close" in result.metadata[2]["_close_failure"]
        env.release(metadata[3:4])
        env.release(metadata[:4])
        assert Fragile.closed == 4
        env.shutdown()
        assert Fragile.closed == 5 and len(env) == 0

    def test_sessions_that_are_not_there(self):
        env, other = as_environment(TreasureHunt), as_environment(TreasureHunt)
        (log,), metadata, _ = call_reset(env, [0])
        with pytest.raises(EnvironmentFailure, match="is not in this process") as caught:
            call_step(other, [say(log, "dig\n")], metadata)
        assert caught.value.failure_class == "INFRA"
        result = call_step(env, [say(log, "dig\n")], metadata)
        with pytest.raises(EnvironmentFailure, match="has ended") as caught:
            call_step(env, [say(log, "dig\n")], result.metadata)
        assert caught.value.failure_class == "DATA"

    @pytest.mark.parametrize("name", ["stop_strings", "legal_actions", "tools"])
    @pytest.mark.parametrize("wrong", ["</a>", 5, [5], [None], [b"x"], {"b", "a"}])
    def test_lists_that_are_none(self, name, wrong):
        def value(self):
            return wrong

        attribute = value if name == "legal_actions" else wrong
        early = type("Early", (TreasureHunt,), {name: attribute})
        env = as_environment(early)
        with pytest.raises(EnvironmentFailure, match=rf"`Early.{name}`.* must be a list of "):
            call_reset(env, [0])
        assert len(env) == 0
        if name == "tools":
            return

        def step(self, action):
            returned = TreasureHunt.step(self, action)
            setattr(self, name, (lambda: wrong) if name == "legal_actions" else wrong)
            return returned

        env = as_environment(type("Late", (TreasureHunt,), {"step": step}))
        logs, metadata, _ = call_reset(env, [0, 1])
        result = env.step([say(log, "jump\n") for log in logs], metadata)
        assert all("must be a list of strings" in str(row["_failure"]) for row in result.metadata) and len(env) == 0

    def test_what_can_be_listed_is_a_list(self):
        class Listed(TreasureHunt):
            stop_strings = ("\n",)

            def legal_actions(self):
                return dict.fromkeys(super().legal_actions()).keys()

        _, metadata, stop_strings = call_reset(as_environment(Listed), [0])
        assert stop_strings == [["\n"]] and metadata[0]["_legal_actions"][-1] == "dig"

    def test_information_that_cannot_be_read(self):
        class Circular(Fragile):
            def step(self, action):
                info = {}
                info["again"] = info
                return "x", 0.0, False, False, info

        env = as_environment(Circular)
        (log,), metadata, _ = call_reset(env, [0])
        with pytest.raises(EnvironmentFailure, match="Reading the information of `Circular` raised RecursionError"):
            call_step(env, [say(log, "go")], metadata)
        assert len(env) == 0

    def test_an_object_plays_one_conversation_at_a_time(self):
        shared = TreasureHunt()
        env = as_environment(lambda: shared)
        for _ in range(2):
            _, metadata, _ = call_reset(env, [0])
            with pytest.raises(EnvironmentFailure, match="in which another conversation is being played"):
                call_reset(env, [1])
            assert len(env) == 1
            env.release(metadata)

    def test_ended_sessions_can_be_kept_for_a_close_of_their_own(self):
        Fragile.closed = 10
        env = TextEnvironment(Fragile, keep_ended=True)
        logs, metadata, _ = call_reset(env, range(3))
        actions = ["end", "cut", "fail"]
        result = call_step(env, [say(log, text) for log, text in zip(logs, actions, strict=True)], metadata)
        assert result.terminateds.tolist()[0] and result.truncateds.tolist()[1] and len(env) == 2
        assert Fragile.closed == 11
        env.release(result.metadata)
        assert len(env) == 0 and Fragile.closed == 13

    def test_a_factory_of_something_else(self):
        with pytest.raises(EnvironmentFailure, match="it made a `dict`.*such as `from_gymnasium`"):
            call_reset(as_environment(dict), [0])


class TestRestore:
    def test_goes_on_elsewhere(self):
        env, other = as_environment(TreasureHunt), as_environment(TreasureHunt)
        (log,), metadata, _ = call_reset(env, [3])
        actions = ["jump\n", "jump\n"]
        hashes = [observation_hash(log)]
        for action in actions:
            result = call_step(env, [say(log, action)], metadata)
            log, metadata = [*say(log, action), *result.observations[0]], result.metadata
            hashes.append(observation_hash(result.observations[0]))
        row, played = other.restore(metadata[0]["_seed"], actions, observation_hashes=hashes)
        assert played.messages == log and played.rewards == [-0.5, -0.5] and len(other) == 1
        assert row["_legal_actions"] == metadata[0]["_legal_actions"]
        here = call_step(env, [say(log, hunt(log[-1]["content"]))], metadata)
        there = call_step(other, [say(log, hunt(log[-1]["content"]))], [row])
        assert here.observations == there.observations and here.rewards == there.rewards

    def test_options_stay_as_they_are(self):
        class Taking(TreasureHunt):
            def reset(self, *, seed, options=None):
                return super().reset(seed=options.pop("seed"))

        options = {"seed": 7}
        env = as_environment(Taking)
        (log,), metadata, _ = call_reset(env, [0], options=[options])
        row, played = env.restore(0, [], options=options)
        assert played.messages == log and options == metadata[0]["_options"] == row["_options"] == {"seed": 7}

    def test_mismatch(self):
        env = as_environment(TreasureHunt)
        with pytest.raises(ReplayMismatch):
            env.restore(0, ["jump\n"], observation_hashes=["0" * 64])
        assert len(env) == 0


class TestStarts:
    ROWS = [
        {"messages": [{"role": "user", "content": "1+1?"}], "metadata": {"ground_truth": "2"}, "stop_strings": ["\n"]},
        {"messages": [{"role": "user", "content": "2+2?"}], "metadata": {"ground_truth": "4"}, "stop_strings": None},
    ]

    @pytest.mark.parametrize("make", [list, Dataset.from_list, lambda rows: lambda seed, index: rows[index % 2]])
    def test_sources(self, make):
        source = EpisodeSource(make(self.ROWS))
        logs, metadata, stop_strings = call_reset(Maths(), [5, 6, 7], indices=[0, 1, 3], source=source)
        assert [log[0]["content"] for log in logs] == ["1+1?", "2+2?", "2+2?"]
        assert metadata == [row["metadata"] for row in (self.ROWS[0], self.ROWS[1], self.ROWS[1])]
        assert stop_strings == [["\n"], None, None]
        result = call_step(Maths(), [say(log, "4") for log in logs], metadata)
        assert result.rewards.tolist() == [0.0, 1.0, 1.0]

    def test_datum_spec(self):
        datum = {
            "message_log": [{"role": "user", "content": "x", "token_ids": [1]}],
            "extra_env_info": {"a": 1},
            "idx": 0,
        }
        start = EpisodeSource([datum]).start(0, 0)
        assert start == {"messages": [{"role": "user", "content": "x"}], "metadata": {"a": 1}, "stop_strings": None}

    def test_the_seed_reaches_the_function(self):
        source = EpisodeSource(lambda seed, index: {"messages": [{"role": "user", "content": f"{seed} {index}"}]})
        logs, metadata, _ = call_reset(Maths(), [5, 6], source=source)
        assert [log[0]["content"] for log in logs] == ["5 0", "6 1"] and metadata == [None, None]

    def test_errors(self):
        with pytest.raises(TypeError, match="`Maths` cannot start episodes: it has no `reset.*EpisodeSource"):
            call_reset(Maths(), [0])
        with pytest.raises(ValueError, match="0 <= seed"):
            call_reset(as_environment(TreasureHunt), [-1])
        with pytest.raises(ValueError, match="it needs at least one start"):
            EpisodeSource([])
        with pytest.raises(EnvironmentFailure, match="Start of episode 0: `messages` is empty"):
            call_reset(Maths(), [0], source=EpisodeSource([{"metadata": {}}]))
        with pytest.raises(EnvironmentFailure, match="Got 1 options for 2 seeds"):
            call_reset(as_environment(TreasureHunt), [0, 1], options=[{}])

    @pytest.mark.parametrize("returned", [None, ([], []), EnvironmentReset([], [], [])])
    def test_malformed_resets(self, returned):
        env = as_environment(TreasureHunt)
        env.reset = lambda seeds, options: returned
        with pytest.raises(EnvironmentFailure, match="one entry for each of 1 seeds"):
            call_reset(env, [0])

    @pytest.mark.parametrize(
        "messages, match",
        [
            ([{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}], "the role 'assistant'"),
            ([{"role": "user", "content": None}], "the strings"),
            ([{"role": "user"}], "the strings"),
            ([{"role": "user", "content": "\ud800"}], "holds what JSON cannot say"),
        ],
    )
    def test_first_observations_are_checked_like_others(self, messages, match):
        functional = as_environment(TreasureHunt)
        functional.reset = lambda seeds, options: EnvironmentReset([messages], [None], [None])
        for env, source in ((functional, None), (Maths(), EpisodeSource([{"messages": messages}]))):
            with pytest.raises(EnvironmentFailure, match=match):
                call_reset(env, [0], source=source)

    @pytest.mark.parametrize("strings", ["</a>", [5], 5])
    def test_stop_strings_are_checked(self, strings):
        rows = [{"messages": [{"role": "user", "content": "x"}], "stop_strings": strings}]
        with pytest.raises(EnvironmentFailure, match="stop strings of episode 0 must be a list of strings"):
            call_reset(Maths(), [0], source=EpisodeSource(rows))

    def test_functional_environments_get_copies_of_the_options(self):
        def reset(seeds, options):
            text = options[0].pop("text")
            return EnvironmentReset([[{"role": "user", "content": text}]], [None], [None])

        env, options = as_environment(TreasureHunt), {"text": "tea"}
        env.reset = reset
        for _ in range(2):
            assert call_reset(env, [0], options=[options]).message_logs[0][0]["content"] == "tea"

    def test_who_supports_reset(self):
        assert isinstance(as_environment(TreasureHunt), SupportsReset) and not isinstance(Maths(), SupportsReset)
