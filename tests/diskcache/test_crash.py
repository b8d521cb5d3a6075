"""What a power cut at any moment leaves is a cache that works, with all that it promised.

Runs of the cache are recorded; each prefix of their calls becomes the folders that the model of the
disk allows, and the cache is opened on each. Without any one of the waits for the disk that must
fail, which shows that none is missing and none is one too many.
"""

import hashlib
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest

from mlx_engine.diskcache.cache import DiskCache
from mlx_engine.diskcache.layout import TokenIds
from tests.diskcache import content
from tests.diskcache.recording import (
    SYNCS,
    Call,
    Disk,
    Mark,
    RecordingFiles,
    Tree,
    read_tree,
    write_tree,
)

FOLDER = "caches/ds41"

BASE = content.tokens(1, 2600)
BRANCH = content.tokens(2, 700, after=BASE[:1000])
OTHER = content.tokens(3, 900)
NEW = content.tokens(4, 300, after=BASE[:500])
PROMPTS = (BASE, BRANCH, OTHER)


@dataclass(frozen=True)
class Promise:
    """What must outlive any power cut from now on: an anchor or a record."""

    ids: TokenIds
    position: int
    record_key: bytes = b""


@dataclass
class Story:
    """A recorded run of the cache; `survived` names the power cuts that were checked."""

    start: Tree
    log: list[Call | Mark]
    space_bytes: int
    survived: set[bytes] = field(default_factory=set[bytes])

    def promises(self) -> list[Promise]:
        """All that was promised in the end."""
        return [entry.promise for entry in self.log if isinstance(entry, Mark)]


def record(
    tell: Callable[[DiskCache, RecordingFiles], None],
    start: Tree | None = None,
    space_bytes: int = content.PLENTY_BYTES,
) -> Story:
    """Record a run; promises of what it drops again on purpose do not count."""
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        write_tree(start or {}, base)

        def watch() -> None:
            assert content.folder_bytes(base) <= space_bytes

        files = RecordingFiles(base, watch)
        with content.opened(base / FOLDER, space_bytes=space_bytes, files=files) as cache:
            tell(cache, files)
            assert not cache.stats().faults
            stored = {
                (entry.promise.ids.tobytes(), entry.promise.position)
                for entry in files.log
                if isinstance(entry, Mark)
                and cache.lookup(entry.promise.ids[: entry.promise.position])
                == entry.promise.position
            }
        log = [
            entry
            for entry in files.log
            if isinstance(entry, Call)
            or entry.promise.record_key
            or (entry.promise.ids.tobytes(), entry.promise.position) in stored
        ]
        return Story(files.start, log, space_bytes)


def save(cache: DiskCache, files: RecordingFiles, ids: TokenIds, *positions: int) -> None:
    """Save anchors; those that are there after the flush are promised."""
    for position in positions:
        assert content.save(cache, ids, position)
    assert cache.flush(content.FLUSH_S)
    for position in positions:
        if cache.lookup(ids[:position]) == position:
            files.mark(Promise(ids, position))


def put_record(cache: DiskCache, files: RecordingFiles, ids: TokenIds) -> None:
    key = hashlib.sha256(ids.tobytes()).digest()
    cache.record_put(key, ids)
    assert cache.flush(content.FLUSH_S)
    files.mark(Promise(ids, 0, key))


@cache
def growing() -> Story:
    """A session that grows, one that branches off, and records of turns."""

    def tell(cache: DiskCache, files: RecordingFiles) -> None:
        save(cache, files, BASE, 300)
        put_record(cache, files, BASE[100:200])
        save(cache, files, BASE, 2048, 2600)
        save(cache, files, BRANCH, 1700)
        save(cache, files, BASE, 1024)
        assert content.restored(cache, BASE) == 2600

    return record(tell)


@cache
def evicting() -> Story:
    """Sessions that share a start, in half the space that they need."""

    def tell(cache: DiskCache, files: RecordingFiles) -> None:
        save(cache, files, BASE, 1000)
        for seed in range(4):
            ids = content.tokens(10 + seed, 600, after=BASE[: 400 * (seed % 3)])
            save(cache, files, ids, len(ids))
        save(cache, files, OTHER, 800)
        assert cache.stats().evicted

    return record(tell, space_bytes=90_000)


@cache
def recovering() -> Story:
    """A start after a power cut in the middle of a save, and one in the room of what was left."""

    def broken_off(cache: DiskCache, files: RecordingFiles) -> None:
        save(cache, files, BASE, 300)
        save(cache, files, BASE, 2600)

    def tell(cache: DiskCache, files: RecordingFiles) -> None:
        save(cache, files, OTHER, 800)

    story = record(broken_off)
    end = max(i for i, entry in enumerate(story.log) if _is(entry, "create"))
    disk = Disk(story.start)
    for entry in story.log[:end]:
        if isinstance(entry, Call):
            disk.apply(entry)
    start = next(disk.power_cuts(random.Random(0)))
    space_bytes = 100 + sum(len(data) for data in start.values() if data)
    recovered = record(tell, start, space_bytes)
    recovered.log[:0] = [entry for entry in story.log[:end] if isinstance(entry, Mark)]
    assert len(recovered.promises()) == 2
    return recovered


