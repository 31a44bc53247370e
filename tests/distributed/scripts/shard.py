# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""
Trains models that FSDP2 has sharded by hand, each for some steps of SGD written out, in two processes on CPUs; in one
process nothing is sharded.

The JSON file given as argument holds `record`, `chunk_elements` and `runs`, a list of `name`, `model`, `data`, `save`.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from datasets import load_from_disk
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from hf_qrl import AutoModelForCausalLMWithILQLHeads
from hf_qrl.data import DataCollatorForILQL, ILQLBatch
from hf_qrl.losses.ilql import ilql_loss_from_states
from hf_qrl.losses.vocabulary import vocabulary_loss


ROWS, STEPS, LEARNING_RATE, ALPHA = 8, 5, 0.1, 0.2
OPTIONS = {"tau": 0.7, "gamma": 0.9, "cql_scale": 0.1, "awac_scale": 1.0, "awac_beta": 0.5}


def whole(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: (x.full_tensor() if isinstance(x, DTensor) else x).detach().clone()
        for name, x in module.state_dict().items()
    }


def shard(model: Any) -> None:
    """Every layer and head is a unit, and so are the embeddings; what is left is the model's own."""
    for layer in model.base.model.layers:
        fully_shard(layer)
    for head in (*model.heads.q, model.heads.v):
        fully_shard(head)
    embeddings = [model.get_input_embeddings(), model.get_output_embeddings()]
    if embeddings[0].weight is embeddings[1].weight:
        fully_shard(embeddings, reshard_after_forward=False)
    else:
        for embedding in embeddings:
            fully_shard(embedding)
    fully_shard(model)
    register_fsdp_forward_method(model, "generate")


def execute(run: dict[str, Any], rank: int, world: int) -> dict[str, Any]:
    model = AutoModelForCausalLMWithILQLHeads.from_pretrained(run["model"]).train()
    if world > 1:
        shard(model)
    results: dict[str, Any] = {
        "sharded": [name for name, p in model.named_parameters() if isinstance(p, DTensor)],
        "parameters": [name for name, _ in model.named_parameters()],
        "heads": [whole(model.heads)],
        "losses": [],
    }
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE)
    data, collator = load_from_disk(run["data"]), DataCollatorForILQL()
    for step in range(STEPS):
        rows = data.select(range(step * ROWS, (step + 1) * ROWS)).to_list()
        num_items = float(collator(rows)["dones"][:, :-1].sum())
        share = ROWS // world
        batch = ILQLBatch(**collator(rows[rank * share : (rank + 1) * share]))
        sums = []

        def loss_fn(hidden_states, heads, lm_head, next_state, batch=batch, num_items=num_items, sums=sums):
            loss, parts = ilql_loss_from_states(
                hidden_states, heads, lm_head, batch, next_state, num_items=num_items, **OPTIONS
            )
            sums.append(parts)
            return loss

        loss = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, loss_fn=loss_fn).loss
        (loss * world).backward()  # gradients are averaged over processes
        optimizer.step()
        optimizer.zero_grad()
        model.heads.update_targets(ALPHA)
        total = loss.detach().clone()
        if world > 1:
            dist.all_reduce(total)
        results["losses"].append(total.item())
        results["heads"].append(whole(model.heads))
    results["state"] = whole(model)
    model.eval()
    # Both processes have to take as many steps.
    prompt = torch.tensor([[3 + rank, 4, 5]])
    results["generated"] = model.generate(input_ids=prompt, max_new_tokens=5, do_sample=False)
    with torch.no_grad():
        results["logits"] = model(input_ids=prompt).logits
    if world > 1:
        try:
            model.save_pretrained(run["save"] + "-partitioned")
        except ValueError as error:
            results["save_error"] = str(error)
        state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            model.save_pretrained(run["save"], state_dict=state)
        dist.barrier()
    return results


def main(spec: dict[str, Any]) -> None:
    vocabulary_loss.__kwdefaults__["chunk_elements"] = spec["chunk_elements"]
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    for run in spec["runs"]:
        torch.save(execute(run, rank, world), Path(spec["record"]) / f"{run['name']}.{rank}.pt")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
