# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""What is on disk survives: finished episodes and failures, a line each, written the moment they are known."""

import fcntl
import hashlib
import json
import logging
import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any


logger = logging.getLogger(__name__)

_FORMAT = 1
_dumps = json.JSONEncoder(allow_nan=False).encode


def config_digest(config: dict[str, Any]) -> str:
    """
    Returns the SHA-256 of a configuration, the same for equal ones whatever the order of their keys.

    Args:
        config (`dict`):
            Plain values: strings, numbers, booleans, `None`, lists and dicts with strings as keys.

    Raises:
        TypeError: If another type of value is in it.
        ValueError: If a number is not finite.
    """
    _check_plain(config, "config")
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()


class _LineLog:
    """
    An append-only file of JSON lines with one writer. A line counts when its end is on disk.

    The lock is the kernel's: it goes with the process that holds it, however that ends.
    """

    # How such a file begins, so that another one given by mistake is refused and not repaired.
    _beginning: bytes

    def __init__(self, path: str | os.PathLike) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._fd: int | None = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            self._lock()
            self._repair()
            _sync_folder(self.path.parent)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Closes the file and frees it for other writers. A second call does nothing."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    def __enter__(self):
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._open_fd(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RuntimeError(
                f"{self.path} is being written by another collector, two would mix their episodes. Wait until it has "
                "ended, or give this one another output directory."
            ) from None

    def _open_fd(self) -> int:
        if self._fd is None:
            raise RuntimeError(f"{self.path} is closed: open it again to write on.")
        return self._fd

    def _repair(self) -> None:
        """Cuts off a last line that was being written when its process or the machine died."""
        fd = self._open_fd()
        good = 0
        with open(self.path, "rb") as file:
            for number, line in enumerate(file, start=1):
                whole = line.endswith(b"\n") and _is_object(line)
                if whole:
                    good += len(line)
                elif file.read(1):
                    raise ValueError(
                        f"Line {number} of {self.path} is not a JSON object, and it is not the last one: the file is "
                        "damaged, or not a journal. Nothing was changed. Repair it by hand, or write elsewhere."
                    )
                elif number == 1:
                    self._check_torn_start(line)
        size = os.fstat(fd).st_size
        if size > good:
            logger.warning("%s: dropped a torn last line of %d bytes.", self.path, size - good)
            os.ftruncate(fd, good)
            os.fsync(fd)

    def _check_torn_start(self, line: bytes) -> None:
        if not (line.startswith(self._beginning) or self._beginning.startswith(line)):
            raise ValueError(
                f"{self.path} is not a `{type(self).__name__}`: it begins with {line[:40]!r}. Nothing was changed; "
                "give another path."
            )

    def _write(self, line: bytes) -> None:
        fd = self._open_fd()
        size = os.fstat(fd).st_size
        try:
            written = 0
            while written < len(line):
                written += os.write(fd, line[written:])
            os.fsync(fd)
        except BaseException:
            # Half a line, on a full disk or an interrupt, would swallow the next one.
            os.ftruncate(fd, size)
            raise

    def _lines(self) -> Iterator[dict[str, Any]]:
        with open(self.path, "rb") as file:
            for line in file:
                yield json.loads(line)


class Journal(_LineLog):
    """
    The finished episodes of a run, one JSON line each. A run that was killed goes on from here.

    The first line names the configuration, so that no run continues with other settings than it began with. A row is
    on disk when [`~Journal.append`] returns. One process at a time can hold a journal.

    Args:
        path (`str` or `os.PathLike`):
            The file, made with its folders if it does not exist.
        digest (`str`):
            [`config_digest`] of everything that the rows depend on.
        config (`dict`, *optional*):
            The configuration itself. It is stored, and lets the error of a mismatch name the settings that differ.

    Raises:
        RuntimeError: If another process holds the journal.
        ValueError: If the file belongs to another configuration, or is damaged before its last line.

    Examples:

    ```python
    >>> with Journal("run/episodes.jsonl", config_digest(config), config) as journal:
    ...     todo = [episode for episode in episodes if episode not in journal]
    ...     journal.append({"episode_id": todo[0], "return": 1.0})
    ```
    """

    _beginning = b'{"journal": '

    def __init__(self, path: str | os.PathLike, digest: str, config: dict[str, Any] | None = None) -> None:
        if config is not None:
            _check_plain(config, "config")
        super().__init__(path)
        try:
            self._check_header(digest, config)
            self._ids: set[str] = set()
            for number, row in enumerate(self._rows(), start=2):
                try:
                    self._add_id(row)
                except ValueError as error:
                    raise ValueError(
                        f"Line {number} of {self.path} is damaged: {error} Nothing was changed. Repair it by hand, or "
                        "write elsewhere."
                    ) from None
        except BaseException:
            self.close()
            raise

    def append(self, row: dict[str, Any]) -> None:
        """
        Writes a finished episode to disk.

        Args:
            row (`dict`):
                Plain values (see [`config_digest`]), with a string `"episode_id"` that the journal does not have yet.

        Raises:
            ValueError: If the episode is in the journal, or a number is not finite.
            TypeError: If a value is not plain.
        """
        line = _json_line(row, "row")
        self._add_id(row)
        try:
            self._write(line)
        except BaseException:
            self._ids.discard(row["episode_id"])
            raise

    def completed(self) -> dict[str, dict[str, Any]]:
        """
        Returns the rows by `episode_id`, in the order they were written, those of earlier processes included: the
        first one is line 2 of the file.
        """
        return {row["episode_id"]: row for row in self._rows()}

    def keep(self, count: int) -> None:
        """
        Drops all rows but the first `count`, for a run that goes on from an earlier point than where it was stopped.

        Raises:
            ValueError: If there are fewer.
        """
        if not 0 <= count <= len(self):
            raise ValueError(f"{self.path} has {len(self)} episodes, and {count} were to be kept.")
        with open(self.path, "rb") as file:
            size = sum(len(line) for line, _ in zip(file, range(count + 1), strict=False))  # with the header
        os.ftruncate(self._open_fd(), size)
        os.fsync(self._open_fd())
        self._ids = {row["episode_id"] for row in self._rows()}

    def __contains__(self, episode_id: object) -> bool:
        return episode_id in self._ids

    def __len__(self) -> int:
        return len(self._ids)

    def _rows(self) -> Iterator[dict[str, Any]]:
        lines = self._lines()
        next(lines)
        return lines

    def _add_id(self, row: dict[str, Any]) -> None:
        episode_id = row.get("episode_id")
        if not isinstance(episode_id, str):
            raise ValueError(f'A row needs a string "episode_id", got {episode_id!r}.')
        if episode_id in self._ids:
            raise ValueError(
                f"Episode {episode_id!r} is in {self.path} already. Each is written once: ask the journal which are "
                "left before playing."
            )
        self._ids.add(episode_id)

    def _check_header(self, digest: str, config: dict[str, Any] | None) -> None:
        header = next(self._lines(), None)
        if header is None:
            self._write(_json_line({"journal": _FORMAT, "digest": digest, "config": config}, "header"))
            return
        if header.get("journal") != _FORMAT:
            raise ValueError(
                f"{self.path} does not begin as a journal of format {_FORMAT} does: its first line is "
                f"{json.dumps(header)[:80]}. Give another path."
            )
        if header.get("digest") != digest:
            raise ValueError(
                f"{self.path} was begun with another configuration, its episodes and new ones cannot be mixed. "
                f"{_difference(header, digest, config)} Continue with the settings it was begun with, or give this "
                "run another output directory."
            )


class FailureLog(_LineLog):
    """
    The failures of a run, one JSON line each: nothing that went wrong is lost, and none of it becomes an episode.

    An episode that fails in several runs of the same output directory has several rows.

    Args:
        path (`str` or `os.PathLike`):
            The file, usually `failures.jsonl` beside the journal.
    """

    _beginning = b'{"episode_id": '

    def append(
        self,
        *,
        episode_id: str,
        failure_class: str,
        kind: str,
        attempts: int,
        seed: int | None,
        message: str,
        traceback_text: str = "",
    ) -> None:
        """
        Writes a failure to disk.

        Args:
            episode_id (`str`):
                Episode that was given up.
            failure_class (`str`):
                `"DATA"`, the same would happen again, or `"INFRA"`, another attempt may succeed.
            kind (`str`):
                What happened, as [`TaskFailure.kind`] says it.
            attempts (`int`):
                How often the episode was tried.
            seed (`int` or `None`):
                Its seed.
            message (`str`):
                The error in a sentence.
            traceback_text (`str`, *optional*, defaults to `""`):
                The traceback where it was raised.
        """
        row = {
            "episode_id": episode_id,
            "class": str(failure_class),
            "kind": kind,
            "attempts": attempts,
            "seed": seed,
            "message": message,
            "traceback": traceback_text,
        }
        self._write(_json_line(row, "failure"))

    def rows(self) -> list[dict[str, Any]]:
        """Returns all failures, those of earlier processes included."""
        return list(self._lines())


def _json_line(row: dict[str, Any], where: str) -> bytes:
    """A line from which the row can be read again."""
    try:
        text = _dumps(row)
        same = json.loads(text) == row
    except (TypeError, ValueError):
        same = False
    if not same:  # why, or two halves of a surrogate pair that are read as one character
        _check_plain(row, where)
        text = _dumps(row)
    return text.encode() + b"\n"


def _check_plain(value: Any, where: str) -> None:
    """Only what JSON gives back as it was: it would turn keys into strings and tuples into lists without a word."""
    fault = _not_plain(value)
    if fault is None:
        return
    value, path = fault
    place = where + "".join(f"[{key!r}]" for key in path)
    if isinstance(value, float):
        raise ValueError(f"`{place}` is {value}: JSON has no word for it. Numbers must be finite.")
    if isinstance(value, dict):
        raise TypeError(f"Keys must be strings, `{place}` has {next(x for x in value if not isinstance(x, str))!r}.")
    raise TypeError(
        f"`{place}` is a `{type(value).__name__}`. Make it a string, number, boolean, `None`, list or dict."
    )


def _not_plain(value: Any, path: tuple[Any, ...] = ()) -> tuple[Any, tuple[Any, ...]] | None:
    """The first thing inside a value that is not plain and where it is; None if all is."""
    if value is None or isinstance(value, str | bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return None
    items: Iterable[tuple[Any, Any]]
    if isinstance(value, list):
        items = enumerate(value)
    elif isinstance(value, dict) and all(isinstance(key, str) for key in value):
        items = value.items()
    else:
        return value, path
    return next((fault for key, item in items if (fault := _not_plain(item, (*path, key))) is not None), None)


def _difference(header: dict[str, Any], digest: str, config: dict[str, Any] | None) -> str:
    old = header.get("config")
    if old is None or config is None:
        return f"Digest in the file: {header.get('digest')}, of this run: {digest}."
    missing = "nothing"
    parts = [
        f"{key}: {json.dumps(old[key]) if key in old else missing} in the file, "
        f"{json.dumps(config[key]) if key in config else missing} now"
        for key in sorted(old.keys() | config.keys())
        if key not in old or key not in config or json.dumps(old[key]) != json.dumps(config[key])
    ]
    return f"What differs: {'; '.join(parts)}."


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def _sync_folder(folder: Path) -> None:
    # A new file is safe only when the folder that names it is.
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
