"""An anchor's file that cannot be read for a while, or is damaged, takes nothing else with it."""

import errno
from pathlib import Path

import pytest

from mlx_engine.diskcache import check
from tests.diskcache.content import FLUSH_S, folder_bytes, opened, restored, save, tokens
from tests.diskcache.support import FailingFiles, damage_file, names_of, saved

pytestmark = pytest.mark.usefixtures("no_surprises")

IDS = tokens(1, 9000)


def filled(folder: Path) -> Path:
    """Three anchors, each on the one before; the path of the first one's file."""
    with opened(folder) as cache:
        saved(cache, IDS, 3000)
        (first,) = names_of(folder, ".anchor")
        saved(cache, IDS, 6000, 9000)
    return first


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES, errno.ESTALE, errno.EMFILE])
def test_one_failing_read_at_the_start_loses_nothing(tmp_path: Path, code: int) -> None:
    first = filled(tmp_path / "kv")
    before = names_of(tmp_path / "kv", "")
    n_opened = 0

    def fault(name: str, path: Path | None) -> int | None:
        nonlocal n_opened
        if name != "contents" or path != first:
            return None
        n_opened += 1
        return code if n_opened == 1 else None

    with opened(tmp_path / "kv", files=FailingFiles(fault)) as cache:
        assert cache.flush(FLUSH_S)
        # The transaction at the start has read it again.
        assert restored(cache, IDS) == 9000
    assert set(before) <= set(names_of(tmp_path / "kv", ""))


def test_an_anchor_that_stays_unreadable_keeps_what_stands_on_it(tmp_path: Path) -> None:
    first = filled(tmp_path / "kv")
    before = set(names_of(tmp_path / "kv", ""))

    def fault(name: str, path: Path | None) -> int | None:
        return errno.EIO if name == "contents" and path == first else None

    with opened(tmp_path / "kv", files=FailingFiles(fault)) as cache:
        saved(cache, tokens(2, 500), 500)
        assert restored(cache, IDS) == 0
        assert cache.stats().damaged == 0
    files = FailingFiles(fault)
    check.prune(tmp_path / "kv", files=files)
    found = check.verify(tmp_path / "kv", put_aside=True, files=files)
    assert [each.name.endswith(first.name) for each in found.faults] == [True]
    assert before <= set(names_of(tmp_path / "kv", ""))
    with opened(tmp_path / "kv") as cache:
        assert restored(cache, IDS) == 9000


def test_what_a_damaged_anchor_stood_on_waits_for_its_place(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    first = filled(folder)
    damage_file(first, "flip last")
    segments = names_of(folder, ".segment")
    for _ in range(2):
        with opened(folder) as cache:
            assert cache.flush(FLUSH_S)
            assert restored(cache, IDS) == 0
            assert cache.stats().evicted == 0
        assert names_of(folder, ".segment") == segments
    with opened(folder) as cache:
        # Once the anchor is there again, so are those that stand on it.
        saved(cache, IDS, 3000)
        saved(cache, tokens(3, 100), 100)
        assert restored(cache, IDS) == 9000


def test_what_nobody_is_sure_of_goes_before_an_anchor(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    first = filled(folder)
    with opened(folder) as cache:
        saved(cache, tokens(2, 2000), 2000)
    used = folder_bytes(folder)
    damage_file(first, "flip last")
    with opened(folder, space_bytes=used) as cache:
        assert save(cache, tokens(4, 3000), 3000, saved_s=1e-6)
        assert cache.flush(FLUSH_S)
        assert restored(cache, tokens(4, 3000)) == 3000
        assert restored(cache, tokens(2, 2000)) == 2000
        assert cache.stats().evicted == 0
        assert folder_bytes(folder) <= used


def test_a_plan_hashes_no_prefix_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlx_engine.diskcache import index

    hashed = [0]

    class Counting(index.PrefixKeys):
        def after(self, ids: index.TokenIds) -> bytes:
            hashed[0] += len(ids)
            return super().after(ids)

    with opened(tmp_path / "kv", space_bytes=10**6) as cache:
        saved(cache, IDS, 3000, 6000, 9000)
        with cache.protect(IDS):
            monkeypatch.setattr(index, "PrefixKeys", Counting)
            for _ in range(3):
                with cache._shelf.lock:  # pyright: ignore[reportPrivateUsage]
                    cache._committer._plan(1, 0, None, 0.0)  # pyright: ignore[reportPrivateUsage]
    assert hashed[0] == 0
