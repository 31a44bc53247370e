# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import TrainerCallback

from hf_qrl.trainer.checkpoints import last_complete_checkpoint


STEPS = {"save_strategy": "steps", "disable_dropout": False, "max_steps": 6, "learning_rate": 1e-2, "alpha": 0.1}
# Not a divisor of the number of steps in an epoch, so that a run also stops between epochs.
ACCUMULATE = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
DROPOUT = {"attention_dropout": 0.2}


class StopAt(TrainerCallback):
    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step >= self.step


@pytest.fixture
def unbroken(make_trainer, make_model, make_dataset, tmp_path, state_of):
    """Returns a function that trains without a break, in another directory than everyone else."""

    def run(**args):
        trainer = make_trainer(
            make_model(config=DROPOUT), make_dataset(13, weight=True), tmp_path / "unbroken",
            **{**STEPS, **ACCUMULATE, **args},
        )  # fmt: skip
        trainer.train()
        assert trainer.state.global_step == STEPS["max_steps"]
        return state_of(trainer)

    return run


class TestResume:
    @pytest.mark.parametrize("stop", [3, 4])
    @pytest.mark.parametrize("head_type", ["mlp", "dueling"])
    def test_resume_exact(self, make_trainer, make_model, make_dataset, tmp_path, state_of, assert_same_bits, stop,
                          head_type):  # fmt: skip
        data = make_dataset(13, weight=True)

        def train(output_dir, callbacks=(), resume=None):
            trainer = make_trainer(
                make_model(config=DROPOUT, head_type=head_type),
                data,
                tmp_path / output_dir,
                {"callbacks": list(callbacks)},
                **{**STEPS, **ACCUMULATE, "save_steps": stop},
            )
            trainer.train(resume_from_checkpoint=resume)
            trainer.save_model(tmp_path / output_dir / "final")
            optimizer = {
                f"{i}.{k}": x
                for i, state in enumerate(trainer.optimizer.optimizer.state.values())
                for k, x in state.items()
            }
            return state_of(trainer), optimizer

        state, optimizer = train("unbroken")
        half, _ = train("broken", [StopAt(stop)])
        assert any(not torch.equal(half[name], state[name]) for name in state)
        resumed_state, resumed_optimizer = train("broken", resume=True)
        assert_same_bits(resumed_state, state)
        assert_same_bits(resumed_optimizer, optimizer)

    def test_targets_are_right_after_loading(self, make_trainer, make_model, tmp_path, state_of, assert_same_bits):
        trainer = make_trainer(save_strategy="steps", save_steps=2, alpha=0.3)
        trainer.train()
        other = make_trainer(make_model(seed=1))
        other._load_from_checkpoint(f"{trainer.args.output_dir}/checkpoint-2")
        assert_same_bits(state_of(other), state_of(trainer))

    def test_dropout_matters(self, unbroken):
        """The tests above would not notice a lost random state without it."""
        with_dropout, without = unbroken(), unbroken(disable_dropout=True)
        assert any(not torch.equal(with_dropout[name], without[name]) for name in without)


class TestKill:
    @pytest.mark.parametrize(
        ("kill", "complete"),
        [({"kill_at": [5, 1]}, ["checkpoint-2", "checkpoint-4"]), ({"kill_in_save_at": 4}, ["checkpoint-2"])],
        ids=["in a step", "in a save"],
    )
    def test_killed_run_resumes_to_same_weights(
        self, make_trainer, make_model, make_dataset, run_script, unbroken, tmp_path, state_of, assert_same_bits, kill,
        complete,
    ):  # fmt: skip
        model, data, output_dir = make_model(config=DROPOUT), make_dataset(13, weight=True), tmp_path / "killed"
        args = {**STEPS, **ACCUMULATE, "save_steps": 2}
        result = run_script(model, data, args, output_dir, **kill)
        assert result.returncode == -signal.SIGKILL, result.stderr[-3000:]
        left = sorted(path.name for path in output_dir.iterdir())
        assert left == ["checkpoint-2", "checkpoint-4"]
        assert last_complete_checkpoint(output_dir) == str(output_dir / complete[-1])

        trainer = make_trainer(make_model(config=DROPOUT), data, output_dir, **args)
        for name in set(left) - set(complete):
            with pytest.raises(ValueError, match="was not written to its end"):
                trainer.train(resume_from_checkpoint=str(output_dir / name))
        trainer.train(resume_from_checkpoint=True)
        assert_same_bits(state_of(trainer), unbroken(save_steps=2))
        assert last_complete_checkpoint(output_dir) == str(output_dir / "checkpoint-6")


