# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""Models with a value head: construction, forward, generation, embeddings. Saving and freezing have other files."""

from dataclasses import fields

import pytest
import torch
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from hf_qrl import (
    AutoModelForCausalLMWithValueHead,
    AutoModelForSeq2SeqLMWithValueHead,
    CausalLMOutputWithValue,
    ILQLForCausalLM,
    Seq2SeqLMOutputWithValue,
    ValueHeadCausalLMConfig,
    ValueHeadForCausalLM,
    ValueHeadForSeq2SeqLM,
)
from hf_qrl.models.value_head import ValueHead


VOCAB_SIZE = 61


def lm_head_input(model, inputs) -> torch.Tensor:
    seen = []
    head = model.base.get_output_embeddings()
    handle = head.register_forward_hook(lambda module, args, output: seen.append(args[0]))
    model.base(**inputs)
    handle.remove()
    (states,) = seen
    return states


def slow_values(model, states: torch.Tensor) -> torch.Tensor:
    """The value head, one state at a time."""
    v = model.heads.v
    rows = []
    for row in states:
        hidden = [torch.relu(v.stem[0].weight @ state + v.stem[0].bias) for state in row]
        rows.append(torch.stack([v.projection.weight[0] @ x + v.projection.bias[0] for x in hidden]))
    return torch.stack(rows)


class TestConstruction:
    def test_base_is_used_as_it_is(self, make_any_base, any_architecture):
        base = make_any_base(any_architecture)
        seq2seq = base.config.is_encoder_decoder
        auto = AutoModelForSeq2SeqLMWithValueHead if seq2seq else AutoModelForCausalLMWithValueHead
        model = auto.from_pretrained(base, reward_std=2.0)
        assert type(model) is (ValueHeadForSeq2SeqLM if seq2seq else ValueHeadForCausalLM)
        assert model.base is model.language_model is base and model.config.text_config is base.config
        assert model.config.reward_std == 2.0 and not model.training
        assert model.generation_config is base.generation_config
        width = base.get_output_embeddings().in_features
        assert model.heads.v.stem[0].weight.shape == (2 * width, width)
        assert set(map(id, model.language_model_parameters())) == set(map(id, base.parameters()))
        for name, parameter in model.heads.named_parameters():
            bound = (width if "stem" in name else 2 * width) ** -0.5
            assert parameter.any() and parameter.abs().max() <= bound, name

    def test_fresh_heads_follow_the_seed(self, make_base, make_ids, tmp_path):
        make_base("gpt2").save_pretrained(tmp_path)

        def values(seed: int) -> torch.Tensor:
            torch.manual_seed(seed)
            model = AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path)
            return model(make_ids(), output_values=True).value

        assert torch.equal(values(3), values(3))
        assert not torch.equal(values(3), values(4))

    def test_zero_initialisation(self, make_base, make_ids):
        model = ValueHeadForCausalLM.from_base(make_base("llama"), head_init="zero")
        assert not model(make_ids(), output_values=True).value.any()
        assert model.heads.v.stem[0].weight.any()

    def test_head_arguments(self, make_base):
        arguments = {"head_expansion": 3, "history_window": 2, "reward_mean": 1, "reward_std": 2, "head_init": "zero"}
        model = AutoModelForCausalLMWithValueHead.from_config(make_base("llama").config, **arguments)
        assert {name: getattr(model.config, name) for name in arguments} == arguments
        assert model.heads.v.stem[0].out_features == 72
        again = AutoModelForCausalLMWithValueHead.from_config(model.config)
        assert again.state_dict().keys() == model.state_dict().keys()

    def test_auto_classes(self, make_base):
        config = ValueHeadCausalLMConfig(text_config=make_base("llama").config, history_window=4)
        assert config.model_type == "hf_qrl_value_head_causal_lm"
        for auto_class in (AutoModel, AutoModelForCausalLM):
            model = auto_class.from_config(config)
            assert type(model) is ValueHeadForCausalLM and model.config.history_window == 4
        assert model.loss_type == "ForCausalLM" and model._supports_logits_to_keep() and model.can_generate()
        assert model.acts_by_language_model and model.language_model_policy == {}

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"head_expansion": 0}, "`head_expansion` must be at least 1, got 0"),
            ({"history_window": 0}, "`history_window` .* got 0"),
            ({"reward_std": 0.0}, "`reward_std` must be positive, got 0.0"),
        ],
    )
    def test_bad_values_are_refused(self, make_base, arguments, message):
        with pytest.raises(ValueError, match=message):
            ValueHeadCausalLMConfig(text_config=make_base("llama").config, **arguments)

    def test_text_config_is_required(self):
        with pytest.raises(ValueError, match=r"needs `text_config`.*AutoModelFor\.\.\.WithValueHead"):
            ValueHeadCausalLMConfig()

    def test_bad_bases_are_refused(self, make_base, make_model, make_value_model, make_seq2seq_base):
        with pytest.raises(ValueError, match=r"already has ILQL heads. Pass its language model \(`model.base`\)"):
            AutoModelForCausalLMWithValueHead.from_pretrained(make_model())
        with pytest.raises(ValueError, match="already has a value head"):
            ValueHeadForCausalLM.from_base(make_value_model())
        with pytest.raises(ValueError, match="already has a value head"):
            ILQLForCausalLM.from_base(make_value_model())
        with pytest.raises(ValueError, match="go on a `PreTrainedModel`, got Linear"):
            ValueHeadForCausalLM.from_base(nn.Linear(2, 2))
        with pytest.raises(ValueError, match="is an encoder-decoder.*Use `AutoModelForSeq2SeqLMWithValueHead`"):
            ValueHeadForCausalLM.from_base(make_seq2seq_base("t5"))
        with pytest.raises(ValueError, match="is causal.*Use `AutoModelForCausalLMWithValueHead`"):
            ValueHeadForSeq2SeqLM.from_base(make_base("llama"))
        with pytest.raises(ValueError, match="no output embeddings"):
            ValueHeadForCausalLM.from_base(make_base("llama").model)

    def test_language_model_of_an_ilql_model(self, make_model, make_ids):
        ilql = make_model("llama")
        model = AutoModelForCausalLMWithValueHead.from_pretrained(ilql.base)
        assert torch.equal(model(make_ids()).logits, ilql(make_ids(), beta=0.0).logits)


