# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""A model whose code lies in its repository, for those who have not installed hf_qrl."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import hf_qrl
from hf_qrl import (
    AutoModelForCausalLMWithILQLHeads,
    ILQLCausalLMConfig,
    ILQLForCausalLM,
    ValueHeadCausalLMConfig,
    ValueHeadForCausalLM,
)


REPO = "user/policy"
SCRIPT = Path(__file__).parent / "scripts" / "load_with_code.py"
MODELS = Path(hf_qrl.__file__).parent / "models"


@pytest.fixture
def registered(monkeypatch):
    """The classes save their code; the mark is taken off them again."""
    for cls, auto_class in [
        (ILQLCausalLMConfig, "AutoConfig"),
        (ILQLForCausalLM, "AutoModelForCausalLM"),
        (ValueHeadCausalLMConfig, "AutoConfig"),
        (ValueHeadForCausalLM, "AutoModelForCausalLM"),
    ]:
        monkeypatch.setattr(cls, "_auto_class", None)
        cls.register_for_auto_class(auto_class)


@pytest.fixture
def model(registered, make_model):
    return make_model("llama", beta=2.5)


@pytest.fixture
def load_elsewhere(hub, hub_environment, make_ids, tmp_path):
    """Returns a function that loads `REPO` in a process without hf_qrl, with caches of its own."""

    def load(generate: dict | None = None, **kwargs) -> subprocess.CompletedProcess:
        spec = {
            "repo_id": REPO,
            "kwargs": kwargs,
            "input_ids": make_ids().tolist(),
            "generate": {"max_new_tokens": 5, "do_sample": False, **(generate or {})},
            "record": str(tmp_path / "record.pt"),
        }
        (tmp_path / "spec.json").write_text(json.dumps(spec))
        home = tmp_path / "elsewhere"
        caches = {"HF_HOME": str(home), "HF_HUB_CACHE": str(home / "hub"), "HF_MODULES_CACHE": str(home / "modules")}
        return subprocess.run(
            [sys.executable, str(SCRIPT), str(tmp_path / "spec.json")],
            env={**os.environ, **hub_environment, **caches},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )

    return load


class TestRemoteCode:
    def test_trusted_code_loads_and_generates(self, hub, model, load_elsewhere, make_ids, tmp_path):
        model.push_to_hub(REPO)
        config = json.loads(hub.files(REPO)["config.json"])
        assert config["auto_map"] == {
            "AutoConfig": "configuration_ilql.ILQLCausalLMConfig",
            "AutoModelForCausalLM": "modeling_ilql.ILQLForCausalLM",
        }
        result = load_elsewhere({"beta": 4.0}, trust_remote_code=True)
        assert result.returncode == 0, result.stderr
        record = torch.load(tmp_path / "record.pt")
        assert record["class"][0] == "ILQLForCausalLM" and record["class"][1].startswith("transformers_modules.")
        expected = dict([*model.named_parameters(), *model.named_buffers()])
        assert record["tensors"].keys() == expected.keys()
        assert all(torch.equal(x, expected[name]) for name, x in record["tensors"].items())
        tokens = model.generate(make_ids(), max_new_tokens=5, do_sample=False, beta=4.0)
        assert torch.equal(record["tokens"], tokens)
        # The argument did something.
        assert not torch.equal(tokens, model.generate(make_ids(), max_new_tokens=5, do_sample=False, beta=0.0))

    def test_trusted_code_of_a_value_head_loads(
        self, hub, registered, make_value_model, load_elsewhere, make_ids, tmp_path
    ):
        model = make_value_model("llama")
        model.push_to_hub(REPO)
        result = load_elsewhere(trust_remote_code=True)
        assert result.returncode == 0, result.stderr
        record = torch.load(tmp_path / "record.pt")
        assert record["class"][0] == "ValueHeadForCausalLM" and record["class"][1].startswith("transformers_modules.")
        expected = dict([*model.named_parameters(), *model.named_buffers()])
        assert record["tensors"].keys() == expected.keys()
        assert all(torch.equal(x, expected[name]) for name, x in record["tensors"].items())
        assert torch.equal(record["tokens"], model.base.generate(make_ids(), max_new_tokens=5, do_sample=False))

    def test_code_is_not_run_without_trust(self, hub, model, load_elsewhere):
        model.push_to_hub(REPO)
        result = load_elsewhere()
        assert result.returncode != 0
        assert "ValueError" in result.stderr and "user/policy" in result.stderr
        assert "trust_remote_code=True" in result.stderr

    def test_installed_library_needs_no_trust(self, hub, model, assert_same_bits):
        model.push_to_hub(REPO)
        for loader in (AutoModelForCausalLM, AutoModelForCausalLMWithILQLHeads):
            loaded = loader.from_pretrained(REPO)
            assert type(loaded) is ILQLForCausalLM
            assert_same_bits(loaded, model)
        assert not [line for line in hub.requests if line.endswith(".py")]

    def test_code_is_pushed_only_when_registered(self, hub, make_model):
        make_model("llama").push_to_hub(REPO)
        assert not [path for path in hub.files(REPO) if path.endswith(".py")]
        assert "auto_map" not in json.loads(hub.files(REPO)["config.json"])

    def test_pushed_code_imports_its_siblings_only(self, hub, model):
        """An absolute import of hf_qrl would be asked for at loading, a relative one from above would not be found."""
        model.push_to_hub(REPO)
        sources = {path: text.decode() for path, text in hub.files(REPO).items() if path.endswith(".py")}
        assert {"configuration_ilql.py", "heads.py", "modeling_ilql.py"} <= set(sources)
        for path, text in sources.items():
            assert text == (MODELS / path).read_text()
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.ImportFrom):
                    assert node.level <= 1 and (node.level == 1 or not node.module.startswith("hf_qrl")), path
                    assert node.level == 0 or f"{node.module}.py" in sources, path
                elif isinstance(node, ast.Import):
                    assert not any(name.name.startswith("hf_qrl") for name in node.names), path

    def test_copy_without_the_code_does_not_point_to_it(self, hub, model, monkeypatch):
        model.push_to_hub(REPO)
        for cls in (ILQLCausalLMConfig, ILQLForCausalLM):
            monkeypatch.setattr(cls, "_auto_class", None)
        AutoModelForCausalLMWithILQLHeads.from_pretrained(REPO).push_to_hub("user/copy")
        assert not [path for path in hub.files("user/copy") if path.endswith(".py")]
        assert "auto_map" not in json.loads(hub.files("user/copy")["config.json"])
