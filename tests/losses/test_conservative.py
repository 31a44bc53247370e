# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
import json
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_qrl.losses import conservative_regularization_loss
from hf_qrl.losses.conservative import conservative_loss, sum_of_squares


@pytest.fixture(scope="module")
def golden() -> dict:
    path = Path(__file__).parents[1] / "goldens" / "llama-qrlhf.json"
    return json.loads(path.read_text())["conservative_regularization_loss"]


class TestConservativeRegularizationLoss:
    @pytest.mark.parametrize("case", [0, 1])
    @pytest.mark.parametrize(
        ("dtype", "name", "rel", "tolerance"),
        [(torch.float64, "value_float64", 0, 1e-9), (torch.float32, "value", 1e-6, 1e-6)],
    )
    def test_equals_golden(self, golden, case, dtype, name, rel, tolerance):
        stored = golden["cases"][case]
        value = conservative_regularization_loss(
            torch.tensor(golden["q_values"], dtype=dtype),
            torch.tensor(golden["taken_tokens"]),
            torch.tensor(golden["action_mask"]),
            stored["effective_q_min"],
        )
        assert value.item() == pytest.approx(stored[name], rel=rel, abs=tolerance)

    @settings(max_examples=40, deadline=None)
    @given(seed=st.integers(0, 10_000), tokens=st.integers(2, 7), q_min=st.sampled_from([0.0, -2.5, 1.0]))
    def test_equals_mean_over_tokens_not_taken(self, seed, tokens, q_min):
        torch.manual_seed(seed)
        q, taken, mask = torch.randn(3, 5, tokens).double(), torch.randint(tokens, (3, 5)), torch.rand(3, 5) < 0.5
        steps = [
            sum((q[i, t, a].item() - q_min) ** 2 for a in range(tokens) if a != taken[i, t]) / (tokens - 1)
            for i in range(3)
            for t in range(5)
            if mask[i, t]
        ]
        expected = sum(steps) / max(1, len(steps))
        assert conservative_regularization_loss(q, taken, mask, q_min).item() == pytest.approx(expected, abs=1e-12)

    def test_no_action_is_zero_and_attached(self, golden):
        q = torch.tensor(golden["q_values"], requires_grad=True)
        loss = conservative_regularization_loss(q, torch.tensor(golden["taken_tokens"]), torch.zeros(2, 4).bool())
        loss.backward()
        assert loss.item() == 0.0 and not q.grad.any()

    def test_padding_neither_counts_nor_scales(self, golden):
        """The value pulled to is `reward_min` itself, however long the rows are padded; padding may hold any id."""
        q, taken = torch.tensor(golden["q_values"]), torch.tensor(golden["taken_tokens"])
        mask = torch.tensor(golden["action_mask"])
        padded = [torch.nn.functional.pad(x, (0, 3)) for x in (taken, mask)]
        padded[0][:, 4:] = -100
        longer = torch.nn.functional.pad(q, (0, 0, 0, 3), value=1e6)
        expected = conservative_regularization_loss(q, taken, mask, -1.0)
        assert conservative_regularization_loss(longer, *padded, -1.0).item() == pytest.approx(expected.item())

    def test_the_token_taken_is_spared(self):
        q = torch.zeros(1, 1, 3)
        q[0, 0, 1] = 5.0
        mask = torch.ones(1, 1).bool()
        assert conservative_regularization_loss(q, torch.tensor([[1]]), mask).item() == 0.0
        assert conservative_regularization_loss(q, torch.tensor([[0]]), mask).item() == 12.5

    @pytest.mark.parametrize(
        ("shapes", "message"),
        [
            (((2, 4), (2, 4), (2, 4)), "`q_values` must be"),
            (((2, 4, 1), (2, 4), (2, 4)), "at least two tokens"),
            (((2, 4, 6), (2, 5), (2, 4)), "`states_and_actions` must be"),
            (((2, 4, 6), (2, 4), (2,)), "`action_mask` must be"),
        ],
    )
    def test_shapes_that_do_not_fit_raise(self, shapes, message):
        q, taken, mask = (torch.zeros(shape) for shape in shapes)
        with pytest.raises(ValueError, match=message):
            conservative_regularization_loss(q, taken.long(), mask.bool())


def draw(rows=7, width=4, vocab=13, seed=0, dtype=torch.float64):
    """The four tensors of a projection, and a coefficient per row."""
    torch.manual_seed(seed)
    shapes = {"z": (rows, width), "weight": (vocab, width), "bias": (vocab,), "offset": (rows,)}
    tensors = {name: torch.randn(shape, dtype=torch.float64).to(dtype) for name, shape in shapes.items()}
    return tensors, torch.rand(rows, dtype=torch.float64)


def dense(z, weight, bias, offset, *, vocab_size=None):
    q = z @ weight.t()
    q = q if bias is None else q + bias
    q = q if offset is None else q + offset[:, None]
    return q[:, :vocab_size]


def dense_sum_of_squares(z, weight, bias, offset, *, coefficients, q_min, vocab_size=None):
    squares = (dense(z, weight, bias, offset, vocab_size=vocab_size) - q_min).square().sum(1)
    return coefficients @ squares, squares


