# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_qrl.data import ILQLBatch
from hf_qrl.losses.ilql import gather_states, ilql_loss, ilql_loss_from_states, metrics_from_sums
from hf_qrl.models.heads import ILQLHeads


D, V = 5, 11
GOLDEN_CASES = ["causal_two_qs_default", "causal_one_q_beta1", "causal_all_masked"]
BASIC = {"tau": 0.7, "gamma": 0.9, "cql_scale": 0.1, "awac_scale": 1.0, "awac_beta": 1.0}


def tensor(x) -> torch.Tensor:
    return torch.tensor(x, dtype=torch.float64)


class TestIlqlLossOnGoldens:
    """trlX rounds tau and 1 - tau to float32, hence 1e-7 wherever the value loss enters."""

    NAMES = {"loss_q": "loss/q", "loss_v": "loss/v", "loss_cql": "loss/cql", "loss_awac": "loss/awac"}

    def evaluate(self, case):
        """Returns the case's loss and metrics, and its leaves by the names of the stored gradients."""
        config, batch = case["config"], {k: torch.tensor(x) for k, x in case["batch"].items()}
        batch = ILQLBatch(**{**batch, "rewards": batch["rewards"].double()})
        hidden = tensor(case["hidden_states"]).requires_grad_()
        logits = tensor(case["logits"]).requires_grad_()
        num_heads = len(case["qs"])
        heads = ILQLHeads(hidden.shape[2], logits.shape[2], "mlp", "relu", 2, num_heads, "min").double()
        stored = {"v_head": (heads.v.stem[0], heads.v.projection)}
        for i in range(num_heads):
            stored[f"q_heads.{i}"] = (heads.q[i].stem[0], heads.q[i])
            stored[f"target_q_heads.{i}"] = (heads.target_q[i].stem[0], heads.target_q[i])
        parameters = {}
        for name, (first, last) in stored.items():
            for key, module in (("0", first), ("2", last)):
                for kind in ("weight", "bias"):
                    parameter = getattr(module, kind)
                    parameter.data.copy_(tensor(case["heads"][f"{name}.{key}.{kind}"]))
                    parameters[f"{name}.{key}.{kind}"] = parameter
        value, qs, target_qs = heads(
            gather_states(hidden, batch.actions_ixs), gather_states(hidden, batch.states_ixs), None
        )
        for x in (value, *qs):
            x.retain_grad()
        loss, metrics = ilql_loss(
            logits,
            qs,
            target_qs,
            value,
            batch,
            tau=config["tau"],
            gamma=config["gamma"],
            cql_scale=config["cql_scale"],
            awac_scale=config["awac_scale"],
            awac_beta=config["beta"],
        )
        loss.backward()
        leaves = {"hidden_states": hidden, "logits": logits, "vs": value, "qs": qs, "target_qs": target_qs}
        return loss, metrics, leaves, parameters

    @pytest.mark.parametrize("name", GOLDEN_CASES)
    def test_head_outputs_equal_golden(self, golden, name):
        case = golden["loss"][name]
        _, _, leaves, _ = self.evaluate(case)
        for key in ("qs", "target_qs"):
            torch.testing.assert_close(torch.stack(leaves[key]), tensor(case[key]), rtol=0, atol=1e-9)
        torch.testing.assert_close(leaves["vs"], tensor(case["vs"]).squeeze(-1), rtol=0, atol=1e-9)

    @pytest.mark.parametrize("name", GOLDEN_CASES)
    def test_loss_and_terms_equal_golden(self, golden, name):
        case = golden["loss"][name]
        loss, metrics, _, _ = self.evaluate(case)
        assert loss.item() == pytest.approx(case["loss"], rel=0, abs=1e-7)
        for stored, ours in self.NAMES.items():
            tolerance = 1e-7 if stored == "loss_v" else 1e-9
            assert metrics[ours].item() == pytest.approx(case["stats"][f"losses/{stored}"], rel=0, abs=tolerance)

    @pytest.mark.parametrize("name", GOLDEN_CASES)
    def test_statistics_equal_golden(self, golden, name):
        case = golden["loss"][name]
        _, metrics, _, _ = self.evaluate(case)
        compared = [key for key in case["stats"] if not key.startswith("losses/")]
        assert len(compared) >= 12
        for key in compared:
            assert metrics[key].item() == pytest.approx(float(case["stats"][key]), rel=0, abs=1e-9), key

    @pytest.mark.parametrize("name", GOLDEN_CASES)
    def test_gradients_equal_golden(self, golden, name):
        case = golden["loss"][name]
        _, _, leaves, parameters = self.evaluate(case)
        grads = case["grads"]
        torch.testing.assert_close(leaves["logits"].grad, tensor(grads["logits"]), rtol=0, atol=1e-9)
        torch.testing.assert_close(leaves["hidden_states"].grad, tensor(grads["hidden_states"]), rtol=0, atol=1e-7)
        torch.testing.assert_close(torch.stack([q.grad for q in leaves["qs"]]), tensor(grads["qs"]), rtol=0, atol=1e-9)
        torch.testing.assert_close(leaves["vs"].grad, tensor(grads["vs"]).view_as(leaves["vs"]), rtol=0, atol=1e-7)
        trained = [key for key in parameters if not key.startswith("target_")]
        assert sorted(trained) == sorted(key for key in grads["heads"] if not key.startswith("target_"))
        for key in trained:
            torch.testing.assert_close(parameters[key].grad, tensor(grads["heads"][key]), rtol=0, atol=1e-7)

    def test_loss_equals_golden_to_1e9_with_expectile_rounded_as_in_trlx(self, golden):
        case = golden["loss"]["causal_two_qs_default"]
        loss, metrics, leaves, _ = self.evaluate(case)
        tau = torch.tensor(case["config"]["tau"]).double()
        rest = torch.tensor(1 - case["config"]["tau"]).double()
        batch = {k: torch.tensor(x) for k, x in case["batch"].items()}
        mask = batch["dones"][:, :-1].bool()
        actions = batch["input_ids"].gather(1, batch["actions_ixs"] + 1)
        q_hat = torch.stack(leaves["target_qs"]).amin(0).gather(2, actions[..., None])[..., 0]
        advantage = (q_hat - leaves["vs"][:, :-1])[mask]
        loss_v = (torch.where(advantage >= 0, tau, rest) * advantage.square()).mean()
        assert loss_v.item() == pytest.approx(case["stats"]["losses/loss_v"], rel=0, abs=1e-9)
        assert (loss - metrics["loss/v"] + loss_v).item() == pytest.approx(case["loss"], rel=0, abs=1e-9)

    def test_all_masked_is_zero_and_attached(self, golden):
        loss, _, leaves, parameters = self.evaluate(golden["loss"]["causal_all_masked"])
        assert loss.item() == 0.0 and loss.requires_grad
        for x in (leaves["hidden_states"], leaves["logits"], leaves["vs"], *leaves["qs"]):
            assert x.grad is not None and not x.grad.any()
        for key, parameter in parameters.items():
            if not key.startswith("target_"):
                assert parameter.grad is not None and not parameter.grad.any()


