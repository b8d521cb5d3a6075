"""The end of a run: all is written while the disk goes on, after a signal only what fits."""

import time
from pathlib import Path

import pytest

from mlx_engine.cli.kv_disk import drain
from mlx_engine.diskcache.files import Buffer
from tests.diskcache.content import opened, restored, save, tokens
from tests.diskcache.recording import HastyFiles
from tests.diskcache.support import warnings

pytestmark = pytest.mark.usefixtures("no_surprises")

BOUND_S = 0.3
N_SAVES = 8


class SlowFiles(HastyFiles):
    """A disk that takes its time for every file; `at_write` is called with the count of them."""

    def __init__(self, write_s: float) -> None:
        self.write_s = write_s
        self.count = 0
        self.signal_at = 10**9
        self.signals: list[int] = []

    def write(self, handle: int, buffers: "list[Buffer]") -> None:  # type: ignore[override]
        self.count += 1
        if self.count == self.signal_at:
            self.signals.append(15)
        time.sleep(self.write_s)
        super().write(handle, buffers)


@pytest.fixture(autouse=True)
def short_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlx_engine.diskcache.cache.CLOSE_S", BOUND_S)


def stored_after(folder: Path, files: SlowFiles) -> int:
    """How many of N_SAVES anchors are there after a run that ends with them all waiting."""
    prompts = [tokens(seed, 1000) for seed in range(N_SAVES)]
    with opened(folder, files=files) as cache:
        for ids in prompts:
            assert save(cache, ids, 1000)
        drain(cache, files.signals)
    with opened(folder) as cache:
        return sum(restored(cache, ids) == 1000 for ids in prompts)


def test_without_a_signal_everything_is_written(tmp_path: Path) -> None:
    files = SlowFiles(BOUND_S / 4)
    # Three files an anchor: together far more than the bound.
    assert stored_after(tmp_path / "kv", files) == N_SAVES


def test_after_a_signal_only_the_bound_is_left(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = SlowFiles(BOUND_S / 4)
    files.signal_at = 3 * 3
    stored = stored_after(tmp_path / "kv", files)
    # Some came before the signal, and not all after it.
    assert 2 <= stored < N_SAVES
    assert files.count <= files.signal_at + 8
    assert warnings(caplog) == []


def test_a_second_signal_waits_for_nothing(tmp_path: Path) -> None:
    files = SlowFiles(0.02)
    files.signals = [2, 15]
    assert stored_after(tmp_path / "kv", files) < N_SAVES
    assert files.count <= 4


def test_a_disk_that_takes_nothing_is_not_waited_for(tmp_path: Path) -> None:
    files = SlowFiles(0.5)
    with opened(tmp_path / "kv", files=files) as cache:
        for seed in range(4):
            assert save(cache, tokens(seed, 1000), 1000)
        cache.drain(lambda: False, stall_s=0.1)
        assert cache.stats().queued_bytes > 0
        cache.close(0.0)


def test_a_slow_disk_is_waited_for_within_a_bound(tmp_path: Path) -> None:
    with opened(tmp_path / "kv", files=SlowFiles(0.05)) as cache:
        for seed in range(N_SAVES):
            assert save(cache, tokens(seed, 1000), 1000)
        cache.drain(lambda: False, timeout_s=0.1)
        assert cache.stats().queued_bytes > 0
        cache.close(0.0)
