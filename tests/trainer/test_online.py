# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""Trainers that play: what is in the replay and in the batches, budgets, and runs that go on from a checkpoint."""

import copy
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import TrainerCallback

from hf_qrl import ILQLConfig, ILQLTrainer, LlamaDuelingQForCausalLM, QRLHFConfig, QRLHFTrainer
from hf_qrl.data import prepare_dataset
from hf_qrl.data.episodes import from_jsonl, make_episode
from hf_qrl.environments import episode_seed
from hf_qrl.environments.resetting import EpisodeSource, NumberedStarts
from hf_qrl.rollouts import RandomPolicy, TooManyFailures, collect_episodes
from hf_qrl.trainer.mixing import RowMixer
from hf_qrl.trainer.replay import Replay, ReplayJournal
from tests.trainer.conftest import QUIET
from tests.trainer.online_env import TEMPLATE, Broken, Letters


PLAYING = {
    "episodes_per_collect": 3,
    "collect_every": 2,
    "collect_max_turns": 3,
    "collect_max_new_tokens": 2,
    "max_steps": 4,
    "learning_rate": 1e-2,
}


# Two tokens are a whole reply, though no end follows.
WHOLE: dict = {"collect_kwargs": {"on_length": "continue"}}


@pytest.fixture
def reader(tokenizer):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture(scope="session")
def offline() -> Dataset:
    return collect_episodes(RandomPolicy(["a", "b c"]), Letters, 5, split="other", progress=False)


@pytest.fixture
def make_player(tmp_path, make_model, reader, offline):
    """Returns a function that makes an `ILQLTrainer` which plays; keyword arguments go into its `args`."""

    def make(
        train_dataset="offline", output_dir="out", model=None, environment=Letters, trainer_kwargs=None, **args
    ) -> ILQLTrainer:
        return ILQLTrainer(
            make_model(config={"eos_token_id": 2}) if model is None else model,
            args=ILQLConfig(str(tmp_path / output_dir), **{**QUIET, **PLAYING, **args}),
            train_dataset=offline if train_dataset == "offline" else train_dataset,
            processing_class=reader,
            environment=environment,
            **{**WHOLE, **(trainer_kwargs or {})},
        )

    return make


def journal_of(trainer) -> Path:
    return Path(trainer.args.output_dir) / "replay" / "episodes.jsonl"


def logged(trainer, key):
    return [(entry["step"], entry[key]) for entry in trainer.state.log_history if key in entry]


def tokens_of(rows) -> set[tuple[int, ...]]:
    return {tuple(ids) for ids in rows["input_ids"]}


