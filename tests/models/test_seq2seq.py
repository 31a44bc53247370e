# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""Encoder-decoder models with heads: forward, saving, embeddings. Generation and the loss have files of their own."""

from dataclasses import fields

import pytest
import torch
from transformers import AutoModel, AutoModelForSeq2SeqLM

from hf_qrl import (
    AutoModelForCausalLMWithILQLHeads,
    AutoModelForSeq2SeqLMWithILQLHeads,
    ILQLForCausalLM,
    ILQLForSeq2SeqLM,
    ILQLSeq2SeqLMConfig,
    Seq2SeqILQLOutput,
)
from hf_qrl.models import sharding
from hf_qrl.models.sharding import check_ties


VOCAB_SIZE = 61
LOADERS = [ILQLForSeq2SeqLM, AutoModel, AutoModelForSeq2SeqLM, AutoModelForSeq2SeqLMWithILQLHeads]
SIZES = {"one file": "1GB", "sharded": "10KB"}
# Every architecture and every kind of head, but not every pair.
ROWS = [(name, "mlp") for name in ("t5", "flan_t5", "mt5", "bart")]
ROWS += [(name, kind) for name in ("flan_t5", "bart") for kind in ("linear", "tied", "dueling")]


def values(model, inputs) -> list[torch.Tensor]:
    output = model(**inputs, output_values=True)
    return [model(**inputs).logits, output.logits, output.value, *output.qs, *output.target_qs]


def decoder_states(base, inputs) -> torch.Tensor:
    """What each architecture projects onto the vocabulary, by its own formula."""
    states = base(**inputs, output_hidden_states=True).decoder_hidden_states[-1]
    return states * 24**-0.5 if getattr(base.config, "scale_decoder_outputs", False) else states


def logits_of(base, states) -> torch.Tensor:
    logits = states @ base.lm_head.weight.T
    return logits + base.final_logits_bias if base.config.model_type == "bart" else logits


