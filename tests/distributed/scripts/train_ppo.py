# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""
Trains by PPO, one run after another, as the JSON file given as argument says; see `train.py`. The file holds `record`,
`deepspeed` and `runs`, each with a `name`, a `model` (a directory with a tokenizer), `args` of `PPOConfig` and, where
there are some, arguments of a `LoraConfig` (`peft`), a checkpoint to go on from (`resume`), and where to `save`.
"""

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from train import whole, without_compiler
from transformers import set_seed

from hf_qrl import PPOConfig, PPOTrainer, TextEnv


class Steps(TextEnv):
    """Two to four turns; each pays for the letter that it says, of which some are better than others."""

    def reset(self, *, seed, options=None):
        self.turns, self.turn = 2 + seed % 3, 0
        return f"{'abc'[seed % 3]} b", {}

    def step(self, action):
        self.turn += 1
        worth = float("abcdefghijklmnopqrstu".find(action.strip()[:1]))
        return f"{'defg'[self.turn]} a", worth / 20, self.turn == self.turns, False, {}


def execute(run: dict[str, Any], sharding: dict[str, Any]) -> dict[str, Any]:
    args = PPOConfig(**run["args"], **sharding)
    trainer = PPOTrainer(
        run["model"],
        args,
        environment=Steps,
        peft_config=LoraConfig(**run["peft"]) if "peft" in run else None,
    )
    shares = {
        name: 1.0 if not hasattr(x, "ds_numel") else x.numel() / x.ds_numel
        for name, x in trainer.bare_model.named_parameters()
    }
    trainer.train(resume_from_checkpoint=run.get("resume"))
    if "save" in run:
        trainer.save_model(run["save"])
    return {
        "state": whole(trainer.bare_model),
        "log": trainer.state.log_history,
        "shares": shares,
        "episodes": [(row["seed"], row["messages"], row["turn_rewards"]) for row in trainer.latest_episodes],
        "progress": vars(trainer.batches.progress),
    }


def main(spec: dict[str, Any]) -> None:
    rank = int(os.environ.get("RANK", 0))
    if spec["deepspeed"]:
        without_compiler()
    for run in spec["runs"]:
        set_seed(0)
        try:
            results = execute(run, {"deepspeed": spec["deepspeed"]})
        except Exception:
            # The others would wait for this process; it is the first failure that matters.
            torch.save({"error": traceback.format_exc()}, Path(spec["record"]) / f"{run['name']}.{rank}.pt")
            raise
        torch.save(results, Path(spec["record"]) / f"{run['name']}.{rank}.pt")


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