class TestReplay:
    def test_contents_and_order(self, make_player):
        trainer = make_player(max_steps=5, episodes_per_collect=4)
        trainer.train()
        episodes = from_jsonl(journal_of(trainer))
        assert episodes["seed"] == [episode_seed(i) for i in range(12)]  # at steps 0, 2 and 4
        assert trainer.online.replay.episodes.to_list() == episodes.to_list()
        expected = prepare_dataset(episodes, trainer._tokenizer, **trainer._prepare_kwargs)
        assert trainer.online.replay.rows.to_list() == expected.to_list()

    def test_none_is_played_after_the_last_step(self, make_player):
        trainer = make_player(max_steps=4)
        trainer.train()
        assert [step for step, _ in logged(trainer, "env/return")] == [0, 2]

    def test_oldest_episodes_go(self, make_player):
        trainer = make_player(replay_size=4, max_steps=5, history_window=1)
        trainer.train()
        replay = trainer.online.replay
        assert len(from_jsonl(journal_of(trainer))) == 9
        assert replay.episodes["seed"] == [episode_seed(i) for i in range(5, 9)]
        expected = prepare_dataset(replay.episodes, trainer._tokenizer, **trainer._prepare_kwargs)
        assert replay.rows.to_list() == expected.to_list() and len(replay.rows) == 12
        assert logged(trainer, "replay/size") == [(0, 3), (2, 4), (4, 4)]

    def test_size_smaller_than_a_collection(self, make_player):
        trainer = make_player(replay_size=2)
        trainer.train()
        assert trainer.online.replay.episodes["seed"] == [episode_seed(4), episode_seed(5)]

    def test_rows_of_the_hook(self, make_player):
        seen = []

        def first_turns(episodes):
            seen.append(len(episodes))
            return Dataset.from_list(
                [
                    {"prompt": row["messages"][:1], "completion": row["messages"][1:2], "reward": 2.0, "weight": 0.5}
                    for row in episodes
                ]
            )

        trainer = make_player(trainer_kwargs={"prepare_replay": first_turns}, replay_size=5)
        trainer.train()
        assert seen == [3, 5]
        assert set(trainer.online.replay.rows["weight"]) == {0.5} and len(trainer.online.replay.rows) == 5

    def test_rewards_are_scaled_by_the_constants_of_the_start(self, make_player):
        trainer = make_player(reward_scaling="standardize", max_steps=3)
        mean, std = trainer.model.config.reward_mean, trainer.model.config.reward_std
        trainer.train()
        assert (trainer.model.config.reward_mean, trainer.model.config.reward_std) == (mean, std)
        for row, episode in zip(trainer.online.replay.rows, trainer.online.replay.episodes, strict=True):
            assert sum(row["rewards"]) == pytest.approx((episode["return"] - mean) / std)

    def test_earlier_run_is_set_aside(self, make_player):
        make_player(max_steps=1).train()
        trainer = make_player(max_steps=3)
        trainer.train()
        assert len(from_jsonl(journal_of(trainer))) == 6
        assert len(from_jsonl(journal_of(trainer).with_name("earlier_episodes.jsonl"))) == 3

    def test_failed_addition_changes_nothing(self):
        def prepare(dataset):
            if "bad" in dataset["task"]:
                raise ValueError("no rows")
            return Dataset.from_dict({"input_ids": [[1]] * len(dataset)})

        messages = [{"role": "user", "content": "b"}, {"role": "assistant", "content": "a"}]
        episodes = [make_episode(messages, [0.0], terminated=True, task=task) for task in ("good", "bad")]
        replay = Replay(prepare, size=1)
        replay.extend(episodes[:1])
        with pytest.raises(ValueError, match="no rows"):
            replay.extend(episodes[1:])
        assert replay.episodes["task"] == ["good"] and len(replay.rows) == 1


class TestMixing:
    offline = Dataset.from_dict({"x": [[i] for i in range(5)]})
    online = Dataset.from_dict({"x": [[100 + i] for i in range(7)]})

    def drawn(self, mixer, start, count):
        return [row["x"][0] for row in mixer.draw(start, count, self.online)]

    @pytest.mark.parametrize("fraction", [0.0, 0.25, 0.5, 0.3, 1 / 3, 1.0])
    def test_shares_are_exact(self, fraction):
        mixer = RowMixer(self.offline, fraction, seed=0)
        counts = [sum(x < 100 for x in self.drawn(mixer, 10 * i, 10)) for i in range(30)]
        assert all(abs(count - 10 * fraction) < 1 for count in counts)
        assert sum(counts) == round(300 * fraction)
        if (10 * fraction).is_integer():
            assert set(counts) == {round(10 * fraction)}

    def test_each_source_goes_through_epochs(self):
        rows = self.drawn(RowMixer(self.offline, 0.5, seed=0), 0, 70)
        offline, online = [x for x in rows if x < 100], [x for x in rows if x >= 100]
        epochs = [offline[i : i + 5] for i in range(0, 35, 5)]
        assert all(sorted(epoch) == list(range(5)) for epoch in epochs) and len(set(map(tuple, epochs))) > 1
        assert all(sorted(online[i : i + 7]) == list(range(100, 107)) for i in range(0, 35, 7))

    def test_a_row_follows_from_its_number(self):
        whole = self.drawn(RowMixer(self.offline, 0.3, seed=4), 0, 40)
        mixer = RowMixer(self.offline, 0.3, seed=4)
        assert self.drawn(mixer, 24, 8) + self.drawn(mixer, 8, 8) == whole[24:32] + whole[8:16]
        assert self.drawn(RowMixer(self.offline, 0.3, seed=5), 0, 40) != whole

    def test_without_training_data_all_rows_are_online(self):
        assert min(self.drawn(RowMixer(None, 0.5, seed=0), 0, 20)) >= 100

    def test_columns_are_completed(self):
        plain = Dataset.from_dict({"input_ids": [[1, 2]]})
        rich = Dataset.from_dict(
            {
                "input_ids": [[3]],
                "attention_mask": [[1]],
                "weight": [0.5],
                "truncated": [True],
                "next_input_ids": [[4]],
            }
        )
        row = RowMixer(plain, 1.0, 0).draw(0, 1, rich)[0]
        assert row == {"input_ids": [1, 2]}
        rows = RowMixer(plain, 0.5, 0).draw(0, 2, rich)
        completed = next(row for row in rows if row["input_ids"] == [1, 2])
        assert completed == {
            "input_ids": [1, 2], "attention_mask": [1, 1], "weight": 1.0, "truncated": False, "next_input_ids": [],
        }  # fmt: skip
        with pytest.raises(ValueError, match="`turn_ixs`"):
            RowMixer(plain, 0.5, 0).draw(0, 2, Dataset.from_dict({"input_ids": [[3]], "turn_ixs": [[0]]}))

    def test_batches_of_a_trainer(self, make_player, monkeypatch):
        trainer = make_player(gradient_accumulation_steps=2, per_device_train_batch_size=6, offline_fraction=0.25)
        offline, batches = tokens_of(trainer.train_dataset), []
        collate = trainer.data_collator

        def noting(rows):
            if len(rows) == 6:  # and not the one that is checked before the first step
                batches.append((len(trainer.online.replay), [tuple(row["input_ids"]) in offline for row in rows]))
            return collate(rows)

        monkeypatch.setattr(trainer, "data_collator", noting)
        trainer.train()
        # Each batch is made when the replay is what it is at its step.
        assert [size for size, _ in batches] == [3] * 4 + [6] * 4
        whole = [first + second for (_, first), (_, second) in zip(batches[::2], batches[1::2], strict=True)]
        assert [sum(flags) for flags in whole] == [3] * 4


