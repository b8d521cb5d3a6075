"""Full disks, calls that fail, and folders without rights.

Whatever happens, a request goes on: nothing but `DiskCache.open` raises, what is restored is what
was saved, and the folder stays within its limit.
"""

import errno
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from mlx_engine.errors import CacheUnusable
from tests.diskcache.content import (
    FLUSH_S,
    check,
    folder_bytes,
    opened,
    restored,
    room,
    save,
    tokens,
)
from tests.diskcache.recording import CALLS, CHANGES, SYNCS, SeamFiles, Tree, write_tree
from tests.diskcache.support import (
    ANCHORS,
    NEW,
    OTHER,
    PROMPTS,
    FailingFiles,
    names_of,
    saved,
    warnings,
)

pytestmark = pytest.mark.usefixtures("no_surprises")


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES, errno.EMFILE, errno.ENOENT])
@pytest.mark.parametrize("call", ["open", "read", "handle_status"])
def test_reads_that_fail_are_misses(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, call: str, code: int
) -> None:
    ids = tokens(1, 5000)
    is_failing = False

    def fault(name: str, path: Path | None) -> int | None:
        return code if is_failing and name == call else None

    with opened(tmp_path / "kv", files=FailingFiles(fault)) as cache:
        saved(cache, ids, 3000, 5000)
        is_failing = True
        assert restored(cache, ids) == 0
        assert cache.restore(ids, 5000, room(5000)) is None
        is_failing = False
        assert cache.flush(FLUSH_S)
        assert len(warnings(caplog)) <= 2
        if code == errno.EMFILE:
            assert restored(cache, ids) == 5000
        saved(cache, ids, 5000)
        assert restored(cache, ids) == 5000


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS])
@pytest.mark.parametrize(
    "call",
    ["create", "write", "rename", "names", "overwrite", "try_lock", "make_folder", "space"],
)
def test_writes_that_fail_are_dropped_and_leave_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, call: str, code: int
) -> None:
    ids = tokens(1, 5000)
    is_failing = False

    def fault(name: str, path: Path | None) -> int | None:
        return code if is_failing and name == call else None

    with opened(tmp_path / "kv", files=FailingFiles(fault)) as cache:
        assert cache.flush(FLUSH_S)
        if call != "make_folder":
            saved(cache, ids, 3000)
        before = names_of(tmp_path / "kv", "")
        is_failing = True
        saved(cache, ids, 5000)
        is_failing = False
        assert cache.stats().dropped == 1
        assert len(warnings(caplog)) == 1
        assert names_of(tmp_path / "kv", "") == before
        assert restored(cache, ids) == (0 if call == "make_folder" else 3000)
        saved(cache, ids, 5000)
        assert restored(cache, ids) == 5000


