"""A state as bytes and back: equal to the byte, and it goes on alike."""

import json
from collections.abc import Callable
from itertools import pairwise
from typing import Any, cast

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_engine.config import ModelConfig
from mlx_engine.config_file import parse_config
from mlx_engine.errors import CacheCorrupt
from mlx_engine.formats import CacheFormats
from mlx_engine.session import Session
from mlx_engine.state import Checkpoint, SessionState
from mlx_engine.state_transfer import Bytes, Import, export_rows, export_tail, parts
from tests.engine.support import Subject, build, tiny_config
from tests.engine.timelines import greedy, seen
from tests.reference.random_tensors import DATA
from tests.unit.arrays import host
from tests.unrounded import UNROUNDED

IDS = np.random.default_rng(2).integers(3, 250, 150).tolist()
WRAPS = [(8, n) for n in (1, 2, 7, 8, 9, 10, 17)] + [(128, n) for n in (127, 128, 129)]


def subject(window: int = 8) -> Subject:
    return build(tiny_config(sliding_window=window), 0)


def session(n: int, window: int = 8, formats: CacheFormats | None = None) -> Session:
    own = Session(subject(window).model, subject(window).reader, chunk_tokens=16, formats=formats)
    own.sync(IDS[:n])
    return own


def exported(state: SessionState, *cuts: int) -> tuple[Bytes, ...]:
    """The rows of a state, exported in ranges and put together."""
    edges = [0, *cuts, state.position]
    ranges = [export_rows(state, a, b) for a, b in pairwise(edges)]
    return tuple(np.concatenate(part) for part in zip(*ranges, strict=True))


def fill(state: Import, rows: tuple[Bytes, ...]) -> None:
    for room, part in zip(state.rows, rows, strict=True):
        room[: part.size] = part
        room[part.size :] = 255


def imported(
    config: ModelConfig,
    position: int,
    rows: tuple[Bytes, ...],
    tail: bytes,
    formats: CacheFormats | None = None,
) -> SessionState:
    state = Import(config, position, formats)
    fill(state, rows)
    return state.finish(position, tail)


def restored(checkpoint: Checkpoint, rows: tuple[Bytes, ...]) -> SessionState:
    return imported(subject().config, checkpoint.position, rows, export_tail(checkpoint))


def test_the_released_sizes() -> None:
    config = parse_config(json.loads((DATA / "released_config.json").read_text()))
    found = parts(config)
    assert len(found) == 12
    assert sum(part.row_bytes / part.ratio for part in found) == 890
    tail = export_tail(SessionState(config).checkpoint())
    # 40 windows of 128 rows; each window's end and count, and the position.
    assert len(tail) == 40 * (128 * 528 + 12) + 8


@pytest.mark.parametrize("is_rounded", [True, False], ids=["rounded", "unrounded"])
@pytest.mark.parametrize(("window", "n"), WRAPS)
def test_a_restored_state_is_the_live_one(window: int, n: int, is_rounded: bool) -> None:
    formats = None if is_rounded else UNROUNDED
    own = session(n, window, formats)
    checkpoint = own.state.checkpoint()
    rows = exported(own.state)
    sizes = [part.n_bytes(0, n) for part in parts(own.state.config, formats)]
    assert [part.nbytes for part in rows] == sizes
    state = imported(own.state.config, n, rows, export_tail(checkpoint), formats)
    assert seen(state) == seen(own.state)
    other = Session(subject(window).model, subject(window).reader, formats=formats)
    other.restore(IDS[:n], state)
    for each in (own, other):
        each.sync([*IDS[:n], 5])
    ours, theirs = (greedy(each, each.sync([*IDS[:n], 5]), 12) for each in (own, other))
    assert theirs[0] == ours[0]
    np.testing.assert_array_equal(theirs[1], ours[1])
    assert seen(other.state) == seen(own.state)


def test_rows_past_the_restored_ones_are_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    def poisoned(shape: tuple[int, int], dtype: np.dtype[Any]) -> mx.array:
        return mx.array(np.full(shape, 255, dtype))

    monkeypatch.setattr("mlx_engine.state_transfer._unwritten", poisoned)
    own = session(60)
    state = Import(subject().config, 100)
    for room, part in zip(state.rows, exported(own.state), strict=True):
        room[: part.size] = part
    # As where the cache came back with a shorter state than it was asked for.
    shorter = state.finish(60, export_tail(own.state.checkpoint()))
    keys = shorter.index_keys.values()
    growing = [*shorter.compressed.values(), *(p for k in keys for p in (k.codes, k.scales))]
    assert growing and all(rows.length < rows.buffer.shape[0] for rows in growing)
    assert not any(host(rows.buffer[rows.length :]).any() for rows in growing)


