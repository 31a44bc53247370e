# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""
Runs of two processes, each made once: a start serves many runs, and the workers of pytest-xdist share them on disk.
"""

import json
import os
import random
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from filelock import FileLock
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hf_qrl import AutoModelForCausalLMWithILQLHeads


SCRIPTS = Path(__file__).parent / "scripts"
VOCAB_SIZE = 24
# A few rows per chunk, so that processes with different numbers of actions have different numbers of chunks.
CHUNK_ELEMENTS = 5 * VOCAB_SIZE
TIMEOUT = 900
HEAD_TYPES = ("mlp", "linear", "tied", "dueling")
QUIET = {"report_to": "none", "use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "alpha": 0.1}
SGD = {"optim": "sgd", "learning_rate": 0.1, "logging_strategy": "steps", "logging_steps": 1}
ADAMW = {**SGD, "optim": "adamw_torch", "learning_rate": 1e-3}


# ------------------------------------------------------------------------------------------------------------- inputs


def draw_row(generator: random.Random, length: int, num_actions: int) -> dict[str, Any]:
    actions = sorted(generator.sample(range(length - 1), num_actions))
    return {
        "input_ids": [generator.randrange(3, VOCAB_SIZE) for _ in range(length)],
        "attention_mask": [1] * length,
        "rewards": [round(generator.gauss(0, 1), 3) for _ in actions],
        "states_ixs": [*actions, length - 1],
        "actions_ixs": actions,
        "dones": [1] * len(actions) + [0],
        "turn_ixs": list(range(len(actions))),
    }


def draw_rows(num_rows: int) -> list[dict[str, Any]]:
    """Uneven weighted rows; some are truncated, and of these some go on in a row of their own."""
    generator = random.Random(0)
    rows = []
    for i in range(num_rows):
        length = generator.randint(3, 14)
        row = draw_row(generator, length, generator.randint(1, length - 1))
        row |= {"weight": round(generator.uniform(0.25, 2.0), 3), "truncated": i % 3 == 0}
        row["next_input_ids"] = [generator.randrange(3, VOCAB_SIZE) for _ in range(i % 5)] if i % 3 == 0 else []
        rows.append(row)
    return rows


def uneven_rows(num_batches: int) -> list[dict[str, Any]]:
    """Batches of four long rows of actions only, and of four rows with one action, in turns."""
    generator = random.Random(1)
    shapes = [(14, 13), (3, 1)]
    return [draw_row(generator, *shapes[i % 2]) for i in range(num_batches) for _ in range(4)]


def make_inputs(directory: Path) -> None:
    """Models, data and a tokenizer."""
    rows, uneven = draw_rows(40), uneven_rows(6)
    episodes = [{k: x for k, x in row.items() if k not in ("truncated", "next_input_ids")} for row in rows]
    for name, data in {
        "uneven": uneven,
        # The second process lacks three rows of its last batch, which accelerate takes from the beginning.
        "ragged": rows[:13],
        "ragged_filled": rows[:13] + rows[:3],
        "rows": rows,
        "episodes": episodes,
    }.items():
        Dataset.from_list(data).save_to_disk(directory / name)
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    for suffix, tied in {"": False, "_tied": True}.items():
        config = LlamaConfig(
            vocab_size=VOCAB_SIZE,
            max_position_embeddings=64,
            initializer_range=0.2,
            tie_word_embeddings=tied,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=0,
            **shape,
        )
        torch.manual_seed(0)
        base = LlamaForCausalLM(config)
        base.save_pretrained(directory / f"base{suffix}")
        for head_type in HEAD_TYPES:
            model = AutoModelForCausalLMWithILQLHeads.from_pretrained(base, head_type=head_type)
            # Targets that are no copies show whether they are kept.
            for buffer in model.heads.target_q.buffers():
                buffer.add_(0.05 * torch.randn_like(buffer))
            model.save_pretrained(directory / f"{head_type}{suffix}")
    AutoModelForCausalLMWithILQLHeads.from_pretrained(base, num_q_heads=1).save_pretrained(directory / "one_head")
    words = ["<pad>", "<unk>", "<eos>", *"abcdefghijklmnopqrstu"]
    backend = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", unk_token="<unk>", eos_token="<eos>"
    ).save_pretrained(directory / "tokenizer")


def trainer_runs(inputs: Path, output: Path, num_processes: int) -> list[dict[str, Any]]:
    """The same optimizer steps for any number of processes up to two."""
    whole, half = {1: (16, 8), 2: (4, 4)}[num_processes]
    batch = {
        **QUIET,
        "per_device_train_batch_size": whole,
        "gradient_accumulation_steps": 16 // whole // num_processes,
    }
    sequential = {**QUIET, **SGD, "train_sampling_strategy": "sequential", "per_device_train_batch_size": half}
    watched = {
        "save_strategy": "steps",
        "save_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "per_device_eval_batch_size": 2,
        "gradient_checkpointing": True,
    }
    adapted = {"save_strategy": "steps", "save_steps": 2, "gradient_checkpointing": True}
    only_heads = {"awac_scale": 0.0, "cql_scale": 0.0, "freeze_base": True, "target": "mc"}
    data = str(inputs / "rows")
    # Two epochs of steps of 16, 16 and 8 rows.
    runs: list[dict[str, Any]] = [
        {"name": "sgd", "model": "mlp", "args": {**batch, **SGD, "max_steps": 5, "awac_beta": 0.5}, "save": True},
        {"name": "adamw", "model": "tied_tied", "args": {**batch, **ADAMW, "max_steps": 5}, "save": True},
        {
            "name": "fresh",
            "model": "base_tied",
            "head_arguments": {"head_type": "dueling"},
            "args": {**batch, **SGD, "max_steps": 3},
            "generate_at": 2,
        },
        {"name": "live", "live": "base", "live_seeds": [1, 2], "args": {**batch, **SGD, "max_steps": 3}},
        {
            "name": "only_heads",
            "model": "one_head",
            "data": str(inputs / "episodes"),
            "args": {**batch, **SGD, **only_heads, "max_steps": 2},
        },
        {
            "name": "uneven",
            "model": "linear",
            "data": str(inputs / "uneven"),
            "args": {**sequential, "max_steps": 3},
        },
        {
            "name": "ragged",
            "model": "dueling",
            "data": str(inputs / ("ragged_filled" if num_processes == 1 else "ragged")),
            "args": {**sequential, "max_steps": 2},
        },
        {
            "name": "watched",
            "model": "mlp_tied",
            "tokenizer": str(inputs / "tokenizer"),
            "num_eval_rows": 7,
            "args": {
                **batch,
                **ADAMW,
                **watched,
                "max_steps": 4,
                "load_best_model_at_end": True,
                "metric_for_best_model": "eval_loss/q",
                "log_completions": True,
                "log_completions_steps": 2,
                "num_completions_to_print": 2,
                "max_completion_length": 4,
            },
        },
        # Goes on from where the run before was at its second step, with a model that it has to overwrite.
        {
            "name": "resumed",
            "model": "base_tied",
            "head_arguments": {"head_type": "mlp"},
            "num_eval_rows": 7,
            "resume": str(output / "watched" / "checkpoint-2"),
            "args": {**batch, **ADAMW, **watched, "max_steps": 4},
        },
        {
            "name": "peft",
            "model": "mlp",
            "peft": {"r": 4, "init_lora_weights": False},
            "save": True,
            "args": {**batch, **ADAMW, **adapted, "max_steps": 4},
        },
        {
            "name": "peft_resumed",
            "model": "mlp",
            "peft": {"r": 4, "init_lora_weights": False},
            "lora_seed": 1,
            "resume": str(output / "peft" / "checkpoint-2"),
            "args": {**batch, **ADAMW, **adapted, "max_steps": 4},
        },
        {
            "name": "half",
            "model": "base_tied",
            "head_arguments": {"head_type": "dueling"},
            "args": {**batch, **ADAMW, "max_steps": 3, "bf16": True},
        },
        {"name": "resized", "model": "mlp", "resize": VOCAB_SIZE + 5, "args": {**batch, **SGD, "max_steps": 1}},
        {
            "name": "broadcast",
            "model": "mlp",
            "args": {**batch, **SGD, "max_steps": 5, "awac_beta": 0.5, "ddp_broadcast_buffers": True},
        },
    ]
    for run in runs:
        run.setdefault("data", data)
        run["args"]["output_dir"] = str(output / run["name"])
        for source in ("model", "live"):
            if source in run:
                run[source] = str(inputs / run[source])
        if run.get("save"):
            run["save"] = str(output / f"saved_{run['name']}")
    return runs


def sharded_runs(inputs: Path, output: Path) -> list[dict[str, Any]]:
    """Every kind of heads on both kinds of embeddings."""
    return [
        {
            "name": f"{head_type}{suffix}",
            "model": str(inputs / f"{head_type}{suffix}"),
            "data": str(inputs / "rows"),
            "save": str(output / f"saved_{head_type}{suffix}"),
        }
        for head_type in HEAD_TYPES
        for suffix in ("", "_tied")
    ]


def deepspeed_config(stage: int) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": stage}
    if stage == 3:
        # By default parameters as small as those of the tests are never partitioned.
        zero |= {"stage3_param_persistence_threshold": 0, "stage3_gather_16bit_weights_on_model_save": True}
    return {
        "zero_optimization": zero,
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        # SGD is none of DeepSpeed's own optimizers, and its AdamW for CPUs would have to be compiled.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }


# --------------------------------------------------------------------------------------------------------------- runs


def launch(script: Path, spec: dict[str, Any], num_processes: int) -> None:
    """Runs a script to its end, or ends all of its processes."""
    record = Path(spec["record"])
    record.mkdir(parents=True, exist_ok=True)
    (record / "spec.json").write_text(json.dumps(spec))
    launcher = []
    if num_processes > 1:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(num_processes)]
    with open(record / "log.txt", "w") as log:
        process = subprocess.Popen(
            [sys.executable, *launcher, str(script), str(record / "spec.json")],
            env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            process.wait(TIMEOUT)
        except subprocess.TimeoutExpired:
            print(f"{script.name}: no end after {TIMEOUT} seconds", file=log)
        finally:
            if process.poll() is None:
                # torchrun ends its workers, which are in groups of their own, when it is asked to end.
                os.killpg(process.pid, signal.SIGTERM)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(30)
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


class Records:
    """What the processes of a launch saw; a run that failed fails the test that asks for it."""

    def __init__(self, directory: Path):
        self.directory = directory

    def __call__(self, name: str, rank: int = 0) -> dict[str, Any]:
        path = self.directory / f"{name}.{rank}.pt"
        if not path.exists():
            pytest.fail(f"{name} has no record: {(self.directory / 'log.txt').read_text()[-3000:]}")
        record = torch.load(path, weights_only=False)
        if "error" in record:
            pytest.fail(f"{name}: {record['error'][-3000:]}")
        return record

    def log(self) -> str:
        return (self.directory / "log.txt").read_text()


@pytest.fixture(scope="session")
def shared(tmp_path_factory):
    """A directory that all workers of this session see, and a way to make something in it once."""
    base = tmp_path_factory.getbasetemp()
    root = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "distributed"
    root.mkdir(exist_ok=True)

    def once(name: str, make) -> Path:
        with FileLock(root / f"{name}.lock"):
            if not (root / f"{name}.done").exists():
                make(root / name)
                (root / f"{name}.done").touch()
        return root / name

    return once


@pytest.fixture(scope="session")
def inputs(shared) -> Path:
    return shared("inputs", make_inputs)


@pytest.fixture(scope="session")
def trained(shared, inputs):
    """Returns a function from a backend (`one`, `ddp`, `zero1`, `zero2`, `zero3`, `fsdp2`) to its records."""

    def run(backend: str) -> Records:
        num_processes = 1 if backend == "one" else 2

        def make(directory: Path) -> None:
            spec = {
                "record": str(directory),
                "chunk_elements": CHUNK_ELEMENTS,
                "deepspeed": deepspeed_config(int(backend[-1])) if backend.startswith("zero") else None,
                "fsdp": {"version": 2} if backend == "fsdp2" else None,
                "runs": trainer_runs(inputs, directory, num_processes),
            }
            launch(SCRIPTS / "train.py", spec, num_processes)

        return Records(shared(backend, make))

    return run


@pytest.fixture(scope="session")
def sharded(shared, inputs):
    """Returns a function from a number of processes to the records of FSDP2's runs."""

    def run(num_processes: int) -> Records:
        def make(directory: Path) -> None:
            runs = sharded_runs(inputs, directory)
            spec = {"record": str(directory), "chunk_elements": CHUNK_ELEMENTS, "runs": runs}
            launch(SCRIPTS / "shard.py", spec, num_processes)

        return Records(shared(f"fsdp2_{num_processes}", make))

    return run


