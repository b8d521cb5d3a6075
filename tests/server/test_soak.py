"""An agent that never ends: after the warm-up nothing grows.

Turns with tool results, streamed and not, retries, side questions and clients that leave, in
conversations that begin anew when they are long. What is kept up to a bound, on disk and in memory,
has a small one here, reached in the warm-up: filling it is no growth.
"""

import ctypes
import gc
import http.client
import json
import os
import random
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import mlx.core as mx
import pytest

from mlx_engine.diskcache.cache import DiskCache
from mlx_engine.engine import Engine
from mlx_engine.errors import BadRequest
from mlx_engine.turns import TurnRecord
from tests.server.real import RealServer, open_disk_cache, open_tiny, real_server
from tests.server.support import PATIENCE_S, until

TURNS = 500
WARM_UP = 150
LOOK_EVERY = 10
TURNS_OF_ONE = 12
GROWTH_BYTES_PER_100_TURNS = 1e6
# What the warm-up fills.
DISK_BYTES = 8_000_000
TURNS_BYTES = 60_000
MEMO_BYTES = 30_000
# The tokenizer's library keeps the tokens of so many words, and of no more.
WORDS = 10_000
POOLS = ("asyncio_", "counting_")
PATIENT_S = 3 * PATIENCE_S

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="what a process holds is read in /proc"),
]


class Agent:
    """A conversation that goes on by tool results, and is begun anew when it is long."""

    def __init__(self, address: str) -> None:
        self._host = urlsplit(address).netloc
        self._rng = random.Random(0)
        self._messages: list[dict[str, Any]] = []

    def turn(self, number: int) -> None:
        """Append a question or a tool result, and the answer to it."""
        if len(self._messages) > 2 * TURNS_OF_ONE:
            self._messages.clear()
        said: Any = self._words(8)
        if self._messages:
            call_id = f"toolu_{number}"
            call = {"type": "tool_use", "id": call_id, "name": "Read", "input": {"path": "/a"}}
            self._messages[-1]["content"].append(call)
            said = [{"type": "tool_result", "tool_use_id": call_id, "content": said}]
        self._messages.append({"role": "user", "content": said})
        if number % 7 == 0:
            self._leave()
        if number % 11 == 0:
            self._ask("/v1/messages/count_tokens", self._body())
        if number % 13 == 0:
            self._ask("/v1/messages", self._body(messages=[{"role": "user", "content": "Title?"}]))
        answer = self._ask("/v1/messages", self._body())
        if number % 5 == 0:
            self._ask("/v1/messages", self._body(stream=True))
        content = [block for block in answer["content"] if block["type"] != "tool_use"]
        self._messages.append({"role": "assistant", "content": content})

    def _words(self, count: int) -> str:
        return " ".join(self._rng.choice(("alpha", "beta", "gamma")) for _ in range(count))

    def _body(self, **fields: Any) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "object", "properties": {}}
        body: dict[str, Any] = {
            "model": "ds41",
            "max_tokens": 6,
            # An answer that is cut in its reasoning is no turn to be kept.
            "thinking": {"type": "disabled"},
            "system": "Be brief.",
            "tools": [{"name": "Read", "input_schema": schema}],
            "messages": self._messages,
        }
        return body | fields

    def _ask(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        connection = http.client.HTTPConnection(self._host, timeout=PATIENT_S)
        try:
            connection.request("POST", path, json.dumps(body))
            reply = connection.getresponse()
            data = reply.read()
            assert reply.status == 200, data
            return {} if body.get("stream") else json.loads(data)
        finally:
            connection.close()

    def _leave(self) -> None:
        """Leave in the middle of an answer, or before it."""
        connection = http.client.HTTPConnection(self._host, timeout=PATIENT_S)
        connection.request("POST", "/v1/messages", json.dumps(self._body(stream=True)))
        connection.getresponse().read(self._rng.choice((1, 300)))
        connection.close()


@dataclass(frozen=True)
class Held:
    """What the process has, server and client together, when no session holds a state."""

    resident_bytes: int
    array_bytes: int
    files: int
    threads: int


def held(server: RealServer, disk_cache: DiskCache) -> Held:
    """Drop the sessions' states, let the disk cache write what is queued, and look."""
    until(lambda: server.worker.jobs() == [])
    # The worker may still hand to the disk cache what waits for it.
    until(lambda: is_reset(server.engine))
    assert disk_cache.flush(PATIENT_S)
    gc.collect()
    # What the allocators keep for later is no growth.
    mx.clear_cache()
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    files = len(list(Path("/proc/self/fd").iterdir()))
    resident_bytes = pages * os.sysconf("SC_PAGE_SIZE")
    names = [thread.name for thread in threading.enumerate()]
    pooled = sum(name.startswith(POOLS) for name in names)
    # Pools start a thread whenever all others are at work, up to their bound.
    assert pooled <= len(POOLS) * ((os.cpu_count() or 1) + 4), names
    return Held(resident_bytes, mx.get_active_memory(), files, len(names) - pooled)


def is_reset(engine: Engine) -> bool:
    """Reset an engine, unless it is at work."""
    try:
        engine.reset()
    except BadRequest:
        return False
    return True


def test_nothing_grows_in_a_long_agents_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlx_engine.prompt._MEMO_BYTES", MEMO_BYTES)
    opened = open_tiny(tmp_path)
    for number in range(WORDS):
        opened.tokenizer.encode_text(f"word{number}")
    looks: list[Held] = []
    with (
        open_disk_cache(opened, tmp_path, DISK_BYTES) as disk_cache,
        real_server(opened, tmp_path, contexts=1, disk_cache=disk_cache) as server,
    ):
        server.engine.turns = TurnRecord(disk_cache, max_bytes=TURNS_BYTES)
        agent = Agent(server.address)
        for number in range(1, TURNS + 1):
            agent.turn(number)
            if number >= WARM_UP and number % LOOK_EVERY == 0:
                looks.append(held(server, disk_cache))
            if number == WARM_UP:
                assert disk_cache.stats().evicted > 0
                assert server.engine.turns.n_bytes > TURNS_BYTES - 10_000
        counts = server.worker.counts
    first, last = looks[0], looks[-1]
    assert last.array_bytes <= first.array_bytes, looks
    assert last.files <= first.files and last.threads <= first.threads, looks
    # The least of each third: buffers of work that has just ended come and go.
    third = len(looks) // 3
    least = [min(each.resident_bytes for each in part) for part in (looks[:third], looks[-third:])]
    hundreds = LOOK_EVERY * (len(looks) - third) / 100
    assert least[1] - least[0] < GROWTH_BYTES_PER_100_TURNS * hundreds, looks
    assert counts.answered > TURNS and counts.failed == 0 and counts.cancelled > 0
