# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""The names, fields and helpers that environments of NeMo-RL import."""

import ast
import sys
from pathlib import Path
from typing import get_type_hints

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hf_qrl
from hf_qrl import environments
from hf_qrl.data.interfaces import DatumSpec, LLMMessageLogType, TaskDataSpec
from hf_qrl.distributed.virtual_cluster import PY_EXECUTABLES
from hf_qrl.environments import adapters
from hf_qrl.environments.interfaces import EnvironmentInterface, EnvironmentReturn
from hf_qrl.environments.metrics import calculate_pass_rate_per_prompt
from hf_qrl.environments.utils import chunk_list_to_workers, plain_class


FIELDS = ("observations", "metadata", "next_stop_strings", "rewards", "terminateds", "answers")


def test_environment_return():
    assert EnvironmentReturn._fields == FIELDS
    returned = EnvironmentReturn[dict](*range(6))
    assert tuple(returned) == tuple(range(6))


def test_the_interface_is_abstract():
    with pytest.raises(TypeError, match="global_post_process_and_metrics"):
        EnvironmentInterface()
    assert EnvironmentInterface[dict] is not None and EnvironmentInterface.__abstractmethods__ == {
        "step",
        "global_post_process_and_metrics",
    }


@pytest.mark.parametrize("module", [environments, adapters], ids=lambda module: module.__name__)
def test_public_names(module):
    assert module.__all__ == sorted(module.__all__)
    assert all(getattr(module, name) is not None for name in module.__all__)


def test_datum_spec():
    assert set(get_type_hints(DatumSpec)) == {
        *("message_log", "length", "extra_env_info", "loss_multiplier", "idx", "task_name", "stop_strings"),
    }
    assert DatumSpec.__optional_keys__ == {"task_name", "stop_strings"}
    assert LLMMessageLogType is not None


def test_task_data_spec(tmp_path):
    path = tmp_path / "prompt.txt"
    path.write_text("Solve {}.", encoding="utf-8")
    spec, empty = TaskDataSpec("maths", prompt_file=path), TaskDataSpec()
    assert spec.prompt == "Solve {}." and spec.system_prompt is None
    empty.copy_defaults(spec)
    assert empty.prompt == "Solve {}." and empty.system_prompt is None
    with pytest.raises(FileNotFoundError):
        TaskDataSpec(system_prompt_file=tmp_path / "missing.txt")


def test_executables():
    assert PY_EXECUTABLES.SYSTEM == PY_EXECUTABLES.BASE == sys.executable


@given(st.lists(st.integers(), max_size=20), st.integers(1, 8))
def test_chunks(items, workers):
    chunks = chunk_list_to_workers(items, workers)
    assert [item for chunk in chunks for item in chunk] == items
    if len(items) <= workers:
        assert chunks == [[item] for item in items] + [[]] * (workers - len(items))
    else:
        size = -(-len(items) // workers)
        assert len(chunks) <= workers and {len(chunk) for chunk in chunks[:-1]} <= {size}
        assert 0 < len(chunks[-1]) <= size


def test_pass_rate():
    prompts = torch.tensor([[1, 2], [1, 2], [3, 0], [1, 3]])
    assert calculate_pass_rate_per_prompt(prompts, torch.tensor([0.0, 0.5, 0.0, 0.0])) == pytest.approx(1 / 3)
    assert calculate_pass_rate_per_prompt(prompts, torch.tensor([True, True, True, True])) == 1.0
    assert calculate_pass_rate_per_prompt(prompts, torch.zeros(4) - 1) == 0.0


def test_plain_class_of_a_plain_class():
    assert plain_class(dict) is dict


@pytest.mark.parametrize("package", ["environments", "distributed"])
def test_optional_packages_are_imported_in_functions_only(package):
    optional = {"ray", "gymnasium", "trl", "textarena", "openenv", "skyrl_gym", "gem", "chess"}
    root = Path(hf_qrl.__file__).parent / package
    files = sorted(root.rglob("*.py"))
    assert len(files) > 2
    for path in files:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module]
            assert optional.isdisjoint(name.split(".")[0] for name in names), path
