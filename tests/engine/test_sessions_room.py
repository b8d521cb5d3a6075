"""Sessions short of memory: what is forgotten for what, and when it is handed to the cache."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from mlx_engine import memory
from mlx_engine.session import Session
from mlx_engine.state import Checkpoint, SessionState
from mlx_engine.state_transfer import export_rows
from tests.engine.counted import CHUNK_TOKENS, IDS, OTHER, Made, subject
from tests.engine.timelines import MemoryCache, Stopped, followed, stop_after
from tests.unit.arrays import host


def conversation(made: Made, turns: int) -> Session:
    """A session with a checkpoint for every turn."""
    prompt = IDS[:40]
    for _ in range(turns):
        tokens, _ = made.answer(prompt, 3)
        prompt = [*prompt, *tokens, *OTHER[:6]]
    return made.sync(prompt)[0]


def at(session: Session) -> list[int]:
    return [each.position for each in session.checkpoints]


def limit(monkeypatch: pytest.MonkeyPatch, made: Made, budget_bytes: int) -> None:
    monkeypatch.setattr(made.sessions._room, "budget_bytes", budget_bytes)  # pyright: ignore[reportPrivateUsage]


def test_a_fork_that_cannot_be_had_costs_nobody_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Made()
    main = conversation(made, 12)
    other, _, _ = made.sync([200, *OTHER[:100]])
    wanted = at(main)[-6]
    limit(monkeypatch, made, made.sessions.n_bytes + 10_000)
    prompt = [*main.token_ids[:wanted].tolist(), *OTHER[200:210]]
    session, _, computed = made.sync(prompt)
    assert session is main and computed == 10
    stats = made.sessions.stats()
    assert (stats.forked, stats.rewound, stats.evicted) == (0, 1, 0)
    assert other in made.sessions


def test_a_fork_goes_before_what_is_worth_less(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Made()
    small, _, _ = made.sync([200, *OTHER[:30]])
    main, _, _ = made.sync(IDS[:300], 41)
    size = memory.held_bytes(subject().config, 70) + 3 * memory.checkpoint_bytes(subject().config)
    limit(monkeypatch, made, made.sessions.n_bytes + size - small.state_bytes)
    side, _, computed = made.sync([*IDS[:40], *OTHER[:20]], 41)
    assert computed == 20 and side is not main
    assert main in made.sessions and small not in made.sessions
    stats = made.sessions.stats()
    assert (stats.forked, stats.evicted) == (1, 1)


def test_what_may_go_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Made()
    main = conversation(made, 12)
    own, looks = Session.expendable, list[Session]()

    def expendable(session: Session) -> list[tuple[Checkpoint, int]]:
        looks.append(session)
        return own(session)

    monkeypatch.setattr(Session, "expendable", expendable)
    monkeypatch.setattr("mlx_engine.sessions._LOOK_STEPS", 1)
    limit(monkeypatch, made, made.sessions.n_bytes - 6 * main.checkpoints[0].n_bytes)
    made.sessions.step(main, 5)
    assert made.sessions.stats().dropped_checkpoints >= 6
    assert looks == [main]


def test_a_checkpoint_of_two_sessions_counts_once() -> None:
    made = Made()
    main = conversation(made, 8)
    before = made.sessions.stats().checkpoint_bytes
    assert before == sum(each.n_bytes for each in main.checkpoints)
    side, _, _ = made.sync([*main.token_ids[: at(main)[6]].tolist(), *OTHER[200:210]])
    stats = made.sessions.stats()
    assert stats.forked == 1 and at(side)[:7] == at(main)[:7]
    assert stats.checkpoint_bytes == before + side.checkpoints[-1].n_bytes
    state_bytes = side.state_bytes + main.state_bytes
    assert made.sessions.n_bytes == stats.checkpoint_bytes + state_bytes


def saved(n: int) -> MemoryCache:
    """What a closed engine left of the first n tokens."""
    cache = MemoryCache()
    made = Made(cache)
    made.sync(IDS[:n], 41)
    made.sessions.close()
    return cache


@pytest.mark.parametrize("shared", [30, 60])
def test_a_restored_session_stays_in_the_budget(
    monkeypatch: pytest.MonkeyPatch, shared: int
) -> None:
    config = subject().config
    budget = memory.held_bytes(config, 310) + 6 * memory.checkpoint_bytes(config)
    made = Made(saved(300), budget_bytes=budget)
    # It shares a start, up to its first checkpoint or less: that is no reason for it to stay.
    made.sync([*IDS[:shared], *OTHER[: 300 - shared]], 41)
    own, most = Session.restore, list[int]()

    def restore(session: Session, token_ids: Sequence[int], state: Any) -> None:
        most.append(made.sessions.n_bytes + state.n_bytes)
        own(session, token_ids, state)

    monkeypatch.setattr(Session, "restore", restore)
    assert made.sync(IDS[:310], 41)[2] == 10
    assert most and max(most) <= budget


def test_without_room_nothing_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = saved(300)
    monkeypatch.setattr(cache, "restore", None)
    made = Made(cache, budget_bytes=memory.held_bytes(subject().config, 200))
    assert made.sync(IDS[:310], 41)[2] == 310


def test_a_restore_takes_no_more_than_the_state() -> None:
    budget = memory.held_bytes(subject().config, 298)
    assert Made(saved(300), budget_bytes=budget).sync(IDS[:300])[2] == 2
    assert Made(saved(300), budget_bytes=budget - 1).sync(IDS[:300])[2] == 300


@pytest.mark.parametrize("kind", [MemoryError, RuntimeError])
def test_a_restore_that_finds_no_memory_is_a_miss(
    monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    cache = saved(101)

    def no_memory(*_: object) -> None:
        raise kind("no memory")

    made = Made(cache)
    with monkeypatch.context() as patch:
        patch.setattr("mlx_engine.saving.Import", no_memory)
        assert made.sync(IDS[:101])[2] == 101
    # What is stored is in order.
    assert not cache.rejected and Made(cache).sync(IDS[:101])[2] == 1


def test_steps_hand_over_what_must_go_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlx_engine.sessions._LOOK_STEPS", 1)
    cache = MemoryCache()
    made = Made(cache)
    victim, _, _ = made.sync(IDS[:101])
    session, _, _ = made.sync(OTHER[:50])
    third, _, _ = made.sync([200, *OTHER[:60]])
    for each in (session, third):
        made.sessions.end_turn(each)
    made.save()
    for token_id in (5, 6, 7):
        made.sessions.step(victim, token_id)
    # What the first has is worth less than what was used since.
    monkeypatch.setattr(made.sessions._room, "requests", 400)  # pyright: ignore[reportPrivateUsage]
    for live in (session, third):
        made.sync(live.token_ids.tolist())
    limit(monkeypatch, made, made.sessions.n_bytes - 1000)
    steps = 0
    while steps == 0 or made.sessions.stats().leaving_bytes:
        before = cache.calls
        made.sessions.step(third, 5)
        steps += 1
        assert cache.calls <= before + 1
    assert victim not in made.sessions and session in made.sessions
    assert made.sessions.stats().evicted == 1
    assert steps > 1 and 104 in [len(key) // 4 for key in cache.tails]


def test_what_a_turn_leaves_is_handed_over_by_whoever_comes() -> None:
    cache = MemoryCache()
    made = Made(cache)
    session, _, _ = made.sync(IDS[:101])
    for token_id in (5, 6):
        made.sessions.step(session, token_id)
    before = cache.calls
    made.sessions.end_turn(session)
    assert cache.calls == before and not cache.tails
    # Steps of another session take one piece each; the rest those of the next prompt's chunks.
    other, _, _ = made.sync(OTHER[:10])
    for n in range(3):
        made.sessions.step(other, 7)
        assert cache.calls == before + 1 + n
    expected = host(made.sync([*IDS[:101], 5, 6, *OTHER[: 2 * CHUNK_TOKENS]])[1])
    made.sessions.close()
    assert {100, 102} <= {len(key) // 4 for key in cache.tails}
    again = Made(cache)
    found = host(again.sync([*IDS[:101], 5, 6, *OTHER[: 2 * CHUNK_TOKENS]])[1])
    np.testing.assert_allclose(found, expected, atol=1e-3)
    assert again.sessions.stats().restored == 1


def broken_off(made: Made, chunks: int) -> int:
    """Begin with a prompt, and leave after so many chunks: the tokens that were read."""
    with pytest.raises(Stopped):
        followed(made.sessions.read(IDS[:300], [41]), stop_after(chunks + 1))
    return made.model.tokens


@pytest.mark.parametrize("chunks", [1, 5, 10])
def test_what_a_prefill_that_broke_off_has_read_is_there_after_a_restart(chunks: int) -> None:
    """The same logits as without a restart, from a prefill that paused in the same place."""
    cache = MemoryCache()
    made = Made(cache)
    read = broken_off(made, chunks)
    made.sessions.close()
    again = Made(cache)
    _, logits, computed = again.sync(IDS[:300], 41)
    assert computed == 300 - read
    # Chunks of the same lengths, so that it is bits that are compared.
    expected = Session(subject().model, subject().reader, chunk_tokens=CHUNK_TOKENS)
    expected.sync(IDS[:40], [])
    if read > 40:
        expected.sync(IDS[:read], [])
    np.testing.assert_array_equal(host(logits), host(expected.sync(IDS[:300], [])))


def test_what_a_prefill_that_broke_off_has_read_leaves_by_way_of_the_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = MemoryCache()
    made = Made(cache)
    read = broken_off(made, 10)
    limit(monkeypatch, made, memory.held_bytes(subject().config, 300))
    made.sync([200, *OTHER[:250]])
    assert made.sessions.stats().evicted == 1
    assert cache.lookup(np.array(IDS[:300], np.uint32)) == read


def test_a_device_that_fails_at_the_end_costs_one_session_alone() -> None:
    cache = MemoryCache()
    made = Made(cache)
    broken_off(made, 10)
    made.sync([200, *OTHER[:100]])
    made.model.layers_left = 0
    made.sessions.close()
    assert cache.lookup(np.array(IDS[:300], np.uint32)) == 40
    assert cache.lookup(np.array([200, *OTHER[:100]], np.uint32)) == 100


def test_a_save_that_fails_at_the_end_costs_one_session_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def failing(state: SessionState, first: int, last: int) -> Any:
        if state is lost.state:
            raise RuntimeError("the device is gone")
        return export_rows(state, first, last)

    cache = MemoryCache()
    made = Made(cache)
    kept = [made.sync([first, *OTHER[:100]])[0] for first in (200, 201, 202)]
    lost = kept.pop(1)
    monkeypatch.setattr("mlx_engine.saving.export_rows", failing)
    made.sessions.close()
    assert [cache.lookup(session.token_ids) for session in (lost, *kept)] == [0, 100, 100]
