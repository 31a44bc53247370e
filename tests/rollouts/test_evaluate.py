# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
import dataclasses
import io
import math
import random
import statistics

import numpy as np
import pytest
import torch
from rich.console import Console

from hf_qrl.environments import as_environment, episode_seed
from hf_qrl.environments.games.scores import SCALES
from hf_qrl.environments.sessions import TextEnvironment
from hf_qrl.rollouts import (
    ModelPolicy,
    RandomPolicy,
    ScriptedPolicy,
    TooManyFailures,
    bootstrap_mean,
    compare_policies,
    evaluate,
    evaluate_policy,
)
from hf_qrl.rollouts.evaluate import post_process_batch
from tests.environments.games_for_tests import TreasureHunt
from tests.rollouts.games import Broken, Counting, Endless


def slow_bootstrap(values, confidence, num_resamples):
    generator = random.Random(1)
    means = sorted(statistics.fmean(generator.choices(values, k=len(values))) for _ in range(num_resamples))
    tail = (1 - confidence) / 2
    return means[int(tail * num_resamples)], means[int((1 - tail) * num_resamples) - 1]


@pytest.mark.parametrize("confidence", [0.5, 0.95])
def test_bootstrap_agrees_with_a_slow_one(confidence):
    values = np.random.default_rng(0).exponential(size=60).tolist()
    interval = bootstrap_mean(values, confidence=confidence, num_resamples=20_000)
    low, high = slow_bootstrap(values, confidence, 5_000)
    assert interval.mean == pytest.approx(statistics.fmean(values))
    assert interval.low == pytest.approx(low, abs=0.02) and interval.high == pytest.approx(high, abs=0.02)
    assert bootstrap_mean(values) == bootstrap_mean(values)


def test_bootstrap_of_little():
    assert math.isnan(bootstrap_mean([]).mean)
    one = bootstrap_mean([2.0])
    assert one.mean == 2.0 and math.isnan(one.low) and math.isnan(one.high)
    assert bootstrap_mean([3.0, 3.0]) == (3.0, 3.0, 3.0)
    with pytest.raises(ValueError, match="confidence"):
        bootstrap_mean([1.0, 2.0], confidence=95)


def test_measures_are_those_of_the_transcripts():
    policy = RandomPolicy(["walk left\n", "walk right\n", "dig\n", "sing\n"])
    result = evaluate_policy(policy, TreasureHunt, 60, max_turns=3, scale=(-4.0, -0.5, 1.0))
    rows = result.transcripts.to_list()
    assert [row["seed"] for row in rows] == [episode_seed(i, "validation") for i in range(60)]
    assert (result.n_requested, result.n_ok, result.n_error) == (60, 60, 0)
    returns = [sum(row["turn_rewards"]) for row in rows]
    assert result.mean_return.mean == pytest.approx(statistics.fmean(returns))
    low, high = slow_bootstrap(returns, 0.95, 5_000)
    assert result.mean_return.low == pytest.approx(low, abs=0.03)
    assert result.mean_return.high == pytest.approx(high, abs=0.03)
    # The game tells only at the end of an episode; one that was stopped before is no success.
    found = [row["messages"][-1]["content"] == "Gold!" for row in rows]
    assert any(row["success"] is None for row in rows)
    assert result.success_rate == pytest.approx(statistics.fmean(found)) and 0 < result.success_rate < 1
    assert result.mean_turns == pytest.approx(statistics.fmean(len(row["turn_rewards"]) for row in rows))
    assert result.truncations == {"max_turns": pytest.approx(sum(row["truncated"] for row in rows) / 60)}
    turns = [reward for row in rows for reward in row["turn_rewards"]]
    # A wall is as illegal as a song, for the game.
    assert result.invalid_action_rate == pytest.approx(turns.count(-0.5) / len(turns))
    mean = result.mean_return.mean
    expected = 50 * (mean + 4) / 3.5 if mean <= -0.5 else 50 + 50 * (mean + 0.5) / 1.5
    assert result.normalized_score == pytest.approx(expected)
    metrics = result.metrics()
    assert metrics["return"] == result.mean_return.mean and metrics["truncated_max_turns"] > 0
    assert all(isinstance(number, float) for number in metrics.values())
    assert len(SCALES["maze"]) == 3


