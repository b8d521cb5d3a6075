"""Several timelines under one budget, and a cache behind them: where prompts go, and what stays."""

from collections.abc import Iterable

import numpy as np
import pytest

from mlx_engine import memory
from mlx_engine.eviction import Holding
from mlx_engine.live import Live, holdings
from mlx_engine.progress import Prefilled
from mlx_engine.session import Session
from tests.engine.counted import CHUNK_TOKENS, IDS, OTHER, ROOMY, Made, subject
from tests.engine.timelines import MemoryCache, Stopped, followed, greedy, seen, stop_after
from tests.unit.arrays import host


def test_conversations_by_turns_keep_what_they_have() -> None:
    made = Made()
    prompts = [IDS[:60], OTHER[:80]]
    assert [made.answer(prompt, 0)[1] for prompt in prompts] == [60, 80]
    for turn in range(3):
        for i, n_new in enumerate((9, 14)):
            tokens, computed = made.answer(prompts[i], 5)
            assert computed <= (2 if turn == 0 else n_new + 1)
            prompts[i] = [*prompts[i], *tokens, *OTHER[:n_new]]
    stats = made.sessions.stats()
    assert (stats.sessions, stats.fresh, stats.forked, stats.restored) == (2, 2, 0, 0)


def test_a_longer_session_is_forked_and_not_rewound() -> None:
    made = Made()
    main, _, _ = made.sync(IDS[:200], 41)
    side, logits, computed = made.sync([*IDS[:40], *OTHER[:30]], 41)
    assert side is not main and computed == 30
    assert main.position == 200
    cold = Session(subject().model, subject().reader, chunk_tokens=CHUNK_TOKENS)
    expected = cold.sync([*IDS[:40], *OTHER[:30]], [41])
    np.testing.assert_array_equal(host(logits), host(expected))
    assert seen(side.state) == seen(cold.state)
    assert made.sync(IDS[:230], 41)[2] == 30
    assert made.sync([*IDS[:40], *OTHER[:50]], 41)[2] == 20
    stats = made.sessions.stats()
    assert (stats.forked, stats.continued, stats.sessions) == (1, 2, 2)
    assert (stats.cached_tokens, stats.computed_tokens) == (40 + 200 + 70, 200 + 30 + 30 + 20)


def test_an_answer_that_comes_back_changed_is_gone_over() -> None:
    made = Made()
    made.answer(IDS[:121], 30)
    assert made.answer([*IDS[:121], *OTHER[:10]], 30)[1] == 11
    assert made.answer(IDS[:121], 1)[1] == 1
    assert made.sessions.stats().sessions == 1


def test_side_requests_leave_a_long_session_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "SHORT_TOKENS", 32)
    config = subject().config
    short_bytes = memory.short_session_bytes(config, 512)
    budget = memory.least_session_bytes(config, 400)
    made = Made(budget_bytes=budget, short_bytes=short_bytes)
    main, _, _ = made.sync(IDS[:300], 41)
    for i in range(6):
        made.answer([5 + i, *OTHER[:19]], 3)
        assert made.sessions.n_bytes <= budget
        assert main in made.sessions
    assert made.sync(IDS[:350], 41)[2] == 50
    assert made.sessions.n_bytes <= budget
    assert made.sessions.stats().evicted == 6


