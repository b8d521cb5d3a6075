"""The folder: who may use it, what counts, and that the limit holds whatever is written."""

import errno
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlx_engine.diskcache import names
from mlx_engine.diskcache.files import Files, Kind, Status
from mlx_engine.diskcache.lock import Busy
from mlx_engine.diskcache.store import Store
from mlx_engine.errors import CacheUnusable
from tests.diskcache.content import (
    FLUSH_S,
    begin,
    check,
    folder_bytes,
    opened,
    restored,
    save,
    tail,
    tokens,
)
from tests.diskcache.recording import HastyFiles
from tests.diskcache.support import FailingFiles, LimitedFiles, names_of

FOLDER = names.folder_name(bytes(32))
PLENTY = 10**9


def open_store(folder: Path, space_bytes: int = PLENTY, files: Files | None = None) -> Store:
    return Store.open(folder, files or HastyFiles(), space_bytes, 0)


def soon() -> float:
    return time.monotonic() + 5


def test_a_link_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "kv").symlink_to(tmp_path / "real")
    with pytest.raises(CacheUnusable, match="symbolic link"):
        open_store(tmp_path / "kv")
    assert list((tmp_path / "real").iterdir()) == []


@pytest.mark.parametrize("where", ["photos", names.MARKER_NAME, names.LOCK_NAME, FOLDER])
def test_a_link_inside_the_folder_is_refused(tmp_path: Path, where: str) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (tmp_path / "kv").mkdir()
    (tmp_path / "kv" / where).symlink_to(outside)
    with pytest.raises(CacheUnusable, match="symbolic link"):
        open_store(tmp_path / "kv")


def test_somebodys_folder_that_is_named_as_a_cache_is_not_gone_through(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(CacheUnusable, match="it lacks its marker"):
        Store.existing(tmp_path, Files())


def test_a_link_inside_a_folder_of_ours_is_refused(tmp_path: Path) -> None:
    with opened(tmp_path / "kv") as cache:
        save(cache, tokens(1, 3000), 3000)
    victim = names_of(tmp_path / "kv", ".tail")[0]
    content = victim.read_bytes()
    victim.rename(tmp_path / "stolen")
    victim.symlink_to(tmp_path / "stolen")
    with pytest.raises(CacheUnusable, match="symbolic link"), opened(tmp_path / "kv"):
        pass
    assert (tmp_path / "stolen").read_bytes() == content


def test_a_link_that_appears_later_is_not_followed(tmp_path: Path) -> None:
    ids = tokens(1, 3000)
    with opened(tmp_path / "kv") as cache:
        save(cache, ids, 2000)
        assert cache.flush(FLUSH_S)
        victim = names_of(tmp_path / "kv", ".tail")[0]
        victim.rename(tmp_path / "elsewhere")
        victim.symlink_to(tmp_path / "elsewhere")
        assert restored(cache, ids) == 0


def test_another_users_folder_is_refused(tmp_path: Path) -> None:
    class Foreign(HastyFiles):
        def status(self, path: Path) -> Status:
            return replace(super().status(path), owner=self.user() + 1)

    (tmp_path / "kv").mkdir()
    with pytest.raises(CacheUnusable, match="another user"):
        open_store(tmp_path / "kv", files=Foreign())


def test_a_file_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "kv").write_text("notes")
    with pytest.raises(CacheUnusable, match="not a folder"):
        open_store(tmp_path / "kv")
    with pytest.raises(CacheUnusable, match="cannot be used"):
        open_store(tmp_path / "kv" / "deeper")


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS, errno.EIO])
@pytest.mark.parametrize(
    ("call", "is_new"),
    [
        *((call, True) for call in ("create", "names", "make_folder", "space", "open_lock")),
        *(
            (call, False)
            for call in ("create", "names", "unlink", "contents", "status", "try_lock")
        ),
    ],
)
def test_a_folder_that_cannot_be_used_is_refused_in_one_sentence(
    tmp_path: Path, call: str, is_new: bool, code: int
) -> None:
    if not is_new:
        open_store(tmp_path / "kv").close()

    def fault(name: str, path: Path | None) -> int | None:
        return code if name == call else None

    files = FailingFiles(fault)
    with pytest.raises(CacheUnusable, match="--kv-disk-dir") as caught:
        Store.open(tmp_path / "kv", files, PLENTY, None)
    assert str(caught.value).count(".") == 1


def test_another_programs_cache_is_refused(tmp_path: Path) -> None:
    (tmp_path / "kv").mkdir()
    marker = tmp_path / "kv" / names.MARKER_NAME
    marker.write_text("Signature: 8a477f597d28d172789f06886806bc55\n# another's\n")
    with pytest.raises(CacheUnusable, match="another program"):
        open_store(tmp_path / "kv")
    assert "another's" in marker.read_text()


