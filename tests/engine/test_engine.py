"""The library's boundary on the small random checkpoint: load, logits, generate, respond."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import mlx_engine
from mlx_engine import BadRequest, ContextTooLong, End, Engine, Request, TextDelta, load
from mlx_engine.errors import Cancelled
from mlx_engine.tiny import write_tiny_checkpoint

PROMPT = [3 + i * 7 % 200 for i in range(150)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model") / "tiny"
    write_tiny_checkpoint(directory)
    return directory


@pytest.fixture
def engine(checkpoint: Path) -> Iterator[Engine]:
    with load(checkpoint, "float32", context_tokens=1024, chunk_tokens=64) as engine:
        yield engine


def _greedy(engine: Engine, prompt: list[int], n: int) -> list[int]:
    return list(engine.generate(prompt, max_tokens=n, temperature=0, ignore_eos=True))


def test_greedy_tokens_are_the_best_logits_at_full_depth(engine: Engine) -> None:
    answer = _greedy(engine, PROMPT, 24)
    logits = engine.logits([*PROMPT, *answer[:-1]])
    assert logits.dtype == np.float32
    assert logits.shape == (len(PROMPT) + 23, engine.config.vocab_size)
    assert logits[len(PROMPT) - 1 :].argmax(axis=1).tolist() == answer


def test_logits_of_some_positions_are_those_rows(engine: Engine) -> None:
    positions = [149, 0, 63, 64, 149]
    some = engine.logits(PROMPT, positions)
    np.testing.assert_array_equal(some, engine.logits(PROMPT)[positions])
    assert engine.logits(PROMPT, []).shape == (0, engine.config.vocab_size)


def test_a_prompt_that_continues_the_last_one_starts_there(engine: Engine) -> None:
    answer = _greedy(engine, PROMPT, 8)
    known = [*PROMPT, *answer[:-1]]
    seen: list[tuple[int, int]] = []
    longer = [*known, *PROMPT]
    again = list(
        engine.generate(
            longer,
            max_tokens=4,
            temperature=0,
            ignore_eos=True,
            on_progress=lambda done, total: seen.append((done, total)),
        )
    )
    assert seen[0] == (len(known), len(longer))
    assert seen[-1] == (len(longer), len(longer))
    with load_like(engine) as fresh:
        assert _greedy(fresh, longer, 4) == again


def load_like(engine: Engine) -> Engine:
    """A second engine over the same files, with nothing in its session."""
    return load(engine.directory, "float32", context_tokens=1024)


def test_the_same_prompt_again_needs_no_work(engine: Engine) -> None:
    first = _greedy(engine, PROMPT, 1)
    seen: list[tuple[int, int]] = []
    again = list(
        engine.generate(
            PROMPT,
            max_tokens=1,
            temperature=0,
            ignore_eos=True,
            on_progress=lambda done, total: seen.append((done, total)),
        )
    )
    assert again == first
    assert seen == [(len(PROMPT), len(PROMPT))]


def test_a_prefill_that_is_stopped_leaves_the_engine_usable(engine: Engine) -> None:
    expected = _greedy(engine, PROMPT, 5)
    engine.reset()

    def stop_at(tokens: int) -> Callable[[int, int], None]:
        def report(done: int, _: int) -> None:
            if done >= tokens:
                raise Cancelled("stopped")

        return report

    for tokens in (0, 64, 128, 150):
        with pytest.raises(Cancelled):
            list(engine.generate(PROMPT, max_tokens=5, on_progress=stop_at(tokens)))
        assert _greedy(engine, PROMPT, 5) == expected


def test_an_answer_that_is_closed_leaves_the_engine_usable(engine: Engine) -> None:
    expected = _greedy(engine, PROMPT, 6)
    engine.reset()
    tokens = engine.generate(PROMPT, max_tokens=6, temperature=0, ignore_eos=True)
    assert [next(tokens), next(tokens)] == expected[:2]
    tokens.close()
    assert _greedy(engine, PROMPT, 6) == expected


def test_the_end_of_sequence_stops_unless_ignored(engine: Engine) -> None:
    answer = _greedy(engine, PROMPT, 30)
    eos = engine.config.eos_token_id
    # Sampling at a high temperature meets the EOS sooner or later.
    for seed in range(20):
        with_eos = list(engine.generate(PROMPT, max_tokens=200, temperature=3.0, seed=seed))
        assert eos not in with_eos
        if len(with_eos) < 200:
            break
    else:
        pytest.fail("no seed met the end of sequence")
    ignoring = list(
        engine.generate(PROMPT, max_tokens=200, temperature=3.0, seed=seed, ignore_eos=True)
    )
    assert len(ignoring) == 200
    assert ignoring[: len(with_eos) + 1] == [*with_eos, eos]
    assert len(answer) == 30


def test_a_seed_gives_the_same_tokens_and_another_seed_others(engine: Engine) -> None:
    def draw(seed: int) -> list[int]:
        return list(engine.generate(PROMPT, max_tokens=20, seed=seed, ignore_eos=True))

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


def test_respond_ends_with_the_whole_answer(engine: Engine) -> None:
    events = list(engine.respond(Request("Hello", effort="off", max_tokens=40)))
    end = events[-1]
    assert isinstance(end, End)
    assert end.text == "".join(event.text for event in events if isinstance(event, TextDelta))
    assert 0 < end.completion_tokens <= 40
    assert end.prompt_tokens > 0


def test_short_and_full_prefill_answer_alike(checkpoint: Path) -> None:
    answers = []
    for prefill in ("short", "full"):
        with load(checkpoint, "float32", prefill=prefill, chunk_tokens=64) as engine:
            answers.append(_greedy(engine, PROMPT * 6, 12))
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("prompt", "error", "says"),
    [
        ([], BadRequest, "empty"),
        ([-1], BadRequest, "from 0 to"),
        ([10_000_000], BadRequest, "from 0 to"),
        ([5] * 1020, ContextTooLong, "1024"),
    ],
)
def test_a_prompt_that_cannot_be(
    engine: Engine, prompt: list[int], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        engine.generate(prompt, max_tokens=8)


def test_other_arguments_that_cannot_be(engine: Engine, checkpoint: Path) -> None:
    image = engine.config.image_token_id
    with pytest.raises(BadRequest, match="image"):
        engine.generate([5, image], max_tokens=1)
    with pytest.raises(BadRequest, match="max_tokens"):
        engine.generate(PROMPT, max_tokens=0)
    with pytest.raises(BadRequest, match="positions"):
        engine.logits(PROMPT, [150])
    with pytest.raises(BadRequest, match="dtype"):
        load(checkpoint, "float16")  # pyright: ignore[reportArgumentType]
    with pytest.raises(BadRequest, match="from 1 to 131072"):
        load(checkpoint, context_tokens=131_073)


def test_exported_names_are_there() -> None:
    for name in mlx_engine.__all__:
        assert getattr(mlx_engine, name) is not None
