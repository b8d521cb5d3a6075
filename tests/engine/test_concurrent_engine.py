"""Several answers of one engine at once, by whoever goes on with them."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from mlx_engine import Engine, load
from mlx_engine.progress import Prefilled
from mlx_engine.respond import Steps
from tests.engine.timelines import next_token, tokens_of


@pytest.fixture
def engine(checkpoint: Path) -> Iterator[Engine]:
    with load(checkpoint, "float32", context_tokens=1024, chunk_tokens=32) as engine:
        yield engine


PROMPT = [3 + i * 7 % 200 for i in range(60)]


def start(engine: Engine, prompt: list[int]) -> Steps:
    return engine.generate(prompt, max_tokens=4, temperature=0, ignore_eos=True)


@pytest.mark.parametrize("second", [PROMPT, [*PROMPT, 5, 6, 7], [9, *PROMPT]], ids=len)
def test_of_two_answers_at_once_neither_disturbs_the_other(
    engine: Engine, second: list[int]
) -> None:
    expected = [tokens_of(start(engine, prompt)) for prompt in (PROMPT, second)]
    engine.reset()
    first = start(engine, PROMPT)
    begun = next_token(first)
    later = start(engine, second)
    begun_later = next_token(later)
    assert [begun, *tokens_of(first)] == expected[0]
    assert [begun_later, *tokens_of(later)] == expected[1]


def test_answers_that_begin_at_once_go_on_by_turns(engine: Engine) -> None:
    prompts = [PROMPT, PROMPT[:40], [*PROMPT[:50], 8, 8, 8, 8]]
    expected = [tokens_of(start(engine, prompt)) for prompt in prompts]
    engine.reset()
    answers = [start(engine, prompt) for prompt in prompts]
    found: list[list[int]] = [[] for _ in prompts]
    left = {i: each for i, each in enumerate(answers)}
    while left:
        for i, steps in [*left.items()]:
            step = next(steps, None)
            if step is None:
                del left[i]
            elif isinstance(step, int):
                found[i].append(step)
    assert found == expected


def test_an_answer_that_is_closed_at_any_step_frees_its_session(engine: Engine) -> None:
    expected = tokens_of(start(engine, PROMPT))
    n_steps = len([*start(engine, PROMPT)])
    for n in range(n_steps + 4):
        engine.reset()
        with closing(start(engine, PROMPT)) as steps:
            for _ in range(n):
                next(steps, None)
        again = [*start(engine, PROMPT)]
        first = again[0]
        assert isinstance(first, Prefilled)
        assert tokens_of(again) == expected
        assert engine.session_stats().in_use == 0
        # The chunks that had come were not read again.
        assert first.done_tokens >= (0, 0, 32, 58)[min(n, 3)]
