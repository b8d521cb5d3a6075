"""A session that goes back: to checkpoints, after a failure, to where a prefill was broken off."""

from itertools import pairwise
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_engine.session import Prefill, Session, stops
from mlx_engine.state import GrowingRows, SessionState
from tests.engine.quiet import quiet_tokens
from tests.engine.support import Subject, build, tiny_config
from tests.engine.timelines import CountingModel, Stopped, followed, greedy, seen, stop_after
from tests.unit.arrays import host

# On these tokens no choice is close: another chunking gives the same ones.
QUIET = quiet_tokens("tiny")
CHUNK_TOKENS = 16
IDS = np.random.default_rng(1).integers(3, 250, 150).tolist()
# 127 positions back and more the release's window wraps; the tiny one's is 8.
WRAPS = [(8, n) for n in (1, 6, 7, 8, 9, 10, 16, 17)] + [(128, n) for n in (126, 127, 128, 129)]


def subject(window: int = 8) -> Subject:
    return build(tiny_config(sliding_window=window), 0)


def session(window: int = 8, prefill: Prefill = "short") -> tuple[Session, CountingModel]:
    model = CountingModel(subject(window))
    reader = subject(window).reader
    return Session(model, reader, prefill=prefill, chunk_tokens=CHUNK_TOKENS), model


@pytest.mark.parametrize(("window", "n"), WRAPS)
def test_a_state_returns_to_what_it_was(window: int, n: int) -> None:
    own, _ = session(window)
    logits = own.sync(IDS[:n])
    before, checkpoint = seen(own.state), own.state.checkpoint()
    tokens, expected = greedy(own, logits, 11)
    model, reader = subject(window).model, subject(window)
    own.state.rewind(checkpoint)
    assert seen(own.state) == before
    ids = [*IDS[:n], *tokens]
    for i in range(n, n + 11):
        again = model.forward(ids[i : i + 1], own.state, reader.engram_rows(ids, i, i + 1))
        np.testing.assert_array_equal(host(again)[0], expected[i - n])
    # A chunk leaves more behind than steps do.
    own.state.rewind(checkpoint)
    mx.eval(model.forward(IDS[:30], own.state, reader.engram_rows(IDS, 0, 30)))
    own.state.rewind(checkpoint)
    assert seen(own.state) == before


@pytest.mark.parametrize(("window", "n"), WRAPS)
def test_from_an_odd_position_a_token_back_is_exact(window: int, n: int) -> None:
    own, _ = session(window)
    odd = n + 1 - n % 2
    own.sync(IDS[:odd])
    for token_id in (5, 9):
        mx.eval(own.step(token_id))
    own.step(7)
    even = seen(own.state)
    assert own.state.checkpoint().even().position == own.position
    logits = own.step(11)
    checkpoint = own.state.checkpoint().even()
    assert checkpoint.position == own.position - 1
    own.state.rewind(checkpoint)
    assert seen(own.state) == even
    again = subject(window).model.forward(
        [11], own.state, subject(window).engram_rows([*IDS[:odd], 5, 9, 7, 11], odd + 3, odd + 4)
    )
    np.testing.assert_array_equal(host(again)[0], host(logits))


@pytest.mark.parametrize(("window", "n"), WRAPS)
def test_a_fork_is_the_same_and_apart(window: int, n: int) -> None:
    own, _ = session(window)
    own.sync(IDS[: n + 3], [n])
    checkpoint = own.checkpoint_at(n + 2)
    assert checkpoint is not None and checkpoint.position == (n + 2) // 2 * 2
    before = seen(own.state)
    other = own.fork(checkpoint)
    own.rewind(checkpoint.position)
    assert seen(other.state) == seen(own.state)
    theirs, ours = (greedy(each, each.sync(IDS[: n + 3]), 5) for each in (other, own))
    assert theirs[0] == ours[0]
    np.testing.assert_array_equal(theirs[1], ours[1])
    assert own.position == n + 8 and before["position"] == n + 3


