# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""The replay: episodes that the policy played while it was trained, on disk, and as rows to train on."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from datasets import Dataset, concatenate_datasets

from ..data.episodes import episodes_dataset
from ..rollouts.journal import Journal, config_digest


logger = logging.getLogger(__name__)


class ReplayJournal:
    """
    All episodes of a run, one JSON line each, which [`from_jsonl`] reads. A line is on disk when
    [`~ReplayJournal.append`] returns, and one that was being written when the process died is dropped.

    Args:
        path (`str` or `Path`):
            The file, made with its folder when it is needed.
        config (`dict`):
            What the episodes are of; a run with something else does not go on in the file.
    """

    def __init__(self, path: str | Path, config: dict[str, Any]):
        self.path, self.config = Path(path), config

    def begin(self) -> None:
        """Starts anew; what an earlier run has left is set aside."""
        if self.path.exists():
            aside = self.path.with_name(f"earlier_{self.path.name}")
            logger.warning("The replay of an earlier run is now %s; this one starts with none.", aside)
            self.path.replace(aside)

    def resume(self, count: int) -> list[dict[str, Any]]:
        """
        Drops what was written after the first `count` episodes, and returns these.

        Raises:
            ValueError: If there are fewer, or they are of another run.
        """
        with self._open() as journal:
            if len(journal) < count:
                raise ValueError(
                    f"The checkpoint was written after {count} online episodes, and {self.path} has {len(journal)}: "
                    "resume with the output directory, and its `replay` folder, that the run had."
                )
            journal.keep(count)
            return list(journal.completed().values())

    def append(self, episodes: list[dict[str, Any]]) -> None:
        with self._open() as journal:
            for episode in episodes:
                journal.append(episode)

    def _open(self) -> Journal:
        return Journal(self.path, config_digest(self.config), self.config)


class Replay:
    """
    The latest episodes, and the rows that they make.

    Args:
        prepare (`Callable[[Dataset], Dataset]`):
            Makes tokenised rows of a dataset.
        size (`int`, *optional*):
            Number of episodes that are kept; the oldest go.
        make_rows (`Callable[[Dataset], Dataset]`, *optional*):
            Makes a dataset, in any format that the trainers accept, of all episodes that are kept. By default
            they are trained on as they are.
    """

    def __init__(
        self,
        prepare: Callable[[Dataset], Dataset],
        size: int | None = None,
        make_rows: Callable[[Dataset], Dataset] | None = None,
    ):
        self._prepare, self._size, self._make_rows = prepare, size, make_rows
        self._episodes: list[dict[str, Any]] = []
        self._num_rows: list[int] = []  # of each episode
        self.rows: Dataset | None = None

    def __len__(self) -> int:
        return len(self._episodes)

    @property
    def episodes(self) -> Dataset:
        """The episodes that are kept, the oldest first."""
        return episodes_dataset(self._episodes)

    def clear(self) -> None:
        self._episodes, self._num_rows, self.rows = [], [], None

    def extend(self, episodes: list[dict[str, Any]]) -> None:
        """Adds episodes. If no rows can be made of one, that is a `ValueError` and nothing has changed."""
        if not episodes:
            return
        if self._size is not None:
            episodes = episodes[-self._size :]
        surplus = 0 if self._size is None else max(0, len(self) + len(episodes) - self._size)
        kept = self._episodes[surplus:] + episodes
        if self._make_rows is not None:
            # Rows may hold something of several episodes, so they are all made again.
            self.rows = self._prepare(self._make_rows(episodes_dataset(kept)))
        else:
            rows = self._prepare(episodes_dataset(episodes))
            row_per_turn = "next_input_ids" in rows.column_names
            dropped = sum(self._num_rows[:surplus])
            self._num_rows = self._num_rows[surplus:] + [
                len(episode["turn_rewards"]) if row_per_turn else 1 for episode in episodes
            ]
            if self.rows is not None and dropped < len(self.rows):
                rows = concatenate_datasets([self.rows.select(range(dropped, len(self.rows))), rows])
            self.rows = rows
        self._episodes = kept


__all__ = ["Replay", "ReplayJournal"]
