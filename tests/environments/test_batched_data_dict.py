# Copyright 2026 The hf_qrl authors. Licensed under the Apache License, Version 2.0.
"""BatchedDataDict against a reference of rows in plain Python."""

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_qrl.distributed import batched_data_dict
from hf_qrl.distributed.batched_data_dict import BatchedDataDict, SlicedDataDict


# One row is (id, ids of its own length, text); batches are rows padded to a common length.
Rows = list[tuple[int, list[int], str]]


@st.composite
def row_lists(draw, min_size=0, max_size=8) -> Rows:
    size = draw(st.integers(min_size, max_size))
    lengths = [draw(st.integers(1, 4)) for _ in range(size)]
    return [(i, [10 * i + j for j in range(length)], "abc"[: i % 4]) for i, length in enumerate(lengths)]


def batch_of(rows: Rows, length: int | None = None, pad: int = 0) -> BatchedDataDict:
    length = max((len(ids) for _, ids, _ in rows), default=0) if length is None else length
    padded = [ids + [pad] * (length - len(ids)) for _, ids, _ in rows]
    ids = torch.tensor(padded, dtype=torch.long).reshape(len(rows), length)
    number = torch.tensor([i for i, _, _ in rows], dtype=torch.long)
    return BatchedDataDict({"number": number, "ids": ids, "text": [text for *_, text in rows]})


def assert_equal(batch: BatchedDataDict, expected: BatchedDataDict) -> None:
    assert set(batch) == set(expected)
    for key, column in expected.items():
        if isinstance(column, torch.Tensor):
            assert torch.equal(batch[key], column), key
        else:
            assert batch[key] == column, key


@settings(max_examples=60, deadline=None)
@given(row_lists(min_size=1), st.lists(st.integers(0, 7), max_size=3), st.integers(-3, 3))
def test_from_batches_is_the_batch_of_all_rows(rows, cuts, pad):
    edges = sorted({0, len(rows), *(cut for cut in cuts if cut < len(rows))})
    parts = [batch_of(rows[a:b], pad=pad) for a, b in zip(edges, edges[1:], strict=False)]
    merged = BatchedDataDict.from_batches(parts, pad_value_dict={"ids": pad})
    assert_equal(merged, batch_of(rows, pad=pad))
    assert list(merged) == ["ids", "number", "text"] and merged.size == len(rows) and len(merged) == 3


@settings(max_examples=60, deadline=None)
@given(row_lists(min_size=1), st.data())
def test_selections(rows, data):
    batch, length = batch_of(rows), max(len(ids) for _, ids, _ in rows)
    indices = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=6))
    expected = batch_of([rows[i] for i in indices], length)
    assert_equal(batch.select_indices(indices), expected)
    assert_equal(batch.select_indices(torch.tensor(indices, dtype=torch.long)), expected)
    start, end = sorted(data.draw(st.tuples(st.integers(0, len(rows)), st.integers(0, len(rows)))))
    assert_equal(batch.slice(start, end), batch_of(rows[start:end], length))
    repeats = data.draw(st.integers(1, 3))
    assert_equal(batch.repeat_interleave(repeats), batch_of([row for row in rows for _ in range(repeats)], length))
    places = data.draw(st.permutations(range(len(rows))))
    moved = [rows[0]] * len(rows)
    for row, place in zip(rows, places, strict=True):
        moved[place] = row
    assert batch.reorder_data(list(places)) is None
    assert_equal(batch, batch_of(moved, length))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.data())
def test_shards_make_the_global_batches(shards, local, batches, data):
    size = shards * local * batches
    rows: Rows = [(i, [i], str(i)) for i in range(size)]
    dealt = batch_of(rows).shard_by_batch_size(shards, batch_size=shards * local)
    assert [shard.size for shard in dealt] == [local * batches] * shards
    for number in range(batches):
        together = BatchedDataDict.from_batches([shard.get_batch(number, local) for shard in dealt])
        assert_equal(together, batch_of(rows[number * shards * local : (number + 1) * shards * local]))
    assert_equal(batch_of(rows).shard_by_batch_size(shards)[-1], batch_of(rows[-local * batches :]))
    assert all(isinstance(shard, SlicedDataDict) for shard in dealt)
    for rank in range(shards):
        part = slice(rank * local * batches, (rank + 1) * local * batches)
        assert_equal(batch_of(rows).chunk(rank, shards), batch_of(rows[part]))
    m = data.draw(st.sampled_from([d for d in range(1, size + 1) if size % d == 0]))
    for i, micro in enumerate(batch_of(rows).make_microbatch_iterator(m)):
        assert_equal(micro, batch_of(rows[i * m : (i + 1) * m]))


@pytest.mark.parametrize("size, shards, sizes", [(5, 2, [3, 2]), (5, 4, [2, 2, 1, 0]), (4, 2, [2, 2])])
def test_uneven_shards(size, shards, sizes):
    dealt = batch_of([(i, [i], "") for i in range(size)]).shard_by_batch_size(shards, allow_uneven_shards=True)
    assert [shard.size for shard in dealt] == sizes


