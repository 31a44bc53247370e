# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""Rows to batches. Collators return dicts keyed by the batch's fields: that is what a Trainer moves to a device."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers.data.data_collator import DataCollatorMixin


@dataclass
class DataCollatorForILQL(DataCollatorMixin):
    """
    Pads rows on the right into the fields of [`ILQLBatch`].

    Every example needs `input_ids`, `rewards`, `states_ixs`, `actions_ixs` and `dones`; a missing one is a `KeyError`.
    `attention_mask` defaults to ones over the tokens. `truncated`, `weight`, `turn_ixs` and `next_input_ids` are in
    the batch if they are in the examples. A row with empty `next_input_ids` has a `next_attention_mask` of zeros.

    Args:
        pad_token_id (`int`, *optional*, defaults to `0`):
            Token that `input_ids` and `next_input_ids` are padded with. Everything else is padded with 0.
        pad_to_multiple_of (`int`, *optional*):
            Pads the token fields to a multiple of this length.
        return_tensors (`str`, *optional*, defaults to `"pt"`):
            Type of the tensors. Only `"pt"` is supported.

    Examples:

    ```python
    >>> from hf_qrl.data import DataCollatorForILQL

    >>> collator = DataCollatorForILQL(pad_token_id=9)
    >>> examples = [
    ...     {
    ...         "input_ids": [1, 2, 3, 4],
    ...         "attention_mask": [1, 1, 1, 1],
    ...         "rewards": [0.0, 0.0, 1.0],
    ...         "states_ixs": [0, 1, 2, 3],
    ...         "actions_ixs": [0, 1, 2],
    ...         "dones": [1, 1, 1, 0],
    ...         "truncated": False,
    ...     },
    ...     {
    ...         "input_ids": [5, 6, 7],
    ...         "attention_mask": [1, 1, 1],
    ...         "rewards": [-1.0],
    ...         "states_ixs": [1, 2],
    ...         "actions_ixs": [1],
    ...         "dones": [1, 0],
    ...         "truncated": True,
    ...     },
    ... ]
    >>> collator(examples)
    {'input_ids': tensor([[1, 2, 3, 4],
            [5, 6, 7, 9]]), 'attention_mask': tensor([[1, 1, 1, 1],
            [1, 1, 1, 0]]), 'rewards': tensor([[ 0.,  0.,  1.],
            [-1.,  0.,  0.]]), 'states_ixs': tensor([[0, 1, 2, 3],
            [1, 2, 0, 0]]), 'actions_ixs': tensor([[0, 1, 2],
            [1, 0, 0]]), 'dones': tensor([[1, 1, 1, 0],
            [1, 0, 0, 0]]), 'truncated': tensor([False,  True])}
    ```
    """

    pad_token_id: int = 0
    pad_to_multiple_of: int | None = None
    return_tensors: str = "pt"

    def torch_call(self, examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        present = examples[0].keys()
        batch = self._sequences(examples)
        batch["rewards"] = _pad([example["rewards"] for example in examples], dtype=np.float32)
        for name in ("states_ixs", "actions_ixs", "dones"):
            batch[name] = _pad([example[name] for example in examples])
        if "truncated" in present:
            batch["truncated"] = _stack(examples, "truncated", bool, torch.bool)
        if "weight" in present:
            batch["weight"] = _stack(examples, "weight", float, torch.float32)
        if "turn_ixs" in present:
            batch["turn_ixs"] = _pad([example["turn_ixs"] for example in examples])
        if "next_input_ids" in present:
            batch |= self._tokens(examples, "next_input_ids", "next_attention_mask")
        return batch

    def _sequences(self, examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """The tokens of the rows themselves."""
        if "decoder_input_ids" in examples[0]:
            raise ValueError(
                "The rows have `decoder_input_ids`, which a causal language model does not read. Collate them with "
                "`DataCollatorForSeq2SeqILQL`, for an encoder-decoder model."
            )
        return self._tokens(examples, "input_ids", "attention_mask")

    def _tokens(self, examples: list[dict[str, Any]], ids: str, mask: str) -> dict[str, torch.Tensor]:
        multiple = self.pad_to_multiple_of or 1
        if mask in examples[0]:
            masks = [example[mask] for example in examples]
        else:
            masks = [[1] * len(example[ids]) for example in examples]
        return {
            ids: _pad([example[ids] for example in examples], self.pad_token_id, multiple),
            mask: _pad(masks, 0, multiple),
        }


@dataclass
class DataCollatorForSeq2SeqILQL(DataCollatorForILQL):
    """
    Pads rows on the right into the fields of [`ILQLSeq2SeqBatch`], those of the encoder and of the decoder each to a
    width of their own; otherwise as [`DataCollatorForILQL`].

    The decoder needs no mask: it is causal, so no token sees the padding behind it.

    Args:
        pad_token_id (`int`, *optional*, defaults to `0`):
            Token that `input_ids`, `decoder_input_ids` and `next_input_ids` are padded with. Everything else is padded
            with 0.
        pad_to_multiple_of (`int`, *optional*):
            Pads the token fields to a multiple of this length.
        return_tensors (`str`, *optional*, defaults to `"pt"`):
            Type of the tensors. Only `"pt"` is supported.

    Raises:
        ValueError: If the rows have no `decoder_input_ids`.

    Examples:

    The decoder starts with token 0, and every token after it is an action.

    ```python
    >>> from hf_qrl.data import DataCollatorForSeq2SeqILQL

    >>> collator = DataCollatorForSeq2SeqILQL(pad_token_id=9)
    >>> examples = [
    ...     {
    ...         "input_ids": [1, 2, 3],
    ...         "attention_mask": [1, 1, 1],
    ...         "decoder_input_ids": [0, 4],
    ...         "rewards": [1.0],
    ...         "states_ixs": [0, 1],
    ...         "actions_ixs": [0],
    ...         "dones": [1, 0],
    ...         "truncated": False,
    ...     },
    ...     {
    ...         "input_ids": [5, 6],
    ...         "attention_mask": [1, 1],
    ...         "decoder_input_ids": [0, 7, 8],
    ...         "rewards": [0.0, -1.0],
    ...         "states_ixs": [0, 1, 2],
    ...         "actions_ixs": [0, 1],
    ...         "dones": [1, 1, 0],
    ...         "truncated": True,
    ...     },
    ... ]
    >>> collator(examples)
    {'input_ids': tensor([[1, 2, 3],
            [5, 6, 9]]), 'attention_mask': tensor([[1, 1, 1],
            [1, 1, 0]]), 'decoder_input_ids': tensor([[0, 4, 9],
            [0, 7, 8]]), 'rewards': tensor([[ 1.,  0.],
            [ 0., -1.]]), 'states_ixs': tensor([[0, 1, 0],
            [0, 1, 2]]), 'actions_ixs': tensor([[0, 0],
            [0, 1]]), 'dones': tensor([[1, 0, 0],
            [1, 1, 0]]), 'truncated': tensor([False,  True])}
    ```
    """

    def _sequences(self, examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        if "decoder_input_ids" not in examples[0]:
            raise ValueError(
                f"The rows have no `decoder_input_ids`, which an encoder-decoder model needs; they have "
                f"{sorted(examples[0])}. Prepare them with a `decoder_start_token_id`, or use `DataCollatorForILQL` "
                "with a causal model."
            )
        decoder = [example["decoder_input_ids"] for example in examples]
        batch = self._tokens(examples, "input_ids", "attention_mask")
        return {**batch, "decoder_input_ids": _pad(decoder, self.pad_token_id, self.pad_to_multiple_of or 1)}


def _pad(rows: list, value: int = 0, multiple: int = 1, dtype: type[np.generic] = np.int64) -> torch.Tensor:
    """Pads rows on the right to one width: the longest row's, at least 1, rounded up to `multiple`."""
    lengths = np.array([len(row) for row in rows])
    width = -(-max(1, lengths.max()) // multiple) * multiple
    padded = np.full((len(rows), width), value, dtype)
    # All at once: hundreds of assignments of short rows take as long as a small model's forward pass.
    padded[np.arange(width) < lengths[:, None]] = np.concatenate([np.asarray(row, dtype) for row in rows])
    return torch.from_numpy(padded)


def _stack(examples: list[dict[str, Any]], name: str, convert: Callable, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor([convert(example[name]) for example in examples], dtype=dtype)
