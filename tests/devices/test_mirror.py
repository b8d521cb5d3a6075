"""What rank 0 does with its sessions another rank does too: here both are in this process."""

import gc
import pickle
from collections import deque
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np
import pytest

from mlx_engine import memory
from mlx_engine.calls import Call, Plan
from mlx_engine.devices import Devices
from mlx_engine.follow import Follower
from mlx_engine.full_logits import full_logits
from mlx_engine.lead import Lead, LedSession
from mlx_engine.loading import Parts
from mlx_engine.progress import to_end
from mlx_engine.ranks import Ranks
from mlx_engine.sampling import Sampler, Sampling
from mlx_engine.sessions import Sessions
from tests.engine.counted import CHUNK_TOKENS, IDS, OTHER, ROOMY, subject
from tests.engine.timelines import MemoryCache, seen


class Sender(Devices):
    def from_first(self, x: mx.array) -> mx.array:
        self.group.append(np.array(x))
        return x


class Receiver(Devices):
    def from_first(self, x: mx.array) -> mx.array:
        sent = mx.array(self.group.popleft())
        assert (sent.shape, sent.dtype) == (x.shape, x.dtype)
        return sent


class Mirror:
    """Stands in for Ranks: what rank 0 has done, a follower does next."""

    def __init__(self) -> None:
        sent: deque[Any] = deque()
        parts = Parts(subject().model, subject().reader)
        plan = Plan(Path(), 512, "float32", "short", CHUNK_TOKENS, 0, None)
        self.follower = Follower(plan, parts, Receiver(1, 2, sent))
        self.lead = Lead(Sender(0, 2, sent), cast(Ranks, self))
        self.calls: list[str] = []
        self._message = b""

    def send(self, call: Call) -> None:
        self.calls.append(call.name)
        self._message = pickle.dumps(call)

    def did(self) -> None:
        self.follower.do(pickle.loads(self._message))

    def fail(self, error: Exception) -> None:
        raise error

    def require_same(self, sessions: Sessions) -> None:
        """What this rank has of sessions the other one has, and no more."""
        gc.collect()
        own = {each.number: each for each in gc.get_objects() if isinstance(each, LedSession)}
        own = {number: each for number, each in own.items() if each in sessions}
        assert self.follower.sessions.keys() == own.keys() and own
        for session in own.values():
            self.require_same_session(session)

    def require_same_session(self, session: LedSession) -> None:
        other = self.follower.sessions[session.number]
        np.testing.assert_array_equal(other.token_ids, session.token_ids)
        assert seen(other.state) == seen(session.state)
        positions = [each.position for each in session.checkpoints]
        assert [each.position for each in other.checkpoints] == positions
        assert (other.pauses, other.is_whole) == (session.pauses, session.is_whole)

    def session(self) -> LedSession:
        model, reader = subject().model, subject().reader
        return LedSession(self.lead, model, reader, chunk_tokens=CHUNK_TOKENS)


def test_every_call_is_done_by_the_other_too() -> None:
    mirror, cache = Mirror(), MemoryCache()
    model, reader = subject().model, subject().reader
    room = 3 * memory.held_bytes(model.config, 400) + 9 * memory.checkpoint_bytes(model.config)

    def made(budget_bytes: int) -> Sessions:
        return Sessions(
            model,
            reader,
            budget_bytes=budget_bytes,
            chunk_tokens=CHUNK_TOKENS,
            cache=cache,
            least_save_tokens=1,
            session_type=mirror.lead.session,
        )

    sessions, sampler = made(room), Sampler(Sampling(seed=1))

    def answer(ids: list[int], n: int) -> list[int]:
        session, _ = to_end(sessions.read(ids, [40]))
        tokens: list[int] = []
        for _ in range(n):
            tokens.append(session.draw(sampler.next()))
            sessions.step(session, tokens[-1])
        sessions.leave(session)
        sessions.end_turn(session)
        return tokens

    tokens = answer(IDS[:200], 5)
    answer([*IDS[:200], *tokens, *OTHER[:9]], 3)
    # A fork, a prompt that is left in its middle, one that goes back, and others until some go.
    answer([*IDS[:60], *OTHER[:30]], 4)
    reading = sessions.read(OTHER[:150])
    assert [next(reading) for _ in range(3)]
    reading.close()
    answer([*IDS[:190], *OTHER[:3]], 2)
    for first in range(20, 100, 20):
        answer([*OTHER[first:200], *IDS[:100]], 1)
    # Two at once, of which the second waits for what both begin with.
    readings = [sessions.read([*IDS[300:], *OTHER[100 * i : 100 * i + 60]]) for i in range(2)]
    while readings:
        for reading in [*readings]:
            try:
                next(reading)
            except StopIteration as end:
                sessions.leave(end.value[0])
                readings.remove(reading)
    assert sessions.stats().evicted and sessions.stats().forked
    sessions.close()
    sessions = made(ROOMY)
    answer(IDS[:201], 2)
    assert sessions.stats().restored
    del answer
    mirror.require_same(sessions)
    done = {"new", "fork", "restore", "read", "go_on", "draw", "step", "keep_checkpoint"}
    assert done <= set(mirror.calls)


