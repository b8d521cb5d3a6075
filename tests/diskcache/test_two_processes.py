"""Several caches on one folder, in one process and in several."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from mlx_engine.diskcache import layout
from tests.diskcache.content import (
    FLUSH_S,
    PARTS,
    check,
    folder_bytes,
    opened,
    restored,
    save,
    tokens,
)
from tests.diskcache.support import names_of, saved

pytestmark = pytest.mark.usefixtures("no_surprises")


def test_two_caches_on_one_folder_share_the_limit(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    ids = [tokens(seed, 3000) for seed in range(12)]
    with opened(folder) as cache:
        saved(cache, ids[0], 3000)
        one = folder_bytes(folder)
    limit = 4 * one
    with opened(folder, space_bytes=limit) as a, opened(folder, space_bytes=limit) as b:
        for i, each in enumerate(ids):
            cache = (a, b)[i % 2]
            saved(cache, each, 3000)
            assert restored(cache, each) == 3000
            assert folder_bytes(folder) <= limit
            assert cache.stats().total_bytes == folder_bytes(folder)
        check(a, ids)
        check(b, ids)
        assert sum(a.lookup(each) > 0 for each in ids) >= 2


def test_two_caches_write_the_same_anchor_once(tmp_path: Path) -> None:
    ids = tokens(1, 3000)
    with opened(tmp_path / "kv") as a, opened(tmp_path / "kv") as b:
        saved(a, ids, 2000)
        saved(b, ids, 3000)
        assert restored(b, ids) == 3000
        segments = [path.stat().st_size for path in names_of(tmp_path / "kv", ".segment")]
        header = layout.segment_header_bytes(PARTS)
        rows_bytes = sum(part.n_bytes(0, 3000) for part in PARTS) + 4 * 3000
        # The second saw on its way to the disk what the first had written.
        assert sum(segments) == rows_bytes + len(segments) * header


def test_processes_write_and_evict_side_by_side(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    program = (
        "import logging, sys, time\n"
        "from pathlib import Path\n"
        "from tests.diskcache.content import *\n"
        "logging.basicConfig(level=logging.WARNING)\n"
        "folder, limit, start = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])\n"
        # A day passes in 10 ms, so that what is newer is worth more.
        "clock = lambda: 1e7 * time.time()\n"
        "with opened(folder, space_bytes=limit, clock=clock) as cache:\n"
        "    for step in range(30):\n"
        "        ids = tokens((start + step) % 7, 3000)\n"
        "        position = 1000 + 500 * (step % 5)\n"
        "        started = begin(cache, ids, position)\n"
        "        if started is not None:\n"
        "            started.finish(tail(ids, position), 10.0)\n"
        "        assert cache.flush(FLUSH_S)\n"
        "        assert folder_bytes(folder) <= limit\n"
        "        check(cache, [ids, tokens(step % 7, 3000)])\n"
        "    assert cache.stats().saved and cache.stats().evicted, cache.stats()\n"
        "    assert cache.stats().damaged == cache.stats().faults == 0, cache.stats()\n"
    )
    with opened(folder) as cache:
        saved(cache, tokens(1, 3000), 3000)
        limit = 3 * folder_bytes(folder)
    root = Path(__file__).resolve().parents[2]
    children = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(folder), str(limit), str(start)],
            cwd=root,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for start in (0, 3)
    ]
    largest = 0
    end_s = time.monotonic() + 60
    # This process saves and restores beside them.
    with opened(folder, space_bytes=limit, clock=lambda: 1e7 * time.time()) as cache:
        while any(child.poll() is None for child in children) and time.monotonic() < end_s:
            largest = max(largest, folder_bytes(folder))
            check(cache, [tokens(seed, 3000) for seed in range(8)])
            save(cache, tokens(7, 3000), 1000, saved_s=10.0)
            time.sleep(0.005)
        assert cache.flush(FLUSH_S)
        largest = max(largest, folder_bytes(folder))
        assert cache.stats().damaged == cache.stats().faults == 0
    assert limit / 2 < largest <= limit
    for child in children:
        output, _ = child.communicate(timeout=60)
        assert child.returncode == 0, output
        assert output == ""
    with opened(folder, space_bytes=limit) as cache:
        assert cache.stats().total_bytes == folder_bytes(folder) <= limit
        check(cache, [tokens(seed, 3000) for seed in range(7)])
        assert any(cache.lookup(tokens(seed, 3000)) for seed in range(7))
