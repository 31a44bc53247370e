# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""Layouts of processes that would not train what they say, or could not save it."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
from accelerate.utils import DistributedType
from accelerate.utils.deepspeed import HfDeepSpeedConfig

from hf_qrl import ILQLConfig
from hf_qrl.trainer.processes import check_fsdp_settings, check_processes


def make_args(tmp_path, **kwargs) -> ILQLConfig:
    return ILQLConfig(str(tmp_path), use_cpu=True, report_to="none", **kwargs)


def make_trainer(
    args, tensor: int = 1, loaded: bool = False, encoder_decoder: bool = False, **accelerator
) -> SimpleNamespace:
    """What `check_processes` looks at."""
    defaults = {"distributed_type": DistributedType.NO, "parallelism_config": None}
    return SimpleNamespace(
        args=args,
        accelerator=SimpleNamespace(**{**defaults, **accelerator}),
        get_tp_size=lambda: tensor,
        is_distributed_loading_by_transformers=loaded,
        bare_model=SimpleNamespace(config=SimpleNamespace(is_encoder_decoder=encoder_decoder)),
    )


class TestFSDP:
    def test_version_1_is_refused(self, tmp_path):
        with pytest.raises(ValueError, match="version 1.*not supported.*version 2"):
            check_fsdp_settings(make_args(tmp_path, fsdp=True, fsdp_config={"version": 1}))

    def test_version_1_of_accelerate_launch_is_refused(self, tmp_path, monkeypatch):
        args = make_args(tmp_path)
        check_fsdp_settings(args)
        monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
        with pytest.raises(ValueError, match="version 1.*fsdp_version: 2"):
            check_fsdp_settings(args)
        monkeypatch.setenv("FSDP_VERSION", "2")
        check_fsdp_settings(args)

    def test_loading_on_the_first_process_is_refused(self, tmp_path, monkeypatch):
        config = {"version": 2, "cpu_ram_efficient_loading": True}
        with pytest.raises(ValueError, match="`cpu_ram_efficient_loading`.*Set it to false"):
            check_fsdp_settings(make_args(tmp_path, fsdp=True, fsdp_config=config))
        check_fsdp_settings(make_args(tmp_path, fsdp=True, fsdp_config={"version": 2}))
        monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
        monkeypatch.setenv("FSDP_VERSION", "2")
        monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "true")
        with pytest.raises(ValueError, match="`cpu_ram_efficient_loading`"):
            check_fsdp_settings(make_args(tmp_path))

    def test_encoder_decoder_is_refused(self, tmp_path):
        args = make_args(tmp_path, fsdp=True, fsdp_config={"version": 2})
        trainer = make_trainer(args, encoder_decoder=True, distributed_type=DistributedType.FSDP)
        with pytest.raises(ValueError, match="encoder-decoder.*Use ZeRO-3"):
            check_processes(trainer)

    def test_data_parallelism_in_its_place_is_refused(self, tmp_path):
        args = make_args(tmp_path, fsdp=True, fsdp_config={"version": 2})
        with pytest.raises(ValueError, match="FSDP is asked for, and accelerate runs MULTI_CPU.*leave out `fsdp`"):
            check_processes(make_trainer(args, distributed_type=DistributedType.MULTI_CPU))

    def test_sharded_state_dicts_are_refused(self, tmp_path):
        args = make_args(tmp_path, fsdp=True, fsdp_config={"version": 2})
        for kind in ("SHARDED_STATE_DICT", "FULL_STATE_DICT"):
            state = SimpleNamespace(fsdp_plugin=SimpleNamespace(state_dict_type=f"StateDictType.{kind}"))
            trainer = make_trainer(args, distributed_type=DistributedType.FSDP, state=state)
            if kind == "FULL_STATE_DICT":
                check_processes(trainer)
            else:
                with pytest.raises(ValueError, match="`save_model` writes no weights.*FULL_STATE_DICT"):
                    check_processes(trainer)

    @pytest.mark.slow
    def test_trainer_refuses_fsdp_on_cpus(self, tmp_path):
        """Through the trainer, in two processes: otherwise it would be DDP without a word."""
        script = tmp_path / "train.py"
        script.write_text(
            "from datasets import Dataset\n"
            "from transformers import LlamaConfig, LlamaForCausalLM\n"
            "from hf_qrl import ILQLConfig, ILQLTrainer\n"
            "shape = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)\n"
            "base = LlamaForCausalLM(LlamaConfig(vocab_size=9, **shape))\n"
            "row = dict(input_ids=[1, 2], attention_mask=[1, 1], actions_ixs=[0], states_ixs=[0, 1], dones=[1, 0],\n"
            "           rewards=[1.0])\n"
            f"args = ILQLConfig({str(tmp_path / 'out')!r}, use_cpu=True, report_to='none', fsdp=True,\n"
            "                  fsdp_config={'version': 2})\n"
            "try:\n"
            "    ILQLTrainer(base, args=args, train_dataset=Dataset.from_list([row]))\n"
            "except ValueError as error:\n"
            "    print('REFUSED', error)\n"
        )
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(script)]
        result = subprocess.run(command, capture_output=True, text=True, timeout=200)
        assert result.returncode == 0, result.stderr[-3000:]
        assert result.stdout.count("REFUSED FSDP is asked for, and accelerate runs MULTI_CPU") == 2


class TestDeepSpeed:
    @pytest.mark.parametrize("gather", [True, False])
    def test_zero3_that_cannot_be_saved_is_refused(self, tmp_path, gather):
        zero = {"stage": 3, "stage3_gather_16bit_weights_on_model_save": gather}
        args = make_args(tmp_path)
        args.hf_deepspeed_config = HfDeepSpeedConfig({"zero_optimization": zero})
        if gather:
            check_processes(make_trainer(args))
        else:
            with pytest.raises(ValueError, match="stage3_gather_16bit_weights_on_model_save` to true"):
                check_processes(make_trainer(args))


class TestOtherParallelism:
    def test_tensor_parallelism_is_refused(self, tmp_path):
        with pytest.raises(ValueError, match="tensor parallelism of 2 processes is not supported.*ZeRO-3 or FSDP2"):
            check_processes(make_trainer(make_args(tmp_path), tensor=2))

    @pytest.mark.parametrize("kind", ["cp", "sp"])
    def test_split_sequences_are_refused(self, tmp_path, kind):
        sizes = SimpleNamespace(**{"cp_size": 1, "sp_size": 1, f"{kind}_size": 2})
        with pytest.raises(ValueError, match="parallelism of 2 processes is not supported"):
            check_processes(make_trainer(make_args(tmp_path), parallelism_config=sizes))

    def test_model_sharded_while_loading_is_refused(self, tmp_path):
        with pytest.raises(ValueError, match="sharded while it was loaded"):
            check_processes(make_trainer(make_args(tmp_path), loaded=True))