@settings(deadline=None, max_examples=25)
@given(st.sets(st.integers(1, 60)))
def test_ranges_side_by_side_leave_nothing_out(cuts: set[int]) -> None:
    own = session(61)
    for whole, pieces in zip(exported(own.state), exported(own.state, *sorted(cuts)), strict=True):
        np.testing.assert_array_equal(pieces, whole)


def test_an_export_stays_what_it_was() -> None:
    own = session(60)
    checkpoint = own.state.checkpoint()
    rows, before = exported(own.state), seen(own.state)
    copies = [part.copy() for part in rows]
    for token_id in IDS[60:90]:
        mx.eval(own.step(token_id))
    for part, copy in zip(rows, copies, strict=True):
        np.testing.assert_array_equal(part, copy)
    # And rows that steps did not reach can still be had, beside an older checkpoint.
    later = export_rows(own.state, 0, 60)
    assert all(np.array_equal(*each) for each in zip(later, rows, strict=True))
    assert seen(restored(checkpoint, later)) == before


def test_an_export_waits_for_the_device_once(monkeypatch: pytest.MonkeyPatch) -> None:
    own = session(60)
    expected = exported(own.state)
    evaluate = cast(Callable[..., None], mx.eval)
    calls: list[int] = []

    def counted(*arrays: Any) -> None:
        calls.append(
            sum(len(cast(list[Any], each)) if isinstance(each, list) else 1 for each in arrays)
        )
        evaluate(*arrays)

    monkeypatch.setattr(mx, "eval", counted)
    assert all(
        np.array_equal(*each) for each in zip(export_rows(own.state, 0, 60), expected, strict=True)
    )
    assert calls == [len(expected)]


@pytest.mark.parametrize("n", [1, 2, 9, 33])
def test_a_restored_state_has_room(n: int) -> None:
    own = session(n)
    state = restored(own.state.checkpoint(), exported(own.state))
    for rows in state.compressed.values():
        assert rows.buffer.shape[0] >= rows.length + 256


def addresses(state: SessionState) -> list[int]:
    growing = [*state.compressed.values()]
    growing += [each for keys in state.index_keys.values() for each in (keys.codes, keys.scales)]
    return sorted(np.array(rows.buffer, copy=False).ctypes.data for rows in growing)


@pytest.mark.skipif(mx.cuda.is_available(), reason="the device's memory is apart")
def test_rows_are_read_to_where_steps_go_on() -> None:
    own = session(61)
    state = Import(subject().config, 61)
    at = sorted(room.ctypes.data for room in state.rows)
    fill(state, exported(own.state))
    other = Session(subject().model, subject().reader)
    other.restore(IDS[:61], state.finish(61, export_tail(own.state.checkpoint())))
    mx.eval(other.step(5))
    assert addresses(other.state) == at
    mx.eval(own.step(5))
    assert seen(other.state) == seen(own.state)


def test_room_for_more_than_there_was() -> None:
    own = session(61)
    state = Import(subject().config, 150)
    fill(state, exported(own.state))
    found = state.finish(61, export_tail(own.state.checkpoint()))
    assert seen(found) == seen(own.state)
    other = Session(subject().model, subject().reader, chunk_tokens=16)
    other.restore(IDS[:61], found)
    np.testing.assert_array_equal(host(other.sync(IDS[:90])), host(own.sync(IDS[:90])))


def test_what_is_no_state_of_this_model() -> None:
    own = session(61)
    rows, tail = exported(own.state), export_tail(own.state.checkpoint())
    config = subject().config

    def refused(position: int, tail: bytes) -> None:
        with pytest.raises(CacheCorrupt):
            Import(config, 61).finish(position, tail)

    imported(config, 61, rows, tail)
    refused(59, tail)
    refused(61, tail[:-1])
    refused(61, tail + b"\0")
    refused(61, b"\1" + tail[1:])
    # Where the first window ends, and how many of its rows count.
    refused(61, tail[:8] + b"\0" + tail[9:])
    refused(61, tail[:16] + b"\1" + tail[17:])
