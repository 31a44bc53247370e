# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
import numpy as np
import pytest
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st

from hf_qrl.data import episode_returns, standardization
from hf_qrl.data.rewards import standardize, turn_rewards


class TestTurnRewards:
    def test_kinds(self):
        assert turn_rewards(2, "reward", 3, "Row 0") == [0.0, 0.0, 2.0]
        assert turn_rewards(True, "label", 1, "Row 0") == [1.0]
        assert turn_rewards(False, "label", 2, "Row 0") == [0.0, -1.0]
        assert turn_rewards([1, 2.5], "turn_rewards", 2, "Row 0") == [1.0, 2.5]

    @pytest.mark.parametrize(
        "value, column, match",
        [
            ([1.0], "rewards", "got 1 rewards for 2 assistant turns"),
            (1.0, "rewards", "must be a list"),
            (None, "rewards", "must be a list"),
            ([1.0, None], "rewards", "finite numbers, got None"),
            ([1.0, float("nan")], "turn_rewards", "finite numbers, got nan"),
            (float("inf"), "reward", "finite numbers, got inf"),
            (None, "reward", "finite numbers, got None"),
            (0.5, "label", "must be True or False, got 0.5"),
        ],
    )
    def test_bad_rewards_raise(self, value, column, match):
        with pytest.raises(ValueError, match=f"Row 5: .*{match}"):
            turn_rewards(value, column, 2, "Row 5")


class TestStandardization:
    def test_unbiased(self):
        mean, std = standardization(np.array([1.0, -2.0, 4.0]))
        assert (mean, std) == (1.0, 3.0 + np.finfo(float).eps)

    @pytest.mark.parametrize("returns", [[3.0], [0.1] * 3, [0.0, 0.0]])
    def test_without_a_scale(self, returns):
        assert standardization(np.array(returns)) == (pytest.approx(returns[0]), 1.0)

    @given(st.lists(st.lists(st.floats(-10, 10), min_size=1, max_size=4), min_size=2, max_size=6))
    def test_standardized_returns(self, episodes):
        returns = np.array([sum(rewards) for rewards in episodes])
        mean, std = standardization(returns)
        out = [sum(standardize(rewards, mean, std, terminated=True)) for rewards in episodes]
        np.testing.assert_allclose(out, (returns - mean) / std, rtol=1e-6, atol=1e-6 * max(1, 1 / std))

    def test_offset_is_paid_by_terminated_episodes_only(self):
        assert standardize([2.0, 4.0], 1.0, 2.0, terminated=True) == [1.0, 1.5]
        assert standardize([2.0, 4.0], 1.0, 2.0, terminated=False) == [1.0, 2.0]
        assert standardize([2.0, 4.0], 1.0, None, terminated=True) == [2.0, 3.0]
        assert standardize([2.0, 4.0], None, None, terminated=True) == [2.0, 4.0]


class TestEpisodeReturns:
    MESSAGES = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]

    @pytest.mark.parametrize(
        "columns, expected",
        [
            ({"prompt": ["a"] * 2, "completion": ["b"] * 2, "reward": [1, 2]}, [1, 2]),
            ({"prompt": ["a"] * 2, "completion": ["b"] * 2, "label": [True, False]}, [1, -1]),
            ({"messages": [MESSAGES] * 2, "rewards": [[1.0], [2.0, 3.0]]}, [1, 5]),
            ({"messages": [MESSAGES], "turn_rewards": [[1.5]]}, [1.5]),
            ({"samples": ["a", "b"], "rewards": [1.0, 2.0]}, [1, 2]),
            (
                {
                    "input_ids": [[1, 2]],
                    "actions_ixs": [[0]],
                    "states_ixs": [[0, 1]],
                    "dones": [[1, 0]],
                    "rewards": [[4]],
                },
                [4],
            ),
        ],
    )
    def test_formats(self, columns, expected):
        returns = episode_returns(Dataset.from_dict(columns))
        assert returns.dtype == np.float64
        assert returns.tolist() == expected

    def test_bad_reward_raises(self):
        dataset = Dataset.from_dict({"prompt": ["a"] * 2, "completion": ["b"] * 2, "reward": [1.0, None]})
        with pytest.raises(ValueError, match="Row 1: `reward` must hold finite numbers"):
            episode_returns(dataset)

    def test_streaming_raises(self):
        dataset = Dataset.from_dict({"samples": ["a"], "rewards": [1.0]}).to_iterable_dataset()
        with pytest.raises(ValueError, match="pass `reward_mean` and `reward_std`"):
            episode_returns(dataset)