class TestBudget:
    def test_environment_steps(self, make_player):
        trainer = make_player(max_online_steps=13, max_steps=12, collect_every=1)
        trainer.train()
        episodes = from_jsonl(journal_of(trainer))
        lengths = [len(rewards) for rewards in episodes["turn_rewards"]]
        assert lengths == [3, 3, 3, 3, 1]  # three, one, and what is left
        assert episodes["truncation_reason"][-1] == "max_turns"
        assert trainer.online.num_steps == 13 == logged(trainer, "env/steps")[-1][1]

    def test_episodes(self, make_player):
        trainer = make_player(max_online_episodes=4, max_steps=8)
        trainer.train()
        assert [number for _, number in logged(trainer, "env/episodes")] == [3, 4]

    def test_failed_episodes_count(self, make_player):
        trainer = make_player(
            environment=Broken, trainer_kwargs={"collect_kwargs": {"on_length": "continue", "max_error_rate": 1.0}},
            max_online_episodes=7, max_online_steps=12, max_steps=12, collect_every=1,
        )  # fmt: skip
        trainer.train()
        assert trainer.online._num_planned <= 7 and trainer.online.num_steps <= 12
        assert trainer.online.num_episodes < trainer.online._num_planned


class StopAt(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step >= self.step


RESUMED = {
    "save_strategy": "steps",
    "max_steps": 7,
    "disable_dropout": False,
    "gradient_accumulation_steps": 2,
    "per_device_train_batch_size": 3,
    "collect_epsilon": 0.2,
    "replay_size": 5,
}
DROPOUT = {"attention_dropout": 0.2, "eos_token_id": 2}


class TestResume:
    @pytest.mark.parametrize("optim", ["sgd", "adamw_torch"])
    @pytest.mark.parametrize(("saved", "stopped"), [(2, 2), (3, 5)])
    def test_same_weights_and_replay(self, make_player, make_model, state_of, assert_same_bits, optim, saved, stopped):
        def train(output_dir, callbacks=(), resume=None):
            trainer = make_player(
                output_dir=output_dir, model=make_model(config=DROPOUT), trainer_kwargs={"callbacks": list(callbacks)},
                **{**RESUMED, "optim": optim, "save_steps": saved},
            )  # fmt: skip
            if resume is not None:
                resume = str(Path(trainer.args.output_dir) / f"checkpoint-{resume}")
            trainer.train(resume_from_checkpoint=resume)
            return trainer

        whole = train("whole")
        broken = train("broken", [StopAt(stopped)])
        assert any(not torch.equal(x, state_of(whole)[name]) for name, x in state_of(broken).items())
        # The process died while it wrote an episode.
        with journal_of(broken).open("ab") as file:
            file.write(b'{"episode_id": "torn')
        resumed = train("broken", resume=saved)
        assert_same_bits(state_of(resumed), state_of(whole))
        assert journal_of(resumed).read_bytes() == journal_of(whole).read_bytes()
        assert resumed.online.replay.rows.to_list() == whole.online.replay.rows.to_list()
        assert logged(resumed, "env/steps") == logged(whole, "env/steps")

    def test_bounds_without_training_data(self, make_player):
        trainer = make_player(None, save_strategy="steps", save_steps=3, max_steps=3, replay_size=1)
        assert trainer.value_min is None
        trainer.train()
        bounds = trainer.value_min, trainer.value_max
        assert bounds[0] < 0 <= bounds[1]
        resumed = make_player(None, max_steps=5, replay_size=1)
        resumed.train(resume_from_checkpoint=True)
        assert (resumed.value_min, resumed.value_max) == bounds
        assert resumed.state.global_step == 5

    def test_missing_episodes_raise(self, make_player):
        trainer = make_player(save_strategy="steps", save_steps=3, max_steps=3)
        trainer.train()
        lines = journal_of(trainer).read_bytes().splitlines(keepends=True)
        journal_of(trainer).write_bytes(b"".join(lines[:-2]))
        with pytest.raises(ValueError, match="after 6 online episodes, and .* has 4"):
            make_player(max_steps=5).train(resume_from_checkpoint=True)

    def test_other_environment_raises(self, make_player):
        make_player(save_strategy="steps", save_steps=2, max_steps=2).train()
        trainer = make_player(environment=Broken, max_steps=3)
        with pytest.raises(ValueError, match="begun with another configuration"):
            trainer.train(resume_from_checkpoint=True)

    def test_checkpoint_of_a_run_that_did_not_play_raises(self, make_player):
        make_player(environment=None, save_strategy="steps", save_steps=2, max_steps=2).train()
        with pytest.raises(ValueError, match=r"has no replay\.json"):
            make_player(max_steps=3).train(resume_from_checkpoint=True)


class TestJournal:
    def test_torn_line_is_dropped(self, tmp_path):
        journal = ReplayJournal(tmp_path / "replay" / "episodes.jsonl", {"seed": 0})
        journal.append([{"episode_id": name} for name in "abc"])
        whole = journal.path.read_bytes()
        for cut in (1, 5):
            journal.path.write_bytes(whole[:-cut])
            assert journal.resume(2) == [{"episode_id": "a"}, {"episode_id": "b"}]
        journal.append([{"episode_id": "d"}])
        assert [json.loads(line).get("episode_id") for line in journal.path.open()] == [None, "a", "b", "d"]

    def test_begin_anew(self, tmp_path):
        journal = ReplayJournal(tmp_path / "episodes.jsonl", {"seed": 0})
        journal.begin()
        journal.append([{"episode_id": "a"}])
        ReplayJournal(journal.path, {"seed": 1}).begin()
        assert not journal.path.exists()


class TestPlaying:
    def test_metrics(self, make_player):
        trainer = make_player(max_steps=3)
        trainer.train()
        episodes = from_jsonl(journal_of(trainer))
        for number, step in enumerate((0, 2)):
            part = episodes.select(range(3 * number, 3 * number + 3))
            entry = next(x for x in trainer.state.log_history if x["step"] == step and "env/return" in x)
            assert entry["env/return"] == pytest.approx(np.mean(part["return"]))
            assert entry["env/success_rate"] == pytest.approx(np.mean(part["success"]))
            assert entry["env/episodes"] == entry["replay/size"] == 3 * number + 3
            assert entry["env/steps"] == 9 * (number + 1)

    def test_random_state_and_mode_stay(self, make_player):
        trainer = make_player()
        trainer.model.train()
        before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
        trainer.online._collect()
        assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before
        assert trainer.model.training

    def test_the_current_policy_acts(self, make_player):
        played = []
        for learning_rate in (1e-2, 0.0):
            trainer = make_player(learning_rate=learning_rate, episodes_per_collect=8, output_dir=str(learning_rate))
            trainer.train()
            played.append(from_jsonl(journal_of(trainer))["messages"])
        assert played[0][:8] == played[1][:8] and played[0][8:] != played[1][8:]

    def test_random_actions(self, make_player):
        trainer = make_player(collect_epsilon=1.0, max_steps=1)
        trainer.train()
        replies = {
            message["content"]
            for messages in from_jsonl(journal_of(trainer))["messages"]
            for message in messages
            if message["role"] == "assistant"
        }
        assert replies == {"a", "b"}

    def test_starts_of_a_source_go_on(self):
        source = EpisodeSource([{"messages": [{"role": "user", "content": str(i)}]} for i in range(9)])
        later = NumberedStarts(source, range(3, 9)[1::2])
        assert [later.start(0, i)["messages"][0]["content"] for i in range(3)] == ["4", "6", "8"]

    def test_model_card_says_how_it_played(self, make_player):
        trainer = make_player(max_steps=1)
        trainer.train()
        trainer.save_model()
        card = (Path(trainer.args.output_dir) / "README.md").read_text()
        assert "episodes_per_collect" in card and "env/steps" in card

    def test_too_many_failures(self, make_player):
        trainer = make_player(environment=Broken, episodes_per_collect=8)
        with pytest.raises(TooManyFailures, match="the server is gone"):
            trainer.train()

    def test_failures_within_the_rate(self, make_player):
        trainer = make_player(
            environment=Broken,
            episodes_per_collect=8,
            trainer_kwargs={"collect_kwargs": {"on_length": "continue", "max_error_rate": 0.9}},
        )
        trainer.train()
        assert 0 < trainer.online.num_episodes < 16
        assert len(from_jsonl(journal_of(trainer))) == trainer.online.num_episodes

    def test_episodes_without_tokens_are_failures(self, make_player, reader):
        """With this template a reply without text has no tokens, which the model says once in a while."""
        reader.chat_template = TEMPLATE.replace(" <eos>", "")
        args = {"episodes_per_collect": 32, "max_steps": 1}
        with pytest.raises(TooManyFailures, match="no tokens of the assistant"):
            make_player(**args, trainer_kwargs={"collect_kwargs": {"max_error_rate": 0.0}}).train()
        trainer = make_player(
            **args, trainer_kwargs={"collect_kwargs": {"on_length": "continue", "max_error_rate": 1.0}}
        )
        trainer.train()
        assert 0 < trainer.online.num_episodes < 32
        assert len(from_jsonl(journal_of(trainer))) == trainer.online.num_episodes == len(trainer.online.replay)


class TestTrainers:
    @pytest.mark.parametrize("data", ["offline", None])
    def test_qrlhf(self, tmp_path, make_base, reader, offline, data):
        trainer = QRLHFTrainer(
            LlamaDuelingQForCausalLM.from_base(make_base(eos_token_id=2)),
            args=QRLHFConfig(str(tmp_path / "out"), **{**QUIET, **PLAYING, "gamma": 0.9}),
            train_dataset=offline if data else None,
            processing_class=reader,
            environment=Letters,
            **WHOLE,
        )
        trainer.train()
        assert trainer.online.num_episodes == 6 and trainer.state.global_step == 4
        assert trainer.q_min == trainer._fitted["q_min"] < 0

    def test_only_played_data(self, make_player):
        trainer = make_player(None, log_completions=True, log_completions_steps=2)
        trainer.train()
        assert trainer.state.global_step == 4 and len(trainer.train_dataset) == 6

    def test_offline_bounds_stay(self, make_player):
        trainer = make_player()
        bounds = trainer.value_min, trainer.value_max
        trainer.train()
        assert (trainer.value_min, trainer.value_max) == bounds

    def test_seq2seq(self, tmp_path, reader, offline):
        from transformers import T5Config, T5ForConditionalGeneration

        torch.manual_seed(0)
        config = T5Config(
            vocab_size=24, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2,
            decoder_start_token_id=0, pad_token_id=0, eos_token_id=2,
        )  # fmt: skip
        trainer = ILQLTrainer(
            T5ForConditionalGeneration(config),
            args=ILQLConfig(str(tmp_path / "out"), **{**QUIET, **PLAYING}),
            train_dataset=offline,
            processing_class=reader,
            environment=Letters,
            **WHOLE,
        )
        trainer.train()
        assert trainer.online.num_episodes == 6 and len(trainer.online.replay.rows) == 18


class TestErrors:
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"max_steps": -1}, "set `max_steps`"),
            ({"target": "mc", "trainer_kwargs": {}}, "regresses on the returns"),
            ({"train_dataset": None, "reward_scaling": "standardize"}, "takes its constants from `train_dataset`"),
            ({"trainer_kwargs": {"collect_kwargs": {"max_turns": 3}}}, "comes from `args.collect_max_turns`"),
        ],
    )
    def test_trainer(self, make_player, make_model, change, message):
        if "target" in change:
            change = {**change, "model": make_model(num_q_heads=1)}
        with pytest.raises(ValueError, match=message):
            make_player(**change)

    def test_stream(self, make_player, offline):
        with pytest.raises(ValueError, match="a stream has no rows to choose from"):
            make_player(offline.to_iterable_dataset())

    def test_no_chat_template(self, make_player, reader):
        reader.chat_template = None
        with pytest.raises(ValueError, match="no chat template to read them with"):
            make_player(None)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"collect_every": 0}, "`collect_every` must be at least 1"),
            ({"episodes_per_collect": 0}, "`episodes_per_collect` must be at least 1"),
            ({"replay_size": 0}, "`replay_size` must be at least 1"),
            ({"offline_fraction": 1.5}, "`offline_fraction` must lie between 0 and 1"),
            ({"collect_epsilon": -0.1}, "`collect_epsilon` must lie between"),
            ({"collect_temperature": 0.0}, "`collect_temperature` must be positive"),
            ({"max_online_steps": 10}, "set `collect_max_turns`"),
            ({"max_online_episodes": 0}, "`max_online_episodes` must be at least 1"),
        ],
    )
    def test_config(self, arguments, message):
        with pytest.raises(ValueError, match=message):
            ILQLConfig("out", use_cpu=True, **arguments)


