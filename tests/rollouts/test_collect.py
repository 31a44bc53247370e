# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
import json
import math
from functools import partial

import numpy as np
import pytest
import torch

from hf_qrl import ILQLConfig, ILQLTrainer
from hf_qrl.data.episodes import PLAIN_CHAT_TEMPLATE, from_jsonl, validate_episode
from hf_qrl.distributed.executors import ProcessExecutor
from hf_qrl.environments import EpisodeSource, as_environment, episode_seed
from hf_qrl.rollouts import (
    Action,
    CollectionReport,
    ModelPolicy,
    Policy,
    RandomPolicy,
    ScriptedPolicy,
    TooManyFailures,
    collect_episodes,
)
from tests.environments.games_for_tests import TreasureHunt
from tests.environments.nemo_style import Maths
from tests.rollouts.games import Broken, Counting, Endless


QUIET = {"progress": False}


class Batches(RandomPolicy):
    """A random policy that notes how many conversations it was asked at a time."""

    def __init__(self, *args):
        super().__init__(*args)
        self.sizes = []

    def act(self, conversations, *args, **context):
        self.sizes.append(len(conversations))
        return super().act(conversations, *args, **context)


class Cut(Policy):
    """Says the same, cut at its length."""

    def __init__(self, finish="length"):
        self.finish = finish

    def act(self, conversations, stop_strings, seeds, **context):
        return [Action("walk", self.finish) for _ in conversations]


def test_best_play(hunter):
    episodes = collect_episodes(hunter, TreasureHunt, 30, **QUIET)
    assert episodes["seed"] == [episode_seed(i) for i in range(30)]
    assert all(episodes["success"]) and all(episodes["terminated"]) and not any(episodes["truncated"])
    for row in episodes:
        validate_episode(row)
        walks = len(row["turn_rewards"]) - 1
        assert row["turn_rewards"] == [-0.1] * walks + [1.0]
        assert row["return"] == math.fsum(row["turn_rewards"])
        assert [message["role"] for message in row["messages"]] == ["system", "user"] + ["assistant", "user"] * (
            walks + 1
        )
        assert row["messages"][-1]["content"] == "Gold!"
        assert row["turn_finish"] == ["stop:\n"] * (walks + 1)
        assert row["turn_legal_actions"][0][-1] == "dig"
        assert row["policy"] == {"id": "scripted:hunter", "revision": None, "sampling": None, "seed": 0}
        assert row["env_id"].endswith("games_for_tests.TreasureHunt")


@pytest.mark.parametrize("batch_size", [1, 3, 40])
def test_the_batch_size_changes_nothing(batch_size):
    expected = collect_episodes(RandomPolicy(), TreasureHunt, 25, **QUIET).to_list()
    assert collect_episodes(RandomPolicy(), TreasureHunt, 25, batch_size=batch_size, **QUIET).to_list() == expected


def test_ended_episodes_make_room_at_once():
    policy = Batches()
    _, report = collect_episodes(policy, TreasureHunt, 40, batch_size=8, return_report=True, **QUIET)
    assert sum(policy.sizes) == report.num_turns
    # Full until no episode is left to start.
    full = policy.sizes.count(8)
    assert policy.sizes[:full] == [8] * full and full > len(policy.sizes) / 2
    assert policy.sizes[full:] == sorted(policy.sizes[full:], reverse=True)


def test_seeds_decide():
    first, again = (collect_episodes(RandomPolicy(), TreasureHunt, 10, **QUIET) for _ in range(2))
    assert first.to_list() == again.to_list()
    other_run = collect_episodes(RandomPolicy(), TreasureHunt, 10, run_seed=1, **QUIET)
    assert [row["messages"][1] for row in other_run] == [row["messages"][1] for row in first]
    assert other_run["messages"] != first["messages"]
    assert not set(other_run["episode_id"]) & set(first["episode_id"])
    validation = collect_episodes(RandomPolicy(), TreasureHunt, 10, split="validation", **QUIET)
    assert not set(validation["seed"]) & set(first["seed"])


