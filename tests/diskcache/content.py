"""A stand-in for a model's state, computed from token ids, and what a cache must say of it.

Rows and tails are functions of all ids up to them, so whatever a cache gives back can be checked
without having kept it. Imports no MLX: child processes that are killed use it too.
"""

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlx_engine.diskcache.cache import DiskCache, Save
from mlx_engine.diskcache.layout import Part, TokenIds
from tests.diskcache.recording import HastyFiles

PARTS = (Part(2, 24), Part(2, 8), Part(1, 8))
FINGERPRINT = b"weights"
FLUSH_S = 20.0
PLENTY_BYTES = 10**9

Bytes = NDArray[np.uint8]


@contextmanager
def opened(folder: Path, **options: Any) -> Generator[DiskCache]:
    """A cache that is closed at the end, by default with plenty of space and without waits."""
    settings: dict[str, Any] = {
        "fingerprint": FINGERPRINT,
        "parts": PARTS,
        "space_bytes": PLENTY_BYTES,
        "free_floor_bytes": 0,
        "files": HastyFiles(),
        **options,
    }
    cache = DiskCache.open(folder, **settings)
    try:
        yield cache
    finally:
        cache.close()


def tokens(seed: int, count: int, after: TokenIds | None = None) -> TokenIds:
    """Random ids, behind those that they follow."""
    new = np.random.default_rng(seed).integers(0, 129_280, count).astype("<u4")
    return new if after is None else np.concatenate([after, new])


def rows(ids: TokenIds, first: int, last: int, salt: int = 0) -> list[Bytes]:
    """The rows of every part that the tokens [first, last) complete."""
    sums = _prefix_sums(ids[:last], salt)
    exported: list[Bytes] = []
    for number, part in enumerate(PARTS):
        ends = np.arange(first // part.ratio + 1, last // part.ratio + 1) * part.ratio
        words = np.arange(part.row_bytes // 8, dtype=np.uint64) + np.uint64(1 + 16 * number)
        values = sums[ends - 1][:, None] * (2 * words + np.uint64(1))
        exported.append(values.reshape(-1).view(np.uint8))
    return exported


def tail(ids: TokenIds, position: int, salt: int = 0) -> bytes:
    """What the rows leave out; its length depends on the position."""
    total = int(_prefix_sums(ids[:position], salt)[-1])
    size = 400 + position % 64
    return np.random.default_rng(total).bytes(size)


def begin(cache: DiskCache, ids: TokenIds, position: int, salt: int = 0) -> Save | None:
    """Hand over all of an anchor but its tail."""
    save = cache.begin(ids[:position], position)
    if save is not None:
        for first, last in save.ranges:
            save.rows(first, last, rows(ids, first, last, salt))
    return save


def save(
    cache: DiskCache, ids: TokenIds, position: int, salt: int = 0, saved_s: float = 1.0
) -> bool:
    """Hand over an anchor; whether the cache wanted it."""
    started = begin(cache, ids, position, salt)
    if started is not None:
        started.finish(tail(ids, position, salt), saved_s)
    return started is not None


def room(position: int) -> list[Bytes]:
    """Where a restore may put the rows before a position."""
    return [np.empty(part.n_bytes(0, position), np.uint8) for part in PARTS]


def restored(cache: DiskCache, ids: TokenIds, salt: int = 0) -> int:
    """The position that a lookup leads to, 0 for none; fails for anything but what was saved."""
    offered = cache.lookup(ids)
    assert 0 <= offered <= len(ids)
    if not offered:
        return 0
    into = room(offered)
    found = cache.restore(ids, offered, into)
    if found is None:
        return 0
    assert 0 < found.position <= offered
    expected = rows(ids, 0, found.position, salt)
    for part, (data, wanted) in enumerate(zip(into, expected, strict=True)):
        assert np.array_equal(data[: wanted.size], wanted), (
            f"part {part} at {found.position} is not what was saved"
        )
    assert bytes(found.tail) == tail(ids, found.position, salt), "the tail is not what was saved"
    return found.position


def folder_bytes(folder: Path) -> int:
    """The sizes of all files below a folder."""
    found = 0
    for path in folder.rglob("*"):
        try:
            status = path.lstat()
        except FileNotFoundError:
            continue
        found += 0 if path.is_dir() else status.st_size
    return found


def longest(promised: Iterable[tuple[TokenIds, int]], ids: TokenIds) -> int:
    """The longest of some anchors that is a prefix of ids."""
    return max(
        (n for other, n in promised if n <= len(ids) and np.array_equal(other[:n], ids[:n])),
        default=0,
    )


def check(
    cache: DiskCache,
    prompts: Iterable[TokenIds],
    promised: Sequence[tuple[TokenIds, int]] = (),
) -> None:
    """Every prompt leads to what was saved, and each promised anchor is there."""
    for ids, position in promised:
        assert restored(cache, ids[:position]) == position, f"the anchor at {position} is lost"
    for ids in prompts:
        assert restored(cache, ids) >= longest(promised, ids)


def _prefix_sums(ids: TokenIds, salt: int) -> NDArray[np.uint64]:
    """A word for each position that depends on all ids up to it."""
    factors = np.cumprod(np.full(len(ids), 6364136223846793005, np.uint64))
    return np.cumsum((ids.astype(np.uint64) + np.uint64(1 + salt)) * factors)
