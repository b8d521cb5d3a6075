"""The disk cache at the released sizes: restore against a plain read, saving, and 10,000 anchors.

Rows are random bytes of the released sizes; no model runs. A restore ends with a state that a model
could go on from. A plain read is of the same files by as many threads as a restore has. "Cold" is
after the files' pages were dropped from memory, the same way for both sides of a pair; where the
system has no call for that, the report says so. The many anchors lie on the disk as real anchor
files over sparse segments and tails, which no lookup, scan or prune reads.
"""

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from bench.report import Report
from bench.setting import ROOT
from mlx_engine.config_file import parse_config
from mlx_engine.diskcache import check, layout, names
from mlx_engine.diskcache.cache import DiskCache, Part
from mlx_engine.diskcache.files import Files
from mlx_engine.diskcache.index import Index
from mlx_engine.diskcache.layout import AnchorFile, PrefixKeys, SegmentId, TokenIds, Use
from mlx_engine.diskcache.policy import PolicyClock
from mlx_engine.diskcache.reader import READERS
from mlx_engine.diskcache.shelf import Shelf
from mlx_engine.diskcache.store import Store
from mlx_engine.saving import restore
from mlx_engine.state import SessionState
from mlx_engine.state_transfer import export_tail

CONFIG = parse_config(json.loads((ROOT / "tests/data/released_config.json").read_text()))
# Compressed rows, index codes and index scales of the four kv sources; 40 windows of 128 rows.
PARTS = tuple(Part(ratio, row_bytes) for ratio in (2, 2, 2, 1) for row_bytes in (288, 64, 4))
TAIL_BYTES = 40 * 128 * 528
FINGERPRINT = b"bench"
FLUSH_S = 600.0

SHORT_TOKENS, LONG_TOKENS, MORE_TOKENS = 25_000, 2**20, 1024
SHORT_RUNS, LONG_RUNS = 15, 5

HEADS, HEAD_TOKENS = 20, 25_000
SESSIONS, ANCHORS, MOST_TOKENS = 715, 14, 200_000
LOOKUPS = 60

_CAN_DROP = hasattr(os, "posix_fadvise")
_COLD = "cold: the files' pages were dropped before each read"
_NOT_COLD = "cold: this system cannot drop pages, so what is called cold was read from memory"


def main() -> int:
    """Run the bench and return its exit code."""
    report = Report("diskcache", __doc__)
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR")) as folder:
        _measure_states(report, Path(folder) / "states")
        _measure_many(report, Path(folder) / "many")
    return report.finish()


def _measure_states(report: Report, folder: Path) -> None:
    """Saves and restores of a short and a long context."""
    rng = np.random.default_rng(0)
    pool = rng.integers(0, 256, 64_000_000, np.uint8)
    ids = layout.as_token_ids(rng.integers(0, 129_280, LONG_TOKENS))
    with_more = SHORT_TOKENS + MORE_TOKENS
    cache = DiskCache.open(folder, fingerprint=FINGERPRINT, parts=PARTS)
    calls_s: dict[str, list[float]] = {"begin": [], "rows": [], "finish": []}
    sizes: list[list[str | int | float]] = []
    for position in (SHORT_TOKENS, with_more, LONG_TOKENS):
        before = cache.stats().total_bytes
        start = time.perf_counter()
        _save(cache, ids, position, pool, calls_s)
        assert cache.flush(FLUSH_S)
        added = cache.stats().total_bytes - before
        sizes.append([f"{position} tokens", added, time.perf_counter() - start])
    report.table(["saved", "bytes", "s until durable"], sizes)
    added = {str(name): int(size) for name, size, _ in sizes}
    short_bytes = added[f"{SHORT_TOKENS} tokens"]
    report.check(
        "bytes a token, less 2.75 MB for the anchor",
        (short_bytes - 2.75e6) / SHORT_TOKENS,
        most=894 * 1.02,
    )
    report.check("MB of one more anchor", added[f"{with_more} tokens"] / 1e6, most=3.7)
    report.table(
        ["on the calling thread", "calls", "median ms", "most ms"],
        [[n, len(s), statistics.median(s) * 1e3, max(s) * 1e3] for n, s in calls_s.items()],
    )
    for name, seconds in calls_s.items():
        report.check(f"ms of {name}, median", statistics.median(seconds) * 1e3, most=1.5)
    cache.close()

    cache = DiskCache.open(folder, fingerprint=FINGERPRINT, parts=PARTS)
    rows: list[list[str | int | float]] = []
    for position, runs in ((SHORT_TOKENS, SHORT_RUNS), (LONG_TOKENS, LONG_RUNS)):
        paths = _files_of(folder, ids, position)
        for state in ("cold", "warm"):
            prepare = partial(_drop_pages, paths if state == "cold" else [])
            read_s, restore_s = _pairs_s(
                prepare, partial(_plain_read, paths), partial(_restore, cache, ids, position), runs
            )
            ratio = statistics.median(b / a for a, b in zip(read_s, restore_s, strict=True))
            medians = [statistics.median(s) * 1e3 for s in (read_s, restore_s)]
            rows.append([f"{position} tokens, {state}", *medians, ratio])
    report.line(_COLD if _CAN_DROP else _NOT_COLD)
    cache.close()
    report.table(["restored", "plain read ms", "restore ms", "ratio"], rows)
    report.check(f"ms to restore {SHORT_TOKENS} tokens, cold", float(rows[0][2]), most=100)
    report.check(
        f"restore of {LONG_TOKENS} tokens against a plain cold read", float(rows[2][3]), most=1.5
    )
    report.results["restore"] = rows
    report.results["are_pages_dropped"] = _CAN_DROP


