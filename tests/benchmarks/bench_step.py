# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""
A whole training step of a 135M model, ILQL against plain fine-tuning: forward, backward, AdamW and target update.

Both train on every token of the same random rows; steps alternate, and the ratio is the median over neighbouring ones.

    python tests/benchmarks/bench_step.py
    python tests/benchmarks/bench_step.py --quick
"""

import argparse
import os
import statistics
import time

import torch
from bench_decode import SHAPE
from bench_loss import OPTIONS, make_inputs
from transformers import AutoModelForCausalLM, LlamaConfig

from hf_qrl import ILQLForCausalLM
from hf_qrl.losses.ilql import ilql_loss_from_states


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head_types", nargs="+", default=["mlp", "linear", "tied", "dueling"])
    parser.add_argument("--actions", type=int, default=512, help="in rows of 64")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall", help="cpu: seconds of the processor")
    parser.add_argument("--quick", action="store_true", help="one head, two layers, one repeat: does it run?")
    args = parser.parse_args()
    shape = SHAPE
    if args.quick:
        args.head_types, args.repeats, shape = ["linear"], 1, {**SHAPE, "num_hidden_layers": 2}
    clock = {"wall": time.perf_counter, "cpu": time.process_time}[args.clock]
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    _, batch = make_inputs(args.actions, 1, shape["vocab_size"])

    def loss_fn(hidden_states, heads, lm_head, next_hidden_state):
        return ilql_loss_from_states(hidden_states, heads, lm_head, batch, next_hidden_state, **OPTIONS)[0]

    def plain_step(model: ILQLForCausalLM, optimizer: torch.optim.Optimizer) -> float:
        start = clock()
        optimizer.zero_grad()
        model.base(batch.input_ids, attention_mask=batch.attention_mask, labels=batch.input_ids).loss.backward()
        optimizer.step()
        return clock() - start

    def ilql_step(model: ILQLForCausalLM, optimizer: torch.optim.Optimizer) -> float:
        start = clock()
        optimizer.zero_grad()
        model(batch.input_ids, attention_mask=batch.attention_mask, loss_fn=loss_fn).loss.backward()
        optimizer.step()
        model.heads.update_targets(0.005)
        return clock() - start

    print(
        f"torch {torch.__version__}, {os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}, "
        f"{args.threads} threads, {args.actions} actions, median of {args.repeats}, {args.clock} time\n"
    )
    print("| heads | plain step (s) | ILQL step (s) | ILQL / plain | lowest–highest |")
    print("|---|---|---|---|---|")
    for head_type in args.head_types:
        base = AutoModelForCausalLM.from_config(LlamaConfig(**shape))
        model = ILQLForCausalLM.from_base(base, head_type=head_type).train()
        optimizers = (torch.optim.AdamW(base.parameters(), lr=1e-5), torch.optim.AdamW(model.parameters(), lr=1e-5))
        steps = [(plain_step(model, optimizers[0]), ilql_step(model, optimizers[1])) for _ in range(args.repeats + 1)][
            1:
        ]  # the first pair warms up
        ratios = [ilql / plain for plain, ilql in steps]
        plain, ilql = (statistics.median(step[i] for step in steps) for i in (0, 1))
        print(
            f"| {head_type} | {plain:.2f} | {ilql:.2f} | {statistics.median(ratios):.2f}× "
            f"| {min(ratios):.2f}–{max(ratios):.2f} |",
            flush=True,
        )
        del base, model, optimizers


if __name__ == "__main__":
    main()
