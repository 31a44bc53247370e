# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""A user's path: a file of dialogues, the command line, a saved policy, a reply."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from hf_qrl import AutoModelForCausalLMWithILQLHeads, LlamaDuelingQForCausalLM


EXAMPLE = Path(__file__).parents[2] / "examples" / "qrlhf.py"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<' + message['role'][0] + '>' + message['content'] + '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<a>' }}{% endif %}"
)
SPECIAL = ["<pad>", "</s>", "<unk>", "<u>", "<a>", "<s>"]
TOKENS = [*SPECIAL, *(chr(c) for c in range(32, 127))]
LLAMA = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.fixture
def run(tmp_path):
    """Returns a function that trains a language model on dialogues by the command line, and returns what it prints."""
    (tmp_path / "dialogues.jsonl").write_text(
        "\n".join(
            json.dumps(
                {
                    "messages": [
                        {"role": "user", "content": "hello"},
                        {"role": "assistant", "content": reply},
                        {"role": "user", "content": "ok"},
                        {"role": "assistant", "content": "bye"},
                    ],
                    "rewards": [reward, 0.0],
                }
            )
            for reply, reward in [("yes", 1.0), ("no", -1.0)] * 8
        )
    )
    backend = Tokenizer(models.WordLevel({token: i for i, token in enumerate(TOKENS)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("<[a-z/]+>|."), behavior="isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", chat_template=CHAT_TEMPLATE
    )

    def train(base, *options: str) -> str:
        for saver in (base, tokenizer):
            saver.save_pretrained(tmp_path / "base")
        command = [sys.executable, str(EXAMPLE), "--model_name_or_path", str(tmp_path / "base"), "--max_steps", "3"]
        command += ["--dataset", str(tmp_path / "dialogues.jsonl"), "--output_dir", str(tmp_path / "policy")]
        command += ["--report_to", "none", "--use_cpu", "--eval_fraction", "0.25", "--eval_strategy", "steps"]
        result = subprocess.run([*command, "--eval_steps", "3", *options], capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        return result.stdout

    return train


def test_from_a_file_of_dialogues_to_a_reply(run, tmp_path):
    torch.manual_seed(0)
    base = LlamaForCausalLM(LlamaConfig(**LLAMA, vocab_size=len(TOKENS), eos_token_id=1, pad_token_id=0))
    output = run(base, "--policy", "lm", "--beta", "2.0", "--target_network", "model", "--ema_beta", "0.9")
    assert "eval_loss/td" in output

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "policy")
    assert type(model) is LlamaDuelingQForCausalLM
    assert (model.config.policy, model.config.beta, model.config.policy_top_k) == ("lm", 2.0, None)
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hello"}], add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    reply = model.generate(**inputs, max_new_tokens=5, do_sample=True, policy="q", top_k=0)
    assert reply.shape[1] > inputs["input_ids"].shape[1]
    card = (tmp_path / "policy" / "README.md").read_text()
    assert "| target_network | `model` |" in card


@pytest.mark.slow
def test_another_architecture(run, tmp_path):
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 64}
    run(GPT2LMHeadModel(GPT2Config(**sizes, vocab_size=len(TOKENS), bos_token_id=1, eos_token_id=1)), "--beta", "3.0")
    model = AutoModelForCausalLMWithILQLHeads.from_pretrained(tmp_path / "policy")
    assert (model.config.head_type, model.config.num_q_heads, model.config.beta) == ("dueling", 1, 3.0)
