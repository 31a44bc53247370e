# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""The losses of PPO against golden numbers, dense definitions and loops."""

import math

import pytest
import torch
from torch import nn

from hf_qrl.data import PPORLElement, collate_ppo
from hf_qrl.losses import generalized_advantage_estimation, ppo_loss
from hf_qrl.losses.advantages import adapted_kl_coef, kl_estimate, whiten
from hf_qrl.losses.ppo import ppo_loss_from_states, ppo_metrics_from_sums, score_tokens_from_states
from hf_qrl.losses.vocabulary import vocabulary_loss
from hf_qrl.models.heads import ValueHead


V, D = 13, 6


def tensor(x):
    return torch.tensor(x, dtype=torch.float64)


class TestGolden:
    def test_advantages(self, golden):
        case = golden["ppo"]
        advantages, returns = generalized_advantage_estimation(
            tensor(case["values"]), tensor(case["rewards"]), case["gamma"], case["lam"]
        )
        torch.testing.assert_close(advantages, tensor(case["advantages"]), rtol=0, atol=1e-9)
        torch.testing.assert_close(returns, tensor(case["returns"]), rtol=0, atol=1e-9)
        # trlX leaves out the 1e-8, or has it elsewhere: the numbers agree to its size.
        torch.testing.assert_close(whiten(advantages), tensor(case["advantages_whitened"]), rtol=0, atol=1e-7)

    def test_loss(self, golden):
        ppo, case = golden["ppo"], golden["ppo"]["loss"]
        mask = tensor(case["mask"])
        loss, metrics = ppo_loss(
            tensor(case["logprobs"]),
            tensor(case["values"]),
            tensor(case["old_logprobs"]),
            tensor(case["old_values"]),
            tensor(ppo["advantages"]),
            tensor(ppo["returns"]),
            mask,
            cliprange=case["cliprange"],
            cliprange_value=case["cliprange_value"],
            vf_coef=case["vf_coef"],
        )
        stats = case["stats"]
        assert loss.item() == pytest.approx(case["loss"], rel=0, abs=1e-9)
        names = {
            "losses/total_loss": "loss",
            "losses/policy_loss": "loss/policy",
            "losses/value_loss": "loss/value",
            "values/values_error": "values/error",
            "ratio": "policy/ratio",
            "policy/clipfrac": "policy/clipfrac",
            "values/clipfrac": "values/clipfrac",
            "padding_percentage": "padding_percentage",
        }
        for statistic in ("mean", "min", "max", "std"):
            names |= {f"{x}/{statistic}": f"{x}/{statistic}" for x in ("values", "old_values", "returns")}
        for theirs, ours in names.items():
            tolerance = 1e-7 if "clipfrac" in theirs else 1e-9
            assert metrics[ours].item() == pytest.approx(stats[theirs], rel=0, abs=tolerance), ours
        # The correction: trlX divides by padding too.
        expected = stats["policy/approx_kl"] * mask.numel() / mask.sum().item()
        assert metrics["policy/kl"].item() == pytest.approx(expected, rel=0, abs=1e-9)

    def test_adaptive_kl(self, golden):
        case = golden["adaptive_kl"]
        coefficient = case["init"]
        for current, expected in zip(case["currents"], case["values"], strict=True):
            coefficient = adapted_kl_coef(
                coefficient, current, target=case["target"], horizon=case["horizon"], num_items=case["n_steps"]
            )
            assert coefficient == pytest.approx(expected, rel=0, abs=1e-12)


