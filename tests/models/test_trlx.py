# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""Checkpoints as trlX writes them, made here by a model with trlX's own module names."""

import json
import os
import pickle

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForSeq2SeqLM, GenerationConfig, T5Config

from hf_qrl import AutoModelForCausalLMWithILQLHeads, AutoModelForSeq2SeqLMWithILQLHeads


class TrlxHeads(nn.Module):
    """The heads of trlX, on the last hidden state."""

    def __init__(self, hidden_size: int, vocab_size: int, num_q_heads: int):
        super().__init__()

        def make_head(out: int) -> nn.Sequential:
            return nn.Sequential(nn.Linear(hidden_size, 2 * hidden_size), nn.ReLU(), nn.Linear(2 * hidden_size, out))

        self.v_head = make_head(1)
        self.q_heads = nn.ModuleList(make_head(vocab_size) for _ in range(num_q_heads))
        self.target_q_heads = nn.ModuleList(make_head(vocab_size) for _ in range(num_q_heads))
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.3)


class TrlxModel(nn.Module):
    def __init__(self, base_model, num_q_heads: int = 2):
        super().__init__()
        self.base_model = base_model
        output = base_model.get_output_embeddings()
        self.ilql_heads = TrlxHeads(output.in_features, output.out_features, num_q_heads)

    @torch.no_grad()
    def values(self, hidden_states):
        heads = self.ilql_heads
        return (
            heads.v_head(hidden_states).squeeze(-1),
            [head(hidden_states) for head in heads.q_heads],
            [head(hidden_states) for head in heads.target_q_heads],
        )


def save(model: TrlxModel, directory, shards: int = 1) -> None:
    """`base_model.save_pretrained` with the state of the whole, as transformers did it when trlX was written."""
    directory.mkdir()
    model.base_model.config.save_pretrained(directory)
    model.base_model.generation_config.save_pretrained(directory)
    state = model.state_dict()
    if shards == 1:
        torch.save(state, directory / "pytorch_model.bin")
        return
    keys = list(state)
    weight_map = {}
    for i in range(shards):
        name = f"pytorch_model-{i + 1:05d}-of-{shards:05d}.bin"
        torch.save({key: state[key].clone() for key in keys[i::shards]}, directory / name)
        weight_map |= dict.fromkeys(keys[i::shards], name)
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "pytorch_model.bin.index.json").write_text(json.dumps(index))


