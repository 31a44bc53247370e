# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""The maze of LMRL-Gym: find a way of which no episode shows more than a part.

A player in a maze of two Ts reads where it is and writes where it goes: -1 for each move, 0 for the one that reaches
the goal. The data are made by a mostly random player whose episodes never leave their third of the maze: those that
start in the Ts never see the goal, and none leads from a T to it. Copying them, or the best of them, copies that.
Q-learning stitches the parts together: what the cell where two of them meet is worth is learned from one and used in
the other.

    python examples/maze.py --output_dir outputs/maze

trains a small Llama from scratch by ILQL, by imitation and by Monte-Carlo regression, plays all of them in the maze,
prints the table beside the figures of LMRL-Gym (Abdulhai et al., 2023) and draws what was learned; each model is saved
in a folder of its own. `--qrlhf` adds autoregressive Q-learning with a dueling head. `--textual` writes actions in
words (three tokens instead of one), `--partially_observed --history_window 2` hides everything but the walls.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from datasets import Dataset
from rich.console import Console
from rich.table import Table
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import HfArgumentParser, LlamaConfig, PreTrainedTokenizerFast, PrinterCallback, set_seed

from hf_qrl import (
    AutoModelForCausalLMWithILQLHeads,
    ILQLConfig,
    ILQLForCausalLM,
    ILQLTrainer,
    LlamaDuelingQForCausalLM,
    QRLHFConfig,
    QRLHFTrainer,
)
from hf_qrl.data.episodes import PLAIN_CHAT_TEMPLATE, episodes_dataset, filter_by_return, make_episode, successes
from hf_qrl.environments.games.maze import (
    CELLS,
    DIRECTIONS,
    GOAL,
    STARTS,
    Cell,
    MazeEnv,
    action_text,
    describe,
    describe_walls,
    optimal_directions,
    optimal_values,
    policy_returns,
)
from hf_qrl.environments.games.maze_data import NUM_EPISODES, make_dataset
from hf_qrl.environments.games.scores import PUBLISHED_SCORES, SCALES, normalized_score
from hf_qrl.environments.seeding import episode_seed
from hf_qrl.rollouts import EvaluationResult, ModelPolicy, compare_policies


END_OF_TEXT, PAD, UNKNOWN = "<|endoftext|>", "<pad>", "<unk>"
GAMMA = 0.9  # per move: the largest distance is 12 moves, and 0.9 ** 12 is still 0.28

Policy = Mapping[Cell, Mapping[str, float]]


@dataclass
class ScriptArguments:
    """Options of the example."""

    output_dir: Path = field(default=Path("outputs/maze"), metadata={"help": "Folder for results and the picture."})
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2], metadata={"help": "One ILQL run for each."})
    steps: int = field(default=600, metadata={"help": "Optimizer steps of each ILQL run."})
    baseline_steps: int = field(default=200, metadata={"help": "Optimizer steps of the other methods."})
    beta: float = field(default=32.0, metadata={"help": "Weight of the advantage in the policy that acts."})
    tau: float = field(default=0.9, metadata={"help": "Expectile of the value head."})
    cql_scale: float = field(default=0.1, metadata={"help": "Weight of the conservative term."})
    head_type: str = field(default="linear", metadata={"help": "Kind of the Q-heads: mlp, linear, tied or dueling."})
    alpha: float = field(default=0.2, metadata={"help": "Step of the target heads after each optimizer step."})
    learning_rate: float = field(default=2e-3, metadata={"help": "Learning rate at the start, of a cosine schedule."})
    qrlhf: bool = field(default=False, metadata={"help": "Whether to train by autoregressive Q-learning too."})
    qrlhf_steps: int = field(default=600, metadata={"help": "Optimizer steps of each such run."})
    conservative_scale: float = field(default=0.1, metadata={"help": "Weight of the conservative term of these."})
    baselines: bool = field(default=True, metadata={"help": "Whether to train the other methods (first seed)."})
    textual: bool = field(default=False, metadata={"help": 'Write "move left" and a newline instead of "l".'})
    partially_observed: bool = field(default=False, metadata={"help": "Show the walls around the player only."})
    history_window: int = field(default=1, metadata={"help": "Number of latest turns that the player reads."})
    episodes: int = field(default=NUM_EPISODES, metadata={"help": "Number of episodes of data."})
    data_seed: int = field(default=0, metadata={"help": "Seed of the data."})
    samples: int = field(default=32, metadata={"help": "Episodes from each start to measure a policy with."})
    baseline_samples: int = field(default=1, metadata={"help": "The same for the methods that take long to arrive."})
    processes: int = field(default=2, metadata={"help": "Number of models that are trained at a time."})
    threads: int = field(default=1, metadata={"help": "CPU threads of each; more are slower for so small a model."})

    @property
    def task(self) -> str:
        return "partially observed maze" if self.partially_observed else "maze"


