"""What only an NVIDIA GPU can show: every family's kernels agree with its reference there."""

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray

from mlx_engine.cuda.kernels import CudaKernels
from mlx_engine.decoder import Decoder
from mlx_engine.model import Model
from mlx_engine.ops import launch
from mlx_engine.session import Session
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
    ids = np.random.default_rng(1).integers(3, 90, 3 * subject.config.sliding_window).tolist()

    def last_logits(dtype: mx.Dtype) -> NDArray[np.float32]:
        model = Model(subject.config, subject.model.weights, dtype)
        session = Session(model, subject.reader, prefill="full")
        session.sync(ids[:-1])
        return np.array(session.step(ids[-1]), np.float32)

    # Not every product of the tiny model's shapes is in MLX for CUDA.
    with launch.using(None), mx.stream(mx.cpu):
        right, rounded = last_logits(mx.float32), last_logits(dtype)
    with launch.using(CudaKernels()):
        found = last_logits(dtype)
    # A code or a choice that a rounding moves over a tie shows, in bf16 as much as the type itself.
    limit = max(2 * float(np.linalg.norm(rounded - right)), 2**-8 * float(np.linalg.norm(right)))
    assert np.linalg.norm(found - right) < limit


def test_compiled_steps_are_those_of_the_model() -> None:
    subject = build(tiny_config(), 0)
    model = Model(subject.config, subject.model.weights, mx.bfloat16)
    ids = np.random.default_rng(2).integers(3, 90, 3 * subject.config.sliding_window).tolist()
    with launch.using(CudaKernels()):
        decoder = Decoder(model)
        assert decoder.is_on
        ours, plain = (
            Session(model, subject.reader, prefill="full", decoder=each)
            for each in (decoder, Decoder(model, is_on=False))
        )
        for session in (ours, plain):
            session.sync(ids)
        for token in (5, 7, 11, 13, 17, 19):
            ours.begin_step(mx.array(token + token % 3 // 2, mx.uint32))
            assert np.allclose(ours.step(token), plain.step(token), rtol=1e-2, atol=1e-2)
    # Below the Engram layer one form, above it one for each parity.
    assert decoder.traced == 3