def test_a_seed_has_its_sample_in_any_list_and_several_where_it_is_repeated():
    together = collect_episodes(RandomPolicy(), TreasureHunt, seeds=[7, 8, 9, 9, 9, 9], **QUIET)
    alone = collect_episodes(RandomPolicy(), TreasureHunt, seeds=[9], **QUIET)
    assert together[2]["messages"] == alone[0]["messages"]
    assert len({str(row["messages"]) for row in together.select(range(2, 6))}) > 1


def test_each_turn_has_a_sample_of_its_own():
    (row,) = collect_episodes(RandomPolicy(["a.", "b."]), Endless, 1, max_turns=20, **QUIET)
    assert {message["content"] for message in row["messages"] if message["role"] == "assistant"} == {"a.", "b."}


def test_limits_of_the_collector_and_of_the_environment():
    words = ScriptedPolicy(lambda messages: "go on. and on")
    endless = collect_episodes(words, Endless, 5, max_turns=3, **QUIET)
    assert endless["truncation_reason"] == ["max_turns"] * 5
    assert not any(endless["terminated"]) and all(endless["truncated"])
    assert endless["return"] == [3.0] * 5
    assert endless[0]["messages"][-2:] == [
        {"role": "assistant", "content": "go on."},
        {"role": "user", "content": "Turn 3."},
    ]
    stumbling = collect_episodes(words, TreasureHunt, 5, **QUIET)
    assert stumbling["truncation_reason"] == ["env_limit"] * 5
    assert [len(rewards) for rewards in stumbling["turn_rewards"]] == [8] * 5
    # An end in the last turn that is allowed is an end.
    dig = collect_episodes(ScriptedPolicy(lambda messages: "dig\n"), TreasureHunt, 5, max_turns=1, **QUIET)
    assert all(dig["terminated"]) and dig["truncation_reason"] == [None] * 5


def test_a_cut_reply_ends_the_episode_after_its_turn_or_not():
    cut = collect_episodes(Cut(), TreasureHunt, 4, **QUIET)
    assert cut["truncation_reason"] == ["length"] * 4
    assert cut["turn_rewards"] == [[-0.5]] * 4
    assert cut[0]["messages"][-1]["content"].startswith("You stumble.")
    going_on = collect_episodes(Cut(), TreasureHunt, 4, on_length="continue", **QUIET)
    assert going_on["truncation_reason"] == ["env_limit"] * 4


def test_sessions_are_closed():
    env = as_environment(Endless)
    collect_episodes(Cut("eos"), env, 6, batch_size=2, max_turns=2, **QUIET)
    assert len(env) == 0
    with pytest.raises(ZeroDivisionError):
        collect_episodes(ScriptedPolicy(lambda messages: 1 / 0), env, 6, max_turns=2, **QUIET)
    assert len(env) == 0


def test_max_seq_len_ends_an_episode_before_the_turn(make_model, tokenizer):
    policy = ModelPolicy(make_model(), tokenizer, max_new_tokens=6)
    episodes = collect_episodes(policy, Endless, 4, max_seq_len=120, on_length="continue", **QUIET)
    assert episodes["truncation_reason"] == ["max_seq_len"] * 4
    for row in episodes:
        assert row["messages"][-1]["role"] == "user"
        assert len(policy.prompt(row["messages"])) >= 120 > len(policy.prompt(row["messages"][:-2]))
    with pytest.raises(TooManyFailures, match="first prompt"):
        collect_episodes(policy, Endless, 4, max_seq_len=10, **QUIET)


def test_an_error_is_never_a_row(hunter, tmp_path):
    seeds = list(range(20))
    episodes, report = collect_episodes(
        hunter, Broken, seeds=seeds, max_error_rate=0.5, output_dir=tmp_path, return_report=True, **QUIET
    )
    failed = sorted(failure.seed for failure in report.failures)
    assert failed and all(seed % 4 == 0 for seed in failed)
    assert episodes["seed"] == [seed for seed in seeds if seed not in failed]
    assert (report.n_requested, report.n_ok, report.n_failed, report.n_pending) == (
        20,
        20 - len(failed),
        len(failed),
        0,
    )
    failure = report.failures[0]
    assert failure.kind == "error" and failure.failure_class == "DATA" and failure.turn == 1
    assert "the treasure map burns" in failure.message and "step" in failure.traceback_text
    assert (tmp_path / "failures.jsonl").read_text().count("\n") == len(failed)
    assert "0 pending" in str(report)