# Text


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per standing phrase, word (with the blank before it), digit, punctuation mark and newline."""
    place = r"The goal is at position 8, 6\. Your current position is at position"
    walls = r" ?There (?:are no walls near you|is a wall|are walls)| (?:to your (?:right|left)|(?:above|below) you)"
    action = "[lrud](?=T)"  # before the next observation, which begins with "There"
    pieces = Regex(rf"{place}|{walls}|{action}| ?[A-Za-z]+| ?\d|[.,]|\n")
    splitter = pre_tokenizers.Split(pieces, behavior="isolated")
    texts = [text + "\n" for cell in CELLS for text in (describe(cell), describe_walls(cell))]
    texts += [action_text(direction, short) for direction in DIRECTIONS for short in (True, False)]
    words = sorted({piece for text in texts for piece, _ in splitter.pre_tokenize_str(text)})
    # What is unknown is what a reply that is no action and the next observation read as together.
    vocabulary = {token: i for i, token in enumerate([*words, END_OF_TEXT, PAD, UNKNOWN])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = splitter
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        pad_token=PAD,
        unk_token=UNKNOWN,
        chat_template=PLAIN_CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


# Data


def make_episodes(arguments: ScriptArguments) -> Dataset:
    """The episodes of the data, in the schema that `collect_episodes` writes too."""
    played = make_dataset(
        arguments.episodes,
        arguments.data_seed,
        partially_observed=arguments.partially_observed,
        one_token_actions=not arguments.textual,
    )
    return episodes_dataset(
        make_episode(
            episode["messages"],
            episode["turn_rewards"],
            terminated=episode["terminated"],
            success=episode["messages"][-1]["content"] == "Success\n",
        )
        for episode in played
    )


def _turns(episodes: Dataset, history_window: int) -> Iterable[tuple[tuple[str, ...], tuple[str, ...], list[float]]]:
    """Of every turn: the texts the player reads, its action with what follows it, and the rewards from here on."""
    for messages, rewards in zip(episodes["messages"], episodes["turn_rewards"], strict=True):
        texts = [message["content"] for message in messages]
        for turn in range(len(rewards)):
            now = 2 * turn + 1
            first = max(0, now - 2 * history_window + 1)
            ends = turn == len(rewards) - 1
            yield tuple(texts[first:now]), tuple(texts[now : now + (1 if ends else 2)]), rewards[turn:]


def _rows(turns: Mapping[tuple[tuple[str, ...], tuple[str, ...], float], int]) -> Dataset:
    """One row for each distinct turn, which weighs as much as it is frequent among those with the same context."""
    in_context: Counter = Counter()
    for (context, _, _), count in turns.items():
        in_context[context] += count
    rows = []
    for (context, completion, reward), count in turns.items():
        rows.append(
            {
                "prompt": [{"role": ("user", "assistant")[i % 2], "content": x} for i, x in enumerate(context)],
                "completion": [{"role": ("assistant", "user")[i], "content": x} for i, x in enumerate(completion)],
                "rewards": [reward],
                "terminated": len(completion) == 1,
                "weight": count / in_context[context],
            }
        )
    return Dataset.from_list(rows)


def transitions(episodes: Dataset, history_window: int = 1) -> Dataset:
    """
    The distinct turns of the data.

    A hundred thousand turns of this small world are two hundred rows. A batch then holds all of them, and the noise of
    small batches, which is what hinders learning here, is gone. Every context weighs the same: four turns of five are
    spent in the Ts, and the cells at the goal, where all values come from, would hardly count. A row is not terminated
    unless the game is over: its value goes on with that of the next observation.
    """
    counts = Counter(
        (context, completion, rewards[0]) for context, completion, rewards in _turns(episodes, history_window)
    )
    return _rows(counts)


def returns_to_go(episodes: Dataset, history_window: int = 1) -> Dataset:
    """
    Rows for Monte-Carlo regression: the mean discounted return that followed an action is all its row is paid.

    The squared error of one row with the mean differs from that of all its returns by a constant.
    """
    sums: dict[tuple, float] = {}
    counts: Counter = Counter()
    discounts = GAMMA ** np.arange(1000)
    for context, completion, rewards in _turns(episodes, history_window):
        key = (context, completion[:1])
        sums[key] = sums.get(key, 0.0) + float(np.dot(rewards, discounts[: len(rewards)]))
        counts[key] += 1
    return _rows({(*key, total / counts[key]): counts[key] for key, total in sums.items()})


# Learning


class Job(NamedTuple):
    """A model to train."""

    name: str
    seed: int
    rows: Dataset
    steps: int
    algorithm: str = "ilql"  # or "mc", "qrlhf"


def train(job: Job, arguments: ScriptArguments) -> tuple[Path, float]:
    """Trains a small Llama with heads from scratch; every step sees all rows. Returns its folder, and the seconds."""
    torch.set_num_threads(arguments.threads)
    set_seed(job.seed)
    tokenizer = make_tokenizer()
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        initializer_range=0.1,  # the usual 0.02 is made for wider models and starts this one too flat
        vocab_size=len(tokenizer),
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    directory = arguments.output_dir / job.name.replace(", ", "-").replace(" ", "_").replace("%", "")
    common: dict[str, Any] = {
        "output_dir": str(directory),
        "seed": job.seed,
        "max_steps": job.steps,
        "per_device_train_batch_size": len(job.rows),
        "learning_rate": arguments.learning_rate,
        "lr_scheduler_type": "cosine",
        "max_grad_norm": 0.0,
        "history_window": arguments.history_window,
        "gamma": GAMMA,
        "discount_on": "utterance",
        "use_cpu": True,
        "disable_tqdm": True,
        "logging_steps": 100,
        "save_strategy": "no",
        "report_to": [],
    }
    data: dict[str, Any] = {"train_dataset": job.rows, "processing_class": tokenizer}
    trainer: ILQLTrainer | QRLHFTrainer
    if job.algorithm == "qrlhf":
        dueling = LlamaDuelingQForCausalLM.from_config(config, policy="lm", beta=arguments.beta, head_init="zero")
        args = QRLHFConfig(conservative_scale=arguments.conservative_scale, ema_beta=1 - arguments.alpha, **common)
        trainer = QRLHFTrainer(dueling, args, **data)
    else:
        model = AutoModelForCausalLMWithILQLHeads.from_config(
            config,
            head_type=arguments.head_type,
            num_q_heads=1 if job.algorithm == "mc" else 2,
            beta=arguments.beta,
        )
        ilql_args = ILQLConfig(
            target="mc" if job.algorithm == "mc" else "td",
            tau=arguments.tau,
            cql_scale=arguments.cql_scale,
            alpha=arguments.alpha,
            **common,
        )
        trainer = ILQLTrainer(model, ilql_args, **data)
    trainer.remove_callback(PrinterCallback)  # several models are trained at a time
    if job.algorithm != "mc":
        # From the lowest value there is: what is good then spreads from the goal. From above, the values of what the
        # data do not show would stay too high for long.
        trainer.model.heads.set_constant(trainer.value_min)
    seconds = trainer.train().metrics["train_runtime"]
    trainer.save_model()
    return directory, seconds


def train_all(jobs: list[Job], arguments: ScriptArguments) -> Iterator[tuple[Path, float]]:
    """Yields what `train` returns of each job in turn; with several processes, later ones are trained meanwhile."""
    if arguments.processes == 1:
        yield from (train(job, arguments) for job in jobs)
        return
    with ProcessPoolExecutor(arguments.processes, mp_context=get_context("spawn")) as pool:
        yield from pool.map(train, jobs, [arguments] * len(jobs))


# Measuring


@torch.no_grad()
def inspect(
    model: ILQLForCausalLM | LlamaDuelingQForCausalLM, arguments: ScriptArguments, beta: float
) -> tuple[Policy, dict[Cell, float]]:
    """
    What the model would do in every cell, and what it thinks the cell is worth; exact, without any sampling.

    The probability of an action is the product of those of its tokens. What is missing to 1 is no action.
    """
    tokenizer = make_tokenizer()
    prompts = [tokenizer(describe(cell) + "\n")["input_ids"] for cell in STARTS]
    actions = [tokenizer(action_text(direction, not arguments.textual))["input_ids"] for direction in DIRECTIONS]
    rows = [prompt + action for prompt in prompts for action in actions]
    width = max(map(len, rows))
    # Padded on the right, where nothing that counts can see it.
    input_ids = torch.tensor([row + [tokenizer.pad_token_id] * (width - len(row)) for row in rows])
    starts = torch.tensor([len(prompt) for prompt in prompts for _ in actions])
    log_policy = model(input_ids=input_ids, beta=beta).logits.log_softmax(-1)
    if isinstance(model, LlamaDuelingQForCausalLM):
        value = model(input_ids=input_ids, return_q_values=True).q_values.amax(-1)
    else:
        value = model(input_ids=input_ids, output_values=True).value

    policy: dict[Cell, dict[str, float]] = {cell: {} for cell in STARTS}
    values = {}
    for row, (cell, direction) in enumerate((cell, direction) for cell in STARTS for direction in DIRECTIONS):
        start, tokens = int(starts[row]), actions[DIRECTIONS.index(direction)]
        places = torch.arange(start - 1, start - 1 + len(tokens))
        policy[cell][direction] = float(log_policy[row, places, torch.tensor(tokens)].sum().exp())
        values[cell] = float(value[row, start - 1])
    return policy, values


def play(policies: Mapping[str, ModelPolicy], samples: int, arguments: ScriptArguments) -> dict[str, EvaluationResult]:
    """Plays `samples` episodes from each of the 25 starts with each policy, on the same seeds."""
    starts = [cell for cell in STARTS for _ in range(samples)]
    comparison = compare_policies(
        policies,
        partial(MazeEnv, partially_observed=arguments.partially_observed, one_token_actions=not arguments.textual),
        [episode_seed(i, "test") for i in range(len(starts))],
        split="test",
        options=[{"start": start} for start in starts],
        on_length="continue",  # a reply that is no action is answered by the game, not the end of the episode
        batch_size=len(starts),
        scale=SCALES[arguments.task],
        verbose=False,
    )
    return comparison.results


def share_right(policy: Policy) -> float:
    """Share of the cells in which the likeliest direction is one of the best."""
    best = optimal_directions()
    return float(np.mean([max(policy[cell], key=policy[cell].__getitem__) in best[cell] for cell in STARTS]))


# The table


def published_rows(task: str) -> dict[str, dict[str, Any]]:
    methods = ("BC", "filtered BC", "MC", "ILQL")
    scores = {method: PUBLISHED_SCORES[task][method] for method in methods}
    return {
        f"LMRL-Gym's {name}": {"return": score.raw, "normalized": score.normalized} for name, score in scores.items()
    }


def print_table(title: str, rows: Mapping[str, Mapping[str, Any]]) -> None:
    table = Table(title=title)
    table.add_column("policy")
    for column in ("exact return", "sampled (95% interval)", "success", "score", "cells right", "steps", "time"):
        table.add_column(column, justify="right")
    for name, row in rows.items():
        sampled = f"{row['sampled']:.2f} ({row['low']:.2f} to {row['high']:.2f})" if "sampled" in row else ""
        table.add_row(
            name,
            f"{row['return']:.2f}" if "return" in row else "",
            sampled,
            f"{row['success']:.3f}" if "success" in row else "",
            f"{row['normalized']:.1f}",
            f"{row['cells_right']:.2f}" if "cells_right" in row else "",
            str(row["steps"]) if "steps" in row else "",
            f"{row['seconds']:.0f} s" if "seconds" in row else "",
        )
    # Wide enough for the intervals also where the output goes to a file.
    Console(width=max(Console().width, 120)).print(table)


def save_picture(policy: Policy, values: Mapping[Cell, float], path: Path) -> None:
    """Draws what the model believes beside what is true: the value of every cell, and where it goes from there."""
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        print("No picture: matplotlib is not installed (pip install matplotlib).")
        return
    best = optimal_directions()
    truth = {cell: {way: 1 / len(best[cell]) for way in best[cell]} for cell in STARTS}
    panels = [("learned", policy, values), ("true", truth, optimal_values(GAMMA))]
    steps = {"right": (1, 0), "left": (-1, 0), "up": (0, -1), "down": (0, 1)}
    figure, all_axes = plt.subplots(1, 2, figsize=(13, 4.6), layout="constrained")
    for axes, (name, chances, numbers) in zip(all_axes, panels, strict=True):
        grid = np.full((10, 13), np.nan)
        for cell in STARTS:
            grid[cell] = numbers[cell]
        image = axes.imshow(grid, vmin=min(values.values()), vmax=0, cmap="viridis")
        for row, column in STARTS:
            axes.text(column, row + 0.35, f"{numbers[row, column]:.1f}", ha="center", va="center", size=7, color="w")
            for way, chance in chances[row, column].items():
                x, y = (0.5 * chance * part for part in steps[way])
                if chance > 0.05:
                    axes.arrow(
                        column - x / 2, row - 0.12 - y / 2, x, y, head_width=0.14, color="w", length_includes_head=True
                    )
        axes.text(GOAL[1], GOAL[0], "goal", ha="center", va="center", size=8)
        axes.set(title=f"{name} values (discount {GAMMA} per move) and policy", xticks=[], yticks=[], facecolor="0.85")
    figure.colorbar(image, ax=all_axes, shrink=0.8)
    figure.savefig(path, dpi=120)
    plt.close(figure)


# The script


def main(arguments: ScriptArguments) -> dict[str, dict[str, Any]]:
    torch.set_num_threads(arguments.threads)
    if arguments.history_window > 1 and not arguments.partially_observed:
        raise ValueError("The position tells all there is to know: `history_window` is for `partially_observed`.")
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    scale = SCALES[arguments.task]
    tokenizer = make_tokenizer()
    episodes = make_episodes(arguments)
    rows = transitions(episodes, arguments.history_window)
    data_return = float(np.mean(episodes["return"]))
    print(
        f"{len(episodes)} episodes with mean return {data_return:.2f}, {len(successes(episodes))} of which arrive; "
        f"{sum(map(len, episodes['turn_rewards']))} turns, {len(rows)} of them distinct"
    )

    first = f"ILQL, seed {arguments.seeds[0]}"
    jobs = [Job(f"ILQL, seed {seed}", seed, rows, arguments.steps) for seed in arguments.seeds]
    if arguments.qrlhf:
        jobs += [Job(f"QRLHF, seed {seed}", seed, rows, arguments.qrlhf_steps, "qrlhf") for seed in arguments.seeds]
    if arguments.baselines:
        window, seed, steps = arguments.history_window, arguments.seeds[0], arguments.baseline_steps
        jobs += [
            Job("filtered BC, successes", seed, transitions(successes(episodes), window), steps),
            Job("filtered BC, best 10%", seed, transitions(filter_by_return(episodes, top=0.1), window), steps),
            Job("MC", seed, returns_to_go(episodes, window), steps, "mc"),
        ]
    print(f"Training {len(jobs)} models, {arguments.processes} at a time; each takes a minute or two.", flush=True)

    results: dict[str, dict[str, Any]] = {}
    slow: dict[str, ModelPolicy] = {}
    fast: dict[str, ModelPolicy] = {}
    reply = {"max_new_tokens": 3 if arguments.textual else 1, "batch_size": 256}
    for job, (directory, seconds) in zip(jobs, train_all(jobs, arguments), strict=True):
        load = LlamaDuelingQForCausalLM if job.algorithm == "qrlhf" else AutoModelForCausalLMWithILQLHeads
        model = load.from_pretrained(directory).eval()
        group, beta = (fast if job.name.startswith(("ILQL", "QRLHF")) else slow), arguments.beta
        measured = [(job.name, 0.0 if job.name.startswith("filtered") else beta, group)]
        if job.name == first and arguments.baselines:
            # The cloning term trains the language model under the heads on all episodes alike: without them it is BC.
            measured.append(("BC", 0.0, slow))
        for name, beta, group in measured:
            group[name] = ModelPolicy(model, tokenizer, beta=beta, **reply)
            results[name] = {"steps": job.steps, "seconds": seconds}
            if not arguments.partially_observed:  # where the cell alone decides what the model does
                policy, values = inspect(model, arguments, beta)
                exact = float(np.mean(list(policy_returns(policy).values())))
                results[name] |= {
                    "return": exact,
                    "normalized": normalized_score(exact, scale),
                    "cells_right": share_right(policy),
                }
                if name == first:
                    save_picture(policy, values, arguments.output_dir / "maze.png")
            print(f"{name}: {results[name]}", flush=True)

    for group, samples in ((slow, arguments.baseline_samples), (fast, arguments.samples)):
        played = play(group, samples, arguments) if group and samples else {}
        for name, result in played.items():
            results[name] |= {
                "sampled": result.mean_return.mean,
                "low": result.mean_return.low,
                "high": result.mean_return.high,
                "success": result.success_rate,
                "n": result.n_ok,
            }
            results[name].setdefault("normalized", result.normalized_score)

    optimum = float(np.mean([optimal_values()[cell] for cell in STARTS]))
    table = {
        "behaviour data": {"return": data_return, "normalized": normalized_score(data_return, scale)},
        **results,
        "optimum": {"return": optimum, "normalized": normalized_score(optimum, scale)},
        **published_rows(arguments.task),
    }
    print_table(f"{arguments.task}: mean return, beta {arguments.beta:g}", table)
    (arguments.output_dir / "results.json").write_text(json.dumps(table, indent=2) + "\n")
    picture = "" if arguments.partially_observed else ", the picture maze.png"
    print(f"results.json{picture} and the models are in {arguments.output_dir}")
    return table


if __name__ == "__main__":
    (script_arguments,) = HfArgumentParser(ScriptArguments).parse_args_into_dataclasses()
    main(script_arguments)
