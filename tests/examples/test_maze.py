"""What the example adds to the maze of the library, and a run of a few steps from the data to the picture."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from hf_qrl import AutoModelForCausalLMWithILQLHeads
from hf_qrl.environments.games.maze import (
    CELLS,
    DIRECTIONS,
    STARTS,
    action_text,
    describe,
    describe_walls,
    optimal_directions,
)
from hf_qrl.rollouts import ModelPolicy


EXAMPLE = Path(__file__).parents[2] / "examples" / "maze.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("maze_example", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture(scope="module")
def arguments(example, tmp_path_factory):
    folder = tmp_path_factory.mktemp("maze")
    return example.ScriptArguments(
        output_dir=folder,
        seeds=[0],
        steps=2,
        baseline_steps=2,
        episodes=12,
        samples=1,
        baseline_samples=0,
        processes=1,
        qrlhf=True,
        qrlhf_steps=2,
    )


def test_tokenizer_loses_nothing_and_actions_are_single_tokens(example):
    tokenizer = example.make_tokenizer()
    texts = [describe(cell) + "\n" for cell in CELLS] + [describe_walls(cell) + "\n" for cell in CELLS]
    texts += [action_text(way, short) for way in DIRECTIONS for short in (True, False)]
    texts += [
        describe_walls(STARTS[0]) + "\nmove left\n" + describe_walls(STARTS[0]) + "\n",
        "l" + describe(STARTS[0]),
    ]
    for text in texts:
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer(" move" + describe_walls(STARTS[0]))["input_ids"]  # not an action, and all the same an answer
    assert {len(tokenizer(action_text(way, True))["input_ids"]) for way in DIRECTIONS} == {1}
    assert {len(tokenizer(action_text(way))["input_ids"]) for way in DIRECTIONS} == {3}


def test_rows_are_the_distinct_turns_and_every_context_weighs_the_same(example, arguments):
    episodes = example.make_episodes(arguments)
    rows = example.transitions(episodes)
    weights: dict[str, float] = {}
    for row in rows:
        (seen,) = row["prompt"]
        weights[seen["content"]] = weights.get(seen["content"], 0.0) + row["weight"]
        assert row["terminated"] == (len(row["completion"]) == 1)
    assert set(weights) <= {describe(cell) + "\n" for cell in STARTS}
    assert weights == pytest.approx(dict.fromkeys(weights, 1.0))
    assert len({json.dumps([row["prompt"], row["completion"], row["rewards"]]) for row in rows}) == len(rows)

    longer = example.transitions(episodes, history_window=2)
    assert {len(row["prompt"]) for row in longer} == {1, 3}
    roles = next(row["prompt"] for row in longer if len(row["prompt"]) == 3)
    assert [message["role"] for message in roles] == ["user", "assistant", "user"]


def test_returns_to_go_are_discounted_means(example):
    episodes = example.episodes_dataset(
        [
            example.make_episode(
                [
                    {"role": "user", "content": "a"},
                    {"role": "assistant", "content": "l"},
                    {"role": "user", "content": "b"},
                    {"role": "assistant", "content": "r"},
                    {"role": "user", "content": "Success\n"},
                ],
                [-1.0, reward],
                terminated=True,
            )
            for reward in (0.0, -2.0)
        ]
    )
    rows = {row["prompt"][0]["content"]: row for row in example.returns_to_go(episodes)}
    assert rows["a"]["rewards"] == pytest.approx([-1 - example.GAMMA])
    assert rows["b"]["rewards"] == pytest.approx([-1.0])
    assert all(row["terminated"] and row["weight"] == 1.0 for row in rows.values())


@pytest.mark.parametrize("textual", [False, True])
def test_exact_probabilities_agree_with_what_is_played(example, arguments, textual):
    arguments = example.ScriptArguments(**{**vars(arguments), "textual": textual})
    job = example.Job("any", 0, example.transitions(example.make_episodes(arguments)), steps=2)
    model = AutoModelForCausalLMWithILQLHeads.from_pretrained(example.train(job, arguments)[0]).eval()
    policy, values = example.inspect(model, arguments, beta=1.0)
    assert set(policy) == set(values) == set(STARTS)
    assert all(0 < sum(chances.values()) <= 1 + 1e-5 for chances in policy.values())
    # The same probabilities, as the policy reports them that plays.
    player = ModelPolicy(model, example.make_tokenizer(), beta=1.0, max_new_tokens=3 if textual else 1)
    seeds = [example.np.random.SeedSequence(i) for i in range(len(STARTS))]
    conversations = [[{"role": "user", "content": describe(cell) + "\n"}] for cell in STARTS]
    names = {action_text(way, not textual): way for way in DIRECTIONS}
    stops = [["\n"] if textual else list(names)] * len(STARTS)
    checked = 0
    for cell, action in zip(STARTS, player.act(conversations, stops, seeds), strict=True):
        if action.text in names:
            chance = example.np.exp(sum(action.logprobs))
            assert policy[cell][names[action.text]] == pytest.approx(chance, rel=1e-3)
            checked += 1
    assert textual or checked > 0


def test_share_right(example):
    best = optimal_directions()
    right = {cell: {way: float(way == best[cell][0]) for way in DIRECTIONS} for cell in STARTS}
    assert example.share_right(right) == 1.0


def test_short_run(example, arguments, capsys):
    table = example.main(arguments)
    assert {"BC", "filtered BC, successes", "filtered BC, best 10%", "MC", "ILQL, seed 0", "QRLHF, seed 0"} <= set(
        table
    )
    assert table["optimum"]["return"] == pytest.approx(-6.84)
    assert table["LMRL-Gym's ILQL"] == {"return": -6.97, "normalized": 99.9}
    assert table["ILQL, seed 0"]["n"] == 25
    assert json.loads((arguments.output_dir / "results.json").read_text()) == table
    assert "optimum" in capsys.readouterr().out
    folders = {path.parent.name for path in arguments.output_dir.glob("*/model.safetensors")}
    assert {"ILQL-seed_0", "filtered_BC-successes", "filtered_BC-best_10", "MC"} <= folders
    assert "ILQL" in (arguments.output_dir / "ILQL-seed_0" / "README.md").read_text()
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return
    assert (arguments.output_dir / "maze.png").stat().st_size > 0


def test_a_history_is_for_the_partially_observed_maze(example, arguments):
    with pytest.raises(ValueError, match="partially_observed"):
        example.main(example.ScriptArguments(output_dir=arguments.output_dir, history_window=2))