def test_too_many_errors_stop_the_run(hunter):
    with pytest.raises(TooManyFailures, match="the treasure map burns") as error:
        collect_episodes(hunter, Broken, seeds=range(0, 400, 4), max_error_rate=0.05, batch_size=4, **QUIET)
    report = error.value.report
    assert report.n_failed == 6 and report.n_pending > 50
    assert report.n_requested == report.n_ok + report.n_failed + report.n_pending


class StopsAt(RandomPolicy):
    """Breaks in the call of the given number, as if the process were killed there."""

    def __init__(self, calls):
        super().__init__()
        self.calls_left = calls

    def act(self, *args, **context):
        self.calls_left -= 1
        if self.calls_left < 0:
            raise KeyboardInterrupt
        return super().act(*args, **context)


def test_a_stopped_run_goes_on(tmp_path):
    arguments = {"batch_size": 4, "output_dir": tmp_path, **QUIET}
    for calls in (3, 5):
        with pytest.raises(KeyboardInterrupt):
            collect_episodes(StopsAt(calls), TreasureHunt, 20, **arguments)
    before = (tmp_path / "episodes.jsonl").read_text().splitlines()
    assert 1 < len(before) < 20
    # The process died while it wrote.
    with (tmp_path / "episodes.jsonl").open("a") as file:
        file.write('{"episode_id": "torn')
    policy = StopsAt(1000)
    episodes, report = collect_episodes(policy, TreasureHunt, 20, return_report=True, **arguments)
    assert report.n_ok == 20 and report.n_resumed == len(before) - 1
    assert episodes.to_list() == collect_episodes(StopsAt(1000), TreasureHunt, 20, **QUIET).to_list()
    # All are there: nothing is played any more. And the run can be extended.
    assert collect_episodes(StopsAt(0), TreasureHunt, 20, **arguments).to_list() == episodes.to_list()
    more, report = collect_episodes(policy, TreasureHunt, 25, return_report=True, **arguments)
    assert report.n_resumed == 20 and more.select(range(20)).to_list() == episodes.to_list()
    with pytest.raises(ValueError, match="max_turns"):
        collect_episodes(policy, TreasureHunt, 20, max_turns=2, **arguments)


def test_functional_environments_and_transient_failures():
    policy = ScriptedPolicy(lambda messages: "one! two")
    episodes, report = collect_episodes(policy, Counting(fail_first=2), 12, batch_size=3, return_report=True, **QUIET)
    assert report.n_failed == 0 and all(episodes["terminated"])
    for row in episodes:
        count = row["metadata"]["target"]
        assert row["turn_rewards"] == [-0.5] * (count - 1) + [0.5]
        assert row["turn_reward_components"][-1] == {"reward/step": -0.5, "reward/end": 1.0}
        assert [message["role"] for message in row["messages"]] == ["environment"] + [
            "assistant",
            "environment",
        ] * count
        # `None` says nothing new.
        assert row["turn_finish"] == ["stop:!"] * count
        assert row["success"] is None
    with pytest.raises(TooManyFailures) as error:
        collect_episodes(policy, Counting(fail_first=1000), 12, **QUIET)
    failure = error.value.report.failures[0]
    assert failure.failure_class == "INFRA" and failure.attempts == 3


def test_starts_from_a_source():
    rows = [
        {"messages": [{"role": "user", "content": f"1+{n}?"}], "metadata": {"ground_truth": str(1 + n)}}
        for n in range(3)
    ]
    policy = ScriptedPolicy(lambda messages: str(eval(messages[0]["content"][:-1])))
    episodes = collect_episodes(policy, Maths, 5, source=EpisodeSource(rows), **QUIET)
    assert [row["messages"][0]["content"] for row in episodes] == ["1+0?", "1+1?", "1+2?", "1+0?", "1+1?"]
    assert episodes["return"] == [1.0] * 5
    with pytest.raises(TooManyFailures, match="EpisodeSource"):
        collect_episodes(policy, Maths, 5, **QUIET)


