"""Clocks that jump, while a cache is open and from one start to the next."""

from pathlib import Path

import pytest

from mlx_engine.diskcache.check import list_anchors
from tests.diskcache.content import FLUSH_S, check, folder_bytes, opened, restored, save, tokens
from tests.diskcache.support import saved
from tests.diskcache.victim import prompt

pytestmark = pytest.mark.usefixtures("no_surprises")


def test_clock_changes_break_nothing(tmp_path: Path) -> None:
    now = [1e9]
    ids = [tokens(seed, 3000) for seed in range(8)]
    with opened(tmp_path / "kv", clock=lambda: now[0]) as cache:
        saved(cache, ids[0], 3000)
        one = folder_bytes(tmp_path / "kv")
    limit = int(one * 2.5)
    for step, time_s in enumerate((1e9, 2e9, 0.0, -1e9, 4e12, 1e9), start=1):
        now[0] = time_s
        with opened(tmp_path / "kv", clock=lambda: now[0], space_bytes=limit) as cache:
            now[0] = time_s - 1e8
            saved(cache, ids[step], 3000)
            check(cache, ids)
            # Within a few days by the new clock, what is new prevails over what was.
            now[0] = time_s + 4 * 24 * 3600
            saved(cache, ids[step], 3000)
            assert restored(cache, ids[step]) == 3000, f"a new save is refused at {time_s}"
            assert folder_bytes(tmp_path / "kv") <= limit


def test_a_time_in_the_future_is_corrected_at_the_next_start(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    now = [4e12]
    with opened(folder, clock=lambda: now[0]) as cache:
        saved(cache, tokens(1, 3000), 3000)
    now[0] = 1e9
    with opened(folder, clock=lambda: now[0]):
        pass
    (entry,) = list_anchors(folder, clock=lambda: 1e9 + 10 * 24 * 3600)
    assert 0 < entry.hits < 0.01


YEAR_S = 365 * 86400.0


@pytest.mark.parametrize("jump_s", [-50 * YEAR_S, -3600.0, 3600.0, 100 * YEAR_S])
def test_clocks_may_jump(tmp_path: Path, jump_s: float) -> None:
    space_bytes = 150_000
    now_s = 2e9
    folder = tmp_path / "cache"

    def clock() -> float:
        return now_s

    for start in range(2):
        with opened(folder, space_bytes=space_bytes, clock=clock) as cache:
            for number in range(4):
                ids = prompt(number + 4 * start)
                # Each is worth more than those before, whatever the clock says of their age.
                assert save(cache, ids, len(ids), saved_s=16.0 ** (number + 4 * start))
                assert cache.flush(FLUSH_S)
                assert restored(cache, ids) == len(ids)
                now_s += jump_s if number % 2 else -jump_s / 2
                check(cache, [prompt(i) for i in range(8)])
                assert folder_bytes(folder) <= space_bytes
