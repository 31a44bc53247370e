# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""What importing the package does, and does not do."""

import subprocess
import sys

import pytest

import hf_qrl
import hf_qrl.data
import hf_qrl.environments
import hf_qrl.losses
import hf_qrl.rollouts


HEAVY = ("ray", "deepspeed", "peft", "trl", "chess", "gymnasium")


CODE = f"""
import socket, sys
def refuse(*args, **kwargs):
    raise OSError("network")
socket.socket.connect = refuse
import hf_qrl, hf_qrl.data, hf_qrl.losses, hf_qrl.environments, hf_qrl.distributed.executors
print([module for module in {HEAVY!r} if module in sys.modules])
import hf_qrl.trainer.ilql_trainer
"""


def test_import_is_light_and_needs_no_network():
    result = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[]"


MODULES = [hf_qrl, hf_qrl.data, hf_qrl.environments, hf_qrl.losses, hf_qrl.rollouts]


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_public_names_exist(module):
    assert module.__all__ == sorted(module.__all__)
    for name in module.__all__:
        assert getattr(module, name) is not None
        assert name in dir(module)


def test_unknown_name_raises():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        hf_qrl.nothing  # noqa: B018
