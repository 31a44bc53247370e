# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""
Trains one model after another, as the JSON file given as argument says, in one process or under `torchrun`. Starting
processes takes longer than the runs themselves, so one start serves many of them. Every process writes what it saw of
each run to `{record}/{name}.{rank}.pt`.

The file holds `record`, `chunk_elements`, `deepspeed` (a configuration), `fsdp` (a configuration; with neither it is
plain data parallelism) and `runs`, a list of what `execute` takes.
"""

import gc
import json
import os
import sys
import traceback
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from datasets import load_from_disk
from peft import LoraConfig
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoTokenizer, TrainerCallback, set_seed
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from hf_qrl import (
    AutoModelForCausalLMWithILQLHeads,
    AutoModelForSeq2SeqLMWithILQLHeads,
    ILQLConfig,
    ILQLTrainer,
    QRLHFConfig,
    QRLHFTrainer,
)
from hf_qrl.losses.vocabulary import vocabulary_loss


class ShardsOnCPUs:
    """
    FSDP2 on CPUs. accelerate asks for accelerators before it shards, and runs DDP without; it is told here, after it
    has looked, that FSDP it is. All that follows is its own doing, and the trainer's.
    """

    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        AcceleratorState._shared_state["fsdp_plugin"] = FullyShardedDataParallelPlugin(**self.args.fsdp_plugin_args)
        for state in (PartialState, AcceleratorState):
            state._shared_state["distributed_type"] = DistributedType.FSDP
        self.is_fsdp_enabled = True


class CPUShardingILQLTrainer(ShardsOnCPUs, ILQLTrainer):
    pass


class CPUShardingQRLHFTrainer(ShardsOnCPUs, QRLHFTrainer):
    pass


ALGORITHMS = {
    "ilql": (ILQLConfig, ILQLTrainer, CPUShardingILQLTrainer),
    "qrlhf": (QRLHFConfig, QRLHFTrainer, CPUShardingQRLHFTrainer),
}


def whole(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A copy of parameters and buffers, gathered with DeepSpeed's or torch's own tools; every process must call it."""
    context: Any = nullcontext()
    if any(hasattr(p, "ds_id") for p in module.parameters()):
        import deepspeed

        context = deepspeed.zero.GatheredParameters(list(module.parameters()))
    with context:
        return {
            name: (x.full_tensor() if isinstance(x, DTensor) else x).detach().clone()
            for name, x in module.state_dict().items()
        }


def shares(module: torch.nn.Module) -> dict[str, float]:
    """How much of each parameter this process holds."""
    return {
        name: (p.to_local() if isinstance(p, DTensor) else p).numel() / getattr(p, "ds_numel", p.numel())
        for name, p in module.named_parameters()
    }


class Recorder(TrainerCallback):
    """Copies the model before training and the heads after each step; generates where asked to."""

    def __init__(self, trainer: ILQLTrainer, generate_at: int | None):
        self.trainer, self.generate_at = trainer, generate_at
        self.start: dict[str, torch.Tensor] = {}
        self.shares: dict[str, float] = {}
        self.heads: list[dict[str, torch.Tensor]] = []
        self.trained: dict[str, torch.Tensor] = {}
        self.generated: list[torch.Tensor] = []

    def on_train_begin(self, args, state, control, **kwargs):
        self.start = whole(self.trainer.bare_model)
        self.shares = shares(self.trainer.bare_model)
        self.heads.append(whole(self.trainer.bare_model.heads))

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.heads.append(whole(self.trainer.bare_model.heads))
        if state.global_step == state.max_steps:
            self.trained = whole(self.trainer.bare_model)
        if state.global_step == self.generate_at:
            # Prompts and lengths differ between processes.
            prompt = torch.tensor([[3 + self.trainer.args.process_index, 4, 5]])
            new_tokens = 4 + 3 * self.trainer.args.process_index
            training = model.training
            model.eval()
            self.generated.append(model.generate(input_ids=prompt, max_new_tokens=new_tokens, do_sample=False))
            model.train(training)


