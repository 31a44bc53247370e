# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""A user's path: a file of dialogues, the command line, a saved policy, a reply."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hf_qrl import AutoModelForCausalLMWithILQLHeads


EXAMPLE = Path(__file__).parents[2] / "examples" / "ilql.py"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<' + message['role'][0] + '>' + message['content'] + '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<a>' }}{% endif %}"
)


@pytest.fixture
def base(tmp_path):
    """A directory with a tiny Llama and a tokenizer of characters."""
    special = ["<pad>", "</s>", "<unk>", "<u>", "<a>", "<s>"]
    tokens = [*special, *(chr(c) for c in range(32, 127))]
    backend = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("<[a-z/]+>|."), behavior="isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", chat_template=CHAT_TEMPLATE
    )
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=len(tokens),
        eos_token_id=1,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def test_from_a_file_of_dialogues_to_a_reply(base, tmp_path):
    rows = [
        {
            "messages": [
                {"role": "user", "content": "hello"},
                {"role": "assistant", "content": reply},
                {"role": "user", "content": "ok"},
                {"role": "assistant", "content": "bye"},
            ],
            "rewards": [reward, 0.0],
        }
        for reply, reward in [("yes", 1.0), ("no", -1.0)] * 8
    ]
    (tmp_path / "dialogues.jsonl").write_text("\n".join(map(json.dumps, rows)))
    output = tmp_path / "policy"
    command = [sys.executable, str(EXAMPLE), "--model_name_or_path", str(base), "--output_dir", str(output)]
    command += ["--dataset", str(tmp_path / "dialogues.jsonl"), "--max_steps", "3", "--eval_fraction", "0.25"]
    command += ["--head_type", "tied", "--beta", "2.0", "--report_to", "none", "--use_cpu", "--eval_strategy", "steps"]
    result = subprocess.run([*command, "--eval_steps", "3"], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "eval_loss/q" in result.stdout

    model = AutoModelForCausalLMWithILQLHeads.from_pretrained(output)
    tokenizer = AutoTokenizer.from_pretrained(output)
    assert model.config.head_type == "tied"
    assert model.config.beta == 2.0
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hello"}], add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    reply = model.generate(**inputs, max_new_tokens=5, do_sample=True, beta=4.0)
    assert reply.shape[1] > inputs["input_ids"].shape[1]
    assert (output / "README.md").exists()


def test_unknown_option_is_refused(tmp_path):
    result = subprocess.run([sys.executable, str(EXAMPLE), "--betta", "2"], capture_output=True, text=True)
    assert result.returncode != 0
