# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
import dataclasses
import json
import re

import pytest
from transformers import HfArgumentParser

from hf_qrl import ILQLConfig
from hf_qrl.trainer.base_config import BaseConfig
from hf_qrl.trainer.q_learning_config import QLearningConfig


class TestILQLConfig:
    def test_defaults(self):
        args = ILQLConfig("out", report_to="none")
        assert (args.tau, args.gamma, args.cql_scale, args.awac_scale, args.awac_beta) == (0.7, 0.99, 0.1, 1.0, 0.0)
        assert (args.alpha, args.steps_for_target_q_sync) == (0.005, 1)
        assert (args.target, args.n_step, args.discount_on) == ("td", 1, "token")
        assert args.reward_scaling is None and args.history_window is None and args.disable_dropout
        assert (args.learning_rate, args.logging_steps, args.max_length) == (1e-4, 10, 1024)

    def test_bf16_only_when_asked(self):
        args = ILQLConfig("out", report_to="none")
        assert not args.bf16 and not args.fp16

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"gamma": 1.1}, "`gamma` must lie between 0 and 1"),
            ({"gamma": -0.1}, "`gamma` must lie between 0 and 1"),
            ({"gamma": float("nan")}, "`gamma` must lie between 0 and 1"),
            ({"alpha": 2.0}, "`alpha` must lie between 0 and 1"),
            ({"cql_scale": -1.0}, "`cql_scale` must be finite and not negative"),
            ({"awac_scale": -1.0}, "`awac_scale` must be finite and not negative"),
            ({"awac_beta": -1.0}, "`awac_beta` must be finite and not negative"),
            ({"reward_scaling": "normalize"}, "`reward_scaling` must be"),
            ({"truncation_side": "middle"}, "`truncation_side` must be"),
            ({"steps_for_target_q_sync": 0}, "`steps_for_target_q_sync` must be at least 1"),
            ({"log_completions_steps": 0}, "`log_completions_steps` must be at least 1"),
            ({"awac_weight_clip": 0.0}, "`awac_weight_clip` must be positive"),
            ({"awac_beta": float("nan")}, "`awac_beta` must be finite"),
            ({"value_min": float("nan")}, "`value_min` must be a number"),
            ({"value_min": 1.0, "value_max": 1.0}, "must be smaller than"),
        ],
    )
    def test_invalid_option_raises(self, options, message):
        with pytest.raises(ValueError, match=message):
            ILQLConfig("out", report_to="none", **options)

    def test_help_is_printed(self):
        text = HfArgumentParser(ILQLConfig).format_help()
        for field in dataclasses.fields(ILQLConfig):
            assert f"--{field.name}" in text

    def test_every_own_argument_is_described(self):
        own = set().union(*(config.__annotations__ for config in (ILQLConfig, QLearningConfig, BaseConfig)))
        for field in dataclasses.fields(ILQLConfig):
            if field.name in own:
                assert field.metadata["help"].endswith("."), field.name
                described = ILQLConfig.__doc__ + QLearningConfig.__doc__ + BaseConfig.__doc__
                assert re.search(rf"\b{field.name}( \(|=)", described), field.name
        assert {"tau", "gamma", "max_length", "log_completions"} <= own

    def test_command_line(self):
        line = ["--output_dir", "out", "--report_to", "none", "--tau", "0.9", "--target", "utterance", "--n_step", "1"]
        line += ["--max_length", "64", "--model_init_kwargs", '{"head_type": "tied"}', "--freeze_base", "true"]
        (args,) = HfArgumentParser(ILQLConfig).parse_args_into_dataclasses(line)
        assert (args.tau, args.target, args.max_length, args.freeze_base) == (0.9, "utterance", 64, True)
        assert args.model_init_kwargs == {"head_type": "tied"}

    def test_command_line_refuses_unknown_choice(self, capsys):
        with pytest.raises(SystemExit):
            HfArgumentParser(ILQLConfig).parse_args_into_dataclasses(["--output_dir", "out", "--target", "lambda"])
        assert "invalid choice" in capsys.readouterr().err

    def test_json_round_trip(self, tmp_path):
        args = ILQLConfig(
            str(tmp_path),
            report_to="none",
            tau=0.8,
            value_max=3.0,
            model_init_kwargs={"num_q_heads": 1},
            max_length=None,
        )
        path = tmp_path / "args.json"
        path.write_text(args.to_json_string())
        (again,) = HfArgumentParser(ILQLConfig).parse_json_file(str(path), allow_extra_keys=True)
        for name in ILQLConfig.__annotations__:
            assert getattr(again, name) == getattr(args, name), name
        assert json.loads(again.to_json_string())["tau"] == 0.8


@pytest.mark.parametrize(
    ("metric", "given", "expected"),
    [
        ("eval_loss/q", None, False),
        ("loss/cql", None, False),
        ("eval_a_loss/v", None, False),
        ("eval_loss", None, False),
        ("eval_q/mean", None, True),
        ("eval_loss/q", True, True),
    ],
)
def test_less_is_better_for_losses(tmp_path, metric, given, expected):
    args = ILQLConfig(str(tmp_path), metric_for_best_model=metric, greater_is_better=given)
    assert args.greater_is_better is expected


@pytest.mark.parametrize(("given", "expected"), [(None, False), (True, True), (False, False)])
def test_buffers_are_not_sent_at_each_forward(tmp_path, given, expected):
    assert ILQLConfig(str(tmp_path), ddp_broadcast_buffers=given).ddp_broadcast_buffers is expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bf16_full_eval": True}, "casts the whole model, heads included"),
        ({"fp16_full_eval": True}, "casts the whole model, heads included"),
        ({"label_smoothing_factor": 0.1}, "has no meaning"),
    ],
)
def test_arguments_that_would_be_ignored_or_worse_are_refused(tmp_path, arguments, message):
    with pytest.raises(ValueError, match=message):
        ILQLConfig(str(tmp_path), use_cpu=True, **arguments)