STORIES = [growing, evicting, recovering]


def power_cuts(
    story: Story, dropped: frozenset[int] = frozenset()
) -> Iterator[tuple[str, Tree, list[Promise]]]:
    """The folders that power cuts leave, each once, and what they must still have.

    `dropped` leaves out some calls, and the power cuts before the first of them.
    """
    disk = Disk(story.start)
    promised: list[Promise] = []
    for i, entry in enumerate(story.log):
        if isinstance(entry, Mark):
            promised.append(entry.promise)
        elif i not in dropped:
            disk.apply(entry)
        if i >= min(dropped, default=0):
            for number, tree in enumerate(disk.power_cuts(random.Random(i))):
                digest = _digest(tree, len(promised))
                if digest not in story.survived:
                    yield f"power cut {number} after call {i}", tree, promised
                    story.survived.add(digest)


def survive(story: Story, tree: Tree, promised: Sequence[Promise]) -> None:
    """Open the cache on what is left, check all that it offers, use it, and open it again."""
    # A file under two names, in the middle of a rename, takes its bytes once.
    assert sum(map(len, {data for data in tree.values() if data})) <= story.space_bytes
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        write_tree(tree, base)
        anchors = [(each.ids, each.position) for each in promised if not each.record_key]
        for is_new in (True, False):
            with content.opened(base / FOLDER, space_bytes=story.space_bytes) as cache:
                assert cache.flush(content.FLUSH_S)
                assert content.folder_bytes(base) <= story.space_bytes
                content.check(cache, PROMPTS, anchors)
                records = dict(cache.records())
                for each in promised:
                    if each.record_key:
                        assert records[each.record_key].tobytes() == each.ids.tobytes()
                if is_new:
                    content.save(cache, NEW, len(NEW), saved_s=1e3)
                    assert cache.flush(content.FLUSH_S)
                    assert content.folder_bytes(base) <= story.space_bytes
                assert content.restored(cache, NEW) == len(NEW)
                # A power cut damages nothing that it leaves.
                assert not cache.stats().damaged and not cache.stats().faults
                if story.space_bytes < content.PLENTY_BYTES:
                    anchors = []  # the new one may have taken their place


@pytest.mark.parametrize("tell", STORIES, ids=lambda tell: tell.__name__)
def test_nothing_promised_is_lost_in_a_power_cut(tell: Callable[[], Story]) -> None:
    story = tell()
    for what, tree, promised in power_cuts(story):
        try:
            survive(story, tree, promised)
        except Exception as error:
            raise AssertionError(what) from error


def test_every_wait_for_the_disk_is_needed() -> None:
    """Of all lines that wait, each does for one story at least."""
    needed: dict[str, bool] = {}
    for tell in STORIES:
        story = tell()
        for site, calls in waits(story).items():
            needed[site] = needed.get(site, False) or is_needed(story, calls)
    assert needed and [site for site, yes in needed.items() if not yes] == []


def waits(story: Story) -> dict[str, frozenset[int]]:
    """The waits of a story by the line that wants them and the kind of file."""
    found: dict[str, set[int]] = {}
    for i, entry in enumerate(story.log):
        if isinstance(entry, Call) and entry.name in SYNCS:
            name = next(
                (r.target.suffix for r in _renames(story.log[i:]) if r.file == entry.file), ""
            )
            found.setdefault(f"{entry.site} {entry.name} {name}".strip(), set()).add(i)
    return {site: frozenset(calls) for site, calls in found.items()}


def is_needed(story: Story, calls: frozenset[int]) -> bool:
    """Whether a power cut does harm when the program does not wait there."""
    for _, tree, promised in power_cuts(story, dropped=calls):
        try:
            survive(story, tree, promised)
        except Exception:
            return True
    return False


def test_the_model_of_the_disk_loses_what_was_not_waited_for(tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    files = RecordingFiles(base)
    handle = files.create(base / "1.partial")
    files.write(handle, [b"ab", b"cd"])
    files.sync(handle)
    files.write(handle, [b"ef"])
    files.rename(base / "1.partial", base / "name")
    disk = Disk(files.start)
    for entry in files.log:
        assert isinstance(entry, Call)
        disk.apply(entry)
    left = [
        {str(path): data for path, data in tree.items()}
        for tree in disk.power_cuts(random.Random(0))
    ]
    assert {} in left
    assert {"name": b"abcdef"} in left
    assert {"name": b"abcde"} in left
    assert {"name": b"abcd\0\0"} in left
    assert {"1.partial": b"abcd"} in left
    assert all(data and data.startswith(b"abcd") for tree in left for data in tree.values())
    assert {path: data for path, data in read_tree(base).items()} == {Path("name"): b"abcdef"}
    files.close(handle)


def _is(entry: Call | Mark, name: str) -> bool:
    return isinstance(entry, Call) and entry.name == name


def _renames(log: Sequence[Call | Mark]) -> Iterator[Call]:
    return (entry for entry in log if isinstance(entry, Call) and entry.name == "rename")


def _digest(tree: Tree, promises: int) -> bytes:
    digest = hashlib.sha256(str(promises).encode())
    for path, data in tree.items():
        digest.update(f"{path} {-1 if data is None else len(data)}\0".encode() + (data or b""))
    return digest.digest()
