# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""
Trains a saved model on a saved dataset, in one process or under `torchrun`, as the JSON file given as argument says:

- `model`, `data`, `args`: directories, and arguments of `ILQLConfig`;
- `kill_at`: `[step, micro-batches]` of the optimizer step in whose middle the process kills itself;
- `kill_in_save_at`: the step whose checkpoint it dies while writing;
- `record`: directory for what every process saw and has in the end;
- `num_eval_rows`, `stream_steps`: also evaluate on the first rows, and train on a stream.
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch
from datasets import load_from_disk
from transformers import TrainerCallback

from hf_qrl import AutoModelForCausalLMWithILQLHeads, ILQLConfig, ILQLTrainer


class Killer(TrainerCallback):
    def __init__(self, step: int, micro_batches: int):
        self.step, self.left = step, micro_batches

    def on_substep_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)


class Recorder(TrainerCallback):
    def __init__(self):
        self.gradients = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        named = [(name.removeprefix("module."), p) for name, p in model.named_parameters()]
        self.gradients.append({name: p.grad.clone() for name, p in named if p.grad is not None})


def main(spec: dict) -> None:
    def load():
        return AutoModelForCausalLMWithILQLHeads.from_pretrained(spec["model"])

    data = load_from_disk(spec["data"])
    recorder = Recorder()
    trainer = ILQLTrainer(load(), args=ILQLConfig(**spec["args"]), train_dataset=data, callbacks=[recorder])
    if "kill_at" in spec:
        trainer.add_callback(Killer(*spec["kill_at"]))
    if "kill_in_save_at" in spec:
        write = trainer._save_optimizer_and_scheduler

        def die(output_dir: str) -> None:
            if trainer.state.global_step == spec["kill_in_save_at"]:
                os.kill(os.getpid(), signal.SIGKILL)
            write(output_dir)

        trainer._save_optimizer_and_scheduler = die
    trainer.train()
    if "record" not in spec:
        return

    results = {
        "gradients": recorder.gradients,
        "state": trainer.accelerator.unwrap_model(trainer.model).state_dict(),
        "log": trainer.state.log_history,
    }
    if "num_eval_rows" in spec:
        results["eval"] = trainer.evaluate(data.select(range(spec["num_eval_rows"])))
    if "stream_steps" in spec:
        args = ILQLConfig(**{**spec["args"], "max_steps": spec["stream_steps"]})
        stream = ILQLTrainer(load(), args=args, train_dataset=data.to_iterable_dataset())
        stream.train()
        results["stream_steps"] = stream.state.global_step
        results["stream_state"] = stream.accelerator.unwrap_model(stream.model).state_dict()
    torch.save(results, Path(spec["record"]) / f"{trainer.args.process_index}.pt")


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
