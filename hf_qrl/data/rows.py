# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""A tokenised episode becomes a row: positions of states and actions, rewards, and what a cut leaves of them.

The invariant behind the cuts: a reward sits on the last token of the turn that earned it, or nowhere.
"""

from typing import Any

import numpy as np
from datasets import Features, List, Value


def row_features(weight: bool = False, next_state: bool = False, decoder: bool = False) -> Features:
    """Returns the columns of a prepared dataset; `weight` and the next state's context are there only where used."""
    features = {
        "input_ids": List(Value("int32")),
        "attention_mask": List(Value("int8")),
        **({"decoder_input_ids": List(Value("int32"))} if decoder else {}),
        "rewards": List(Value("float64")),
        "states_ixs": List(Value("int32")),
        "actions_ixs": List(Value("int32")),
        "dones": List(Value("int8")),
        "turn_ixs": List(Value("int32")),
        "truncated": Value("bool"),
    }
    if weight:
        features["weight"] = Value("float64")
    if next_state:
        features["next_input_ids"] = List(Value("int32"))
        features["next_attention_mask"] = List(Value("int8"))
    return Features(features)


def build_row(
    input_ids: list[int],
    turns: list[tuple[int, int]],
    rewards: list[float],
    *,
    terminated: bool,
    max_length: int | None = None,
    truncation_side: str = "right",
    where: str = "Row 0",
) -> dict[str, Any]:
    """
    Builds the row of one episode.

    The action that emits the token at position `p + 1` has the state `p`. A terminated row ends with its last action;
    the final state of a truncated one is its last token.

    Args:
        input_ids (`list[int]` of length `L`):
            Tokens of the episode.
        turns (`list[tuple[int, int]]`):
            Positions `[start, end)` of the model's own tokens, one pair per turn, in order.
        rewards (`list[float]`):
            One reward per turn, put on the turn's last token.
        terminated (`bool`):
            Whether the episode ended, as opposed to having been cut off.
        max_length (`int`, *optional*):
            Largest number of tokens.
        truncation_side (`str`, *optional*, defaults to `"right"`):
            `"right"` keeps the beginning: the row is then truncated, and its last own-token state becomes the final
            state. `"left"` keeps the end.
        where (`str`, *optional*, defaults to `"Row 0"`):
            Name of the row in error messages.

    Returns:
        `dict`: `input_ids`, `attention_mask` (L), `rewards`, `actions_ixs`, `turn_ixs` (T), `states_ixs`, `dones`
        (T + 1) and `truncated`.

    Raises:
        ValueError: If no action is left, or a rewarded turn has no action that could earn its reward.
    """
    # (state, turn, reward) of every action. A token at position 0 has no state, so it is context.
    actions = []
    for turn, ((start, end), reward) in enumerate(zip(turns, rewards, strict=True)):
        turn_states = range(max(start, 1) - 1, end - 1)
        if not turn_states and reward != 0:
            raise ValueError(
                f"{where}: turn {turn} has the reward {reward} but no action: it has no token of its own that another "
                "token precedes. Give it some text, or put a prompt before it."
            )
        actions += [(state, turn, reward if state == end - 2 else 0.0) for state in turn_states]
    num_actions = len(actions)

    if actions and terminated:
        input_ids = input_ids[: actions[-1][0] + 2]
    length, truncated = len(input_ids), not terminated
    final_state = length - 1

    if max_length is not None and length > max_length:
        if truncation_side == "right":
            actions = [action for action in actions if action[0] < max_length]
            if actions:
                final_state = actions.pop()[0]
                input_ids, truncated = input_ids[: final_state + 1], True
        else:
            offset = length - max_length
            actions = [(p - offset, turn, reward) for p, turn, reward in actions if p >= offset]
            input_ids, final_state = input_ids[offset:], max_length - 1

    if not actions:
        raise ValueError(
            f"{where}: no action tokens are left: the row has {length} tokens, {num_actions} actions before the cut, "
            f"max_length={max_length} (truncation side {truncation_side!r}). Raise max_length, or drop the row."
        )
    states, turn_ixs, token_rewards = (list(column) for column in zip(*actions, strict=True))
    return {
        "input_ids": input_ids,
        "attention_mask": [1] * len(input_ids),
        "rewards": token_rewards,
        "states_ixs": [*states, final_state],
        "actions_ixs": states,
        "dones": [1] * len(states) + [0],
        "turn_ixs": turn_ixs,
        "truncated": truncated,
    }


def check_token_ids(input_ids: list[int], vocab_size: int | None, where: str) -> None:
    """Raises a `ValueError` if a token id lies outside the model's vocabulary."""
    if not input_ids:
        return
    low, high = min(input_ids), max(input_ids)
    if low < 0 or (vocab_size is not None and high >= vocab_size):
        raise ValueError(
            f"{where}: token id {low if low < 0 else high} lies outside the vocabulary of {vocab_size} tokens. "
            "Use the tokenizer of the model, or resize the model's embeddings."
        )


def check_weight(weight: Any, where: str) -> float:
    """Returns the weight of a row, or raises a `ValueError` if it is not a positive finite number."""
    # Sums of weights are taken in float32.
    if not isinstance(weight, int | float) or not 1e-30 < weight < 1e30:
        raise ValueError(f"{where}: `weight` must be a positive finite number, got {weight!r}.")
    return float(weight)


