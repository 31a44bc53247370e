# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""
The conservative regulariser of Q-learning, forward and backward: dense, from chunks of rows, and from the Gram matrix
of the projection; and a whole step of Q-learning (TD, maximum of the target, regulariser) against a dense one.

The dense sides are what a direct implementation of the equations does, written out here. All sides start from inputs
that need a gradient, use the same weights in the same process, and take turns, so that whatever else the machine does
meets all of them. Gradients are None before each, as `optimizer.zero_grad()` leaves them.

`extra memory` is the largest total of all tensors alive at one time that the operations of a step allocated, without
gradients of weights, which every implementation has to produce.

    python tests/benchmarks/bench_regulariser.py
    python tests/benchmarks/bench_regulariser.py --quick
    python tests/benchmarks/bench_regulariser.py --rows 1024 4096 --repeats 5 --clock wall --threads 2
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable

import torch
from bench_loss import LiveTensors, make_heads, make_inputs

from hf_qrl.losses.conservative import sum_of_squares
from hf_qrl.losses.q_learning_from_states import q_learning_loss_from_states


MIB = 1 << 20
Q_MIN, SCALE, GAMMA = -1.0, 0.5, 0.99
TERMS = ["dense", "rows", "gram"]
STEPS = ["dense step", "chunked step"]


def dense_sum_of_squares(z: torch.Tensor, weight: torch.Tensor, coefficients: torch.Tensor) -> torch.Tensor:
    q = torch.nn.functional.linear(z, weight)
    return (coefficients * (q - Q_MIN).square().sum(1)).sum()


def dense_step(hidden: torch.Tensor, heads, batch) -> torch.Tensor:
    """Eq. 1-3 of the paper on dense Q-values of a linear head, rows being full and terminated."""
    head, target = heads.q[0], heads.target_q[0]
    actions = batch.input_ids[:, 1:]
    states = hidden[:, :-1]
    q = torch.nn.functional.linear(states, head.weight) + head.offset(states)
    with torch.no_grad():
        best = (torch.nn.functional.linear(states, target.weight) + target.offset(states)).amax(2)
    y = batch.rewards.clone()
    y[:, :-1] += GAMMA * best[:, 1:]
    taken = q.gather(2, actions.unsqueeze(2)).squeeze(2)
    squares = (q - Q_MIN).square().sum(2) - (taken - Q_MIN).square()
    return ((taken - y).square() / 2 + SCALE / 2 * squares / (q.shape[2] - 1)).mean()


def chunked_step(hidden: torch.Tensor, heads, batch) -> torch.Tensor:
    options = {"gamma": GAMMA, "discount_on": "token", "q_min": Q_MIN, "cloning_scale": 0.0}
    return q_learning_loss_from_states(hidden, heads, None, batch, conservative_scale=SCALE, **options)[0]


def measure(cases: dict[str, tuple[Callable, list]], repeats: int, clock: str) -> tuple[dict, dict, dict]:
    """Median seconds, extra bytes, and largest relative difference of loss and gradients from the first case."""
    now = {"wall": time.perf_counter, "cpu": time.process_time}[clock]
    times, extra, results = {case: [] for case in cases}, {}, {}
    for repeat in range(repeats + 1):  # the first round warms up
        for case, (loss, leaves) in cases.items():
            for leaf in leaves:
                leaf.grad = None
            if repeat == 0:
                with LiveTensors() as live:
                    value = loss()
                    value.backward()
                extra[case] = live.peak_without_gradients([x for x in leaves if x.dim() == 2 and x.is_leaf])
                results[case] = [value.detach(), *(leaf.grad for leaf in leaves)]
                continue
            start = now()
            loss().backward()
            times[case].append(now() - start)
    first = next(iter(results.values()))
    differences = {
        case: max(((x - y).abs().max() / y.abs().max()).item() for x, y in zip(result, first, strict=True))
        for case, result in results.items()
    }
    return {case: statistics.median(x) for case, x in times.items()}, extra, differences


def bench(rows: int, width: int, vocab: int, repeats: int, clock: str) -> None:
    torch.manual_seed(0)
    hidden, batch = make_inputs(rows, width, vocab)
    heads = make_heads("linear", width, vocab)
    weight, coefficients = heads.q[0].weight, torch.full((rows,), 1.0 / rows)
    z = torch.randn(rows, width).requires_grad_()
    # The inputs come last: their gradients count as memory, the small ones of all implementations.
    terms: dict[str, tuple[Callable, list]] = {
        "dense": (lambda: dense_sum_of_squares(z, weight, coefficients), [weight, z])
    }
    for method in ("rows", "gram"):

        def loss(method: str = method) -> torch.Tensor:
            return sum_of_squares(z, weight, None, None, coefficients=coefficients, q_min=Q_MIN, method=method)[0]

        terms[method] = (loss, [weight, z])
    steps = {
        "dense step": (lambda: dense_step(hidden, heads, batch), [weight, hidden]),
        "chunked step": (lambda: chunked_step(hidden, heads, batch), [weight, hidden]),
    }
    for cases in (terms, steps):
        seconds, extra, differences = measure(cases, repeats, clock)
        base = next(iter(cases))
        for case in cases:
            print(
                f"| {rows} | {case} | {seconds[case]:.2f} | {seconds[case] / seconds[base]:.2f} | "
                f"{extra[case] / MIB:.0f} | {extra[case] / (4 * rows * vocab):.2f} | {differences[case]:.0e} |",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", type=int, default=[256, 512, 1024, 2048, 4096], help="actions N")
    parser.add_argument("--vocab", type=int, default=50257)
    parser.add_argument("--width", type=int, default=512, help="of the inputs of the projection")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", choices=["wall", "cpu"], default="cpu", help="cpu if the machine is busy")
    parser.add_argument("--quick", action="store_true", help="one small size, two repeats: does it run?")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.quick:
        args.rows, args.vocab, args.width, args.repeats = [256], 4096, 64, 2
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}")
    print(
        f"V = {args.vocab:,}, D = {args.width}; {args.threads} threads, median of {args.repeats}, {args.clock} time\n"
    )
    print("| N | case | seconds | of dense | extra memory (MiB) | in units of (N, V) | largest Δ |")
    print("|---|---|---|---|---|---|---|")
    for rows in args.rows:
        bench(rows, args.width, args.vocab, args.repeats, args.clock)


if __name__ == "__main__":
    main()