class TestDtype:
    def test_fp32_head_on_bf16_trunk(self, make_any_base, make_inputs, any_architecture, tmp_path):
        base = make_any_base(any_architecture)
        base.save_pretrained(tmp_path)
        seq2seq = base.config.is_encoder_decoder
        auto = AutoModelForSeq2SeqLMWithValueHead if seq2seq else AutoModelForCausalLMWithValueHead
        models = [
            auto.from_pretrained(tmp_path, dtype=torch.bfloat16),
            auto.from_pretrained(base.to(torch.bfloat16)),
            auto.from_config(base.config, dtype=torch.bfloat16),
        ]
        for model in models:
            assert model.dtype == torch.bfloat16
            assert {x.dtype for x in model.heads.parameters()} == {torch.float32}
            output = model(**make_inputs(model), output_values=True)
            assert output.logits.dtype == torch.bfloat16 and output.value.dtype == torch.float32
            with torch.autocast("cpu", dtype=torch.bfloat16):
                assert model(**make_inputs(model), output_values=True).value.dtype == torch.float32


class TestForward:
    def test_logits_are_the_language_models(self, make_value_model, make_inputs, any_architecture):
        model = make_value_model(any_architecture)
        inputs = make_inputs(model)
        expected = model.base(**inputs).logits
        output = model(**inputs)
        assert torch.equal(output.logits, expected) and output.value is None
        assert torch.equal(model(**inputs, output_values=True).logits, expected)

    def test_values_equal_the_slow_reference(self, make_value_model, make_inputs, any_architecture):
        model = make_value_model(any_architecture)
        inputs = make_inputs(model)
        states = lm_head_input(model, inputs)
        value = model(**inputs, output_values=True).value
        assert value.shape == states.shape[:2] and value.std() > 1e-2
        torch.testing.assert_close(value, slow_values(model, states), rtol=1e-4, atol=1e-5)

    def test_chosen_states(self, make_value_model, make_inputs, any_architecture):
        model = make_value_model(any_architecture)
        inputs, ixs = make_inputs(model), torch.tensor([[0, 2, 5], [1, 1, 3]])
        full, some = model(**inputs, output_values=True), model(**inputs, output_values=True, states_ixs=ixs)
        torch.testing.assert_close(some.value, full.value[torch.arange(2)[:, None], ixs], rtol=1e-5, atol=1e-6)
        assert torch.equal(some.logits, full.logits)

    @pytest.mark.parametrize("keep", [1, 3, torch.tensor([2, 5, 8])], ids=["1", "3", "tensor"])
    def test_logits_to_keep(self, make_value_model, make_ids, architecture, keep):
        model = make_value_model(architecture)
        rows = keep if torch.is_tensor(keep) else slice(-keep, None)
        full = model(make_ids(), output_values=True)
        kept = model(make_ids(), output_values=True, logits_to_keep=keep)
        torch.testing.assert_close(kept.logits, full.logits[:, rows], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(kept.value, full.value[:, rows], rtol=1e-5, atol=1e-5)
        with pytest.raises(ValueError, match="`states_ixs` are positions of the whole row"):
            model(make_ids(), output_values=True, logits_to_keep=keep, states_ixs=torch.tensor([[0], [0]]))

    def test_labels_are_refused(self, make_value_model, make_inputs):
        for name in ("llama", "t5"):
            model = make_value_model(name)
            with pytest.raises(ValueError, match="takes no `labels`: train it with `PPOTrainer`"):
                model(**make_inputs(model), labels=torch.ones(2, 9, dtype=torch.long))

    def test_output_fields(self, make_value_model, make_inputs):
        names = ["logits", "value", "cache", "hidden_states", "loss"]
        assert [x.name for x in fields(CausalLMOutputWithValue)] == names
        assert [x.name for x in fields(Seq2SeqLMOutputWithValue)] == [*names[:4], "encoder_outputs", "loss"]
        for name in ("gpt2", "t5"):
            model = make_value_model(name)
            arguments = {**make_inputs(model), "output_values": True, "output_hidden_states": True, "use_cache": True}
            output = model(**arguments)
            assert output.past_key_values is output.cache is not None and len(output.hidden_states) == 3
            row = model(**arguments, return_dict=False)
            assert type(row) is tuple and len(row) == len(output.keys())
            assert torch.equal(row[0], output.logits) and torch.equal(row[1], output.value)

    def test_cached_continuation_equals_full(self, make_value_model, make_ids, architecture):
        model, ids = make_value_model(architecture), make_ids()
        full = model(ids, use_cache=False, output_values=True)
        first = model(ids[:, :6], use_cache=True, output_values=True)
        second = model(ids[:, 6:], cache=first.cache, use_cache=True, output_values=True)
        for name in ("logits", "value"):
            together = torch.cat([first[name], second[name]], dim=1)
            torch.testing.assert_close(together, full[name], rtol=1e-4, atol=1e-4)

    def test_encoder_outputs_and_cache_continue(self, make_value_model, make_inputs, seq2seq_architecture):
        model = make_value_model(seq2seq_architecture)
        inputs = make_inputs(model)
        full, decoder = model(**inputs, output_values=True), inputs["decoder_input_ids"]
        first = model(**{**inputs, "decoder_input_ids": decoder[:, :4]}, use_cache=True, output_values=True)
        second = model(
            attention_mask=inputs["attention_mask"],
            decoder_input_ids=decoder[:, 4:],
            encoder_outputs=first.encoder_outputs,
            cache=first.cache,
            output_values=True,
        )
        for name in ("logits", "value"):
            together = torch.cat([first[name], second[name]], dim=1)
            torch.testing.assert_close(together, full[name], rtol=1e-4, atol=1e-4)


class TestLoss:
    def test_loss_function_gets_what_it_needs(self, make_value_model, make_inputs, make_ids, any_architecture):
        model = make_value_model(any_architecture)
        inputs, next_ids = make_inputs(model), make_ids(2, 5, seed=4)
        next_mask = torch.tensor([[1, 1, 1, 0, 0], [0] * 5])
        seen = {}

        def loss_fn(hidden_states, heads, lm_head, next_hidden_state):
            seen.update(states=hidden_states, next=next_hidden_state)
            logits = lm_head(hidden_states, lambda z, weight, bias, offset, softcap: nn.functional.linear(z, weight))
            return heads.v(hidden_states).square().sum() + logits.sum()

        output = model(**inputs, next_input_ids=next_ids, next_attention_mask=next_mask, loss_fn=loss_fn)
        assert list(output.keys()) == ["loss"]
        torch.testing.assert_close(seen["states"], lm_head_input(model, inputs), rtol=1e-5, atol=1e-5)
        if model.config.is_encoder_decoder:
            start = torch.tensor([[model.config.decoder_start_token_id]])
            expected = lm_head_input(model, {"input_ids": next_ids[:1, :3], "decoder_input_ids": start})[0, 0]
        else:
            expected = lm_head_input(model, {"input_ids": next_ids[:1, :3]})[0, -1]
        torch.testing.assert_close(seen["next"][0], expected, rtol=1e-4, atol=1e-4)
        assert seen["next"].isfinite().all() and not seen["next"].requires_grad
        output.loss.backward()
        assert not [name for name, x in model.named_parameters() if x.grad is None]
        model(**inputs, loss_fn=loss_fn)
        assert seen["next"] is None

    @pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "bart"])
    def test_gradients_of_values_reach_head_and_trunk(self, make_value_model, make_inputs, name):
        model = make_value_model(name)
        model(**make_inputs(model), output_values=True).value.sum().backward()
        assert all(x.grad is not None and x.grad.any() for x in model.heads.parameters())
        assert model.get_input_embeddings().weight.grad.any()

    @pytest.mark.parametrize("name", ["llama", "t5"])
    def test_activation_checkpointing_equals_without(self, make_value_model, make_inputs, name):
        model = make_value_model(name).double().train()
        inputs = make_inputs(model)

        def gradients() -> dict[str, torch.Tensor]:
            model.zero_grad()
            model(**inputs, loss_fn=lambda states, heads, *_: heads.v(states).square().sum()).loss.backward()
            return {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}

        plain = gradients()
        model.activation_checkpointing_enable()
        for name, gradient in gradients().items():
            torch.testing.assert_close(gradient, plain[name], rtol=1e-5, atol=1e-6)

    def test_heads_that_are_trained(self, make_value_model):
        heads = make_value_model().heads
        (v,) = heads.online()
        assert v is heads.v and type(v) is ValueHead
        assert set(heads.state_dict()) == {f"v.{x}.{y}" for x in ("stem.0", "projection") for y in ("weight", "bias")}