class TestAdvantages:
    @pytest.mark.parametrize("seed", range(5))
    @pytest.mark.parametrize("lam", [0.0, 0.7, 1.0])
    def test_equal_the_definition(self, seed, lam):
        """`A_t` as the sum of discounted errors (equation 16), with masks, discounts of steps, and a last value."""
        generator = torch.Generator().manual_seed(seed)
        rows, steps = 4, 7
        values, rewards = (torch.randn(rows, steps, generator=generator, dtype=torch.float64) for _ in range(2))
        gamma = torch.rand(rows, steps, generator=generator, dtype=torch.float64)
        last = torch.randn(rows, generator=generator, dtype=torch.float64)
        lengths = torch.randint(0, steps + 1, (rows,), generator=generator).tolist()
        mask = torch.zeros(rows, steps, dtype=torch.float64)
        expected, expected_returns = torch.zeros_like(values), torch.zeros_like(values)
        for i, n in enumerate(lengths):
            mask[i, :n] = 1
            v = [*values[i, :n].tolist(), last[i].item()]
            deltas = [rewards[i, t].item() + gamma[i, t].item() * v[t + 1] - v[t] for t in range(n)]
            for t in range(n):
                factors = [math.prod(lam * gamma[i, s].item() for s in range(t, k)) for k in range(t, n)]
                expected[i, t] = sum(f * d for f, d in zip(factors, deltas[t:], strict=True))
                expected_returns[i, t] = expected[i, t] + v[t]
        advantages, returns = generalized_advantage_estimation(values, rewards, gamma, lam, mask, last_values=last)
        torch.testing.assert_close(advantages, expected, rtol=0, atol=1e-12)
        torch.testing.assert_close(returns, expected_returns, rtol=0, atol=1e-12)

    def test_lambda_1_gives_returns_of_the_rewards(self):
        rewards = tensor([[1.0, 2.0, 4.0]])
        _, returns = generalized_advantage_estimation(tensor([[5.0, -3.0, 2.0]]), rewards, 0.5, 1.0)
        torch.testing.assert_close(returns, tensor([[3.0, 4.0, 4.0]]), rtol=0, atol=1e-12)

    def test_whitening_does_not_see_the_padding(self):
        x = torch.randn(40, dtype=torch.float64)
        mask = torch.rand(40) < 0.5
        found = whiten(torch.where(mask, x, 1e6), mask)
        chosen = x[mask]
        expected = (chosen - chosen.mean()) / (chosen.var() + 1e-8).sqrt()
        torch.testing.assert_close(found[mask], expected, rtol=0, atol=1e-12)
        assert (found[~mask] == 0).all()

    def test_what_lies_on_padding_is_not_read(self):
        nothing, mask = math.nan, torch.tensor([[1, 1, 0]])
        values, rewards = tensor([[1.0, 2.0, nothing]]), tensor([[0.5, -1.0, nothing]])
        found = generalized_advantage_estimation(values, rewards, 0.9, 0.8, mask)
        expected = generalized_advantage_estimation(values[:, :2], rewards[:, :2], 0.9, 0.8)
        for ours, theirs in zip(found, expected, strict=True):
            assert ours.tolist() == [[*theirs[0].tolist(), 0.0]]
        assert whiten(values, mask).tolist() == [[*whiten(values[:, :2])[0].tolist(), 0.0]]

    @pytest.mark.parametrize("count", [0, 1])
    def test_whitening_of_next_to_nothing(self, count):
        mask = torch.arange(3) < count
        assert whiten(torch.randn(3), mask).tolist() == [0.0, 0.0, 0.0]

    def test_estimators_of_the_divergence(self):
        """Their means over samples, exact here, are the divergence (k1, k3) or close to it where it is small (k2)."""
        generator = torch.Generator().manual_seed(0)
        p, q = (torch.randn(9, generator=generator, dtype=torch.float64).mul(0.05).log_softmax(0) for _ in range(2))
        divergence = (p.exp() * (p - q)).sum().item()
        mean = {kind: (p.exp() * kl_estimate(p, q, kind)).sum().item() for kind in ("k1", "k2", "k3")}
        assert mean["k1"] == pytest.approx(divergence, abs=1e-12)
        assert mean["k3"] == pytest.approx(divergence, abs=1e-12)
        assert mean["k2"] == pytest.approx(divergence, rel=0.1)
        assert (kl_estimate(p, q, "k3") >= 0).all()
        assert torch.equal(kl_estimate(p, q, "abs"), (p - q).abs())
        with pytest.raises(ValueError, match="`estimator` must be"):
            kl_estimate(p, q, "k4")


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.v = ValueHead(D).double()


def draw_elements(seed, rows=5):
    generator = torch.Generator().manual_seed(seed)
    elements = []
    for _ in range(rows):
        q, r = torch.randint(1, 5, (2,), generator=generator).tolist()
        numbers = [torch.randn(r, generator=generator, dtype=torch.float64) for _ in range(5)]
        numbers[0] = -numbers[0].abs() - 1.5  # log-probabilities
        tokens = (torch.randint(0, V, (n,), generator=generator) for n in (q, r))
        elements.append(PPORLElement(*tokens, *numbers))
    return elements


