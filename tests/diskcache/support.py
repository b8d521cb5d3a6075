"""What the cache's own tests share: files that fail, released sizes, a sample of anchors."""

import errno
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlx_engine.diskcache import layout
from mlx_engine.diskcache.cache import DiskCache, Save
from mlx_engine.diskcache.files import Space
from mlx_engine.diskcache.layout import Part, Parts, TokenIds
from tests.diskcache.content import FLUSH_S, check, folder_bytes, opened, restored, save, tokens
from tests.diskcache.recording import HastyFiles, SeamFiles

# Compressed rows, index codes and index scales of the four kv sources, as released.
RELEASED_PARTS: Parts = tuple(
    Part(ratio, row_bytes) for ratio in (2, 2, 2, 1) for row_bytes in (288, 64, 4)
)
RELEASED_ROW_BYTES = 890
# 40 windows of 128 rows of 528 bytes.
RELEASED_TAIL_BYTES = 40 * 128 * 528

# Positions at and around the ends of blocks, and short ones.
EDGES = (2, 126, 128, 130, 2046, 2048, 2050, 4094, 4096, 4098, 5000)

# What the folder of the fixture `full` holds, and what comes new.
BASE = tokens(1, 2600)
BRANCH = tokens(2, 700, after=BASE[:1000])
OTHER = tokens(3, 900)
NEW = tokens(4, 300, after=BASE[:500])
PROMPTS = (BASE, BRANCH, OTHER)
# In the order in which they are saved.
ANCHORS = ((BASE, 300), (OTHER, 800), (BASE, 2048), (BASE, 2600), (BRANCH, 1700))
RECORD_KEY = bytes(range(32))


class LimitedFiles(HastyFiles):
    """Fails a test as soon as a folder holds more than its limit."""

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self.folder = folder
        self.limit_bytes = limit_bytes
        self.most_bytes = 0
        self.passed: list[int] = []

    def write(self, handle: int, buffers: Any) -> None:
        super().write(handle, buffers)
        self._look()

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        self._look()

    def overwrite(self, handle: int, data: bytes) -> None:
        super().overwrite(handle, data)
        self._look()

    def _look(self) -> None:
        found = folder_bytes(self.folder)
        self.most_bytes = max(self.most_bytes, found)
        if found > self.limit_bytes:
            self.passed.append(found)


class FailingFiles(SeamFiles):
    """Raises what `fault` says for a call, for as long as it says so."""

    def __init__(self, fault: Callable[[str, Path | None], int | None]) -> None:
        self.fault = fault

    def around(self, name: str, call: Callable[..., Any], *args: Any) -> Any:
        path = args[0] if args and isinstance(args[0], Path) else None
        code = self.fault(name, path)
        if code is not None:
            raise OSError(code, errno.errorcode[code])
        return call(*args) if name not in ("sync", "sync_folder") else None


class SmallDisk(HastyFiles):
    """A disk that has this many bytes free."""

    def __init__(self, free_bytes: int) -> None:
        self.free_bytes = free_bytes

    def space(self, folder: Path) -> Space:
        return Space(self.free_bytes, 10**12)


def zero_save(
    cache: DiskCache, parts: Parts, ids: TokenIds, position: int, tail_bytes: int
) -> Save | None:
    """Hand over an anchor of zeros; None if the cache does not want it."""
    save = cache.begin(ids[:position], position)
    if save is not None:
        for first, last in save.ranges:
            save.rows(first, last, [bytes(part.n_bytes(first, last)) for part in parts])
        save.finish(bytes(tail_bytes), 1.0)
    return save


def names_of(folder: Path, ending: str) -> list[Path]:
    """The files in a cache's folder whose names end so."""
    return sorted(path for path in folder.rglob(f"*{ending}") if path.is_file())


def longest_common(a: TokenIds, b: TokenIds) -> int:
    """How many tokens two sequences share from the start."""
    count = min(len(a), len(b))
    return int(np.argmin(np.append(a[:count] == b[:count], False)))


def saved(cache: DiskCache, ids: TokenIds, *positions: int) -> None:
    """Save anchors one after the other, each on the disk before the next."""
    for position in positions:
        save(cache, ids, position)
        assert cache.flush(FLUSH_S)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was logged as a warning or worse."""
    return [record.message for record in caplog.records if record.levelno >= logging.WARNING]


def damage_file(path: Path, damage: str) -> None:
    """Change a file in one of six ways."""
    data = bytearray(path.read_bytes())
    match damage:
        case "flip first":
            data[0] ^= 1
        case "flip last":
            data[-1] ^= 1
        case "cut":
            del data[-1:]
        case "grow":
            data += b"\0"
        case "empty":
            data.clear()
        case _:
            data[8] = layout.FORMAT_VERSION + 1
    path.write_bytes(data)


def go_on(folder: Path, floor: int, **options: Any) -> None:
    """The cache opens, offers nothing wrong and the first anchors at least, and takes a new one."""
    with opened(folder, **options) as cache:
        check(cache, PROMPTS, ANCHORS[:floor])
        assert save(cache, NEW, len(NEW))
        assert cache.flush(FLUSH_S)
        assert restored(cache, NEW) == len(NEW)
