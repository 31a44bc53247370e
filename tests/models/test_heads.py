# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.

import json
import math
from functools import partial
from pathlib import Path

import pytest
import torch

from hf_qrl.models.heads import ILQLHeads, QHead, QHeads, ValueHead, candidate_values


GOLDENS = Path(__file__).parents[1] / "goldens"
STEMS = {"mlp": "relu", "linear": "identity", "tied": "linear", "dueling": "silu"}
COMBINATIONS = [
    ("mlp", "relu"),
    ("mlp", "silu"),
    ("linear", "identity"),
    ("linear", "linear"),
    ("tied", "linear"),
    ("tied", "identity"),
    ("dueling", "silu"),
    ("dueling", "identity"),
    ("dueling", "linear"),
]
D, V = 6, 11


@pytest.fixture
def lm_weight() -> torch.Tensor:
    return torch.randn(V, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.fixture
def hidden_states() -> torch.Tensor:
    return torch.randn(3, 4, D, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def randomise(module: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(seed)
    module.double()
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.copy_(torch.randn(tensor.shape, generator=generator, dtype=torch.float64))
    return module


def make_head(kind: str, stem: str | None = None, target: bool = False, seed: int = 0) -> QHead:
    return randomise(QHead(kind, stem or STEMS[kind], D, V, 2, target=target), seed)


def naive_q_values(head: QHead, h: torch.Tensor, stem: str, lm_weight: torch.Tensor) -> torch.Tensor:
    """Q(s, .) of one hidden state, written from the table of kinds with its own arithmetic."""
    weights = dict(head.state_dict())
    prefix = "stem." if stem == "linear" else "stem.0."
    z = h
    if stem != "identity":
        z = weights[prefix + "weight"] @ h
    if stem in ("relu", "silu"):
        z = z + weights[prefix + "bias"]
    if stem == "relu":
        z = torch.where(z > 0, z, torch.zeros_like(z))
    elif stem == "silu":
        z = z / (1 + torch.exp(-z))
    if head.kind == "tied":
        return torch.stack([row @ z for row in lm_weight]) + weights["offset.weight"][0] @ h + weights["offset.bias"]
    values = weights["weight"] @ z
    if stem in ("relu", "silu"):
        values = values + weights["bias"]
    if head.kind == "mlp":
        return values
    value = weights["offset.weight"][0] @ (z if head.kind == "dueling" else h) + weights["offset.bias"]
    if head.kind == "dueling" and not head.target:
        return value + values - values.sum() / V
    return value + values


class TestQHead:
    @pytest.mark.parametrize("target", [False, True])
    @pytest.mark.parametrize(("kind", "stem"), COMBINATIONS)
    def test_values_equal_naive_formula(self, kind, stem, target, hidden_states, lm_weight):
        head = make_head(kind, stem, target)
        q = head(hidden_states, lm_weight)
        assert q.shape == (3, 4, V)
        for i in range(3):
            for j in range(4):
                expected = naive_q_values(head, hidden_states[i, j], stem, lm_weight)
                torch.testing.assert_close(q[i, j], expected, rtol=0, atol=1e-11)

    @pytest.mark.parametrize("target", [False, True])
    @pytest.mark.parametrize(("kind", "stem"), COMBINATIONS)
    def test_candidate_values_equal_gathered_values(self, kind, stem, target, hidden_states, lm_weight):
        head = make_head(kind, stem, target)
        candidates = torch.randint(V, (3, 4, 5), generator=torch.Generator().manual_seed(3))
        values = head(hidden_states, lm_weight, partial(candidate_values, candidates=candidates))
        expected = head(hidden_states, lm_weight).gather(-1, candidates)
        torch.testing.assert_close(values, expected, rtol=0, atol=1e-11)

    def test_evaluate_result_is_returned_as_it_is(self, hidden_states):
        sentinel = object()
        assert make_head("mlp")(hidden_states, evaluate=lambda z, weight, bias, offset: sentinel) is sentinel

    def test_dueling_golden(self):
        golden = json.loads((GOLDENS / "llama-qrlhf.json").read_text())["dueling_head"]
        weights = {name: torch.tensor(value, dtype=torch.float64) for name, value in golden["weights"].items()}
        head = QHead("dueling", "silu", golden["dim"], golden["num_tokens"], golden["expansion_factor"]).double()
        head.load_state_dict(
            {
                "stem.0.weight": weights["stem.0.weight"],
                "stem.0.bias": weights["stem.0.bias"],
                "offset.weight": weights["to_values.0.weight"],
                "offset.bias": weights["to_values.0.bias"],
                "weight": weights["to_advantages.0.weight"],
                "bias": weights["to_advantages.0.bias"],
            }
        )
        x = torch.tensor(golden["x"], dtype=torch.float64)
        expected = torch.tensor(golden["q_float64"], dtype=torch.float64)
        torch.testing.assert_close(head(x), expected, rtol=0, atol=1e-9)
        folded = QHead("dueling", "silu", golden["dim"], golden["num_tokens"], 2, target=True).double()
        head.update_target(folded, 1.0)
        torch.testing.assert_close(folded(x), expected, rtol=0, atol=1e-9)
        torch.testing.assert_close(
            head.float()(x.float()), torch.tensor(golden["q"]), rtol=1e-6, atol=1e-6
        )  # fmt: skip

    @pytest.mark.parametrize(("kind", "stem"), COMBINATIONS)
    def test_hard_update_makes_target_equal(self, kind, stem, hidden_states, lm_weight):
        head, target = make_head(kind, stem), make_head(kind, stem, target=True, seed=1)
        assert not torch.allclose(head(hidden_states, lm_weight), target(hidden_states, lm_weight))
        head.update_target(target, 1.0)
        torch.testing.assert_close(
            head(hidden_states, lm_weight), target(hidden_states, lm_weight), rtol=0, atol=1e-11
        )

    @pytest.mark.parametrize("kind", [kind for kind in STEMS if kind != "dueling"])
    def test_update_moves_every_tensor_by_alpha(self, kind):
        head, target = make_head(kind), make_head(kind, target=True, seed=1)
        before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
        head.update_target(target, 0.25)
        assert before.keys() == head.state_dict().keys()
        for name, online in head.state_dict().items():
            expected = 0.25 * online + 0.75 * before[name]
            torch.testing.assert_close(target.state_dict()[name], expected, rtol=0, atol=1e-12)

    @pytest.mark.parametrize("stem", ["silu", "identity"])
    def test_average_of_folds_is_fold_of_averages(self, stem):
        # The average of the unfolded parts is kept beside the head; folding it must give the target.
        head = make_head("dueling", stem)
        averages = {name: tensor.clone() for name, tensor in head.state_dict().items()}
        target = QHead("dueling", stem, D, V, 2, target=True).double()
        head.update_target(target, 1.0)
        for step in range(4):
            randomise(head, seed=10 + step)
            head.update_target(target, 0.3)
            averages = {name: 0.7 * averages[name] + 0.3 * tensor for name, tensor in head.state_dict().items()}
        advantage, value = averages["weight"], averages["offset.weight"]
        weight = value.expand(V, -1) + advantage - advantage.sum(0, keepdim=True) / V
        torch.testing.assert_close(target.weight + target.offset.weight, weight, rtol=0, atol=1e-12)
        if stem == "silu":
            bias = averages["offset.bias"] + averages["bias"] - averages["bias"].sum() / V
            torch.testing.assert_close(target.bias + target.offset.bias, bias, rtol=0, atol=1e-12)
        else:
            assert target.bias is None
            torch.testing.assert_close(target.offset.bias, averages["offset.bias"], rtol=0, atol=1e-12)
        for name, tensor in target.stem.state_dict().items():
            torch.testing.assert_close(tensor, averages[f"stem.{name}"], rtol=0, atol=1e-12)

    def test_update_in_float32_accumulates_small_steps(self):
        # In bfloat16 a step of 1.0 -> 1.1 at rate .005 is lost to rounding.
        head, target = QHead("linear", "identity", 2, 3, 2), QHead("linear", "identity", 2, 3, 2, target=True)
        with torch.no_grad():
            head.to(torch.bfloat16).weight.fill_(1.1)
            target.weight.fill_(1.0)
        for _ in range(1000):
            head.update_target(target, 0.005)
        assert target.weight.dtype == torch.float32
        torch.testing.assert_close(target.weight, head.weight.float(), rtol=0, atol=1e-3)

    @pytest.mark.parametrize(("kind", "stem"), COMBINATIONS)
    def test_targets_are_buffers_only(self, kind, stem):
        target = QHead(kind, stem, D, V, 2, target=True)
        assert not list(target.parameters())
        assert all(buffer.dtype == torch.float32 for buffer in target.buffers())
        # Every one of them is saved.
        assert set(dict(target.named_buffers())) == set(target.state_dict())

    def test_tied_head_holds_nothing_of_vocabulary_size(self):
        for vocab_size in (11, 100_000):
            head = QHead("tied", "linear", D, vocab_size, 2)
            assert sum(tensor.numel() for tensor in head.state_dict().values()) == D * D + D + 1

    def test_tied_head_sends_no_gradient_into_embedding(self, hidden_states, lm_weight):
        head = make_head("tied")
        lm_weight.requires_grad_()
        hidden_states.requires_grad_()
        head(hidden_states, lm_weight).square().sum().backward()
        assert lm_weight.grad is None
        assert hidden_states.grad.abs().sum() > 0
        assert all(parameter.grad.abs().sum() > 0 for parameter in head.parameters())

    @pytest.mark.parametrize(("kind", "stem"), COMBINATIONS)
    def test_every_parameter_gets_a_gradient(self, kind, stem, hidden_states, lm_weight):
        head = make_head(kind, stem)
        head(hidden_states, lm_weight).square().sum().backward()
        assert all(parameter.grad.abs().sum() > 0 for parameter in head.parameters())

    @pytest.mark.parametrize(("kind", "stem"), [pair for pair in COMBINATIONS if pair != ("tied", "identity")])
    def test_zero_init_is_constant(self, kind, stem, hidden_states, lm_weight):
        head = make_head(kind, stem)
        assert not head.is_constant()
        head.reset("zero")
        assert head.is_constant()
        assert torch.count_nonzero(head(hidden_states, lm_weight)) == 0
        head.set_constant(-1.5)
        assert not head.is_constant()
        assert (head(hidden_states, lm_weight) == -1.5).all()
        # It still learns: the last layer receives a gradient.
        (head(hidden_states, lm_weight) * torch.linspace(0, 1, V)).sum().backward()
        assert any(parameter.grad is not None and parameter.grad.any() for parameter in head.parameters())

    @pytest.mark.parametrize("kind", STEMS)
    def test_default_init_has_the_scale_of_linear_layers(self, kind):
        torch.manual_seed(0)
        head = QHead(kind, STEMS[kind], 32, 501, 2)
        head.reset("default")
        assert not head.is_constant()
        for name, parameter in head.named_parameters():
            fan_in = {"stem.0.weight": 32, "stem.0.bias": 32, "stem.weight": 32, "stem.bias": 32}.get(name)
            fan_in = fan_in or (32 if kind in ("linear", "tied") else 64)
            assert parameter.abs().max() <= fan_in**-0.5
            if parameter.numel() > 30:
                assert parameter.std() > 0.4 * fan_in**-0.5

    @pytest.mark.parametrize("target", [False, True])
    @pytest.mark.parametrize("kind", ["mlp", "linear", "dueling"])
    @pytest.mark.parametrize("vocab_size", [V + 4, V - 3])
    def test_resize_keeps_values_of_old_tokens(self, kind, target, vocab_size, hidden_states):
        head = make_head(kind, target=target)
        before = head(hidden_states)
        old = {name: tensor.clone() for name, tensor in head.state_dict().items() if name in ("weight", "bias")}
        names = set(dict(head.named_parameters())), set(dict(head.named_buffers()))
        head.resize(vocab_size)
        kept = min(V, vocab_size)
        assert set(old) == ({"weight"} if kind == "linear" else {"weight", "bias"})
        for name, tensor in old.items():
            new = getattr(head, name)
            assert new.shape[0] == vocab_size
            assert torch.equal(new[:kept], tensor[:kept])
            for row in range(kept, vocab_size):
                torch.testing.assert_close(new[row], tensor.sum(0) / V, rtol=0, atol=1e-12)
        assert (set(dict(head.named_parameters())), set(dict(head.named_buffers()))) == names
        q = head(hidden_states)
        assert q.shape == (3, 4, vocab_size)
        torch.testing.assert_close(q[..., :kept], before[..., :kept], rtol=0, atol=1e-11)

    @pytest.mark.parametrize("kind", STEMS)
    @pytest.mark.parametrize("target", [False, True])
    def test_bfloat16_input_into_float32_head(self, kind, target, lm_weight):
        head = make_head(kind, target=target).float()
        h = torch.randn(2, D, generator=torch.Generator().manual_seed(4)).bfloat16()
        exact = head(h.float(), lm_weight.float())
        # A tied head computes in the dtype of the embedding, the others in their own.
        q = head(h, lm_weight.bfloat16() if kind == "tied" else None)
        assert q.dtype == torch.float32
        assert (q - exact).abs().max() <= (0.1 if kind == "tied" else 1e-5)


class TestQHeads:
    @pytest.mark.parametrize("kind", STEMS)
    def test_is_the_heads_of_ilql_without_value(self, kind, hidden_states, lm_weight):
        shape = (D, V, kind, STEMS[kind], 2, 2, "min")
        ilql, heads = randomise(ILQLHeads(*shape)), QHeads(*shape).double()
        state = {name: x for name, x in ilql.state_dict().items() if not name.startswith("v.")}
        assert list(heads.state_dict()) == list(state) and len(state) < len(ilql.state_dict())
        heads.load_state_dict(state)
        _, *expected = ilql(hidden_states, None, lm_weight)
        got = heads(hidden_states, lm_weight)
        for x, y in zip((*got[0], *got[1]), (*expected[0], *expected[1]), strict=True):
            assert torch.equal(x, y)
        assert not any(x.requires_grad for x in got[1])
        heads.update_targets(0.3)
        ilql.update_targets(0.3)
        assert all(torch.equal(x, ilql.state_dict()[name]) for name, x in heads.state_dict().items())
        heads.reset("zero")
        assert heads.is_constant()
        heads.set_constant(0.5)
        assert all(
            (x == 0.5).all() for x in (*heads(hidden_states, lm_weight)[0], *heads(hidden_states, lm_weight)[1])
        )


class TestILQLHeads:
    @staticmethod
    def make(head_type: str = "mlp", num_q_heads: int = 2, q_reduction: str = "min") -> ILQLHeads:
        return randomise(ILQLHeads(D, V, head_type, STEMS[head_type], 2, num_q_heads, q_reduction))

    @pytest.mark.parametrize("kind", STEMS)
    @pytest.mark.parametrize("num_q_heads", [1, 2, 3])
    def test_forward_shapes_and_gradients(self, kind, num_q_heads, hidden_states, lm_weight):
        heads = self.make(kind, num_q_heads)
        hidden_states.requires_grad_()
        value, qs, target_qs = heads(hidden_states, hidden_states[:, :2], lm_weight)
        assert value.shape == (3, 2)
        assert len(qs) == len(target_qs) == num_q_heads
        for q, target_q in zip(qs, target_qs, strict=True):
            assert q.shape == target_q.shape == (3, 4, V)
            assert q.requires_grad and not target_q.requires_grad
        assert torch.equal(heads(hidden_states, None, lm_weight)[0][:, :2], value)

    def test_reduce_equals_naive_loop(self):
        qs = [torch.randn(2, 5, generator=torch.Generator().manual_seed(i)) for i in range(3)]
        low, mean = self.make(q_reduction="min").reduce(qs), self.make(q_reduction="mean").reduce(tuple(qs))
        for i in range(2):
            for j in range(5):
                entries = [q[i, j].item() for q in qs]
                assert low[i, j].item() == min(entries)
                assert mean[i, j].item() == pytest.approx(sum(entries) / 3, abs=1e-6)

    def test_value_head_equals_naive_formula(self, hidden_states):
        head = randomise(ValueHead(D))
        w = head.state_dict()
        z = (hidden_states @ w["stem.0.weight"].T + w["stem.0.bias"]).clamp(min=0)
        assert z.shape[-1] == 2 * D
        expected = (z * w["projection.weight"][0]).sum(-1) + w["projection.bias"]
        torch.testing.assert_close(head(hidden_states), expected, rtol=0, atol=1e-11)

    @pytest.mark.parametrize("kind", STEMS)
    @pytest.mark.parametrize("init", ["default", "zero"])
    def test_reset_copies_into_targets(self, kind, init, hidden_states, lm_weight):
        heads = self.make(kind)
        heads.reset(init)
        assert heads.is_constant() == (init == "zero")
        value, qs, target_qs = heads(hidden_states, None, lm_weight)
        for q, target_q in zip(qs, target_qs, strict=True):
            torch.testing.assert_close(q, target_q, rtol=0, atol=1e-12)
        if init == "default":
            assert not torch.allclose(qs[0], qs[1])
        else:
            heads.set_constant(0.75)
            value, qs, target_qs = heads(hidden_states, None, lm_weight)
            assert all((x == 0.75).all() for x in (value, *qs, *target_qs))

    def test_polyak_golden(self):
        golden = json.loads((GOLDENS / "trlx-ilql.json").read_text())["polyak"]

        def key(name: str) -> str:
            # q_heads.0.2.weight -> q.0.weight, v_head.0.bias -> v.stem.0.bias
            name = name.replace("target_q_heads", "target_q").replace("q_heads", "q").replace("v_head", "v")
            stem, layer, tensor = name.rsplit(".", 2)
            last = "projection." if stem == "v" else ""
            return f"{stem}.stem.0.{tensor}" if layer == "0" else f"{stem}.{last}{tensor}"

        before, after = (
            {key(name): torch.tensor(value, dtype=torch.float64) for name, value in golden[when].items()}
            for when in ("before", "after")
        )
        heads = ILQLHeads(2, 3, "mlp", "relu", 2, 2, "min").double()
        heads.load_state_dict(before)
        heads.update_targets(golden["alpha"])
        assert heads.state_dict().keys() == after.keys()
        for name, tensor in heads.state_dict().items():
            torch.testing.assert_close(tensor, after[name], rtol=0, atol=1e-9)
            if "target" not in name:
                assert torch.equal(tensor, before[name])


@pytest.mark.parametrize("kind", ["mlp", "linear", "tied", "dueling"])
def test_a_copy_does_not_depend_on_what_was_there(kind):
    heads = ILQLHeads(4, 7, kind, STEMS[kind], 2, 1, "min")
    heads.reset("default")
    before = {name: x.clone() for name, x in heads.target_q.named_buffers()}
    for buffer in heads.target_q.buffers():
        buffer.fill_(math.nan)
    heads.update_targets(1.0)
    for name, x in heads.target_q.named_buffers():
        torch.testing.assert_close(x, before[name], rtol=0, atol=0)