def both_losses(heads, lm_head, batch, num_items=None, next_rows=False, **options):
    """Dense and chunked loss on the same leaves; returns (loss, gradients by name, metrics or sums) of each."""
    torch.manual_seed(1)
    hidden = torch.randn(*batch.input_ids.shape, D, dtype=torch.float64)
    next_hidden = torch.randn(len(hidden), D, dtype=torch.float64) if next_rows else None
    leaves = {"hidden": hidden.requires_grad_(), **{f"lm.{k}": p for k, p in lm_head.module.named_parameters()}}
    leaves |= {f"heads.{k}": p for k, p in heads.named_parameters()}

    def dense():
        action_states = gather_states(hidden, batch.actions_ixs)
        value, qs, target_qs = heads(action_states, gather_states(hidden, batch.states_ixs), lm_head.module.weight)
        logits = torch.nn.functional.linear(hidden * lm_head.scale, lm_head.module.weight, lm_head.module.bias)
        if lm_head.softcap is not None:
            logits = lm_head.softcap * torch.tanh(logits / lm_head.softcap)
        next_value = heads.v(next_hidden) if next_rows else None
        return ilql_loss(
            logits, qs, target_qs, value, batch, q_reduction=heads.q_reduction, next_value=next_value, **options
        )

    def chunked():
        return ilql_loss_from_states(hidden, heads, lm_head, batch, next_hidden, num_items=num_items, **options)

    results = []
    for function in (dense, chunked):
        for leaf in leaves.values():
            leaf.grad = None
        loss, metrics = function()
        loss.backward()
        gradients = {k: torch.zeros_like(x) if x.grad is None else x.grad.clone() for k, x in leaves.items()}
        results.append((loss.detach(), gradients, metrics))
    return results