@pytest.mark.slow
def test_two_processes_play_what_one_does(tmp_path, make_model, reader, offline):
    script = Path(__file__).parent / "scripts" / "play.py"
    make_model(config={"eos_token_id": 2}).save_pretrained(tmp_path / "model")
    reader.save_pretrained(tmp_path / "model")
    offline.save_to_disk(tmp_path / "data")
    records = {}
    for processes in (1, 2):
        output = tmp_path / str(processes)
        output.mkdir()
        args = {
            **QUIET, **PLAYING, "max_steps": 5, "optim": "sgd", "output_dir": str(output),
            "per_device_train_batch_size": 8 // processes, "episodes_per_collect": 5,
        }  # fmt: skip
        spec = {"model": str(tmp_path / "model"), "data": str(tmp_path / "data"), "args": args}
        (output / "spec.json").write_text(json.dumps(spec))
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"] if processes > 1 else []
        done = subprocess.run(
            [sys.executable, *launcher, str(script), str(output / "spec.json")],
            env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        records[processes] = [torch.load(output / f"{rank}.pt") for rank in range(processes)]
        # An episode's name has its place in the share of its process.
        journal = from_jsonl(output / "replay" / "episodes.jsonl").remove_columns("episode_id")
        records[f"journal of {processes}"] = journal.to_list()
    one, (first, second) = records[1][0], records[2]
    assert records["journal of 1"] == records["journal of 2"] and len(records["journal of 1"]) == 15
    assert first["rows"] == second["rows"] == one["rows"]
    assert first["num_steps"] == second["num_steps"] == one["num_steps"]
    for name, x in one["state"].items():
        torch.testing.assert_close(first["state"][name], x, rtol=0, atol=1e-6)
        assert torch.equal(first["state"][name], second["state"][name])