def test_only_a_marked_folder_exists_for_maintenance(tmp_path: Path) -> None:
    with pytest.raises(CacheUnusable, match="not there"):
        Store.existing(tmp_path / "kv", Files())
    (tmp_path / "kv").mkdir()
    with pytest.raises(CacheUnusable, match="marker"):
        Store.existing(tmp_path / "kv", Files())
    assert list((tmp_path / "kv").iterdir()) == []
    open_store(tmp_path / "kv").close()
    assert Store.existing(tmp_path / "kv", Files()).total_bytes == folder_bytes(tmp_path / "kv")


def test_an_open_folder_becomes_private(tmp_path: Path) -> None:
    (tmp_path / "kv").mkdir(0o755)
    (tmp_path / "kv").chmod(0o755)
    open_store(tmp_path / "kv").close()
    assert (tmp_path / "kv").stat().st_mode & 0o777 == 0o700


def test_bytes_are_those_of_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    open_store(folder).close()
    (folder / "photos" / "old").mkdir(parents=True)
    (folder / "photos" / "old" / "a").write_bytes(bytes(100))
    store = open_store(folder)
    with store.locked(soon()):
        store.announce()
        store.make_folder(FOLDER)
        for count, name in ((10, "1" * 64), (20, "2" * 64), (30, "2" * 64)):
            store.write(FOLDER, names.record_name(name.encode()[:32]), [bytes(count), b"x"])
            assert store.total_bytes == folder_bytes(folder)
        (folder / FOLDER / "foreign").write_bytes(bytes(7))
        name = next(iter(store.sizes[FOLDER]))
        store.put_aside(FOLDER, name)
        assert names.is_damaged(next(n for n in store.sizes[FOLDER] if n.startswith(name)))
        store.remove(FOLDER, names.damaged_name(name))
    store.close()
    other = open_store(folder)
    assert other.total_bytes == folder_bytes(folder)
    assert sorted(other.foreign) == [f"{FOLDER}/foreign", "photos"]


