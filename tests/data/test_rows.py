# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_qrl.data.rows import build_row, check_row


@st.composite
def episodes(draw):
    """Tokens numbered from 0, turns of own tokens somewhere among them, and a distinct reward for each turn."""
    lengths = draw(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), min_size=1, max_size=5))
    turns, position = [], 0
    for i, (observation, own) in enumerate(lengths):
        start = position + max(observation, 1 if i == 0 else 0)
        turns.append((start, start + own))
        position = start + own
    length = position + draw(st.integers(0, 3))
    return list(range(length)), turns, [float(2**i) for i in range(len(turns))]


class TestBuildRow:
    def test_terminated_row_ends_with_its_last_action(self):
        row = build_row([5, 6, 7, 8, 9, 4], [(1, 2), (3, 5)], [1.0, 2.0], terminated=True)
        assert row == {
            "input_ids": [5, 6, 7, 8, 9],
            "attention_mask": [1] * 5,
            "rewards": [1.0, 0.0, 2.0],
            "states_ixs": [0, 2, 3, 4],
            "actions_ixs": [0, 2, 3],
            "dones": [1, 1, 1, 0],
            "turn_ixs": [0, 1, 1],
            "truncated": False,
        }

    def test_truncated_row_keeps_its_final_observation(self):
        row = build_row([5, 6, 7, 8], [(1, 2)], [1.0], terminated=False)
        assert (row["input_ids"], row["states_ixs"], row["truncated"]) == ([5, 6, 7, 8], [0, 3], True)

    def test_token_at_position_0_is_no_action(self):
        assert build_row([5, 6], [(0, 2)], [1.0], terminated=True)["actions_ixs"] == [0]
        with pytest.raises(ValueError, match=r"Row 3: turn 0 has the reward 1.0 but no action"):
            build_row([5, 6, 7], [(0, 1), (2, 3)], [1.0, 2.0], terminated=True, where="Row 3")

    def test_right_cut_inside_a_turn_loses_its_reward(self):
        row = build_row(list(range(8)), [(1, 3), (4, 8)], [1.0, 2.0], terminated=True, max_length=6)
        assert row["actions_ixs"] == [0, 1, 3, 4]
        assert row["states_ixs"][-1] == 5
        assert row["rewards"] == [0.0, 1.0, 0.0, 0.0]
        assert row["truncated"]

    def test_right_cut_inside_an_observation_ends_at_the_last_own_state(self):
        row = build_row(list(range(9)), [(1, 3), (7, 9)], [1.0, 2.0], terminated=True, max_length=5)
        assert (row["input_ids"], row["states_ixs"], row["rewards"]) == ([0, 1], [0, 1], [0.0])

    def test_row_of_exactly_max_length_is_not_cut(self):
        row = build_row([5, 6, 7, 8], [(1, 3)], [1.0], terminated=True, max_length=3)
        assert (row["input_ids"], row["truncated"]) == ([5, 6, 7], False)

    def test_left_cut_leaves_terminated_as_it_was(self):
        row = build_row(
            list(range(8)), [(1, 3), (5, 8)], [1.0, 2.0], terminated=True, max_length=3, truncation_side="left"
        )
        assert (row["input_ids"], row["actions_ixs"], row["states_ixs"]) == ([5, 6, 7], [0, 1], [0, 1, 2])
        assert (row["rewards"], row["turn_ixs"], row["truncated"]) == ([0.0, 2.0], [1, 1], False)

    @pytest.mark.parametrize("side, max_length", [("right", 3), ("left", 1)])
    def test_row_without_actions_raises(self, side, max_length):
        with pytest.raises(ValueError, match=f"Row 7: no action tokens are left.*5 tokens.*max_length={max_length}"):
            build_row(
                list(range(5)),
                [(3, 5)],
                [1.0],
                terminated=True,
                max_length=max_length,
                truncation_side=side,
                where="Row 7",
            )

    @settings(max_examples=150, deadline=None)
    @given(
        episode=episodes(),
        terminated=st.booleans(),
        max_length=st.none() | st.integers(1, 30),
        side=st.sampled_from(["left", "right"]),
    )
    def test_properties(self, episode, terminated, max_length, side):
        input_ids, turns, rewards = episode
        own = {p for start, end in turns for p in range(start, end)}
        earned = {end - 1: reward for (_, end), reward in zip(turns, rewards, strict=True)}
        options = {"terminated": terminated, "max_length": max_length, "truncation_side": side}
        try:
            row = build_row(input_ids, turns, rewards, **options)
        except ValueError as error:
            assert "no action tokens are left" in str(error)
            assert max_length < len(input_ids)
            return
        check_row(row, len(input_ids), "Row 0")

        ids, actions, states = row["input_ids"], row["actions_ixs"], row["states_ixs"]
        length = len(ids)
        assert max_length is None or length <= max_length
        assert states[:-1] == actions
        assert states[-1] == length - 1
        assert all(0 <= p < length - 1 for p in actions)
        # A token's id is its position in the episode: the actions are own tokens, and rewards sit where they belong.
        for p, turn, reward in zip(actions, row["turn_ixs"], row["rewards"], strict=True):
            token = ids[p + 1]
            assert token in own
            assert turns[turn][0] <= token < turns[turn][1]
            assert reward == earned.get(token, 0.0)

        uncut = build_row(input_ids, turns, rewards, terminated=terminated)
        if max_length is None or len(uncut["input_ids"]) <= max_length:
            assert row == uncut
            assert sum(row["rewards"]) == sum(rewards)
        elif side == "right":
            assert row["truncated"]
            assert states[-1] in uncut["actions_ixs"]
            assert ids == uncut["input_ids"][:length]
        else:
            assert row["truncated"] == (not terminated)
            assert ids == uncut["input_ids"][-length:]


