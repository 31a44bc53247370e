# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""
Run a training script in many processes, the model spread over them by one of the profiles of hf_qrl.

    python examples/many_gpus.py --profile zero3 --num_processes 4 \
        --model_name_or_path Qwen/Qwen3-8B --dataset dialogues.jsonl --output_dir outputs/my_policy --bf16

Profiles are `ddp`, `zero1`, `zero2`, `zero3`, `zero3_offload` and `fsdp2`. The script is `examples/ilql.py` or another
(`--script examples/lora.py`), and all other options are its own. `--print` shows the command, which is all that this
script makes; for more than one machine add to it what `accelerate launch` takes (`--num_machines`, `--machine_rank`,
`--main_process_ip`, `--main_process_port`).

`--cpu` tries the same on CPUs, where `accelerate launch` refuses DeepSpeed: by `torchrun`, with DeepSpeed configured
by a file. FSDP2 needs GPUs.
"""

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import torch
import yaml


SCRIPT = Path(__file__).parent / "ilql.py"
PROFILES = ("ddp", "zero1", "zero2", "zero3", "zero3_offload", "fsdp2")


def deepspeed_config(profile: dict) -> dict:
    """What DeepSpeed reads, for a profile of `accelerate launch`."""
    settings = profile["deepspeed_config"]
    zero = {"stage": settings["zero_stage"]}
    if settings.get("zero3_save_16bit_model"):
        zero["stage3_gather_16bit_weights_on_model_save"] = True
    for part in ("optimizer", "param"):
        if settings[f"offload_{part}_device"] != "none":
            zero[f"offload_{part}"] = {"device": settings[f"offload_{part}_device"]}
    return {
        "zero_optimization": zero,
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        # The optimizer of the training arguments; DeepSpeed's own for CPUs would be compiled first.
        "zero_force_ds_cpu_optimizer": False,
    }


def command(
    profile: str, num_processes: int, cpu: bool, script: Path, options: list[str], directory: Path
) -> list[str]:
    """The command that trains; files that it needs go into `directory`."""
    package = find_spec("hf_qrl").submodule_search_locations[0]  # without the seconds that an import takes
    path = Path(package) / "accelerate_configs" / f"{profile}.yaml"
    if not cpu:
        launcher = ["accelerate.commands.launch", "--config_file", str(path), "--num_processes", str(num_processes)]
        return [sys.executable, "-m", *launcher, str(script), *options]
    if profile == "fsdp2":
        raise SystemExit("FSDP2 needs GPUs: without them accelerate would run DDP. Use --profile ddp or zero3.")
    options = [*options, "--use_cpu"]
    if profile != "ddp":
        config = directory / "deepspeed.json"
        config.write_text(json.dumps(deepspeed_config(yaml.safe_load(path.read_text())), indent=2))
        options += ["--deepspeed", str(config)]
    launcher = ["torch.distributed.run", "--standalone", "--nproc_per_node", str(num_processes)]
    return [sys.executable, "-m", *launcher, str(script), *options]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", choices=PROFILES, default="zero3")
    parser.add_argument("--num_processes", type=int, default=2)
    parser.add_argument("--script", type=Path, default=SCRIPT, help="what to run")
    parser.add_argument("--cpu", action="store_true", help="train on CPUs")
    parser.add_argument("--print", action="store_true", dest="show", help="show the command and do not run it")
    ours, options = parser.parse_known_args()
    if not (ours.cpu or ours.show or torch.accelerator.is_available()):
        raise SystemExit("There is no accelerator here; `--cpu` trains on CPUs, `--print` only shows the command.")
    directory = Path(tempfile.mkdtemp(prefix="many-gpus-"))
    arguments = command(ours.profile, ours.num_processes, ours.cpu, ours.script, options, directory)
    print(shlex.join(arguments))
    return 0 if ours.show else subprocess.run(arguments).returncode


if __name__ == "__main__":
    sys.exit(main())