# -------------------------------------------------------------------------------------------------------- comparisons


def targets_of(heads: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: x for name, x in heads.items() if "target_q." in name}


@pytest.fixture(scope="session")
def polyak_error():
    """
    Returns how far recorded targets are from those that the rule gives, in float64, for the recorded online heads.
    """

    def error(heads: list[dict[str, torch.Tensor]], alpha: float) -> float:
        # Under an adapter the heads are there twice, and the copy is trained.
        prefix = "modules_to_save.default."
        if any(name.startswith(prefix) for name in heads[0]):
            heads = [{k.removeprefix(prefix): x for k, x in h.items() if k.startswith(prefix)} for h in heads]
        expected = {name: x.double() for name, x in targets_of(heads[0]).items()}
        for step in heads[1:]:
            online = {name: x.double() for name, x in step.items() if name.startswith("q.")}
            for name, target in expected.items():
                source = online[name.removeprefix("target_")].clone()
                head, _, part = name.removeprefix("target_").partition(".offset.")
                if part and f"{head}.stem.0.weight" in online:
                    # A dueling target keeps the state's value less the mean of the advantages.
                    source -= online[f"{head}.{part}"].mean(0)
                expected[name] = (1 - alpha) * target + alpha * source
        return max((targets_of(heads[-1])[name].double() - x).abs().max().item() for name, x in expected.items())

    return error
