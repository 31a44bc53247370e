# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""Random walks: learn to walk the shortest way from walks that wander.

The world is a small directed graph whose nodes are the letters `a` to `u`. A walk starts anywhere but at the
goal `a` and is worth more the fewer nodes it visits before the goal. The data are uniform random walks: about
half of them get lost, hardly any is the shortest, yet together they hold every edge that the best policy
needs. Copying them copies their quality; Q-learning stitches their good pieces together.

    python examples/random_walks.py --output_dir outputs/random_walks

The task is that of trlX's `randomwalks` example (Havrilla et al., 2023), with the same graph and the same
walks for the same seed.
"""

import json
import math
from collections import deque
from collections.abc import Iterable, Sequence
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

from hf_qrl import AutoModelForCausalLMWithILQLHeads, ILQLConfig, ILQLTrainer


GOAL = 0
N_NODES = 21
MAX_LENGTH = 10  # nodes in the longest walk, its start included
NO_PATH = 10**6  # distance of a node from which the goal cannot be reached
END_OF_TEXT, PAD = "<|endoftext|>", "<pad>"


# The graph


@dataclass(frozen=True)
class Graph:
    """A directed graph with an absorbing goal.

    Args:
        adjacency (`np.ndarray` of shape `(n_nodes, n_nodes)`, boolean):
            `adjacency[i, j]` says whether a step from node `i` to node `j` is allowed. The goal leads to itself.
        shortest (`np.ndarray` of shape `(n_nodes,)`):
            Number of nodes on a shortest path from each node to the goal, both ends counted: 1 at the goal itself.
    """

    adjacency: np.ndarray
    shortest: np.ndarray

    @property
    def n_nodes(self) -> int:
        return len(self.adjacency)

    @property
    def n_edges(self) -> int:
        """Number of edges, the goal's loop not counted."""
        return int(self.adjacency.sum()) - 1

    @property
    def starts(self) -> list[int]:
        return [node for node in range(self.n_nodes) if node != GOAL]

    def successors(self, node: int) -> np.ndarray:
        return np.flatnonzero(self.adjacency[node])


def make_graph(
    seed: int | np.random.RandomState = 1000, n_nodes: int = N_NODES, p_edge: float = 0.1, max_length: int = MAX_LENGTH
) -> Graph:
    """
    Draw a graph in which every node has a way out and every start can reach the goal in fewer than `max_length` nodes.

    Args:
        seed (`int` or `np.random.RandomState`, *optional*, defaults to 1000):
            Seed, or a generator under way, which then moves on.
        n_nodes (`int`, *optional*, defaults to 21):
            Number of nodes, one letter each: 26 at most.
        p_edge (`float`, *optional*, defaults to 0.1):
            Probability of each directed edge.
        max_length (`int`, *optional*, defaults to 10):
            Number of nodes in the longest walk that counts. A start that cannot do better has no scale to be
            measured on, so a graph with such a start is drawn again.
    """
    if not 2 <= n_nodes <= 26:
        raise ValueError(f"n_nodes must be between 2 and 26, one letter for each node, got {n_nodes}.")
    rng = _as_generator(seed)
    while True:
        adjacency = rng.rand(n_nodes, n_nodes) > 1 - p_edge
        np.fill_diagonal(adjacency, False)
        if not adjacency.any(axis=1).all():
            continue
        adjacency[GOAL] = False
        adjacency[GOAL, GOAL] = True
        shortest = shortest_lengths(adjacency)
        if shortest.max() < max_length:
            return Graph(adjacency, shortest)


def shortest_lengths(adjacency: np.ndarray) -> np.ndarray:
    """Number of nodes on the shortest path from each node to the goal: a breadth-first search backwards."""
    lengths = np.full(len(adjacency), NO_PATH)
    lengths[GOAL] = 1
    queue = deque([GOAL])
    while queue:
        node = queue.popleft()
        for previous in np.flatnonzero(adjacency[:, node]):
            if lengths[previous] == NO_PATH:
                lengths[previous] = lengths[node] + 1
                queue.append(int(previous))
    return lengths


# The walks and their worth


def sample_walks(
    graph: Graph, seed: int | np.random.RandomState, n_walks: int = 1000, max_length: int = MAX_LENGTH
) -> list[str]:
    """
    Walk at random: a uniform start other than the goal, then uniform steps until the goal or `max_length` nodes.

    Returns:
        `list[str]`: one letter per node visited.
    """
    rng = _as_generator(seed)
    return [_sample_walk(graph, rng, max_length) for _ in range(n_walks)]


def _sample_walk(graph: Graph, rng: np.random.RandomState, max_length: int) -> str:
    node = GOAL
    while node == GOAL:
        node = rng.randint(graph.n_nodes)
    walk = [node]
    while node != GOAL and len(walk) < max_length:
        node = rng.choice(graph.successors(node))
        walk.append(node)
    return "".join(map(node_to_letter, walk))


def make_data(seed: int = 1000, n_walks: int = 1000) -> tuple[Graph, list[str]]:
    """Graph and walks from one stream of random numbers, as in trlX."""
    rng = np.random.RandomState(seed)
    graph = make_graph(rng)
    return graph, sample_walks(graph, rng, n_walks)