def assert_equal(dense, chunked, factor=1.0):
    torch.testing.assert_close(chunked[0], factor * dense[0], rtol=0, atol=1e-10)
    for name, gradient in dense[1].items():
        torch.testing.assert_close(chunked[1][name], factor * gradient, rtol=0, atol=1e-10, msg=name)


class TestIlqlLossFromStates:
    OPTIONS = [
        {},
        {"cql_scale": 0.0},
        {"awac_beta": 0.0},
        {"awac_weight_clip": 1.1},
        {"awac_scale": 0.0},
        {"awac_scale": 0.5, "tau": 0.95},
        {"value_min": -0.2, "value_max": 0.3},
        {"value_max": 0.1},
        {"n_step": 3},
        {"gamma": 0.0},
        {"gamma": 1.0, "discount_on": "utterance", "n_step": 2},
        {"target": "utterance"},
        {"target": "utterance", "discount_on": "utterance"},
    ]

    @pytest.mark.parametrize("options", OPTIONS, ids=str)
    @pytest.mark.parametrize("kind", ["mlp", "linear", "tied", "dueling"])
    def test_equals_dense(self, make_batch, make_heads, make_lm_head, chunks_of, kind, options):
        chunks_of(3 * V)
        batch = make_batch(0, truncated=True, weight=True, next_rows=True)
        results = both_losses(make_heads(kind), make_lm_head(bias=True), batch, next_rows=True, **{**BASIC, **options})
        assert_equal(*results)

    @pytest.mark.parametrize("kind", ["mlp", "linear", "tied", "dueling"])
    @pytest.mark.parametrize("cql_scale", [0.0, 0.1])
    def test_equals_dense_with_monte_carlo_target(
        self, make_batch, make_heads, make_lm_head, chunks_of, kind, cql_scale
    ):
        chunks_of(2 * V)
        options = {**BASIC, "target": "mc", "cql_scale": cql_scale}
        assert_equal(*both_losses(make_heads(kind, 1), make_lm_head(), make_batch(1, weight=True), **options))

    @settings(max_examples=80, deadline=None)
    @given(
        seed=st.integers(0, 1000),
        kind=st.sampled_from(["mlp", "linear", "tied", "dueling"]),
        num_q_heads=st.sampled_from([1, 2]),
        q_reduction=st.sampled_from(["min", "mean"]),
        chunk_elements=st.sampled_from([1, V, 3 * V + 1, 1 << 20]),
        shape=st.sampled_from([(None, 1.0, False), (1.5, 1.0, False), (None, 0.25, True), (2.0, 3.0, True)]),
        data=st.sampled_from([*itertools.product([False, True], repeat=3)]),
        cql_scale=st.sampled_from([0.0, 0.1]),
        awac=st.sampled_from([(0.0, None), (1.0, None), (1.0, 0.9)]),
        bounds=st.sampled_from([(None, None), (-0.3, 0.3), (0.0, None)]),
        target=st.sampled_from([("td", 1), ("td", 3), ("utterance", 1)]),
        discount_on=st.sampled_from(["token", "utterance"]),
    )
    def test_equals_dense_in_any_combination(
        self, make_batch, make_heads, make_lm_head, seed, kind, num_q_heads, q_reduction, chunk_elements, shape, data,
        cql_scale, awac, bounds, target, discount_on,
    ):  # fmt: skip
        from hf_qrl.losses.vocabulary import vocabulary_loss

        softcap, scale, bias = shape
        truncated, weight, next_rows = data
        options = {
            **BASIC,
            "cql_scale": cql_scale,
            "awac_beta": awac[0],
            "awac_weight_clip": awac[1],
            "value_min": bounds[0],
            "value_max": bounds[1],
            "target": target[0],
            "n_step": target[1],
            "discount_on": discount_on,
        }
        batch = make_batch(seed, truncated=truncated, weight=weight, next_rows=next_rows)
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(vocabulary_loss.__kwdefaults__, "chunk_elements", chunk_elements)
            dense, chunked = both_losses(
                make_heads(kind, num_q_heads, q_reduction, seed),
                make_lm_head(bias, softcap, scale),
                batch,
                next_rows=next_rows,
                **options,
            )
        assert_equal(dense, chunked)
        means = metrics_from_sums(
            {name: x.item() for name, x in chunked[2].items()}, cql_scale=cql_scale, awac_scale=options["awac_scale"]
        )
        compared = ["loss/q", "loss/v", "loss/awac", "values/mean", "advantage/mean", "advantage/std"]
        for name in [*compared, "awac_weight/mean"] + (["loss/cql"] if cql_scale else []):
            assert means[name] == pytest.approx(dense[2][name].item(), rel=0, abs=1e-7), name
        assert means["loss"] == pytest.approx(dense[0].item(), rel=0, abs=1e-9)
        q_mean = sum(dense[2][f"qvalues/{i}/mean"].item() for i in range(num_q_heads)) / num_q_heads
        assert means["q/mean"] == pytest.approx(q_mean, rel=0, abs=1e-9)
        assert means["truncated_fraction"] == (0.5 if truncated else 0.0)

    @pytest.mark.parametrize("as_tensor", [True, False])
    def test_num_items_replaces_count(self, make_batch, make_heads, make_lm_head, as_tensor):
        batch = make_batch(2, weight=True)
        count = (batch.dones[:, :-1] * batch.weight[:, None]).sum().item()
        num_items = torch.tensor(50.0, dtype=torch.float64) if as_tensor else 50.0
        dense, chunked = both_losses(make_heads(), make_lm_head(), batch, num_items=num_items, **BASIC)
        torch.testing.assert_close(chunked[0], dense[0] * count / 50, rtol=0, atol=1e-6)
        for name, gradient in dense[1].items():
            torch.testing.assert_close(chunked[1][name], gradient * count / 50, rtol=0, atol=1e-6)

    def test_sums_add_up_over_micro_batches(self, make_batch, make_heads, make_lm_head):
        """The gradient of a batch is the sum of those of its parts, given the number of actions of all."""
        batch = make_batch(4, truncated=True, weight=True)
        count = (batch.dones[:, :-1] * batch.weight.double()[:, None]).sum()
        heads, lm_head = make_heads(), make_lm_head()
        torch.manual_seed(0)
        hidden = torch.randn(*batch.input_ids.shape, D, dtype=torch.float64)
        parameters = [*heads.parameters(), *lm_head.module.parameters()]

        def gradients(part: slice) -> list[torch.Tensor]:
            fields = {k: x if x is None else x[part] for k, x in vars(batch).items()}
            loss, sums = ilql_loss_from_states(
                hidden[part], heads, lm_head, ILQLBatch(**fields), num_items=count, **BASIC
            )
            return [*torch.autograd.grad(loss, parameters), loss.detach(), torch.stack([*sums.values()])]

        whole, first, second = (gradients(part) for part in (slice(0, 4), slice(0, 1), slice(1, 4)))
        for x, y, z in zip(whole, first, second, strict=True):
            torch.testing.assert_close(x, y + z, rtol=0, atol=1e-12)

    def test_no_actions_is_zero_and_attached_to_every_parameter(self, make_batch, make_heads, make_lm_head):
        batch = make_batch(3)
        batch = replace(batch, dones=torch.zeros_like(batch.dones))
        heads, lm_head = make_heads(), make_lm_head(bias=True)
        hidden = torch.randn(*batch.input_ids.shape, D, dtype=torch.float64, requires_grad=True)
        loss, sums = ilql_loss_from_states(hidden, heads, lm_head, batch, **BASIC)
        loss.backward()
        assert loss.item() == 0.0 and sums["actions"].item() == 0
        for x in (hidden, *heads.parameters(), *lm_head.module.parameters()):
            assert x.grad is not None and not x.grad.any()
        assert metrics_from_sums({k: x.item() for k, x in sums.items()}, cql_scale=0.1, awac_scale=1.0)["loss"] == 0.0

    @pytest.mark.parametrize("options", [{}, {"cql_scale": 0.0}, {"target": "mc"}], ids=str)
    def test_every_head_parameter_takes_part(self, make_batch, make_heads, make_lm_head, options):
        heads = make_heads("mlp", 1)
        hidden = torch.randn(4, 9, D, dtype=torch.float64)
        loss, _ = ilql_loss_from_states(hidden, heads, make_lm_head(), make_batch(0), **{**BASIC, **options})
        loss.backward()
        assert all(x.grad is not None for x in heads.parameters())

    def test_targets_receive_no_gradient(self, make_batch, make_heads, make_lm_head):
        heads = make_heads()
        for buffer in heads.target_q.buffers():
            buffer.requires_grad_()
        hidden = torch.randn(4, 9, D, dtype=torch.float64)
        loss, _ = ilql_loss_from_states(hidden, heads, make_lm_head(), make_batch(0), **BASIC)
        loss.backward()
        assert all(x.grad is None for x in heads.target_q.buffers())

    def test_padding_does_not_matter(self, make_batch, make_heads, make_lm_head):
        """Whatever stands on padding, its hidden states, tokens and rewards leave loss and gradients as they are."""
        batch, heads, lm_head = make_batch(5, truncated=True), make_heads(), make_lm_head()
        torch.manual_seed(0)
        hidden = torch.randn(*batch.input_ids.shape, D, dtype=torch.float64)
        padding = batch.attention_mask == 0
        assert padding.any() and (batch.dones[:, :-1] == 0).any()
        other = replace(
            batch,
            input_ids=batch.input_ids.masked_fill(padding, V - 1),
            rewards=batch.rewards.masked_fill(batch.dones[:, :-1] == 0, 1e6),
        )
        parameters = [*heads.parameters(), *lm_head.module.parameters()]
        results = []
        for states, data in ((hidden, batch), (hidden.masked_fill(padding[..., None], 1e3), other)):
            loss, _ = ilql_loss_from_states(states, heads, lm_head, data, **BASIC)
            results.append([loss.detach(), *torch.autograd.grad(loss, parameters)])
        for x, y in zip(*results, strict=True):
            assert torch.equal(x, y)

    @pytest.mark.parametrize("kind", ["mlp", "linear", "tied", "dueling"])
    def test_no_tensor_of_actions_times_vocabulary(self, make_batch, chunks_of, make_lm_head, kind):
        vocab, hidden_size, rows, length = 3001, 4, 16, 32
        stem = {"mlp": "relu", "linear": "identity", "tied": "linear", "dueling": "silu"}[kind]
        batch = make_batch(0, rows=rows, length=length, truncated=True)
        num_actions = int(batch.dones.sum())
        assert num_actions > 8 * hidden_size
        chunks_of(8 * vocab)
        heads = ILQLHeads(hidden_size, vocab, kind, stem, 2, 2, "min").double()
        heads.reset("default")
        lm_head = make_lm_head(vocab_size=vocab, hidden_size=hidden_size)
        hidden = torch.randn(rows, length, hidden_size, dtype=torch.float64, requires_grad=True)
        with LargestTensor() as largest:
            loss, _ = ilql_loss_from_states(hidden, heads, lm_head, batch, **BASIC)
            loss.backward()
        # A chunk may be rounded up by one row; the projections and their gradients are (V, 2 d).
        assert largest.elements <= max(9, 2 * hidden_size) * vocab < num_actions * vocab


