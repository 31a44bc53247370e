# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""From a file of rewarded texts to an adapter, and to a merged model."""

import importlib.util
import json
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import TrlParser

from hf_qrl import AutoModelForCausalLMWithILQLHeads, ILQLConfig, ILQLForCausalLM


EXAMPLE = Path(__file__).parents[2] / "examples" / "lora.py"


def test_from_a_file_to_an_adapter_and_a_merged_model(tmp_path, monkeypatch, capsys):
    words = ["<pad>", "</s>", "<unk>", "say", "yes", "no", "please"]
    backend = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=len(words),
        eos_token_id=1,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    rows = [
        {"prompt": "please say", "completion": f" {word}", "reward": reward}
        for word, reward in [("yes", 1.0), ("no", -1.0)] * 4
    ]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    spec = importlib.util.spec_from_file_location("lora", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "lora", example)  # where dataclasses look their annotations up
    spec.loader.exec_module(example)
    arguments = ["--model_name_or_path", str(tmp_path / "base"), "--dataset", str(tmp_path / "data.jsonl")]
    arguments += ["--output_dir", str(tmp_path / "adapter"), "--merge_to", str(tmp_path / "merged"), "--use_cpu"]
    arguments += ["--max_steps", "40", "--learning_rate", "0.02", "--alpha", "0.3", "--report_to", "none"]
    arguments += ["--beta", "8", "--prompt", "please say"]
    parser = TrlParser((example.ScriptArguments, ILQLConfig))
    example.main(*parser.parse_args_and_config(args=arguments))
    assert "please say" in capsys.readouterr().out

    model = AutoModelForCausalLMWithILQLHeads.from_pretrained(tmp_path / "adapter")
    merged = ILQLForCausalLM.from_pretrained(tmp_path / "merged")
    assert model.config.head_type == merged.config.head_type == "tied"
    inputs = AutoTokenizer.from_pretrained(tmp_path / "merged")("please say", return_tensors="pt")
    logits = model(**inputs).logits
    assert torch.allclose(merged(**inputs).logits, logits, atol=1e-4)
    # Both answers are as frequent in the data; the rewarded one is the policy's.
    assert words[logits[0, -1].argmax()] == "yes"
    assert logits[0, -1, words.index("yes")] - logits[0, -1, words.index("no")] > 1.0
