# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""Random walks: learn to walk the shortest way from walks that wander.

The world is a small directed graph whose nodes are the letters `a` to `u`. A walk starts anywhere but at the
goal `a` and is worth more the fewer nodes it visits before the goal. The data are uniform random walks: about
half of them get lost, hardly any is the shortest, yet together they hold every edge that the best policy
needs. Copying them copies their quality; Q-learning stitches their good pieces together.

    python examples/random_walks.py --output_dir outputs/random_walks

`--algorithm qrlhf` learns by autoregressive Q-learning with a dueling head instead of ILQL, and acts greedily on its
Q-values.

The task is that of trlX's `randomwalks` example (Havrilla et al., 2023), with the same graph and the same
walks for the same seed.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from rich.console import Console
from rich.table import Table
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    HfArgumentParser,
    LlamaConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    set_seed,
)

from hf_qrl import (
    AutoModelForCausalLMWithILQLHeads,
    ILQLConfig,
    ILQLTrainer,
    LlamaDuelingQForCausalLM,
    QRLHFConfig,
    QRLHFTrainer,
)
from hf_qrl.environments.games.random_walks import (
    MAX_LENGTH,
    N_NODES,
    Graph,
    best_per_start,
    expected_optimality,
    make_data,
    node_to_letter,
    optimality,
    uniform_policy,
)


END_OF_TEXT, PAD = "<|endoftext|>", "<pad>"


# Text


def make_tokenizer(n_nodes: int = N_NODES) -> PreTrainedTokenizerFast:
    """One token per letter, an end-of-text token (which also begins a text) and padding: 23 tokens for 21 nodes."""
    letters = [node_to_letter(node) for node in range(n_nodes)]
    vocabulary = {token: index for index, token in enumerate([*letters, END_OF_TEXT, PAD])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=PAD,
        model_max_length=MAX_LENGTH + 2,
        clean_up_tokenization_spaces=False,
    )


def to_rows(walks: Sequence[str], scores: Sequence[float] | np.ndarray) -> list[dict[str, str | float]]:
    """Rows for training: the start is the prompt, the rest of the walk the completion, its optimality the reward."""
    return [
        {"prompt": walk[0], "completion": walk[1:], "reward": float(score)}
        for walk, score in zip(walks, scores, strict=True)
    ]


def make_prompts(graph: Graph) -> list[str]:
    """One prompt for every start."""
    return [node_to_letter(node) for node in graph.starts]


# The table of policies


@dataclass(frozen=True)
class Score:
    """Mean optimality of a policy, with a 95% interval (of no width where the value is exact) and the sample size."""

    mean: float
    interval: tuple[float, float]
    n: int

    @classmethod
    def of(cls, values: Sequence[float] | np.ndarray) -> "Score":
        mean = float(np.mean(values))
        half = 1.96 * float(np.std(values, ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else math.inf
        return cls(mean, (mean - half, mean + half), len(values))

    @classmethod
    def exact(cls, value: float, n: int) -> "Score":
        return cls(value, (value, value), n)


def reference_scores(graph: Graph, walks: Sequence[str], scores: np.ndarray) -> dict[str, Score]:
    """What is known before any training: the data, the policy that made them, the best walks in them, the optimum."""
    n_starts = len(graph.starts)
    return {
        "behaviour data": Score.of(scores),
        "behaviour policy (exact)": Score.exact(expected_optimality(graph, uniform_policy(graph)), n_starts),
        "best walk in the data per start": Score.exact(best_per_start(walks, scores), n_starts),
        "optimum": Score.exact(1.0, n_starts),
    }


def write_results(results: dict[str, Score], path: Path) -> None:
    """Write `{policy: {mean, interval, n}}` as JSON."""
    rows = {name: {"mean": s.mean, "interval": list(s.interval), "n": s.n} for name, s in results.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(rows, indent=2) + "\n")


def print_table(results: dict[str, Score]) -> None:
    table = Table(title="Random walks: mean optimality")
    table.add_column("policy")
    for column in ("mean", "95% interval", "n"):
        table.add_column(column, justify="right")
    for name, score in results.items():
        low, high = score.interval
        table.add_row(name, f"{score.mean:.3f}", "exact" if low == high else f"{low:.3f} to {high:.3f}", str(score.n))
    Console().print(table)


# Learning


def train(
    seed: int, rows: list[dict[str, str | float]], arguments: "ScriptArguments", output_dir: Path
) -> ILQLTrainer | QRLHFTrainer:
    """Trains a small Llama with heads from scratch on the walks."""
    set_seed(seed)
    tokenizer = make_tokenizer()
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        initializer_range=0.1,  # the usual 0.02 is made for wider models and starts this one too flat
        vocab_size=len(tokenizer),
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    common: dict[str, Any] = {
        "output_dir": str(output_dir),
        "seed": seed,
        "max_steps": arguments.steps,
        "per_device_train_batch_size": 100,
        "learning_rate": 2e-3,
        "lr_scheduler_type": "cosine",
        "logging_steps": 100,
        "save_strategy": "no",
        "report_to": [],
    }
    data = {"train_dataset": Dataset.from_list(rows), "processing_class": tokenizer}
    trainer: ILQLTrainer | QRLHFTrainer
    if arguments.algorithm == "qrlhf":
        args = QRLHFConfig(gamma=0.99, discount_on="token", conservative_scale=0.1, ema_beta=0.9, **common)
        trainer = QRLHFTrainer(LlamaDuelingQForCausalLM.from_config(config, beta=arguments.beta), args, **data)
    else:
        model = AutoModelForCausalLMWithILQLHeads.from_config(
            config, head_type=arguments.head_type, q_reduction=arguments.q_reduction, beta=arguments.beta
        )
        ilql_args = ILQLConfig(tau=0.9, cql_scale=0.1, alpha=0.1, reward_scaling="standardize", **common)
        trainer = ILQLTrainer(model, ilql_args, **data)
    trainer.train()
    return trainer


def walk(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    graph: Graph,
    samples: int,
    seed: int = 0,
    **kwargs: Any,
) -> list[str]:
    """Samples `samples` walks from every start; `kwargs` go to `generate`."""
    inputs = tokenizer(make_prompts(graph) * samples, return_tensors="pt").to(model.device)
    model.eval()
    torch.manual_seed(seed)
    tokens = model.generate(
        input_ids=inputs.input_ids,
        attention_mask=inputs.attention_mask,
        max_new_tokens=MAX_LENGTH - 1,
        pad_token_id=tokenizer.pad_token_id,
        **{"do_sample": True, **kwargs},
    )
    return [text.split(END_OF_TEXT)[0] for text in tokenizer.batch_decode(tokens)]


# The script


@dataclass
class ScriptArguments:
    """Options of the example."""

    output_dir: Path = field(
        default=Path("outputs/random_walks"), metadata={"help": "Folder for results and the model of the first seed."}
    )
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2], metadata={"help": "One training run for each."})
    steps: int = field(default=400, metadata={"help": "Optimizer steps of each run."})
    beta: float = field(default=16.0, metadata={"help": "Weight of the advantage in the policy that acts."})
    algorithm: str = field(
        default="ilql", metadata={"help": "What learns: ilql or qrlhf.", "choices": ["ilql", "qrlhf"]}
    )
    head_type: str = field(default="mlp", metadata={"help": "Kind of ILQL's Q-heads: mlp, linear, tied or dueling."})
    q_reduction: str = field(default="min", metadata={"help": "How the two target heads act: by min or mean."})
    fold: bool = field(
        default=False,
        metadata={"help": "Also fold the policy into a plain Llama, save it in `folded` and measure it as loaded."},
    )
    graph_seed: int = field(default=1000, metadata={"help": "Seed of the graph and the walks."})
    samples: int = field(default=32, metadata={"help": "Walks sampled from each start to measure a policy."})
    threads: int = field(default=1, metadata={"help": "CPU threads; more are slower for a model this small."})


