"""Files that are damaged, missing, or none at all.

Whatever happens, a request goes on: nothing but `DiskCache.open` raises, and what is restored is
what was saved.
"""

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from mlx_engine.diskcache import names
from mlx_engine.errors import CacheUnusable
from tests.diskcache.content import FLUSH_S, check, opened, restored, save, tokens
from tests.diskcache.recording import Tree, read_tree, write_tree
from tests.diskcache.support import (
    ANCHORS,
    NEW,
    OTHER,
    PROMPTS,
    RECORD_KEY,
    damage_file,
    go_on,
    names_of,
    saved,
    warnings,
)

pytestmark = pytest.mark.usefixtures("no_surprises")


def test_all_kinds_of_files_are_there(full: tuple[Tree, dict[Path, int]]) -> None:
    found = kinds(full[0])
    for kind in ("SEGMENT", "TAIL", "ANCHOR", "RECORD", "HITS", names.MARKER_NAME, names.LOCK_NAME):
        assert found[kind], kind


def kinds(tree: Tree) -> Counter[str]:
    """How many files of each kind lie in a folder."""
    return Counter(_kind(path) for path, data in tree.items() if data is not None)


def _kind(path: Path) -> str:
    kind = names.object_kind(path.name)
    return kind.name if kind is not None else path.name


@pytest.mark.parametrize("damage", ["flip first", "flip last", "cut", "grow", "empty", "version"])
@pytest.mark.parametrize("kind", [".segment", ".tail", ".anchor", "hits.table"])
@pytest.mark.parametrize("is_restarted", [False, True], ids=["running", "restarted"])
def test_a_damaged_file_is_a_miss_at_the_last_good_anchor(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    kind: str,
    damage: str,
    is_restarted: bool,
) -> None:
    folder = tmp_path / "kv"
    ids = tokens(1, 5000)
    with opened(folder) as cache:
        saved(cache, ids, 3000)
        earlier = {path.name for path in names_of(folder, kind)}
        saved(cache, ids, 5000)
        assert restored(cache, ids) == 5000
    victims = [path for path in names_of(folder, kind) if path.name not in earlier]
    victim = victims[0]
    if not is_restarted:
        with opened(folder) as cache:
            assert cache.lookup(ids) == 5000
            damage_file(victim, damage)
            expected = 3000 if kind in (".segment", ".tail") else 5000
            assert restored(cache, ids) == expected
            assert cache.flush(FLUSH_S)
            assert len(warnings(caplog)) == (expected == 3000)
            assert cache.stats().damaged == (expected == 3000)
            if expected == 3000:
                assert not victim.exists()
                assert names_of(folder, f"{victim.name}.damaged")
        return
    damage_file(victim, damage)
    with opened(folder) as cache:
        assert restored(cache, ids) == (5000 if kind == "hits.table" else 3000)
        assert cache.flush(FLUSH_S)
        assert len(warnings(caplog)) == 1
        assert cache.stats().damaged == 1
        assert not victim.exists()
        assert names_of(folder, f"{victim.name}.damaged")
        # The same anchor can be saved again.
        saved(cache, ids, 5000)
        assert restored(cache, ids) == 5000
    with opened(folder) as cache:
        assert restored(cache, ids) == 5000


