# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""Models with a value head: checkpoints, adapters, and checkpoints of other libraries."""

import json
import re

import peft
import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from hf_qrl import (
    AutoModelForCausalLMWithILQLHeads,
    AutoModelForCausalLMWithValueHead,
    AutoModelForSeq2SeqLMWithValueHead,
    ILQLForCausalLM,
    ILQLTrainer,
    QRLHFTrainer,
    ValueHeadForCausalLM,
    ValueHeadForSeq2SeqLM,
)
from hf_qrl.trainer.adapters import adapt, put_adapter
from hf_qrl.trainer.ilql_config import ILQLConfig
from hf_qrl.trainer.qrlhf_config import QRLHFConfig


SIZES = {"one file": "1GB", "sharded": "10KB"}


def auto_classes(base) -> tuple:
    """Of such a language model: ours, transformers', and the class that both give."""
    if base.config.is_encoder_decoder:
        return AutoModelForSeq2SeqLMWithValueHead, AutoModelForSeq2SeqLM, ValueHeadForSeq2SeqLM
    return AutoModelForCausalLMWithValueHead, AutoModelForCausalLM, ValueHeadForCausalLM


def outputs(model, inputs) -> list[torch.Tensor]:
    with torch.no_grad():
        output = model(**inputs, output_values=True)
    return [output.logits, output.value]


def assert_same(a: list[torch.Tensor], b: list[torch.Tensor]) -> None:
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


class TestSaveLoad:
    @pytest.mark.parametrize("files", SIZES)
    def test_save_load_bit_equal(self, make_value_model, make_inputs, any_architecture, files, tmp_path):
        model = make_value_model(any_architecture, history_window=3, head_expansion=3)
        inputs = make_inputs(model)
        model.save_pretrained(tmp_path, max_shard_size=SIZES[files])
        assert (tmp_path / "model.safetensors.index.json").exists() == (files == "sharded")
        ours, theirs, cls = auto_classes(model)
        for loader in (ours, theirs, AutoModel, cls):
            loaded = loader.from_pretrained(tmp_path)
            assert type(loaded) is cls and not loaded.training
            assert loaded.config.history_window == 3
            assert loaded.generation_config.to_dict() == model.generation_config.to_dict()
            assert_same(outputs(loaded, inputs), outputs(model, inputs))
            tied = loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
            assert tied == (model.get_output_embeddings().weight is model.get_input_embeddings().weight)

    def test_bf16_checkpoint_keeps_fp32_head(self, make_base, scramble_heads, assert_same_bits, tmp_path):
        model = scramble_heads(ValueHeadForCausalLM.from_base(make_base("llama").to(torch.bfloat16)))
        model.save_pretrained(tmp_path)
        loaded = AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path)
        assert loaded.dtype == torch.bfloat16
        assert {x.dtype for x in loaded.heads.parameters()} == {torch.float32}
        assert_same_bits(loaded.state_dict(), model.state_dict())

    def test_base_is_a_language_model_of_its_own(self, make_value_model, make_inputs, any_architecture, tmp_path):
        model = make_value_model(any_architecture)
        model.base.save_pretrained(tmp_path)
        loaded = auto_classes(model)[1].from_pretrained(tmp_path)
        assert type(loaded) is type(model.base)
        assert torch.equal(loaded(**make_inputs(model)).logits, model(**make_inputs(model)).logits)

    @pytest.mark.parametrize("key", ["heads.v.stem.0.weight", "heads.v.projection.bias", "base.lm_head.weight"])
    def test_missing_weight_raises(self, make_value_model, key, tmp_path):
        make_value_model("llama").save_pretrained(tmp_path)
        file = tmp_path / "model.safetensors"
        tensors = load_file(file)
        del tensors[key]
        save_file(tensors, file, metadata={"format": "pt"})
        for loader in (ValueHeadForCausalLM, AutoModelForCausalLMWithValueHead, AutoModelForCausalLM):
            with pytest.raises(ValueError, match=rf"1 weights are missing \({re.escape(key)}\)"):
                loader.from_pretrained(tmp_path)

    def test_head_of_another_width_raises(self, make_value_model, tmp_path):
        model = make_value_model("llama")
        model.save_pretrained(tmp_path)
        with pytest.raises(ValueError, match=r"\{'head_expansion': 3\} is asked for. Load them without it"):
            AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path, head_expansion=3)
        with pytest.raises(ValueError, match=r"\['reward_std'\] are set in the configuration"):
            ValueHeadForCausalLM.from_pretrained(tmp_path, config=model.config, reward_std=2.0)
        assert AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path, reward_std=2.0).config.reward_std == 2.0


