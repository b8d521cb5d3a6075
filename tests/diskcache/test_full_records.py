"""Records at the limit: room is made for a new one, and no old one goes before it is there."""

from pathlib import Path

from tests.diskcache.content import FLUSH_S, folder_bytes, opened, restored, tokens
from tests.diskcache.support import saved

LIMIT_BYTES = 200_000


def test_a_record_that_finds_no_room_is_counted_and_costs_no_old_one(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    with opened(folder, space_bytes=LIMIT_BYTES) as cache:
        for i in range(8):
            cache.record_put(bytes([i]) * 32, tokens(i, 60))
        assert cache.flush(FLUSH_S)
        before = [key for key, _ in cache.records()]
        assert len(before) == 8
        (folder / "foreign").write_bytes(bytes(LIMIT_BYTES - folder_bytes(folder)))
        for i in range(20, 28):
            cache.record_put(bytes([i]) * 32, tokens(i, 60))
        assert cache.flush(FLUSH_S)
        assert [key for key, _ in cache.records()] == before
        assert cache.stats().dropped == 8
        cache.record_put(bytes(32), tokens(1, 5000))
        assert cache.flush(FLUSH_S)
        assert cache.stats().dropped == 9


def test_room_is_made_for_a_record(tmp_path: Path) -> None:
    ids = [tokens(seed, 3000) for seed in range(2)]
    with opened(tmp_path / "kv") as cache:
        for each in ids:
            saved(cache, each, 3000)
        used = folder_bytes(tmp_path / "kv")
    with opened(tmp_path / "kv", space_bytes=used) as cache:
        with cache.protect(ids[1]):
            cache.record_put(bytes(32), ids[1][:100])
            assert cache.flush(FLUSH_S)
        assert [key for key, _ in cache.records()] == [bytes(32)]
        assert restored(cache, ids[1]) == 3000
        assert cache.lookup(ids[0]) == 0
        assert folder_bytes(tmp_path / "kv") <= used