def test_a_missing_file_is_a_plain_miss(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ids = tokens(1, 5000)
    for kind in (".segment", ".tail", ".anchor"):
        folder = tmp_path / kind
        with opened(folder) as cache:
            saved(cache, ids, 3000)
            earlier = names_of(folder, kind)
            saved(cache, ids, 5000)
            for path in set(names_of(folder, kind)) - set(earlier):
                path.unlink()
            assert restored(cache, ids) == (5000 if kind == ".anchor" else 3000)
        with opened(folder) as cache:
            assert restored(cache, ids) == 3000
    assert warnings(caplog) == []


def damages(path: Path, data: bytes) -> Iterator[tuple[str, bytes]]:
    """A file with one byte flipped, cut off, or with something behind it."""
    n = len(data)
    n_header = min(n, 400)
    offsets = {0, 8, 10, 12, 16, *range(0, n_header, 37), n // 3, n // 2, 2 * n // 3, n - 1}
    for offset in sorted(at for at in offsets if 0 <= at < n):
        flipped = bytearray(data)
        flipped[offset] ^= 0x10
        yield f"{_kind(path)} flipped at {offset}", bytes(flipped)
    for length in {0, min(n, 8), n // 2, max(n - 1, 0)}:
        yield f"{_kind(path)} cut to {length}", data[:length]
    yield f"{_kind(path)} with more behind", data + b"\0"


@pytest.mark.parametrize("is_open", [False, True], ids=["before the start", "while open"])
def test_damage_is_a_miss_at_the_last_good_anchor(
    full: tuple[Tree, dict[Path, int]], tmp_path: Path, is_open: bool
) -> None:
    tree, before = full
    for path, data in tree.items():
        if data is None or path.name == names.MARKER_NAME:
            continue
        for number, (what, damaged) in enumerate(damages(path, data)):
            folder = tmp_path / f"{path.name[-20:]}{number}"
            folder.mkdir(0o700)
            write_tree(tree if is_open else {**tree, path: damaged}, folder)
            try:
                with opened(folder) as cache:
                    if is_open:
                        (folder / path).write_bytes(damaged)
                    check(cache, PROMPTS, ANCHORS[: before[path]])
                    assert all(
                        np.array_equal(ids, OTHER)
                        for key, ids in cache.records()
                        if key == RECORD_KEY
                    )
                go_on(folder, before[path])
            except Exception as error:
                raise AssertionError(what) from error


def test_one_line_tells_of_a_damaged_object_and_it_is_put_aside(
    full: tuple[Tree, dict[Path, int]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tree, before = full
    for path, data in tree.items():
        if data is None or _kind(path) not in ("SEGMENT", "TAIL", "ANCHOR"):
            continue
        folder = tmp_path / path.name[-30:]
        folder.mkdir(0o700)
        write_tree({**tree, path: data[:-1] + bytes([data[-1] ^ 1])}, folder)
        caplog.clear()
        with opened(folder) as cache:
            for _ in range(3):
                asked = [ids[:position] for ids, position in ANCHORS]
                check(cache, asked, ANCHORS[: before[path]])
            assert cache.flush(FLUSH_S)
        (warning,) = warnings(caplog)
        assert path.name in warning
        assert not (folder / path).exists()
        assert (folder / path).with_name(names.damaged_name(path.name)).exists()


def test_a_folder_with_a_damaged_marker_is_refused(
    full: tuple[Tree, dict[Path, int]], tmp_path: Path
) -> None:
    tree, _ = full
    write_tree({**tree, Path(names.MARKER_NAME): b"Signature: another program"}, tmp_path)
    with pytest.raises(CacheUnusable, match="marked as another"), opened(tmp_path):
        pass
    assert read_tree(tmp_path)[Path(names.MARKER_NAME)] == b"Signature: another program"


HANGS_S = 30.0


@pytest.mark.parametrize("is_open", [False, True], ids=["before the start", "while open"])
@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_what_is_no_file_is_neither_followed_nor_waited_for(
    full: tuple[Tree, dict[Path, int]], tmp_path: Path, kind: str, is_open: bool
) -> None:
    tree, before = full
    aside = tmp_path / "aside"
    for path, data in tree.items():
        if data is None:
            continue
        folder = tmp_path / path.name[-30:]
        folder.mkdir(0o700)
        write_tree(tree, folder)

        def replace(victim: Path = folder / path, data: bytes = data) -> None:
            victim.unlink()
            if kind == "link":
                # To a file that would do: what counts is that it is not followed.
                aside.write_bytes(data)
                victim.symlink_to(aside)
            elif kind == "pipe":
                os.mkfifo(victim)
            else:
                victim.mkdir()

        if not is_open:
            replace()

        def use(folder: Path = folder, path: Path = path) -> None:
            with suppress(CacheUnusable), opened(folder) as cache:
                assert cache.flush(FLUSH_S)
                if is_open:
                    replace()
                floor = 0 if path.parent == Path() else before[path]
                check(cache, PROMPTS, ANCHORS[:floor])
                save(cache, NEW, len(NEW))
                cache.flush(FLUSH_S)
                check(cache, [*PROMPTS, NEW])

        try:
            _within(HANGS_S, use, path.name)
        finally:
            if kind == "pipe" and (folder / path).is_fifo():
                # Lets go whoever waits for the other end, so that the tests can end.
                os.close(os.open(folder / path, os.O_RDWR | os.O_NONBLOCK))
        if kind == "link" and aside.exists():
            assert aside.read_bytes() == data
            aside.unlink()


def _within(limit_s: float, call: Callable[[], None], what: str) -> None:
    """Fail if a call raises or hangs."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(limit_s)
    assert not thread.is_alive(), f"{what}: it hangs"
    if errors:
        raise AssertionError(what) from errors[0]


def test_many_damaged_anchors_are_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "kv"
    with opened(folder) as cache:
        for seed in range(3):
            saved(cache, tokens(seed, 500), 500)
    victims = [*folder.rglob("*.anchor")]
    for path in victims:
        path.write_bytes(path.read_bytes()[:-1])
    with opened(folder) as cache:
        assert cache.stats().damaged == len(victims) == 3
    (warning,) = warnings(caplog)
    assert " and 2 more of the disk cache is not used again: " in warning