class FailingCalls(SeamFiles):
    """Calls of some kinds fail: from the n-th on, `times` of them.

    `watch` is called after every change.
    """

    def __init__(
        self,
        calls: frozenset[str],
        code: int,
        first: int,
        times: int,
        watch: Callable[[], None] = lambda: None,
    ) -> None:
        self._watch = watch
        self._calls = calls
        self._code = code
        self._fails = range(first, first + times)
        self._lock = threading.Lock()
        self.count = 0

    def around(self, name: str, call: Callable[..., Any], *args: Any) -> Any:
        if name in SYNCS:
            call = _nothing
        fails = False
        if name in self._calls:
            with self._lock:
                fails = self.count in self._fails
                self.count += 1
        if not fails:
            result = call(*args)
            if name in CHANGES:
                self._watch()
            return result
        if name == "close":
            # The system closes all the same.
            call(*args)
        if name == "write" and self.count % 2:
            # A full disk takes what still fits.
            data = b"".join(bytes(memoryview(each).cast("B")) for each in args[1])
            call(args[0], [data[: len(data) // 2]])
        raise OSError(self._code, os.strerror(self._code))


def _nothing(*args: Any) -> None:
    pass


WRITES = frozenset(("write", "create", "make_folder", "rename", "overwrite", "sync", "sync_folder"))
READS = frozenset(
    ("read", "open", "contents", "status", "handle_status", "names", "sizes", "space")
)
OPENS = frozenset(("open", "contents", "create", "open_lock", "names", "sizes", "sync_folder"))
# After these a file counts as damaged; after others it is as good as before.
DAMAGE = (errno.EIO, errno.EACCES)
LOCKS = frozenset(("open_lock", "try_lock", "unlock"))
CLEANING = frozenset(("unlink", "rename", "remove_folder", "close"))


@pytest.mark.parametrize("times", [1, 10_000], ids=["once", "from then on"])
@pytest.mark.parametrize(
    ("calls", "code"),
    [
        (WRITES, errno.ENOSPC),
        (WRITES, errno.EIO),
        (READS, errno.EIO),
        (READS, errno.EACCES),
        (OPENS, errno.EMFILE),
        (LOCKS, errno.ENOLCK),
        (CLEANING - {"close"}, errno.EROFS),
        (CALLS, errno.EIO),
    ],
    ids="WRITES-ENOSPC WRITES-EIO READS-EIO READS-EACCES OPENS-EMFILE LOCKS-ENOLCK"
    " CLEANING-EROFS CALLS-EIO".split(),
)
def test_failing_calls_fail_no_request(
    full: tuple[Tree, dict[Path, int]],
    tmp_path: Path,
    calls: frozenset[str],
    code: int,
    times: int,
) -> None:
    tree, _ = full
    total = _use(tree, tmp_path / "whole", FailingCalls(calls, code, 10**9, 0))
    # Every call at first, then fewer: what happens late happens often.
    for first in [*range(min(total, 40)), *range(40, total, 11)]:
        folder = tmp_path / str(first)
        try:
            _use(tree, folder, FailingCalls(calls, code, first, times))
            # Once the disk is well again, so is the cache.
            with opened(folder) as cache:
                check(cache, [*PROMPTS, NEW], () if code in DAMAGE else ANCHORS)
                save(cache, NEW, 400)
                assert cache.flush(FLUSH_S)
                assert restored(cache, NEW) >= 400
        except Exception as error:
            raise AssertionError(f"from call {first} of {total} on") from error


def _use(tree: Tree, folder: Path, files: FailingCalls) -> int:
    """Restore and save, which must not fail though calls do; returns how many there were."""
    folder.mkdir(0o700)
    write_tree(tree, folder)
    # A start may be refused in one sentence.
    with suppress(CacheUnusable), opened(folder, files=files) as cache:
        check(cache, PROMPTS)
        save(cache, NEW, len(NEW))
        cache.flush(FLUSH_S)
        cache.record_put(bytes(32), NEW)
        check(cache, [*PROMPTS, NEW])
        save(cache, OTHER, 600)
        cache.flush(FLUSH_S)
        check(cache, [*PROMPTS, NEW])
        cache.records()
        cache.stats()
    return files.count


@pytest.mark.parametrize(
    ("calls", "code"),
    [(WRITES, errno.ENOSPC), (CLEANING - {"close"}, errno.EROFS), (CALLS, errno.EIO)],
    ids=["WRITES-ENOSPC", "CLEANING-EROFS", "CALLS-EIO"],
)
def test_failing_calls_do_not_lead_past_the_limit(
    full: tuple[Tree, dict[Path, int]], tmp_path: Path, calls: frozenset[str], code: int
) -> None:
    tree, _ = full
    space_bytes = 5_000 + sum(len(data) for data in tree.values() if data)

    def use(number: int, times: int) -> int:
        folder = tmp_path / f"{number} {times}"
        folder.mkdir(0o700)
        write_tree(tree, folder)

        def watch() -> None:
            assert folder_bytes(folder) <= space_bytes

        files = FailingCalls(calls, code, number, times, watch)
        with suppress(CacheUnusable), opened(folder, space_bytes=space_bytes, files=files) as cache:
            for seed in range(3):
                ids = tokens(20 + seed, 900)
                save(cache, ids, len(ids), saved_s=10.0**seed)
                cache.flush(FLUSH_S)
                check(cache, [*PROMPTS, ids])
        return files.count

    total = use(10**9, 0)
    for number in range(0, total, 9):
        use(number, 1)
        use(number, 10_000)


def test_a_folder_that_may_not_be_read_is_said_at_the_start(tmp_path: Path) -> None:
    files = FailingCalls(frozenset(("names",)), errno.EACCES, 0, 10_000)
    refused = pytest.raises(CacheUnusable, match="Permission denied")
    with refused, opened(tmp_path / "cache", files=files):
        pass


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_folder_without_rights_is_said_at_the_start(tmp_path: Path) -> None:
    parent = tmp_path / "parent"
    parent.mkdir(0o500)
    refused = pytest.raises(CacheUnusable, match="Permission denied")
    with refused, opened(parent / "cache"):
        pass