def test_nothing_passes_the_limit(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    open_store(folder).close()
    overhead = folder_bytes(folder)
    files = LimitedFiles(folder, overhead + 100)
    store = open_store(folder, files.limit_bytes, files)
    with store.locked(soon()):
        store.announce()
        store.make_folder(FOLDER)
        store.write(FOLDER, names.record_name(bytes(32)), [bytes(60)])
        with pytest.raises(OSError, match="no room"):
            store.write(FOLDER, names.record_name(b"\1" * 32), [bytes(41)])
        # The old one is there until the new one is.
        with pytest.raises(OSError, match="no room"):
            store.write(FOLDER, names.record_name(bytes(32)), [bytes(60)])
        assert store.missing_bytes(60) == 20
        store.write(FOLDER, names.record_name(b"\1" * 32), [bytes(40)])
        assert store.missing_bytes(0) == 0
        store.remove(FOLDER, names.record_name(bytes(32)))
        assert store.missing_bytes(60) == 0
    assert files.most_bytes == files.limit_bytes
    assert files.passed == []


def test_a_half_written_file_goes_again(tmp_path: Path) -> None:
    class Full(HastyFiles):
        def write(self, handle: int, buffers: Any) -> None:
            os.write(handle, b"half")
            raise OSError(errno.ENOSPC, "full")

    folder = tmp_path / "kv"
    open_store(folder).close()
    store = open_store(folder, files=Full())
    with store.locked(soon()):
        store.announce()
        store.make_folder(FOLDER)
        with pytest.raises(OSError, match="full"):
            store.write(FOLDER, names.record_name(bytes(32)), [bytes(60)])
        assert store.total_bytes == folder_bytes(folder)
    assert list((folder / FOLDER).iterdir()) == []


def test_the_lock_keeps_others_out_and_tells_them_of_changes(tmp_path: Path) -> None:
    a, b = open_store(tmp_path / "kv"), open_store(tmp_path / "kv")
    with a.locked(soon()):
        with pytest.raises(Busy), b.locked(time.monotonic()):
            pass
    for store in (a, b):
        with store.locked(soon()):
            pass
    with a.locked(soon()) as is_changed:
        assert not is_changed
        a.announce()
        a.make_folder(FOLDER)
        a.write(FOLDER, names.record_name(bytes(32)), [b"x"])
    with a.locked(soon()) as is_changed:
        assert not is_changed
    with b.locked(soon()) as is_changed:
        assert is_changed
        assert b.sizes[FOLDER] == a.sizes[FOLDER]
    with b.locked(soon()) as is_changed:
        assert not is_changed


def test_a_lock_file_that_was_removed_is_made_anew(tmp_path: Path) -> None:
    a, b = open_store(tmp_path / "kv"), open_store(tmp_path / "kv")
    with a.locked(soon()), pytest.raises(Busy), b.locked(time.monotonic()):
        pass
    (tmp_path / "kv" / names.LOCK_NAME).unlink()
    c = open_store(tmp_path / "kv")
    for first, second in ((a, c), (c, b), (b, a)):
        with first.locked(soon()), pytest.raises(Busy), second.locked(time.monotonic()):
            pass


def test_kinds_of_names(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder")
    os.mkfifo(tmp_path / "fifo")
    kinds = {
        "file": Kind.FILE,
        "folder": Kind.FOLDER,
        "link": Kind.LINK,
        "fifo": Kind.OTHER,
    }
    files = Files()
    assert dict(files.names(tmp_path)) == kinds
    assert {name: files.status(tmp_path / name).kind for name in kinds} == kinds
    with pytest.raises(OSError):
        files.open(tmp_path / "link")


def test_reads_and_writes_take_many_buffers(tmp_path: Path) -> None:
    files = Files()
    buffers = [bytes([i % 251]) * (i % 7) for i in range(2000)]
    handle = files.create(tmp_path / "file")
    files.write(handle, buffers)
    files.close(handle)
    whole = b"".join(buffers)
    assert (tmp_path / "file").read_bytes() == whole
    handle = files.open(tmp_path / "file")
    targets = [bytearray(i % 5) for i in range(1500)]
    wanted = whole[3:]
    count = files.read(handle, targets, 3)
    assert b"".join(targets)[:count] == wanted[:count]
    assert count == min(len(wanted), sum(map(len, targets)))
    assert files.read(handle, [bytearray(10)], len(whole) - 4) == 4
    files.close(handle)


Step = tuple[str, int, int]
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("save"), st.integers(0, 5), st.integers(1, 20)),
        st.tuples(st.just("other"), st.integers(0, 2), st.integers(1, 10)),
        st.tuples(st.just("record"), st.integers(0, 3), st.integers(1, 40)),
        st.tuples(st.just("foreign"), st.integers(0, 2), st.integers(0, 40_000)),
        st.tuples(st.just("restore"), st.integers(0, 5), st.integers(1, 20)),
        st.tuples(st.just("restart"), st.just(0), st.just(0)),
    ),
    max_size=20,
)


@given(steps=STEPS, room=st.integers(0, 150_000), use=st.sampled_from([1.0, 1000.0]))
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_the_folder_never_passes_its_limit(
    tmp_path_factory: pytest.TempPathFactory, steps: list[Step], room: int, use: float
) -> None:
    """Whatever is saved and whatever else lies there, and what is given back is right."""
    folder = tmp_path_factory.mktemp("limit") / "kv"
    limit = len(names.MARKER) + 8 + room
    now = [1e9]
    files = LimitedFiles(folder, limit)

    def run(steps: list[Step]) -> list[Step]:
        options: dict[str, Any] = {"space_bytes": limit, "files": files, "clock": lambda: now[0]}
        with (
            opened(folder, **options) as cache,
            opened(folder, **options, fingerprint=b"other") as other,
        ):
            for i, (what, which, amount) in enumerate(steps):
                now[0] += 3600.0 * amount
                ids = tokens(which, 3000, after=tokens(9, 700))
                match what:
                    case "save" | "other":
                        target = cache if what == "save" else other
                        position = 180 * amount // 2 * 2
                        started = begin(target, ids, position)
                        if started is not None:
                            started.finish(tail(ids, position), use * amount)
                        assert target.flush(FLUSH_S)
                    case "record":
                        cache.record_put(bytes([which]) * 32, ids[: 10 * amount])
                        assert cache.flush(FLUSH_S)
                    case "foreign":
                        path = folder / f"foreign{which}"
                        path.write_bytes(b"")
                        # What others write may pass the limit; then only we must not add to it.
                        free = max(0, limit - folder_bytes(folder))
                        path.write_bytes(bytes(min(amount, free)))
                    case "restore":
                        restored(cache, ids[: 180 * amount])
                    case _:
                        return steps[i + 1 :]
                check(cache, [ids])
            assert cache.stats().faults == other.stats().faults == 0
            return []

    while steps:
        steps = run(steps)
    assert files.passed == []
    assert folder_bytes(folder) <= limit if folder.exists() else True