def optimality(walks: Iterable[str], graph: Graph, max_length: int = MAX_LENGTH) -> np.ndarray:
    """
    The worth of each walk: 1 for a shortest path to the goal, 0 for one that is lost, breaks the rules, or takes
    `max_length` nodes. What follows the goal does not count.

    Returns:
        `np.ndarray` of shape `(n_walks,)`: `(max_length - nodes until the goal) / (max_length - shortest)`.
    """
    return np.array([_optimality(walk, graph, max_length) for walk in walks])


def _optimality(walk: str, graph: Graph, max_length: int) -> float:
    nodes = [letter_to_node(letter) for letter in walk]
    if not nodes or nodes[0] not in graph.starts:
        last = node_to_letter(graph.n_nodes - 1)
        raise ValueError(f"A walk starts with a letter from {node_to_letter(GOAL + 1)} to {last}, got {walk!r}.")
    length = min(_nodes_until_goal(nodes, graph) or max_length, max_length)
    return (max_length - length) / float(max_length - graph.shortest[nodes[0]])


def _nodes_until_goal(nodes: Sequence[int], graph: Graph) -> int | None:
    for count, (node, following) in enumerate(zip(nodes, nodes[1:], strict=False), start=2):
        if not (0 <= following < graph.n_nodes and graph.adjacency[node, following]):
            return None
        if following == GOAL:
            return count
    return None


def uniform_policy(graph: Graph) -> np.ndarray:
    """The policy that made the data, as a transition matrix `(n_nodes, n_nodes)`."""
    return graph.adjacency / graph.adjacency.sum(axis=1, keepdims=True)


def expected_optimality(graph: Graph, transitions: np.ndarray, max_length: int = MAX_LENGTH) -> float:
    """
    Exact mean optimality of a Markov policy over uniform starts, without sampling.

    Args:
        graph ([`Graph`]):
            The graph.
        transitions (`np.ndarray` of shape `(n_nodes, n_nodes)`):
            Probability of each step. Probability on a step that is not an edge is a walk that is lost.
    """
    steps = np.where(graph.adjacency, transitions, 0.0)
    steps[GOAL] = 0.0  # the goal is entered once
    starts = graph.starts
    scale = max_length - graph.shortest[starts]
    occupancy = np.eye(graph.n_nodes)[starts]  # (starts, nodes)
    value = np.zeros(len(starts))
    for length in range(2, max_length + 1):
        occupancy = occupancy @ steps
        value += occupancy[:, GOAL] * (max_length - length) / scale
    return float(value.mean())


def best_per_start(walks: Sequence[str], scores: np.ndarray) -> float:
    """Mean, over the starts, of the best walk in the data: what a policy that only picks whole walks could reach."""
    best: dict[str, float] = {}
    for walk, score in zip(walks, scores, strict=True):
        best[walk[0]] = max(score, best.get(walk[0], 0.0))
    return float(np.mean(list(best.values())))


# Text


def node_to_letter(node: int) -> str:
    return chr(ord("a") + node)


def letter_to_node(letter: str) -> int:
    """The node of a letter; for any other sign a number that is no node."""
    return ord(letter) - ord("a")


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


def _as_generator(seed: int | np.random.RandomState) -> np.random.RandomState:
    return seed if isinstance(seed, np.random.RandomState) else np.random.RandomState(seed)


# Learning


def train(
    seed: int, rows: list[dict[str, str | float]], arguments: "ScriptArguments", output_dir: Path
) -> ILQLTrainer:
    """Trains a small Llama with ILQL heads from scratch on the walks."""
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
    model = AutoModelForCausalLMWithILQLHeads.from_config(
        config, head_type=arguments.head_type, q_reduction=arguments.q_reduction, beta=arguments.beta
    )
    args = ILQLConfig(
        output_dir=str(output_dir),
        seed=seed,
        max_steps=arguments.steps,
        per_device_train_batch_size=100,
        learning_rate=2e-3,
        lr_scheduler_type="cosine",
        tau=0.9,
        cql_scale=0.1,
        alpha=0.1,
        reward_scaling="standardize",
        logging_steps=100,
        save_strategy="no",
        report_to=[],
    )
    trainer = ILQLTrainer(model, args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
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
        do_sample=True,
        max_new_tokens=MAX_LENGTH - 1,
        pad_token_id=tokenizer.pad_token_id,
        **kwargs,
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
    head_type: str = field(default="mlp", metadata={"help": "Kind of the Q-heads: mlp, linear, tied or dueling."})
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

    cloned, learned, folded, per_seed = [], [], [], {}
    for run, seed in enumerate(arguments.seeds):
        trainer = train(seed, rows, arguments, arguments.output_dir)
        model, tokenizer = trainer.model, trainer.processing_class
        cloned.extend(optimality(walk(model, tokenizer, graph, arguments.samples, beta=0.0), graph))
        of_seed = optimality(walk(model, tokenizer, graph, arguments.samples, beta=arguments.beta), graph)
        learned.extend(of_seed)
        per_seed[f"ILQL, seed {seed}"] = Score.of(of_seed)
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
        f"ILQL (beta {arguments.beta:g})": Score.of(learned),
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