def test_from_batches_edges():
    assert BatchedDataDict.from_batches([]) == {} and BatchedDataDict.from_batches([]).size == 0
    one = BatchedDataDict({"a": [1]})
    assert BatchedDataDict.from_batches([one, {}])["a"] == [1]
    with pytest.raises(KeyError, match="Batch 1 has no column 'a', its columns are \\['b'\\]"):
        BatchedDataDict.from_batches([one, {"b": [1]}])
    with pytest.raises(TypeError, match="Column 'a' is a `int`"):
        BatchedDataDict.from_batches([{"a": 3}])
    cubes = [torch.ones(1, 2, 3), torch.ones(1, 4, 3)]
    merged = BatchedDataDict.from_batches([{"x": cube} for cube in cubes], {"x": -1.0})["x"]
    assert merged.shape == (2, 4, 3) and (merged[0, 2:] == -1).all() and (merged[0, :2] == 1).all()
    assert isinstance(SlicedDataDict.from_batches([one]), SlicedDataDict)


def test_traps():
    batch = BatchedDataDict({"x": torch.arange(4), "log": [[1], [2], [3], [4]]})
    assert len(batch) == 2 and batch.size == 4
    copy = batch.copy()
    assert type(copy) is BatchedDataDict and copy["log"] is batch["log"]
    chunk = batch.chunk(0, 2)
    chunk["x"][0], chunk["log"][0][0] = 9, 9
    assert batch["x"][0] == 0 and batch["log"][0] == [1]
    repeated = batch.repeat_interleave(2)
    repeated["log"][0].append(5)
    assert repeated["log"][1] == [1] and batch["log"][0] == [1]
    assert batch.get_dict() is batch.data and batch.to("cpu") is batch
    assert BatchedDataDict({"log": [1, 2]}).slice(1, 5)["log"] == [2]
    batch = BatchedDataDict({"x": torch.ones(2, 5), "y": torch.ones(2), "z": torch.ones(2, 2)})
    assert batch.truncate_tensors(dim=1, truncated_len=3) is None
    assert [batch[key].shape for key in "xyz"] == [(2, 3), (2,), (2, 2)]


@pytest.mark.parametrize(
    "call, error, match",
    [
        (lambda b: b.slice(0, 5), AssertionError, r"Rows \[0, 5\) asked of 4 in column 'x'"),
        (lambda b: b.chunk(2, 2), AssertionError, "no part 2 of 2"),
        (lambda b: b.chunk(0, 3), AssertionError, "4 rows cannot be cut into 3 equal parts"),
        (lambda b: b.shard_by_batch_size(2, batch_size=3), AssertionError, "4 rows are not a multiple of 3"),
        (lambda b: b.shard_by_batch_size(3), AssertionError, "Batches of 4 rows cannot be cut into 3"),
        (lambda b: b.shard_by_batch_size(3, 4, True), AssertionError, "leave out `batch_size=4`"),
        (lambda b: b.shard_by_batch_size(2, dynamic_batching_args={}), NotImplementedError, "not available"),
        (lambda b: b.shard_by_batch_size(2, sequence_packing_args={}), NotImplementedError, "not available"),
        (lambda b: list(b.make_microbatch_iterator(3)), AssertionError, "4 rows are not a multiple of 3"),
        (lambda b: b.reorder_data([0]), AssertionError, "Got 1 indices for 4 rows"),
        (lambda b: BatchedDataDict({"x": "text"}).select_indices([0]), TypeError, "Column 'x' is a `str`"),
    ],
)
def test_errors(call, error, match):
    with pytest.raises(error, match=match):
        call(BatchedDataDict({"x": torch.arange(4)}))


def test_chunk_of_fewer_rows_than_parts_squared():
    batch = BatchedDataDict({"x": torch.arange(4)})
    assert [batch.chunk(rank, 4)["x"].tolist() for rank in range(4)] == [[0], [1], [2], [3]]


# The file alone is loaded: the whole package takes longer than the test.
GATHER = """
import sys, torch
from importlib.util import module_from_spec, spec_from_file_location
from torch import distributed
spec = spec_from_file_location("batched_data_dict", sys.argv[3])
module = module_from_spec(spec)
spec.loader.exec_module(module)
BatchedDataDict = module.BatchedDataDict
rank = int(sys.argv[2])
distributed.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=rank, world_size=2)
batch = BatchedDataDict({"x": torch.full((1 + rank, 2 + rank), rank), "text": [str(rank)] * (1 + rank)})
gathered = batch.all_gather(None)
assert gathered["x"].tolist() == [[0, 0, 0], [1, 1, 1], [1, 1, 1]] and gathered["text"] == ["0", "1", "1"]
assert type(gathered) is BatchedDataDict
distributed.destroy_process_group()
"""


def test_all_gather_joins_the_ranks(monkeypatch):
    ranks = [BatchedDataDict({"x": torch.full((1 + r, 2 + r), r), "text": [str(r)] * (1 + r)}) for r in range(2)]

    def all_gather_object(gathered, own, group):
        assert own["x"].device.type == "cpu" and group == "group"
        gathered[:] = [rank.get_dict() for rank in ranks]

    monkeypatch.setattr(batched_data_dict.distributed, "get_world_size", lambda group: 2)
    monkeypatch.setattr(batched_data_dict.distributed, "all_gather_object", all_gather_object)
    gathered = ranks[1].all_gather("group")
    assert gathered["x"].tolist() == [[0, 0, 0], [1, 1, 1], [1, 1, 1]] and gathered["text"] == ["0", "1", "1"]


@pytest.mark.slow  # torch is imported twice
def test_all_gather_of_two_processes(tmp_path):
    arguments = (str(tmp_path / "store"), batched_data_dict.__file__)
    commands = [[sys.executable, "-c", GATHER, arguments[0], str(rank), arguments[1]] for rank in range(2)]
    processes = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for command in commands]
    for process in processes:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
