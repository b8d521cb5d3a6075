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
        seen = window.extend(_rows(end, n), end)
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