class TestForward:
    @pytest.mark.parametrize("scaled", ["t5", "flan_t5", "mt5"])
    def test_fixtures_are_the_kinds_they_stand_for(self, make_seq2seq_base, scaled):
        base = make_seq2seq_base(scaled)
        assert bool(getattr(base.config, "scale_decoder_outputs", False)) == (scaled == "t5")
        assert (base.lm_head.weight is base.shared.weight) == (scaled != "flan_t5")

    def test_head_input_is_lm_head_input(self, make_seq2seq_model, make_seq2seq_inputs, seq2seq_architecture):
        model = make_seq2seq_model(seq2seq_architecture)
        inputs = make_seq2seq_inputs(model)
        states = decoder_states(model.base, inputs)
        torch.testing.assert_close(model.hidden_states(**inputs), states, rtol=1e-5, atol=1e-6)
        output = model(**inputs, output_values=True)
        torch.testing.assert_close(output.logits, logits_of(model.base, states), rtol=1e-4, atol=1e-4)
        assert torch.equal(output.logits, model.base(**inputs).logits)
        for name, heads in {"qs": model.heads.q, "target_qs": model.heads.target_q}.items():
            for got, head in zip(getattr(output, name), heads, strict=True):
                stem = torch.relu(states @ head.stem[0].weight.T + head.stem[0].bias)
                torch.testing.assert_close(got, stem @ head.weight.T + head.bias, rtol=1e-4, atol=1e-4)
        v = model.heads.v
        stem = torch.relu(states @ v.stem[0].weight.T + v.stem[0].bias)
        expected = (stem @ v.projection.weight.T + v.projection.bias).squeeze(-1)
        torch.testing.assert_close(output.value, expected, rtol=1e-4, atol=1e-4)

    def test_beta_zero_is_the_language_model(
        self, make_seq2seq_model, make_seq2seq_inputs, seq2seq_architecture, head_type
    ):
        model = make_seq2seq_model(seq2seq_architecture, head_type=head_type, beta=3.0)
        inputs = make_seq2seq_inputs(model)
        assert torch.equal(model(**inputs, beta=0.0).logits, model.base(**inputs).logits)
        assert not torch.allclose(model(**inputs).logits, model.base(**inputs).logits)

    @pytest.mark.parametrize("q_reduction", ["min", "mean"])
    @pytest.mark.parametrize("policy_top_k", [None, 5])
    def test_policy_logits(
        self, make_seq2seq_model, make_seq2seq_inputs, seq2seq_architecture, q_reduction, policy_top_k
    ):
        model = make_seq2seq_model(
            seq2seq_architecture, q_reduction=q_reduction, policy_top_k=policy_top_k, beta=2.0, head_type="tied"
        )
        inputs = make_seq2seq_inputs(model)
        output = model(**inputs, output_values=True)
        first, second = output.target_qs
        q = torch.minimum(first, second) if q_reduction == "min" else (first + second) / 2
        expected = output.logits + 2.0 * (q - output.value[..., None])
        if policy_top_k is not None:
            lowest = output.logits.sort(-1, descending=True).values[..., policy_top_k - 1 : policy_top_k]
            expected = expected.masked_fill(output.logits < lowest, -torch.inf)
        torch.testing.assert_close(model(**inputs).logits, expected, rtol=1e-4, atol=1e-4)

    def test_output_fields(self, make_seq2seq_model, make_seq2seq_inputs):
        names = ["logits", "cache", "hidden_states", "value", "qs", "target_qs", "encoder_outputs", "loss"]
        assert [field.name for field in fields(Seq2SeqILQLOutput)] == names
        model = make_seq2seq_model(num_q_heads=3)
        inputs = make_seq2seq_inputs(model)
        output = model(**inputs, output_values=True)
        assert output.logits.shape == (2, 6, VOCAB_SIZE) and output.value.shape == (2, 6)
        assert len(output.qs) == len(output.target_qs) == 3
        assert all(q.shape == (2, 6, VOCAB_SIZE) for q in (*output.qs, *output.target_qs))
        assert output.hidden_states is None and output.loss is None
        encoded = model.base.encoder(inputs["input_ids"], inputs["attention_mask"]).last_hidden_state
        assert torch.equal(output.encoder_outputs.last_hidden_state, encoded)
        again = model(**inputs, return_dict=False)
        assert torch.equal(again[0], model(**inputs).logits)
        layers = model(**inputs, output_hidden_states=True).hidden_states
        assert len(layers) == 3 and layers[0].shape == (2, 6, 24)

    def test_encoder_outputs_and_cache_continue(self, make_seq2seq_model, make_seq2seq_inputs, seq2seq_architecture):
        model = make_seq2seq_model(seq2seq_architecture, beta=2.0)
        inputs = make_seq2seq_inputs(model)
        full, mask, decoder = model(**inputs).logits, inputs["attention_mask"], inputs["decoder_input_ids"]
        first = model(**{**inputs, "decoder_input_ids": decoder[:, :4]}, use_cache=True)
        second = model(
            attention_mask=mask,
            decoder_input_ids=decoder[:, 4:],
            encoder_outputs=first.encoder_outputs,
            cache=first.cache,
            use_cache=True,
        )
        torch.testing.assert_close(torch.cat([first.logits, second.logits], 1), full, rtol=1e-4, atol=1e-4)

    def test_states_and_actions_are_positions_of_the_decoder(self, make_seq2seq_model, make_seq2seq_inputs, head_type):
        model = make_seq2seq_model(head_type=head_type)
        inputs = make_seq2seq_inputs(model)
        full = model(**inputs, output_values=True)
        states, actions = torch.tensor([[0, 2, 5], [1, 3, 4]]), torch.tensor([[0, 2], [1, 3]])
        some = model(**inputs, output_values=True, states_ixs=states, actions_ixs=actions)
        rows = torch.arange(2)[:, None]
        torch.testing.assert_close(some.value, full.value[rows, states])
        for got, expected in zip((*some.qs, *some.target_qs), (*full.qs, *full.target_qs), strict=True):
            torch.testing.assert_close(got, expected[rows, actions], rtol=1e-5, atol=1e-5)
        assert some.logits.shape == (2, 6, VOCAB_SIZE)

    def test_padding_does_not_matter(self, make_seq2seq_model, make_seq2seq_inputs, seq2seq_architecture):
        model = make_seq2seq_model(seq2seq_architecture, beta=2.0)
        inputs = make_seq2seq_inputs(model)
        alone = {
            "input_ids": inputs["input_ids"][1:, :6],
            "decoder_input_ids": inputs["decoder_input_ids"][1:, :4],
        }
        # The row is padded in the encoder by 3 tokens, in the decoder by 2.
        for got, expected in zip(values(model, inputs), values(model, alone), strict=True):
            torch.testing.assert_close(got[1:, :4], expected, rtol=1e-4, atol=1e-4)
        unmasked = model(inputs["input_ids"], decoder_input_ids=inputs["decoder_input_ids"]).logits
        assert not torch.allclose(unmasked[1:, :4], model(**alone).logits, atol=1e-2)

    def test_labels_are_refused(self, make_seq2seq_model, make_seq2seq_inputs):
        model = make_seq2seq_model()
        inputs = make_seq2seq_inputs(model)
        with pytest.raises(ValueError, match="takes no `labels`"):
            model(**inputs, labels=inputs["decoder_input_ids"])

    def test_next_state_is_the_first_of_the_decoder(
        self, make_seq2seq_model, make_seq2seq_inputs, make_ids, seq2seq_architecture
    ):
        model = make_seq2seq_model(seq2seq_architecture)
        inputs, next_ids = make_seq2seq_inputs(model), make_ids(2, 5, seed=4)
        seen = []

        def loss_fn(hidden_states, heads, lm_head, next_hidden_state):
            seen.append(next_hidden_state)
            return hidden_states.sum()

        mask = torch.tensor([[1, 1, 1, 0, 0], [0] * 5])
        model(**inputs, next_input_ids=next_ids, next_attention_mask=mask, loss_fn=loss_fn)
        start = torch.tensor([[model.config.decoder_start_token_id]])
        expected = decoder_states(model.base, {"input_ids": next_ids[:1, :3], "decoder_input_ids": start})[0, 0]
        torch.testing.assert_close(seen[0][0], expected, rtol=1e-4, atol=1e-4)
        assert seen[0].isfinite().all() and not seen[0].requires_grad
        model(**inputs, loss_fn=loss_fn)
        assert seen[1] is None