def load(run: dict[str, Any], rank: int) -> Any:
    """A live model, made before any DeepSpeed configuration is there."""
    unset_hf_deepspeed_config()
    torch.manual_seed(run.get("live_seeds", [0, 0])[rank])
    encoder_decoder = AutoConfig.from_pretrained(run["live"]).is_encoder_decoder
    loader = AutoModelForSeq2SeqLMWithILQLHeads if encoder_decoder else AutoModelForCausalLMWithILQLHeads
    model = loader.from_pretrained(run["live"], **run.get("head_arguments", {}))
    if "live_seeds" in run:
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        model.heads.update_targets(1.0)
    return model


def execute(run: dict[str, Any], sharding: dict[str, Any]) -> dict[str, Any]:
    """
    Trains, and returns what this process saw. Keys of `run`:

    - `model` (a directory, which the trainer loads) or `live` (a directory, loaded before), `head_arguments`,
      `live_seeds` (one per process, to draw other weights on each);
    - `algorithm`: `"ilql"` (by default) or `"qrlhf"`;
    - `data`, `args`: a directory, and arguments of `ILQLConfig` or `QRLHFConfig`;
    - `resize`: number of tokens to resize the loaded model to;
    - `peft`: arguments of a `LoraConfig`;
    - `tokenizer`, `num_eval_rows`, `generate_at`, `resume`, `save`: what else to do.
    """
    rank = int(os.environ.get("RANK", 0))
    gc.collect()
    model = load(run, rank) if "live" in run else run["model"]
    arguments = dict(run["args"])
    if "live" not in run and "head_arguments" in run:
        arguments["model_init_kwargs"] = run["head_arguments"]
    config_class, trainer_class, sharding_class = ALGORITHMS[run.get("algorithm", "ilql")]
    args = config_class(**arguments, **sharding)
    if "resize" in run:
        # Loaded while DeepSpeed's configuration is there: ZeRO-3 has it in parts.
        model = AutoModelForCausalLMWithILQLHeads.from_pretrained(model)
        model.resize_token_embeddings(run["resize"], mean_resizing=False)
    data = load_from_disk(run["data"])
    trainer = (sharding_class if args.fsdp else trainer_class)(
        model,
        args=args,
        train_dataset=data,
        eval_dataset=data.select(range(run["num_eval_rows"])) if "num_eval_rows" in run else None,
        peft_config=LoraConfig(**run["peft"]) if "peft" in run else None,
        processing_class=AutoTokenizer.from_pretrained(run["tokenizer"]) if "tokenizer" in run else None,
    )
    recorder = Recorder(trainer, run.get("generate_at"))
    trainer.add_callback(recorder)
    trainer.train(resume_from_checkpoint=run.get("resume"))
    average = getattr(trainer, "average", None)
    results = {
        "start": recorder.start,
        "shares": recorder.shares,
        "heads": recorder.heads,
        "trained": recorder.trained,
        "generated": recorder.generated,
        "state": whole(trainer.bare_model),
        "log": trainer.state.log_history,
        "best": trainer.state.best_model_checkpoint,
        "average": {name: x.clone() for name, x in average.weights.items()} if average is not None else {},
    }
    if "save" in run:
        trainer.save_model(run["save"])
        if min(recorder.shares.values()) < 1:
            try:
                trainer.bare_model.save_pretrained(run["save"] + "-partitioned")
            except ValueError as error:
                results["save_error"] = str(error)
    return results


def without_compiler() -> None:
    """Keeps DeepSpeed from compiling its own collectives for CPUs; gloo's will do."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def main(spec: dict[str, Any]) -> None:
    vocabulary_loss.__kwdefaults__["chunk_elements"] = spec["chunk_elements"]
    rank = int(os.environ.get("RANK", 0))
    sharding = {"deepspeed": spec["deepspeed"]}
    if spec["deepspeed"]:
        without_compiler()
    if spec["fsdp"]:
        sharding = {"fsdp": True, "fsdp_config": spec["fsdp"]}
    for run in spec["runs"]:
        set_seed(run.get("lora_seed", 0))
        try:
            results = execute(run, sharding)
        except Exception:
            # The others would wait for this process; it is the first failure that matters.
            torch.save({"error": traceback.format_exc()}, Path(spec["record"]) / f"{run['name']}.{rank}.pt")
            raise
        torch.save(results, Path(spec["record"]) / f"{run['name']}.{rank}.pt")


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
