"""Records: they come back oldest first, are bounded, and a damaged one is left out."""

from pathlib import Path

import numpy as np
import pytest

from tests.diskcache.content import FLUSH_S, opened, tokens
from tests.diskcache.support import damage_file, names_of, warnings


def test_records_come_back_oldest_first(tmp_path: Path) -> None:
    now = [1e9]
    puts = [(bytes([i]) * 32, tokens(i, 10 * i)) for i in range(5)]
    with opened(tmp_path / "kv", clock=lambda: now[0]) as cache:
        for key, ids in puts:
            now[0] += 1
            cache.record_put(key, ids)
        now[0] += 1
        cache.record_put(puts[1][0], tokens(9, 3))
        assert cache.flush(FLUSH_S)
    expected = [puts[0], *puts[2:], (puts[1][0], tokens(9, 3))]
    with opened(tmp_path / "kv", clock=lambda: now[0]) as cache:
        found = cache.records()
        assert [key for key, _ in found] == [key for key, _ in expected]
        for (_, ids), (_, wanted) in zip(found, expected, strict=True):
            assert np.array_equal(ids, wanted)
    with opened(tmp_path / "kv", fingerprint=b"other") as cache:
        assert cache.records() == []


def test_records_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1e9]
    limit = 64 * 20_000
    with opened(tmp_path / "kv", space_bytes=limit, clock=lambda: now[0]) as cache:
        for i in range(60):
            now[0] += 1
            cache.record_put(bytes([i]) * 32, tokens(i, 200))
        cache.record_put(bytes([99]) * 32, tokens(1, 6000))
        assert cache.flush(FLUSH_S)
        size = sum(path.stat().st_size for path in names_of(tmp_path / "kv", ".record"))
        assert 18_000 < size <= 20_000
        kept = [key[0] for key, _ in cache.records()]
        assert kept == list(range(60 - len(kept), 60))
        monkeypatch.setattr("mlx_engine.diskcache.records.MOST_RECORDS", 3)
        cache.record_put(bytes([60]) * 32, tokens(1, 10))
        assert cache.flush(FLUSH_S)
        assert [key[0] for key, _ in cache.records()] == [58, 59, 60]


def test_a_damaged_record_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with opened(tmp_path / "kv") as cache:
        for i in range(3):
            cache.record_put(bytes([i]) * 32, tokens(i, 10))
        assert cache.flush(FLUSH_S)
        damage_file(names_of(tmp_path / "kv", ".record")[1], "flip last")
        assert sorted(key[0] for key, _ in cache.records()) == [0, 2]
        assert len(warnings(caplog)) == 1
