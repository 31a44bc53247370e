# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""Construction, forward and embeddings. Saving and generation have files of their own."""

import copy
import json
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    LlamaConfig,
    T5Config,
    T5ForConditionalGeneration,
)

from hf_qrl import AutoModelForCausalLMWithILQLHeads, CausalILQLOutput, ILQLCausalLMConfig, ILQLForCausalLM


GOLDENS = Path(__file__).parents[1] / "goldens"
VOCAB_SIZE = 61
# Every architecture and every kind of head, but not every pair.
ARCHITECTURES = ["gpt2", "llama", "llama_tied", "qwen3_tied", "gemma3", "opt", "gpt_neox", "cohere", "granite"]
ROWS = [(name, "mlp") for name in ARCHITECTURES] + [("gemma3", kind) for kind in ("linear", "tied", "dueling")]


def snapshot(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def assert_same_state(module: nn.Module, state: dict[str, torch.Tensor]) -> None:
    assert module.state_dict().keys() == state.keys()
    for name, tensor in module.state_dict().items():
        assert tensor.dtype == state[name].dtype, name
        assert torch.equal(tensor, state[name]), name


def lm_head_input(base: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    seen = []
    handle = base.get_output_embeddings().register_forward_hook(lambda module, args, output: seen.append(args[0]))
    base(ids)
    handle.remove()
    (states,) = seen
    return states


def capped(base: nn.Module, states: torch.Tensor) -> torch.Tensor:
    """Logits of the tiny models from the inputs of their LM heads."""
    head, config = base.get_output_embeddings(), base.config
    logits = states @ head.weight.T + (0 if head.bias is None else head.bias)
    if config.model_type == "gemma3_text":
        logits = 2.0 * torch.tanh(logits / 2.0)
    return logits * {"cohere": 0.25, "granite": 1 / 3.0}.get(config.model_type, 1.0)


class TestConstruction:
    def test_load_base_checkpoint_initialises_heads(self, make_base, architecture, tmp_path):
        base = make_base(architecture)
        base.save_pretrained(tmp_path)
        model = AutoModelForCausalLMWithILQLHeads.from_pretrained(tmp_path)
        assert isinstance(model, ILQLForCausalLM) and not model.training
        assert_same_state(model.base, snapshot(base))
        for name, tensor in model.heads.state_dict().items():
            width = model.heads.v.stem[0].in_features
            bound = (2 * width if "stem" not in name else width) ** -0.5
            assert tensor.isfinite().all() and tensor.abs().max() <= bound, name
            assert tensor.numel() < 30 or tensor.std() > 0.4 * bound, name

    def test_buffers_from_base_checkpoint(self, make_base, head_type, tmp_path):
        make_base("llama").save_pretrained(tmp_path)
        model = AutoModelForCausalLMWithILQLHeads.from_pretrained(tmp_path, head_type=head_type)
        buffers = dict(model.heads.target_q.named_buffers())
        assert buffers and not list(model.heads.target_q.parameters())
        for name, buffer in buffers.items():
            assert buffer.dtype == torch.float32 and buffer.isfinite().all(), name
            assert buffer.any() or head_type == "linear", name

    def test_targets_equal_q_when_fresh(self, make_base, head_type, make_ids, tmp_path):
        base = make_base("qwen3_tied")
        base.save_pretrained(tmp_path)
        arguments = {"head_type": head_type, "head_init": "default"}
        for model in (
            AutoModelForCausalLMWithILQLHeads.from_pretrained(tmp_path, **arguments),
            AutoModelForCausalLMWithILQLHeads.from_pretrained(base, **arguments),
            AutoModelForCausalLMWithILQLHeads.from_config(base.config, **arguments),
            ILQLForCausalLM(ILQLCausalLMConfig(text_config=base.config, **arguments)),
        ):
            output = model(make_ids(), output_values=True)
            for q, target_q in zip(output.qs, output.target_qs, strict=True):
                assert q.std() > 1e-3
                torch.testing.assert_close(q, target_q, rtol=0, atol=1e-5 if head_type == "dueling" else 0)
            assert not torch.allclose(output.qs[0], output.qs[1])

    @pytest.mark.parametrize("architecture", ["gpt2", "gemma3", "opt"])
    def test_head_init_zero_is_constant(self, make_base, make_ids, architecture, head_type):
        base = make_base(architecture)
        model = ILQLForCausalLM.from_base(base, head_type=head_type, head_init="zero", beta=3.0)
        output = model(make_ids(), output_values=True)
        assert not any(tensor.any() for tensor in (output.value, *output.qs, *output.target_qs))
        assert model.heads.is_constant()
        assert torch.equal(model(make_ids()).logits, base(make_ids()).logits)
        model.heads.set_constant(2.5)
        output = model(make_ids(), output_values=True)
        assert all((tensor == 2.5).all() for tensor in (output.value, *output.qs, *output.target_qs))

    def test_base_is_used_as_it_is(self, make_base, architecture):
        base = make_base(architecture)
        before, embeddings = snapshot(base), base.get_input_embeddings()
        model = ILQLForCausalLM.from_base(base)
        assert model.base is base
        assert_same_state(base, before)
        assert model.get_input_embeddings() is base.get_input_embeddings() is embeddings
        assert model.get_output_embeddings() is base.get_output_embeddings()
        assert model.generation_config is base.generation_config
        assert base.config.tie_word_embeddings == (
            model.get_input_embeddings().weight is model.get_output_embeddings().weight
        )

    @pytest.mark.parametrize("name", ["llama", "llama_tied", "gpt2"])
    def test_wrapping_after_resize_keeps_weights(self, make_base, name):
        base = make_base(name)
        base.resize_token_embeddings(VOCAB_SIZE + 8)
        before = snapshot(base)
        model = ILQLForCausalLM.from_base(base)
        assert_same_state(base, before)
        assert model.heads.q[0].weight.shape[0] == VOCAB_SIZE + 8

    @pytest.mark.parametrize("name", ["llama", "llama_tied", "gpt2"])
    def test_wrapping_after_replacing_embeddings_keeps_weights(self, make_base, name):
        base = make_base(name)
        embedding = nn.Embedding(VOCAB_SIZE, 24)
        base.set_input_embeddings(embedding)
        if name == "llama":
            base.set_output_embeddings(nn.Linear(24, VOCAB_SIZE, bias=False))
        else:
            base.tie_weights()
        before = snapshot(base)
        ILQLForCausalLM.from_base(base)
        assert base.get_input_embeddings() is embedding
        assert_same_state(base, before)

    @pytest.mark.parametrize("name", ["gpt2", "llama", "opt"])
    @pytest.mark.parametrize("implementation", ["eager", "sdpa"])
    def test_wrapping_keeps_base_logits(self, make_base, make_ids, name, implementation):
        base = make_base(name, attn_implementation=implementation)
        ids = make_ids(3, 9)
        mask = torch.ones_like(ids)
        mask[0, :4] = mask[1, 6:] = 0
        before = base(ids, attention_mask=mask).logits
        model = ILQLForCausalLM.from_base(base, beta=0.0)
        assert base.config._attn_implementation == model.config._attn_implementation == implementation
        assert torch.equal(base(ids, attention_mask=mask).logits, before)
        assert torch.equal(model(ids, attention_mask=mask).logits, before)

    def test_training_mode_follows_base(self, make_base):
        assert ILQLForCausalLM.from_base(make_base("gpt2").train()).training
        assert not ILQLForCausalLM.from_base(make_base("gpt2").eval()).heads.training

    def test_from_config_takes_both_configurations(self, make_base):
        text_config = make_base("llama_tied").config
        model = AutoModelForCausalLMWithILQLHeads.from_config(text_config, head_type="linear", num_q_heads=1, beta=3)
        assert (model.config.head_type, len(model.heads.q), model.config.beta) == ("linear", 1, 3.0)
        again = AutoModelForCausalLMWithILQLHeads.from_config(model.config)
        assert again.state_dict().keys() == model.state_dict().keys()
        with pytest.raises(ValueError, match="beta.*set in the configuration"):
            AutoModelForCausalLMWithILQLHeads.from_config(model.config, beta=1.0)

    def test_deep_copy_is_independent(self, make_model, make_ids):
        model = make_model("llama_tied", head_type="dueling")
        expected = model(make_ids()).logits
        clone = copy.deepcopy(model)
        with torch.no_grad():
            clone.heads.target_q[0].bias.add_(torch.arange(VOCAB_SIZE).float())
        assert torch.equal(model(make_ids()).logits, expected)
        assert not torch.equal(clone(make_ids()).logits, expected)

    def test_bad_bases_refused(self, make_base, make_model):
        with pytest.raises(ValueError, match="already has ILQL heads"):
            ILQLForCausalLM.from_base(make_model())
        with pytest.raises(ValueError, match="go on a `PreTrainedModel`, got Linear"):
            ILQLForCausalLM.from_base(nn.Linear(2, 2))
        t5 = T5ForConditionalGeneration(
            T5Config(vocab_size=VOCAB_SIZE, d_model=16, d_ff=16, num_layers=1, num_heads=2, d_kv=8)
        )
        with pytest.raises(ValueError, match="is an encoder-decoder"):
            ILQLForCausalLM.from_base(t5)
        with pytest.raises(ValueError, match="no output embeddings"):
            ILQLForCausalLM.from_base(make_base("llama").model)
        with pytest.raises(ValueError, match="takes no loading arguments, got .*revision"):
            AutoModelForCausalLMWithILQLHeads.from_pretrained(make_base("llama"), revision="main")
        with pytest.raises(OSError, match=r"is made with .*from_pretrained"):
            AutoModelForCausalLMWithILQLHeads()

    def test_auto_classes(self, make_base):
        config = ILQLCausalLMConfig(text_config=make_base("llama").config, head_type="tied", beta=2.0)
        assert AutoConfig.for_model("hf_qrl_ilql_causal_lm", text_config=config.text_config).beta == 1.0
        for auto_class in (AutoModel, AutoModelForCausalLM):
            model = auto_class.from_config(config)
            assert type(model) is ILQLForCausalLM
            assert model.config.beta == 2.0

    def test_class_name_and_attributes(self, make_base, make_model):
        # The class name decides how the Trainer counts tokens.
        model = make_model("llama")
        assert "ForCausalLM" in ILQLForCausalLM.__name__
        assert model.loss_type == "ForCausalLM"
        assert model.base_model_prefix == "base" and model.base_model is model.base
        assert model.accepts_loss_kwargs and model.supports_gradient_checkpointing and model.can_generate()
        assert model._supports_logits_to_keep()
        # Collected from the language model under the heads.
        assert model._no_split_modules == make_base("llama")._no_split_modules
        assert make_model("llama_tied").all_tied_weights_keys == {
            "base.lm_head.weight": "base.model.embed_tokens.weight"
        }


class TestDtype:
    @pytest.mark.parametrize(("architecture", "head_type"), ROWS)
    def test_fp32_heads_on_bf16_trunk(self, make_base, make_model, make_ids, architecture, head_type, tmp_path):
        base = make_base(architecture)
        base.save_pretrained(tmp_path / "base")
        make_model(architecture, head_type=head_type).save_pretrained(tmp_path / "heads")
        models = {
            "base checkpoint": AutoModelForCausalLMWithILQLHeads.from_pretrained(
                tmp_path / "base", dtype=torch.bfloat16, head_type=head_type
            ),
            "ILQL checkpoint": ILQLForCausalLM.from_pretrained(tmp_path / "heads", dtype=torch.bfloat16),
            "live": ILQLForCausalLM.from_base(base.to(torch.bfloat16), head_type=head_type),
            "from_config": AutoModelForCausalLMWithILQLHeads.from_config(
                base.config, dtype=torch.bfloat16, head_type=head_type
            ),
        }
        for how, model in models.items():
            assert model.dtype == torch.bfloat16, how
            assert {tensor.dtype for tensor in model.base.parameters()} == {torch.bfloat16}, how
            assert {tensor.dtype for tensor in model.heads.state_dict().values()} == {torch.float32}, how
            output = model(make_ids(), output_values=True)
            assert output.value.dtype == output.qs[0].dtype == output.target_qs[0].dtype == torch.float32, how
            assert model(make_ids()).logits.isfinite().all(), how
            assert model.generate(make_ids(), max_new_tokens=3, do_sample=False).shape[0] == 2, how

    def test_heads_moved_to_bf16_still_run(self, make_model, make_ids, head_type):
        model = make_model("llama", head_type=head_type).to(torch.bfloat16)
        assert {tensor.dtype for tensor in model.heads.state_dict().values()} == {torch.bfloat16}
        assert model(make_ids()).logits.isfinite().all()
        assert model(make_ids(), output_values=True).value.shape == (2, 9)

    def test_bf16_checkpoint_keeps_fp32_heads(self, make_base, scramble_heads, head_type, tmp_path):
        model = ILQLForCausalLM.from_base(make_base("llama").to(torch.bfloat16), head_type=head_type)
        state = snapshot(scramble_heads(model))
        model.save_pretrained(tmp_path)
        # The dtype of the checkpoint is that of the trunk; the heads keep all their digits.
        assert_same_state(ILQLForCausalLM.from_pretrained(tmp_path), state)
        assert_same_state(AutoModelForCausalLMWithILQLHeads.from_pretrained(tmp_path, dtype="auto"), state)


class TestForward:
    @pytest.mark.parametrize("reduction", ["min", "mean"])
    @pytest.mark.parametrize("num_q_heads", [1, 2, 3])
    def test_logits_are_the_policy(self, make_model, make_ids, head_type, reduction, num_q_heads):
        model = make_model("llama_tied", head_type=head_type, q_reduction=reduction, num_q_heads=num_q_heads, beta=2.5)
        ids = make_ids()
        lm_logits, values = model.base(ids).logits, model(ids, output_values=True)
        assert torch.equal(values.logits, lm_logits)
        for beta in (None, 0.5, -1.0, 4):
            policy = model(ids, beta=beta).logits
            for i, j in ((0, 0), (0, 8), (1, 3)):
                q = [target_q[i, j] for target_q in values.target_qs]
                q = sum(q) / len(q) if reduction == "mean" else torch.stack(q).min(0).values
                expected = lm_logits[i, j] + (2.5 if beta is None else beta) * (q - values.value[i, j])
                torch.testing.assert_close(policy[i, j], expected, rtol=1e-5, atol=1e-5)

    def test_policy_reads_targets_not_online_heads(self, make_model, make_ids, head_type):
        model = make_model("gpt2", head_type=head_type)
        before = model(make_ids()).logits
        with torch.no_grad():
            for parameter in model.heads.q.parameters():
                parameter.add_(1.0)
        assert torch.equal(model(make_ids()).logits, before)
        with torch.no_grad():
            for buffer in model.heads.target_q.buffers():
                buffer.mul_(-1.0)
        assert not torch.allclose(model(make_ids()).logits, before)

    def test_beta_zero_is_the_language_model(self, make_model, make_ids, architecture):
        model = make_model(architecture, beta=0)
        expected = model.base(make_ids()).logits
        assert torch.equal(model(make_ids()).logits, expected)
        model.config.beta = 1.0
        assert torch.equal(model(make_ids(), beta=0.0).logits, expected)
        assert not torch.allclose(model(make_ids()).logits, expected)

    def test_head_input_is_lm_head_input(self, make_model, make_ids, architecture):
        model, ids = make_model(architecture), make_ids()
        states = lm_head_input(model.base, ids)
        assert states.shape[-1] == (16 if architecture == "opt" else 24)
        torch.testing.assert_close(capped(model.base, states), model.base(ids).logits, rtol=1e-5, atol=1e-5)
        # What training reads, and what decoding reads.
        assert torch.equal(model.base.base_model(ids).last_hidden_state, states)
        seen = model(ids, loss_fn=lambda hidden_states, *_: hidden_states).loss
        assert torch.equal(seen, states)
        output = model(ids, output_values=True)
        value, qs, target_qs = model.heads(states, None, model.get_output_embeddings().weight)
        assert torch.equal(output.value, value)
        assert all(torch.equal(a, b) for a, b in zip(output.qs, qs, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(output.target_qs, target_qs, strict=True))

    def test_selected_positions_equal_gathered_values(self, make_model, make_ids, head_type):
        model, ids = make_model("llama_tied", head_type=head_type), make_ids()
        states_ixs, actions_ixs = torch.tensor([[1, 4, 8], [0, 0, 2]]), torch.tensor([[1, 4], [7, 0]])
        full = model(ids, output_values=True)
        some = model(ids, output_values=True, states_ixs=states_ixs, actions_ixs=actions_ixs)
        assert some.value.shape == (2, 3) and len(some.qs) == len(some.target_qs) == 2
        assert torch.equal(some.logits, full.logits)
        for row in range(2):
            for column, position in enumerate(states_ixs[row].tolist()):
                torch.testing.assert_close(some.value[row, column], full.value[row, position])
            for column, position in enumerate(actions_ixs[row].tolist()):
                for name in ("qs", "target_qs"):
                    for a, b in zip(some[name], full[name], strict=True):
                        torch.testing.assert_close(a[row, column], b[row, position], rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("architecture", ["llama_tied", "gemma3", "opt"])
    def test_policy_top_k_restricts_the_support(self, make_model, make_ids, architecture, head_type):
        model, ids = make_model(architecture, head_type=head_type, beta=3.0), make_ids()
        lm_logits, full = model.base(ids).logits, model(ids).logits
        for k, beta in ((1, 3.0), (5, 3.0), (5, 0.0), (VOCAB_SIZE - 1, 3.0)):
            model.config.policy_top_k = k
            policy = model(ids, beta=beta).logits
            expected = lm_logits if beta == 0 else full
            for i in range(2):
                for j in range(9):
                    support = sorted(range(VOCAB_SIZE), key=lambda v: -lm_logits[i, j, v].item())[:k]
                    others = [v for v in range(VOCAB_SIZE) if v not in support]
                    torch.testing.assert_close(policy[i, j, support], expected[i, j, support], rtol=1e-5, atol=1e-5)
                    assert (policy[i, j, others] == -torch.inf).all()
        for k in (VOCAB_SIZE, VOCAB_SIZE + 10):
            model.config.policy_top_k = k
            assert torch.equal(model(ids).logits, full)

    @pytest.mark.parametrize("policy_top_k", [None, 5])
    @pytest.mark.parametrize("keep", [0, 1, 3, torch.tensor([2, 5, 8])], ids=["all", "1", "3", "tensor"])
    def test_logits_to_keep_matches_full(self, make_model, make_ids, architecture, keep, policy_top_k):
        model, ids = make_model(architecture, beta=2.0, policy_top_k=policy_top_k), make_ids()
        rows = slice(None) if isinstance(keep, int) and keep == 0 else slice(-keep, None)
        rows = keep if torch.is_tensor(keep) else rows
        full, kept = model(ids).logits[:, rows], model(ids, logits_to_keep=keep).logits
        torch.testing.assert_close(kept, full, rtol=1e-5, atol=1e-5)
        full, kept = model(ids, output_values=True), model(ids, output_values=True, logits_to_keep=keep)
        torch.testing.assert_close(kept.value, full.value[:, rows], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(kept.target_qs[1], full.target_qs[1][:, rows], rtol=1e-5, atol=1e-5)

    def test_labels_refused(self, make_model, make_ids):
        with pytest.raises(ValueError, match="takes no `labels`: train it with `ILQLTrainer`"):
            make_model()(make_ids(), labels=make_ids())

    def test_output_fields_and_tuple_order(self, make_model, make_ids):
        names = list(CausalILQLOutput.__dataclass_fields__)
        assert names == ["logits", "cache", "hidden_states", "value", "qs", "target_qs", "loss"]
        model, ids = make_model("gpt2"), make_ids()
        arguments = {"output_values": True, "output_hidden_states": True, "use_cache": True}
        output = model(ids, **arguments)
        assert list(output.keys()) == names[:-1]
        assert output.past_key_values is output.cache
        assert len(output.hidden_states) == 3
        row = model(ids, return_dict=False, **arguments)
        assert type(row) is tuple and len(row) == 6
        logits, cache, hidden_states, value, qs, target_qs = row
        assert torch.equal(logits, output.logits) and type(cache) is type(output.cache)
        assert len(hidden_states) == 3 and torch.equal(value, output.value)
        assert torch.equal(qs[1], output.qs[1]) and torch.equal(target_qs[1], output.target_qs[1])
        model.config.return_dict = False
        assert type(model(ids)) is tuple
        assert torch.equal(model(ids, use_cache=False)[0], model(ids, return_dict=True).logits)
        (loss,) = model(ids, loss_fn=lambda *arguments: torch.tensor(3.0))
        assert loss == 3.0

    def test_cached_continuation_equals_full(self, make_model, make_ids, architecture):
        model, ids = make_model(architecture, beta=2.0), make_ids()
        full = model(ids, use_cache=False)
        assert full.cache is None
        first = model(ids[:, :6], use_cache=True)
        second = model(ids[:, 6:], cache=first.cache, use_cache=True)
        together = torch.cat([first.logits, second.logits], dim=1)
        torch.testing.assert_close(together, full.logits, rtol=1e-4, atol=1e-4)

    def test_inputs_embeds_equal_ids(self, make_model, make_ids):
        model = make_model("llama", beta=2.0)
        embeds = model.get_input_embeddings()(make_ids())
        assert torch.equal(model(inputs_embeds=embeds).logits, model(make_ids()).logits)

    @pytest.mark.parametrize("architecture", ["gpt2", "llama"])
    def test_padding_side_invariance(self, make_model, make_ids, architecture):
        model, row = make_model(architecture, beta=2.0), make_ids(1, 6)
        padding = torch.zeros(1, 3, dtype=torch.long)
        alone, alone_values = model(row).logits, model(row, output_values=True)
        right, left = torch.cat([row, padding], 1), torch.cat([padding, row], 1)
        mask = (torch.arange(9) < 6).long()[None]
        logits = model(right, attention_mask=mask).logits[:, :6]
        torch.testing.assert_close(logits, alone, rtol=1e-4, atol=1e-4)
        mask = mask.flip(1)
        position_ids = (mask.cumsum(-1) - 1).clamp(min=0)
        output = model(left, attention_mask=mask, position_ids=position_ids, output_values=True)
        torch.testing.assert_close(output.value[:, 3:], alone_values.value, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(output.target_qs[0][:, 3:], alone_values.target_qs[0], rtol=1e-4, atol=1e-4)
        logits = model(left, attention_mask=mask, position_ids=position_ids).logits[:, 3:]
        torch.testing.assert_close(logits, alone, rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize("case", [0, 1])
    @pytest.mark.parametrize("through_top_k", [False, True])
    def test_policy_step_golden(self, make_base, case, through_top_k):
        # A real forward whose two last hidden states are mapped onto the golden logits, Q and V.
        golden = json.loads((GOLDENS / "trlx-ilql.json").read_text())["policy_step"]
        case = golden["cases"][case]

        def double(value):
            return torch.tensor(value, dtype=torch.float64)

        base = make_base("llama", vocab_size=5).double()
        model = ILQLForCausalLM.from_base(base, head_type="linear", beta=case["beta"])
        model.double()
        ids = torch.tensor([[3, 4]])
        states = lm_head_input(base, ids)[0]

        def solve(inputs, outputs):
            return torch.linalg.lstsq(inputs, outputs, driver="gelsd").solution.T

        with torch.no_grad():
            for tensor in (*model.heads.parameters(), *model.heads.buffers()):
                if tensor.shape[-1] != 24 or tensor.shape[0] == 5:
                    tensor.zero_()
            base.lm_head.weight.copy_(solve(states, double(golden["logits"])))
            for i in range(2):
                model.heads.target_q[i].weight.copy_(solve(states, double(golden[f"target_q{i}"])))
            stem = torch.relu(model.heads.v.stem[0](states))
            model.heads.v.projection.weight.copy_(solve(stem, double(golden["v"])))
        output = model(ids, output_values=True)
        torch.testing.assert_close(output.logits[0], double(golden["logits"]), rtol=0, atol=1e-9)
        torch.testing.assert_close(output.value[0], double(golden["v"]).squeeze(1), rtol=0, atol=1e-9)

        policy = model(ids).logits[0]
        if through_top_k:
            # The golden's `top_k` is that of `generate`: it acts on the perturbed logits.
            policy = policy.masked_fill(policy < policy.topk(case["top_k"]).values[:, -1:], -torch.inf)
            probabilities = torch.softmax(policy / case["temperature"], -1)
            torch.testing.assert_close(probabilities, double(case["probs"]), rtol=0, atol=1e-9)
            assert policy.argmax(-1).tolist() == case["argmax"]
        else:
            scores = double([[-torch.inf if x is None else x for x in row] for row in case["scores"]])
            # Scores of the golden are normalised log-probabilities of the language model plus beta A.
            normaliser = torch.logsumexp(double(golden["logits"]), -1, keepdim=True)
            kept = scores.isfinite()
            torch.testing.assert_close((policy - normaliser)[kept], scores[kept], rtol=0, atol=1e-9)


def values_loss(hidden_states, heads, lm_head, next_hidden_state):
    value, qs, _ = lm_head.lend(hidden_states, lambda states, lm_weight: heads(states, None, lm_weight))

    def score(z, weight, bias, offset, softcap):
        logits = nn.functional.linear(z, weight, bias)
        return (logits if softcap is None else softcap * torch.tanh(logits / softcap)).logsumexp(-1)

    return value.square().sum() + qs[0].square().sum() + lm_head(hidden_states, score).sum()


class TestLossInForward:
    def test_activation_checkpointing_equals_without(self, make_model, make_ids, architecture):
        model = make_model(architecture).train()
        layers = next(module for module in model.base.modules() if isinstance(module, nn.ModuleList))
        calls = []
        # Hooks of a layer itself stay outside its checkpoint, those of what is in it do not.
        part = next(module for module in layers[0].modules() if not list(module.children()))
        part.register_forward_pre_hook(lambda module, args: calls.append(1))

        def gradients():
            calls.clear()
            model.zero_grad()
            loss = model(make_ids(), loss_fn=values_loss).loss
            loss.backward()
            return loss, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

        loss, plain = gradients()
        assert len(calls) == 1
        model.activation_checkpointing_enable()
        again, checkpointed = gradients()
        # A second run of the layer, in backward, shows that checkpointing was on.
        assert len(calls) == 2
        assert torch.equal(loss, again)
        assert plain.keys() == checkpointed.keys() and len(plain) > 10
        for name, gradient in plain.items():
            torch.testing.assert_close(checkpointed[name], gradient, rtol=1e-5, atol=1e-6)
        model.activation_checkpointing_disable()
        gradients()
        assert len(calls) == 1

    def test_loss_is_returned_alone(self, make_model, make_ids):
        output = make_model()(make_ids(), loss_fn=lambda *arguments: torch.tensor(2.0))
        assert list(output.keys()) == ["loss"] and output.loss == 2.0

    @pytest.mark.parametrize("architecture", ["gpt2", "llama", "opt"])
    def test_next_hidden_state_is_the_last_of_each_row(self, make_model, make_ids, architecture):
        model, ids, next_ids = make_model(architecture), make_ids(3, 7), make_ids(3, 5, seed=1)
        lengths = [5, 2, 0]
        mask = torch.tensor([[1] * n + [0] * (5 - n) for n in lengths])
        seen = {}

        def loss_fn(hidden_states, heads, lm_head, next_hidden_state):
            seen.update(hidden_states=hidden_states, next=next_hidden_state)
            return hidden_states.sum()

        model(ids, next_input_ids=next_ids, next_attention_mask=mask, loss_fn=loss_fn)
        assert seen["hidden_states"].requires_grad and not seen["next"].requires_grad
        assert seen["next"].isfinite().all()
        for row, length in enumerate(lengths[:2]):
            expected = lm_head_input(model.base, next_ids[row : row + 1, :length])[0, -1]
            torch.testing.assert_close(seen["next"][row], expected, rtol=1e-4, atol=1e-4)
        model(ids, loss_fn=loss_fn)
        assert seen["next"] is None


class TestResize:
    @pytest.mark.parametrize("name", ["llama", "llama_tied", "gpt2", "opt"])
    @pytest.mark.parametrize("size", [VOCAB_SIZE + 9, VOCAB_SIZE - 7])
    def test_resize_token_embeddings(self, make_model, make_ids, name, size, head_type, tmp_path):
        model = make_model(name, head_type=head_type, beta=2.0)
        ids = make_ids().clamp(max=size - 1)
        kept = min(size, VOCAB_SIZE)
        before = model(ids, output_values=True)
        embeddings = model.resize_token_embeddings(size)
        assert embeddings is model.get_input_embeddings()
        assert model.config.text_config.vocab_size == model.base.config.vocab_size == size
        tied = model.config.tie_word_embeddings
        assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == tied
        after = model(ids, output_values=True)
        assert torch.equal(after.value, before.value)
        for old, new in zip((*before.qs, *before.target_qs), (*after.qs, *after.target_qs), strict=True):
            assert new.shape == (2, 9, size)
            torch.testing.assert_close(new[..., :kept], old[..., :kept], rtol=1e-4, atol=1e-4)
            if head_type != "tied":
                mean = old.mean(-1, keepdim=True).expand(-1, -1, size - kept)
                torch.testing.assert_close(new[..., kept:], mean, rtol=1e-4, atol=1e-4)
        assert model(ids).logits.shape == (2, 9, size)
        model.save_pretrained(tmp_path)
        loaded = ILQLForCausalLM.from_pretrained(tmp_path)
        assert torch.equal(loaded(ids).logits, model(ids).logits)
        assert_same_state(loaded, snapshot(model))

    def test_resized_heads_still_train(self, make_model, make_ids):
        model = make_model("llama", head_type="mlp")
        model.resize_token_embeddings(VOCAB_SIZE + 3)
        assert "heads.q.0.weight" in dict(model.named_parameters())
        assert "heads.target_q.0.weight" in dict(model.named_buffers())
        model(make_ids(), output_values=True).qs[0].sum().backward()
        assert model.heads.q[0].weight.grad.shape[0] == VOCAB_SIZE + 3
        model.heads.update_targets(1.0)
        torch.testing.assert_close(model.heads.q[0].weight.detach(), model.heads.target_q[0].weight)

    def test_resize_without_size_changes_nothing(self, make_model):
        model = make_model("llama")
        before = snapshot(model)
        assert model.resize_token_embeddings() is model.get_input_embeddings()
        assert_same_state(model, before)

    def test_resize_to_multiple(self, make_model, make_ids):
        model = make_model("llama")
        model.resize_token_embeddings(VOCAB_SIZE + 1, pad_to_multiple_of=8)
        assert model.get_output_embeddings().weight.shape[0] == model.heads.q[0].weight.shape[0] == 64
        assert model(make_ids()).logits.shape[-1] == 64

    def test_config_of_large_vocabulary_needs_no_tie(self):
        # Width and vocabulary come from the LM head, not from attributes of the configuration.
        config = LlamaConfig(
            vocab_size=70, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
        )
        model = AutoModelForCausalLMWithILQLHeads.from_config(config, head_type="linear")
        assert model.heads.q[0].weight.shape == (70, 16)