class LargestTensor(TorchDispatchMode):
    """Records the number of elements of the largest tensor any operation returned."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.elements = max([self.elements, *(x.numel() for x in tree_leaves(out) if isinstance(x, torch.Tensor))])
        return out


class TestCheckOptions:
    @pytest.mark.parametrize(
        ("options", "num_q_heads", "message"),
        [
            ({"tau": 0.0}, 2, "strictly between 0 and 1"),
            ({"tau": 1.0}, 2, "strictly between 0 and 1"),
            ({"target": "lambda"}, 2, "`target` must be"),
            ({"discount_on": "word"}, 2, "`discount_on` must be"),
            ({"n_step": 0}, 2, "at least 1"),
            ({"n_step": 2, "target": "utterance"}, 2, "goes with"),
            ({"target": "mc"}, 2, "num_q_heads=1"),
        ],
    )
    def test_contradiction_raises(self, make_batch, make_heads, make_lm_head, options, num_q_heads, message):
        with pytest.raises(ValueError, match=message):
            both_losses(make_heads(num_q_heads=num_q_heads), make_lm_head(), make_batch(0), **{**BASIC, **options})


class TestMetricsFromSums:
    def test_means_and_deviation(self):
        sums = {
            "loss/q": 8.0, "loss/v": 4.0, "loss/cql": 20.0, "loss/awac": 2.0, "advantage/mean": 4.0,
            "advantage/square": 20.0, "actions": 4.0, "truncated_rows": 1.0, "rows": 2.0,
        }  # fmt: skip
        means = metrics_from_sums(sums, cql_scale=0.1, awac_scale=2.0)
        assert means == pytest.approx(
            {
                "loss/q": 2.0, "loss/v": 1.0, "loss/cql": 5.0, "loss/awac": 0.5, "advantage/mean": 1.0,
                "advantage/std": 2.0, "truncated_fraction": 0.5, "loss": 2.0 + 1.0 + 0.5 + 1.0,
            }
        )  # fmt: skip

    def test_deviation_of_equal_numbers_is_zero(self):
        sums = {f"loss/{x}": 0.0 for x in ("q", "v", "cql", "awac")}
        sums |= {"advantage/mean": 0.3, "advantage/square": 0.03 - 1e-12, "actions": 3.0}
        sums |= {"truncated_rows": 0.0, "rows": 1.0}
        assert metrics_from_sums(sums, cql_scale=0.1, awac_scale=1.0)["advantage/std"] == 0.0


class TestMixedPrecision:
    @pytest.mark.parametrize("head_type", ["mlp", "tied", "dueling"])
    def test_values_stay_in_float32(self, make_batch, make_heads, make_lm_head, head_type):
        """Under autocast the heads run in float32 and the LM head in bfloat16, and gradients come in float32."""
        batch = make_batch(1)
        batch = replace(batch, rewards=batch.rewards.float())
        heads, lm_head = make_heads(head_type).float(), make_lm_head()
        lm_head.module.float()
        hidden = torch.randn(*batch.input_ids.shape, D)

        def evaluate() -> tuple[torch.Tensor, list[torch.Tensor], dict[str, torch.Tensor]]:
            parameters = [*heads.parameters(), *lm_head.module.parameters()]
            loss, sums = ilql_loss_from_states(hidden, heads, lm_head, batch, **BASIC)
            return loss, list(torch.autograd.grad(loss, parameters)), sums

        loss, gradients, sums = evaluate()
        with torch.autocast("cpu", torch.bfloat16):
            mixed_loss, mixed_gradients, mixed_sums = evaluate()
        for name in ("loss/q", "loss/v", "loss/cql", "values/mean", "q/mean"):
            torch.testing.assert_close(mixed_sums[name], sums[name], rtol=1e-6, atol=1e-6)
        assert mixed_sums["loss/awac"] != sums["loss/awac"]
        torch.testing.assert_close(mixed_loss, loss, rtol=1e-2, atol=0)
        for x, y in zip(mixed_gradients, gradients, strict=True):
            assert x.dtype == torch.float32
            torch.testing.assert_close(x, y, rtol=5e-2, atol=1e-2)


class TestUtterancesWithoutTurns:
    def test_runs_of_own_tokens_are_utterances(self, make_heads, make_lm_head):
        """Rows in trlX's fields do not say where an utterance ends; a gap between own tokens does."""
        batch = ILQLBatch(
            input_ids=torch.tensor([[3, 4, 5, 3, 4, 5, 3, 4]]),
            attention_mask=torch.ones(1, 8, dtype=torch.long),
            rewards=torch.tensor([[0.0, 0.0, 0.0, 1.0]], dtype=torch.float64),
            states_ixs=torch.tensor([[1, 2, 5, 6, 7]]),
            actions_ixs=torch.tensor([[1, 2, 5, 6]]),
            dones=torch.tensor([[1, 1, 1, 1, 0]]),
        )
        said = replace(batch, turn_ixs=torch.tensor([[0, 0, 1, 1]]))
        heads, lm_head = make_heads(), make_lm_head()
        hidden = torch.randn(1, 8, D, dtype=torch.float64)
        options = {**BASIC, "gamma": 0.5, "discount_on": "utterance", "target": "utterance"}
        inferred, _ = ilql_loss_from_states(hidden, heads, lm_head, batch, **options)
        given, _ = ilql_loss_from_states(hidden, heads, lm_head, said, **options)
        one = replace(batch, turn_ixs=torch.zeros(1, 4, dtype=torch.long))
        as_one, _ = ilql_loss_from_states(hidden, heads, lm_head, one, **options)
        assert inferred.item() == given.item() != as_one.item()
