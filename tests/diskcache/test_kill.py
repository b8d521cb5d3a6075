"""kill -9 at every call of a write, and at random times: what is left is a cache that works.

The kernel lives on, so only what the process had not done yet is missing; test_crash is about the
rest. Three kinds of kills, well over 200 in all.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Generator, Sequence
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.diskcache import content
from tests.diskcache.victim import End, Job, positions, prompt

ROOT = Path(__file__).resolve().parents[2]
# Room for half of what the evicting jobs save.
TIGHT_BYTES = 200_000
RANDOM_KILLS = 100


class Victims:
    """The process that makes others for killing."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.diskcache.victim"],
            cwd=ROOT,
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, job: Job) -> End:
        """Run a job until it is killed or done."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(asdict(job)) + "\n")
        self._process.stdin.flush()
        end = End(**json.loads(self._process.stdout.readline()))
        assert not end.has_mlx
        return end

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


@pytest.fixture(scope="module")
def victims() -> Generator[Victims]:
    victims = Victims()
    yield victims
    victims.close()


def check(
    folder: Path, space_bytes: int, numbers: Sequence[int], promised: Sequence[Sequence[int]]
) -> None:
    """All that is offered is right, all that was promised is there, and a save goes on."""
    assert content.folder_bytes(folder) <= space_bytes
    with content.opened(folder, space_bytes=space_bytes) as cache:
        anchors = [(prompt(number), position) for number, position in promised]
        content.check(cache, [prompt(number) for number in numbers], anchors)
        new = content.tokens(9, 1000)
        content.save(cache, new, 1000, saved_s=1e3)
        assert cache.flush(content.FLUSH_S)
        assert content.restored(cache, new) == 1000
        assert content.folder_bytes(folder) <= space_bytes


@pytest.mark.parametrize("is_torn", [False, True])
def test_killed_at_every_call_of_a_save(victims: Victims, tmp_path: Path, is_torn: bool) -> None:
    before = tmp_path / "before"
    assert victims.run(Job(str(before), content.PLENTY_BYTES, 0, 1)).signal == 0
    promised = [(0, position) for position in positions(0)]
    kills = _kill_at_every_call(victims, before, content.PLENTY_BYTES, is_torn, promised)
    assert kills > 40


def test_killed_at_every_call_of_a_save_that_evicts(victims: Victims, tmp_path: Path) -> None:
    before = tmp_path / "before"
    assert victims.run(Job(str(before), TIGHT_BYTES, 0, 8)).signal == 0
    with content.opened(before, space_bytes=TIGHT_BYTES) as cache:
        assert cache.stats().anchors < 3 * 8
    kills = _kill_at_every_call(victims, before, TIGHT_BYTES, False, [])
    assert kills > 45


def test_killed_at_every_call_of_a_start(victims: Victims, tmp_path: Path) -> None:
    for at_call in range(1000):
        folder = tmp_path / str(at_call)
        end = victims.run(Job(str(folder), content.PLENTY_BYTES, 0, 0, at_call=at_call))
        check(folder, content.PLENTY_BYTES, [], [])
        if end.signal == 0:
            break
        assert end.signal == signal.SIGKILL
    else:
        raise AssertionError("it does not come to an end")


@pytest.mark.parametrize("space_bytes", [content.PLENTY_BYTES, TIGHT_BYTES])
def test_killed_at_random_times(victims: Victims, tmp_path: Path, space_bytes: int) -> None:
    folder = tmp_path / "cache"
    rng = random.Random(space_bytes)
    promised: list[tuple[int, int]] = []
    n_killed = 0
    for i in range(RANDOM_KILLS // 2):
        first = 5 * i
        job = Job(str(folder), space_bytes, first, 1000, after_s=rng.uniform(0.01, 0.08))
        end = victims.run(job)
        n_killed += end.signal == signal.SIGKILL
        if space_bytes == content.PLENTY_BYTES:
            promised += end.promised
        numbers = [first, first + 1, *rng.sample(range(first + 1), min(first, 4))]
        check(folder, space_bytes, numbers, promised[-8:])
    assert n_killed == RANDOM_KILLS // 2
    if space_bytes == content.PLENTY_BYTES:
        assert promised
        check(folder, space_bytes, [], promised)


def _kill_at_every_call(
    victims: Victims,
    before: Path,
    space_bytes: int,
    is_torn: bool,
    promised: Sequence[tuple[int, int]],
) -> int:
    """The process opens what `before` holds and saves a prompt's anchors; returns the kills."""
    for at_call in range(1000):
        folder = before.with_name(str(at_call))
        shutil.copytree(before, folder)
        job = Job(str(folder), space_bytes, 12, 1, at_call=at_call, is_torn=is_torn)
        end = victims.run(job)
        new = [(number, position) for number, position in end.promised]
        check(folder, space_bytes, [0, 3, 7, 12], [*promised, *(new if promised else [])])
        shutil.rmtree(folder)
        if end.signal == 0:
            print(f"{at_call} kills")
            return at_call
        assert end.signal == signal.SIGKILL
    raise AssertionError("it does not come to an end")
