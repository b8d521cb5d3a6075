"""The session state: rings and growing rows against plain lists, sizes, and updates in place."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_engine.state import GrowingRows, Window


def _rows(first: int, count: int) -> mx.array:
    """Rows that name their position."""
    return mx.array(np.arange(first, first + count, dtype=np.uint32)[:, None].repeat(2, 1))


def _positions(rows: mx.array) -> list[int]:
    return np.array(rows)[:, 0].tolist()


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 9), st.lists(st.integers(1, 20), min_size=1, max_size=12))
def test_a_window_shows_each_chunk_all_that_its_queries_can_see(
    capacity: int, chunks: list[int]
) -> None:
    window, end = Window(capacity, 2), 0
    for n in chunks:
        if (ring := window.ring(end, n)) is None:
            seen = window.extend(_rows(end, n), end)
        else:
            slot = mx.array([ring.slot])
            rows = mx.slice_update(ring.rows, _rows(end, n), slot, axes=[0])
            seen = window.turn(rows, end)
        oldest = max(0, end - capacity + 1)
        end += n
        if seen.first_position is None:
            assert n == 1
            assert sorted(_positions(seen.rows)) == list(range(max(0, end - capacity), end))
        else:
            assert seen.first_position <= oldest
            assert _positions(seen.rows) == list(range(seen.first_position, end))
    ring = _positions(window.rows)
    for position in range(max(0, end - capacity), end):
        assert ring[position % capacity] == position


def test_a_gap_drops_the_rows_before_it() -> None:
    window = Window(4, 2)
    window.extend(_rows(0, 4), 0)
    seen = window.extend(_rows(10, 2), 10)
    assert seen.first_position == 10
    assert _positions(seen.rows) == [10, 11]
    seen = window.extend(_rows(12, 1), 12)
    assert seen.first_position == 10
    assert _positions(seen.rows) == [10, 11, 12]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=10))
def test_growing_rows_keep_every_row(chunks: list[int]) -> None:
    rows, length = GrowingRows(2), 0
    for n in chunks:
        rows.append(_rows(length, n))
        length += n
        assert rows.length == length
        assert _positions(rows.view()) == list(range(length))


@pytest.mark.parametrize("length", [1 << 10, 1 << 18])
def test_an_append_does_not_copy_what_is_there(length: int) -> None:
    rows = GrowingRows(72)
    rows.append(mx.zeros((length + 1, 72), dtype=mx.uint32))
    rows.append(mx.zeros((1, 72), dtype=mx.uint32))
    mx.eval(rows.buffer)
    assert rows.buffer.shape[0] > rows.length, "the next row must fit"
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    rows.append(mx.ones((1, 72), dtype=mx.uint32))
    mx.eval(rows.buffer)
    assert mx.get_peak_memory() - before < 1 << 14
    assert _positions(rows.view()[-1:]) == [1]


def test_spare_capacity_is_bounded() -> None:
    rows = GrowingRows(1)
    rows.append(mx.zeros((400_000, 1), dtype=mx.uint32))
    rows.append(mx.zeros((1, 1), dtype=mx.uint32))
    assert rows.buffer.shape[0] - rows.length <= 1 << 16


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 300), st.floats(0, 1)), min_size=1, max_size=8))
def test_rows_that_are_cut_and_go_on(steps: list[tuple[int, float]]) -> None:
    rows, expected = GrowingRows(2), list[int]()
    for n, (count, share) in enumerate(steps):
        rows.append(_rows(1000 * n, count))
        expected += range(1000 * n, 1000 * n + count)
        keep = int(share * len(expected))
        rows.truncate(keep)
        del expected[keep:]
        assert _positions(rows.view()) == expected


def test_a_copy_is_apart() -> None:
    rows = GrowingRows(2)
    rows.append(_rows(0, 300))
    copy = rows.copy(250)
    copy.append(_rows(7000, 5))
    rows.append(_rows(9000, 1))
    assert _positions(copy.view()) == [*range(250), *range(7000, 7005)]
    assert _positions(rows.view()) == [*range(300), 9000]


def test_of_many_rows_that_are_cut_the_room_is_given_back() -> None:
    rows = GrowingRows(1)
    rows.append(mx.zeros((400_000, 1), dtype=mx.uint32))
    rows.truncate(1000)
    assert rows.buffer.shape[0] <= 2000
    rows.truncate(900)
    assert rows.length == 900 and rows.buffer.shape[0] > rows.length


def test_rows_that_come_and_go_are_not_copied_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlx_engine.state.SPARE_ROWS", 1000)
    rows = GrowingRows(1)
    rows.append(mx.zeros((5000, 1), dtype=mx.uint32))
    rows.append(mx.zeros((1, 1), dtype=mx.uint32))
    sizes: set[int] = set()
    for _ in range(10):
        rows.append(mx.zeros((600, 1), dtype=mx.uint32))
        rows.truncate(rows.length - 700)
        sizes.add(rows.buffer.shape[0])
    # Each other size is a whole copy.
    assert len(sizes) == 1
    rows.truncate(2000)
    assert rows.buffer.shape[0] == 3000


@pytest.mark.parametrize("count", [1, 3, 4, 5, 9])
def test_a_window_returns_to_what_it_was(count: int) -> None:
    window = Window(4, 2)
    window.extend(_rows(0, count), 0)
    saved = window.save()
    window.extend(_rows(count, 1), count)
    window.extend(_rows(count + 1, 6), count + 1)
    window.restore(saved)
    seen = window.extend(_rows(count, 2), count)
    assert _positions(seen.rows) == list(range(max(0, count - 3), count + 2))