def test_a_policy_that_never_succeeds_is_told_from_a_game_that_does_not_tell(hunter):
    never = ScriptedPolicy(lambda messages: "sing\n")
    policies = {"never": never, "hunter": hunter}
    results = compare_policies(policies, TreasureHunt, 8, max_turns=2, verbose=False).results
    assert results["never"].success_rate == 0.0 and results["hunter"].success_rate > 0
    results = compare_policies({"a": never, "b": never}, Endless, 4, max_turns=2, verbose=False).results
    assert results["a"].success_rate is None is results["b"].success_rate


class Babbling(ScriptedPolicy):
    """Its replies are cut at their length."""

    def __init__(self):
        super().__init__(lambda messages: "walk and walk and")

    def act(self, *args, **kwargs):
        return [dataclasses.replace(action, finish="length") for action in super().act(*args, **kwargs)]


def test_a_policy_that_babbles_pays_for_every_turn():
    babbling, honest = Babbling(), RandomPolicy(["walk left\n", "walk right\n", "dig\n"])
    results = compare_policies({"a": babbling, "b": honest}, TreasureHunt, 20, max_turns=8, verbose=False).results
    assert results["a"].mean_return.mean < results["b"].mean_return.mean
    assert "length" not in results["a"].truncations
    cut = evaluate_policy(babbling, TreasureHunt, 20, on_length="truncate")
    assert cut.truncations == {"length": 1.0} and cut.mean_return.mean > results["a"].mean_return.mean


def test_failures_are_counted_apart(hunter):
    result = evaluate_policy(hunter, Broken, range(40), max_error_rate=1.0)
    assert 0 < result.n_error == len(result.failures) and result.n_ok + result.n_error == 40
    assert result.success_rate == 1.0
    with pytest.raises(TooManyFailures):
        evaluate_policy(hunter, Broken, range(40), max_error_rate=0.0)
    nothing = evaluate_policy(hunter, Broken, [0, 0], max_error_rate=1.0)
    if nothing.n_ok == 0:
        assert math.isnan(nothing.mean_return.mean)


def test_the_environment_measures_too():
    policy = ScriptedPolicy(lambda messages: "one!")
    result = evaluate_policy(policy, Counting(), 12)
    # Its reward is -0.5 per turn and 1 at the end.
    positive = [total > 0 for total in result.transcripts["return"]]
    assert result.environment_metrics == {"accuracy": pytest.approx(statistics.fmean(positive)), "n": 12}
    assert result.metrics()["environment_n"] == 12 and result.environment_metrics_error is None
    assert result.success_rate is None and result.invalid_action_rate is None

    class Careless(Counting):
        def global_post_process_and_metrics(self, batch):
            return batch, {"x": batch["no such key"]}

    careless = evaluate_policy(policy, Careless(), 12)
    assert careless.environment_metrics == {} and "no such key" in careless.environment_metrics_error
    assert careless.mean_return == result.mean_return


def test_what_environments_read(make_model, tokenizer):
    result = evaluate_policy(RandomPolicy(["ab", "c"]), Endless, [0, 1, 0], max_turns=3)
    batch = post_process_batch(result.transcripts)
    assert batch["text"].tolist()[0] == batch["text"].tolist()[2] == [ord(letter) for letter in "Begin 0."]
    assert batch["total_reward"].tolist() == [3.0] * 3 and batch["is_end"].tolist() == [0.0] * 3
    assert batch["truncated"].tolist() == [True] * 3 and batch["idx"] == [0, 1, 2]
    spoken = [
        sum(len(message["content"]) for message in row["messages"] if message["role"] == "assistant")
        for row in result.transcripts
    ]
    assert batch["generation_lengths"].tolist() == spoken
    assert batch["prompt_lengths"].tolist() == [len("Begin 0.")] * 3
    policy = ModelPolicy(make_model(), tokenizer, max_new_tokens=4)
    batch = post_process_batch(evaluate_policy(policy, Endless, [0, 1], max_turns=2).transcripts)
    assert batch["prompt_lengths"].tolist() == [len(policy.prompt([{"role": "user", "content": "Begin 0."}]))] * 2


