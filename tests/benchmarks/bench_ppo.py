# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""
One step of the PPO loss, forward and backward: in chunks over the vocabulary, as hf_qrl trains, against dense.

The dense side is what a direct implementation of the equations does: logits of all response tokens, `log_softmax`, the
row of the sampled token, and with `entropy` the entropy bonus from the same log-probabilities. Both sides have the
value loss, start from hidden states that need a gradient, use the same weights in the same process, and take turns.
Time and memory are measured as in `bench_loss.py`: `extra memory` is the largest total of all tensors but the
gradients of the weights that are alive at one time.

    python tests/benchmarks/bench_ppo.py
    python tests/benchmarks/bench_ppo.py --quick
    python tests/benchmarks/bench_ppo.py --sizes 50257,512,768 --cases dense chunked --clock cpu
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from bench_loss import MIB, LiveTensors, clear, make_lm_head, ratio, resident
from torch import nn

from hf_qrl.data import PPORLBatch
from hf_qrl.losses import ppo_loss
from hf_qrl.losses.ppo import ppo_loss_from_states, score_tokens_from_states
from hf_qrl.models.heads import ValueHead
from hf_qrl.models.lm_head import LMHead


SIZES = [f"{vocab},{rows},{width}" for vocab in (50257, 151936) for rows in (512, 1024) for width in (512, 768)]
CASES = ["dense", "chunked", "dense entropy", "chunked entropy"]
LENGTH = 64  # tokens of a response
ENTROPY_COEF = 0.01


class Problem:
    """Hidden states, a value head, a projection and a batch whose policy has moved a little since it sampled."""

    def __init__(self, vocab: int, tokens: int, width: int):
        shape = tokens // LENGTH, LENGTH
        self.states = torch.randn(*shape, width, requires_grad=True)
        self.heads = nn.Module()
        self.heads.v = ValueHead(width)
        self.lm_head = make_lm_head(width, vocab)
        self.batch = PPORLBatch(
            query_tensors=torch.zeros(shape[0], 1, dtype=torch.long),
            response_tensors=torch.randint(vocab, shape),
            logprobs=torch.zeros(shape),
            values=torch.randn(shape),
            rewards=torch.zeros(shape),
            advantages=torch.randn(shape),
            returns=torch.randn(shape),
            response_mask=torch.ones(shape, dtype=torch.bool),
        )
        logprobs, _ = score_tokens_from_states(self.states, self.lm_head, self.batch)
        self.batch.logprobs = logprobs + 0.2 * torch.randn(shape)

    def leaves(self) -> dict[str, torch.Tensor]:
        weights = {"lm_head": self.lm_head.module.weight, **dict(self.heads.named_parameters())}
        return {"hidden_states": self.states, **weights}


def dense_loss(states, heads, lm_head: LMHead, batch: PPORLBatch, entropy_coef: float) -> torch.Tensor:
    logprobs = F.linear(states, lm_head.module.weight).log_softmax(-1)
    taken = logprobs.gather(2, batch.response_tensors.unsqueeze(2)).squeeze(2)
    columns = batch.logprobs, batch.values, batch.advantages, batch.returns, batch.response_mask
    loss, _ = ppo_loss(taken, heads.v(states), *columns)
    if entropy_coef > 0:
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        loss = loss - entropy_coef * entropy[batch.response_mask].mean()
    return loss


def chunked_loss(states, heads, lm_head: LMHead, batch: PPORLBatch, entropy_coef: float) -> torch.Tensor:
    return ppo_loss_from_states(states, heads, lm_head, batch, entropy_coef=entropy_coef)[0]


def loss_of(case: str, problem: Problem) -> torch.Tensor:
    function = dense_loss if case.startswith("dense") else chunked_loss
    coefficient = ENTROPY_COEF if case.endswith("entropy") else 0.0
    return function(problem.states, problem.heads, problem.lm_head, problem.batch, coefficient)


# --------------------------------------------------------------------------------------------------------------- time


def measure_times(cases: list[str], problem: Problem, repeats: int) -> tuple[dict, dict]:
    """Seconds of each repeat, `{case: [...]}`, by the clock on the wall and by the processor's."""
    wall, cpu = {case: [] for case in cases}, {case: [] for case in cases}
    for repeat in range(repeats + 1):  # the first round warms up
        for case in cases:
            start = time.perf_counter(), time.process_time()
            loss_of(case, problem).backward()
            if repeat:
                wall[case].append(time.perf_counter() - start[0])
                cpu[case].append(time.process_time() - start[1])
            clear(problem.leaves())
    return wall, cpu