class TestCompleteness:
    def fail_in(self, trainer, monkeypatch, name: str, step: int) -> None:
        original = getattr(trainer, name)

        def interrupted(*args, **kwargs):
            if trainer.state.global_step == step:
                raise KeyboardInterrupt
            return original(*args, **kwargs)

        monkeypatch.setattr(trainer, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            trainer.train()

    @pytest.mark.parametrize("name", ["save_model", "_save_optimizer_and_scheduler", "_save_rng_state"])
    def test_incomplete_checkpoint_is_skipped(self, make_trainer, monkeypatch, name):
        trainer = make_trainer(save_strategy="steps", save_steps=1, max_steps=3)
        self.fail_in(trainer, monkeypatch, name, 2)
        assert Path(last_complete_checkpoint(trainer.args.output_dir)).name == "checkpoint-1"

    def test_overwritten_checkpoint_is_incomplete_until_whole(self, make_trainer, monkeypatch):
        make_trainer(save_strategy="steps", save_steps=2, max_steps=2).train()
        trainer = make_trainer(save_strategy="steps", save_steps=2, max_steps=2)
        assert last_complete_checkpoint(trainer.args.output_dir) is not None
        self.fail_in(trainer, monkeypatch, "_save_rng_state", 2)
        assert last_complete_checkpoint(trainer.args.output_dir) is None

    def test_old_checkpoint_is_deleted_only_when_new_one_is_whole(self, make_trainer, monkeypatch):
        trainer = make_trainer(save_strategy="steps", save_steps=1, max_steps=2, save_total_limit=1)

        def killed(**kwargs):
            if trainer.state.global_step == 2:
                raise KeyboardInterrupt

        monkeypatch.setattr("transformers.trainer.rotate_checkpoints", killed)
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
        assert Path(last_complete_checkpoint(trainer.args.output_dir)).name == "checkpoint-2"

    def test_limit_keeps_newest(self, make_trainer):
        trainer = make_trainer(save_strategy="steps", save_steps=1, max_steps=4, save_total_limit=2)
        trainer.train()
        assert sorted(path.name for path in Path(trainer.args.output_dir).iterdir()) == [
            "checkpoint-3",
            "checkpoint-4",
        ]

    def test_no_checkpoint_raises(self, make_trainer):
        with pytest.raises(ValueError, match="no complete checkpoint"):
            make_trainer().train(resume_from_checkpoint=True)

    def test_most_steps_win(self, make_trainer, tmp_path):
        trainer = make_trainer(save_strategy="steps", save_steps=9, max_steps=10)
        trainer.train()
        names = sorted(path.name for path in (tmp_path / "out").iterdir())
        assert names == ["checkpoint-10", "checkpoint-9"]
        (tmp_path / "out" / "checkpoint-11.zip").touch()
        (tmp_path / "out" / "checkpoint-best").mkdir()
        assert last_complete_checkpoint(tmp_path / "out") == str(tmp_path / "out" / "checkpoint-10")

    def test_resume_false_starts_anew(self, make_trainer):
        trainer = make_trainer(save_strategy="steps", save_steps=1)
        trainer.train()
        trainer.train(resume_from_checkpoint=False)
        assert trainer.state.global_step == 2


class TestForeignCheckpoint:
    @pytest.mark.parametrize(
        ("saved", "resumed"),
        [
            ({"head_stem": "relu"}, {"head_stem": "silu"}),
            ({"head_type": "dueling", "head_stem": "identity"}, {"head_type": "linear"}),
            ({"reward_std": 1.0}, {"reward_std": 3.0}),
            ({"q_reduction": "min"}, {"q_reduction": "mean"}),
        ],
    )
    def test_other_heads_raise(self, make_trainer, make_model, saved, resumed):
        trainer = make_trainer(make_model(**saved), save_strategy="steps", save_steps=1, max_steps=1)
        trainer.train()
        with pytest.raises(ValueError, match="is of a model with other heads"):
            make_trainer(make_model(**resumed), max_steps=2).train(resume_from_checkpoint=True)

    @pytest.mark.parametrize("change", ["missing", "left over"])
    def test_other_weights_raise(self, make_trainer, change):
        trainer = make_trainer(save_strategy="steps", save_steps=1, max_steps=2)
        trainer.train()
        file = Path(trainer.args.output_dir) / "checkpoint-1" / "model.safetensors"
        weights = load_file(file)
        if change == "missing":
            del weights["heads.target_q.0.weight"]
        else:
            weights["heads.q.7.weight"] = torch.zeros(1)
        save_file(weights, file, metadata={"format": "pt"})
        with pytest.raises(ValueError, match=rf"does not hold this model: .*{change}.*heads\."):
            make_trainer(max_steps=2).train(resume_from_checkpoint=str(file.parent))
