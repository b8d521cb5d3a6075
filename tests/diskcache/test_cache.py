"""Saving and restoring: what is saved comes back, or less of it, and nothing else."""

from pathlib import Path

import pytest

from mlx_engine.diskcache import names
from mlx_engine.diskcache.cache import DiskCache
from mlx_engine.diskcache.layout import TokenIds
from tests.diskcache.content import (
    FLUSH_S,
    PARTS,
    begin,
    folder_bytes,
    opened,
    restored,
    rows,
    tail,
    tokens,
)
from tests.diskcache.support import EDGES, names_of, saved


@pytest.mark.parametrize("position", EDGES)
def test_an_anchor_comes_back_in_this_process_and_the_next(tmp_path: Path, position: int) -> None:
    ids = tokens(1, 6000)
    with opened(tmp_path / "kv") as cache:
        saved(cache, ids, position)
        assert restored(cache, ids) == position
        assert restored(cache, ids[:position]) == position
        assert cache.lookup(ids[: position - 1]) == 0
        assert cache.lookup(ids[1:]) == 0
    with opened(tmp_path / "kv") as cache:
        assert restored(cache, ids) == position


def test_an_anchor_that_is_stored_is_not_wanted(tmp_path: Path) -> None:
    ids = tokens(1, 3000)
    with opened(tmp_path / "kv") as cache:
        saved(cache, ids, 2500)
        assert cache.begin(ids, 2500) is None
        more = cache.begin(ids, 3000)
        assert more is not None
        assert more.ranges == [(2500, 3000)]


def test_two_saves_of_one_anchor_are_written_once(tmp_path: Path) -> None:
    ids = tokens(1, 3000)
    with opened(tmp_path / "kv") as cache:
        first, second = begin(cache, ids, 3000), begin(cache, ids, 3000)
        assert first is not None and second is not None
        first.finish(tail(ids, 3000), 1.0)
        second.finish(tail(ids, 3000), 1.0)
        assert cache.flush(FLUSH_S)
        assert cache.stats().saved == 1
        assert cache.stats().dropped == cache.stats().faults == 0
        assert restored(cache, ids) == 3000


@pytest.mark.parametrize("is_restarted", [False, True], ids=["running", "restarted"])
def test_a_lost_tail_is_saved_again_alone(tmp_path: Path, is_restarted: bool) -> None:
    ids = tokens(1, 4000)
    with opened(tmp_path / "kv") as cache:
        saved(cache, ids, 2000)
        (low,) = names_of(tmp_path / "kv", ".tail")
        saved(cache, ids, 4000)
        low.unlink()
        if not is_restarted:
            assert restored(cache, ids[:3000]) == 0
            save_tail_again(cache, ids)
    with opened(tmp_path / "kv") as cache:
        if is_restarted:
            assert cache.lookup(ids[:3000]) == 0
            save_tail_again(cache, ids)
        assert restored(cache, ids[:3000]) == 2000
        assert restored(cache, ids) == 4000


def save_tail_again(cache: DiskCache, ids: TokenIds) -> None:
    again = cache.begin(ids, 2000)
    assert again is not None
    assert again.ranges == []
    again.finish(tail(ids, 2000), 1.0)
    assert cache.flush(FLUSH_S)
    assert restored(cache, ids[:3000]) == 2000
    assert cache.stats().saved_bytes < 4000 or cache.stats().saved > 1


def test_a_save_begun_before_a_shorter_one_is_cut_to_what_is_missing(tmp_path: Path) -> None:
    ids = tokens(1, 3000)
    with opened(tmp_path / "kv") as cache:
        longer = begin(cache, ids, 3000)
        assert longer is not None
        saved(cache, ids, 1000)
        before = folder_bytes(tmp_path / "kv")
        longer.finish(tail(ids, 3000), 1.0)
        assert cache.flush(FLUSH_S)
        assert restored(cache, ids) == 3000
        assert restored(cache, ids[:2000]) == 1000
        rows_bytes = sum(part.n_bytes(1000, 3000) for part in PARTS) + 4 * 2000
        assert folder_bytes(tmp_path / "kv") - before < rows_bytes + 2500


def test_a_save_that_is_not_finished_writes_nothing(tmp_path: Path) -> None:
    ids = tokens(1, 3000)
    with opened(tmp_path / "kv") as cache:
        dropped = begin(cache, ids, 3000)
        assert dropped is not None
        dropped.drop()
        assert begin(cache, ids, 3000) is not None
        assert cache.flush(FLUSH_S)
        assert names_of(tmp_path / "kv", ".segment") == []


def test_misuse_of_a_save_is_refused(tmp_path: Path) -> None:
    ids = tokens(1, 3000)
    with opened(tmp_path / "kv") as cache:
        for position in (0, -2, 999, 3002):
            with pytest.raises(ValueError, match="no anchor can lie"):
                cache.begin(ids, position)
        started = cache.begin(ids, 3000)
        assert started is not None
        with pytest.raises(ValueError, match="is next"):
            started.rows(2048, 3000, rows(ids, 2048, 3000))
        with pytest.raises(ValueError, match="do not have"):
            started.rows(0, 2048, rows(ids, 0, 2046))
        with pytest.raises(ValueError, match="missing"):
            started.finish(b"", 1.0)
        started.rows(0, 2048, rows(ids, 0, 2048))
        started.rows(2048, 3000, rows(ids, 2048, 3000))
        with pytest.raises(ValueError, match="is next"):
            started.rows(2048, 3000, rows(ids, 2048, 3000))


def test_files_are_the_owners_alone(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b" / "kv"
    with opened(folder) as cache:
        saved(cache, tokens(1, 3000), 3000)
        cache.record_put(bytes(32), tokens(1, 10))
    paths = [folder.parent, folder, *folder.rglob("*")]
    assert len(paths) > 8
    for path in paths:
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path
    assert (folder / names.MARKER_NAME).read_bytes().startswith(b"Signature: 8a477f597d28d172")