def measure_difference(case: str, problem: Problem) -> tuple[float, float, str]:
    """Relative difference of the loss, and of the gradient that differs most, each by its largest entry."""
    leaves, losses, gradients = problem.leaves(), [], []
    for implementation in ("dense", "chunked"):
        loss = loss_of(case.replace("chunked", implementation), problem)
        loss.backward()
        losses.append(loss.item())
        gradients.append({name: leaf.grad for name, leaf in leaves.items()})
        clear(leaves)
    dense, chunked = gradients
    differences = {name: ((chunked[name] - x).abs().max() / x.abs().max()).item() for name, x in dense.items()}
    worst = max(differences, key=differences.get)
    return abs((losses[1] - losses[0]) / losses[0]), differences[worst], worst


# ------------------------------------------------------------------------------------------------------------- memory


def measure_step(case: str, vocab: int, tokens: int, width: int) -> tuple[int, int]:
    """Peak and extra memory. To be called in a fresh process."""
    loss_of(case, Problem(128, LENGTH, 32)).backward()  # loads libraries and threads, which are no part of a step
    problem = Problem(vocab, tokens, width)
    leaves = problem.leaves()
    before = resident("VmRSS")
    try:
        Path("/proc/self/clear_refs").write_text("5")  # sets the peak to what is resident now
    except OSError:
        pass  # nothing before was larger than the weights and a chunk either
    loss_of(case, problem).backward()
    peak = resident("VmHWM") - before
    clear(leaves)
    with LiveTensors() as live:
        loss_of(case, problem).backward()
    return peak, live.peak_without_gradients([leaf for name, leaf in leaves.items() if name != "hidden_states"])


def measure_memory(case: str, size: str, threads: int) -> tuple[int, int]:
    command = [sys.executable, __file__, "--memory-of", case, "--sizes", size, "--threads", str(threads)]
    peak, extra = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.split()
    return int(peak), int(extra)


# -------------------------------------------------------------------------------------------------------------- table


def bench(size: str, cases: list[str], repeats: int, threads: int, clock: str) -> None:
    vocab, tokens, width = map(int, size.split(","))
    torch.manual_seed(0)
    problem = Problem(vocab, tokens, width)
    wall, cpu = measure_times(cases, problem, repeats)
    medians = {case: statistics.median(x) for case, x in {"wall": wall, "cpu": cpu}[clock].items()}
    differences = {case: measure_difference(case, problem) for case in cases if case.startswith("chunked")}
    del problem
    memory = {case: measure_memory(case, size, threads) for case in cases}

    title = f"V = {vocab:,}, N = {tokens}, d = {width}; {threads} threads, median of {repeats}, ratios of {clock} time"
    print(f"\n{title}\n")
    print(
        "| case | wall (s) | CPU (s) | dense / it | peak memory (MiB) | dense / it | extra memory (MiB) | dense / it "
        "| Δ loss | largest Δ gradient |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for case in cases:
        dense = case.replace("chunked", "dense")
        columns = [f"{statistics.median(wall[case]):.2f}", f"{statistics.median(cpu[case]):.2f}"]
        columns += [ratio(medians.get(dense), medians[case])]
        for i in range(2):
            columns += [f"{memory[case][i] / MIB:.0f}"]
            columns += [ratio(memory[dense][i] if dense in memory else None, memory[case][i])]
        if case in differences:
            loss, gradient, name = differences[case]
            columns += [f"{loss:.0e}", f"{gradient:.0e} ({name})"]
        else:
            columns += ["–", "–"]
        print(f"| {case} | " + " | ".join(columns) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=SIZES, metavar="V,N,d")
    parser.add_argument("--cases", nargs="+", default=CASES, choices=CASES)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall", help="what ratios are of; cpu if busy")
    parser.add_argument("--quick", action="store_true", help="one small size, two repeats: does it run?")
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.memory_of:
        print(*measure_step(args.memory_of, *map(int, args.sizes[0].split(","))))
        return
    if args.quick:
        args.sizes, args.repeats = ["8192,128,64"], 2
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}")
    for size in args.sizes:
        bench(size, args.cases, args.repeats, args.threads, args.clock)


if __name__ == "__main__":
    main()