def test_long_prompts_are_bounded_and_told_apart():
    class Long(Endless):
        def reset(self, *, seed, options=None):
            super().reset(seed=seed)
            return "x" * (5000 if seed < 2 else 4999) + ("" if seed == 3 else "y"), {}

    result = evaluate_policy(RandomPolicy(["a"]), Long, [0, 1, 2, 3], max_turns=1)
    batch = post_process_batch(result.transcripts)
    assert batch["text"].shape == (4, 1024) and batch["prompt_lengths"].tolist() == [5001, 5001, 5000, 4999]
    assert torch.equal(batch["text"][0], batch["text"][1])
    assert len(torch.unique(batch["text"], dim=0)) == 3


@pytest.mark.parametrize("env", [Endless, as_environment(Endless)])
def test_nothing_is_sent_to_those_that_measure_nothing(env, monkeypatch):
    monkeypatch.setattr(evaluate, "post_process_batch", None)
    assert evaluate_policy(RandomPolicy(["a"]), env, 2, max_turns=1).environment_metrics == {}

    class Measuring(TextEnvironment):
        def global_post_process_and_metrics(self, batch):
            return batch, {"n": 7}

    monkeypatch.undo()
    result = evaluate_policy(RandomPolicy(["a"]), Measuring(Endless), 2, max_turns=1)
    assert result.environment_metrics == {"n": 7}


@pytest.mark.parametrize(
    "arguments",
    [
        {"confidence": 95},
        {"confidence": "0.95"},
        {"num_resamples": 0},
        {"num_resamples": 1.5},
        {"scale": (1.0, 2.0)},
        {"scale": (1.0, 2.0, math.nan)},
        {"scale": "maze"},
        {"seeds": 0},
        {"seeds": -1},
        {"seeds": 2.0},
        {"seeds": True},
        {"seeds": None},
        {"seeds": "12"},
        {"seeds": [1.5]},
        {"seeds": {1: 2}},
    ],
)
def test_arguments_are_checked_before_anything_is_played(arguments):
    def no_policy(messages):
        raise AssertionError("something was played")

    arguments = {"seeds": 3, **arguments}
    with pytest.raises(ValueError, match=f"`?{[*arguments][-1].rstrip('s')}"):
        evaluate_policy(ScriptedPolicy(no_policy), Endless, **arguments)
    with pytest.raises(ValueError, match=f"`?{[*arguments][-1].rstrip('s')}"):
        compare_policies({"a": ScriptedPolicy(no_policy)}, Endless, **arguments)


def test_seeds_of_any_kind_are_the_same_seeds():
    expected = evaluate_policy(RandomPolicy(), TreasureHunt, [3, 1, 4]).transcripts.to_list()
    for seeds in (np.array([3, 1, 4]), iter([3, 1, 4]), (3, np.int64(1), np.uint8(4))):
        assert evaluate_policy(RandomPolicy(), TreasureHunt, seeds).transcripts.to_list() == expected
    assert evaluate_policy(RandomPolicy(), TreasureHunt, np.int64(3)).transcripts["seed"] == [
        episode_seed(i, "validation") for i in range(3)
    ]
    results = compare_policies({"a": RandomPolicy(), "b": RandomPolicy()}, TreasureHunt, iter([3, 1]), verbose=False)
    assert [result.transcripts["seed"] for result in results.results.values()] == [[3, 1]] * 2


