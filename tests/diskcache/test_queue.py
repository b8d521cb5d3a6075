"""What waits for the disk: its limit, and what becomes of it at the end."""

import threading
from pathlib import Path
from typing import Any

import pytest

from mlx_engine.diskcache import cache as cache_module
from mlx_engine.diskcache.cache import DiskCache
from mlx_engine.diskcache.writer import Job, Writer
from tests.diskcache.content import FLUSH_S, PARTS, begin, check, opened, restored, save, tokens
from tests.diskcache.recording import HastyFiles
from tests.diskcache.support import RELEASED_PARTS, RELEASED_TAIL_BYTES, names_of, saved, warnings


def test_close_writes_what_is_queued_within_its_time(tmp_path: Path) -> None:
    ids = [tokens(seed, 3000) for seed in range(5)]
    with opened(tmp_path / "kv") as cache:
        for each in ids:
            save(cache, each, 3000)
    with opened(tmp_path / "kv") as cache:
        assert [restored(cache, each) for each in ids] == [3000] * 5


def test_close_drops_and_counts_what_its_time_is_too_short_for(tmp_path: Path) -> None:
    ids = [tokens(seed, 3000) for seed in range(5)]
    cache = DiskCache.open(
        tmp_path / "kv", fingerprint=b"weights", parts=PARTS, free_floor_bytes=0, files=HastyFiles()
    )
    assert cache.flush(FLUSH_S)
    for each in ids:
        save(cache, each, 3000)
    cache.close(0.0)
    stats = cache.stats()
    assert stats.dropped > 0
    assert stats.saved + stats.dropped >= 5
    assert stats.queued_bytes == 0
    assert not save(cache, ids[0], 3000) or cache.stats().dropped > stats.dropped
    with opened(tmp_path / "kv") as again:
        check(again, ids)
        assert again.flush(FLUSH_S)
        assert names_of(tmp_path / "kv", ".partial") == []


def test_a_full_queue_drops_and_counts(tmp_path: Path) -> None:
    ids = tokens(1, 5000)
    enough = sum(part.n_bytes(0, 3000) for part in PARTS) + 1000
    with opened(tmp_path / "kv", queue_bytes=enough) as cache:
        assert cache.begin(ids, 5000) is None
        assert cache.stats().dropped == 1
        started = begin(cache, ids, 3000)
        assert started is not None
        started.finish(bytes(2000), 1.0)
        assert cache.stats().dropped == 2
        saved(cache, ids, 3000)
        assert restored(cache, ids) == 3000


def test_the_queue_is_bounded_by_bytes() -> None:
    held = threading.Event()
    done: list[int] = []
    writer = Writer(100)
    writer.put(Job(lambda: done.append(held.wait(FLUSH_S)), 60, lambda: None))
    assert not writer.put(Job(lambda: done.append(2), 41, lambda: None))
    assert writer.put(Job(lambda: done.append(3), 40, lambda: None))
    assert writer.held_bytes == 100
    assert not writer.flush(0.01)
    held.set()
    assert writer.flush(FLUSH_S)
    assert done == [True, 3]
    assert writer.held_bytes == 0
    assert writer.close(1.0)
    assert not writer.put(Job(lambda: done.append(4), 0, lambda: None))


def test_a_fault_of_our_own_ends_no_thread(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise ZeroDivisionError

    ids = tokens(1, 3000)
    with opened(tmp_path / "kv") as cache:
        with monkeypatch.context() as patch:
            patch.setattr("mlx_engine.diskcache.commit.worth", broken)
            saved(cache, ids, 3000)
        assert cache.stats().dropped == 0
        monkeypatch.setattr("mlx_engine.diskcache.compose.layout.encode_tail", broken)
        saved(cache, ids, 2000)
        assert cache.stats().dropped == 1
        assert "could not be written" in warnings(caplog)[0]
        monkeypatch.undo()
        saved(cache, ids, 2000)
        assert restored(cache, ids[:2500]) == 2000


def test_the_default_queue_takes_the_largest_anchor() -> None:
    largest = sum(part.n_bytes(0, 2**20) for part in RELEASED_PARTS) + 2 * RELEASED_TAIL_BYTES
    assert largest <= cache_module.QUEUE_BYTES