class TestOtherHeads:
    def test_checkpoint_of_other_heads_raises(self, make_value_model, make_model, tmp_path):
        make_value_model().save_pretrained(tmp_path / "value")
        make_model().save_pretrained(tmp_path / "ilql")
        with pytest.raises(ValueError, match=r"other heads. Load it with `AutoModelFor\.\.\.WithILQLHeads`"):
            AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path / "ilql")
        with pytest.raises(ValueError, match=r"other heads. Load it with `AutoModelFor\.\.\.WithValueHead`"):
            AutoModelForCausalLMWithILQLHeads.from_pretrained(tmp_path / "value")
        with pytest.raises(ValueError, match=r"of heads are left over \(heads\.q\.0.*pass the `base` of that"):
            ValueHeadForCausalLM.from_pretrained(tmp_path / "ilql")
        with pytest.raises(ValueError, match=r"are missing \(heads\.q\.0"):
            ILQLForCausalLM.from_pretrained(tmp_path / "value")

    def test_other_kind_of_model_raises(self, make_value_model, tmp_path):
        make_value_model("t5").save_pretrained(tmp_path / "t5")
        make_value_model("llama").save_pretrained(tmp_path / "llama")
        with pytest.raises(ValueError, match="is an encoder-decoder.*Use `AutoModelForSeq2SeqLMWithValueHead`"):
            AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path / "t5")
        with pytest.raises(ValueError, match="is causal.*Use `AutoModelForCausalLMWithValueHead`"):
            AutoModelForSeq2SeqLMWithValueHead.from_pretrained(tmp_path / "llama")

    @pytest.mark.parametrize(("trainer", "config"), [(ILQLTrainer, ILQLConfig), (QRLHFTrainer, QRLHFConfig)])
    def test_trainers_of_q_heads_refuse_it(self, make_value_model, trainer, config, tmp_path):
        with pytest.raises(ValueError, match=r"ValueHeadForCausalLM has no Q-heads.*`model\.base`.*`PPOTrainer`"):
            trainer(make_value_model(), config(str(tmp_path)))


class TestAdapter:
    @pytest.fixture
    def make_adapter(self, make_any_base, tmp_path):
        """Returns a function from an architecture to an adapter with random weights on such a saved model."""

        @torch.no_grad()
        def make(name: str) -> peft.PeftModel:
            base = make_any_base(name)
            base.save_pretrained(tmp_path / "base")
            model = auto_classes(base)[0].from_pretrained(tmp_path / "base", history_window=2)
            adapted = put_adapter(model, LoraConfig(r=4))
            generator = torch.Generator().manual_seed(1)
            for key, tensor in adapted.state_dict().items():
                if ".default." in key:
                    tensor.copy_(0.3 * torch.randn(tensor.shape, generator=generator))
            return adapted.eval()

        return make

    @pytest.mark.parametrize("name", ["llama", "llama_tied", "gpt2", "t5", "bart"])
    def test_round_trip(self, make_adapter, make_inputs, name, tmp_path):
        model = make_adapter(name)
        inputs = make_inputs(model)
        model.save_pretrained(tmp_path / "adapter")
        ours, theirs, cls = auto_classes(model)
        for _ in range(2):  # nothing of it is random
            loaded = ours.from_pretrained(tmp_path / "adapter")
            assert isinstance(loaded, peft.PeftModel) and type(loaded.get_base_model()) is cls
            assert loaded.config.history_window == 2
            assert_same(outputs(loaded, inputs), outputs(model, inputs))
        plain = theirs.from_pretrained(tmp_path / "base")
        with loaded.disable_adapter():
            logits, value = outputs(loaded, inputs)
            with torch.no_grad():
                assert torch.equal(logits, plain(**inputs).logits)
            assert not value.any()
        assert not torch.allclose(loaded(**inputs).logits, plain(**inputs).logits, atol=1e-2)

    def test_merged_model_saves_and_loads(self, make_adapter, make_inputs, tmp_path):
        model = make_adapter("llama").double()
        inputs = make_inputs(model)
        expected = outputs(model, inputs)
        merged = model.merge_and_unload()
        assert type(merged) is ValueHeadForCausalLM
        for x, y in zip(outputs(merged, inputs), expected, strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=1e-9)
        merged.float().save_pretrained(tmp_path / "merged")
        again = AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path / "merged")
        assert_same(outputs(again, inputs), outputs(merged, inputs))

    def test_what_is_trained(self, make_adapter, tmp_path):
        make_adapter("llama").save_pretrained(tmp_path / "adapter")
        loaded = AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path / "adapter", is_trainable=True)
        trained = {name for name, x in loaded.named_parameters() if x.requires_grad}
        assert trained == {name for name, _ in loaded.named_parameters() if ".default." in name}
        heads = {name for name in trained if "heads.modules_to_save.default.v." in name}
        assert len(heads) == 4 and any("lora_A" in name for name in trained)
        assert not any("lora" in name for name in heads)

    def test_the_trainers_take_or_refuse_it(self, make_adapter, tmp_path):
        make_adapter("llama").save_pretrained(tmp_path / "adapter")
        args = ILQLConfig(str(tmp_path / "run"))
        trainable = AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path / "adapter", is_trainable=True)
        assert adapt(trainable, None, args) is trainable
        frozen = AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path / "adapter")
        with pytest.raises(ValueError, match="The adapter is frozen"):
            adapt(frozen, None, args)
        for x in trainable.get_base_model().heads.modules_to_save["default"].parameters():
            x.data.zero_()
        with pytest.raises(ValueError, match="are all zero"):
            adapt(trainable, None, args)

    def test_adapter_of_other_heads_raises(self, make_adapter, make_base, tmp_path):
        make_adapter("llama").save_pretrained(tmp_path / "value")
        ilql = AutoModelForCausalLMWithILQLHeads.from_pretrained(tmp_path / "base")
        put_adapter(ilql, LoraConfig()).save_pretrained(tmp_path / "ilql")
        with pytest.raises(ValueError, match="is one of a model of type 'hf_qrl_ilql_causal_lm'"):
            AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path / "ilql")
        with pytest.raises(ValueError, match="is one of a model of type 'hf_qrl_value_head_causal_lm'"):
            AutoModelForCausalLMWithILQLHeads.from_pretrained(tmp_path / "value")


