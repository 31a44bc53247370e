# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""The Llama with a dueling Q-head: configuration, loading, forward, generation."""

import copy
import json
import logging
import os

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    PreTrainedTokenizerFast,
    pipeline,
)

from hf_qrl import AutoModelForCausalLMWithILQLHeads, LlamaDuelingQConfig, LlamaDuelingQForCausalLM
from hf_qrl.models import CausalQOutput


VOCAB_SIZE = 61
PAD, NEW = 0, 6
PROMPTS = [[5, 9, 30, 5, 9], [44, 17], [23, 58, 12, 8]]
LOADERS = [LlamaDuelingQForCausalLM, AutoModel, AutoModelForCausalLM]
SIZES = {"one file": "1GB", "sharded": "10KB"}


@pytest.fixture
def make_dueling(make_base, scramble_heads):
    """Returns a function to models whose target head differs from the online head, and which never stop."""

    def make(name: str = "llama", **fields) -> LlamaDuelingQForCausalLM:
        base = make_base(name)
        base.generation_config.eos_token_id = base.config.eos_token_id = None
        return scramble_heads(LlamaDuelingQForCausalLM.from_base(base, **fields))

    return make


def plain(model: LlamaDuelingQForCausalLM) -> LlamaForCausalLM:
    """A plain Llama with copies of the weights."""
    fields = {key: value for key, value in model.config.to_dict().items() if key in LlamaConfig().to_dict()}
    with torch.random.fork_rng():
        base = LlamaForCausalLM(LlamaConfig(**{**fields, "model_type": "llama"})).eval()
    base.load_state_dict({key: x for key, x in model.state_dict().items() if not key.startswith("heads.")})
    return base


