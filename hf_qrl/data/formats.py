# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""Which columns a dataset has, and which of the accepted formats they make."""

from datasets import Dataset, IterableDataset


TOKENIZED_COLUMNS = ("input_ids", "actions_ixs", "states_ixs", "dones", "rewards")
REWARD_COLUMNS = {
    "messages": ("reward", "rewards", "turn_rewards"),
    "prompt-completion": ("reward", "rewards", "turn_rewards", "label"),
    "samples": ("rewards",),
}
_CONTENT_COLUMNS = {
    "messages": {"messages"},
    "prompt-completion": {"prompt", "completion"},
    "samples": {"samples"},
}
_ACCEPTED = """
  prompt, completion, reward                  strings, or lists of {"role", "content"}
  prompt, completion, label                   a bool: +1 or -1
  messages, rewards (or turn_rewards)         one reward per assistant message
  messages, reward                            one reward for the episode
  samples, rewards                            trlX dialogues with one reward each
  input_ids, actions_ixs, states_ixs, dones, rewards   already tokenised
    (and decoder_input_ids, for an encoder-decoder model)"""


def column_names(dataset: Dataset | IterableDataset) -> list[str]:
    """
    Returns the columns of a dataset; those of a streaming dataset may have to be read off its first example.

    Raises:
        ValueError: If `dataset` is not a single `Dataset` or `IterableDataset`, or is empty.
    """
    if not isinstance(dataset, Dataset | IterableDataset):
        raise ValueError(
            f"The dataset must be a single `Dataset` or `IterableDataset`, got `{type(dataset).__name__}`. Of several "
            "splits pass one."
        )
    if isinstance(dataset, IterableDataset):
        first = next(iter(dataset.with_format(None)), None)
        if first is None:
            raise ValueError("The dataset is empty: it needs at least one row.")
        return list(first)
    if len(dataset) == 0:
        raise ValueError("The dataset is empty: it needs at least one row.")
    return dataset.column_names


def is_prepared(dataset: Dataset | IterableDataset) -> bool:
    """Whether the dataset already has the tokenised columns that [`DataCollatorForILQL`] reads."""
    return set(TOKENIZED_COLUMNS) <= set(column_names(dataset))


def detect_format(columns: list[str]) -> tuple[str, str]:
    """
    Returns the format (`"tokenized"`, `"messages"`, `"prompt-completion"` or `"samples"`) and the reward column.

    Raises:
        ValueError: If the columns make no accepted format, or hold more than one reward column.
    """
    if set(TOKENIZED_COLUMNS) <= set(columns):
        return "tokenized", "rewards"
    for name, content in _CONTENT_COLUMNS.items():
        rewards = [column for column in REWARD_COLUMNS[name] if column in columns]
        if content <= set(columns) and len(rewards) > 1:
            raise ValueError(f"Found several reward columns, {rewards}: keep the one to learn from, drop the others.")
        if content <= set(columns) and rewards:
            return name, rewards[0]
    raise ValueError(f"Missing columns: found {sorted(columns)}, accepted are the formats{_ACCEPTED}")


def is_conversational(dataset: Dataset | IterableDataset) -> bool:
    """Whether the rows are conversations, lists of `{"role", "content"}`, rather than strings or tokens."""
    name, _ = detect_format(column_names(dataset))
    if name == "prompt-completion":
        return isinstance(next(iter(dataset.with_format(None)))["prompt"], list)
    return name == "messages"