def test_options_reach_the_environment():
    class WithOptions(Endless):
        def reset(self, *, seed, options=None):
            super().reset(seed=seed)
            return f"Begin with {options['what']}.", {}

    def first(**kwargs):
        episodes = collect_episodes(Cut("eos"), WithOptions, 2, max_turns=1, **kwargs, **QUIET)
        return [row["messages"][0]["content"] for row in episodes]

    assert first(options={"what": "tea"}) == ["Begin with tea."] * 2
    assert first(options=[{"what": "tea"}, {"what": "milk"}]) == ["Begin with tea.", "Begin with milk."]


def test_tokens_are_kept(make_model, tokenizer):
    policy = ModelPolicy(make_model(), tokenizer, max_new_tokens=5)
    episodes = collect_episodes(policy, Endless, 3, max_turns=2, on_length="continue", keep_tokens=True, **QUIET)
    for row in episodes:
        replies = [message["content"] for message in row["messages"] if message["role"] == "assistant"]
        for text, tokens, logprobs in zip(replies, row["turn_token_ids"], row["turn_logprobs"], strict=True):
            assert tokenizer.decode(tokens, skip_special_tokens=True) == text
            assert len(tokens) == len(logprobs) and max(logprobs) <= 0
        starts = [i for i, message in enumerate(row["messages"]) if message["role"] == "assistant"]
        assert row["turn_prompt_ids"] == [policy.prompt(row["messages"][:start]) for start in starts]
    with pytest.raises(ValueError, match="keep_tokens"):
        collect_episodes(RandomPolicy(), TreasureHunt, 3, keep_tokens=True, **QUIET)


@pytest.mark.parametrize("template", ["chat", "plain"])
def test_trainers_take_the_episodes_as_they_are(template, make_model, make_tokenizer, tokenizer, tmp_path):
    if template == "plain":
        tokenizer = make_tokenizer(PLAIN_CHAT_TEMPLATE)
    mixed = collect_episodes(RandomPolicy(), TreasureHunt, 8, max_turns=3, **QUIET)
    assert {True, False} == set(mixed["truncated"])
    trainer = ILQLTrainer(
        make_model(),
        ILQLConfig(
            str(tmp_path),
            max_steps=2,
            per_device_train_batch_size=4,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
        ),
        train_dataset=mixed,
        processing_class=tokenizer,
    )
    assert math.isfinite(trainer.train().training_loss)
    prepared = trainer.train_dataset
    assert prepared["truncated"] == mixed["truncated"]
    assert [sum(rewards) for rewards in prepared["rewards"]] == pytest.approx(mixed["return"])


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({}, "num_episodes"),
        ({"num_episodes": 3, "seeds": [1]}, "num_episodes"),
        ({"num_episodes": 3, "on_length": "stop"}, "on_length"),
        ({"num_episodes": 3, "batch_size": 0}, "batch_size"),
        ({"num_episodes": 3, "batch_size": 1.5}, "`batch_size` must be a whole number of at least 1, got 1.5"),
        ({"num_episodes": 3, "batch_size": None}, "batch_size"),
        ({"num_episodes": 3, "max_turns": "3"}, "max_turns"),
        ({"num_episodes": 3, "max_turns": math.nan}, "max_turns"),
        ({"num_episodes": 3, "max_seq_len": -1}, "max_seq_len"),
        ({"num_episodes": 0}, "`num_episodes` must be a whole number of at least 1, got 0"),
        ({"num_episodes": -1}, "num_episodes"),
        ({"num_episodes": 2.5}, "num_episodes"),
        ({"num_episodes": True}, "num_episodes"),
        ({"seeds": []}, "at least one seed"),
        ({"seeds": 4}, "num_episodes=4"),
        ({"seeds": np.int64(4)}, "num_episodes=4"),
        ({"seeds": 2.5}, "num_episodes"),
        ({"seeds": "12"}, "whole numbers in a list"),
        ({"seeds": {1: 2}}, "whole numbers in a list"),
        ({"seeds": [-1]}, "0 <= seed"),
        ({"seeds": [1.0]}, "0 <= seed"),
        ({"num_episodes": 3, "options": [{}]}, "options"),
        ({"num_episodes": 3, "options": "abc"}, "`options` is one dict"),
        ({"num_episodes": 3, "options": 5}, "`options` is one dict"),
        ({"num_episodes": 3, "options": [{}, {}, 5]}, "`options` is one dict"),
        ({"num_episodes": 3, "split": "holdout"}, "split"),
        ({"num_episodes": 3, "max_error_rate": -0.1}, "max_error_rate"),
        ({"num_episodes": 3, "max_error_rate": 10}, "max_error_rate"),
        ({"num_episodes": 3, "max_error_rate": math.nan}, "max_error_rate"),
        ({"num_episodes": 3, "task": None}, "`task` is the name of the task"),
        ({"num_episodes": 3, "run_seed": 1.5}, "0 <= seed"),
        ({"num_episodes": 3, "executor": 5}, "`executor` must be an `Executor` or make one"),
        ({"num_episodes": 3, "executor": ProcessExecutor}, "partial.ProcessExecutor, num_workers=4"),
        ({"num_episodes": 3, "executor": lambda factory: 5}, "it made a `int`"),
        ({"num_episodes": 3, "policy": None}, "`policy` must be a `Policy`"),
        ({"num_episodes": 3, "policy": RandomPolicy}, "the class `RandomPolicy`: make an object"),
        ({"num_episodes": 3, "policy": len}, "`ScriptedPolicy.function.` makes a policy"),
    ],
)
def test_contradictions(arguments, message, tmp_path):
    arguments = {"policy": RandomPolicy(), "env": TreasureHunt, **arguments}
    with pytest.raises((TypeError, ValueError), match=message):
        collect_episodes(output_dir=tmp_path / "out", **arguments, **QUIET)
    # Nothing was played, nor begun.
    files = [*tmp_path.rglob("episodes.jsonl")]
    assert "made a" in message or not files


