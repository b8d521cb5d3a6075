"""The limits of folder and disk: what is refused, what is evicted for what, and what stays."""

from itertools import pairwise
from pathlib import Path
from random import Random

import pytest

from mlx_engine.diskcache import layout, names
from mlx_engine.diskcache.cache import DiskCache
from mlx_engine.diskcache.index import Anchor
from mlx_engine.diskcache.layout import TokenIds
from mlx_engine.diskcache.policy import PolicyClock
from mlx_engine.diskcache.shelf import Shelf
from mlx_engine.diskcache.store import Store
from tests.diskcache.content import (
    FLUSH_S,
    PARTS,
    begin,
    folder_bytes,
    opened,
    restored,
    room,
    tail,
    tokens,
)
from tests.diskcache.recording import HastyFiles
from tests.diskcache.support import (
    RELEASED_PARTS,
    RELEASED_ROW_BYTES,
    RELEASED_TAIL_BYTES,
    SmallDisk,
    saved,
    warnings,
)


def test_a_disk_near_its_end_takes_nothing(tmp_path: Path) -> None:
    ids = tokens(1, 5000)
    disk = SmallDisk(10**9)
    with opened(tmp_path / "kv", files=disk, free_floor_bytes=10**8) as cache:
        saved(cache, ids, 3000)
        disk.free_bytes = 10**8 - 10**6
        saved(cache, ids, 5000)
        assert cache.stats().refused == 1
        assert "nothing is written" in str(cache.stats().notice)
        assert restored(cache, ids) == 3000
        disk.free_bytes = 2 * 10**8
        assert cache.stats().notice is None
        saved(cache, ids, 5000)
        assert restored(cache, ids) == 5000


def test_the_default_floor_is_a_share_of_the_disk(tmp_path: Path) -> None:
    with opened(tmp_path / "kv", files=SmallDisk(10**12), free_floor_bytes=None) as cache:
        assert cache.stats().free_floor_bytes == 10 * 10**9


