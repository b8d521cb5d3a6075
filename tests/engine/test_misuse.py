"""The engine in the hands of several callers, of callbacks, and with numbers that are none."""

import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_engine import BadRequest, Engine, ModelFileError, Prefilled, load
from mlx_engine.config_file import parse_config
from mlx_engine.decoder import Decoder
from mlx_engine.model import Model
from mlx_engine.respond import Steps
from tests.engine.support import build, compare_choices, compare_logits, tiny_config
from tests.engine.timelines import tokens_of
from tests.reference.random_tensors import TINY_CONFIG

PROMPT = list(range(3, 43))


@pytest.fixture
def engine(checkpoint: Path) -> Iterator[Engine]:
    with load(checkpoint, "float32", context_tokens=256) as engine:
        yield engine


@pytest.fixture(params=["model", "decoder"])
def _stepping(  # pyright: ignore[reportUnusedFunction]
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Steps of the model, or of the decoder as on NVIDIA GPUs, but not compiled."""
    is_on = request.param == "decoder"
    monkeypatch.setattr("mlx_engine.sessions.Decoder", partial(Decoder, is_on=is_on))
    mx.disable_compile()
    yield
    mx.enable_compile()


def _greedy(engine: Engine, **options: Any) -> list[int]:
    steps = engine.generate(PROMPT, max_tokens=4, temperature=0, ignore_eos=True, **options)
    return tokens_of(steps)


def _in_thread(work: Callable[[], Any]) -> Any:
    """What `work` returns or raises in a thread of its own."""
    result: list[Any] = []

    def run() -> None:
        try:
            result.append(work())
        except Exception as error:
            result.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return result[0]


@pytest.mark.usefixtures("_stepping")
def test_any_thread_may_call_the_others_having_ended(checkpoint: Path, engine: Engine) -> None:
    expected = _greedy(engine)
    engine.reset()
    assert _in_thread(lambda: _greedy(engine)) == expected
    engine.reset()
    assert _greedy(engine) == expected
    loaded = _in_thread(lambda: load(checkpoint, "float32", context_tokens=256))
    with loaded:
        assert _greedy(loaded) == expected
        assert _in_thread(lambda: loaded.logits(PROMPT, [0])).shape == (1, engine.config.vocab_size)


@pytest.mark.usefixtures("_stepping")
def test_threads_go_on_from_what_others_left(engine: Engine) -> None:
    def answer(prompt: list[int], max_tokens: int) -> Steps:
        return engine.generate(prompt, max_tokens=max_tokens, seed=1, ignore_eos=True)

    expected = tokens_of(answer(PROMPT, 12))
    engine.reset()
    steps = answer(PROMPT, 12)
    in_threads = iter(lambda: _in_thread(lambda: next(steps, None)), None)
    assert [step for step in in_threads if not isinstance(step, Prefilled)] == expected
    engine.reset()
    # An answer of one token, after which the next step was begun and never came.
    longer = [*PROMPT, *tokens_of(answer(PROMPT, 1)), 7, 8, 9]
    found = _in_thread(lambda: tokens_of(answer(longer, 4)))
    engine.reset()
    assert found == tokens_of(answer(longer, 4))


def test_a_second_call_at_once_is_refused(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = _greedy(engine)
    engine.reset()
    refused: list[Any] = []
    own = Model.encode

    def encode(*args: Any) -> Any:
        for work in (engine.reset, lambda: engine.logits(PROMPT), lambda: _greedy(engine)):
            refused.append(_in_thread(work))
            with pytest.raises(BadRequest, match="at work"):
                work()
        return own(*args)

    monkeypatch.setattr(Model, "encode", encode)
    assert _greedy(engine) == expected
    assert refused
    assert all(isinstance(error, BadRequest) for error in refused)


def test_a_closed_engine_says_so(checkpoint: Path) -> None:
    engine = load(checkpoint, "float32", context_tokens=256)
    tokens = engine.generate(PROMPT, max_tokens=4, ignore_eos=True)
    next(tokens)
    engine.close()
    with pytest.raises(BadRequest, match="closed"):
        next(tokens)
    with pytest.raises(BadRequest, match="closed"):
        engine.logits(PROMPT)


@pytest.mark.parametrize("ids", [[0.9, 65.2], [[1, 2]], ["1", "2"], [2**70]], ids=str)
def test_what_is_no_list_of_integers(engine: Engine, ids: Any) -> None:
    with pytest.raises(BadRequest, match="integers"):
        engine.generate(ids, max_tokens=1)
    with pytest.raises(BadRequest, match="integers"):
        engine.logits(PROMPT, ids)


def test_a_prompt_that_changes_later_does_not_matter(engine: Engine) -> None:
    expected = _greedy(engine)
    prompt = list(PROMPT)
    tokens = engine.generate(prompt, max_tokens=4, temperature=0, ignore_eos=True)
    prompt.clear()
    assert tokens_of(tokens) == expected


def test_logits_that_are_no_numbers_are_refused(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(model: Model, streams: mx.array, pre: mx.array) -> mx.array:
        return mx.full((1, model.config.vocab_size), np.nan)

    monkeypatch.setattr(Model, "head", broken)
    with pytest.raises(ModelFileError, match="damaged"):
        _greedy(engine)


def test_a_single_output_group() -> None:
    subject = build(tiny_config(o_groups=1), 0)
    ids = list(range(3, 30))
    trace = subject.trace(ids, is_rounded=False)
    run = subject.run(ids, [20, 7], is_rounded=False)
    compare_choices(subject, run, trace)
    compare_logits(run, trace, 5e-5)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("swiglu_limit", 10**400),
        ("compress_rope_theta", 1),
        ("n_routed_experts", 10**8),
        ("dspark_n_routed_experts", 10**9),
        ("rope_scaling", {**TINY_CONFIG["text_config"]["rope_scaling"], "beta_slow": 64}),
    ],
    ids=["beyond a float", "theta 1", "experts", "draft experts", "betas that do not ascend"],
)
def test_numbers_of_a_damaged_configuration(key: str, value: Any) -> None:
    with pytest.raises(ModelFileError):
        parse_config({**TINY_CONFIG, "text_config": {**TINY_CONFIG["text_config"], key: value}})
