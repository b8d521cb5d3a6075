"""What only an NVIDIA GPU can show: every family's kernels agree with its reference there."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_engine.cuda.kernels import CudaKernels
from mlx_engine.model import Model
from mlx_engine.ops import launch
from mlx_engine.session import Session
from tests.cuda.step import CompiledDecoder
from tests.engine.support import build, tiny_config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not mx.cuda.is_available() or mx.default_device() != mx.gpu, reason="needs an NVIDIA GPU"
    ),
]


def test_every_family_agrees_with_its_reference() -> None:
    with launch.using(None):
        assert launch.start(CudaKernels()).off == ()


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float32])
def test_a_model_with_kernels_is_the_model_without(dtype: mx.Dtype) -> None:
    subject = build(tiny_config(), 0)
    model = Model(subject.config, subject.model.weights, dtype)
    ids = np.random.default_rng(1).integers(3, 90, 3 * subject.config.sliding_window).tolist()
    logits: list[mx.array] = []
    for factory in (None, CudaKernels()):
        with launch.using(factory):
            session = Session(model, subject.reader, prefill="full")
            session.sync(ids[:-1])
            logits += [session.step(ids[-1])]
            mx.eval(logits)
    # A cache code that a rounding moves over a tie shows, so only a faulty kernel is far off.
    limit = 2.0**-4 if dtype == mx.bfloat16 else 2.0**-8
    error = mx.linalg.norm(logits[1] - logits[0]) / mx.linalg.norm(logits[0])
    assert (error < limit).item() is True


def test_a_compiled_step_is_the_sessions() -> None:
    subject = build(tiny_config(), 0)
    model = Model(subject.config, subject.model.weights, mx.bfloat16)
    ids = np.random.default_rng(2).integers(3, 90, 3 * subject.config.sliding_window).tolist()
    with launch.using(CudaKernels()):
        session = Session(model, subject.reader, prefill="full")
        session.sync(ids)
        decoder = CompiledDecoder(model, session.state)
        layers = subject.config.engram.layer_ids if subject.config.engram else ()
        for token in (5, 7, 11, 13):
            assert subject.reader is not None
            rows = subject.reader.prefetch(np.array([token]), np.array(ids))
            ids.append(token)
            compiled = decoder.step(mx.array([token]), [rows.result(n) for n in layers])
            assert np.allclose(compiled, session.step(token), rtol=1e-2, atol=1e-2)