class TestSaveLoad:
    @pytest.mark.parametrize("files", SIZES)
    @pytest.mark.parametrize(("name", "head_type"), ROWS)
    def test_save_load_bit_equal(self, make_seq2seq_model, make_seq2seq_inputs, name, head_type, files, tmp_path):
        model = make_seq2seq_model(name, head_type=head_type, beta=2.5)
        inputs = make_seq2seq_inputs(model)
        expected = values(model, inputs)
        assert not torch.allclose(expected[3], expected[5])
        model.save_pretrained(tmp_path, max_shard_size=SIZES[files])
        assert (tmp_path / "model.safetensors.index.json").exists() == (files == "sharded")
        for loader in LOADERS:
            loaded = loader.from_pretrained(tmp_path)
            assert type(loaded) is ILQLForSeq2SeqLM and not loaded.training
            assert loaded.config.decoder_start_token_id == model.config.decoder_start_token_id
            assert loaded.generation_config.to_dict() == model.generation_config.to_dict()
            for got, tensor in zip(values(loaded, inputs), expected, strict=True):
                assert torch.equal(got, tensor)
            tied = loaded.base.lm_head.weight is loaded.get_input_embeddings().weight
            assert tied == (name != "flan_t5")

    def test_fresh_heads_on_a_plain_checkpoint(self, make_seq2seq_base, seq2seq_architecture, tmp_path):
        base = make_seq2seq_base(seq2seq_architecture)
        base.save_pretrained(tmp_path)
        model = AutoModelForSeq2SeqLMWithILQLHeads.from_pretrained(tmp_path, head_type="linear", beta=2.0)
        assert isinstance(model, ILQLForSeq2SeqLM) and not model.training
        assert (model.config.head_type, model.config.beta) == ("linear", 2.0)
        assert model.config.is_encoder_decoder
        assert model.base.state_dict().keys() == base.state_dict().keys()
        for name, tensor in base.state_dict().items():
            assert torch.equal(model.base.state_dict()[name], tensor), name
        assert model.base.lm_head.weight.shape == model.heads.q[0].weight.shape == (VOCAB_SIZE, 24)

    def test_from_config(self, make_seq2seq_base):
        config = make_seq2seq_base("t5").config
        for model in (
            AutoModelForSeq2SeqLMWithILQLHeads.from_config(config, head_type="tied"),
            ILQLForSeq2SeqLM(ILQLSeq2SeqLMConfig(text_config=config, head_type="tied")),
        ):
            assert model.config.decoder_start_token_id == 0 and model.config.head_type == "tied"

    def test_base_alone_is_a_plain_checkpoint(self, make_seq2seq_model, make_seq2seq_inputs, seq2seq_architecture,
                                              tmp_path):  # fmt: skip
        model = make_seq2seq_model(seq2seq_architecture)
        model.base.save_pretrained(tmp_path)
        plain = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
        inputs = make_seq2seq_inputs(model)
        assert torch.equal(plain(**inputs).logits, model(**inputs, beta=0.0).logits)

    def test_the_other_kind_is_refused(self, make_seq2seq_base, make_base, make_model, make_seq2seq_model, tmp_path):
        with pytest.raises(ValueError, match="Use `AutoModelForSeq2SeqLMWithILQLHeads`"):
            ILQLForCausalLM.from_base(make_seq2seq_base("t5"))
        with pytest.raises(ValueError, match="Use `AutoModelForCausalLMWithILQLHeads`"):
            AutoModelForSeq2SeqLMWithILQLHeads.from_pretrained(make_base("llama"))
        make_base("llama").save_pretrained(tmp_path / "causal")
        make_model("llama").save_pretrained(tmp_path / "causal with heads")
        for name in ("causal", "causal with heads"):
            with pytest.raises(ValueError, match="is causal, and .* Use `AutoModelForCausalLMWithILQLHeads`"):
                AutoModelForSeq2SeqLMWithILQLHeads.from_pretrained(tmp_path / name)
        # The decoder of BART alone would load as a causal model.
        make_seq2seq_base("bart").save_pretrained(tmp_path / "seq2seq")
        make_seq2seq_model("t5").save_pretrained(tmp_path / "seq2seq with heads")
        for name in ("seq2seq", "seq2seq with heads"):
            with pytest.raises(ValueError, match="is an encoder-decoder.* Use `AutoModelForSeq2SeqLMWithILQLHeads`"):
                AutoModelForCausalLMWithILQLHeads.from_pretrained(tmp_path / name)
        with pytest.raises(ValueError, match="T5Config is an encoder-decoder"):
            AutoModelForCausalLMWithILQLHeads.from_config(make_seq2seq_base("t5").config)


