# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""PPO on the random walks and on the maze, from a policy that has cloned their data.

    python examples/ppo_games.py --task random_walks
    python examples/ppo_games.py --task maze

A small Llama imitates the data of the task first; PPO then plays on from there, and pays in moves for what Q-learning
finds in the data alone (`random_walks.py`, `maze.py`).
"""

import json
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import maze
import numpy as np
import random_walks
import torch
from transformers import HfArgumentParser, PreTrainedModel, PreTrainedTokenizerFast

from hf_qrl import AutoModelForCausalLMWithILQLHeads, PPOConfig, PPOTrainer
from hf_qrl.environments.games.maze import MAX_MOVES, MazeEnv, policy_returns
from hf_qrl.environments.games.random_walks import MAX_LENGTH, RandomWalksEnv
from hf_qrl.environments.games.scores import SCALES, normalized_score


class Clone(NamedTuple):
    """A language model that imitates the data of a task."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerFast


@dataclass
class ScriptArguments:
    """Options of the example."""

    task: str = field(default="maze", metadata={"help": "What is played.", "choices": ["random_walks", "maze"]})
    output_dir: Path = field(default=Path("outputs/ppo_games"), metadata={"help": "Folder for models and results."})
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2], metadata={"help": "One run for each."})
    clone_steps: int = field(default=200, metadata={"help": "Optimizer steps of the imitation."})
    steps: int | None = field(default=None, metadata={"help": "Optimizer steps of PPO; by default those of the card."})
    threads: int = field(default=1, metadata={"help": "CPU threads; more are slower for a model this small."})


def train(clone: Clone, environment: Any, directory: Path, seed: int, **arguments: Any) -> PPOTrainer:
    """Trains the clone by playing."""
    args = PPOConfig(
        str(directory),
        seed=seed,
        learning_rate=1e-3,
        ppo_epochs=4,
        vf_coef=0.5,
        generation_batch_size=256,
        use_cpu=True,
        disable_tqdm=True,
        logging_steps=40,
        save_strategy="no",
        report_to=[],
        **arguments,
    )
    trainer = PPOTrainer(clone.model, args, environment=environment, processing_class=clone.tokenizer)
    trainer.train()
    trainer.save_model()
    return trainer


class RandomWalks:
    """Mean optimality of walks sampled from each start, 1 at best."""

    steps = 320

    def __init__(self, script: ScriptArguments):
        self.script = script
        self.graph, walks = random_walks.make_data()
        self.rows = random_walks.to_rows(walks, random_walks.optimality(walks, self.graph))

    def clone(self, seed: int, directory: Path) -> Clone:
        arguments = random_walks.ScriptArguments(steps=self.script.clone_steps)
        trainer = random_walks.train(seed, self.rows, arguments, directory)
        # The cloning term trains the language model under the heads on all walks alike.
        return Clone(trainer.model.base, trainer.processing_class)

    def play(self, clone: Clone, directory: Path, seed: int, steps: int) -> PPOTrainer:
        return train(
            clone,
            RandomWalksEnv,
            directory,
            seed,
            max_steps=steps,
            per_device_train_batch_size=64,
            episodes_per_rollout=256,
            max_completion_length=MAX_LENGTH - 1,
            kl_coef=0.05,
        )

    def measure(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> dict[str, float]:
        walks = random_walks.walk(model, tokenizer, self.graph, samples=32)
        return {"score": float(random_walks.optimality(walks, self.graph).mean())}


class Maze:
    """Mean return from the 25 starts, exact, and on LMRL-Gym's scale from 0 to 100."""

    steps = 400

    def __init__(self, script: ScriptArguments):
        self.arguments = maze.ScriptArguments(output_dir=script.output_dir / "clones")
        self.steps_of_clone = script.clone_steps
        self.rows = maze.transitions(maze.make_episodes(self.arguments))

    def clone(self, seed: int, directory: Path) -> Clone:
        job = maze.Job(f"seed {seed}", seed, self.rows, self.steps_of_clone)
        folder, _ = maze.train(job, self.arguments)
        return Clone(AutoModelForCausalLMWithILQLHeads.from_pretrained(folder).base, maze.make_tokenizer())

    def play(self, clone: Clone, directory: Path, seed: int, steps: int) -> PPOTrainer:
        return train(
            clone,
            partial(MazeEnv, one_token_actions=True),
            directory,
            seed,
            max_steps=steps,
            per_device_train_batch_size=512,
            episodes_per_rollout=64,
            max_turns=MAX_MOVES,
            max_completion_length=1,
            history_window=1,
            gamma=0.95,
            discount_on="utterance",
            reward_scale=0.1,
            cliprange_value=None,
            kl_coef=0.0,
        )

    def measure(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> dict[str, float]:
        base = getattr(model, "base", model)
        policy, _ = maze.inspect(AutoModelForCausalLMWithILQLHeads.from_pretrained(base), self.arguments, beta=0.0)
        value = float(np.mean(list(policy_returns(policy).values())))
        return {"return": value, "score": normalized_score(value, SCALES["maze"])}


def main(script: ScriptArguments) -> dict[str, dict[str, float]]:
    torch.set_num_threads(script.threads)
    task = RandomWalks(script) if script.task == "random_walks" else Maze(script)
    results: dict[str, dict[str, float]] = {}
    for seed in script.seeds:
        directory = script.output_dir / f"{script.task}-{seed}"
        clone = task.clone(seed, directory)
        results[f"clone, seed {seed}"] = task.measure(clone.model, clone.tokenizer)
        trainer = task.play(clone, directory, seed, script.steps or task.steps)
        progress = trainer.batches.progress
        results[f"PPO, seed {seed}"] = {
            **task.measure(trainer.model, clone.tokenizer),
            "episodes": progress.episodes,
            "environment_steps": progress.steps,
            "seconds": trainer.state.log_history[-1]["train_runtime"],
        }
        print(f"seed {seed}: {results[f'clone, seed {seed}']} -> {results[f'PPO, seed {seed}']}", flush=True)
    script.output_dir.mkdir(parents=True, exist_ok=True)
    (script.output_dir / f"{script.task}.json").write_text(json.dumps(results, indent=2) + "\n")
    return results


if __name__ == "__main__":
    (script_arguments,) = HfArgumentParser(ScriptArguments).parse_args_into_dataclasses()
    main(script_arguments)
