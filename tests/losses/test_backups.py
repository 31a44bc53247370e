# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_qrl.losses.backups import bootstrapped_targets, discounted_sum, utterance_ends


def reference_targets(rewards, values, turns, gamma, final_value, target, n_step, discount_on) -> list[float]:
    """The definition, for one row of T real steps: lists of rewards and turns (T) and values (T + 1)."""
    steps = len(rewards)
    ends = [j == steps - 1 or turns[j + 1] != turns[j] for j in range(steps)]
    discounts = [gamma if discount_on == "token" or ends[j] else 1.0 for j in range(steps)]
    targets = []
    for j in range(steps):
        if target == "td":
            stop = min(j + n_step, steps)
        elif target == "utterance":
            stop = 1 + next(k for k in range(j, steps) if ends[k])
        else:
            stop = steps
        y, c = 0.0, 1.0
        for k in range(j, stop):
            y += c * rewards[k]
            c *= discounts[k]
        targets.append(y + c * (values[stop] if stop < steps else final_value))
    return targets


class TestBootstrappedTargets:
    @settings(max_examples=150, deadline=None)
    @given(
        seed=st.integers(0, 10_000),
        gamma=st.sampled_from([0.0, 0.5, 0.99, 1.0]),
        target=st.sampled_from(["td", "td", "utterance", "mc"]),
        n_step=st.integers(1, 6),
        discount_on=st.sampled_from(["token", "utterance"]),
        truncated=st.booleans(),
        next_rows=st.booleans(),
        turns=st.booleans(),
    )
    def test_equals_definition(
        self, make_batch, seed, gamma, target, n_step, discount_on, truncated, next_rows, turns
    ):
        batch = make_batch(seed, truncated=truncated, next_rows=next_rows, turns=turns)
        torch.manual_seed(seed)
        values = torch.randn(batch.states_ixs.shape, dtype=torch.float64)
        next_value = torch.randn(len(values), dtype=torch.float64)
        mask = batch.dones[:, :-1]
        has_next = batch.next_attention_mask.any(1) if next_rows else None
        n_step = n_step if target == "td" else 1
        y = bootstrapped_targets(
            batch.rewards,
            values,
            mask,
            gamma=gamma,
            truncated=batch.truncated,
            turn_ixs=batch.turn_ixs,
            next_value=next_value if next_rows else None,
            has_next=has_next,
            target=target,
            n_step=n_step,
            discount_on=discount_on,
        )
        for i in range(len(mask)):
            t = int(mask[i].sum())
            final = 0.0
            if truncated and batch.truncated[i]:
                final = values[i, t].item()
            if next_rows and has_next[i]:
                final = next_value[i].item()
            row_turns = batch.turn_ixs[i, :t].tolist() if turns else [0] * t
            expected = reference_targets(
                batch.rewards[i, :t].tolist(), values[i].tolist(), row_turns, gamma, final, target, n_step, discount_on
            )
            torch.testing.assert_close(y[i, :t], torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-12)

    def test_gradient_stops(self):
        values = torch.randn(1, 4, requires_grad=True)
        y = bootstrapped_targets(torch.ones(1, 3), values, torch.ones(1, 3), gamma=0.9)
        assert not y.requires_grad

    def test_terminal_state_is_worth_nothing(self):
        y = bootstrapped_targets(
            torch.tensor([[0.0, 2.0]]), torch.full((1, 3), 100.0), torch.ones(1, 2), gamma=1.0, truncated=None
        )
        assert y.tolist() == [[100.0, 2.0]]

    def test_truncated_row_bootstraps_from_last_state(self):
        values = torch.tensor([[1.0, 10.0, 100.0]])
        y = bootstrapped_targets(
            torch.zeros(1, 2), values, torch.ones(1, 2), gamma=0.5, truncated=torch.tensor([True])
        )
        assert y.tolist() == [[5.0, 50.0]]

    @pytest.mark.parametrize("option", [{"target": "lambda"}, {"discount_on": "word"}])
    def test_unknown_option_raises(self, option):
        with pytest.raises(ValueError, match=next(iter(option.values()))):
            bootstrapped_targets(torch.ones(1, 2), torch.ones(1, 3), torch.ones(1, 2), gamma=0.9, **option)


class TestDiscountedSum:
    @settings(max_examples=50, deadline=None)
    @given(seed=st.integers(0, 10_000), steps=st.integers(1, 40), gamma=st.sampled_from([0.0, 0.3, 0.99, 1.0]))
    def test_equals_backward_recursion(self, seed, steps, gamma):
        torch.manual_seed(seed)
        rewards = torch.randn(3, steps, dtype=torch.float64)
        discounts = torch.where(torch.rand(3, steps) < 0.8, gamma, 1.0).double()
        expected, y = torch.zeros_like(rewards), torch.zeros(3, dtype=torch.float64)
        for j in reversed(range(steps)):
            y = rewards[:, j] + discounts[:, j] * y
            expected[:, j] = y
        torch.testing.assert_close(discounted_sum(rewards, discounts), expected, rtol=0, atol=1e-12)

    def test_long_row_neither_under_nor_overflows(self):
        rewards = torch.zeros(1, 4096)
        rewards[0, -1] = 1.0
        y = discounted_sum(rewards, torch.full_like(rewards, 0.5))
        assert torch.isfinite(y).all()
        assert y[0, -3:].tolist() == [0.25, 0.5, 1.0]


class TestUtteranceEnds:
    def test_marks_last_step_of_each_turn(self):
        mask = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 0, 0, 0]])
        turns = torch.tensor([[0, 0, 1, 1, 0], [0, 1, 0, 0, 0]])
        assert utterance_ends(mask, turns).long().tolist() == [[0, 1, 0, 1, 0], [1, 1, 0, 0, 0]]

    def test_row_is_one_utterance_without_turns(self):
        mask = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0]])
        assert utterance_ends(mask, None).long().tolist() == [[0, 0, 1], [1, 0, 0], [0, 0, 0]]
