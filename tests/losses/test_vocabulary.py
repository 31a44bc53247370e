# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_qrl.losses.vocabulary import vocabulary_loss, vocabulary_maximum, vocabulary_mean


def row_loss(q_a, lse, y, w):
    return w * ((q_a - y).square() + 0.3 * (lse - q_a) + 0.1 * (lse - 0.2 * y) ** 2)


def draw(rows=7, width=4, vocab=13, dtype=torch.float64, seed=0):
    torch.manual_seed(seed)
    z, weight = torch.randn(rows, width, dtype=dtype), torch.randn(vocab, width, dtype=dtype)
    bias, offset = torch.randn(vocab, dtype=dtype), torch.randn(rows, dtype=dtype)
    tensors = {"z": z, "weight": weight, "bias": bias, "offset": offset}
    accumulate = torch.float64 if dtype == torch.float64 else torch.float32
    actions = torch.randint(0, vocab, (rows,))
    return tensors, actions, (torch.randn(rows, dtype=accumulate), torch.rand(rows, dtype=accumulate))


def dense_loss(z, weight, bias, offset, actions, row_inputs, softcap=None):
    q = z @ weight.t()
    q = q if bias is None else q + bias
    q = q if softcap is None else softcap * torch.tanh(q / softcap)
    q = q if offset is None else q + offset[:, None]
    q_a, lse = q.gather(1, actions[:, None])[:, 0], q.logsumexp(1)
    return row_loss(q_a, lse, *row_inputs).sum(), q_a, lse


class TestVocabularyLoss:
    @settings(max_examples=60, deadline=None)
    @given(
        seed=st.integers(0, 10_000),
        rows=st.integers(1, 9),
        bias=st.booleans(),
        offset=st.booleans(),
        softcap=st.sampled_from([None, 1.5]),
        chunk_elements=st.sampled_from([1, 13, 26, 40, 1 << 24]),
    )
    def test_equals_autograd(self, seed, rows, bias, offset, softcap, chunk_elements):
        tensors, actions, row_inputs = draw(rows, seed=seed)
        results = []
        for function in (dense_loss, None):
            leaves = {name: x.clone().requires_grad_() for name, x in tensors.items()}
            used = dict(leaves, bias=leaves["bias"] if bias else None, offset=leaves["offset"] if offset else None)
            if function is not None:
                outputs = function(**used, actions=actions, row_inputs=row_inputs, softcap=softcap)
            else:
                outputs = vocabulary_loss(
                    *used.values(),
                    actions=actions,
                    row_loss=row_loss,
                    row_inputs=row_inputs,
                    softcap=softcap,
                    chunk_elements=chunk_elements,
                )
            (2.5 * outputs[0]).backward()
            gradients = [x.grad for x in used.values() if x is not None]
            results.append([x.detach() for x in outputs] + gradients)
        for expected, got in zip(*results, strict=True):
            torch.testing.assert_close(got, expected, rtol=0, atol=1e-11)

    @pytest.mark.parametrize("softcap", [None, 2.0])
    @pytest.mark.parametrize("name", ["z", "weight", "bias", "offset"])
    def test_gradient_equals_finite_differences(self, name, softcap):
        tensors, actions, row_inputs = draw(4)
        direction = torch.randn_like(tensors[name])

        def loss(step: float) -> tuple[torch.Tensor, torch.Tensor]:
            moved = {**tensors, name: (tensors[name] + step * direction).requires_grad_()}
            value, _, _ = vocabulary_loss(
                *moved.values(),
                actions=actions,
                row_loss=row_loss,
                row_inputs=row_inputs,
                softcap=softcap,
                chunk_elements=13,
            )
            return value, moved[name]

        value, leaf = loss(0.0)
        (gradient,) = torch.autograd.grad(value, leaf)
        numeric = (loss(1e-5)[0] - loss(-1e-5)[0]).item() / 2e-5
        assert (gradient * direction).sum().item() == pytest.approx(numeric, rel=1e-6, abs=1e-7)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_half_weights_accumulate_in_float32(self, dtype):
        tensors, actions, row_inputs = draw(rows=64, width=16, vocab=50, dtype=dtype)
        leaves = {name: x.clone().requires_grad_() for name, x in tensors.items()}
        call = partial(vocabulary_loss, actions=actions, row_loss=row_loss, row_inputs=row_inputs, chunk_elements=100)
        loss, q_a, lse = call(*leaves.values())
        loss.backward()
        assert loss.dtype == q_a.dtype == lse.dtype == torch.float32
        exact = {name: x.double().requires_grad_() for name, x in tensors.items()}
        exact_loss, exact_q_a, exact_lse = dense_loss(**exact, actions=actions, row_inputs=row_inputs)
        exact_loss.backward()
        torch.testing.assert_close(loss.double(), exact_loss, rtol=2e-2, atol=0)
        torch.testing.assert_close(lse.double(), exact_lse, rtol=2e-2, atol=2e-2)
        for name, leaf in leaves.items():
            assert leaf.grad.dtype == dtype
            error = (leaf.grad.double() - exact[name].grad).norm() / exact[name].grad.norm()
            assert error < 2e-2, name

    def test_large_outputs_stay_finite(self):
        tensors, actions, row_inputs = draw(dtype=torch.float32)
        z = (1e4 * tensors["z"]).requires_grad_()
        loss, _, lse = vocabulary_loss(
            z, tensors["weight"], None, None, actions=actions, row_loss=lambda q, lse: lse - q
        )
        loss.backward()
        assert torch.isfinite(lse).all() and torch.isfinite(loss) and torch.isfinite(z.grad).all()

    def test_only_wanted_gradients_are_made(self):
        tensors, actions, row_inputs = draw()
        z, bias = tensors["z"].requires_grad_(), tensors["bias"].requires_grad_()
        loss, q_a, lse = vocabulary_loss(
            z, tensors["weight"], bias, tensors["offset"], actions=actions, row_loss=row_loss, row_inputs=row_inputs
        )
        assert not q_a.requires_grad and not lse.requires_grad
        loss.backward()
        assert z.grad is not None and bias.grad is not None
        assert tensors["weight"].grad is None and tensors["offset"].grad is None

    def test_no_grad(self):
        tensors, actions, row_inputs = draw()
        arguments = {"actions": actions, "row_loss": row_loss, "row_inputs": row_inputs}
        leaves = [x.requires_grad_() for x in tensors.values()]
        with torch.no_grad():
            loss, q_a, lse = vocabulary_loss(*leaves, **arguments)
        assert not loss.requires_grad
        for got, expected in zip((loss, q_a, lse), vocabulary_loss(*leaves, **arguments), strict=True):
            assert torch.equal(got, expected.detach())

    def test_no_rows_is_zero_with_zero_gradients(self):
        tensors, actions, row_inputs = draw(rows=0)
        leaves = [x.requires_grad_() for x in tensors.values()]
        loss, q_a, lse = vocabulary_loss(*leaves, actions=actions, row_loss=row_loss, row_inputs=row_inputs)
        loss.backward()
        assert loss.item() == 0.0 and q_a.shape == lse.shape == (0,)
        for leaf in leaves:
            assert leaf.grad.shape == leaf.shape and not leaf.grad.any()

    def test_second_backward_raises(self):
        tensors, actions, row_inputs = draw()
        leaves = [x.requires_grad_() for x in tensors.values()]
        loss, _, _ = vocabulary_loss(*leaves, actions=actions, row_loss=row_loss, row_inputs=row_inputs)
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="already differentiated"):
            loss.backward()

    def test_second_derivative_raises(self):
        tensors, actions, row_inputs = draw()
        z = tensors["z"].requires_grad_()
        loss, _, _ = vocabulary_loss(
            z, tensors["weight"], None, None, actions=actions, row_loss=row_loss, row_inputs=row_inputs
        )
        with pytest.raises(RuntimeError, match="no second derivative"):
            torch.autograd.grad(loss, z, create_graph=True)

    def test_row_loss_may_ignore_a_statistic(self):
        tensors, actions, _ = draw()
        z = tensors["z"].requires_grad_()
        loss, _, _ = vocabulary_loss(
            z, tensors["weight"], None, None, actions=actions, row_loss=lambda q_a, lse: q_a.square()
        )
        (got,) = torch.autograd.grad(loss, z)
        (expected,) = torch.autograd.grad((z * tensors["weight"][actions]).sum(1).square().sum(), z)
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