def _pairs_s(
    prepare: Callable[[], None],
    first: Callable[[], object],
    second: Callable[[], object],
    runs: int,
) -> tuple[list[float], list[float]]:
    """Seconds of each, in pairs of alternating order, prepared for apart."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for run in range(runs):
        pair = [(first, seconds[0]), (second, seconds[1])]
        for call, taken in pair if run % 2 else reversed(pair):
            prepare()
            start = time.perf_counter()
            call()
            taken.append(time.perf_counter() - start)
    return seconds


def _save(
    cache: DiskCache,
    ids: TokenIds,
    position: int,
    pool: NDArray[np.uint8],
    calls_s: dict[str, list[float]],
) -> None:
    start = time.perf_counter()
    save = cache.begin(ids, position)
    calls_s["begin"].append(time.perf_counter() - start)
    assert save is not None
    for first, last in save.ranges:
        sizes = [part.n_bytes(first, last) for part in PARTS]
        at = first * 31 % (len(pool) // 2)
        parts = [pool[at + i : at + i + size] for i, size in enumerate(sizes)]
        start = time.perf_counter()
        save.rows(first, last, parts)
        calls_s["rows"].append(time.perf_counter() - start)
    tail = _tail(position)
    start = time.perf_counter()
    save.finish(tail, position / 850)
    calls_s["finish"].append(time.perf_counter() - start)


def _tail(position: int) -> bytes:
    """The tail of a state of the released sizes whose windows are empty rows."""
    state = SessionState(CONFIG)
    for window in state.windows:
        window.extend(mx.zeros(window.rows.shape, window.rows.dtype), position - len(window.rows))
    state.position = position
    return export_tail(state.checkpoint())


def _restore(cache: DiskCache, ids: TokenIds, position: int) -> None:
    state = restore(cache, ids, position, CONFIG)
    assert state is not None and state.position == position


def _files_of(folder: Path, ids: TokenIds, position: int) -> list[Path]:
    """The files that a restore reads."""
    shelf = _shelf(folder)
    anchor = shelf.index.find(ids, position)[-1]
    assert anchor.position == position
    found = [use.segment.name for use in shelf.index.steps(anchor)]
    return [shelf.store.path(shelf.folder, n) for n in (*found, names.tail_name(anchor.key))]


def _plain_read(paths: list[Path]) -> int:
    """Read files whole, several at a time, each into memory of its own."""
    with ThreadPoolExecutor(READERS) as pool:
        return sum(pool.map(len, pool.map(Path.read_bytes, paths)))


def _drop_pages(paths: list[Path]) -> None:
    if not _CAN_DROP:
        return
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def _measure_many(report: Report, folder: Path) -> None:
    """Open, lookup and prune where 10,000 anchors lie."""
    prompts = _write_many(folder)
    start = time.perf_counter()
    cache = DiskCache.open(folder, fingerprint=FINGERPRINT, parts=PARTS, space_bytes=10**12)
    open_s = time.perf_counter() - start
    stats = cache.stats()
    segments = len(list(folder.glob("kv-*/*.segment")))
    report.facts({"anchors": stats.anchors, "segments": segments})
    report.check("s to open", open_s, most=2.0)

    rng = np.random.default_rng(1)
    lookup_s: dict[str, list[float]] = {"stored": [], "forked half-way": [], "unknown": []}
    for ids in prompts:
        unknown = layout.as_token_ids(rng.integers(0, 129_280, len(ids)))
        forked = np.concatenate([ids[: len(ids) // 2], unknown[len(ids) // 2 :]])
        for kind, prompt in zip(lookup_s, (ids, forked, unknown), strict=True):
            start = time.perf_counter()
            found = cache.lookup(prompt)
            lookup_s[kind].append(time.perf_counter() - start)
            assert found == (len(ids) if kind == "stored" else found) and (
                kind != "unknown" or found == 0
            )
    report.table(
        [f"lookup of {MOST_TOKENS} tokens", "median ms", "most ms"],
        [[kind, statistics.median(s) * 1e3, max(s) * 1e3] for kind, s in lookup_s.items()],
    )
    for kind, s in lookup_s.items():
        report.check(f"ms of a lookup, {kind}, median", statistics.median(s) * 1e3, most=5)
    longest_s = max(max(s) for s in lookup_s.values())
    report.check("ms of the slowest lookup", longest_s * 1e3, most=20)
    cache.close()

    rows: list[list[int | float]] = []
    left_bytes = check.stats(folder).total_bytes
    for share in (0.01, 0.1):
        # What `ds41 cache prune --to` does, from reading the folder to the last sync.
        start = time.perf_counter()
        removed = check.prune(folder, int(left_bytes * (1 - share)))
        taken_ms = (time.perf_counter() - start) * 1e3
        anchors = sum(name.endswith(".anchor") for name in removed.names)
        rows.append([anchors, removed.n_bytes / 1e9, taken_ms])
        left_bytes = removed.left_bytes
    report.table(["anchors pruned", "GB", "ms"], rows)
    more_ms, more = rows[1][2] - rows[0][2], rows[1][0] - rows[0][0]
    report.check("ms for each further anchor pruned", more_ms / max(more, 1), most=20)
    report.results["many"] = {"open_s": open_s, "prune": rows}


def _shelf(folder: Path) -> Shelf:
    root = layout.root_key(FINGERPRINT, PARTS)
    store = Store.open(folder, Files(), 10**12, 0)
    shelf = Shelf(store, names.folder_name(root), root, PolicyClock(time.time))
    shelf.load()
    return shelf


def _write_many(folder: Path) -> list[TokenIds]:
    """Fill a folder with sessions that share their heads; some of their longest prompts."""
    root = layout.root_key(FINGERPRINT, PARTS)
    Store.open(folder, Files(), 10**12, 0).close()
    ours = folder / names.folder_name(root)
    ours.mkdir(0o700)
    rng = np.random.default_rng(2)
    index = Index(root)
    heads = [layout.as_token_ids(rng.integers(0, 129_280, HEAD_TOKENS)) for _ in range(HEADS)]
    for head in heads:
        _write_anchor(index, ours, root, head, HEAD_TOKENS)
    prompts: list[TokenIds] = []
    for session in range(SESSIONS):
        head = heads[session % HEADS]
        last = int(rng.integers(HEAD_TOKENS + 1000, MOST_TOKENS)) if session % 10 else MOST_TOKENS
        own = rng.integers(0, 129_280, last - HEAD_TOKENS)
        ids = layout.as_token_ids(np.concatenate([head, own]))
        cuts = rng.choice(np.arange(HEAD_TOKENS + 2, last - 2, 2), ANCHORS - 1, replace=False)
        for position in [*sorted(map(int, cuts)), last // 2 * 2]:
            _write_anchor(index, ours, root, ids, position)
        if last == MOST_TOKENS and len(prompts) < LOOKUPS:
            prompts.append(ids)
    return prompts


def _write_anchor(index: Index, ours: Path, root: bytes, ids: TokenIds, position: int) -> None:
    ways, block_key = index.ways(ids, position)
    path = ways[-1]
    assert path.parent is not None or not path.position
    uses = list(path.uses)
    for first, last in layout.pieces(path.position, position):
        start = first // layout.BLOCK_TOKENS * layout.BLOCK_TOKENS
        key = PrefixKeys(block_key).after(ids[start:last])
        segment = SegmentId(key, last - first)
        n_bytes = layout.segment_file_bytes(PARTS, first, last)
        _sparse(ours / segment.name, n_bytes)
        uses.append(Use(key, last, segment, last - first, n_bytes))
        block_key = key if last % layout.BLOCK_TOKENS == 0 else block_key
    parent = path.parent
    file = AnchorFile(
        uses[-1].key,
        position,
        parent.key if parent else b"",
        parent.position if parent else 0,
        time.time(),
        1 / 850,
        tuple(uses),
    )
    (ours / names.anchor_name(file.key)).write_bytes(b"".join(layout.encode_anchor(root, file)))
    _sparse(ours / names.tail_name(file.key), TAIL_BYTES + layout.TAIL_HEADER_BYTES)
    index.add(file, TAIL_BYTES, 0.0)


def _sparse(path: Path, n_bytes: int) -> None:
    path.touch(0o600)
    os.truncate(path, n_bytes)


if __name__ == "__main__":
    sys.exit(main())
