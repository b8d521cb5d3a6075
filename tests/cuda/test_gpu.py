"""What only an NVIDIA GPU can show: every family's kernels agree with its reference there."""

import ctypes
from collections.abc import Generator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import cast

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray

from mlx_engine import Engine, load, open_model
from mlx_engine.cuda.host_slots import host_slots
from mlx_engine.cuda.kernels import CudaKernels
from mlx_engine.decoder import Decoder
from mlx_engine.diskcache.cache import DiskCache
from mlx_engine.kernel_inputs import Numbers
from mlx_engine.loading import Dtype
from mlx_engine.model import Model
from mlx_engine.ops import launch
from mlx_engine.ops.linear import grouped_output
from mlx_engine.progress import Prefilled
from mlx_engine.respond import Steps
from mlx_engine.session import Session
from mlx_engine.state_transfer import parts
from mlx_engine.tiny import tiny_config as tiny_checkpoint_config
from mlx_engine.tiny import write_tiny_checkpoint
from tests.engine.support import build, tiny_config
from tests.engine.timelines import next_token, tokens_of

# Of the driver's cuMemRangeGetAttribute.
_PREFERRED_LOCATION, _HOST = 2, -1

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


def test_what_the_host_writes_stays_with_it() -> None:
    slot, _ = host_slots(5000, 2)
    memory = cast(NDArray[np.uint8], np.array(slot.array, copy=False))
    location = ctypes.c_int()
    code = ctypes.CDLL("libcuda.so.1").cuMemRangeGetAttribute(
        ctypes.byref(location),
        ctypes.c_size_t(4),
        ctypes.c_int(_PREFERRED_LOCATION),
        ctypes.c_uint64(memory.ctypes.data),
        ctypes.c_size_t(memory.nbytes),
    )
    assert (code, location.value) == (0, _HOST)
    for n in range(1, 4):
        slot.write([np.full(5000, n, np.uint8)])
        slot.reader = slot.array[:5000].sum()
        assert slot.reader.item() == 5000 * n


PROMPTS = [[3 + (7 + 4 * n) * i % 200 for i in range(300)] for n in (0, 1)]
MORE = [5 + i * 11 % 200 for i in range(20)]
ANSWER_TOKENS = 12


@contextmanager
def _started(model: Path, folder: Path, dtype: Dtype) -> Generator[Engine]:
    """An engine over what a folder has; at the end all that it keeps has been written."""
    opened = open_model(model, context_tokens=1024)
    cache = DiskCache.open(
        folder, fingerprint=dtype.encode(), parts=parts(opened.config), free_floor_bytes=0
    )
    with opened.load(dtype, chunk_tokens=64, disk_cache=cache) as engine:
        yield engine
    assert cache.flush(60) and not cache.stats().dropped
    cache.close()


def _answer(engine: Engine, prompt: list[int]) -> Steps:
    return engine.generate(prompt, max_tokens=ANSWER_TOKENS, temperature=0, ignore_eos=True)


def _in_turn(engine: Engine) -> list[list[int]]:
    """The prompts' answers, one after the other, and that to what goes on from the first."""
    answers = [tokens_of(_answer(engine, prompt)) for prompt in PROMPTS]
    return [*answers, tokens_of(_answer(engine, [*PROMPTS[0], *answers[0][:4], *MORE]))]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_answers_side_by_side_and_from_disk(
    dtype: Dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "model"
    config = tiny_checkpoint_config()
    config["text_config"] |= {"sliding_window": 16, "index_topk": 16, "candidate_topk_blocks": 4}
    write_tiny_checkpoint(model, config=config)
    # The blocks below say what computes.
    monkeypatch.setattr(launch, "start_here", launch.fast_paths)
    with launch.using(CudaKernels()):
        with load(model, dtype, context_tokens=1024, chunk_tokens=64) as engine:
            expected = _in_turn(engine)
        with _started(model, tmp_path / "kv", dtype) as engine:
            first, second = (_answer(engine, prompt) for prompt in PROMPTS)
            found = [[next_token(steps)] for steps in (first, second)]
            for _ in range(ANSWER_TOKENS - 1):
                for tokens, steps in zip(found, (first, second), strict=True):
                    tokens.append(cast(int, next(steps)))
            assert found == expected[:2]
            first.close()
            second.close()
            # A prompt that is given up while it is read, and an answer after a few tokens.
            with closing(_answer(engine, [*MORE, *PROMPTS[1]])) as steps:
                assert isinstance(next(steps), Prefilled) and isinstance(next(steps), Prefilled)
            with closing(_answer(engine, [*PROMPTS[1], *MORE])) as steps:
                next_token(steps)
                next(steps)
            longer: list[int] = [*PROMPTS[0], *expected[0][:4], *MORE]
            assert tokens_of(_answer(engine, longer)) == expected[2]
        with _started(model, tmp_path / "kv", dtype) as engine:
            steps = [*_answer(engine, PROMPTS[0])]
            assert engine.session_stats().restored == 1
            read = next(step for step in steps if isinstance(step, Prefilled))
            assert read.done_tokens >= len(PROMPTS[0]) - 2
            assert tokens_of(steps) == expected[0]


@pytest.mark.parametrize("T", [1, 40])
def test_groups_are_multiplied_with_the_kernels_off(T: int) -> None:
    """MLX's product of packed weights takes no stacks of them in CUDA."""
    numbers = Numbers()
    o = numbers.normal(T, 4, 512)
    weights = numbers.fp8(1024, 1024, groups=2), numbers.fp8(512, 2048)
    with launch.using(None):
        found = grouped_output(o, *weights)
        with mx.stream(mx.cpu):
            right = grouped_output(o, *weights)
            assert mx.linalg.norm(found - right) < 2**-6 * mx.linalg.norm(right)
