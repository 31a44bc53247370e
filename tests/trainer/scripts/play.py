# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""Trains a saved model on saved episodes and on what it plays, and records what every process has in the end."""

import json
import sys
from pathlib import Path

import torch
from datasets import load_from_disk
from transformers import AutoTokenizer


sys.path.insert(0, str(Path(__file__).parents[3]))

from hf_qrl import AutoModelForCausalLMWithILQLHeads, ILQLConfig, ILQLTrainer  # noqa: E402
from tests.trainer.online_env import Letters  # noqa: E402


def main(spec: dict) -> None:
    trainer = ILQLTrainer(
        AutoModelForCausalLMWithILQLHeads.from_pretrained(spec["model"]),
        args=ILQLConfig(**spec["args"]),
        train_dataset=load_from_disk(spec["data"]),
        processing_class=AutoTokenizer.from_pretrained(spec["model"]),
        environment=Letters,
        collect_kwargs={"on_length": "continue"},  # two tokens are a whole reply
    )
    trainer.train()
    record = {
        "rows": trainer.online.replay.rows.to_list(),
        "num_steps": trainer.online.num_steps,
        "state": trainer.accelerator.unwrap_model(trainer.model).state_dict(),
    }
    torch.save(record, Path(spec["args"]["output_dir"]) / f"{trainer.args.process_index}.pt")


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