def save_trlx(base, head: nn.Module, directory, prefix: str = "base_model.") -> None:
    """A language model and a value head in one pickle, as transformers saved the state of the whole."""
    directory.mkdir()
    base.config.save_pretrained(directory)
    state = {f"{prefix}{key}": x for key, x in base.state_dict().items()}
    state |= {f"v_head.{key}": x for key, x in head.state_dict().items()}
    torch.save(state, directory / "pytorch_model.bin")


def make_head(width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, 1))


class TestOtherLibraries:
    @torch.no_grad()
    @pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "flan_t5"])  # T5 scales the states its LM head reads
    def test_trlx_checkpoint(self, make_any_base, make_inputs, name, tmp_path):
        base = make_any_base(name)
        head = make_head(24)
        save_trlx(base, head, tmp_path / "old")
        ours, _, cls = auto_classes(base)
        model = ours.from_pretrained(tmp_path / "old", reward_std=2.0)
        model.save_pretrained(tmp_path / "new")
        inputs = make_inputs(model)
        expected = base(**inputs, output_hidden_states=True)
        seq2seq = base.config.is_encoder_decoder
        states = (expected.decoder_hidden_states if seq2seq else expected.hidden_states)[-1]
        for loaded in (model, ours.from_pretrained(tmp_path / "new")):
            assert type(loaded) is cls and not loaded.training and loaded.config.reward_std == 2.0
            logits, value = outputs(loaded, inputs)
            assert torch.equal(logits, expected.logits)
            torch.testing.assert_close(value, head(states).squeeze(-1), rtol=1e-4, atol=1e-4)

    def test_trlx_checkpoint_in_safetensors_and_shards(self, make_base, make_ids, tmp_path):
        save_trlx(make_base("llama"), make_head(24), tmp_path / "old")
        expected = AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path / "old")
        state = torch.load(tmp_path / "old" / "pytorch_model.bin", weights_only=True)
        (tmp_path / "old" / "pytorch_model.bin").unlink()
        weight_map = {}
        for i in range(2):
            keys, file = list(state)[i::2], f"model-{i + 1:05d}-of-00002.safetensors"
            save_file({key: state[key] for key in keys}, tmp_path / "old" / file)
            weight_map |= dict.fromkeys(keys, file)
        index = tmp_path / "old" / "model.safetensors.index.json"
        index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        loaded = AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path / "old")
        assert_same(outputs(loaded, {"input_ids": make_ids()}), outputs(expected, {"input_ids": make_ids()}))

    def test_other_width_is_refused(self, make_base, tmp_path):
        save_trlx(make_base("llama"), make_head(24), tmp_path / "old")
        with pytest.raises(ValueError, match=r"leave out \{'head_expansion': 3\}"):
            AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path / "old", head_expansion=3)

    @pytest.mark.parametrize("prefix", ["", "pretrained_model."])
    def test_checkpoint_of_trl_is_refused(self, make_base, prefix, tmp_path):
        head = nn.ModuleDict({"summary": nn.Linear(24, 1)})
        save_trlx(make_base("llama"), head, tmp_path / "old", prefix)
        with pytest.raises(ValueError, match=r"saved by TRL.*single linear layer \(`v_head.summary`\)"):
            AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path / "old")

    def test_branch_of_several_layers_is_refused(self, make_base, tmp_path):
        head = nn.ModuleDict({"decoder_blocks": nn.ModuleList([nn.Linear(24, 24)]), "0": nn.Linear(24, 48)})
        save_trlx(make_base("llama"), head, tmp_path / "old")
        with pytest.raises(ValueError, match=r"Unknown weight 'v_head.decoder_blocks"):
            AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path / "old")