def main(arguments: ScriptArguments) -> dict[str, Score]:
    torch.set_num_threads(arguments.threads)
    graph, walks = make_data(arguments.graph_seed)
    scores = optimality(walks, graph)
    rows = to_rows(walks, scores)
    print(f"{len(rows)} walks, {len(arguments.seeds)} runs of {arguments.steps} steps, {arguments.threads} thread(s)")

    qrlhf = arguments.algorithm == "qrlhf"
    if qrlhf and arguments.fold:
        raise ValueError("A dueling head with a nonlinear stem does not fold; leave out `fold`, or use ILQL.")
    clone: dict[str, Any] = {"policy": "lm", "beta": 0.0} if qrlhf else {"beta": 0.0}
    act: dict[str, Any] = {"do_sample": False} if qrlhf else {"beta": arguments.beta}
    label = "QRLHF (greedy)" if qrlhf else f"ILQL (beta {arguments.beta:g})"
    cloned, learned, folded, per_seed = [], [], [], {}
    for run, seed in enumerate(arguments.seeds):
        trainer = train(seed, rows, arguments, arguments.output_dir)
        model, tokenizer = trainer.model, trainer.processing_class
        cloned.extend(optimality(walk(model, tokenizer, graph, arguments.samples, **clone), graph))
        of_seed = optimality(walk(model, tokenizer, graph, 1 if qrlhf else arguments.samples, **act), graph)
        learned.extend(of_seed)
        per_seed[f"{'QRLHF' if qrlhf else 'ILQL'}, seed {seed}"] = Score.of(of_seed)
        if run == 0:
            trainer.save_model()
        if arguments.fold:
            directory = arguments.output_dir / "folded"
            model.fold_policy(arguments.beta).save_pretrained(directory)
            plain = AutoModelForCausalLM.from_pretrained(directory)
            folded.extend(optimality(walk(plain, tokenizer, graph, arguments.samples), graph))

    references = reference_scores(graph, walks, scores)
    optimum = references.pop("optimum")
    results = {
        **references,
        "behaviour cloning (beta 0)": Score.of(cloned),
        label: Score.of(learned),
        **per_seed,
        **({"folded into a plain Llama": Score.of(folded)} if folded else {}),
        "optimum": optimum,
    }
    print_table(results)
    write_results(results, arguments.output_dir / "results.json")
    print(f"The model of seed {arguments.seeds[0]} and results.json are in {arguments.output_dir}")
    return results


if __name__ == "__main__":
    (script_arguments,) = HfArgumentParser(ScriptArguments).parse_args_into_dataclasses()
    main(script_arguments)
