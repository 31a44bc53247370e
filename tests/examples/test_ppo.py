# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""The examples of PPO: the command line with a game of its own, and the games that are recorded."""

import subprocess
import sys
from pathlib import Path

import pytest

from hf_qrl import AutoModelForCausalLMWithValueHead


EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name, *arguments):
    command = [sys.executable, str(EXAMPLES / name), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_game_of_ones_own(tmp_path):
    quick = ["--max_steps", 2, "--episodes_per_rollout", 4, "--max_turns", 3, "--test_episodes", 2, "--use_cpu", True]
    out = run("ppo.py", "--output_dir", tmp_path / "out", *quick)
    assert "Greedy: return" in out
    AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path / "out")


@pytest.mark.parametrize("task", ["random_walks", pytest.param("maze", marks=pytest.mark.slow)])
def test_recorded_games(tmp_path, task):
    out = run("ppo_games.py", "--task", task, "--output_dir", tmp_path, "--seeds", 5, "--clone_steps", 1, "--steps", 1)
    assert "seed 5: {" in out
    assert (tmp_path / f"{task}.json").is_file()
    model = AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path / f"{task}-5")
    assert model.config.history_window == (1 if task == "maze" else None)