def clone(state: dict[str, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    """Safetensors holds no two names of one tensor."""
    return [(key, tensor.clone()) for key, tensor in state.items()]


def renamed(name: str) -> str:
    return name.replace("pytorch_model", "model").replace(".bin", ".safetensors")


def assert_same_values(output, expected) -> None:
    value, qs, target_qs = expected
    torch.testing.assert_close(output.value, value, rtol=0, atol=1e-5)
    assert len(output.qs) == len(output.target_qs) == len(qs)
    for got, wanted in zip((*output.qs, *output.target_qs), (*qs, *target_qs), strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5)


class TestTrlxCheckpoint:
    @pytest.mark.parametrize("shards", [1, 3])
    @pytest.mark.parametrize("num_q_heads", [1, 2])
    @pytest.mark.parametrize("name", ["gpt2", "llama"])
    def test_same_values_after_loading_and_saving(self, make_base, make_ids, tmp_path, name, num_q_heads, shards):
        old = TrlxModel(make_base(name), num_q_heads)
        old.base_model.generation_config = GenerationConfig(eos_token_id=2, pad_token_id=0, max_new_tokens=7)
        save(old, tmp_path / "old", shards)
        model = AutoModelForCausalLMWithILQLHeads.from_pretrained(tmp_path / "old", beta=2.0)
        assert model.config.beta == 2.0 and model.generation_config.max_new_tokens == 7
        model.save_pretrained(tmp_path / "new")
        assert not [file for file in os.listdir(tmp_path / "new") if not file.endswith((".json", ".safetensors"))]
        ids = make_ids()
        base_output = old.base_model(ids, output_hidden_states=True)
        for loaded in (model, AutoModelForCausalLMWithILQLHeads.from_pretrained(tmp_path / "new")):
            assert not loaded.training
            output = loaded(ids, output_values=True)
            assert torch.equal(output.logits, base_output.logits)
            assert_same_values(output, old.values(base_output.hidden_states[-1]))
            assert loaded.config.num_q_heads == num_q_heads and loaded.config.beta == 2.0

    @pytest.mark.parametrize("tie", [None, False])  # T5 scales the states its LM head reads, Flan-T5 does not
    def test_same_values_encoder_decoder(self, tmp_path, make_ids, tie):
        sizes = {"vocab_size": 61, "d_model": 24, "d_ff": 32, "d_kv": 12, "num_layers": 2, "num_heads": 2}
        config = T5Config(**sizes, decoder_start_token_id=0, **({} if tie is None else {"tie_word_embeddings": tie}))
        old = TrlxModel(AutoModelForSeq2SeqLM.from_config(config).eval())
        save(old, tmp_path / "old")
        model = AutoModelForSeq2SeqLMWithILQLHeads.from_pretrained(tmp_path / "old")
        ids, decoder_ids = make_ids(), make_ids(length=5, seed=1)
        base_output = old.base_model(input_ids=ids, decoder_input_ids=decoder_ids, output_hidden_states=True)
        output = model(input_ids=ids, decoder_input_ids=decoder_ids, output_values=True)
        assert torch.equal(output.logits, base_output.logits)
        assert_same_values(output, old.values(base_output.decoder_hidden_states[-1]))

    def test_half_precision_trunk_keeps_heads_in_float32(self, make_base, tmp_path):
        save(TrlxModel(make_base("gpt2")).bfloat16(), tmp_path / "old")
        model = AutoModelForCausalLMWithILQLHeads.from_pretrained(tmp_path / "old", dtype=torch.bfloat16)
        assert model.base.dtype == torch.bfloat16
        assert {tensor.dtype for tensor in model.heads.state_dict().values()} == {torch.float32}

    def test_other_shape_of_heads_raises(self, make_base, tmp_path):
        save(TrlxModel(make_base("gpt2")), tmp_path / "old")
        with pytest.raises(ValueError, match=r"leave out \{'head_type': 'linear'\}"):
            AutoModelForCausalLMWithILQLHeads.from_pretrained(tmp_path / "old", head_type="linear")

    def test_missing_head_raises(self, make_base, tmp_path):
        old = TrlxModel(make_base("gpt2"))
        del old.ilql_heads.target_q_heads[1]
        save(old, tmp_path / "old")
        with pytest.raises(RuntimeError, match=r"Missing key.*target_q\.1"):
            AutoModelForCausalLMWithILQLHeads.from_pretrained(tmp_path / "old")
        del old.ilql_heads.v_head
        save(old, tmp_path / "older")
        with pytest.raises(ValueError, match=r"lacks heads \(v\.\)"):
            AutoModelForCausalLMWithILQLHeads.from_pretrained(tmp_path / "older")

    @pytest.mark.parametrize("shards", [1, 3])
    def test_safetensors_are_read_too(self, make_base, make_ids, tmp_path, shards):
        old = TrlxModel(make_base("gpt2"))
        save(old, tmp_path / "old", shards)
        for file in list((tmp_path / "old").glob("*.bin")):
            save_file(dict(clone(torch.load(file, weights_only=True))), file.with_name(renamed(file.name)))
            file.unlink()
        index = tmp_path / "old" / "pytorch_model.bin.index.json"
        if shards > 1:
            content = json.loads(index.read_text())
            content["weight_map"] = {key: renamed(name) for key, name in content["weight_map"].items()}
            (tmp_path / "old" / "model.safetensors.index.json").write_text(json.dumps(content))
            index.unlink()
        model = AutoModelForCausalLMWithILQLHeads.from_pretrained(tmp_path / "old")
        base_output = old.base_model(make_ids(), output_hidden_states=True)
        output = model(make_ids(), output_values=True)
        assert torch.equal(output.logits, base_output.logits)
        assert_same_values(output, old.values(base_output.hidden_states[-1]))

    def test_language_model_without_its_weights_raises(self, make_base, tmp_path):
        """Under other names they are not there: neither trlX's without heads, nor any other wrapper's."""
        base = make_base("gpt2")
        base.config.save_pretrained(tmp_path)
        save_file({f"base_model.{key}": x for key, x in clone(base.state_dict())}, tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match="weights of the GPT2LMHeadModel are missing.*would be random"):
            AutoModelForCausalLMWithILQLHeads.from_pretrained(tmp_path)

    def test_missing_weight_of_the_language_model_raises(self, make_base, tmp_path):
        save(TrlxModel(make_base("gpt2")), tmp_path / "old")
        path = tmp_path / "old" / "pytorch_model.bin"
        state = torch.load(path, weights_only=True)
        del state["base_model.transformer.h.0.mlp.c_fc.weight"]
        torch.save(state, path)
        with pytest.raises(ValueError, match="lacks weights of its GPT2LMHeadModel.*mlp.c_fc.weight"):
            AutoModelForCausalLMWithILQLHeads.from_pretrained(tmp_path / "old")

    def test_unknown_weight_raises(self, make_base, tmp_path):
        save(TrlxModel(make_base("gpt2")), tmp_path / "old")
        path = tmp_path / "old" / "pytorch_model.bin"
        state = torch.load(path, weights_only=True)
        for key, message in [("ilql_heads.v_head.1.weight", "Unknown weight"), ("frozen_head.weight", "1 others")]:
            torch.save({**state, key: torch.zeros(1)}, path)
            with pytest.raises(ValueError, match=message):
                AutoModelForCausalLMWithILQLHeads.from_pretrained(tmp_path / "old")

    def test_pickle_with_code_is_not_run(self, make_base, tmp_path):
        save(TrlxModel(make_base("gpt2")), tmp_path / "old")

        class Payload:
            def __reduce__(self):
                return (os.mkdir, (str(tmp_path / "ran"),))

        (tmp_path / "old" / "pytorch_model.bin").write_bytes(pickle.dumps({"ilql_heads.v_head.0.weight": Payload()}))
        with pytest.raises(ValueError, match="more than tensors"):
            AutoModelForCausalLMWithILQLHeads.from_pretrained(tmp_path / "old")
        assert not (tmp_path / "ran").exists()

    def test_plain_pickled_model_gets_fresh_heads(self, make_base, make_ids, tmp_path):
        base = make_base("gpt2")
        base.config.save_pretrained(tmp_path)
        torch.save(base.state_dict(), tmp_path / "pytorch_model.bin")
        model = AutoModelForCausalLMWithILQLHeads.from_pretrained(tmp_path, head_type="linear")
        assert torch.equal(model(make_ids(), beta=0.0).logits, base(make_ids()).logits)
