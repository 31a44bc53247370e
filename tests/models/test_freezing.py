# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""Which parameters of a language model are left to train when its lower layers are frozen."""

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, BloomConfig

from hf_qrl import ValueHeadForCausalLM
from hf_qrl.models.freezing import find_blocks


# The blocks, and what stays trainable beside the top ones, of each tiny model.
TRAINED = {
    "gpt2": ("transformer.h", ["transformer.ln_f"]),
    "llama": ("model.layers", ["model.norm", "lm_head"]),
    "llama_tied": ("model.layers", ["model.norm"]),
    "qwen3_tied": ("model.layers", ["model.norm"]),
    "gemma3": ("model.layers", ["model.norm"]),
    "opt": ("model.decoder.layers", ["model.decoder.final_layer_norm", "model.decoder.project_out"]),
    "gpt_neox": ("gpt_neox.layers", ["gpt_neox.final_layer_norm", "lm_head"]),
    "cohere": ("model.layers", ["model.norm"]),
    "granite": ("model.layers", ["model.norm", "lm_head"]),
    "t5": ("decoder.block", ["decoder.final_layer_norm"]),
    "flan_t5": ("decoder.block", ["decoder.final_layer_norm", "lm_head"]),
    "mt5": ("decoder.block", ["decoder.final_layer_norm"]),
    "bart": ("model.decoder.layers", []),
}


def trained(model: nn.Module) -> set[str]:
    return {name for name, x in model.named_parameters() if x.requires_grad}


class TestFreezeLowerLayers:
    @pytest.mark.parametrize("unfrozen", [0, 1, 2])
    def test_trained_parameters(self, make_value_model, any_architecture, unfrozen):
        model = make_value_model(any_architecture)
        model.freeze_lower_layers(unfrozen)
        blocks, rest = TRAINED[any_architecture]
        kept = tuple(f"base.{name}." for name in (*(f"{blocks}.{i}" for i in range(2 - unfrozen, 2)), *rest))
        expected = {name for name, _ in model.named_parameters() if name.startswith((*kept, "heads."))}
        assert trained(model) == expected
        assert not model.get_input_embeddings().weight.requires_grad
        for module in kept:
            assert [name for name in expected if name.startswith(module)], module

    def test_frozen_layers_stay_and_the_others_learn(self, make_value_model, make_inputs, any_architecture):
        model = make_value_model(any_architecture)
        model.freeze_lower_layers(1)
        before = {name: x.detach().clone() for name, x in model.named_parameters()}
        optimizer = torch.optim.SGD([x for x in model.parameters() if x.requires_grad], lr=0.1)
        output = model(**make_inputs(model), output_values=True)
        (output.logits.log_softmax(-1)[..., 5].sum() + output.value.square().sum()).backward()
        optimizer.step()
        changed = {name for name, x in model.named_parameters() if not torch.equal(x, before[name])}
        # The bias of keys drops out of the softmax.
        assert {name for name in trained(model) - changed if "k_proj.bias" not in name} == set()
        assert changed <= trained(model)

    def test_nothing_below_the_blocks_is_trained(self, make_value_model):
        """Bloom has a norm between its embeddings and its first block."""
        config = BloomConfig(vocab_size=61, hidden_size=24, n_layer=3, n_head=2)
        model = ValueHeadForCausalLM.from_base(AutoModelForCausalLM.from_config(config))
        model.freeze_lower_layers(1)
        kept = ("transformer.h.2.", "transformer.ln_f.")
        assert trained(model.base) == {name for name, _ in model.base.named_parameters() if name.startswith(kept)}

    def test_blocks_of_decoders_with_other_depths(self, make_seq2seq_base):
        for name, arguments in {
            "t5": {"num_layers": 4, "num_decoder_layers": 3},
            "bart": {"encoder_layers": 4, "decoder_layers": 3},
        }.items():
            base = make_seq2seq_base(name, **arguments)
            blocks = find_blocks(base.get_decoder())
            assert len(blocks) == 3
            assert all(block in base.get_decoder().modules() for block in blocks)

    @pytest.mark.parametrize("name", ["gpt2", "t5"])
    @pytest.mark.parametrize("number", [-1, 3])
    def test_number_out_of_range_raises(self, make_value_model, name, number):
        model = make_value_model(name)
        with pytest.raises(ValueError, match=rf"has 2: it must lie between 0 and 2, got {number}"):
            model.freeze_lower_layers(number)
        assert trained(model) == {name for name, _ in model.named_parameters()}

    def test_no_blocks_raises(self):
        with pytest.raises(ValueError, match="A Linear has no list of blocks"):
            find_blocks(nn.Linear(2, 2))