def test_whole_numbers_of_any_kind():
    expected = collect_episodes(RandomPolicy(), TreasureHunt, 3, max_turns=2, **QUIET).to_list()
    count, turns = np.int64(3), np.uint8(2)
    assert collect_episodes(RandomPolicy(), TreasureHunt, count, max_turns=turns, **QUIET).to_list() == expected
    expected = collect_episodes(RandomPolicy(), TreasureHunt, seeds=[3, 1, 3], **QUIET).to_list()
    for seeds in (np.array([3, 1, 3]), iter([3, 1, 3])):
        assert collect_episodes(RandomPolicy(), TreasureHunt, seeds=seeds, **QUIET).to_list() == expected


def circular():
    info = {}
    info["again"] = info
    return info


BAD = {
    "reward": ("x", 1e39, False, False, {}),
    "surrogate": ("\ud800", 0.0, False, False, {}),
    "surrogate in the information": ("x", 0.0, True, False, {"x": "\ud800"}),
    "digits": ("x", 0.0, True, False, {"x": 10**5000}),
    "circular": ("x", 0.0, True, False, circular()),
    "success": ("x", 0.0, True, False, {"success": "yes"}),
    "flag": ("x", 0.0, "False", False, {}),
    "message": ([{"role": "user", "content": "x", "set": {1}}], 0.0, True, False, {}),
    "few-shot": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}],
    "no content": [{"role": "user"}],
    "surrogate at the start": "\ud800",
    "nothing": [],
}


class OneBad(TreasureHunt):
    """In the episode with the seed 5 it says what it should not."""

    def __init__(self, what):
        super().__init__()
        self.bad = BAD[what]

    def reset(self, *, seed, options=None):
        self.seed = seed
        first = super().reset(seed=seed)
        return (self.bad, {}) if seed == 5 and not isinstance(self.bad, tuple) else first

    def step(self, action):
        return self.bad if self.seed == 5 else super().step(action)


@pytest.mark.parametrize("what", BAD)
def test_one_bad_value_is_one_failure(what, tmp_path):
    arguments = {"seeds": range(10), "max_turns": 3, "output_dir": tmp_path, "return_report": True, **QUIET}
    episodes, report = collect_episodes(RandomPolicy(), partial(OneBad, what), **arguments)
    assert episodes["seed"] == [0, 1, 2, 3, 4, 6, 7, 8, 9]
    assert [(failure.seed, failure.failure_class) for failure in report.failures] == [(5, "DATA")]
    assert json.loads((tmp_path / "failures.jsonl").read_text())["seed"] == 5
    assert sorted(from_jsonl(tmp_path / "episodes.jsonl")["seed"]) == episodes["seed"]


