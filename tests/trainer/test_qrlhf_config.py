# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
import dataclasses
import re

import pytest
from transformers import HfArgumentParser

from hf_qrl import QRLHFConfig
from hf_qrl.trainer.q_learning_config import QLearningConfig


class TestQRLHFConfig:
    def test_defaults(self):
        args = QRLHFConfig("out", report_to="none")
        assert (args.gamma, args.discount_on, args.n_step, args.mc_floor, args.double_q) == (
            0.998, "utterance", 1, False, False,
        )  # fmt: skip
        assert (args.conservative_scale, args.q_min, args.cloning_scale) == (1.0, None, 1.0)
        assert (args.target_network, args.ema_beta, args.ema_warmup_steps, args.ema_update_every) == (
            "head", 0.995, 0, 1,
        )  # fmt: skip
        assert args.reward_scaling is None and args.history_window is None and args.disable_dropout
        assert (args.learning_rate, args.logging_steps, args.max_length) == (1e-4, 10, 1024)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"gamma": 1.1}, "`gamma` must lie between 0 and 1"),
            ({"discount_on": "turn"}, "`discount_on` must be"),
            ({"n_step": 0}, "`n_step` must be at least 1"),
            ({"ema_beta": 1.5}, "`ema_beta` must lie between 0 and 1"),
            ({"ema_beta": float("nan")}, "`ema_beta` must lie between 0 and 1"),
            ({"ema_warmup_steps": -1}, "`ema_warmup_steps` must be finite and not negative"),
            ({"ema_update_every": 0}, "`ema_update_every` must be at least 1"),
            ({"conservative_scale": -1.0}, "`conservative_scale` must be finite and not negative"),
            ({"cloning_scale": float("inf")}, "`cloning_scale` must be finite and not negative"),
            ({"q_min": float("nan")}, "`q_min` must be a finite number"),
            ({"q_min": float("-inf")}, "`q_min` must be a finite number"),
            ({"target_network": "trunk"}, "`target_network` must be"),
            ({"value_min": 1.0, "value_max": 1.0}, "must be smaller than"),
            ({"reward_scaling": "normalize"}, "`reward_scaling` must be"),
            ({"label_smoothing_factor": 0.1}, "has no meaning"),
        ],
    )
    def test_invalid_option_raises(self, options, message):
        with pytest.raises(ValueError, match=message):
            QRLHFConfig("out", report_to="none", **options)

    def test_best_model_without_its_target_network_raises(self):
        saving = {"save_only_model": True, "load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 1}
        saving |= {"save_strategy": "steps", "save_steps": 1, "report_to": "none"}
        QRLHFConfig("out", **saving)
        with pytest.raises(ValueError, match="`save_only_model` does not save it"):
            QRLHFConfig("out", target_network="model", **saving)

    def test_every_own_argument_is_described(self):
        own, described = set(QRLHFConfig.__annotations__), QRLHFConfig.__doc__
        assert {"q_min", "target_network", "ema_beta", "mc_floor"} <= own
        own |= set(QLearningConfig.__annotations__)
        for field in dataclasses.fields(QRLHFConfig):
            if field.name in own:
                assert field.metadata["help"].endswith("."), field.name
                assert re.search(rf"\b{field.name}( \(|=)", described + QLearningConfig.__doc__), field.name
                if field.name not in QLearningConfig.__annotations__:
                    assert re.search(rf"\b{field.name} \(.*, \*optional\*", described), field.name

    def test_documented_defaults_are_the_defaults(self):
        for field in dataclasses.fields(QRLHFConfig):
            stated = re.search(rf"\b{field.name} \(.*defaults to `(.*)`\)", QRLHFConfig.__doc__)
            if stated:
                assert eval(stated[1]) == field.default, field.name
        assert '`gamma=0.998` and `discount_on="utterance"`' in QRLHFConfig.__doc__

    def test_command_line(self):
        line = ["--output_dir", "out", "--report_to", "none", "--target_network", "model", "--ema_beta", "0.9"]
        line += ["--ema_warmup_steps", "3", "--ema_update_every", "2", "--q_min", "-2.5", "--double_q"]
        line += ["--mc_floor", "true", "--conservative_scale", "0.5", "--cloning_scale", "0", "--n_step", "2"]
        line += ["--model_init_kwargs", '{"policy": "lm"}', "--gamma", "0.9", "--discount_on", "token"]
        (args,) = HfArgumentParser(QRLHFConfig).parse_args_into_dataclasses(line)
        assert (args.target_network, args.ema_beta, args.ema_warmup_steps, args.ema_update_every) == (
            "model", 0.9, 3, 2,
        )  # fmt: skip
        assert (args.q_min, args.double_q, args.mc_floor, args.n_step) == (-2.5, True, True, 2)
        assert (args.conservative_scale, args.cloning_scale) == (0.5, 0.0) and not args.clones
        assert (args.gamma, args.discount_on, args.model_init_kwargs) == (0.9, "token", {"policy": "lm"})

    @pytest.mark.parametrize("option", [["--target_network", "trunk"], ["--discount_on", "turn"]])
    def test_command_line_refuses_unknown_choice(self, capsys, option):
        with pytest.raises(SystemExit):
            HfArgumentParser(QRLHFConfig).parse_args_into_dataclasses(["--output_dir", "out", *option])
        assert "invalid choice" in capsys.readouterr().err

    def test_json_round_trip(self, tmp_path):
        args = QRLHFConfig(str(tmp_path), report_to="none", q_min=-3.0, target_network="model", ema_beta=0.5)
        path = tmp_path / "args.json"
        path.write_text(args.to_json_string())
        (again,) = HfArgumentParser(QRLHFConfig).parse_json_file(str(path), allow_extra_keys=True)
        for name in QRLHFConfig.__annotations__:
            assert getattr(again, name) == getattr(args, name), name

    @pytest.mark.parametrize(
        ("metric", "expected"), [("eval_loss/td", False), ("loss/conservative", False), ("eval_q/taken", True)]
    )
    def test_less_is_better_for_losses(self, metric, expected):
        assert QRLHFConfig("out", metric_for_best_model=metric).greater_is_better is expected