def entropy_row_loss(q_a, lse, entropy, y, w):
    return row_loss(q_a, lse, y, w) + w * (0.7 * entropy + y * entropy.square() - 0.1 * entropy * q_a)


def dense_entropy_loss(z, weight, bias, offset, actions, row_inputs, softcap=None):
    q = z @ weight.t()
    q = q if bias is None else q + bias
    q = q if softcap is None else softcap * torch.tanh(q / softcap)
    q = q if offset is None else q + offset[:, None]
    q_a, lse = q.gather(1, actions[:, None])[:, 0], q.logsumexp(1)
    entropy = lse - (q.softmax(1) * q).sum(1)
    return entropy_row_loss(q_a, lse, entropy, *row_inputs).sum(), q_a, lse, entropy


class TestEntropy:
    @settings(max_examples=60, deadline=None)
    @given(
        seed=st.integers(0, 10_000),
        rows=st.integers(0, 9),
        bias=st.booleans(),
        offset=st.booleans(),
        softcap=st.sampled_from([None, 1.5]),
        chunk_elements=st.sampled_from([1, 13, 26, 40, 1 << 24]),
    )
    def test_equals_autograd(self, seed, rows, bias, offset, softcap, chunk_elements):
        tensors, actions, row_inputs = draw(rows, seed=seed)
        options = {"actions": actions, "row_inputs": row_inputs, "softcap": softcap}
        chunked = partial(vocabulary_loss, row_loss=entropy_row_loss, with_entropy=True, chunk_elements=chunk_elements)
        results = []
        for function in (dense_entropy_loss, chunked):
            leaves = {name: x.clone().requires_grad_() for name, x in tensors.items()}
            used = dict(leaves, bias=leaves["bias"] if bias else None, offset=leaves["offset"] if offset else None)
            outputs = function(**used, **options)
            (2.5 * outputs[0]).backward()
            gradients = [x.grad for x in used.values() if x is not None]
            results.append([x.detach() for x in outputs] + gradients)
        for expected, got in zip(*results, strict=True):
            torch.testing.assert_close(got, expected, rtol=0, atol=1e-11)

    @pytest.mark.parametrize("name", ["z", "weight", "bias", "offset"])
    def test_gradient_equals_finite_differences(self, name):
        tensors, actions, row_inputs = draw(4)
        direction = torch.randn_like(tensors[name])

        def loss(step: float) -> tuple[torch.Tensor, torch.Tensor]:
            moved = {**tensors, name: (tensors[name] + step * direction).requires_grad_()}
            options = {"softcap": 2.0, "with_entropy": True, "chunk_elements": 13}
            value, *_ = vocabulary_loss(
                **moved, actions=actions, row_loss=entropy_row_loss, row_inputs=row_inputs, **options
            )
            return value, moved[name]

        value, leaf = loss(0.0)
        (gradient,) = torch.autograd.grad(value, leaf)
        numeric = (loss(1e-5)[0] - loss(-1e-5)[0]).item() / 2e-5
        assert (gradient * direction).sum().item() == pytest.approx(numeric, rel=1e-6, abs=1e-7)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_half_weights_accumulate_in_float32(self, dtype):
        tensors, actions, row_inputs = draw(rows=64, width=16, vocab=50, dtype=dtype)
        leaves = {name: x.clone().requires_grad_() for name, x in tensors.items()}
        options = {"actions": actions, "row_inputs": row_inputs}
        loss, *_, entropy = vocabulary_loss(
            **leaves, row_loss=entropy_row_loss, with_entropy=True, chunk_elements=100, **options
        )
        loss.backward()
        exact = {name: x.double().requires_grad_() for name, x in tensors.items()}
        exact_loss, *_, exact_entropy = dense_entropy_loss(**exact, **options)
        exact_loss.backward()
        assert entropy.dtype == torch.float32 and not entropy.requires_grad
        torch.testing.assert_close(entropy.double(), exact_entropy, rtol=2e-2, atol=2e-2)
        for name, leaf in leaves.items():
            error = (leaf.grad.double() - exact[name].grad).norm() / exact[name].grad.norm()
            assert error < 2e-2, name

    def test_certain_rows_have_none(self):
        """A probability of 0 adds nothing to the entropy, nor to its gradient."""
        z = torch.tensor([[1e4], [0.0]], dtype=torch.float64, requires_grad=True)
        weight = torch.tensor([[1.0], [0.0], [-1.0]], dtype=torch.float64)
        loss, *_, entropy = vocabulary_loss(
            *(z, weight, None, None),
            actions=torch.tensor([0, 0]),
            row_loss=lambda q_a, lse, entropy: entropy,
            with_entropy=True,
        )
        loss.backward()
        assert entropy.tolist() == pytest.approx([0.0, 1.0986122886681098], abs=1e-12)
        assert z.grad.abs().max() < 1e-12


