"""The bench's compiled decode step is the session's."""

from collections.abc import Generator

import mlx.core as mx
import numpy as np
import pytest

from mlx_engine.session import Session
from tests.cuda.step import CompiledDecoder
from tests.engine.support import load, tiny_config

STEPS = 7


@pytest.fixture(params=["as it is", pytest.param("compiled", marks=pytest.mark.slow)])
def _compiling(request: pytest.FixtureRequest) -> Generator[None]:  # pyright: ignore[reportUnusedFunction]
    """On the CPU MLX compiles with the C++ compiler, which takes minutes."""
    if request.param == "as it is":
        mx.disable_compile()
    yield
    mx.enable_compile()


@pytest.mark.usefixtures("_compiling")
def test_steps_are_those_of_a_session() -> None:
    subject = load(tiny_config(), 0)
    config = subject.model.config
    ids = np.random.default_rng(1).integers(3, 90, 3 * config.sliding_window + STEPS).tolist()
    prompt, following = ids[:-STEPS], ids[-STEPS:]
    session = Session(subject.model, subject.reader, prefill="full")
    session.sync(prompt)
    decoder = CompiledDecoder(subject.model, session.state)
    before = [a.tolist() for a in session.state.arrays()]
    layers = config.engram.layer_ids if config.engram else ()
    found: list[mx.array] = []
    for n, token in enumerate(following):
        assert subject.reader is not None
        rows = subject.reader.prefetch(np.array([token]), np.array(ids[: len(prompt) + n]))
        found.append(decoder.step(mx.array([token]), [rows.result(layer) for layer in layers]))
    assert [a.tolist() for a in session.state.arrays()] == before
    for token, logits in zip(following, found, strict=True):
        assert np.allclose(logits, session.step(token), rtol=1e-4, atol=1e-4)
    assert decoder.graphs == 2