def dense(states, heads, lm_head, batch, *, cliprange, cliprange_value, vf_coef, entropy_coef, temperature):
    """By [`ppo_loss`], from whole logits."""
    logits = nn.functional.linear(states * lm_head.scale, lm_head.module.weight, lm_head.module.bias)
    if lm_head.softcap is not None:
        logits = lm_head.softcap * torch.tanh(logits / lm_head.softcap)
    logprobs = (logits / temperature).log_softmax(-1)
    taken = logprobs.gather(2, batch.response_tensors.unsqueeze(2)).squeeze(2)
    mask = batch.response_mask.double()
    loss, metrics = ppo_loss(
        taken, heads.v(states), batch.logprobs, batch.values, batch.advantages, batch.returns, mask,
        cliprange=cliprange, cliprange_value=cliprange_value, vf_coef=vf_coef,
    )  # fmt: skip
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    return loss - entropy_coef * (entropy * mask).sum() / mask.sum(), metrics, taken.detach(), entropy.detach()


@pytest.mark.parametrize("lm", [(False, None, 1.0), (True, 1.5, 0.25)])
@pytest.mark.parametrize("entropy_coef", [0.0, 0.3])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("cliprange_value", [0.2, None])
@pytest.mark.parametrize("chunk", [1, 3 * V + 1, 1 << 20])
def test_from_states_equals_dense(make_lm_head, monkeypatch, lm, entropy_coef, temperature, cliprange_value, chunk):
    monkeypatch.setitem(vocabulary_loss.__kwdefaults__, "chunk_elements", chunk)
    torch.manual_seed(1)
    lm_head, heads = make_lm_head(*lm, vocab_size=V, hidden_size=D), Heads()
    batch = collate_ppo(draw_elements(0), pad_token_id=0)
    states = torch.randn(*batch.response_tensors.shape, D, dtype=torch.float64, requires_grad=True)
    options = {"cliprange": 0.2, "cliprange_value": cliprange_value, "vf_coef": 0.7, "temperature": temperature}
    options["entropy_coef"] = entropy_coef
    leaves = [states, *lm_head.module.parameters(), *heads.parameters()]
    expected, metrics, taken, entropy = dense(states, heads, lm_head, batch, **options)
    loss, sums = ppo_loss_from_states(states, heads, lm_head, batch, **options)
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-10)
    for ours, theirs in zip(torch.autograd.grad(loss, leaves), torch.autograd.grad(expected, leaves), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)
    found = ppo_metrics_from_sums({name: x.item() for name, x in sums.items()}, vf_coef=0.7, entropy_coef=entropy_coef)
    assert found["loss"] == pytest.approx(expected.item(), abs=1e-9)
    assert 0 < found["policy/clipfrac"] < 1, "there are tokens on both sides of the limit"
    for name in ("loss/policy", "loss/value", "policy/kl", "policy/ratio", "values/error", "values/clipfrac"):
        assert found[name] == pytest.approx(metrics[name].item(), abs=1e-9), name
    mask = batch.response_mask
    scores = score_tokens_from_states(states, lm_head, batch, temperature)
    for ours, theirs in zip(scores, (taken, entropy), strict=True):
        torch.testing.assert_close(ours[mask], theirs[mask], rtol=0, atol=1e-10)
        assert (ours[~mask] == 0).all()


def test_parts_of_a_batch_add_up(make_lm_head):
    torch.manual_seed(0)
    lm_head, heads = make_lm_head(vocab_size=V, hidden_size=D), Heads()
    elements = draw_elements(2, rows=6)
    whole = collate_ppo(elements, pad_token_id=0)
    states = torch.randn(*whole.response_tensors.shape, D, dtype=torch.float64)
    options = {"num_items": int(whole.response_mask.sum()), "entropy_coef": 0.1}
    expected, sums = ppo_loss_from_states(states, heads, lm_head, whole, **options)
    parts = []
    for rows in (slice(0, 1), slice(1, 4), slice(4, 6)):
        part = collate_ppo(elements[rows], pad_token_id=0)
        width = part.response_tensors.shape[1]
        parts.append(ppo_loss_from_states(states[rows, :width], heads, lm_head, part, **options))
    torch.testing.assert_close(sum(loss for loss, _ in parts), expected, rtol=0, atol=1e-12)
    for name, x in sums.items():
        torch.testing.assert_close(sum(part[name] for _, part in parts), x, rtol=0, atol=1e-9)