def check_row(
    row: dict[str, Any],
    vocab_size: int | None,
    where: str,
    max_length: int | None = None,
    decoder_start_token_id: int | None = None,
) -> None:
    """
    Checks a row that was tokenised elsewhere.

    Args:
        row (`dict`):
            Row with `input_ids`, `rewards`, `states_ixs`, `actions_ixs`, `dones` and optionally the other columns of
            [`ILQLBatch`]; for an encoder-decoder model that of an [`ILQLSeq2SeqBatch`].
        vocab_size (`int`, *optional*):
            Size of the model's vocabulary.
        where (`str`):
            Name of the row in error messages.
        max_length (`int`, *optional*):
            Largest number of tokens.
        decoder_start_token_id (`int`, *optional*):
            First token of the decoder, if the model has one.

    Raises:
        ValueError: If lengths, index ranges, the coding of `dones`, rewards or token ids are wrong.
    """
    # States and actions are positions in these tokens.
    tokens = "input_ids" if decoder_start_token_id is None else "decoder_input_ids"
    for name in dict.fromkeys((tokens, "input_ids", "actions_ixs", "states_ixs", "dones", "rewards")):
        if row[name] is None:
            raise ValueError(f"{where}: `{name}` is None. Every tokenised row needs it.")
    if len(row["input_ids"]) == 0:
        raise ValueError(f"{where}: `input_ids` is empty. Every tokenised row needs tokens to read.")
    length, num_actions = len(row[tokens]), len(row["actions_ixs"])
    if num_actions == 0:
        raise ValueError(f"{where}: no action tokens. Drop the row.")
    expected = {
        "rewards": num_actions,
        "states_ixs": num_actions + 1,
        "dones": num_actions + 1,
        "turn_ixs": num_actions,
        "attention_mask": len(row["input_ids"]),
    }
    for name in ("turn_ixs", "attention_mask", "next_input_ids", "next_attention_mask"):
        if name in row and row[name] is None:
            raise ValueError(f"{where}: `{name}` is None. Give every row one, or leave the column out.")
    for name, count in expected.items():
        if name in row and len(row[name]) != count:
            raise ValueError(
                f"{where}: `{name}` has {len(row[name])} entries, {count} are needed for {len(row['input_ids'])} "
                f"tokens and {num_actions} actions (states_ixs and dones have one entry more than actions_ixs)."
            )
    if decoder_start_token_id is not None and row[tokens][:1] != [decoder_start_token_id]:
        raise ValueError(
            f"{where}: `decoder_input_ids` must begin with the decoder start token {decoder_start_token_id}, as "
            f"generation does, got {row[tokens]}. Put it in front, with the first token of the output as an action at "
            "position 0 and every other position one higher (`make_experience_seq2seq` does, given the token)."
        )
    actions, states = np.asarray(row["actions_ixs"]), np.asarray(row["states_ixs"])
    if actions[0] < 0 or actions[-1] >= length - 1 or np.any(np.diff(actions) <= 0):
        raise ValueError(
            f"{where}: `actions_ixs` must increase strictly within [0, {length - 2}] (an action at p emits the token "
            f"at p + 1, and the row has {length} `{tokens}`), got {row['actions_ixs']}."
        )
    if not np.array_equal(states[:-1], actions) or not actions[-1] < states[-1] < length:
        raise ValueError(
            f"{where}: `states_ixs` must be `actions_ixs` followed by the position of the final state, at most "
            f"{length - 1}, got {row['states_ixs']}."
        )
    if "attention_mask" in row and np.any(np.diff(np.asarray(row["attention_mask"])) > 0):
        raise ValueError(f"{where}: `attention_mask` masks tokens on the left. Rows are padded on the right.")
    if "attention_mask" in row and 0 in row["attention_mask"]:
        raise ValueError(f"{where}: `attention_mask` masks tokens. Rows hold no padding: leave those tokens out.")
    if "turn_ixs" in row and np.any(np.diff(np.asarray(row["turn_ixs"])) < 0):
        raise ValueError(f"{where}: `turn_ixs` must not fall, got {row['turn_ixs']}.")
    if "next_attention_mask" in row and list(row["next_attention_mask"]) != [1] * len(row["next_input_ids"]):
        raise ValueError(
            f"{where}: `next_attention_mask` must be 1 for each of the {len(row['next_input_ids'])} tokens of "
            f"`next_input_ids`, got {row['next_attention_mask']}. A row without a next state has none of either."
        )
    if "terminated" in row and "truncated" not in row:
        raise ValueError(f"{where}: tokenised rows say `truncated`, not `terminated`. Add that column.")
    if "truncated" in row and not isinstance(row["truncated"], bool):
        raise ValueError(f"{where}: `truncated` must be True or False, got {row['truncated']!r}.")
    longest = max(length, len(row["input_ids"]))
    if max_length is not None and longest > max_length:
        raise ValueError(
            f"{where}: {longest} tokens are more than max_length={max_length}, and tokenised rows are not cut. Cut "
            "them yourself, or raise `max_length`."
        )
    if list(row["dones"]) != [1] * num_actions + [0]:
        raise ValueError(
            f"{where}: `dones` must be 1 for every action and 0 for the final state (1 = not terminal), got "
            f"{row['dones']}. A truncated row is marked in the `truncated` column."
        )
    if not np.all(np.isfinite(np.asarray(row["rewards"], dtype=np.float64))):
        raise ValueError(f"{where}: `rewards` must hold finite numbers, got {row['rewards']}. Fix or drop the row.")
    for name in ("input_ids", "decoder_input_ids", "next_input_ids"):
        if name in row:
            check_token_ids(row[name], vocab_size, where)
    if "weight" in row:
        check_weight(row["weight"], where)
