# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""From offline to online: a third of the maze's data, and what the policy finds out for itself.

The maze is that of `maze.py`. ILQL is trained on all of its episodes, and on a third of them. In the second case it
then goes on while it plays: every `collect_every` optimizer steps it plays some episodes, and each batch has rows of
the data and of what was played. It takes at most as many environment steps as the episodes have that were left out.

    python examples/offline_to_online.py --output_dir outputs/offline_to_online

prints the exact return of each policy and the environment steps behind it. There are two thirds of the data: every
part of the maze in equal shares (`mixed`), and the episodes of one T (`one T`), none of which ever sees the goal.
"""

import json
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import maze
import numpy as np
import torch
from datasets import Dataset, disable_progress_bars
from rich.console import Console
from rich.table import Table
from transformers import HfArgumentParser, PrinterCallback

from hf_qrl import AutoModelForCausalLMWithILQLHeads, ILQLConfig, ILQLTrainer
from hf_qrl.data.episodes import from_jsonl
from hf_qrl.environments.games.maze import MAX_MOVES, MazeEnv, policy_returns
from hf_qrl.environments.games.maze_data import SUBMAZES


@dataclass
class ScriptArguments(maze.ScriptArguments):
    """Options of `maze.py` that have a meaning for ILQL in the fully observed maze, and of playing."""

    output_dir: Path = field(default=Path("outputs/offline_to_online"), metadata={"help": "Folder for results."})
    online_steps: int = field(default=600, metadata={"help": "Optimizer steps while playing."})
    online_learning_rate: float = field(default=2e-3, metadata={"help": "Their learning rate, of a cosine schedule."})
    online_rows: int = field(default=200, metadata={"help": "Rows of each batch that come from the replay."})
    collect_every: int = field(default=20, metadata={"help": "Optimizer steps between two collections."})
    episodes_per_collect: int = field(default=32, metadata={"help": "Episodes of each collection."})
    collect_epsilon: float = field(default=0.4, metadata={"help": "Probability of a random move when playing."})


class Run(NamedTuple):
    """Data to train a model on, and how many environment steps it may take itself afterwards."""

    data: str
    seed: int
    rows: Dataset
    offline_steps: int
    budget: int


def thirds(episodes: Dataset) -> dict[str, Dataset]:
    """Every part of the maze in equal shares, and the left T alone: the parts take turns in the data."""
    count = len(episodes) // len(SUBMAZES)
    return {
        "a mixed third": episodes.select(range(count)),
        "one T": episodes.select(range(0, len(SUBMAZES) * count, len(SUBMAZES))),
    }


def num_steps(episodes: Dataset) -> int:
    return sum(map(len, episodes["turn_rewards"]))


def make_runs(arguments: ScriptArguments) -> list[Run]:
    episodes = maze.make_episodes(arguments)
    total = num_steps(episodes)
    runs = [Run("all data", seed, maze.transitions(episodes), total, 0) for seed in arguments.seeds]
    for name, third in thirds(episodes).items():
        rows, steps = maze.transitions(third), num_steps(third)
        runs += [Run(name, seed, rows, steps, total - steps) for seed in arguments.seeds]
    return runs


def played_rows(episodes: Dataset) -> Dataset:
    """The distinct turns of what was played. A reply without any text has no token to learn from."""
    return maze.transitions(episodes).filter(lambda row: row["completion"][0]["content"] != "")


def play_and_train(directory: Path, run: Run, arguments: ScriptArguments) -> tuple[Path, float]:
    """Goes on from a model that was trained offline, on the same data and on what it plays."""
    disable_progress_bars()  # of the rows that are made again after each collection
    online = directory.with_name(f"{directory.name}-online")
    batch_size = len(run.rows) + arguments.online_rows
    args = ILQLConfig(
        str(online),
        seed=run.seed,
        max_steps=arguments.online_steps,
        # Each batch has all rows of the data once, and those of the replay about equally often.
        per_device_train_batch_size=batch_size,
        offline_fraction=len(run.rows) / batch_size,
        collect_every=arguments.collect_every,
        episodes_per_collect=arguments.episodes_per_collect,
        collect_epsilon=arguments.collect_epsilon,
        collect_max_turns=MAX_MOVES + 1,
        collect_max_new_tokens=1,
        max_online_steps=run.budget,
        learning_rate=arguments.online_learning_rate,
        lr_scheduler_type="cosine",
        max_grad_norm=0.0,
        history_window=1,
        gamma=maze.GAMMA,
        discount_on="utterance",
        tau=arguments.tau,
        cql_scale=arguments.cql_scale,
        alpha=arguments.alpha,
        use_cpu=True,
        disable_tqdm=True,
        logging_steps=100,
        save_strategy="no",
        report_to=[],
    )
    trainer = ILQLTrainer(
        AutoModelForCausalLMWithILQLHeads.from_pretrained(directory),
        args,
        train_dataset=run.rows,
        processing_class=maze.make_tokenizer(),
        environment=partial(MazeEnv, one_token_actions=True),
        collect_kwargs={"on_length": "continue"},  # a reply of one token is whole, be it a move or not
        prepare_replay=played_rows,
    )
    trainer.remove_callback(PrinterCallback)  # several models are trained at a time
    seconds = trainer.train().metrics["train_runtime"]
    trainer.save_model()
    return online, seconds


def measure(directory: Path, arguments: ScriptArguments) -> dict[str, float]:
    """What a model does in every cell, without sampling."""
    policy, _ = maze.inspect(
        AutoModelForCausalLMWithILQLHeads.from_pretrained(directory).eval(), arguments, arguments.beta
    )
    return {
        "return": float(np.mean(list(policy_returns(policy).values()))),
        "cells_right": maze.share_right(policy),
    }


def train(run: Run, arguments: ScriptArguments) -> dict[str, dict[str, Any]]:
    """Trains on the data, and then, where there is a budget, while playing."""
    job = maze.Job(f"{run.data}, seed {run.seed}", run.seed, run.rows, arguments.steps)
    directory, seconds = maze.train(job, arguments)
    steps = {"offline_steps": run.offline_steps, "online_steps": 0}
    results = {job.name: {**measure(directory, arguments), **steps, "seconds": seconds}}
    if run.budget:
        directory, seconds = play_and_train(directory, run, arguments)
        steps["online_steps"] = num_steps(from_jsonl(directory / "replay" / "episodes.jsonl"))
        name = f"{run.data} + online, seed {run.seed}"
        results[name] = {**measure(directory, arguments), **steps, "seconds": seconds}
    return results


def print_table(results: dict[str, dict[str, Any]]) -> None:
    table = Table(title="maze: exact return of ILQL")
    for column in ("data", "return", "cells right", "offline steps", "online steps", "time"):
        table.add_column(column, justify="left" if column == "data" else "right")
    for name, row in results.items():
        table.add_row(
            name,
            f"{row['return']:.2f}",
            f"{row['cells_right']:.2f}",
            str(row["offline_steps"]),
            str(row["online_steps"]),
            f"{row['seconds']:.0f} s",
        )
    Console(width=max(Console().width, 100)).print(table)


def main(arguments: ScriptArguments) -> dict[str, dict[str, Any]]:
    torch.set_num_threads(arguments.threads)
    if arguments.partially_observed or arguments.textual:
        raise ValueError("This example is of the fully observed maze with actions of one token; see `maze.py`.")
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    runs = make_runs(arguments)
    print(f"{len(runs)} runs, {arguments.processes} at a time; each takes two to five minutes.", flush=True)
    results: dict[str, dict[str, Any]] = {}
    with ProcessPoolExecutor(arguments.processes, mp_context=get_context("spawn")) as pool:
        for run, result in zip(runs, pool.map(train, runs, [arguments] * len(runs)), strict=True):
            results |= result
            print(f"{run.data}, seed {run.seed}: {result}", flush=True)
    print_table(results)
    (arguments.output_dir / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    return results


if __name__ == "__main__":
    (script_arguments,) = HfArgumentParser(ScriptArguments).parse_args_into_dataclasses()
    main(script_arguments)