def test_the_least_useful_goes_first() -> None:
    sizes = (40, 300, 60, 250)

    def kept(budget_bytes: int) -> list[int]:
        """Which of the sessions of these sizes are there after another one."""
        made = Made(budget_bytes=budget_bytes)
        sessions = [made.sync([5 + i, *IDS[: n - 1]])[0] for i, n in enumerate(sizes)]
        made.sync([100, *OTHER[:200]])
        assert made.sessions.n_bytes <= budget_bytes
        return [n for session, n in zip(sessions, sizes, strict=True) if session in made.sessions]

    one_bytes = Made().sync(IDS[:20])[0].state_bytes
    assert kept(ROOMY) == [40, 300, 60, 250]
    assert kept(6 * one_bytes) == [300, 60, 250]
    assert kept(5 * one_bytes) == [300, 250]
    # The longer one's buffers have doubled, and it was used before the other.
    assert kept(7 * one_bytes // 2) == [250]


def test_checkpoints_go_before_what_is_worth_more() -> None:
    made = Made()
    prompt = IDS[:40]
    for _ in range(12):
        tokens, _ = made.answer(prompt, 3)
        prompt = [*prompt, *tokens, *OTHER[:2]]
    (session,) = (made.sync(prompt)[0],)
    before = [each.position for each in session.checkpoints]
    assert len(before) > 10
    tight = Made(budget_bytes=made.sessions.n_bytes - 4 * session.checkpoints[0].n_bytes)
    prompt = IDS[:40]
    for _ in range(12):
        tokens, _ = tight.answer(prompt, 3)
        prompt = [*prompt, *tokens, *OTHER[:2]]
    (session,) = (tight.sync(prompt)[0],)
    after = [each.position for each in session.checkpoints]
    stats = tight.sessions.stats()
    assert stats.dropped_checkpoints and not stats.evicted
    assert set(after) < set(before)
    assert after[0] == before[0] and after[-2:] == before[-2:]


def test_a_restored_session_goes_on_as_the_live_one_does() -> None:
    cache = MemoryCache()
    made = Made(cache)
    tokens, _ = made.answer(IDS[:101], 8, 41)
    prompt = [*IDS[:101], *tokens, *OTHER[:30]]
    later = Made(cache)
    session, logits, computed = later.sync(prompt)
    # The last token of the answer was sampled, not read; the anchor is the even position before.
    assert computed == 30 + 1
    assert later.sessions.stats().restored == 1
    live, expected, _ = made.sync(prompt)
    np.testing.assert_allclose(host(logits), host(expected), atol=1e-3)
    assert live.position == session.position
    # From the same position the bytes and the tokens are the same.
    again = Made(cache)
    ours, theirs = (each.sync(IDS[:101]) for each in (made, again))
    assert (ours[2], theirs[2]) == (1, 1)
    assert seen(theirs[0].state) == seen(ours[0].state)
    found = [greedy(each[0], each[1], 6) for each in (ours, theirs)]
    assert found[0][0] == found[1][0] and found[0][0] == tokens[:6]
    np.testing.assert_array_equal(found[0][1], found[1][1])
    assert cache.protected[0] == 101


def test_a_longer_match_in_memory_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = MemoryCache()
    made = Made(cache)
    made.answer(IDS[:101], 4)
    monkeypatch.setattr(cache, "restore", None)
    assert made.is_known(IDS[:101])
    assert made.sync([*IDS[:100], *OTHER[:9]])[2] == 9


def test_what_the_cache_has_damaged_is_computed(caplog: pytest.LogCaptureFixture) -> None:
    cache = MemoryCache()
    Made(cache).answer(IDS[:101], 4, 41)
    anchors = [len(key) // 4 for key in cache.tails]
    assert anchors == [40, 100, 104]
    for key, tail in cache.tails.items():
        cache.tails[key] = tail if len(key) == 160 else tail[:-1]
    # What can be used is behind two that cannot, which no later prompt meets again.
    made = Made(cache)
    assert made.sync([*IDS[:101], *IDS[:20]])[2] == 121 - 40
    assert "cannot be used" in caplog.text
    assert cache.rejected == [100] and 40 in [len(key) // 4 for key in cache.tails]
    for key, tail in cache.tails.items():
        cache.tails[key] = tail[:-1]
    assert Made(cache).sync(IDS[:101])[2] == 101
    assert cache.lookup(np.array(IDS[:101], np.uint32)) == 0
    cache.restore = lambda token_ids, position, into: None
    assert Made(cache).sync(IDS[:101])[2] == 101


def test_what_makes_room_goes_to_the_cache() -> None:
    cache = MemoryCache()
    model = subject()
    budget = memory.least_session_bytes(model.config, 120)
    made = Made(cache, budget_bytes=budget)
    session, _, _ = made.sync(IDS[:121])
    for token_id in (7, 8, 9):
        made.sessions.step(session, token_id)
    for i in range(4):
        made.sync([5 + i, *OTHER[:120]])
        assert made.sessions.n_bytes <= budget
    assert session not in made.sessions and made.sessions.stats().evicted
    # Its last even position, which no prompt and no end of a turn had.
    assert made.sync([*IDS[:121], 7, 8, 9, 10])[2] == 1


def test_a_step_hands_over_one_piece_and_who_is_idle_the_rest() -> None:
    cache = MemoryCache()
    made = Made(cache)
    session, _, _ = made.sync(IDS[:101], 41)
    # The anchor at 40 went while the prompt was read, that at its end waits.
    at_start = cache.calls
    assert [len(key) // 4 for key in cache.tails] == [40] and at_start == 4
    for n in range(1, 4):
        made.sessions.step(session, 5)
        assert cache.calls == at_start + n
    before = cache.calls
    made.sessions.end_turn(session)
    assert cache.calls == before
    while made.sessions.save_piece():
        before += 1
        assert cache.calls == before
    assert [len(key) // 4 for key in cache.tails] == [40, 100, 104]
    assert made.sessions.stats().saved_anchors == 3


def test_a_save_that_fails_is_given_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache = MemoryCache()
    made = Made(cache)
    session, _, _ = made.sync(IDS[:101], 41)

    def no_device(*_: object) -> None:
        raise RuntimeError("the device is gone")

    with monkeypatch.context() as patch:
        patch.setattr("mlx_engine.saving.export_rows", no_device)
        assert made.sessions.save_piece()
    assert caplog.messages == ["what was computed is not saved: the device is gone"]
    for token_id in (7, 8):
        made.sessions.step(session, token_id)
    made.sessions.end_turn(session)
    made.save()
    assert [len(key) // 4 for key in cache.tails] == [40, 102]


def test_a_prompt_that_goes_elsewhere_does_not_cost_an_anchor() -> None:
    cache = MemoryCache()
    made = Made(cache)
    expected = seen(made.sync(IDS[:101], 81)[0].state)
    # Its rows from 92 on are written over.
    made.sync([*IDS[:92], *OTHER[:60]], 81)
    assert made.sessions.stats().rewound == 1
    session, _, computed = Made(cache).sync(IDS[:101])
    assert computed == 1
    assert seen(session.state) == expected


def test_a_short_gap_is_not_worth_an_anchor() -> None:
    cache = MemoryCache()
    made = Made(cache, least_save_tokens=20)
    tokens, _ = made.answer(IDS[:100], 5)
    made.answer([*IDS[:100], *tokens, *OTHER[:20]], 5)
    assert [len(key) // 4 for key in cache.tails] == [98, 124]


def test_closing_saves_what_is_only_in_memory() -> None:
    cache = MemoryCache()
    made = Made(cache)
    session, _, _ = made.sync(IDS[:100])
    for token_id in (5, 6):
        made.sessions.step(session, token_id)
    made.sessions.close()
    assert [len(key) // 4 for key in cache.tails] == [98, 102]
    assert made.sessions.stats().sessions == 0


def test_a_cancelled_prompt_goes_on_even_after_another() -> None:
    made = Made(MemoryCache())
    with pytest.raises(Stopped):
        followed(made.sessions.read(IDS[:150], [41]), stop_after(6))
    done = made.model.tokens
    assert 41 < done < 150
    made.answer(OTHER[:50], 2)
    assert made.sync(IDS[:150], 41)[2] == 150 - done


def test_where_a_prompt_parts_from_the_nearest_session_is_told() -> None:
    made = Made()

    def parted_at(ids: list[int]) -> int | None:
        first = next(made.sessions.read(ids, [41]))
        assert isinstance(first, Prefilled)
        return first.parted_at

    made.sync(IDS[:100], 41)
    assert parted_at(IDS[:120]) is None
    assert parted_at([*IDS[:77], *OTHER[:50]]) == 77
    assert parted_at(IDS[:50]) is None


def test_the_speed_of_prefills_is_measured() -> None:
    made = Made()
    assert made.sessions.stats().prefill_tokens_per_s > 0
    made.sync(IDS[:300])
    # Each chunk takes a second of this clock.
    speed = 300 / len(made.model.encoded)
    assert made.sessions.stats().prefill_tokens_per_s == speed
    made.sync(OTHER[:50])
    assert made.sessions.stats().prefill_tokens_per_s == speed


def test_numbers_about_a_prompt_under_way_are_of_one_moment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = Made()
    reading = made.sessions.read(IDS[:300], [41])
    for _ in range(6):
        next(reading)
        stats = made.sessions.stats()
        assert stats.state_bytes + stats.checkpoint_bytes == made.sessions.n_bytes
    session = made.sessions.sync(OTHER[:50])[0]
    checkpoint_bytes = made.sessions.stats().checkpoint_bytes
    assert checkpoint_bytes == 2 * session.checkpoint_bytes

    def interrupted(lives: Iterable[Live]) -> list[Holding]:
        """What another thread finds that is overtaken by the engine's."""
        found = holdings(lives)
        made.sessions.reset()
        return found

    monkeypatch.setattr("mlx_engine.room.holdings", interrupted)
    stats = made.sessions.stats()
    assert (stats.sessions, stats.checkpoint_bytes, stats.leaving_bytes) == (2, checkpoint_bytes, 0)