def online_q(model: LlamaDuelingQForCausalLM, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Q `(..., V)` and V `(...)` of the online head, from its weights."""
    w = {name.removeprefix("heads.q.0."): x for name, x in model.state_dict().items() if name.startswith("heads.q.0.")}
    z = states @ w["stem.0.weight"].T + w["stem.0.bias"]
    z = z * torch.sigmoid(z)
    advantages = z @ w["weight"].T + w["bias"]
    value = z @ w["offset.weight"][0] + w["offset.bias"]
    return value.unsqueeze(-1) + advantages - advantages.mean(-1, keepdim=True), value


def lm_states(base: LlamaForCausalLM, ids: torch.Tensor, **kwargs) -> torch.Tensor:
    return base.model(ids, **kwargs).last_hidden_state


@torch.no_grad()
def expected_policy(model, ids: torch.Tensor) -> torch.Tensor:
    """Logits of the policy of the configuration, from a plain Llama and the weights of the head."""
    base, config = plain(model), model.config
    logits = base(ids).logits
    q, value = online_q(model, lm_states(base, ids))
    scores = q if config.policy == "q" else logits + config.beta * (q - value.unsqueeze(-1))
    if config.policy_top_k is not None:
        worst = logits.argsort(-1, descending=True)[..., config.policy_top_k :]
        scores = scores.scatter(-1, worst, -torch.inf)
    return scores


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def rewrite(directory, change) -> None:
    """Applies `change` to the dictionary of tensors of a checkpoint of one file."""
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def values(model: LlamaDuelingQForCausalLM, ids: torch.Tensor) -> list[torch.Tensor]:
    output = model(ids, return_q_values=True)
    target = model.heads.target_q[0](model.hidden_states(input_ids=ids))
    return [model(ids).logits, output.logits, output.q_values, target]


def assert_same(a: list[torch.Tensor], b: list[torch.Tensor]) -> None:
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


class TestConfig:
    def test_round_trip(self, tmp_path):
        fields = {"policy": "lm", "beta": 4, "policy_top_k": 7, "history_window": 2, "reward_mean": 1, "reward_std": 2}
        config = LlamaDuelingQConfig(hidden_size=32, num_attention_heads=2, head_expansion=3, **fields)
        config.save_pretrained(tmp_path)
        assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "hf_qrl_llama_dueling_q"
        for loaded in (LlamaDuelingQConfig.from_pretrained(tmp_path), AutoConfig.from_pretrained(tmp_path)):
            assert type(loaded) is LlamaDuelingQConfig
            assert loaded.to_json_string() == config.to_json_string()
            assert isinstance(loaded.beta, float) and loaded.beta == 4.0

    def test_fields_of_the_head_are_read_as_of_other_heads(self):
        config = LlamaDuelingQConfig()
        assert (config.head_type, config.head_stem, config.num_q_heads) == ("dueling", "silu", 1)
        assert (config.head_expansion, config.head_init, config.q_reduction) == (2, "default", "min")
        assert (config.policy, config.beta, config.policy_top_k, config.history_window) == ("q", 1.0, None, None)
        assert config.get_text_config() is config

    def test_plain_llama_configuration_is_taken(self, make_base, tmp_path):
        config = make_base("llama_tied").config
        config.save_pretrained(tmp_path)
        for taken in (
            LlamaDuelingQConfig.from_pretrained(tmp_path, beta=2.0),
            LlamaDuelingQConfig.from_llama(config, beta=2.0),
        ):
            assert (taken.model_type, taken.beta, taken.tie_word_embeddings) == ("hf_qrl_llama_dueling_q", 2.0, True)
            for name in ("hidden_size", "num_key_value_heads", "vocab_size", "head_dim", "eos_token_id"):
                assert getattr(taken, name) == getattr(config, name)

    def test_other_architecture_raises(self, tmp_path):
        config = MistralConfig(hidden_size=32, num_attention_heads=2, num_key_value_heads=1)
        config.save_pretrained(tmp_path)
        with pytest.raises(
            ValueError, match="of type 'mistral', and .*AutoModelForCausalLMWithILQLHeads.*\"dueling\""
        ):
            LlamaDuelingQForCausalLM.from_pretrained(tmp_path)
        with pytest.raises(ValueError, match="of type 'mistral'"):
            LlamaDuelingQConfig.from_llama(config)

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"head_expansion": 0}, "`head_expansion` must be at least 1, got 0"),
            ({"policy_top_k": 0}, "`policy_top_k` must be at least 1"),
            ({"history_window": 0}, "`history_window` counts turns"),
            ({"reward_std": 0.0}, "`reward_std` must be positive"),
        ],
        ids=str,
    )
    def test_bad_fields_raise(self, fields, message):
        with pytest.raises(ValueError, match=message):
            LlamaDuelingQConfig(**fields)

    @pytest.mark.parametrize("fields", [{"policy": "value"}, {"head_init": "ones"}, {"beta": "much"}], ids=str)
    def test_bad_types_raise(self, fields):
        with pytest.raises(Exception, match=f"field '{next(iter(fields))}'"):
            LlamaDuelingQConfig(**fields)


class TestConstruction:
    def test_targets_are_copies_of_the_fresh_head(self, make_base, make_ids, tmp_path):
        base = make_base("llama")
        base.save_pretrained(tmp_path)
        for model in (
            LlamaDuelingQForCausalLM(LlamaDuelingQConfig.from_llama(base.config)),
            LlamaDuelingQForCausalLM.from_config(base.config),
            LlamaDuelingQForCausalLM.from_base(base),
            LlamaDuelingQForCausalLM.from_pretrained(tmp_path),
        ):
            q, target = values(model.eval(), make_ids())[2:]
            torch.testing.assert_close(q, target, rtol=0, atol=1e-5)
            assert 0.05 < model.heads.q[0].weight.std() * 48**0.5 < 1
            assert not list(model.heads.target_q.parameters())
            assert all(x.dtype == torch.float32 for x in model.heads.target_q.buffers())

    def test_fresh_weights_are_those_of_a_llama(self, make_base):
        config = make_base("llama").config
        torch.manual_seed(3)
        expected = LlamaForCausalLM(config).state_dict()
        torch.manual_seed(3)
        got = LlamaDuelingQForCausalLM.from_config(config).state_dict()
        assert all(torch.equal(got[name], x) for name, x in expected.items())

    @pytest.mark.parametrize("tied", [False, True])
    def test_lm_head_bias(self, tied, make_base, make_ids, tmp_path):
        config = make_base("llama").config
        config.tie_word_embeddings = tied
        model = LlamaDuelingQForCausalLM.from_config(config, lm_head_bias=True, policy="lm", beta=0.0).eval()
        assert not model.lm_head.bias.any()
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
        assert 0.2 < model.lm_head.weight.std() < 0.4
        nn.init.normal_(model.lm_head.bias)
        expected = model.hidden_states(input_ids=make_ids()) @ model.lm_head.weight.T + model.lm_head.bias
        close(model(make_ids()).logits, expected)
        model.save_pretrained(tmp_path)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
        assert torch.equal(loaded(make_ids()).logits, model(make_ids()).logits)
        assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied

    def test_head_init_zero_is_constant(self, make_base, make_ids):
        model = LlamaDuelingQForCausalLM.from_base(make_base("llama"), head_init="zero")
        assert model.heads.is_constant()
        model.heads.set_constant(-1.5)
        assert (model(make_ids(), return_q_values=True).q_values == -1.5).all()

    @pytest.mark.parametrize("name", ["llama", "llama_tied"])
    def test_from_base_shares_the_weights(self, make_base, make_ids, name):
        base = make_base(name)
        before = base(make_ids()).logits
        model = LlamaDuelingQForCausalLM.from_base(base, policy="lm", beta=0)
        assert torch.equal(model(make_ids()).logits, before)
        assert model.model is base.model and model.lm_head is base.lm_head
        assert not any(x.is_meta for x in (*model.parameters(), *model.buffers()))
        assert model.made_from_base and model.generation_config is base.generation_config and not model.training
        assert LlamaDuelingQForCausalLM.from_base(make_base(name).train()).heads.training
        model.set_attn_implementation("eager")
        assert model.model.layers[0].self_attn.config._attn_implementation == "eager"

    def test_bad_bases_refused(self, make_base, make_model, make_dueling):
        with pytest.raises(ValueError, match="takes a `LlamaForCausalLM`, got GPT2LMHeadModel"):
            LlamaDuelingQForCausalLM.from_base(make_base("gpt2"))
        with pytest.raises(ValueError, match="already has Q-learning heads"):
            LlamaDuelingQForCausalLM.from_base(make_dueling())
        with pytest.raises(ValueError, match="already has Q-learning heads"):
            AutoModelForCausalLMWithILQLHeads.from_pretrained(make_dueling())

    def test_from_config_takes_one_source_of_fields(self, make_base):
        config = LlamaDuelingQConfig.from_llama(make_base("llama").config)
        assert type(LlamaDuelingQForCausalLM.from_config(config)) is LlamaDuelingQForCausalLM
        with pytest.raises(ValueError, match=r"\['beta'\] are set in the configuration"):
            LlamaDuelingQForCausalLM.from_config(config, beta=2.0)
        for auto_class in (AutoModel, AutoModelForCausalLM):
            assert type(auto_class.from_config(config)) is LlamaDuelingQForCausalLM

    def test_fp32_head_on_bf16_trunk(self, make_base, make_ids, tmp_path):
        make_base("llama").save_pretrained(tmp_path)
        model = LlamaDuelingQForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
        assert {x.dtype for x in (*model.heads.parameters(), *model.heads.buffers())} == {torch.float32}
        assert model.model.embed_tokens.weight.dtype == torch.bfloat16
        output = model(make_ids(), return_q_values=True)
        assert (output.logits.dtype, output.q_values.dtype) == (torch.bfloat16, torch.float32)
        model.generate(make_ids(), max_new_tokens=2)
        live = LlamaDuelingQForCausalLM.from_base(make_base("llama").bfloat16())
        assert live.heads.q[0].weight.dtype == torch.float32 and live.dtype == torch.bfloat16

    def test_deep_copy_is_independent(self, make_dueling, make_ids):
        model = make_dueling()
        expected, clone = model(make_ids()).logits, copy.deepcopy(model)
        with torch.no_grad():
            clone.heads.q[0].bias.add_(torch.arange(VOCAB_SIZE).float())
        assert torch.equal(model(make_ids()).logits, expected)
        assert not torch.equal(clone(make_ids()).logits, expected)


class TestForward:
    @pytest.mark.parametrize("name", ["llama", "llama_tied"])
    @pytest.mark.parametrize("policy_top_k", [None, 1, 6, VOCAB_SIZE + 5])
    @pytest.mark.parametrize("policy", [{"policy": "q"}, {"policy": "lm", "beta": 2.5}, {"policy": "lm", "beta": 0}])
    def test_logits_are_the_policy(self, make_dueling, make_ids, name, policy_top_k, policy):
        model = make_dueling(name, policy_top_k=policy_top_k, **policy)
        close(model(make_ids()).logits, expected_policy(model, make_ids()))

    def test_arguments_override_the_configuration(self, make_dueling, make_ids):
        model, ids = make_dueling(), make_ids()
        by_argument = model(ids, policy="lm", beta=3.0).logits, model(ids, policy="lm").logits
        model.config.policy, model.config.beta = "lm", 3.0
        assert torch.equal(model(ids).logits, by_argument[0])
        assert torch.equal(model(ids, beta=1.0).logits, by_argument[1])
        model.config.policy = "q"
        assert torch.equal(model(ids).logits, model(ids, return_q_values=True).q_values)

    def test_beta_zero_is_the_language_model(self, make_dueling, make_ids):
        model = make_dueling()
        assert torch.equal(model(make_ids(), policy="lm", beta=0.0).logits, plain(model)(make_ids()).logits)

    def test_policy_needs_no_logits_of_the_language_model(self, make_dueling, make_ids):
        model, calls = make_dueling(), []
        model.lm_head.register_forward_hook(lambda *arguments: calls.append(1))
        model(make_ids())
        assert not calls
        model(make_ids(), policy="lm")
        assert calls

    def test_inert_and_unknown_arguments_raise(self, make_dueling, make_ids):
        with pytest.raises(ValueError, match='`beta=2.0` weighs the advantage in the policy "lm"'):
            make_dueling()(make_ids(), beta=2.0)
        with pytest.raises(ValueError, match='`policy` must be "q" or "lm", got \'Q\''):
            make_dueling()(make_ids(), policy="Q")
        with pytest.raises(ValueError, match="takes no `labels`: train it with `QRLHFTrainer`"):
            make_dueling()(make_ids(), labels=make_ids())

    def test_output_fields_and_tuple_order(self, make_dueling, make_ids):
        model, ids = make_dueling(), make_ids()
        output = model(ids)
        assert type(output) is CausalQOutput and list(output.keys()) == ["logits", "cache"]
        assert output.past_key_values is output.cache
        logits, q_values = model(ids, return_q_values=True, return_dict=False)
        q, _ = online_q(model, lm_states(plain(model), ids))
        assert torch.equal(logits, plain(model)(ids).logits)
        close(q_values, q)
        output = model(ids, return_q_values=True, use_cache=True, output_hidden_states=True)
        assert list(output.keys()) == ["logits", "q_values", "cache", "hidden_states"]
        assert len(output.hidden_states) == 3
        assert torch.equal(output.hidden_states[-1], model.hidden_states(input_ids=ids))
        model.set_attn_implementation("eager")
        assert len(model(ids, output_attentions=True).attentions) == 2

    @pytest.mark.parametrize("keep", [0, 1, 3, torch.tensor([0, 4, 8])], ids=str)
    def test_logits_to_keep_matches_full(self, make_dueling, make_ids, keep):
        model, ids = make_dueling(policy="lm", policy_top_k=9), make_ids()
        kept = keep if isinstance(keep, torch.Tensor) else slice(-keep, None) if keep else slice(None)
        close(model(ids, logits_to_keep=keep).logits, model(ids).logits[:, kept])
        output = model(ids, logits_to_keep=keep, return_q_values=True)
        close(output.q_values, model(ids, return_q_values=True).q_values[:, kept])

    @pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
    @pytest.mark.parametrize("name", ["cache", "past_key_values"])
    def test_cached_continuation_equals_full(self, make_dueling, make_ids, name):
        model, ids = make_dueling(), make_ids()
        full, first = model(ids).logits, model(ids[:, :5], use_cache=True)
        second = model(ids[:, 5:], **{name: first.cache})
        close(torch.cat([first.logits, second.logits], 1), full)

    def test_inputs_embeds_equal_ids(self, make_dueling, make_ids):
        model = make_dueling()
        close(model(inputs_embeds=model.get_input_embeddings()(make_ids())).logits, model(make_ids()).logits)

    def test_same_q_values_as_the_wrapper_with_the_same_weights(self, make_dueling, make_ids):
        model = make_dueling()
        wrapper = AutoModelForCausalLMWithILQLHeads.from_pretrained(plain(model), head_type="dueling", num_q_heads=1)
        heads = {key: x for key, x in wrapper.heads.state_dict().items() if key.startswith("v.")}
        wrapper.heads.load_state_dict({**model.heads.state_dict(), **heads})
        output, expected = model(make_ids(), return_q_values=True), wrapper(make_ids(), output_values=True)
        assert torch.equal(output.logits, expected.logits)
        assert torch.equal(output.q_values, expected.qs[0])
        assert torch.equal(values(model, make_ids())[3], expected.target_qs[0])


class TestLoss:
    def test_loss_function_gets_states_and_heads(self, make_dueling, make_ids):
        model, ids, next_ids = make_dueling(), make_ids(3, 7), make_ids(3, 5, seed=1)
        lengths = [5, 2, 0]
        mask = torch.tensor([[1] * n + [0] * (5 - n) for n in lengths])
        seen = {}

        def loss_fn(hidden_states, heads, lm_head, next_state):
            seen.update(states=hidden_states, next=next_state)
            logits = lm_head(hidden_states, lambda z, weight, bias, offset, softcap: z @ weight.T)
            close(logits, plain(model)(ids).logits)
            return heads.q[0](hidden_states).square().mean()

        output = model(ids, next_input_ids=next_ids, next_attention_mask=mask, loss_fn=loss_fn)
        assert list(output.keys()) == ["loss"]
        output.loss.backward()
        assert all(x.grad is not None for x in model.heads.parameters())
        assert model.model.layers[0].mlp.up_proj.weight.grad.any()
        assert seen["states"].requires_grad and not seen["next"].requires_grad and seen["next"].isfinite().all()
        for row, length in enumerate(lengths[:2]):
            close(seen["next"][row], lm_states(plain(model), next_ids[row : row + 1, :length])[0, -1])
        model(ids, loss_fn=loss_fn)
        assert seen["next"] is None

    def test_activation_checkpointing_equals_without(self, make_dueling, make_ids):
        model, calls = make_dueling().train(), []
        model.model.layers[0].mlp.register_forward_pre_hook(lambda *arguments: calls.append(1))

        def gradients() -> dict[str, torch.Tensor]:
            calls.clear()
            model.zero_grad()
            model(make_ids(), loss_fn=lambda states, heads, *rest: heads.q[0](states).square().mean()).loss.backward()
            return {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}

        without = gradients()
        assert len(calls) == 1
        model.activation_checkpointing_enable()
        checkpointed = gradients()
        assert len(calls) == 2 and len(without) > 10
        for name, gradient in without.items():
            torch.testing.assert_close(checkpointed[name], gradient, rtol=1e-5, atol=1e-6)

    def test_targets_move_alone(self, make_dueling, make_ids):
        model = make_dueling()
        before = values(model, make_ids())
        model.heads.update_targets(1.0)
        after = values(model, make_ids())
        assert_same(before[:3], after[:3])
        close(after[3], after[2])


class TestAdapter:
    def test_adapter_with_heads_round_trip(self, make_dueling, make_ids, tmp_path):
        model = make_dueling()
        model.save_pretrained(tmp_path / "base")
        config = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], modules_to_save=["heads"], r=2)
        adapted = get_peft_model(model, config).eval()
        with torch.no_grad():
            for x in (y for name, y in adapted.named_parameters() if "lora_B" in name or "modules_to_save" in name):
                x.add_(0.1 * torch.randn_like(x))
            adapted.get_base_model().heads.update_targets(0.5)
        trained = {name for name, x in adapted.named_parameters() if x.requires_grad}
        assert any("heads" in name for name in trained) and not any("target_q" in name for name in trained)
        expected = values(adapted.get_base_model(), make_ids())
        assert torch.equal(adapted(make_ids()).logits, expected[0])
        adapted.save_pretrained(tmp_path / "adapter")
        base = LlamaDuelingQForCausalLM.from_pretrained(tmp_path / "base")
        loaded = PeftModel.from_pretrained(base, tmp_path / "adapter")
        assert_same(values(loaded.get_base_model(), make_ids()), expected)
        merged = loaded.merge_and_unload()
        for got, x in zip(values(merged, make_ids()), expected, strict=True):
            close(got, x)


class TestSaveLoad:
    @pytest.mark.parametrize("files", SIZES)
    @pytest.mark.parametrize("name", ["llama", "llama_tied"])
    def test_save_load_bit_equal(self, make_dueling, make_ids, name, files, tmp_path):
        model = make_dueling(name, policy="lm", beta=2.5)
        expected = values(model, make_ids())
        assert not torch.allclose(expected[2], expected[3])
        model.save_pretrained(tmp_path, max_shard_size=SIZES[files])
        assert (tmp_path / "model.safetensors.index.json").exists() == (files == "sharded")
        for loader in LOADERS:
            loaded = loader.from_pretrained(tmp_path)
            assert type(loaded) is LlamaDuelingQForCausalLM and not loaded.made_from_base
            assert_same(values(loaded, make_ids()), expected)
            assert loaded.state_dict().keys() == model.state_dict().keys()
            tied = loaded.get_input_embeddings().weight is loaded.get_output_embeddings().weight
            assert tied == (name == "llama_tied")
        assert LlamaDuelingQForCausalLM.from_pretrained(tmp_path, beta=3, policy="q").config.policy == "q"

    def test_interrupted_save_keeps_previous(self, make_dueling, make_ids, scramble_heads, tmp_path, monkeypatch):
        model = make_dueling()
        model.save_pretrained(tmp_path)
        expected, files = values(model, make_ids()), set(os.listdir(tmp_path))
        scramble_heads(model, seed=1)

        def fail(tensors, file, *args, **kwargs):
            raise KeyboardInterrupt

        monkeypatch.setattr(transformers.modeling_utils, "safe_save_file", fail)
        with pytest.raises(KeyboardInterrupt):
            model.save_pretrained(tmp_path)
        assert set(os.listdir(tmp_path)) == files
        assert_same(values(LlamaDuelingQForCausalLM.from_pretrained(tmp_path), make_ids()), expected)

    @pytest.mark.parametrize("name", ["llama", "llama_tied"])
    def test_plain_llama_loads_with_a_fresh_head(self, make_base, make_ids, name, tmp_path):
        make_base(name).save_pretrained(tmp_path)
        records: list[str] = []
        handler = logging.Handler(logging.WARNING)
        handler.emit = lambda record: records.append(record.getMessage())
        logger = logging.getLogger("transformers")
        logger.addHandler(handler)
        try:
            model = LlamaDuelingQForCausalLM.from_pretrained(tmp_path, policy="lm", beta=0.0, head_expansion=3)
        finally:
            logger.removeHandler(handler)
        # Its configuration is no surprise, its head is.
        assert len(records) == 1 and "heads.q.0.weight" in records[0] and "newly initialized" in records[0]
        assert torch.equal(model(make_ids()).logits, make_base(name)(make_ids()).logits)
        assert model.made_from_base and model.config.head_expansion == 3

    def test_plain_llama_reads_the_trunk_of_one_with_a_head(self, make_dueling, make_ids, tmp_path):
        model = make_dueling()
        model.save_pretrained(tmp_path)
        loaded = LlamaForCausalLM.from_pretrained(tmp_path)
        assert torch.equal(loaded(make_ids()).logits, plain(model)(make_ids()).logits)

    @pytest.mark.parametrize(
        "key", ["heads.target_q.0.bias", "heads.q.0.stem.0.weight", "lm_head.weight", "model.norm.weight"]
    )
    def test_missing_weight_raises(self, make_dueling, key, tmp_path):
        make_dueling().save_pretrained(tmp_path)
        rewrite(tmp_path, lambda tensors: tensors.pop(key))
        for loader in LOADERS:
            with pytest.raises(ValueError, match=rf"1 weights are missing \({key}\)"):
                loader.from_pretrained(tmp_path)

    def test_missing_heads_raise(self, make_dueling, tmp_path):
        # The configuration says that the checkpoint had a head.
        make_dueling().save_pretrained(tmp_path)
        rewrite(tmp_path, lambda tensors: [tensors.pop(key) for key in list(tensors) if key.startswith("heads.")])
        with pytest.raises(ValueError, match=r"12 weights are missing \(heads\.q\.0"):
            LlamaDuelingQForCausalLM.from_pretrained(tmp_path)

    def test_missing_trunk_weight_of_plain_llama_raises(self, make_base, tmp_path):
        make_base("llama").save_pretrained(tmp_path)
        rewrite(tmp_path, lambda tensors: tensors.pop("model.norm.weight"))
        with pytest.raises(ValueError, match=r"1 weights are missing \(model\.norm\.weight\)"):
            LlamaDuelingQForCausalLM.from_pretrained(tmp_path)

    @pytest.mark.parametrize("ignore", [False, True])
    def test_other_heads_raise(self, make_dueling, ignore, tmp_path):
        make_dueling().save_pretrained(tmp_path)
        with pytest.raises(ValueError, match=r"8 weights have another shape \(heads\.q\.0\."):
            LlamaDuelingQForCausalLM.from_pretrained(tmp_path, head_expansion=3, ignore_mismatched_sizes=ignore)
        rewrite(tmp_path, lambda tensors: tensors.update({"heads.q.1.bias": torch.zeros(VOCAB_SIZE)}))
        with pytest.raises(ValueError, match=r"1 weights of heads are left over \(heads\.q\.1\.bias\)"):
            LlamaDuelingQForCausalLM.from_pretrained(tmp_path)

    def test_loading_info_on_request(self, make_dueling, tmp_path):
        make_dueling().save_pretrained(tmp_path)
        model, info = LlamaDuelingQForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
        assert type(model) is LlamaDuelingQForCausalLM and not info["missing_keys"]

    @pytest.mark.parametrize("name", ["llama", "llama_tied"])
    @pytest.mark.parametrize("size", [VOCAB_SIZE + 9, VOCAB_SIZE - 7])
    def test_resize_token_embeddings(self, make_dueling, make_ids, name, size, tmp_path):
        model, kept = make_dueling(name, policy="lm", beta=2.0), min(size, VOCAB_SIZE)
        ids = make_ids().clamp(max=size - 1)
        before = values(model, ids)
        assert model.resize_token_embeddings(size) is model.get_input_embeddings()
        assert model.config.vocab_size == size
        after = values(model, ids)
        for old, new in zip(before[2:], after[2:], strict=True):
            assert new.shape == (2, 9, size)
            close(new[..., :kept], old[..., :kept])
        model.save_pretrained(tmp_path)
        assert_same(values(LlamaDuelingQForCausalLM.from_pretrained(tmp_path), ids), after)


def greedy(model, row: list[int]) -> list[int]:
    out = list(row)
    for _ in range(NEW):
        out.append(expected_policy(model, torch.tensor([out]))[0, -1].argmax().item())
    return out[len(row) :]


def sample(model, seed: int, temperature: float) -> list[list[int]]:
    torch.manual_seed(seed)
    outs = [list(row) for row in PROMPTS]
    for _ in range(NEW):
        scores = torch.stack([expected_policy(model, torch.tensor([out]))[0, -1] for out in outs]) / temperature
        for out, token in zip(outs, torch.multinomial(torch.softmax(scores, -1), 1).tolist(), strict=True):
            out += token
    return [out[len(row) :] for out, row in zip(outs, PROMPTS, strict=True)]


def beam_search(model, row: list[int], width: int) -> list[int]:
    beams = [(0.0, list(row))]
    for _ in range(NEW):
        grown = []
        for total, out in beams:
            log_probs = torch.log_softmax(expected_policy(model, torch.tensor([out]))[0, -1], -1)
            grown += [(total + x, [*out, token]) for token, x in enumerate(log_probs.tolist())]
        beams = sorted(grown, key=lambda beam: -beam[0])[:width]
    return beams[0][1][len(row) :]


def generate(model, rows, **arguments) -> list[list[int]]:
    width = max(map(len, rows))
    ids = torch.tensor([[PAD] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    arguments = {"max_new_tokens": NEW, "do_sample": False, **arguments}
    return model.generate(ids, attention_mask=mask, **arguments)[:, width:].tolist()


POLICIES = [{"policy": "q"}, {"policy": "q", "policy_top_k": 5}, {"policy": "lm", "beta": 3.0}]
MODES = {
    "greedy": {},
    "no cache": {"use_cache": False},
    "static cache": {"cache_implementation": "static"},
    "prompt lookup": {"prompt_lookup_num_tokens": 2},
    "assisted": {},
    "beams": {"num_beams": 3},
    "sampling": {"do_sample": True, "top_k": 0, "temperature": 0.7},
}


class TestGenerate:
    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("policy", POLICIES, ids=str)
    def test_generate_matches_reference(self, make_dueling, policy, mode):
        model, arguments = make_dueling(**policy), dict(MODES[mode])
        # Drafts are made for one row at a time.
        rows = PROMPTS[:1] if mode in ("prompt lookup", "assisted") else PROMPTS
        if mode == "assisted":
            arguments["assistant_model"] = plain(model)
        if mode == "sampling":
            expected = sample(model, 5, 0.7)
            torch.manual_seed(5)
        else:
            search = (lambda row: beam_search(model, row, 3)) if mode == "beams" else (lambda row: greedy(model, row))
            expected = [search(row) for row in rows]
            assert expected != generate(plain(model), rows, num_beams=arguments.get("num_beams", 1))
        assert generate(model, rows, **arguments) == expected

    def test_arguments_of_generate(self, make_dueling):
        model = make_dueling()
        by_call = [generate(model, PROMPTS, policy="lm", beta=beta) for beta in (0.0, 1, 4.0)]
        assert by_call[0] == generate(plain(model), PROMPTS) and len({str(x) for x in by_call}) == 3
        assert generate(model, PROMPTS, policy="lm") == by_call[1]
        model.config.policy = "lm"
        assert generate(model, PROMPTS, beta=4.0) == by_call[2]
        assert generate(model, PROMPTS, policy="q") == [greedy(make_dueling(), row) for row in PROMPTS]
        model.config.beta = 4.0
        assert generate(model, PROMPTS, beta=None, policy=None) == by_call[2]
        assert generate(model, PROMPTS[:1], assistant_model=plain(model)) == by_call[2][:1]

    @pytest.mark.parametrize("argument", [{"policy": "lm"}, {"beta": 4.0}], ids=str)
    def test_arguments_refused(self, make_dueling, argument):
        model, name = make_dueling(policy="lm"), next(iter(argument))
        with pytest.raises(ValueError, match=f"which has no `{name}`; set `model.config.{name}` instead"):
            generate(model, PROMPTS[:1], assistant_model=plain(model), **argument)
        with pytest.raises(ValueError, match=f"without `{name}`; set `model.config.{name}` instead"):
            generate(model, PROMPTS, guidance_scale=2.0, **argument)
        with pytest.raises(ValueError, match=f"would ignore `{name}`; set `model.config.{name}` instead"):
            model.generate_batch(PROMPTS, **argument)

    def test_bad_arguments_raise(self, make_dueling):
        with pytest.raises(ValueError, match="`beta` must be a finite number"):
            generate(make_dueling(), PROMPTS, policy="lm", beta=float("nan"))
        with pytest.raises(ValueError, match='the policy is "q", which has none'):
            generate(make_dueling(), PROMPTS, beta=2.0)
        with pytest.raises(ValueError, match="bta"):
            generate(make_dueling(), PROMPTS, bta=2.0)

    def test_forbidden_support_raises(self, make_dueling):
        model = make_dueling(policy_top_k=2)
        support = plain(model)(torch.tensor(PROMPTS[:1])).logits[0, -1].topk(2).indices.tolist()
        with pytest.raises(ValueError, match="Raise `model.config.policy_top_k`"):
            generate(model, PROMPTS[:1], bad_words_ids=[[token] for token in support])
        assert generate(model, PROMPTS[:1], bad_words_ids=[support[:1]])[0][0] == support[1]

    def test_outputs_of_generate(self, make_dueling):
        model = make_dueling()
        model.set_attn_implementation("eager")
        output = model.generate(
            torch.tensor(PROMPTS[:1]),
            max_new_tokens=2,
            return_dict_in_generate=True,
            output_hidden_states=True,
            output_attentions=True,
            output_logits=True,
        )
        assert len(output.hidden_states) == len(output.attentions) == 2 and len(output.hidden_states[0]) == 3
        close(output.logits[0], expected_policy(model, torch.tensor(PROMPTS[:1]))[:, -1])

    def test_generate_batch_matches_reference(self, make_dueling):
        model = make_dueling()
        model.generation_config.do_sample = False
        model.generation_config.max_new_tokens = NEW
        model.generation_config.eos_token_id = -1
        small = ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=32)
        outputs = model.generate_batch(PROMPTS, continuous_batching_config=small, warmup=False)
        assert [output.generated_tokens for output in outputs.values()] == [greedy(model, row) for row in PROMPTS]

    def test_pipeline_matches_reference(self, make_dueling, tmp_path):
        words = {"<pad>": 0, "<unk>": 1, **{f"w{i}": i for i in range(2, VOCAB_SIZE)}}
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(WordLevel(words, unk_token="<unk>")),
            pad_token="<pad>",
            unk_token="<unk>",
            padding_side="left",
        )
        tokenizer.backend_tokenizer.pre_tokenizer = Whitespace()
        model = make_dueling()
        model.save_pretrained(tmp_path)
        tokenizer.save_pretrained(tmp_path)
        generator = pipeline("text-generation", model=str(tmp_path))
        assert type(generator.model) is LlamaDuelingQForCausalLM
        prompts = [" ".join(f"w{token}" for token in row) for row in PROMPTS]
        outputs = generator(prompts, max_new_tokens=NEW, do_sample=False, return_full_text=False, batch_size=3)
        for row, (output,) in zip(PROMPTS, outputs, strict=True):
            expected = ["" if token == PAD else "<unk>" if token == 1 else f"w{token}" for token in greedy(model, row)]
            assert output["generated_text"].split() == [word for word in expected if word not in ("", "<unk>")]
