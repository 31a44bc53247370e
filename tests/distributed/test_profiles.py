# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""The profiles for `accelerate launch`, as accelerate reads them."""

from importlib.resources import files

import pytest
from accelerate.commands.config.config_args import load_config_from_file


PROFILES = {
    "ddp": ("MULTI_GPU", {}),
    "zero1": ("DEEPSPEED", {"zero_stage": 1, "offload_optimizer_device": "none", "zero3_init_flag": False}),
    "zero2": ("DEEPSPEED", {"zero_stage": 2, "offload_optimizer_device": "none", "zero3_init_flag": False}),
    "zero3": (
        "DEEPSPEED",
        {"zero_stage": 3, "offload_param_device": "none", "zero3_init_flag": True, "zero3_save_16bit_model": True},
    ),
    "zero3_offload": (
        "DEEPSPEED",
        {
            "zero_stage": 3,
            "offload_optimizer_device": "cpu",
            "offload_param_device": "cpu",
            "zero3_save_16bit_model": True,
        },
    ),
    "fsdp2": (
        "FSDP",
        {
            "fsdp_version": 2,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_reshard_after_forward": True,
            "fsdp_cpu_ram_efficient_loading": False,
            "fsdp_state_dict_type": "FULL_STATE_DICT",
        },
    ),
}


def test_every_profile_is_tested():
    directory = files("hf_qrl") / "accelerate_configs"
    assert {path.name for path in directory.iterdir() if path.name.endswith(".yaml")} == {
        f"{x}.yaml" for x in PROFILES
    }


@pytest.mark.parametrize("name", PROFILES)
def test_profile(name):
    kind, settings = PROFILES[name]
    config = load_config_from_file(str(files("hf_qrl") / "accelerate_configs" / f"{name}.yaml"))
    assert config.distributed_type.value == kind
    assert config.num_machines == 1 and config.num_processes > 1 and not config.use_cpu
    assert config.mixed_precision == "no"
    got = {"MULTI_GPU": {}, "DEEPSPEED": config.deepspeed_config, "FSDP": config.fsdp_config}[kind]
    assert {name: got[name] for name in settings} == settings
