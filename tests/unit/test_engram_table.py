"""One Engram table: the rows read, the bytes touched, the bound of the cache, the failures."""

import os
import sys
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from mlx_engine import engram_table
from mlx_engine.engram_table import EngramStats, EngramTable, HotRows, TableLocation
from mlx_engine.errors import ModelFileError

N_ROWS, HEAD_DIM = 3_000, 64
WEIGHT_OFFSET, GAP = 101, 37
SCALE_OFFSET = WEIGHT_OFFSET + N_ROWS * HEAD_DIM + GAP
AMPLE_BYTES = N_ROWS * 100  # a slot for every row
# All e4m3 codes but the two that are no number.
NUMBERS = np.array([code for code in range(256) if code & 0x7F != 0x7F], np.uint8)


class Table:
    """A table file with the rows that it holds, and readers of it."""

    def __init__(self, path: Path) -> None:
        rng = np.random.default_rng(0)
        self.codes = rng.choice(NUMBERS, (N_ROWS, HEAD_DIM))
        self.scales = rng.integers(0, 255, (N_ROWS, 2), np.uint8)
        self.location = TableLocation(path, WEIGHT_OFFSET, SCALE_OFFSET, N_ROWS, HEAD_DIM)
        self.readers = ThreadPoolExecutor(4)
        self.write()

    def write(self) -> None:
        self.location.path.write_bytes(
            b"\xff" * WEIGHT_OFFSET
            + self.codes.tobytes()
            + b"\xff" * GAP
            + self.scales.tobytes()
            + b"after"
        )

    def open(self, cache_bytes: int = 0, n_readers: int = 4) -> EngramTable:
        return EngramTable(self.location, self.readers, n_readers, cache_bytes)

    def check(self, table: EngramTable, rows: NDArray[np.int64]) -> None:
        codes, scales = table.read(rows)
        assert codes.shape == (*rows.shape, HEAD_DIM)
        assert scales.shape == (*rows.shape, HEAD_DIM // 32)
        assert (codes == self.codes[rows]).all()
        assert (scales == self.scales[rows]).all()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Table]:
    """A table whose file no test changes."""
    table = Table(tmp_path_factory.mktemp("table") / "shard")
    with table.readers:
        yield table


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Table]:
    """A table whose file the test may damage."""
    table = Table(tmp_path / "shard")
    with table.readers:
        yield table


