# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""
One step of heads and loss, forward and backward: in chunks over the vocabulary, as hf_qrl trains, against dense.

The dense side is what a direct implementation of the equations does, written out here: `dense mlp` is the architecture
and the maths of trlX (two Q-heads, two target heads and the language model, all evaluated on every action and the
whole vocabulary). Both sides start from hidden states that need a gradient, use the same weights in the same process,
and take turns, so that whatever else the machine does meets both. Gradients are None before a step, as
`optimizer.zero_grad()` leaves them.

Memory is measured in a fresh process per case. `peak memory` is the peak resident set of one step (`VmHWM`, reset
before it) over what was resident before: the weights and the inputs. Gradients of the weights are part of it. Every
implementation has to produce them, the chunked one already in its forward pass, so `extra memory` leaves them out:
it is the largest total of all other tensors alive at one time, from the allocations of the step.

    python tests/benchmarks/bench_loss.py
    python tests/benchmarks/bench_loss.py --quick
    python tests/benchmarks/bench_loss.py --sizes 50257,512,768 --cases "dense mlp" "chunked mlp" --threads 2
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
import weakref
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_qrl.data.ilql_types import ILQLBatch
from hf_qrl.losses.ilql import ilql_loss_from_states
from hf_qrl.models.heads import ILQLHeads, QHead
from hf_qrl.models.lm_head import LMHead


SIZES = ["50257,512,256", "50257,512,512", "50257,512,768", "151936,256,512"]
CASES = ["dense mlp", "chunked mlp", "dense linear", "chunked linear", "chunked tied", "chunked dueling"]
STEMS = {"mlp": "relu", "linear": "identity", "tied": "linear", "dueling": "silu"}
OPTIONS = {"tau": 0.7, "gamma": 0.99, "cql_scale": 0.1, "awac_scale": 1.0, "awac_beta": 1.0}
MIB = 1 << 20


def make_inputs(actions: int, width: int, vocab: int) -> tuple[torch.Tensor, ILQLBatch]:
    """`actions` actions in rows of 64, every token of a row but the first being one."""
    length = min(64, actions)
    rows = actions // length
    ixs = torch.arange(length + 1).expand(rows, -1).contiguous()
    dones = torch.ones(rows, length + 1, dtype=torch.long)
    dones[:, -1] = 0
    batch = ILQLBatch(
        input_ids=torch.randint(vocab, (rows, length + 1)),
        attention_mask=torch.ones(rows, length + 1, dtype=torch.long),
        rewards=torch.randn(rows, length),
        states_ixs=ixs,
        actions_ixs=ixs[:, :-1].contiguous(),
        dones=dones,
    )
    return torch.randn(rows, length + 1, width).requires_grad_(), batch


def make_lm_head(width: int, vocab: int) -> LMHead:
    projection = torch.nn.Linear(width, vocab, bias=False)
    config = SimpleNamespace(get_text_config=SimpleNamespace)
    base = SimpleNamespace(
        get_output_embeddings=lambda: projection,
        get_input_embeddings=lambda: None,
        named_buffers=lambda recurse: iter(()),
        config=config,
    )
    return LMHead(base)


def make_heads(kind: str, width: int, vocab: int) -> ILQLHeads:
    heads = ILQLHeads(width, vocab, kind, STEMS[kind], head_expansion=2, num_q_heads=2, q_reduction="min")
    heads.reset("default")
    with torch.no_grad():
        for target in heads.target_q:  # a target that differs from its head by about as much as in training
            for buffer in target.buffers():
                buffer.mul_(0.99)
    return heads


def dense_q(head: QHead, h: torch.Tensor, lm_weight: torch.Tensor) -> torch.Tensor:
    if head.kind == "linear":
        return F.linear(h, head.weight) + head.offset(h)
    if head.kind == "tied":
        return F.linear(head.stem(h), lm_weight.detach()) + head.offset(h)
    z = head.stem(h)
    q = F.linear(z, head.weight, head.bias)
    if head.kind == "mlp":
        return q
    if head.target:  # the target of a dueling head keeps V - mean A as one linear map
        return head.offset(z) + q
    return head.offset(z) + q - q.mean(-1, keepdim=True)