def test_each_policy_has_a_folder_of_its_own(hunter, tmp_path):
    # Without names that tell them apart.
    policies = {
        "good": ScriptedPolicy(lambda messages: hunter.function(messages)),
        "bad": ScriptedPolicy(lambda messages: "sing\n"),
        "../bad": ScriptedPolicy(lambda messages: "dig\n"),
        ".. bad": ScriptedPolicy(lambda messages: "walk left\n"),
    }
    arguments = {"max_turns": 4, "verbose": False}
    expected = compare_policies(policies, TreasureHunt, 6, **arguments)
    for _ in range(2):
        comparison = compare_policies(policies, TreasureHunt, 6, output_dir=tmp_path, **arguments)
        assert comparison.differences == expected.differences
        for name, result in comparison.results.items():
            assert result.transcripts["messages"] == expected.results[name].transcripts["messages"]
    folders = comparison.output_dirs
    assert folders["good"] == tmp_path / "good" and folders["bad"] == tmp_path / "bad"
    assert sorted(tmp_path.iterdir()) == sorted(folders.values()) and len(set(folders.values())) == 4
    assert all((folder / "episodes.jsonl").exists() for folder in folders.values())
    assert expected.output_dirs == {}


def test_what_is_no_policy_is_refused_before_another_one_plays():
    def no_policy(messages):
        raise AssertionError("something was played")

    with pytest.raises(TypeError, match="the class `RandomPolicy`"):
        compare_policies({"a": ScriptedPolicy(no_policy), "b": RandomPolicy}, Endless, 3)
    with pytest.raises(TypeError, match="must have names"):
        compare_policies([RandomPolicy()], Endless, 3)


@pytest.mark.parametrize("width", [80, 100, 140])
def test_the_table_is_whole_on_narrow_screens(width, hunter):
    results = compare_policies(
        {"hunter": hunter, "a rather long name": RandomPolicy()}, TreasureHunt, 9, verbose=False
    )
    console = Console(width=width, file=io.StringIO())
    console.print(results.table())
    printed = console.file.getvalue()
    assert "hunter" in printed and "long" in printed and "..." not in printed
    for interval in [result.mean_return for result in results.results.values()]:
        assert all(f"{number:.3g}" in printed for number in interval)


def test_policies_are_compared_seed_by_seed(hunter, capsys):
    comparison = compare_policies({"random": RandomPolicy(), "hunter": hunter, "again": hunter}, TreasureHunt, 40)
    assert comparison.baseline == "random" and set(comparison.differences) == {"hunter", "again"}
    worst, best = (comparison.results[name].transcripts for name in ("random", "hunter"))
    assert worst["seed"] == best["seed"]
    differences = [b - a for a, b in zip(worst["return"], best["return"], strict=True)]
    difference = comparison.differences["hunter"]
    assert difference.mean == pytest.approx(statistics.fmean(differences))
    low, high = slow_bootstrap(differences, 0.95, 5_000)
    assert difference.low == pytest.approx(low, abs=0.03) and difference.high == pytest.approx(high, abs=0.03)
    printed = capsys.readouterr().out
    assert "hunter" in printed and "random" in printed
    alike = compare_policies({"a": hunter, "b": hunter}, TreasureHunt, 5, verbose=False)
    assert alike.differences["b"] == (0.0, 0.0, 0.0)
    assert capsys.readouterr().out == ""
    with pytest.raises(ValueError, match="nothing to compare"):
        compare_policies({}, TreasureHunt, 5)


def test_pairs_leave_out_what_one_has_not_played(hunter):
    dig = ScriptedPolicy(lambda messages: "dig\n")
    # The map burns in the second turn, so who digs at once never sees it.
    comparison = compare_policies({"dig": dig, "hunter": hunter}, Broken, range(40), max_error_rate=1.0, verbose=False)
    assert comparison.results["dig"].n_ok == 40 > comparison.results["hunter"].n_ok
    played = dict(zip(*(comparison.results["hunter"].transcripts[name] for name in ("seed", "return")), strict=True))
    dug = dict(zip(*(comparison.results["dig"].transcripts[name] for name in ("seed", "return")), strict=True))
    expected = statistics.fmean(played[seed] - dug[seed] for seed in played)
    assert comparison.differences["hunter"].mean == pytest.approx(expected)
