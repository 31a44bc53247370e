# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""A trained directory goes to a local Hub, comes back and speaks."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from hf_qrl import AutoModelForCausalLMWithILQLHeads
from tests.hub.fixtures import hub, hub_environment  # noqa: F401


EXAMPLE = Path(__file__).parents[2] / "examples" / "publish.py"
WORDS = [f"w{i}" for i in range(57)]


@pytest.fixture
def policy(make_model, tmp_path):
    """A directory such as a trainer leaves: model, tokenizer, card, a checkpoint and pickled arguments."""
    directory = tmp_path / "policy"
    make_model("llama", beta=2.0).save_pretrained(directory)
    make_model("llama").save_pretrained(directory / "checkpoint-1")
    vocabulary = {word: i for i, word in enumerate(["<pad>", "<s>", "</s>", "<unk>", *WORDS])}
    backend = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="</s>")
    tokenizer.save_pretrained(directory)
    (directory / "README.md").write_text("---\nlibrary_name: hf_qrl\n---\n# A policy\n")
    (directory / "training_args.bin").write_bytes(b"pickle")
    return directory


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("publish_example", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class TestPublish:
    def test_policy_is_pushed_and_speaks(self, hub, hub_environment, policy):  # noqa: F811
        command = [sys.executable, str(EXAMPLE), "--model", str(policy), "--repo_id", "user/policy", "--private"]
        result = subprocess.run(
            [*command, "--prompt", "w1 w2", "--max_new_tokens", "4"],
            env={**os.environ, **hub_environment},
            capture_output=True,
            text=True,
        )
        assert result.returncode == 0, result.stderr
        assert set(hub.files("user/policy")) == {
            "README.md", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
            "tokenizer_config.json",
        }  # fmt: skip
        assert hub.repos["user/policy"].private
        pushed, reply = result.stdout.splitlines()
        assert hub.repos["user/policy"].refs["main"] in pushed
        assert reply and set(reply.split()) <= set(WORDS)
        loaded = AutoModelForCausalLMWithILQLHeads.from_pretrained("user/policy").state_dict()
        local = AutoModelForCausalLMWithILQLHeads.from_pretrained(policy).state_dict()
        assert all(torch.equal(x, local[name]) for name, x in loaded.items())

    def test_older_revision_is_asked(self, example, hub, policy, make_model, capsys):  # noqa: F811
        script = example.ScriptArguments(str(policy), "user/policy", prompt="w1 w2", max_new_tokens=8)
        example.main(script)
        first, reply = hub.repos["user/policy"].refs["main"], capsys.readouterr().out.splitlines()[-1]
        other = make_model("llama", beta=2.0)
        with torch.no_grad():
            other.base.lm_head.weight.neg_()
        other.save_pretrained(policy)
        example.main(script)
        assert hub.repos["user/policy"].refs["main"] != first
        assert capsys.readouterr().out.splitlines()[-1] != reply
        script.revision = first
        example.main(script)
        assert capsys.readouterr().out.splitlines()[-1] == reply

    def test_broken_policy_is_not_pushed(self, example, hub, policy):  # noqa: F811
        (policy / "model.safetensors").unlink()
        with pytest.raises(OSError, match="model.safetensors"):
            example.main(example.ScriptArguments(str(policy), "user/policy"))
        assert not hub.repos

    def test_plain_model_is_not_pushed(self, example, hub, make_base, tmp_path):  # noqa: F811
        make_base("llama").save_pretrained(tmp_path / "plain")
        with pytest.raises(ValueError, match="without ILQL heads"):
            example.main(example.ScriptArguments(model=str(tmp_path / "plain"), repo_id="user/plain"))
        assert not hub.repos