class TestResize:
    @pytest.mark.parametrize("size", [VOCAB_SIZE + 9, VOCAB_SIZE - 7])
    def test_resize_token_embeddings(self, make_seq2seq_model, make_seq2seq_inputs, seq2seq_architecture, size,
                                     tmp_path):  # fmt: skip
        model = make_seq2seq_model(seq2seq_architecture, beta=2.0)
        inputs = make_seq2seq_inputs(model)
        inputs["input_ids"] = inputs["input_ids"].clamp(max=size - 1)
        inputs["decoder_input_ids"] = inputs["decoder_input_ids"].clamp(max=size - 1)
        kept, before = min(size, VOCAB_SIZE), values(model, inputs)
        assert model.resize_token_embeddings(size) is model.get_input_embeddings()
        assert model.config.text_config.vocab_size == size
        after = values(model, inputs)
        assert torch.equal(after[2], before[2])
        for old, new in zip(before, after, strict=True):
            if new.dim() == 3:
                assert new.shape == (2, 6, size)
                torch.testing.assert_close(new[..., :kept], old[..., :kept], rtol=1e-4, atol=1e-4)
        tied = model.base.lm_head.weight is model.get_input_embeddings().weight
        assert tied == (seq2seq_architecture != "flan_t5")
        model.save_pretrained(tmp_path)
        for got, expected in zip(values(ILQLForSeq2SeqLM.from_pretrained(tmp_path), inputs), after, strict=True):
            assert torch.equal(got, expected)


class TestCheckTies:
    """Under ZeRO-3 transformers compares weights that are empty; what it tied wrongly must not be trained."""

    @pytest.mark.parametrize("heads", [False, True])
    @pytest.mark.parametrize("shard", SIZES.values())
    @pytest.mark.parametrize("name", ["t5", "flan_t5", "bart"])
    def test_lost_lm_head_raises(
        self, make_seq2seq_base, make_seq2seq_model, tmp_path, monkeypatch, name, shard, heads
    ):
        model = make_seq2seq_model(name) if heads else make_seq2seq_base(name)
        model.save_pretrained(tmp_path, max_shard_size=shard)
        tied = type(model)(model.config)  # as the configuration has it
        check_ties(tied, tmp_path)  # without ZeRO-3 there is nothing to check
        monkeypatch.setattr(sharding, "is_deepspeed_zero3_enabled", lambda: True)
        if name == "flan_t5":
            with pytest.raises(ValueError, match="lm_head.weight and .*shared.weight differ.*pass it live"):
                check_ties(tied, tmp_path)
        else:
            check_ties(tied, tmp_path)
