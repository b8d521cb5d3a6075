"""What a caller finds unusable is given up, and tenants with different salts share nothing."""

from pathlib import Path

import pytest

from tests.diskcache.content import FLUSH_S, opened, restored, room, save, tokens
from tests.diskcache.support import names_of, saved, warnings

pytestmark = pytest.mark.usefixtures("no_surprises")


def test_a_rejected_anchor_gives_way_to_the_next_shorter_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ids = tokens(1, 5000)
    with opened(tmp_path / "kv") as cache:
        saved(cache, ids, 2000, 3000, 5000)
        cache.reject(ids, 3000)
        assert cache.lookup(ids[:4000]) == 2000
        assert restored(cache, ids) == 5000
        assert cache.flush(FLUSH_S)
        assert len(names_of(tmp_path / "kv", ".tail.damaged")) == 1
        assert len(warnings(caplog)) == 1
        again = cache.begin(ids, 3000)
        assert again is not None
        assert again.ranges == []
        again.drop()
        saved(cache, ids, 3000)
        assert restored(cache, ids[:4000]) == 3000
    with opened(tmp_path / "kv") as cache:
        assert restored(cache, ids[:4000]) == 3000


def test_a_save_right_behind_a_rejection_counts(tmp_path: Path) -> None:
    ids = tokens(1, 3000)
    with opened(tmp_path / "kv") as cache:
        saved(cache, ids, 3000)
        cache.reject(ids, 3000)
        assert save(cache, ids, 3000)
        assert cache.flush(FLUSH_S)
        assert restored(cache, ids) == 3000


def test_rejecting_what_is_not_there_does_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ids = tokens(1, 3000)
    with opened(tmp_path / "kv") as cache:
        saved(cache, ids, 2000)
        cache.reject(ids, 3000)
        cache.reject(tokens(2, 3000), 2000)
        assert cache.lookup(ids) == 2000
    assert warnings(caplog) == []


def test_tenants_with_different_salts_share_nothing(tmp_path: Path) -> None:
    ids = tokens(1, 3000)
    with opened(tmp_path / "kv", salt=b"one") as one:
        saved(one, ids, 3000)
        one.record_put(bytes(32), ids[:9])
        assert one.flush(FLUSH_S)
        for salt in (b"two", b""):
            with opened(tmp_path / "kv", salt=salt) as other:
                assert other.lookup(ids) == 0
                assert other.restore(ids, 3000, room(3000)) is None
                assert other.records() == []
    with opened(tmp_path / "kv", salt=b"one") as one:
        assert restored(one, ids) == 3000
