# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
import pytest
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from examples import fold, random_walks


class TestFold:
    def test_folds_a_trained_model(self, tmp_path, capsys):
        arguments = random_walks.ScriptArguments(
            tmp_path / "model", seeds=[0], steps=3, head_type="linear", q_reduction="mean", samples=1, fold=True
        )
        results = random_walks.main(arguments)
        assert "folded into a plain Llama" in results

        completion = fold.main(fold.ScriptArguments(str(tmp_path / "model"), str(tmp_path / "plain"), 16.0, "b"))
        assert completion in capsys.readouterr().out
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
        assert type(model) is LlamaForCausalLM
        assert AutoTokenizer.from_pretrained(tmp_path / "plain").decode([1]) == "b"
        card = ModelCard.load(tmp_path / "plain" / "README.md")
        assert card.data.library_name == "transformers" and "beta = 16" in card.text

    @pytest.mark.slow
    def test_folded_policy_is_as_good(self, tmp_path):
        arguments = random_walks.ScriptArguments(
            tmp_path, seeds=[0], head_type="linear", q_reduction="mean", fold=True
        )
        results = random_walks.main(arguments)
        policy, plain = results["ILQL (beta 16)"], results["folded into a plain Llama"]
        # The same random numbers meet logits that differ by rounding.
        assert policy.mean > 0.9 and plain.mean == pytest.approx(policy.mean, abs=0.01)
