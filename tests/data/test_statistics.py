# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
import math

import numpy as np
import pytest
from datasets import Dataset

from hf_qrl.data import return_statistics, value_bounds
from hf_qrl.data.rows import build_row, row_features


def make_rows(num_rows, seed, next_state=False):
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(num_rows):
        turns, position = [], 0
        for _ in range(rng.integers(1, 4)):
            start = position + rng.integers(1, 3)
            position = start + rng.integers(1, 4)
            turns.append((int(start), int(position)))
        rewards = rng.normal(size=len(turns)).tolist()
        row = build_row(list(range(position)), turns, rewards, terminated=bool(rng.integers(2)))
        row["weight"] = float(rng.uniform(0.5, 2))
        if next_state:
            row["next_input_ids"] = [1] * int(rng.integers(2))
            row["next_attention_mask"] = row["next_input_ids"]
        rows.append(row)
    return rows


def make_dataset(rows):
    return Dataset.from_list(rows, features=row_features("weight" in rows[0], "next_input_ids" in rows[0]))


def slow_mean_return(rows, gamma, discount_on):
    total = weights = 0.0
    for row in rows:
        g = 0.0
        turn_after = None
        for reward, turn in zip(reversed(row["rewards"]), reversed(row["turn_ixs"]), strict=True):
            g = reward + (gamma if discount_on == "token" or turn != turn_after else 1.0) * g
            turn_after = turn
            total += row["weight"] * g
            weights += row["weight"]
    return total / weights


class TestReturnStatistics:
    @pytest.mark.parametrize("discount_on", ["token", "utterance"])
    def test_against_slow_reference(self, discount_on):
        rows = make_rows(1100, seed=0)  # more than one batch
        statistics = return_statistics(make_dataset(rows), 0.9, discount_on)
        rewards = [reward for row in rows for reward in row["rewards"]]
        returns = [sum(row["rewards"][j:]) for row in rows for j in range(len(row["rewards"]))]
        assert statistics.num_rows == 1100
        assert statistics.num_actions == len(rewards)
        assert (statistics.reward_min, statistics.reward_max) == (min(rewards), max(rewards))
        assert statistics.return_min == pytest.approx(min(returns))
        assert statistics.return_max == pytest.approx(max(returns))
        assert statistics.mean_return == pytest.approx(slow_mean_return(rows, 0.9, discount_on))
        assert statistics.truncated_fraction == pytest.approx(np.mean([row["truncated"] for row in rows]))
        assert not statistics.pays_only_at_end
        assert not statistics.continues_elsewhere

    @pytest.mark.parametrize("gamma", [0.0, 0.9, 1.0])
    @pytest.mark.parametrize("discount_on", ["token", "utterance"])
    def test_smallest_discounted_return(self, discount_on, gamma):
        rows = make_rows(1100, seed=2)
        smallest = math.inf
        for row in rows:
            for start in range(len(row["rewards"])):
                g, discount = 0.0, 1.0
                for j in range(start, len(row["rewards"])):
                    g += discount * row["rewards"][j]
                    ends = row["turn_ixs"][j + 1 : j + 2] != [row["turn_ixs"][j]]
                    discount *= gamma if discount_on == "token" or ends else 1.0
                smallest = min(smallest, g)
        statistics = return_statistics(make_dataset(rows), gamma, discount_on)
        assert statistics.discounted_return_min == pytest.approx(smallest)

    def test_smallest_discounted_return_of_late_losses(self):
        """A loss counts less the earlier the state: the smallest return-to-go is that of the last step."""
        row = build_row(list(range(5)), [(1, 2), (3, 5)], [0.0, -2.0], terminated=True)
        statistics = return_statistics(make_dataset([row]), 0.5, "utterance")
        assert (statistics.discounted_return_min, statistics.return_min) == (-2.0, -2.0)
        row = build_row(list(range(5)), [(1, 2), (3, 5)], [-1.0, -2.0], terminated=True)
        statistics = return_statistics(make_dataset([row]), 0.25, "utterance")
        assert (statistics.discounted_return_min, statistics.return_min) == (-2.0, -3.0)

    def test_utterances_without_turn_ixs(self):
        rows = make_rows(50, seed=1)
        dataset = make_dataset(rows)
        expected = return_statistics(dataset, 0.5, "utterance").mean_return
        assert return_statistics(dataset.remove_columns("turn_ixs"), 0.5, "utterance").mean_return == expected

    @pytest.mark.parametrize(
        "rewards, terminated, next_ids, expected",
        [
            ([0.0, 1.0], True, [], True),
            ([0.0, 0.0], False, [], True),
            ([1.0, 1.0], True, [], False),
            ([0.0, 1.0], False, [], False),
            ([0.0, 1.0], True, [4], False),
        ],
    )
    def test_pays_only_at_end(self, rewards, terminated, next_ids, expected):
        row = build_row(list(range(5)), [(1, 2), (3, 5)], rewards, terminated=terminated)
        dataset = make_dataset([{**row, "next_input_ids": next_ids, "next_attention_mask": [1] * len(next_ids)}])
        statistics = return_statistics(dataset, 0.9)
        assert statistics.pays_only_at_end == expected
        assert statistics.continues_elsewhere == bool(next_ids)

    def test_bad_arguments_raise(self):
        dataset = make_dataset(make_rows(2, seed=0))
        with pytest.raises(ValueError, match="`discount_on` must be"):
            return_statistics(dataset, 0.9, "word")
        with pytest.raises(ValueError, match="empty"):
            return_statistics(dataset.select([]), 0.9)


class TestValueBounds:
    def bounds(self, rewards, gamma, next_ids=()):
        row = build_row(list(range(5)), [(1, 2), (3, 5)], rewards, terminated=True)
        row |= {"next_input_ids": list(next_ids), "next_attention_mask": [1] * len(next_ids)}
        return value_bounds(return_statistics(make_dataset([row]), gamma), gamma)

    def test_end_pays(self):
        assert self.bounds([0.0, 2.0], 0.9) == (0.0, 2.0)
        assert self.bounds([0.0, -2.0], 1.0) == (-2.0, 0.0)

    def test_paid_along_the_way(self):
        assert self.bounds([1.0, 2.0], 0.9) == pytest.approx((0.0, 20.0))
        assert self.bounds([1.0, 2.0], 1.0) == (0.0, 3.0)

    def test_undiscounted_windows_have_no_known_range(self):
        assert self.bounds([1.0, 2.0], 1.0, next_ids=[3]) == (-math.inf, math.inf)
        assert self.bounds([1.0, 2.0], 0.9, next_ids=[3]) == pytest.approx((0.0, 20.0))

    def test_undiscounted_truncated_rows_have_no_known_range(self):
        row = build_row([1, 2, 3], [(1, 3)], [1.0], terminated=False)
        assert value_bounds(return_statistics(make_dataset([row]), 1.0), 1.0) == (-math.inf, math.inf)

    def test_several_rewards_in_an_utterance(self):
        """Undiscounted within the utterance, they add up before any discount."""
        row = build_row([1, 2, 3, 4], [(1, 4)], [0.0], terminated=True)
        row["rewards"] = [2.0, 1.0, -1.0]
        statistics = return_statistics(make_dataset([row]), 0.5, "utterance")
        assert (statistics.reward_min, statistics.reward_max) == (-1.0, 2.0)  # 2 + 1 - 1, 1 - 1, -1
        assert value_bounds(statistics, 0.5) == (-2.0, 4.0)
        statistics = return_statistics(make_dataset([row]), 0.5, "token")
        assert value_bounds(statistics, 0.5) == (-2.0, 4.0)
