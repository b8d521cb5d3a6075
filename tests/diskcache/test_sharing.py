"""Anchors of one sequence and of its forks store what they have in common once."""

from pathlib import Path

import numpy as np
import pytest

from mlx_engine.diskcache import layout
from mlx_engine.diskcache.layout import BLOCK_TOKENS
from tests.diskcache.content import FLUSH_S, PARTS, check, folder_bytes, opened, restored, tokens
from tests.diskcache.support import (
    EDGES,
    RELEASED_PARTS,
    RELEASED_ROW_BYTES,
    RELEASED_TAIL_BYTES,
    names_of,
    saved,
    zero_save,
)


@pytest.mark.parametrize("order", ["ascending", "descending"])
def test_anchors_share_their_prefixes_in_any_order(tmp_path: Path, order: str) -> None:
    ids = tokens(1, 6000)
    positions = EDGES if order == "ascending" else EDGES[::-1]
    with opened(tmp_path / "kv") as cache:
        saved(cache, ids, *positions)
        for position in EDGES:
            assert restored(cache, ids[:position]) == position
            assert restored(cache, ids[: position + 1]) == position
        segments = sum(path.stat().st_size for path in names_of(tmp_path / "kv", ".segment"))
        header = layout.segment_header_bytes(PARTS)
        row_bytes = sum(part.n_bytes(0, EDGES[-1]) for part in PARTS) + 4 * EDGES[-1]
        # Ascending pieces lie side by side; descending ones share all but shorter than 64 tokens.
        most_twice = 0 if order == "ascending" else 64 * len(EDGES)
        most = row_bytes + most_twice * row_bytes // EDGES[-1] + len(EDGES) * 2 * header
        assert row_bytes < segments <= most
    with opened(tmp_path / "kv") as cache:
        check(cache, [ids[:position] for position in EDGES], [(ids, p) for p in EDGES])


def test_sequences_fork_inside_a_segment(tmp_path: Path) -> None:
    trunk = tokens(1, 5000)
    forks = [tokens(at, 2000, after=trunk[:at]) for at in (100, 2047, 2048, 2049, 3333, 4096, 4999)]
    with opened(tmp_path / "kv") as cache:
        saved(cache, trunk, 5000)
        before = folder_bytes(tmp_path / "kv")
        for ids in forks:
            end = len(ids) // 2 * 2
            saved(cache, ids, end)
            assert restored(cache, ids) == end
        for ids in forks:
            assert restored(cache, ids) == len(ids) // 2 * 2
        assert restored(cache, trunk) == 5000
        # A fork brings its own 2,000 tokens and less than 64 of the trunk's.
        per_token = sum(part.n_bytes(0, 2) for part in PARTS) / 2 + 4
        added = folder_bytes(tmp_path / "kv") - before
        assert added < len(forks) * (2064 * per_token + 2500)
    with opened(tmp_path / "kv") as cache:
        for ids in forks:
            assert restored(cache, ids) == len(ids) // 2 * 2


@pytest.mark.parametrize("offset", [*range(2, BLOCK_TOKENS + 1, 146), 1022, 1024, 1026, 2048])
@pytest.mark.parametrize("order", ["ascending", "descending"])
def test_bytes_of_the_released_sizes(tmp_path: Path, offset: int, order: str) -> None:
    ids = tokens(1, 3 * BLOCK_TOKENS + 1024)
    last = offset + 1024 + BLOCK_TOKENS
    with opened(tmp_path / "kv", parts=RELEASED_PARTS) as cache:

        def added(position: int) -> int:
            before = folder_bytes(tmp_path / "kv")
            zero_save(cache, RELEASED_PARTS, ids, position, RELEASED_TAIL_BYTES)
            assert cache.flush(FLUSH_S)
            return folder_bytes(tmp_path / "kv") - before

        assert sum(part.n_bytes(0, 2) for part in RELEASED_PARTS) == 2 * RELEASED_ROW_BYTES
        if order == "ascending":
            assert added(offset + BLOCK_TOKENS) <= 894 * 1.02 * (offset + BLOCK_TOKENS) + 2.75e6
            assert added(last) <= 3.7e6
        else:
            # What lies before is stored already, as part of a longer segment.
            added(last)
            assert added(offset + BLOCK_TOKENS) <= 2.75e6 + 64 * 894
            fork = np.concatenate([ids[: offset + BLOCK_TOKENS], tokens(2, 1024)])
            before = folder_bytes(tmp_path / "kv")
            zero_save(cache, RELEASED_PARTS, fork, last, RELEASED_TAIL_BYTES)
            assert cache.flush(FLUSH_S)
            assert folder_bytes(tmp_path / "kv") - before <= 3.7e6