class Shapes(TorchDispatchMode):
    """Records the shapes of all tensors that operations returned."""

    def __init__(self):
        super().__init__()
        self.seen: set[torch.Size] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.seen |= {x.shape for x in tree_leaves(out) if isinstance(x, torch.Tensor)}
        return out


@pytest.mark.parametrize("method", ["gram", "rows", None])
class TestSumOfSquares:
    @settings(max_examples=60, deadline=None)
    @given(
        seed=st.integers(0, 10_000),
        rows=st.integers(1, 9),
        bias=st.booleans(),
        offset=st.booleans(),
        q_min=st.sampled_from([0.0, -3.0, 0.7]),
        vocab_size=st.sampled_from([None, 13, 9, 2]),
        chunk_elements=st.sampled_from([1, 13, 40, 1 << 24]),
    )
    def test_equals_autograd(self, method, seed, rows, bias, offset, q_min, vocab_size, chunk_elements):
        tensors, coefficients = draw(rows, seed=seed)
        results = []
        for function in (
            dense_sum_of_squares,
            partial(sum_of_squares, method=method, chunk_elements=chunk_elements),
        ):
            leaves = {name: x.clone().requires_grad_() for name, x in tensors.items()}
            used = dict(leaves, bias=leaves["bias"] if bias else None, offset=leaves["offset"] if offset else None)
            outputs = function(**used, coefficients=coefficients, q_min=q_min, vocab_size=vocab_size)
            (2.5 * outputs[0]).backward()
            gradients = [x.grad for x in used.values() if x is not None]
            results.append([x.detach() for x in outputs] + gradients)
        for expected, got in zip(*results, strict=True):
            torch.testing.assert_close(got, expected, rtol=0, atol=1e-10)

    def test_every_derivative_equals_finite_differences(self, method):
        tensors, coefficients = draw(rows=3, width=2, vocab=5)
        leaves = {name: x.requires_grad_() for name, x in tensors.items()}

        def loss() -> torch.Tensor:
            return sum_of_squares(**leaves, coefficients=coefficients, q_min=-0.5, vocab_size=4, method=method)[0]

        gradients = dict(zip(leaves, torch.autograd.grad(loss(), list(leaves.values())), strict=True))
        for name, leaf in leaves.items():
            numeric = torch.zeros_like(leaf)
            with torch.no_grad():
                for entry, into in zip(leaf.view(-1), numeric.view(-1), strict=True):
                    entry += 1e-6
                    above = loss()
                    entry -= 2e-6
                    into.copy_((above - loss()) / 2e-6)
                    entry += 1e-6
            torch.testing.assert_close(gradients[name], numeric, rtol=1e-6, atol=1e-7)

    @pytest.mark.parametrize("held_by", ["bias", "offset", "z"])
    def test_values_close_to_a_large_q_min_keep_their_digits(self, method, held_by):
        """Q near -1000, of which q_min takes nearly all away, whichever part of the head holds the level."""
        tensors, coefficients = draw(rows=24, width=8, vocab=50)
        if held_by == "z":
            tensors["z"][:, 0], tensors["weight"][:, 0] = 10.0, tensors["weight"][:, 0] / 100 - 100
        else:
            tensors[held_by] -= 1000
        tensors = {name: x.float() for name, x in tensors.items()}
        coefficients = coefficients.float()
        results = []
        for function, dtype in ((sum_of_squares, torch.float32), (dense_sum_of_squares, torch.float64)):
            leaves = {name: x.to(dtype, copy=True).requires_grad_() for name, x in tensors.items()}
            keywords = {"method": method} if function is sum_of_squares else {}
            loss, squares = function(**leaves, coefficients=coefficients.to(dtype), q_min=-1001.0, **keywords)
            loss.backward()
            results.append([loss.detach(), squares.detach(), *(x.grad for x in leaves.values())])
        # A number near 1000 has an error of 6e-5 in float32, the values are a few apart.
        for got, expected in zip(*results, strict=True):
            assert (got.double() - expected).norm() / expected.norm() < 2e-4

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_half_weights_accumulate_in_float32(self, method, dtype):
        tensors, coefficients = draw(rows=64, width=16, vocab=50, dtype=dtype)
        leaves = {name: x.clone().requires_grad_() for name, x in tensors.items()}
        loss, squares = sum_of_squares(**leaves, coefficients=coefficients, q_min=-1.0, method=method)
        loss.backward()
        assert loss.dtype == squares.dtype == torch.float32
        exact = {name: x.double().requires_grad_() for name, x in tensors.items()}
        exact_loss, _ = dense_sum_of_squares(**exact, coefficients=coefficients, q_min=-1.0)
        exact_loss.backward()
        torch.testing.assert_close(loss.double(), exact_loss, rtol=2e-2, atol=0)
        for name, leaf in leaves.items():
            assert leaf.grad.dtype == dtype
            error = (leaf.grad.double() - exact[name].grad).norm() / exact[name].grad.norm()
            assert error < 2e-2, name

    def test_autocast_does_not_reach_it(self, method):
        tensors, coefficients = draw(rows=9, dtype=torch.float32)
        call = partial(sum_of_squares, **tensors, coefficients=coefficients, q_min=-1.0, method=method)
        expected = call()
        with torch.autocast("cpu", torch.bfloat16):
            assert all(torch.equal(x, y) for x, y in zip(call(), expected, strict=True))

    def test_only_wanted_gradients_are_made(self, method):
        tensors, coefficients = draw()
        tensors["z"].requires_grad_(), tensors["offset"].requires_grad_()
        loss, squares = sum_of_squares(**tensors, coefficients=coefficients, q_min=0.0, method=method)
        assert not squares.requires_grad
        loss.backward()
        assert tensors["z"].grad is not None and tensors["offset"].grad is not None
        assert tensors["weight"].grad is None and tensors["bias"].grad is None

    def test_no_grad(self, method):
        tensors, coefficients = draw()
        leaves = {name: x.requires_grad_() for name, x in tensors.items()}
        call = partial(sum_of_squares, **leaves, coefficients=coefficients, q_min=0.0, method=method)
        with torch.no_grad():
            loss, squares = call()
        assert not loss.requires_grad
        for got, expected in zip((loss, squares), call(), strict=True):
            torch.testing.assert_close(got, expected.detach(), rtol=0, atol=1e-12)

    def test_no_rows_is_zero_with_zero_gradients(self, method):
        tensors, coefficients = draw(rows=0)
        leaves = {name: x.requires_grad_() for name, x in tensors.items()}
        loss, squares = sum_of_squares(**leaves, coefficients=coefficients, q_min=-1.0, method=method)
        loss.backward()
        assert loss.item() == 0.0 and squares.shape == (0,)
        for leaf in leaves.values():
            assert leaf.grad.shape == leaf.shape and not leaf.grad.any()

    def test_is_differentiated_once(self, method):
        tensors, coefficients = draw()
        z = tensors["z"].requires_grad_()
        loss, _ = sum_of_squares(**tensors, coefficients=coefficients, q_min=0.0, method=method)
        with pytest.raises(RuntimeError, match="no second derivative"):
            torch.autograd.grad(loss, z, create_graph=True)
        torch.autograd.grad(loss, z, retain_graph=True)
        with pytest.raises(RuntimeError, match="already differentiated"):
            torch.autograd.grad(loss, z)


