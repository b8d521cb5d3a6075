"""Which folder is taken, and what becomes of one that changes hands while it is in use."""

import errno
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mlx_engine.diskcache import names
from mlx_engine.diskcache.store import Store
from mlx_engine.errors import CacheUnusable
from tests.diskcache.content import FLUSH_S, opened, restored, save, tokens
from tests.diskcache.recording import HastyFiles
from tests.diskcache.support import SmallDisk, saved, warnings

pytestmark = pytest.mark.usefixtures("no_surprises")


def mode_of(path: Path) -> int:
    return path.stat().st_mode & 0o777


@pytest.mark.parametrize("what", ["thesis.txt", "folder/thesis.txt", ".hidden"])
def test_a_folder_with_somebodys_files_is_refused_as_it_is(tmp_path: Path, what: str) -> None:
    folder = tmp_path / "Documents"
    (folder / what).parent.mkdir(parents=True)
    folder.chmod(0o755)
    (folder / what).write_text("all my work")
    with pytest.raises(CacheUnusable, match="an empty or a new folder") as refused, opened(folder):
        pass
    assert str(refused.value).count(". ") == 0
    assert mode_of(folder) == 0o755
    assert [path for path in folder.rglob("*") if path.is_file()] == [folder / what]


def test_a_folder_of_ours_may_get_other_files_later(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    with opened(folder) as cache:
        saved(cache, tokens(1, 2000), 2000)
    (folder / "notes.txt").write_text("mine")
    folder.chmod(0o755)
    with opened(folder) as cache:
        assert restored(cache, tokens(1, 2000)) == 2000
    assert mode_of(folder) == 0o700


def test_a_folder_that_its_owner_has_closed_stays_closed(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    folder.mkdir(mode=0o500)
    with pytest.raises(CacheUnusable, match="make it writable"), opened(folder):
        pass
    assert mode_of(folder) == 0o500 and list(folder.iterdir()) == []


def test_a_start_that_was_cut_off_is_taken_up(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    folder.mkdir(0o700)
    (folder / names.LOCK_NAME).write_bytes(b"")
    (folder / names.partial_name(0)).write_bytes(b"Sig")
    with opened(folder) as cache:
        saved(cache, tokens(1, 2000), 2000)
        assert restored(cache, tokens(1, 2000)) == 2000


def test_a_folder_whose_name_turns_into_a_link_keeps_the_targets_mode(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    target.chmod(0o755)
    (tmp_path / "kv").symlink_to(target)
    files = HastyFiles()
    with pytest.raises(OSError):
        files.make_private(tmp_path / "kv", files.status(target).file_id)
    with pytest.raises(OSError, match="took its place"):
        files.make_private(target, files.status(tmp_path).file_id)
    assert mode_of(target) == 0o755


def test_a_full_disk_at_the_start_is_said_and_ends(tmp_path: Path) -> None:
    ids = tokens(1, 2000)
    disk = SmallDisk(10**6)
    with opened(tmp_path / "kv", files=disk, free_floor_bytes=10**7) as cache:
        notice = str(cache.stats().notice)
        assert "free some space" in notice
        assert "not the cache's" not in notice
        assert cache.begin(ids, 2000) is None
        disk.free_bytes = 10**9
        assert cache.stats().notice is None
        saved(cache, ids, 2000)
        assert restored(cache, ids) == 2000
    with opened(tmp_path / "kv") as cache:
        assert restored(cache, ids) == 2000


def test_a_limit_that_is_too_small_is_said(tmp_path: Path) -> None:
    with opened(tmp_path / "kv", space_bytes=50) as cache:
        assert "too small" in str(cache.stats().notice)
        assert cache.begin(tokens(1, 10), 10) is None
    assert list((tmp_path / "kv").iterdir()) == []


def test_a_limit_that_is_too_small_for_a_state_is_said(tmp_path: Path) -> None:
    for space_bytes, is_said in ((5000, True), (50_000, False)):
        options = {"space_bytes": space_bytes, "tail_bytes": 20_000}
        with opened(tmp_path / "kv", **options) as cache:
            assert ("too small" in str(cache.stats().notice)) == is_said
    (tmp_path / "kv" / "film.mov").write_bytes(bytes(40_000))
    with opened(tmp_path / "kv", space_bytes=50_000, tail_bytes=20_000) as cache:
        assert "not the cache's" in str(cache.stats().notice)


def test_a_marker_that_was_emptied_is_written_again(tmp_path: Path) -> None:
    ids, folder = tokens(1, 2000), tmp_path / "kv"
    with opened(folder) as cache:
        saved(cache, ids, 2000)
    marker = folder / names.MARKER_NAME
    marker.write_bytes(b"")
    with opened(folder) as cache:
        assert restored(cache, ids) == 2000
    assert marker.read_bytes() == names.MARKER
    # With a file that is not ours nobody knows whose it was.
    marker.write_bytes(b"")
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(CacheUnusable), opened(folder):
        pass
    assert marker.read_bytes() == b""


def test_a_folder_stays_out_of_indexes_and_backups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, ran = tmp_path / "kv", list[list[object]]()

    def run(command: list[object], **_: object) -> None:
        ran.append(command)
        raise OSError(errno.ENOENT, "no such tool")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(sys, "platform", "darwin")
    for _ in range(2):
        with opened(folder):
            assert (folder / names.NO_INDEX_NAME).read_bytes() == b""
    # Once: the mark lies on the folder. That there is no such tool hurts nobody.
    assert ran == [["/usr/bin/tmutil", "addexclusion", folder]]


def test_a_removed_folder_shuts_the_cache_with_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ids = tokens(1, 6000)
    folder = tmp_path / "kv"
    with opened(folder) as cache:
        saved(cache, ids, 2000)
        shutil.rmtree(folder)
        for position in (3000, 4000, 5000):
            save(cache, ids, position)
            assert cache.flush(FLUSH_S)
        stats = cache.stats()
        assert stats.faults == 0
        assert stats.dropped >= 1
        assert "has been removed" in str(stats.notice)
        assert cache.begin(ids, 6000) is None
        assert restored(cache, ids) == 0
    assert len(warnings(caplog)) == 1
    assert not folder.exists()


def test_another_folder_in_its_place_is_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    with opened(folder) as cache:
        saved(cache, tokens(1, 2000), 2000)
        shutil.rmtree(folder)
        folder.mkdir()
        save(cache, tokens(1, 4000), 4000)
        assert cache.flush(FLUSH_S)
    assert list(folder.iterdir()) == []


def test_a_lock_file_that_was_replaced_counts_anew(tmp_path: Path) -> None:
    one = Store.open(tmp_path / "kv", HastyFiles(), 10**9, 0)
    other = Store.open(tmp_path / "kv", HastyFiles(), 10**9, 0)
    deadline_s = time.monotonic() + 5
    folder = names.folder_name(bytes(32))
    with one.locked(deadline_s):
        one.announce()
        one.make_folder(folder)
    lock = tmp_path / "kv" / names.LOCK_NAME
    count = int.from_bytes(lock.read_bytes(), "little")
    assert count > 0
    lock.unlink()
    with other.locked(deadline_s):
        # As often as brings the new file's count to where the old one's was.
        for _ in range(count):
            other.announce()
        other.make_folder(folder)
        other.write(folder, names.record_name(bytes(32)), [b"new"])
    with one.locked(deadline_s) as is_changed:
        assert is_changed
        assert one.sizes[folder] == {names.record_name(bytes(32)): 3}
    one.close()
    other.close()