def dense_loss(hidden: torch.Tensor, heads: ILQLHeads, lm_head: LMHead, batch: ILQLBatch) -> torch.Tensor:
    """The loss of trlX on dense Q-values, without its statistics."""
    tau, gamma = OPTIONS["tau"], OPTIONS["gamma"]
    rows, length = batch.rewards.shape
    h = hidden.gather(1, batch.actions_ixs.unsqueeze(2).expand(-1, -1, hidden.shape[2]))
    states = hidden.gather(1, batch.states_ixs.unsqueeze(2).expand(-1, -1, hidden.shape[2]))
    actions = batch.input_ids.gather(1, batch.actions_ixs + 1)
    mask, alive = batch.dones[:, :-1].float(), batch.dones[:, 1:].float()
    n = mask.sum()

    qs = [dense_q(head, h, lm_head.module.weight) for head in heads.q]
    with torch.no_grad():
        target_qs = [dense_q(head, h, lm_head.module.weight) for head in heads.target_q]
    values = heads.v(states)
    # As a language model returns them, on every position, of which the actions are picked out.
    logits = F.linear(hidden, lm_head.module.weight)
    logits = logits.gather(1, batch.actions_ixs.unsqueeze(2).expand(-1, -1, logits.shape[2]))

    def taken(x: torch.Tensor) -> torch.Tensor:
        return x.gather(2, actions.unsqueeze(2)).squeeze(2)

    def cross_entropy(x: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(x.flatten(0, 1), actions.flatten(), reduction="none").view(rows, length)

    q, target_q = [taken(x) for x in qs], torch.minimum(*(taken(x) for x in target_qs))
    v = values[:, :-1]
    y = batch.rewards + gamma * (values[:, 1:] * alive).detach()
    advantage = target_q - v
    loss_q = sum((((x - y) * mask) ** 2).sum() for x in q) / n
    loss_v = ((advantage >= 0) * tau + (advantage < 0) * (1 - tau)) * advantage**2 * mask
    loss_cql = sum((cross_entropy(x) * mask).sum() for x in qs) / n
    weight = (OPTIONS["awac_beta"] * advantage).exp().detach()
    loss_awac = (cross_entropy(logits) * weight * mask).sum() / n
    return loss_q + loss_v.sum() / n + OPTIONS["cql_scale"] * loss_cql + OPTIONS["awac_scale"] * loss_awac


def chunked_loss(hidden: torch.Tensor, heads: ILQLHeads, lm_head: LMHead, batch: ILQLBatch) -> torch.Tensor:
    return ilql_loss_from_states(hidden, heads, lm_head, batch, **OPTIONS)[0]


LOSSES = {"dense": dense_loss, "chunked": chunked_loss}


def leaves_of(hidden: torch.Tensor, heads: ILQLHeads, lm_head: LMHead) -> dict[str, torch.Tensor]:
    return {"hidden_states": hidden, "lm_head": lm_head.module.weight, **dict(heads.named_parameters())}


def clear(leaves: dict[str, torch.Tensor]) -> None:
    for leaf in leaves.values():
        leaf.grad = None


# --------------------------------------------------------------------------------------------------------------- time


def measure_times(cases: list[str], heads: dict, hidden, lm_head, batch, repeats: int) -> tuple[dict, dict]:
    """Seconds of each repeat, `{case: [...]}`, by the clock on the wall and by the processor's."""
    wall, cpu = {case: [] for case in cases}, {case: [] for case in cases}
    for repeat in range(repeats + 1):  # the first round warms up
        for case in cases:
            implementation, kind = case.split()
            clear(leaves_of(hidden, heads[kind], lm_head))
            start = time.perf_counter(), time.process_time()
            LOSSES[implementation](hidden, heads[kind], lm_head, batch).backward()
            if repeat:
                wall[case].append(time.perf_counter() - start[0])
                cpu[case].append(time.process_time() - start[1])
            clear(leaves_of(hidden, heads[kind], lm_head))
    return wall, cpu


def measure_difference(kind: str, heads: dict, hidden, lm_head, batch) -> tuple[float, float, str]:
    """Relative difference of the loss, and of the gradient that differs most, each by its largest entry."""
    leaves = leaves_of(hidden, heads[kind], lm_head)
    dense = dense_loss(hidden, heads[kind], lm_head, batch)
    dense.backward()
    gradients = {name: leaf.grad for name, leaf in leaves.items()}
    clear(leaves)
    chunked = chunked_loss(hidden, heads[kind], lm_head, batch)
    chunked.backward()
    differences = {
        name: ((leaf.grad - gradients[name]).abs().max() / gradients[name].abs().max()).item()
        for name, leaf in leaves.items()
    }
    clear(leaves)
    worst = max(differences, key=differences.get)
    return abs((chunked - dense) / dense).item(), differences[worst], worst


# ------------------------------------------------------------------------------------------------------------- memory


def resident(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


class LiveTensors(TorchDispatchMode):
    """Records when the storages that operations allocate come and go."""

    def __init__(self):
        super().__init__()
        self.alive: dict[int, tuple[weakref.ref, int]] = {}  # by id of the storage: its number
        self.events: list[tuple[int, int]] = []  # number of the storage, bytes it adds
        self.shapes: list[torch.Size] = []  # by number of the storage

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        given = {id(x.untyped_storage()) for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and id(tensor.untyped_storage()) not in given:
                self.add(tensor)
        return output

    def add(self, tensor: torch.Tensor) -> None:
        storage, number = tensor.untyped_storage(), len(self.shapes)
        key, size = id(storage), storage.nbytes()
        if key in self.alive:
            return

        def remove(_):
            del self.alive[key]
            self.events.append((number, -size))

        self.alive[key] = weakref.ref(storage, remove), number
        self.events.append((number, size))
        self.shapes.append(tensor.shape)

    def peak_without_gradients(self, parameters: list[torch.Tensor]) -> int:
        # A gradient by its shape is one that autograd adds another to: in place, but not while this mode is active.
        shapes = {parameter.shape for parameter in parameters if parameter.dim() == 2}
        gradients = {number for number, shape in enumerate(self.shapes) if shape in shapes}
        gradients |= {self.alive[id(parameter.grad.untyped_storage())][1] for parameter in parameters}
        total = peak = 0
        for number, size in self.events:
            total += 0 if number in gradients else size
            peak = max(peak, total)
        return peak


def measure_step(case: str, actions: int, width: int, vocab: int) -> tuple[int, int]:
    """Peak and extra memory. To be called in a fresh process."""
    implementation, kind = case.split()

    def make(actions: int, width: int, vocab: int):
        hidden, batch = make_inputs(actions, width, vocab)
        return hidden, make_heads(kind, width, vocab), make_lm_head(width, vocab), batch

    LOSSES[implementation](*make(64, 32, 128)).backward()  # loads libraries and threads, which are no part of a step
    problem = make(actions, width, vocab)
    leaves = leaves_of(*problem[:3])
    before = resident("VmRSS")
    try:
        Path("/proc/self/clear_refs").write_text("5")  # sets the peak to what is resident now
    except OSError:
        pass  # nothing before was larger than the weights either
    LOSSES[implementation](*problem).backward()
    peak = resident("VmHWM") - before
    clear(leaves)
    with LiveTensors() as live:
        LOSSES[implementation](*problem).backward()
    return peak, live.peak_without_gradients([leaf for name, leaf in leaves.items() if name != "hidden_states"])


def measure_memory(case: str, size: str, threads: int) -> tuple[int, int]:
    command = [sys.executable, __file__, "--memory-of", case, "--sizes", size, "--threads", str(threads)]
    peak, extra = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.split()
    return int(peak), int(extra)


# -------------------------------------------------------------------------------------------------------------- table


def ratio(numerator: float | None, denominator: float) -> str:
    return "–" if numerator is None else f"{numerator / denominator:.2f}×"


def bench(size: str, cases: list[str], repeats: int, threads: int, clock: str) -> None:
    vocab, actions, width = map(int, size.split(","))
    torch.manual_seed(0)
    hidden, batch = make_inputs(actions, width, vocab)
    lm_head = make_lm_head(width, vocab)
    heads = {kind: make_heads(kind, width, vocab) for kind in dict.fromkeys(case.split()[1] for case in cases)}
    wall, cpu = measure_times(cases, heads, hidden, lm_head, batch, repeats)
    medians = {case: statistics.median(x) for case, x in {"wall": wall, "cpu": cpu}[clock].items()}
    differences = {
        kind: measure_difference(kind, heads, hidden, lm_head, batch) for kind in heads if f"chunked {kind}" in cases
    }
    del heads, lm_head, hidden
    memory = {case: measure_memory(case, size, threads) for case in cases}
    peaks, extra = ({case: x[i] for case, x in memory.items()} for i in (0, 1))

    title = (
        f"V = {vocab:,}, N = {actions}, d = {width}; {threads} threads, median of {repeats}, ratios of {clock} time"
    )
    print(f"\n{title}\n")
    print(
        "| case | wall (s) | fastest–slowest | CPU (s) | dense mlp / it | dense linear / it | peak memory (MiB) "
        "| extra memory (MiB) | dense mlp / it | dense linear / it | Δ loss | largest Δ gradient |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|---|")
    for case in cases:
        kind = case.split()[1]
        columns = [f"{statistics.median(wall[case]):.2f}", f"{min(wall[case]):.2f}–{max(wall[case]):.2f}"]
        columns += [f"{statistics.median(cpu[case]):.2f}"]
        columns += [ratio(medians.get(f"dense {dense}"), medians[case]) for dense in ("mlp", "linear")]
        columns += [f"{peaks[case] / MIB:.0f}", f"{extra[case] / MIB:.0f}"]
        columns += [ratio(extra.get(f"dense {dense}"), extra[case]) for dense in ("mlp", "linear")]
        if case.startswith("chunked"):
            loss, gradient, name = differences[kind]
            columns += [f"{loss:.0e}", f"{gradient:.0e} ({name})"]
        else:
            columns += ["–", "–"]
        print(f"| {case} | " + " | ".join(columns) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=SIZES, metavar="V,N,d")
    parser.add_argument("--cases", nargs="+", default=CASES, choices=[*CASES, "dense tied", "dense dueling"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall", help="what ratios are of; cpu if busy")
    parser.add_argument("--quick", action="store_true", help="one small size, two repeats: does it run?")
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.memory_of:
        vocab, actions, width = map(int, args.sizes[0].split(","))
        print(*measure_step(args.memory_of, actions, width, vocab))
        return
    if args.quick:
        args.sizes, args.repeats = ["8192,128,64"], 2
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}")
    for size in args.sizes:
        bench(size, args.cases, args.repeats, args.threads, args.clock)


if __name__ == "__main__":
    main()