class TestMethodOfSumOfSquares:
    def shapes(self, rows: int, width: int, vocab: int, needs_weight: bool) -> set[torch.Size]:
        tensors, coefficients = draw(rows, width, vocab)
        tensors["z"].requires_grad_(), tensors["weight"].requires_grad_(needs_weight)
        with Shapes() as shapes:
            sum_of_squares(**tensors, coefficients=coefficients, q_min=0.0)[0].backward()
        return shapes.seen

    @pytest.mark.parametrize("needs_weight", [True, False])
    def test_gram_matrix_makes_no_tensor_of_rows_times_vocabulary(self, needs_weight):
        shapes = self.shapes(50, 8, 300, needs_weight)
        assert (8, 8) in shapes and max(shape.numel() for shape in shapes) == 8 * 300

    @pytest.mark.parametrize("needs_weight", [True, False])
    def test_few_rows_are_evaluated_as_rows(self, needs_weight):
        shapes = self.shapes(10, 40, 300, needs_weight)
        assert (10, 300) in shapes and (40, 40) not in shapes

    def test_unknown_method_raises(self):
        tensors, coefficients = draw()
        with pytest.raises(ValueError, match='"gram", "rows"'):
            sum_of_squares(**tensors, coefficients=coefficients, q_min=0.0, method="dense")


class TestConservativeLoss:
    @settings(max_examples=30, deadline=None)
    @given(seed=st.integers(0, 10_000), rows=st.integers(1, 9), vocab_size=st.sampled_from([None, 9]))
    def test_equals_definition(self, seed, rows, vocab_size):
        tensors, share = draw(rows, seed=seed)
        taken_ids = torch.randint(vocab_size or 13, (rows, 1))
        results = []
        for fast in (False, True):
            leaves = {name: x.clone().requires_grad_() for name, x in tensors.items()}
            q = dense(**leaves, vocab_size=vocab_size)
            if fast:
                taken = q.gather(1, taken_ids).squeeze(1)
                loss, c = conservative_loss(**leaves, taken=taken, share=share, q_min=-2.0, vocab_size=vocab_size)
            else:
                one = torch.ones(1, 1).bool()
                c = torch.stack(
                    [
                        conservative_regularization_loss(q[i, None, None], taken_ids[i, None], one, -2.0)
                        for i in range(rows)
                    ]
                )
                loss = share @ c
            loss.backward()
            results.append([loss.detach(), c.detach(), *(x.grad for x in leaves.values())])
        for expected, got in zip(*results, strict=True):
            torch.testing.assert_close(got, expected, rtol=0, atol=1e-10)

    def test_one_token_raises(self):
        tensors, share = draw()
        with pytest.raises(ValueError, match="one token only"):
            conservative_loss(**tensors, taken=share, share=share, q_min=0.0, vocab_size=1)