class TestVocabularyMaximumAndMean:
    @settings(max_examples=60, deadline=None)
    @given(
        seed=st.integers(0, 10_000),
        rows=st.integers(0, 9),
        bias=st.booleans(),
        offset=st.booleans(),
        vocab_size=st.sampled_from([None, 13, 9, 1]),
        chunk_elements=st.sampled_from([1, 13, 40, 1 << 24]),
    )
    def test_equal_dense(self, seed, rows, bias, offset, vocab_size, chunk_elements):
        tensors, _, _ = draw(rows, seed=seed)
        used = dict(tensors, bias=tensors["bias"] if bias else None, offset=tensors["offset"] if offset else None)
        q = tensors["z"] @ tensors["weight"].t() + (tensors["bias"] if bias else 0)
        q = (q + (tensors["offset"][:, None] if offset else 0))[:, :vocab_size]
        top, token = vocabulary_maximum(**used, vocab_size=vocab_size, chunk_elements=chunk_elements)
        torch.testing.assert_close(top, q.amax(1), rtol=0, atol=1e-12)
        assert torch.equal(token, q.argmax(1))
        mean = vocabulary_mean(**used, vocab_size=vocab_size)
        torch.testing.assert_close(mean, q.mean(1), rtol=0, atol=1e-12)

    def test_no_gradient(self):
        leaves = {name: x.requires_grad_() for name, x in draw()[0].items()}
        assert not vocabulary_maximum(**leaves)[0].requires_grad and not vocabulary_mean(**leaves).requires_grad

    def test_half_weights_give_float32(self):
        tensors, _, _ = draw(rows=64, width=16, vocab=50, dtype=torch.bfloat16)
        exact = {name: x.double() for name, x in tensors.items()}
        top, mean = vocabulary_maximum(**tensors)[0], vocabulary_mean(**tensors)
        assert top.dtype == mean.dtype == torch.float32
        torch.testing.assert_close(top.double(), vocabulary_maximum(**exact)[0], rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(mean.double(), vocabulary_mean(**exact), rtol=0, atol=1e-5)
