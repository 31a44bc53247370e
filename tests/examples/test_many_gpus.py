# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""The command that the example makes, and what it trains in two processes on CPUs."""

import json
import os
import shlex
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hf_qrl import AutoModelForCausalLMWithILQLHeads


EXAMPLE = Path(__file__).parents[2] / "examples" / "many_gpus.py"


def run(*options: str) -> tuple[int, str]:
    """Exit code and output; nothing is left running after a quarter of an hour."""
    process = subprocess.Popen(
        [sys.executable, str(EXAMPLE), *options],
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=900)  # DeepSpeed may have to compile first
    finally:
        if process.poll() is None:
            # torchrun ends its workers, which are in groups of their own, when it is asked to end.
            os.killpg(process.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(30)
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return process.returncode, output


@pytest.fixture
def base(tmp_path):
    """A directory with a tiny Llama and a tokenizer of letters."""
    tokens = ["<pad>", "</s>", "<unk>", *(chr(c) for c in range(32, 127))]
    backend = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", behavior="isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    LlamaForCausalLM(
        LlamaConfig(vocab_size=len(tokens), eos_token_id=1, pad_token_id=0, tie_word_embeddings=True, **shape)
    ).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    return tmp_path / "base"


# DeepSpeed compiles an extension the first time it runs on CPUs.
@pytest.mark.parametrize("profile", ["ddp", pytest.param("zero3", marks=pytest.mark.slow)])
def test_trains_in_two_processes(base, tmp_path, profile):
    rows = [{"prompt": "yes or no?", "completion": x, "reward": r} for x, r in [("yes", 1.0), ("no", 0.0)] * 6]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options = ["--profile", profile, "--cpu", "--num_processes", "2", "--model_name_or_path", str(base)]
    options += ["--dataset", str(tmp_path / "data.jsonl"), "--output_dir", str(tmp_path / "policy")]
    options += [
        "--max_steps",
        "3",
        "--logging_steps",
        "1",
        "--report_to",
        "none",
        "--per_device_train_batch_size",
        "2",
    ]
    options += ["--learning_rate", "0.01", "--alpha", "0.5", "--save_strategy", "no"]
    code, output = run(*options)
    assert code == 0, output[-4000:]
    # Each step is logged once, by one of the processes.
    assert output.count("'loss/q'") == 3

    model = AutoModelForCausalLMWithILQLHeads.from_pretrained(tmp_path / "policy")
    plain = LlamaForCausalLM.from_pretrained(base)
    assert any(not torch.equal(x, plain.state_dict()[k]) for k, x in model.base.state_dict().items())
    assert not torch.equal(model.heads.q[0].weight, model.heads.target_q[0].weight)


@pytest.mark.parametrize("profile", ["ddp", "zero1", "zero2", "zero3", "zero3_offload", "fsdp2"])
def test_command_for_gpus(profile):
    code, output = run("--profile", profile, "--num_processes", "4", "--print", "--dataset", "rows.jsonl")
    assert code == 0, output
    words = shlex.split(output)
    config = Path(words[words.index("--config_file") + 1])
    assert config.name == f"{profile}.yaml" and config.exists()
    assert words[words.index("--num_processes") + 1] == "4"
    assert Path(words[-3]).name == "ilql.py" and words[-2:] == ["--dataset", "rows.jsonl"]


def test_offloading_reaches_deepspeed():
    code, output = run("--profile", "zero3_offload", "--cpu", "--print")
    assert code == 0, output
    config = json.loads(Path(shlex.split(output)[-1]).read_text())["zero_optimization"]
    assert config["stage"] == 3 and config["stage3_gather_16bit_weights_on_model_save"] is True
    assert config["offload_optimizer"] == config["offload_param"] == {"device": "cpu"}


def test_fsdp2_on_cpus_is_refused():
    code, output = run("--profile", "fsdp2", "--cpu", "--print")
    assert code != 0 and "--profile ddp or zero3" in output


def test_another_script_with_its_own_options():
    code, output = run("--print", "--script", "examples/lora.py", "--lora_r", "8")
    assert code == 0 and shlex.split(output)[-3:] == ["examples/lora.py", "--lora_r", "8"]


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
def test_no_accelerator_is_said_at_once():
    code, output = run("--profile", "zero2")
    assert code == 1 and "There is no accelerator here" in output