class TestGeneration:
    @pytest.mark.parametrize(
        "arguments",
        [
            {"do_sample": False},
            {"do_sample": True, "top_k": 20, "temperature": 0.7},
            {"do_sample": False, "num_beams": 3},
            {"do_sample": False, "use_cache": False},
        ],
        ids=["greedy", "sampling", "beams", "no cache"],
    )
    def test_generate_equals_the_language_models(self, make_value_model, make_inputs, any_architecture, arguments):
        model = make_value_model(any_architecture)
        inputs = {key: x for key, x in make_inputs(model).items() if key != "decoder_input_ids"}
        # Causal models are prompted with padding on the left.
        inputs["attention_mask"] = inputs["attention_mask"].flip(1)
        tokens = []
        for x in (model, model.base):
            torch.manual_seed(0)
            tokens.append(x.generate(**inputs, max_new_tokens=6, **arguments))
        assert torch.equal(*tokens)

    @pytest.mark.parametrize("architecture", ["gpt2", "llama", "opt"])
    def test_padding_on_the_left_does_not_matter(self, make_value_model, make_ids, architecture):
        model, row = make_value_model(architecture), make_ids(1, 6)
        padded = torch.cat([torch.zeros(1, 3, dtype=torch.long), row], 1)
        mask = (torch.arange(9) >= 3).long()[None]
        arguments = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
        got = model.generate(padded, attention_mask=mask, **arguments)
        assert torch.equal(got[:, 9:], model.generate(row, **arguments)[:, 6:])
        position_ids = (mask.cumsum(-1) - 1).clamp(min=0)
        value = model(padded, attention_mask=mask, position_ids=position_ids, output_values=True).value
        torch.testing.assert_close(value[:, 3:], model(row, output_values=True).value, rtol=1e-4, atol=1e-4)


class TestResize:
    @pytest.mark.parametrize("name", ["llama", "llama_tied", "gpt2", "opt", "t5", "flan_t5"])
    @pytest.mark.parametrize("size", [VOCAB_SIZE + 9, VOCAB_SIZE - 7])
    def test_resize_token_embeddings(self, make_value_model, make_inputs, name, size, tmp_path):
        model = make_value_model(name)
        tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
        inputs = {key: x.clamp(max=size - 1) for key, x in make_inputs(model).items()}
        before = model(**inputs, output_values=True)
        assert model.resize_token_embeddings(size) is model.get_input_embeddings()
        assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == tied
        after = model(**inputs, output_values=True)
        assert after.logits.shape[-1] == size
        torch.testing.assert_close(after.value, before.value)
        kept = min(size, VOCAB_SIZE)
        torch.testing.assert_close(after.logits[..., :kept], before.logits[..., :kept], rtol=1e-4, atol=1e-5)
        model.save_pretrained(tmp_path)
        auto = AutoModelForSeq2SeqLM if model.config.is_encoder_decoder else AutoModelForCausalLM
        assert torch.equal(auto.from_pretrained(tmp_path)(**inputs).logits, after.logits)