@pytest.mark.parametrize("told, success", [(1, True), (np.False_, False), (torch.tensor(True), True), (None, None)])
def test_success_is_a_bool(told, success):
    class Telling(Endless):
        def step(self, action):
            return "x", 1.0, True, False, {"success": told}

    assert collect_episodes(RandomPolicy(["a."]), Telling, 1, **QUIET)["success"] == [success]


def test_integers_of_any_length_are_stored():
    class Counting(Endless):
        def step(self, action):
            return "x", 1.0, True, False, {"id": 2**70}

    (row,) = collect_episodes(RandomPolicy(["a."]), Counting, 1, **QUIET)
    assert row["info"]["turns"] == [{"id": str(2**70)}]


def test_options_that_the_environment_changes_stay_as_they_are():
    class Taking(Endless):
        failed = False

        def reset(self, *, seed, options=None):
            return f"Level {options.pop('level')}. {super().reset(seed=seed)[0]}", {}

        def step(self, action):
            # So that it is played again.
            if self.turns == 1 and not Taking.failed:
                Taking.failed = True
                raise ConnectionError
            return super().step(action)

    options = {"level": 7}
    arguments = {"options": options, "batch_size": 2, "max_turns": 2, **QUIET}
    episodes = collect_episodes(RandomPolicy(["a."]), Taking, 4, **arguments)
    assert all(row["messages"][0]["content"].startswith("Level 7.") for row in episodes) and Taking.failed
    assert options == {"level": 7}


def test_an_environment_that_is_shared_is_refused():
    shared = TreasureHunt()
    with pytest.raises(TooManyFailures, match="another conversation is being played"):
        collect_episodes(RandomPolicy(), lambda: shared, 4, **QUIET)
    one_by_one = collect_episodes(RandomPolicy(), lambda: shared, 4, batch_size=1, **QUIET)
    assert one_by_one["messages"] == collect_episodes(RandomPolicy(), TreasureHunt, 4, **QUIET)["messages"]


class Leveled(Endless):
    def __init__(self, names=()):
        self.names = names

    def reset(self, *, seed, options=None):
        super().reset(seed=seed)
        return f"Begin with {options}.", {}


def test_episodes_of_other_samples_or_options_are_not_taken_for_each_other(tmp_path):
    def collect(*args, output_dir=tmp_path, **kwargs):
        arguments = {"max_turns": 2, "return_report": True, **kwargs, **QUIET}
        return collect_episodes(
            RandomPolicy([f"{i}." for i in range(50)]), Leveled, *args, output_dir=output_dir, **arguments
        )

    counted, _ = collect(4)
    given, report = collect(seeds=counted["seed"])
    fresh, _ = collect(seeds=counted["seed"], output_dir=None)
    assert report.n_resumed < 4 and given.to_list() == fresh.to_list()
    # The second of two, in the same place as the first.
    collect(seeds=[7, 9, 9])
    again, report = collect(seeds=[7, 8, 9])
    assert report.n_resumed == 1 and again.to_list() == collect(seeds=[7, 8, 9], output_dir=None)[0].to_list()
    # Options of single episodes can be extended, and changed.
    levels = [{"level": i} for i in range(4)]
    folder = tmp_path / "levels"
    collect(3, options=levels[:3], output_dir=folder)
    more, report = collect(4, options=levels, output_dir=folder)
    assert report.n_resumed == 3 and more.to_list() == collect(4, options=levels, output_dir=None)[0].to_list()
    other, report = collect(4, options=[*levels[:3], {"level": 9}], output_dir=folder)
    assert report.n_resumed == 3 and other[3]["messages"][0]["content"] == "Begin with {'level': 9}."
    with pytest.raises(ValueError, match="options"):
        collect(4, options={"level": 1}, output_dir=folder)
    assert len(set(more["episode_id"]) | set(other["episode_id"])) == 5


class Stateful(Policy):
    def __init__(self, text):
        self.text = text

    def act(self, conversations, stop_strings, seeds, **context):
        return [Action(self.text) for _ in conversations]


class StatefulWithName(Stateful):
    def identity(self):
        return {"id": self.text, "revision": None, "sampling": None}


def make_leveled():
    return Leveled()