class TestCheckRow:
    ROW = {
        "input_ids": [5, 6, 7],
        "attention_mask": [1, 1, 1],
        "rewards": [0.0, 1.0],
        "states_ixs": [0, 1, 2],
        "actions_ixs": [0, 1],
        "dones": [1, 1, 0],
        "turn_ixs": [0, 0],
        "weight": 1.0,
    }

    def test_good_row(self):
        check_row(self.ROW, 8, "Row 0")

    @pytest.mark.parametrize(
        "change, match",
        [
            ({"actions_ixs": [], "rewards": [], "states_ixs": [0], "dones": [0]}, "no action tokens"),
            ({"actions_ixs": [1, 1]}, "increase strictly"),
            ({"actions_ixs": [0, 2]}, "increase strictly"),
            ({"actions_ixs": [-1, 1]}, "increase strictly"),
            ({"states_ixs": [0, 1, 3]}, r"`states_ixs` must be `actions_ixs` followed by"),
            ({"states_ixs": [0, 1]}, "`states_ixs` has 2 entries, 3 are needed"),
            ({"rewards": [1.0]}, "`rewards` has 1 entries, 2 are needed"),
            ({"attention_mask": [1]}, "`attention_mask` has 1 entries, 3 are needed"),
            ({"dones": [0, 0, 1]}, "1 = not terminal"),
            ({"rewards": [0.0, float("nan")]}, "finite"),
            ({"rewards": None}, "`rewards` is None"),
            ({"input_ids": [5, 6, 8]}, "token id 8 lies outside the vocabulary of 8"),
            ({"input_ids": [5, -1, 7]}, "token id -1"),
            ({"next_input_ids": [9]}, "token id 9"),
            ({"weight": 0.0}, "`weight` must be a positive"),
            ({"weight": 1e39}, "`weight` must be a positive"),
            ({"weight": 1e-46}, "`weight` must be a positive"),
            ({"states_ixs": [0, 0, 2]}, "`states_ixs` must be `actions_ixs` followed by"),
            ({"attention_mask": [0, 1, 1]}, "padded on the right"),
            ({"attention_mask": [1, 1, 0]}, "masks tokens"),
            ({"attention_mask": [0, 0, 0]}, "masks tokens"),
            ({"turn_ixs": [1, 0]}, "`turn_ixs` must not fall"),
            ({"turn_ixs": None}, "`turn_ixs` is None"),
            ({"next_input_ids": None}, "`next_input_ids` is None"),
            ({"next_input_ids": [5, 6], "next_attention_mask": [0, 0]}, "must be 1 for each of the 2 tokens"),
            ({"next_input_ids": [], "next_attention_mask": [1, 1]}, "must be 1 for each of the 0 tokens"),
            ({"next_input_ids": [5, 6, 7], "next_attention_mask": [0, 1, 1]}, "must be 1 for each of the 3 tokens"),
            ({"truncated": None}, "`truncated` must be True or False, got None"),
            ({"truncated": "False"}, "`truncated` must be True or False, got 'False'"),
        ],
    )
    def test_bad_row_raises(self, change, match):
        with pytest.raises(ValueError, match=f"Row 4: .*{match}"):
            check_row({**self.ROW, **change}, 8, "Row 4")

    def test_terminated_column_raises(self):
        row = {name: x for name, x in self.ROW.items() if name != "truncated"}
        with pytest.raises(ValueError, match="say `truncated`, not `terminated`"):
            check_row({**row, "terminated": False}, 8, "Row 4")