def test_foreign_files_count_and_stay(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    with opened(folder):
        pass
    (folder / "photos").mkdir()
    foreign = [folder / "a.bin", folder / "photos" / "b.bin"]
    for path in foreign:
        path.write_bytes(bytes(40_000))
    ids = tokens(1, 9000)
    with opened(folder, space_bytes=400_000) as cache:
        for position in range(1000, 9000, 1000):
            saved(cache, ids, position)
        stats = cache.stats()
        assert stats.foreign_bytes == 80_000
        assert stats.foreign_names == ("a.bin", "photos")
        assert stats.notice is None
        assert folder_bytes(folder) <= 400_000
        (folder / "late.bin").write_bytes(bytes(320_001))
        refused = stats.refused
        saved(cache, ids, 9000)
        assert cache.stats().refused == refused + 1
        assert "not the cache's" in str(cache.stats().notice)
    assert all(path.stat().st_size == 40_000 for path in foreign)


def test_foreign_files_beyond_the_limit_shut_the_cache(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    with opened(folder):
        pass
    ours = {path.name for path in folder.iterdir()}
    (folder / "big.bin").write_bytes(bytes(100_001))
    with opened(folder, space_bytes=100_000) as cache:
        assert "nothing is written" in str(cache.stats().notice)
        assert cache.begin(tokens(1, 100), 100) is None
        cache.record_put(bytes(32), tokens(1, 10))
        assert cache.flush(FLUSH_S)
        assert cache.lookup(tokens(1, 100)) == 0
        assert cache.records() == []
    assert {path.name for path in folder.iterdir()} == {*ours, "big.bin"}


def test_a_lower_limit_holds_from_the_start(tmp_path: Path) -> None:
    ids = tokens(1, 9000)
    with opened(tmp_path / "kv") as cache:
        saved(cache, ids, *range(1000, 9001, 1000))
        needed = folder_bytes(tmp_path / "kv")
    with opened(tmp_path / "kv", space_bytes=needed // 2) as cache:
        assert cache.flush(FLUSH_S)
        assert folder_bytes(tmp_path / "kv") <= needed // 2
        assert 3000 <= restored(cache, ids) <= 5000


def test_what_would_not_survive_is_not_written(tmp_path: Path) -> None:
    ids, worthless = tokens(1, 4000), tokens(2, 4000)
    with opened(tmp_path / "kv", clock=lambda: 1e9) as cache:
        saved(cache, ids, 4000)
        used = folder_bytes(tmp_path / "kv")
    created: list[str] = []

    class Watching(HastyFiles):
        def create(self, path: Path) -> int:
            created.append(path.name)
            return super().create(path)

    with opened(
        tmp_path / "kv", space_bytes=used + 50_000, clock=lambda: 1e9, files=Watching()
    ) as cache:
        created.clear()
        started = begin(cache, worthless, 4000)
        assert started is not None
        started.finish(tail(worthless, 4000), 0.001)
        assert cache.flush(FLUSH_S)
        assert created == []
        assert cache.stats().refused == 1
        assert restored(cache, ids) == 4000
        started = begin(cache, worthless, 4000)
        assert started is not None
        started.finish(tail(worthless, 4000), 1000.0)
        assert cache.flush(FLUSH_S)
        assert restored(cache, worthless) == 4000
        assert cache.lookup(ids) == 0


def test_the_prefix_in_use_is_not_evicted(tmp_path: Path) -> None:
    ids = tokens(1, 4000)
    with opened(tmp_path / "kv") as cache:
        saved(cache, ids, 4000)
        used = folder_bytes(tmp_path / "kv")
    with opened(tmp_path / "kv", space_bytes=used + 50_000) as cache:
        with cache.protect(ids):
            for seed in (2, 3):
                started = begin(cache, tokens(seed, 4000), 4000)
                assert started is not None
                started.finish(tail(tokens(seed, 4000), 4000), 1e6)
            assert cache.flush(FLUSH_S)
            assert cache.stats().refused == 2
            assert restored(cache, ids) == 4000
        started = begin(cache, tokens(2, 4000), 4000)
        assert started is not None
        started.finish(tail(tokens(2, 4000), 4000), 1e6)
        assert cache.flush(FLUSH_S)
        assert cache.lookup(ids) == 0


def test_what_a_save_shares_is_not_evicted_for_it(tmp_path: Path) -> None:
    trunk = tokens(1, 4000)
    fork = tokens(2, 2500, after=trunk[:1500])
    with opened(tmp_path / "kv") as cache:
        saved(cache, trunk, 4000)
        used = folder_bytes(tmp_path / "kv")
    with opened(tmp_path / "kv", space_bytes=used + 50_000) as cache:
        started = begin(cache, fork, 4000)
        assert started is not None
        started.finish(tail(fork, 4000), 1e6)
        assert cache.flush(FLUSH_S)
        assert cache.stats().refused == 1
    with opened(tmp_path / "kv") as cache:
        assert restored(cache, trunk) == 4000
        assert cache.lookup(fork) == 0


@pytest.mark.parametrize("holder", ["protect", "begin"])
def test_a_forgotten_pin_holds_nothing(tmp_path: Path, holder: str) -> None:
    ids, other = tokens(1, 4000), tokens(2, 4000)
    with opened(tmp_path / "kv") as cache:
        saved(cache, ids, 4000)
        used = folder_bytes(tmp_path / "kv")
    with opened(tmp_path / "kv", space_bytes=used + 50_000) as cache:
        pin = cache.protect(ids) if holder == "protect" else cache.begin(tokens(3, 9, ids), 4002)
        assert pin is not None
        del pin
        started = begin(cache, other, 4000)
        assert started is not None
        started.finish(tail(other, 4000), 1e6)
        assert cache.flush(FLUSH_S)
        assert cache.lookup(other) == 4000


def test_what_nobody_shares_any_more_is_worth_less_by_the_byte(tmp_path: Path) -> None:
    trunk = tokens(1, 5000)
    fork, other = tokens(2, 904, after=trunk[:4096]), tokens(3, 2400)
    folder = tmp_path / "kv"
    with opened(folder, clock=lambda: 1e9) as cache:
        for ids, seconds in ((trunk, 0.01), (fork, 10.0), (other, 10.0)):
            started = begin(cache, ids, len(ids))
            assert started is not None
            started.finish(tail(ids, len(ids)), seconds)
            assert cache.flush(FLUSH_S)
    store = Store.open(folder, HastyFiles(), 10**9, 0)
    root = layout.root_key(b"weights", PARTS)
    shelf = Shelf(store, names.folder_name(root), root, PolicyClock(lambda: 1e9))
    shelf.load()
    gone: list[Anchor] = []
    while (plan := shelf.ranking.plan(1)) is not None:
        gone += plan.anchors
        shelf.detach(plan)
    positions = [anchor.position for anchor in gone]
    assert positions == [5000, 5000, 2400]
    assert [anchor.key for anchor in gone[:2]] == [
        shelf_key(root, trunk),
        shelf_key(root, fork),
    ]


def shelf_key(root: bytes, ids: TokenIds) -> bytes:
    key = root
    for first, last in layout.pieces(0, len(ids)):
        key = layout.PrefixKeys(key).after(ids[first:last])
    return key


def test_one_long_session_gives_up_its_middle(tmp_path: Path) -> None:
    """With nothing else to evict, tails between head and end go, and no rows of the session."""
    ids = tokens(1, 40_000)
    limit = 40_000 * 30
    head = 4000
    with opened(tmp_path / "kv", space_bytes=limit, parts=((PARTS[0]),)) as cache:
        for position in range(head, 36_001, 1000):
            with cache.protect(ids[:position]):
                started = cache.begin(ids, position)
                assert started is not None
                for first, last in started.ranges:
                    started.rows(first, last, [bytes(PARTS[0].n_bytes(first, last))])
                started.finish(bytes(60_000), 1.0)
                assert cache.flush(FLUSH_S)
            assert cache.lookup(ids) == position
            assert folder_bytes(tmp_path / "kv") <= limit
        stats = cache.stats()
        assert stats.refused == 0
        assert stats.evicted > 0
        assert stats.stored_tokens == 36_000
        # The way back in is still short: what was dropped can be saved again, tail only.
        missing = next(p for p in range(35_000, head, -1000) if cache.lookup(ids[:p]) != p)
        again = cache.begin(ids, missing)
        assert again is not None
        assert again.ranges == []


def test_uses_count_over_a_restart(tmp_path: Path) -> None:
    now = [1e9]
    ids = [tokens(seed, 3000) for seed in range(3)]
    with opened(tmp_path / "kv", clock=lambda: now[0]) as cache:
        saved(cache, ids[0], 3000)
        now[0] += 1.0
        saved(cache, ids[1], 3000)
        assert restored(cache, ids[0]) == 3000
        used = folder_bytes(tmp_path / "kv")
    now[0] += 1.0
    with opened(tmp_path / "kv", clock=lambda: now[0], space_bytes=used + 1000) as cache:
        saved(cache, ids[2], 3000)
        assert restored(cache, ids[0]) == 3000
        assert cache.lookup(ids[1]) == 0


def allowed(line: str) -> int:
    """The limit that a notice tells."""
    return int(line.split(" allow ")[1].split()[0])


@pytest.mark.parametrize("seed", range(30))
def test_a_prompt_that_does_not_fit_is_told_with_a_limit_that_has_room_for_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, seed: int
) -> None:
    random = Random(seed)
    # It parts from the other one behind an anchor, where a start of the next segment is shared.
    n_tokens, shared = random.randrange(5000, 20_000, 100), random.randrange(0, 5000, 1000) + 90
    other = tokens(2, 5000)
    ids = tokens(1, n_tokens - shared, after=other[:shared])
    count = random.choice((1, 4, 12, n_tokens // 100))
    positions = [*sorted(random.sample(range(100, n_tokens, 100), count - 1)), n_tokens]
    n_protected = random.choice((0, count // 2, count))
    tail_bytes = random.choice((400, 80_000))

    def store(cache: DiskCache, ids: TokenIds, *positions: int, saved_s: float = 1e6) -> None:
        for position in positions:
            started = begin(cache, ids, position)
            if started is not None:
                started.finish(bytes(tail_bytes), saved_s)
            assert cache.flush(FLUSH_S)

    def keep(folder: str, space_bytes: int) -> str:
        """Save anchors of a prompt, at first while it is read, beside another that begins alike."""
        options = {"space_bytes": space_bytes, "least_tokens": 100, "tail_bytes": tail_bytes}
        with opened(tmp_path / folder) as cache:
            store(cache, other, *range(1000, 5001, 1000), saved_s=1.0)
        with opened(tmp_path / folder, **options) as cache:
            with cache.protect(ids):
                found = cache.restore(ids, n_tokens, room(n_tokens))
                left = [p for p in positions if found is None or p > found.position]
                store(cache, ids, *left[:n_protected])
            store(cache, ids, *left[n_protected:])
            assert (cache.lookup(ids) == n_tokens) == (folder == "enough")
            return str(cache.stats().notice)

    n_bytes = sum(part.n_bytes(0, n_tokens) for part in PARTS)
    space_bytes = int(n_bytes * random.uniform(0.2, 1.0)) + tail_bytes
    said = keep("small", space_bytes)
    (first,) = warnings(caplog)
    assert f"a prompt of {n_tokens} tokens" in first and f"limit of {space_bytes} bytes" in first
    assert str(tmp_path / "small") in first
    caplog.clear()
    assert allowed(said) >= allowed(first) and keep("enough", allowed(first)) == "None"
    assert warnings(caplog) == []


def test_a_prompt_is_told_again_when_it_needs_twice_as_much(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ids = tokens(1, 40_000)
    with opened(tmp_path / "kv", space_bytes=50_000) as cache:
        for n_tokens in range(4000, 40_001, 4000):
            assert cache.begin(ids[:n_tokens], n_tokens) is None
            assert f"a prompt of {n_tokens} tokens" in str(cache.stats().notice)
    told = [allowed(line) for line in warnings(caplog)]
    assert 2 < len(told) < 5
    assert all(after >= 2 * before for before, after in pairwise(told))


def test_rows_beyond_the_limit_are_told_before_they_are_handed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ids = tokens(1, 9000)
    with opened(tmp_path / "kv", space_bytes=100_000) as cache:
        assert cache.begin(ids, 9000) is None
        assert "a prompt of 9000 tokens" in str(cache.stats().notice)
    assert len(warnings(caplog)) == 1


def test_the_limit_that_is_told_is_hardly_more_than_what_the_released_model_keeps(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    n_tokens = 1_000_000
    options = {"parts": RELEASED_PARTS, "least_tokens": 128, "tail_bytes": RELEASED_TAIL_BYTES}
    with opened(tmp_path / "kv", space_bytes=10**8, **options) as cache:
        assert cache.begin(tokens(1, n_tokens), n_tokens) is None
    kept_bytes = n_tokens * (RELEASED_ROW_BYTES + layout.TOKEN_BYTES)
    (line,) = warnings(caplog)
    assert kept_bytes < allowed(line) < 1.03 * kept_bytes


def test_what_is_worth_too_little_is_refused_in_silence(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tmp_path / "kv", space_bytes=150_000, clock=lambda: 1e9) as cache:
        saved(cache, tokens(1, 4000), 4000)
        started = begin(cache, tokens(2, 4000), 4000)
        assert started is not None
        started.finish(tail(tokens(2, 4000), 4000), 0.001)
        assert cache.flush(FLUSH_S)
        assert cache.stats().refused == 1
        assert cache.stats().notice is None
    assert warnings(caplog) == []