NAMED = RandomPolicy(["a."])
NAMELESS = {
    "lambda": (lambda: Leveled(), NAMED, "environment"),
    "object": (as_environment(lambda: Leveled()), NAMED, "environment"),
    "functional": (Counting(), RandomPolicy(["!"]), "environment"),
    "partial of a lambda": (partial(lambda names: Leveled(), ["a"]), NAMED, "environment"),
    "object in a partial": (partial(Leveled, [object()]), NAMED, "environment"),
    "reply of a lambda": (Leveled, ScriptedPolicy(lambda messages: "a."), "policy"),
    "no identity": (Leveled, Stateful("a."), "policy"),
    "class": (Leveled, NAMED, None),
    "function": (make_leveled, NAMED, None),
    "object of a class": (as_environment(Leveled), NAMED, None),
    "partial": (partial(Leveled, names=["a", {"b": (1, np.float32(2.0), Endless)}]), NAMED, None),
    "name": (Leveled, ScriptedPolicy(lambda messages: "a.", name="says a"), None),
    "identity": (Leveled, StatefulWithName("a."), None),
}


@pytest.mark.parametrize("name", NAMELESS)
def test_what_cannot_be_compared_is_told(name, tmp_path, caplog):
    env, policy, what = NAMELESS[name]
    collect_episodes(policy, env, 1, max_turns=1, **QUIET)
    assert "cannot be checked" not in caplog.text
    collect_episodes(policy, env, 1, max_turns=1, output_dir=tmp_path, **QUIET)
    told = [record.getMessage() for record in caplog.records if "cannot be checked" in record.getMessage()]
    assert len(told) == (what is not None)
    assert what is None or f"the same {what} cannot be checked" in told[0]


def test_long_arguments_of_the_environment_are_stored_once(tmp_path):
    short, long = ["a"] * 100, ["a"] * 1000
    episodes = collect_episodes(NAMED, partial(Leveled, short), 2, max_turns=1, **QUIET)
    assert episodes["env_kwargs"] == [{"args": [short]}] * 2
    arguments = {"max_turns": 1, "output_dir": tmp_path, **QUIET}
    episodes = collect_episodes(NAMED, partial(Leveled, long), 20, **arguments)
    assert all(len(json.dumps(kwargs)) < 400 for kwargs in episodes["env_kwargs"])
    header, *rows = (tmp_path / "episodes.jsonl").read_text().splitlines()
    assert json.loads(header)["config"]["env_kwargs"] == {"args": [long]}
    assert max(map(len, rows)) < 2000
    other = collect_episodes(NAMED, partial(Leveled, [*long, "b"]), 1, max_turns=1, **QUIET)
    assert other[0]["env_kwargs"]["sha256"] != episodes[0]["env_kwargs"]["sha256"]
    with pytest.raises(ValueError, match="env_kwargs"):
        collect_episodes(NAMED, partial(Leveled, [*long, "b"]), 1, **arguments)


@pytest.mark.parametrize("column", ["messages", "turn_rewards", "return", "terminated", "episode_id"])
def test_a_damaged_line_of_the_journal_is_named(column, tmp_path):
    collect_episodes(NAMED, Leveled, 3, max_turns=1, output_dir=tmp_path, **QUIET)
    path = tmp_path / "episodes.jsonl"
    lines = path.read_text().splitlines()
    row = json.loads(lines[2])
    del row[column]
    lines[2] = json.dumps(row)
    path.write_text("\n".join([*lines, ""]))
    before = path.read_bytes()
    with pytest.raises(ValueError, match=rf"Line 3 of .*episodes.jsonl .*{column}"):
        collect_episodes(NAMED, Leveled, 3, max_turns=1, output_dir=tmp_path, **QUIET)
    assert path.read_bytes() == before


def test_the_journal_is_read_as_a_dataset(tmp_path):
    episodes = collect_episodes(RandomPolicy(), TreasureHunt, 3, output_dir=tmp_path, **QUIET)
    # In the order in which the episodes ended.
    journal = sorted(from_jsonl(tmp_path / "episodes.jsonl"), key=lambda row: episodes["seed"].index(row["seed"]))
    assert journal == episodes.to_list()


def test_report_counts():
    assert CollectionReport(5, n_ok=2).n_pending == 3