@pytest.fixture
def preads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Collect the (offset, bytes) of each read."""
    calls: list[tuple[int, int]] = []
    pread = engram_table.os.pread

    def record(fd: int, n_bytes: int, offset: int) -> bytes:
        calls.append((offset, n_bytes))
        return pread(fd, n_bytes, offset)

    monkeypatch.setattr(engram_table.os, "pread", record)
    return calls


ROW = st.integers(0, N_ROWS - 1) | st.integers(0, 20) | st.just(N_ROWS - 1)
BATCHES = st.lists(st.lists(ROW, max_size=30), min_size=1, max_size=6)


@given(batches=BATCHES, cache_bytes=st.sampled_from([0, 80, 500, 3_000, AMPLE_BYTES]))
def test_rows_equal_the_file_through_any_cache(
    shared: Table, batches: list[list[int]], cache_bytes: int
):
    table = shared.open(cache_bytes)
    for batch in batches:
        shared.check(table, np.array(batch, np.int64))
    table.close()


@given(batches=BATCHES)
def test_counts_with_room_for_every_row(shared: Table, batches: list[list[int]]):
    table = shared.open(AMPLE_BYTES)
    seen: set[int] = set()
    expected = EngramStats()
    for batch in batches:
        distinct = set(batch)
        table.read(np.array(batch, np.int64))
        expected += EngramStats(
            rows_requested=len(batch),
            rows_distinct=len(distinct),
            cache_hits=len(distinct & seen),
            bytes_read=len(distinct - seen) * (HEAD_DIM + 2),
        )
        seen |= distinct
    assert table.stats() == expected
    table.close()


def test_many_rows_in_any_shape(shared: Table):
    table = shared.open(n_readers=2)
    shared.check(table, np.arange(0, N_ROWS, 2))  # more runs than one wave of two readers takes
    rows = np.random.default_rng(3).integers(0, N_ROWS, (50, 2, 12))
    shared.check(table, rows)
    table.close()


@pytest.mark.parametrize("cache_bytes", [0, 3_000, AMPLE_BYTES])
def test_reads_touch_the_missing_rows_alone(
    shared: Table, preads: list[tuple[int, int]], cache_bytes: int
):
    table = shared.open(cache_bytes)
    rng = np.random.default_rng(4)
    for _ in range(5):
        rows = rng.zipf(1.2, 400) % N_ROWS
        before = table.stats()
        preads.clear()
        table.read(rows)
        touched = [byte for offset, n in preads for byte in range(offset, offset + n)]
        row_of = {WEIGHT_OFFSET + i: i // HEAD_DIM for i in range(N_ROWS * HEAD_DIM)}
        row_of |= {SCALE_OFFSET + i: i // 2 for i in range(N_ROWS * 2)}
        missing = {row_of[byte] for byte in touched}
        assert missing <= set(rows.tolist())
        assert len(touched) == len(set(touched)) == len(missing) * (HEAD_DIM + 2)
        after = table.stats()
        assert after.bytes_read - before.bytes_read == len(touched)
        assert after.rows_distinct - before.rows_distinct == len(set(rows.tolist()))
        hits = after.cache_hits - before.cache_hits
        assert hits == len(set(rows.tolist())) - len(missing)
    table.close()


def test_neighbours_are_one_read(shared: Table, preads: list[tuple[int, int]]):
    table = shared.open()
    shared.check(table, np.array([7, 5, 6, 0, 20, 5, 8]))
    assert sorted(preads) == [
        (WEIGHT_OFFSET + first * HEAD_DIM, n * HEAD_DIM) for first, n in ((0, 1), (5, 4), (20, 1))
    ] + [(SCALE_OFFSET + first * 2, n * 2) for first, n in ((0, 1), (5, 4), (20, 1))]
    table.close()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux is asked for bytes ahead")
def test_a_steps_rows_are_all_asked_for_before_one_is_read(
    shared: Table, preads: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
):
    asked: list[tuple[int, int]] = []

    def noting(fd: int, offset: int, n_bytes: int, advice: int) -> None:
        assert (advice, preads) == (os.POSIX_FADV_WILLNEED, [])
        asked.append((offset, n_bytes))

    monkeypatch.setattr(os, "posix_fadvise", noting)
    table = shared.open()
    shared.check(table, np.array([[5, 900, 901, 7, 2_999]]))
    assert sorted(asked) == sorted(preads) and len(asked) == 2 * 4
    preads.clear()
    # Without it threads read, as they do many rows.
    monkeypatch.setattr(engram_table, "_FEW_RUNS", 0)
    shared.check(table, np.array([[5, 900, 901, 7, 2_999]]))
    assert sorted(preads) == sorted(asked)
    table.close()


def test_concurrent_reads(shared: Table):
    table = shared.open(cache_bytes=20_000)
    rng = np.random.default_rng(5)
    batches = [rng.zipf(1.3, 200) % N_ROWS for _ in range(40)]
    with ThreadPoolExecutor(6) as callers:
        for done in [callers.submit(shared.check, table, rows) for rows in batches]:
            done.result()
    stats = table.stats()
    assert stats.rows_requested == 40 * 200
    assert stats.rows_distinct == sum(len(set(rows.tolist())) for rows in batches)
    assert stats.bytes_read == (stats.rows_distinct - stats.cache_hits) * (HEAD_DIM + 2)
    assert 0 < stats.cache_hits < stats.rows_distinct
    table.close()


@given(max_bytes=st.integers(0, 5_000), head_dim=st.sampled_from([32, 64, 256]))
def test_hot_rows_never_take_more_than_their_bound(max_bytes: int, head_dim: int):
    hot = HotRows(max_bytes, head_dim)
    before = hot.nbytes
    for start in (0, 50, 0):
        rows = np.arange(start, start + 100)
        hot.put(
            rows, np.zeros((100, head_dim), np.uint8), np.zeros((100, head_dim // 32), np.uint8)
        )
        hot.get(
            rows, np.zeros((100, head_dim), np.uint8), np.zeros((100, head_dim // 32), np.uint8)
        )
    assert hot.nbytes == before <= max_bytes
    assert hot.n_slots == before // (head_dim + head_dim // 32 + 9)


def test_a_used_row_outlives_one_newcomer():
    hot = HotRows(75, 64)
    assert hot.n_slots == 1

    def put(row: int) -> None:
        hot.put(np.array([row]), np.full((1, 64), row, np.uint8), np.full((1, 2), row, np.uint8))

    def get(row: int) -> list[int]:
        codes, scales = np.zeros((1, 64), np.uint8), np.zeros((1, 2), np.uint8)
        found = hot.get(np.array([row]), codes, scales)
        assert found.tolist() == [bool(codes.any())]
        assert codes.tolist() + scales.tolist() == [[codes[0, 0]] * 64, [codes[0, 0]] * 2]
        return np.unique(codes).tolist()

    put(1)
    assert get(1) == [1]
    put(2)  # row 1 was used: it stays, once
    assert get(2) == [0]
    put(3)
    assert (get(1), get(3)) == ([0], [3])
    put(4)
    put(5)  # row 4 never came, row 3's second chance is spent
    assert (get(3), get(5)) == ([0], [5])


def test_closing_twice_spares_the_next_owner_of_the_descriptor(shared: Table):
    table = shared.open()
    table.close()
    with shared.location.path.open("rb") as file:  # takes the descriptor that is free again
        table.close()
        assert file.read(1) == b"\xff"
    with pytest.raises(ModelFileError, match="cannot read"):
        table.read(np.array([1]))


def test_file_that_ends_early_is_refused_when_opened(own: Table):
    end = SCALE_OFFSET + N_ROWS * 2
    data = own.location.path.read_bytes()
    own.location.path.write_bytes(data[:end])
    own.check(own.open(), np.array([N_ROWS - 1]))
    own.location.path.write_bytes(data[: end - 1])
    with pytest.raises(ModelFileError, match=rf"shard has {end - 1} bytes.*ends at {end}: fetch"):
        own.open()
    own.location.path.unlink()
    with pytest.raises(ModelFileError, match=r"cannot open .*shard \(No such file"):
        own.open()


@pytest.mark.parametrize(
    ("cut", "wanted"),
    [
        (WEIGHT_OFFSET + 11 * HEAD_DIM + 5, WEIGHT_OFFSET + 12 * HEAD_DIM),
        (SCALE_OFFSET + 11 * 2 + 1, SCALE_OFFSET + 12 * 2),
    ],
)
def test_file_that_shrinks_while_open(own: Table, cut: int, wanted: int):
    table = own.open(AMPLE_BYTES)
    own.check(table, np.array([3, 10]))
    with own.location.path.open("r+b") as file:
        file.truncate(cut)
    own.check(table, np.array([3, 10]))  # both are hot
    with pytest.raises(ModelFileError, match=rf"shard ends before byte {wanted}, .*: fetch"):
        table.read(np.array([8, 9, 10, 11]))
    with pytest.raises(ModelFileError, match="shard ends before byte"):
        table.read(np.array([2_000]))
    table.close()


def test_disk_error_names_file_and_byte(own: Table, monkeypatch: pytest.MonkeyPatch):
    def fail(fd: int, n_bytes: int, offset: int) -> bytes:
        raise OSError(5, "Input/output error")

    table = own.open()
    monkeypatch.setattr(engram_table.os, "pread", fail)
    at = WEIGHT_OFFSET + 9 * HEAD_DIM
    with pytest.raises(ModelFileError, match=rf"shard at byte {at} \(Input/output error\)"):
        table.read(np.array([9]))
    table.close()


@pytest.mark.parametrize(
    ("part", "column", "code"),
    [("scales", 1, 0xFF), ("codes", 0, 0x7F), ("codes", HEAD_DIM - 1, 0xFF)],
)
def test_code_that_is_no_number(own: Table, part: str, column: int, code: int):
    getattr(own, part)[41, column] = code
    own.write()
    table = own.open(AMPLE_BYTES)
    own.check(table, np.array([40, 42]))
    for _ in range(2):  # not taken into the cache either
        with pytest.raises(ModelFileError, match=r"row 41 .*shard has a code .* is no number"):
            table.read(np.array([40, 41, 42]))
    table.close()


def test_a_small_table_takes_no_more_slots_than_it_has_rows(shared: Table):
    tracemalloc.start()
    table = shared.open(cache_bytes=1 << 30)
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    table.close()
    assert taken < 2 * N_ROWS * (HEAD_DIM + 2)