@given(
    known=st.integers(0, 300),
    new=st.integers(1, 300),
    anchors=st.lists(st.integers(0, 600), max_size=8),
    last=st.integers(0, 150),
    spacing=st.integers(1, 120),
)
def test_where_a_prefill_pauses(
    known: int, new: int, anchors: list[int], last: int, spacing: int
) -> None:
    total, last = known + new, min(last, known // 2) * 2
    found = stops(known, total, anchors, last, spacing)
    end = (total - 1) // 2 * 2
    assert all(position % 2 == 0 and known < position <= end for position in found)
    assert (end in found) == (end > known)
    system = min(anchors, default=0) // 2 * 2
    assert (system in found) == (known < system <= end)
    gaps = list(pairwise([last, *found]))
    assert all(b - a >= spacing for a, b in gaps if b not in (system, end))
    # No gap is twice as long as it must be: an edit in a long message costs no more than that.
    even_spacing = -(-spacing // 2) * 2
    assert all(b - max(a, known) < 2 * even_spacing for a, b in gaps)
    wanted = {anchor // 2 * 2 for anchor in anchors}
    for a, b in gaps:
        if b not in wanted and b != end:
            later = [each for each in found if each > b and (each in wanted or each == end)]
            assert b - a >= even_spacing and later[0] - b >= spacing
    # A prefill that goes on from any place between pauses where this one would have.
    for at in range(known + 1, total):
        before = max([last, *(position for position in found if position <= at)])
        assert stops(at, total, anchors, before, spacing) == [p for p in found if p > at]


def test_what_a_prompt_has_in_common_is_not_computed_again() -> None:
    own, model = session()
    first = [*own.read(IDS[:100], [31])]
    assert [each.position for each in own.checkpoints] == [30, 98]
    assert (first[0], first[-1]) == (0, 100)
    for token_id in (1, 2, 3):
        own.step(token_id)
    own.keep_checkpoint()
    for prompt, kept in (
        ([*IDS[:100], 1, 2, 3, 9, 9, 9], 103),  # what it is continues
        ([*IDS[:100], 1, 2, 9], 102),  # a token fewer, which the checkpoint at the end allows for
        ([*IDS[:100], 1, 9], 98),  # the answer was another
        (IDS[:100], 98),  # an exact retry
        (IDS[:100], 100),  # and nothing since
        ([*IDS[:60], *IDS[:20]], 30),
        (IDS[:100], 30),
        (IDS[:30], 0),
    ):
        model.encoded.clear()
        assert list(own.read(prompt, [31])).index(kept) == 0
        assert [first for first, _ in model.encoded[:1]] == ([kept] if kept < len(prompt) else [])
        assert model.tokens == len(prompt) - kept


@pytest.mark.parametrize("n", range(1, 12))
def test_an_exact_retry_takes_two_tokens_at_most_and_is_exact(n: int) -> None:
    own, model = session()
    expected = host(own.sync(IDS[:n]))
    greedy(own, own.step(5), 4)
    own.keep_checkpoint()
    model.encoded.clear()
    np.testing.assert_array_equal(host(own.sync(IDS[:n])), expected)
    assert model.tokens <= 2
    # And when the prompt had been there but for a token.
    own.reset()
    own.sync(IDS[: n + 20])
    own.step(7)
    own.sync([*IDS[: n + 20], 7, 8])
    model.encoded.clear()
    own.step(3)
    own.sync([*IDS[: n + 20], 7, 8])
    assert model.tokens <= 3


def test_a_rewound_session_agrees_with_another_chunking() -> None:
    trace = subject().trace(QUIET)
    own, _ = session()
    n = len(QUIET)
    own.sync([*QUIET[:31], *IDS[:25]], [20])
    own.sync([*QUIET[:27], *IDS[:9]])
    own.sync(QUIET[: n - 6])
    for i in range(n - 6, n):
        logits = own.step(QUIET[i])
        np.testing.assert_allclose(host(logits), trace.logits[i], atol=1e-3)


@pytest.mark.parametrize("prefill", ["short", "full"])
def test_a_cancelled_prefill_goes_on_where_it_stopped(prefill: Prefill) -> None:
    undisturbed, _ = session(prefill=prefill)
    ends: list[int] = []
    expected = followed(undisturbed.read(IDS, [41]), ends.append)
    tokens, logits = greedy(undisturbed, expected, 3)
    assert len(ends) > 10
    for chunks in range(1, len(ends)):
        own, model = session(prefill=prefill)
        with pytest.raises(Stopped):
            followed(own.read(IDS, [41]), stop_after(chunks))
        assert own.position == ends[chunks] == model.tokens
        again = own.sync(IDS, [41])
        assert model.tokens == len(IDS)
        np.testing.assert_array_equal(host(again), host(expected))
        assert [each.position for each in own.checkpoints] == [40, 148]
        assert greedy(own, again, 3)[0] == tokens
        assert seen(own.state) == seen(undisturbed.state)
    assert logits


def test_what_waits_for_a_retry_is_as_much_as_the_upper_layers_need() -> None:
    reach = subject().config.reach_tokens(subject().config.last_kv_source)
    assert CHUNK_TOKENS < reach < 40
    per_token = 0
    for chunks, waiting in enumerate([16, reach, 0, 16, reach, reach], start=1):
        own, _ = session()
        with pytest.raises(Stopped):
            followed(own.read(IDS, [41]), stop_after(chunks))
        n_bytes = own.state_bytes - own.state.n_bytes
        per_token = per_token or n_bytes // waiting
        assert n_bytes == per_token * waiting > 0 or waiting == n_bytes == 0


def test_a_cancelled_prefill_serves_other_prompts() -> None:
    for chunks in range(1, 10):
        own, model = session()
        with pytest.raises(Stopped):
            followed(own.read(IDS, [41]), stop_after(chunks))
        done = own.position
        # What it has of a shorter prompt, even to the token, and of one that parts from it.
        cold, _ = session()
        cut = host(own.sync(IDS[:done]))
        assert model.tokens <= done + 2
        np.testing.assert_allclose(cut, host(cold.sync(IDS[:done])), atol=1e-3)
        own, model = session()
        with pytest.raises(Stopped):
            followed(own.read(IDS, [41]), stop_after(chunks))
        other = [*IDS[: done - 1], 7, 8, 9]
        logits = host(own.sync(other))
        assert model.tokens == done + len(other) - (40 if done > 40 else 0)
        cold, _ = session()
        np.testing.assert_allclose(logits, host(cold.sync(other, [41])), atol=1e-3)


@pytest.mark.parametrize("layers", [0, 3, 5, 8, 11, 17, 18, 26, 29])
def test_a_chunk_that_fails_leaves_what_was_before_it(layers: int) -> None:
    undisturbed, _ = session()
    expected = undisturbed.sync(IDS[:61], [33])
    own, model = session()
    ends: list[int] = []
    model.layers_left = layers
    with pytest.raises(RuntimeError, match="gone"):
        followed(own.read(IDS[:61], [33]), ends.append)
    model.layers_left = None
    assert own.position == ends[-1]
    kept = model.tokens
    assert kept >= own.position
    model.encoded.clear()
    logits = own.sync(IDS[:61], [33])
    assert model.tokens == 61 - ends[-1]
    np.testing.assert_array_equal(host(logits), host(expected))
    assert seen(own.state) == seen(undisturbed.state)


@pytest.mark.parametrize("layers", range(8))
def test_a_step_that_fails_goes_back_to_a_checkpoint(layers: int) -> None:
    own, model = session()
    logits = own.sync(IDS[:61], [33])
    at_checkpoint: dict[str, Any] = {}
    tokens, expected = greedy(own, logits, 4)
    model.layers_left = layers
    with pytest.raises(RuntimeError, match="gone"):
        own.step(3)
    model.layers_left = None
    assert own.position == 60
    at_checkpoint = seen(own.state)
    again = own.sync(IDS[:61])
    found = greedy(own, again, 4)
    assert found[0] == tokens
    np.testing.assert_array_equal(found[1], expected)
    own.rewind(60)
    assert seen(own.state) == at_checkpoint


def test_an_edit_near_the_end_of_a_long_message_costs_little(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mlx_engine.session.SPACING_TOKENS", 32)
    own, model = session()
    own.sync(IDS, [21])
    assert [each.position for each in own.checkpoints] == [20, 52, 84, 116, 148]
    edited = [*IDS[:140], 7, *IDS[141:]]
    model.encoded.clear()
    logits = own.sync(edited, [21])
    assert model.tokens == len(IDS) - 116
    cold, _ = session()
    np.testing.assert_array_equal(host(logits), host(cold.sync(edited, [21])))


class Short:
    """An operation that fails at one of its calls for want of memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str, passes: int) -> None:
        own = getattr(GrowingRows, name)
        self.left: int | None = passes

        def call(rows: GrowingRows, length: int) -> Any:
            if self.left == 0:
                raise self.error("no memory")
            self.left = None if self.left is None else self.left - 1
            return own(rows, length)

        self.error: type[BaseException] = RuntimeError
        monkeypatch.setattr(GrowingRows, name, call)


@pytest.mark.parametrize("kind", [RuntimeError, MemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("passes", [0, 2, 5])
def test_a_return_that_finds_no_memory_leaves_no_half(
    monkeypatch: pytest.MonkeyPatch, passes: int, kind: type[BaseException]
) -> None:
    own, _ = session()
    own.sync(IDS[:120], [40])
    new = [*IDS[:60], *IDS[100:130]]
    short = Short(monkeypatch, "truncate", passes)
    short.error = kind
    told: list[int] = []
    try:
        followed(own.read(new, [40]), told.append)
        assert kind is not KeyboardInterrupt and told[0] == 0
    except KeyboardInterrupt:
        assert kind is KeyboardInterrupt and own.position == 0
    assert short.left == 0
    assert own.state.position == own.position
    short.left = None
    cold, _ = session()
    expected = host(cold.sync(new, [40]))
    np.testing.assert_array_equal(host(own.sync(new, [40])), expected)
    assert seen(own.state) == seen(cold.state)


def no_state(*_: object) -> SessionState:
    raise MemoryError


def test_a_reset_that_finds_no_memory_is_made_up_for(monkeypatch: pytest.MonkeyPatch) -> None:
    own, _ = session()
    own.sync(IDS[:120], [40])
    short = Short(monkeypatch, "truncate", 2)
    new = [*IDS[:60], *IDS[100:130]]
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr("mlx_engine.session.SessionState", no_state)
        own.sync(new, [40])
    short.left = None
    cold, _ = session()
    np.testing.assert_array_equal(host(own.sync(new, [40])), host(cold.sync(new, [40])))


@pytest.mark.parametrize("passes", [0, 2, 5])
def test_a_fork_that_finds_no_memory_costs_the_session_nothing(
    monkeypatch: pytest.MonkeyPatch, passes: int
) -> None:
    own, _ = session()
    own.sync(IDS[:120], [40])
    before = seen(own.state)
    checkpoint = own.checkpoint_at(40)
    assert checkpoint is not None
    short = Short(monkeypatch, "copy", passes)
    with pytest.raises(RuntimeError, match="no memory"):
        own.fork(checkpoint)
    assert seen(own.state) == before and own.state.position == own.position == 120
    short.left = None
    assert own.fork(checkpoint).position == 40


@settings(deadline=None, max_examples=25)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=30, unique=True))
def test_which_checkpoint_goes_first(halves: list[int]) -> None:
    own, _ = session()
    own.sync(IDS[:5])
    own.checkpoints.clear()
    for half in sorted(halves):
        own.state.position = 2 * half
        own.keep_checkpoint()
    positions = [each.position for each in own.checkpoints]
    assert positions == sorted(2 * half for half in halves)
    for checkpoint, tokens in own.expendable():
        index = positions.index(checkpoint.position)
        assert 0 < index < len(positions) - 2
        assert tokens == positions[index] - positions[index - 1]
        own.drop_checkpoint(checkpoint)
        del positions[index]
        assert [each.position for each in own.checkpoints] == positions
    assert len(positions) <= 3
