# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, BartConfig, T5Config

from hf_qrl import AutoModelForSeq2SeqLMWithILQLHeads, ILQLForCausalLM


ONE, MEAN = {"num_q_heads": 1}, {"q_reduction": "mean", "num_q_heads": 3}
FOLDING = [
    {"head_type": "linear", **ONE},
    {"head_type": "linear", **MEAN},
    {"head_type": "linear", "head_stem": "linear", **MEAN},
    {"head_type": "tied", **ONE},
    {"head_type": "tied", "head_stem": "identity", **MEAN},
    {"head_type": "tied", **MEAN},
    {"head_type": "dueling", "head_stem": "identity", **ONE},
    {"head_type": "dueling", "head_stem": "linear", **MEAN},
]
BETA = 1.7


def assert_same_policy(folded_logits: torch.Tensor, policy_logits: torch.Tensor) -> None:
    difference = folded_logits.log_softmax(-1) - policy_logits.log_softmax(-1)
    assert difference.abs().max() <= 1e-5


class TestFoldPolicy:
    @pytest.mark.parametrize("heads", FOLDING, ids=lambda heads: "-".join(map(str, heads.values())))
    @pytest.mark.parametrize("name", ["gpt2", "llama", "llama_tied", "opt", "gpt_neox", "cohere", "granite"])
    def test_same_policy(self, make_model, make_ids, name, heads):
        model = make_model(name, **heads)
        ids = make_ids(3, 9)
        folded = model.fold_policy(BETA)
        assert type(folded) is type(model.base)
        assert_same_policy(folded(ids).logits, model(ids, beta=BETA).logits)
        assert (folded(ids).logits.log_softmax(-1) - model.base(ids).logits.log_softmax(-1)).abs().max() > 0.1

    @pytest.mark.parametrize("name", ["llama", "llama_tied", "gpt2"])
    def test_saved_model_is_an_ordinary_one(self, make_model, make_ids, tmp_path, name):
        model = make_model(name, head_type="tied", **MEAN, beta=BETA)
        model.generation_config.max_new_tokens = 11
        before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
        folded = model.fold_policy()
        folded.save_pretrained(tmp_path)
        # What it was made of is as it was.
        assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())
        assert model.base.config.tie_word_embeddings == (name != "llama")
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
        assert type(loaded) is type(model.base) and not loaded.config.tie_word_embeddings
        assert loaded.get_output_embeddings().weight is not loaded.get_input_embeddings().weight
        assert {key.split(".")[0] for key in load_file(tmp_path / "model.safetensors")} <= {
            *("model", "transformer", "lm_head")
        }
        ids = make_ids(2, 5)
        assert torch.equal(loaded(ids).logits, folded(ids).logits)
        assert loaded.generation_config.max_new_tokens == 11
        for arguments in ({"do_sample": False}, {"num_beams": 3}, {"do_sample": True, "top_k": 5}):
            torch.manual_seed(0)
            expected = model.generate(ids, **arguments)
            torch.manual_seed(0)
            assert torch.equal(loaded.generate(ids, **arguments), expected)

    def test_generates_without_hf_qrl(self, make_model, make_ids, tmp_path):
        model = make_model("llama_tied", head_type="linear", **ONE)
        model.fold_policy(BETA).save_pretrained(tmp_path)
        ids = make_ids(1, 4)
        script = (
            "import sys, json, torch\n"
            "from transformers import AutoModelForCausalLM\n"
            f"model = AutoModelForCausalLM.from_pretrained({str(tmp_path)!r})\n"
            f"print(json.dumps(model.generate(torch.tensor({ids.tolist()}), max_new_tokens=6).tolist()))\n"
            "assert not [name for name in sys.modules if name.startswith('hf_qrl')]\n"
        )
        result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
        assert result.returncode == 0, result.stderr[-2000:]
        assert json.loads(result.stdout.splitlines()[-1]) == model.generate(ids, max_new_tokens=6, beta=BETA).tolist()

    @pytest.mark.parametrize("name", ["t5", "bart"])
    def test_same_policy_encoder_decoder(self, make_ids, scramble_heads, tmp_path, name):
        t5 = {"d_model": 24, "d_ff": 32, "d_kv": 12, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0}
        layers = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
        bart = {"d_model": 24, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "decoder_start_token_id": 2, **layers}
        config = T5Config(vocab_size=61, **t5) if name == "t5" else BartConfig(vocab_size=61, **bart)
        base = AutoModelForSeq2SeqLM.from_config(config).eval()
        if name == "bart":
            base.final_logits_bias.normal_()
        heads = {"head_type": "linear", **MEAN}
        model = scramble_heads(AutoModelForSeq2SeqLMWithILQLHeads.from_pretrained(base, **heads))
        model.fold_policy(BETA).save_pretrained(tmp_path)
        folded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
        inputs = {"input_ids": make_ids(), "decoder_input_ids": make_ids(length=5, seed=1)}
        assert_same_policy(folded(**inputs).logits, model(**inputs, beta=BETA).logits)
        ids = make_ids()
        assert torch.equal(folded.generate(ids, max_new_tokens=6), model.generate(ids, max_new_tokens=6, beta=BETA))

    def test_dtype_of_the_language_model_is_kept(self, make_base, scramble_heads, make_ids):
        model = ILQLForCausalLM.from_base(make_base("llama_tied").bfloat16(), head_type="linear", **ONE)
        folded = scramble_heads(model).fold_policy(BETA)
        assert {parameter.dtype for parameter in folded.parameters()} == {torch.bfloat16}
        difference = folded(make_ids()).logits.float().softmax(-1) - model(make_ids(), beta=BETA).logits.softmax(-1)
        assert difference.abs().max() < 0.05

    def test_folded_model_trains_on(self, make_model, make_ids):
        folded = make_model("llama_tied", head_type="linear", **ONE).fold_policy(BETA)
        folded(make_ids(), labels=make_ids()).loss.backward()
        assert folded.lm_head.weight.grad.any() and folded.model.embed_tokens.weight.grad.any()

    @pytest.mark.parametrize(
        ("heads", "message"),
        [
            ({}, 'not linear in the hidden state.*`head_type="linear"` or `"tied"`'),
            ({"head_type": "dueling", **ONE}, 'head_stem="silu"'),
            ({"head_type": "linear"}, "minimum of 2 Q-heads"),
            ({"head_type": "linear", **ONE, "policy_top_k": 5}, "policy_top_k=5"),
        ],
    )
    def test_what_does_not_fold_says_why(self, make_model, heads, message):
        with pytest.raises(ValueError, match=message):
            make_model("llama", **heads).fold_policy(BETA)

    def test_capped_logits_do_not_fold(self, make_model):
        with pytest.raises(ValueError, match="caps its logits"):
            make_model("gemma3", head_type="linear", **ONE).fold_policy(BETA)

    def test_infinite_beta_raises(self, make_model):
        with pytest.raises(ValueError, match="`beta` must be a finite number"):
            make_model("llama", head_type="linear", **ONE).fold_policy(float("inf"))