def test_what_changes_between_two_chunks_changes_for_the_other_too() -> None:
    mirror = Mirror()
    session = mirror.session()
    reading = session.read(IDS[:200], [60])
    for chunk_tokens, done in ((5, 0), (5, 5), (30, 35), (16, 51)):
        session.chunk_tokens = chunk_tokens
        assert next(reading) == done
        mirror.require_same_session(session)
    session.pause_at(100)
    to_end(reading)
    assert [each.position for each in session.checkpoints] == [60, 100, 198]
    session.drop_checkpoint(session.checkpoints[1])
    mirror.require_same_session(session)


def test_a_prefill_that_is_broken_off_is_caught_up_with_by_the_other_too() -> None:
    mirror = Mirror()
    session = mirror.session()
    reading = session.read(IDS[:200])
    assert [next(reading) for _ in range(3)][-1] > 0 and not session.is_whole
    reading.close()
    session.keep_unfinished()
    assert session.is_whole and session.checkpoints
    mirror.require_same_session(session)
    # Nor does the other one go on holding what it had begun.
    assert mirror.calls.count("stop_reading") == 1
    reading = session.read(IDS[:210])
    to_end(reading)
    assert mirror.calls.count("stop_reading") == 1


def test_logits_at_full_depth_are_computed_by_the_other_too() -> None:
    mirror = Mirror()
    given = (IDS[:20], np.array([3, 19]), 8)
    with mirror.lead.logits(*given):
        full_logits(subject().model, subject().reader, *given)
    assert mirror.calls == ["logits"]


def test_another_token_than_rank_0_drew_ends_the_run() -> None:
    mirror = Mirror()
    session = mirror.session()
    session.sync(IDS[:20])
    token = session.draw(Sampler(Sampling(temperature=0)).next())
    with pytest.raises(RuntimeError, match=f"it drew token {token} where rank 0 drew"):
        session.step(token + 1)


def test_other_numbers_than_rank_0s_end_the_run() -> None:
    mirror = Mirror()
    session = mirror.session()
    to_end(session.read(IDS[:62]))
    assert mirror.calls[-1] == "compare"
    # In the lowest layer, on that rank alone.
    window = mirror.follower.sessions[session.number].state.windows[0]
    window.rows = window.rows ^ mx.array(1, mx.uint32)
    for token_id in IDS[62:64]:
        session.step(token_id)
    with pytest.raises(RuntimeError, match="it computed other numbers than rank 0"):
        session.draw(Sampler(Sampling(temperature=0)).next())


def test_an_interrupt_while_a_call_is_sent_leaves_the_session_broken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mirror = Mirror()
    session = mirror.session()
    session.sync(IDS[:20])
    monkeypatch.setattr(mirror, "send", _interrupted)
    with pytest.raises(KeyboardInterrupt):
        session.step(3)
    with pytest.raises(Exception, match="left in the middle of a step"):
        session.step(3)


def test_a_session_that_was_interrupted_is_kept_but_computes_no_more() -> None:
    mirror = Mirror()
    session = mirror.session()
    session.sync(IDS[:20])
    with pytest.raises(KeyboardInterrupt):
        session.draw(_interrupted)
    calls = len(mirror.calls)
    session.keep_checkpoint()
    with pytest.raises(Exception, match="left in the middle of a step"):
        session.step(3)
    assert len(mirror.calls) == calls


def _interrupted(_: object) -> mx.array:
    raise KeyboardInterrupt
