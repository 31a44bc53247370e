# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""A dict of columns with equal numbers of rows, with NeMo-RL's names and semantics."""

from collections import UserDict
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any, Generic, Self, TypeVar

import torch
from torch import Tensor, distributed


DictT = TypeVar("DictT", bound=Mapping[str, Any])


class BatchedDataDict(UserDict, Generic[DictT]):
    """
    Columns of a batch: tensors whose first dimension is the row, or lists with one item per row.

    Two habits of dicts are easily overlooked: `len` is the number of columns (`size` is the number of rows), and
    `copy` is shallow, so that the copy shares its tensors and lists with the original.

    Examples:

    ```python
    >>> batch = BatchedDataDict({"ids": torch.tensor([[1, 2], [3, 4]]), "text": ["a", "b"]})
    >>> batch.size, len(batch)
    (2, 2)
    >>> batch.repeat_interleave(2)["text"]
    ['a', 'a', 'b', 'b']
    ```
    """

    @classmethod
    def from_batches(
        cls, batches: Sequence[Mapping[str, Any]], pad_value_dict: Mapping[str, int | float] | None = None
    ) -> Self:
        """
        Concatenates the rows of several batches.

        Args:
            batches (`Sequence[Mapping]`):
                Batches with the same keys. Empty ones are passed over.
            pad_value_dict (`Mapping[str, int | float]`, *optional*):
                Padding of a key's tensors, 0 for keys that are not in it.

        Returns:
            `BatchedDataDict`: the rows of all, keys in sorted order. Lists are joined, tensors concatenated; those of
            two and more dimensions are padded on the right of dimension 1 to the longest.

        Raises:
            KeyError: If a batch lacks a key that another one has.
            TypeError: If a column is neither a tensor nor a list.
        """
        batches = [batch for batch in batches if len(batch)]
        padding = pad_value_dict or {}
        merged = cls()
        for key in sorted({key for batch in batches for key in batch}):
            for i, batch in enumerate(batches):
                if key not in batch:
                    raise KeyError(f"Batch {i} has no column {key!r}, its columns are {sorted(batch)}.")
            columns = [batch[key] for batch in batches]
            if all(isinstance(column, Tensor) for column in columns):
                merged[key] = torch.cat(_padded(columns, padding.get(key, 0)))
            elif all(isinstance(column, list) for column in columns):
                merged[key] = [item for column in columns for item in column]
            else:
                raise _unknown_column(key, next(column for column in columns if not isinstance(column, list)))
        return merged

    @property
    def size(self) -> int:
        """Number of rows, which is the length of the first column; 0 if there is none."""
        return next((len(column) for column in self.data.values()), 0)

    def get_dict(self) -> dict[str, Any]:
        """Returns the plain dict underneath, not a copy of it."""
        return self.data

    def select_indices(self, indices: list[int] | Tensor) -> Self:
        """
        Returns a new batch with some of the rows.

        Args:
            indices (`list[int]` or `torch.LongTensor` of shape `(n,)`):
                Rows in the order wanted; repeats are allowed.

        Raises:
            TypeError: If a column is neither a tensor nor a list.
        """
        rows = indices.tolist() if isinstance(indices, Tensor) else list(indices)
        selected = type(self)()
        for key, column in self.data.items():
            if isinstance(column, Tensor):
                selected[key] = column[torch.tensor(rows, dtype=torch.long, device=column.device)]
            elif isinstance(column, list):
                selected[key] = [column[i] for i in rows]
            else:
                raise _unknown_column(key, column)
        return selected

    def slice(self, start: int, end: int) -> "SlicedDataDict":
        """
        Returns the rows `[start, end)`; tensors are views.

        Raises:
            AssertionError: If `end` is beyond a tensor's rows. Lists are clipped without a word.
        """
        sliced: SlicedDataDict = SlicedDataDict()
        for key, column in self.data.items():
            if isinstance(column, Tensor):
                assert end <= len(column), f"Rows [{start}, {end}) asked of {len(column)} in column {key!r}."
            sliced[key] = column[start:end]
        return sliced

    def chunk(self, rank: int, chunks: int) -> "SlicedDataDict":
        """
        Returns part `rank` of `chunks` equal contiguous parts, with its own storage.

        Raises:
            AssertionError: If there is no such part, or the parts would not be equal.
        """
        assert 0 <= rank < chunks, f"There is no part {rank} of {chunks}: `rank` goes from 0 to {chunks - 1}."
        assert self.size % chunks == 0, f"{self.size} rows cannot be cut into {chunks} equal parts."
        rows = self.size // chunks
        part = self.slice(rank * rows, (rank + 1) * rows)
        for key, column in part.data.items():
            part[key] = column.clone() if isinstance(column, Tensor) else deepcopy(column)
        return part

    def shard_by_batch_size(
        self,
        shards: int,
        batch_size: int | None = None,
        allow_uneven_shards: bool = False,
        dynamic_batching_args: Any = None,
        sequence_packing_args: Any = None,
    ) -> list["SlicedDataDict"]:
        """
        Deals the rows out to `shards` workers, so that the workers' n-th local batches make the n-th global batch.

        Args:
            shards (`int`):
                Number of workers.
            batch_size (`int`, *optional*):
                Rows of a global batch, by default all. Each is cut into `shards` contiguous parts.
            allow_uneven_shards (`bool`, *optional*, defaults to `False`):
                Whether the last workers may get fewer rows; not together with `batch_size`.

        Raises:
            AssertionError: If the rows do not divide as asked.
            NotImplementedError: For dynamic batching and sequence packing.
        """
        if dynamic_batching_args is not None or sequence_packing_args is not None:
            raise NotImplementedError("Dynamic batching and sequence packing are not available: leave both out.")
        if allow_uneven_shards:
            assert batch_size is None, (
                f"Uneven shards are cut from the whole batch: leave out `batch_size={batch_size}`."
            )
            rows = -(-self.size // shards)
            ends = [min(i * rows, self.size) for i in range(shards + 1)]
            return [self.slice(start, end) for start, end in zip(ends, ends[1:], strict=False)]
        batch_size = self.size if batch_size is None else batch_size
        assert batch_size and self.size % batch_size == 0, f"{self.size} rows are not a multiple of {batch_size}."
        assert batch_size % shards == 0, f"Batches of {batch_size} rows cannot be cut into {shards} equal parts."
        rows = batch_size // shards
        return [
            SlicedDataDict.from_batches(
                [self.slice(start, start + rows) for start in range(rank * rows, self.size, batch_size)]
            )
            for rank in range(shards)
        ]

    def repeat_interleave(self, num_repeats: int) -> Self:
        """Returns a new batch with each row `num_repeats` times, side by side. Items of lists are deep copies."""
        repeated = type(self)()
        for key, column in self.data.items():
            if isinstance(column, Tensor):
                repeated[key] = column.repeat_interleave(num_repeats, dim=0)
            else:
                repeated[key] = [deepcopy(item) for item in column for _ in range(num_repeats)]
        return repeated

    def reorder_data(self, reorder_indices: list[int] | Tensor) -> None:
        """
        Reorders the rows in place: row i moves to place `reorder_indices[i]`.

        Raises:
            AssertionError: If there is not one index per row.
        """
        places = reorder_indices.tolist() if isinstance(reorder_indices, Tensor) else list(reorder_indices)
        assert len(places) == self.size, f"Got {len(places)} indices for {self.size} rows."
        self.data = self.select_indices(sorted(range(len(places)), key=places.__getitem__)).data

    def get_batch(self, batch_idx: int, batch_size: int) -> "SlicedDataDict":
        """Returns the `batch_idx`-th of the consecutive batches of `batch_size` rows."""
        return self.slice(batch_idx * batch_size, (batch_idx + 1) * batch_size)

    def make_microbatch_iterator(self, microbatch_size: int) -> Iterator["SlicedDataDict"]:
        """
        Yields consecutive batches of `microbatch_size` rows.

        Raises:
            AssertionError: If the rows are not a multiple of it.
        """
        assert self.size % microbatch_size == 0, f"{self.size} rows are not a multiple of {microbatch_size}."
        for start in range(0, self.size, microbatch_size):
            yield self.slice(start, start + microbatch_size)

    def truncate_tensors(self, dim: int, truncated_len: int) -> None:
        """Cuts every tensor that has dimension `dim` to its first `truncated_len` entries there, in place."""
        for key, column in self.data.items():
            if isinstance(column, Tensor) and column.dim() > dim:
                self.data[key] = column.narrow(dim, 0, min(truncated_len, column.shape[dim]))

    def to(self, device: torch.device | str) -> Self:
        """Moves the tensors to a device, in place, and returns the batch itself."""
        for key, column in self.data.items():
            if isinstance(column, Tensor):
                self.data[key] = column.to(device)
        return self

    def all_gather(self, group: distributed.ProcessGroup | None = None) -> Self:
        """
        Returns the rows of all processes, in the order of their ranks. The processes may hold different numbers of
        rows and different lengths, which are padded as in [`~BatchedDataDict.from_batches`].
        """
        devices = {key: column.device for key, column in self.data.items() if isinstance(column, Tensor)}
        own = {key: column.cpu() if isinstance(column, Tensor) else column for key, column in self.data.items()}
        gathered: list[Any] = [None] * distributed.get_world_size(group)
        distributed.all_gather_object(gathered, own, group=group)
        merged = type(self).from_batches(gathered)
        for key, device in devices.items():
            merged[key] = merged[key].to(device)
        return merged


class SlicedDataDict(BatchedDataDict[DictT]):
    """Some consecutive rows of a [`BatchedDataDict`]."""


def _padded(tensors: list[Tensor], value: int | float) -> list[Tensor]:
    if tensors[0].dim() < 2:
        return tensors
    length = max(tensor.shape[1] for tensor in tensors)
    padded = []
    for tensor in tensors:
        missing = (tensor.shape[0], length - tensor.shape[1], *tensor.shape[2:])
        padded.append(torch.cat([tensor, tensor.new_full(missing, value)], dim=1))
    return padded


def _unknown_column(key: str, column: Any) -> TypeError:
    return TypeError(
        f"Column {key!r} is a `{type(column).__name__}`. Columns are tensors or lists, one entry per row."
    )
