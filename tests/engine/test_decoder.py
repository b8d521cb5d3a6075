"""Steps of the decoder are those of the model, at every place where its graphs change."""

import threading
from collections.abc import Generator

import mlx.core as mx
import numpy as np
import pytest

from mlx_engine import decoder
from mlx_engine.decoder import Decoder
from mlx_engine.session import Session
from tests.engine.support import load, tiny_config

STEPS = 11


@pytest.fixture(params=["as it is", pytest.param("compiled", marks=pytest.mark.slow)])
def _compiling(request: pytest.FixtureRequest) -> Generator[None]:  # pyright: ignore[reportUnusedFunction]
    """On the CPU MLX compiles with the C++ compiler, which takes minutes."""
    if request.param == "as it is":
        mx.disable_compile()
    yield
    mx.enable_compile()


@pytest.fixture
def _as_it_is() -> Generator[None]:  # pyright: ignore[reportUnusedFunction]
    mx.disable_compile()
    yield
    mx.enable_compile()


@pytest.mark.usefixtures("_compiling")
def test_steps_are_those_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    # Small enough that a view grows within these steps, and so does a buffer.
    monkeypatch.setattr(decoder, "VIEW_ROWS", 16)
    monkeypatch.setattr("mlx_engine.state.FIRST_ROWS", 1)
    monkeypatch.setattr("mlx_engine.state.SPARE_ROWS", 1)
    subject = load(tiny_config(), 0)
    model, window = subject.model, subject.model.config.sliding_window
    ids = np.random.default_rng(1).integers(3, 90, window // 2 + 4 * STEPS).tolist()
    prompt = ids[: window // 2]
    compiled = Decoder(model, is_on=True)
    sessions = [
        Session(model, subject.reader, prefill="full", decoder=each)
        for each in (compiled, Decoder(model, is_on=False))
    ]
    for session in sessions:
        session.sync(prompt)

    def step(token: int, *, is_begun: bool = False) -> None:
        ours, plain = sessions
        if is_begun:
            ours.begin_step(mx.array(token, mx.uint32))
        found, right = (session.step(token) for session in (ours, plain))
        assert np.allclose(found, right, rtol=1e-4, atol=1e-4)
        assert ours.position == plain.position == ours.state.position
        for at, theirs in zip(ours.state.windows, plain.state.windows, strict=True):
            assert (at.end, at.count) == (theirs.end, theirs.count)

    # From windows that are not full over their end and around; odd positions and even ones.
    for n, token in enumerate(ids[len(prompt) : window + 2 * STEPS]):
        step(token, is_begun=n % 3 == 0)
    assert compiled.traced > 3
    for session in sessions:
        session.keep_checkpoint()
    place = sessions[0].checkpoints[-1].position
    traced = compiled.traced
    # A step that was begun for another token, and one that never came.
    for token in (7, 8, 9):
        sessions[0].begin_step(mx.array(token + 1, mx.uint32))
        step(token)
    sessions[0].begin_step(mx.array(5, mx.uint32))
    for session in sessions:
        session.rewind(place)
    assert sessions[0].position == place
    for token in (5, 11, 12, 13):
        step(token)
    assert compiled.traced <= traced + 4
    # A step that was begun before the timeline took another way to the same place.
    sessions[0].begin_step(mx.array(6, mx.uint32))
    for session in sessions:
        session.sync(
            [*session.token_ids[: window // 2].tolist(), *[4] * (session.position - window // 2)]
        )
    step(6)
    # Two timelines share the graphs, not their rows.
    fork = sessions[0].fork(sessions[0].checkpoints[-1])
    before = [a.tolist() for a in sessions[0].state.arrays()]
    fork.step(3)
    assert [a.tolist() for a in sessions[0].state.arrays()] == before
    step(14)


@pytest.mark.usefixtures("_as_it_is")
def test_a_step_goes_on_from_what_was_begun_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = load(tiny_config(), 0)
    model, entered = subject.model, list[mx.array]()
    session = Session(model, subject.reader, decoder=Decoder(model, is_on=True))
    session.sync(list(range(3, 3 + 2 * model.config.sliding_window)))
    embedded = model.embedded

    def noting(ids: mx.array) -> tuple[mx.array, mx.array]:
        entered.append(ids)
        return embedded(ids)

    monkeypatch.setattr(model, "embedded", noting)
    session.begin_step(mx.array(7, mx.uint32))
    session.step(7)
    assert len(entered) == 1
    session.begin_step(mx.array(8, mx.uint32))
    session.step(9)
    assert [ids[0, 0].item() for ids in entered] == [7, 8, 9]
    # Each session goes on from its own.
    fork = session.fork(session.checkpoints[-1])
    for each in (session, fork):
        each.begin_step(mx.array(6, mx.uint32))
    for each in (session, fork):
        each.step(6)
    assert [ids[0, 0].item() for ids in entered[3:]] == [6, 6]


@pytest.mark.usefixtures("_as_it_is")
def test_more_steps_are_begun_than_rows_have_slots() -> None:
    subject = load(tiny_config(), 0)
    model, window = subject.model, subject.model.config.sliding_window
    compiled = Decoder(model, is_on=True)
    first = Session(model, subject.reader, prefill="full", decoder=compiled)
    plain = Session(model, subject.reader, prefill="full")
    for session in (first, plain):
        session.sync(list(range(3, 3 + 2 * window)))
    # Both graphs of the form are known from here on, so that a begun step is made but for rows.
    for token in (5, 6):
        first.begin_step(mx.array(token, mx.uint32))
        first.step(token)
        plain.step(token)
    for session in (first, plain):
        session.keep_checkpoint()
    forks, plain_forks = (
        [session.fork(session.checkpoints[-1]) for _ in range(11)] for session in (first, plain)
    )
    for token, fork in enumerate(forks, 7):
        fork.begin_step(mx.array(token, mx.uint32))
    for token, (fork, right) in enumerate(zip(forks, plain_forks, strict=True), 7):
        assert np.allclose(fork.step(token), right.step(token), rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("_as_it_is")
def test_a_step_that_fails_leaves_the_others_room_for_their_rows() -> None:
    subject = load(tiny_config(), 0)
    model = subject.model
    ours, plain = (
        Session(model, subject.reader, prefill="full", decoder=Decoder(model, is_on=is_on))
        for is_on in (True, False)
    )
    for session in (ours, plain):
        session.sync(list(range(3, 3 + 2 * model.config.sliding_window)))
    lost: list[mx.array] = []
    window = ours.state.windows[-1]
    # Only the thread that made a node can compute it, and this one has ended.
    thread = threading.Thread(target=lambda: lost.append(mx.add(window.rows, 0)))
    thread.start()
    thread.join()
    window.rows = lost[0]
    with pytest.raises(RuntimeError, match="thread"):
        ours.step(5)
    plain.rewind(ours.position)
    assert ours.position == plain.position > 0
    # More steps than rows have slots.
    for token in range(5, 16):
        assert np.allclose(ours.step(token), plain.step(token), rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("_as_it_is")
def test_rows_stay_where_they_are_whatever_was_begun() -> None:
    subject = load(tiny_config(), 0)
    model = subject.model
    session = Session(model, subject.reader, decoder=Decoder(model, is_on=True))
    session.sync(list(range(3, 3 + 2 * model.config.sliding_window)))

    def places() -> list[int]:
        rows = [each.buffer for each in session.state.compressed.values()]
        mx.eval(rows)
        return [np.array(each, copy=False).ctypes.data for each in rows]

    for token in (5, 6, 7):
        session.begin_step(mx.array(token, mx.uint32))
        session.step(token)
    before = places()
    for token, other in ((8, 8), (9, 10)):
        session.begin_step(mx.array(token, mx.uint32))
        session.step(other)
        assert places() == before
    session.begin_step(mx.array(11, mx.uint32))
    thread = threading.Thread(target=lambda: session.step(11))
    thread.start()
    thread.join()
    assert places() == before


def test_a_plain_session_never_uses_it() -> None:
    subject = load(tiny_config(), 0)
    session = Session(subject.model, subject.reader)
    session.sync(list(range(3, 3 + subject.model.config.sliding_window)))
    unused = Decoder(subject.model)
    assert not unused.is_on
    assert not unused.fits(session.state)


def test_only_a_full_window_fits() -> None:
    subject = load(tiny_config(), 0)
    one = Decoder(subject.model, is_on=True)
    session = Session(subject.model, subject.reader, decoder=Decoder(subject.model, is_on=False))
    window = subject.model.config.sliding_window
    session.sync(list(range(3, 3 + window // 2)))
    assert not one.fits(session.state)
    session.sync(list(range(3, 3 + window)))
    assert one.fits(session.state)