def test_no_tokens_at_all(make_lm_head):
    lm_head, heads = make_lm_head(vocab_size=V, hidden_size=D), Heads()
    batch = collate_ppo(draw_elements(0, rows=1), pad_token_id=0)
    batch.response_mask = torch.zeros_like(batch.response_mask)
    states = torch.randn(*batch.response_tensors.shape, D, dtype=torch.float64, requires_grad=True)
    loss, sums = ppo_loss_from_states(states, heads, lm_head, batch, num_items=7, entropy_coef=0.1)
    assert loss.item() == 0
    gradients = torch.autograd.grad(loss, [states, *lm_head.module.parameters(), *heads.parameters()])
    assert all((gradient == 0).all() for gradient in gradients), "there is one for every weight, for other processes"
    assert ppo_metrics_from_sums({name: x.item() for name, x in sums.items()}) == {}
    zeros = torch.zeros(2, 3)
    loss, metrics = ppo_loss(zeros, zeros, zeros, zeros, zeros, zeros, zeros)
    assert loss.item() == 0 and metrics["padding_percentage"].item() == 1


def test_padding_that_overflows():
    """What lies on padding has no part in the loss, and none in its gradients, where 0 times infinity is no number."""
    logprobs, values = (torch.tensor([[-1.0, x]], requires_grad=True) for x in (0.0, math.inf))
    old_logprobs, zeros = torch.tensor([[-1.0, -1000.0]]), torch.zeros(1, 2)
    loss, metrics = ppo_loss(logprobs, values, old_logprobs, zeros, zeros + 2, zeros, torch.tensor([[1, 0]]))
    loss.backward()
    assert loss.item() == pytest.approx(-1.5)
    assert logprobs.grad.tolist() == [[-2.0, 0.0]] and values.grad.tolist() == [[-1.0, 0.0]]
    assert all(torch.isfinite(x) for x in metrics.values())


def test_gradients_go_into_the_policy_and_the_values_alone():
    columns = [torch.randn(2, 3, requires_grad=True) for _ in range(6)]
    loss, metrics = ppo_loss(*columns, torch.ones(2, 3))
    loss.backward()
    assert [x.grad is not None for x in columns] == [True, True, False, False, False, False]
    assert not any(x.requires_grad for x in metrics.values())


def test_bfloat16_weights(make_lm_head):
    """Ratios of a bfloat16 model are those of its log-probabilities in float32, and tokens are counted exactly."""
    torch.manual_seed(0)
    lm_head, heads = make_lm_head(vocab_size=V, hidden_size=D), Heads()
    lm_head.module.bfloat16()
    heads.bfloat16()
    elements = [PPORLElement(torch.tensor([1]), torch.randint(0, V, (67,)), *torch.randn(5, 67)) for _ in range(5)]
    batch = collate_ppo(elements, pad_token_id=0)
    states = torch.randn(*batch.response_tensors.shape, D).bfloat16()
    batch.logprobs = score_tokens_from_states(states, lm_head, batch)[0] - 0.01
    _, sums = ppo_loss_from_states(states, heads, lm_head, batch)
    assert sums["tokens"].item() == 5 * 67
    metrics = ppo_metrics_from_sums({name: x.item() for name, x in sums.items()})
    assert metrics["policy/ratio"] == pytest.approx(math.exp(0.01), abs=1e-5)


@pytest.mark.parametrize("value", [0.7, -1.3, 12.34])
@pytest.mark.parametrize("count", [3, 1000, 1237])
def test_explained_variance_of_equal_returns(value, count):
    """There is nothing to explain; what rounding leaves of the variance is no number to divide by."""
    returns, zeros = torch.full((1, count), value), torch.zeros(1, count)
    old_values = returns + torch.randn(1, count)
    _, metrics = ppo_loss(zeros, zeros, zeros, old_values, zeros, returns, torch.ones(1, count))
    assert metrics["values/explained_variance"].item() == 0


def test_explained_variance():
    returns, old_values = torch.randn(2, 50, dtype=torch.float64)
    zeros = torch.zeros(1, 50, dtype=torch.float64)
    _, metrics = ppo_loss(zeros, zeros, zeros, old_values[None], zeros, returns[None], torch.ones(1, 50))
    expected = 1 - (returns - old_values).var(correction=0) / returns.var(correction=0)
    assert metrics["values/explained_variance"].item() == pytest.approx(expected.item(), abs=1e-9)


def test_a_batch_without_advantages_raises(make_lm_head):
    element = PPORLElement(torch.tensor([1]), torch.tensor([2]), *torch.zeros(3, 1))
    batch = collate_ppo([element], pad_token_id=0)
    with pytest.raises(ValueError, match="compute_advantages"):
        ppo_loss_from_states(torch.zeros(1, 1, D), Heads(), make_lm_head(vocab_size=V, hidden_size=D), batch)
