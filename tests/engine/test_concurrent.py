"""Several answers at once: each as if it were alone, and nothing computed twice."""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from mlx_engine import BadRequest, Engine, load, memory
from mlx_engine.config import ModelConfig
from mlx_engine.progress import Prefilled, Waiting
from mlx_engine.respond import Steps
from mlx_engine.session import Session
from mlx_engine.sessions import Sessions
from mlx_engine.state import SessionState
from tests.engine.counted import CHUNK_TOKENS, IDS, OTHER, Made, subject
from tests.engine.timelines import CountingModel, MemoryCache, best, next_token, tokens_of
from tests.unrounded import UNROUNDED

N = 5


class Answer:
    """One answer of a few tokens, step by step as the engine goes; `tokens` grow."""

    def __init__(self, sessions: Sessions, prompt: Sequence[int], anchor: int, n: int = N) -> None:
        self.prompt, self.tokens = list(prompt), list[int]()
        self.waits: Callable[[], bool] | None = None
        self.done_tokens = 0
        self.is_done = False
        self._sessions = sessions
        self._steps = self._answer(anchor, n)

    def go(self) -> None:
        """One step: a chunk, a token, or to wait."""
        step = next(self._steps, None)
        self.is_done = step is None
        self.waits = step.is_over if isinstance(step, Waiting) else None
        if isinstance(step, Prefilled):
            self.done_tokens = step.done_tokens

    def close(self) -> None:
        self._steps.close()
        self.is_done = True

    @property
    def may_go(self) -> bool:
        return not self.is_done and (self.waits is None or self.waits())

    def _answer(self, anchor: int, n: int) -> Generator[object]:
        reading = self._sessions.read(self.prompt, [anchor], n)
        session, logits = yield from reading
        try:
            for i in range(n):
                self.tokens.append(best(logits))
                yield self.tokens[-1]
                if i + 1 < n:
                    logits = self._sessions.step(session, self.tokens[-1])
        finally:
            self._sessions.leave(session)
            self._sessions.end_turn(session)


def by_turns(answers: Sequence[Answer], check: Callable[[], object] = lambda: None) -> None:
    """Let answers go on by turns, and none that waits before it may."""
    while not all(answer.is_done for answer in answers):
        ready = [answer for answer in answers if answer.may_go]
        assert ready, "all wait for each other"
        for answer in ready:
            if answer.may_go:
                answer.go()
                check()


def alone(prompt: Sequence[int], n: int = N) -> list[int]:
    """The answer of a session of its own."""
    session = Session(subject().model, subject().reader, chunk_tokens=CHUNK_TOKENS)
    logits = session.sync(list(prompt))
    tokens = [best(logits)]
    while len(tokens) < n:
        tokens.append(best(session.step(tokens[-1])))
    return tokens


def test_answers_by_turns_are_those_of_each_alone() -> None:
    made = Made()
    prompts = [IDS[:90], OTHER[:70], [*IDS[:40], *OTHER[:33]], IDS[:90], OTHER[100:103]]
    answers = [Answer(made.sessions, prompt, 41) for prompt in prompts]
    by_turns(answers)
    assert [answer.tokens for answer in answers] == [alone(prompt) for prompt in prompts]


@pytest.mark.parametrize("shared", [40, 41, 77])
def test_what_prompts_have_in_common_is_read_once(
    monkeypatch: pytest.MonkeyPatch, shared: int
) -> None:
    monkeypatch.setattr("mlx_engine.sessions._SHARED_TOKENS", 8)
    made = Made()
    tails = [OTHER[i * 20 : i * 20 + 11] for i in range(4)]
    answers = [Answer(made.sessions, [*IDS[:shared], *tail], 40) for tail in tails]
    by_turns(answers)
    # A checkpoint has an even position.
    again = shared % 2
    assert made.model.tokens == shared + 4 * 11 + 3 * again + 4 * (N - 1)
    assert [answer.tokens for answer in answers] == [alone(answer.prompt) for answer in answers]


def test_the_same_prompt_at_once_is_read_once() -> None:
    made = Made()
    answers = [Answer(made.sessions, IDS[:101], 41) for _ in range(3)]
    by_turns(answers)
    assert made.model.tokens == 101 + 2 * 1 + 3 * (N - 1)
    assert answers[0].tokens == answers[1].tokens == answers[2].tokens == alone(IDS[:101])


def test_one_that_waits_goes_on_where_the_other_was_closed() -> None:
    made = Made()
    first, second = (Answer(made.sessions, IDS[:150], 41) for _ in range(2))
    for _ in range(5):
        first.go()
    second.go()
    assert second.waits is not None and not second.may_go
    first.close()
    assert second.may_go
    by_turns([second])
    assert made.model.tokens == 150 + N - 1
    assert second.tokens == alone(IDS[:150])


def test_one_that_waits_and_is_asked_again_reads_for_itself() -> None:
    made = Made()
    first, second = (Answer(made.sessions, IDS[:100], 41) for _ in range(2))
    first.go()
    second.go()
    assert second.waits is not None
    while not second.is_done:
        second.go()
    assert second.tokens == alone(IDS[:100])
    by_turns([first])
    assert first.tokens == second.tokens


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    made = Made()
    long = Answer(made.sessions, IDS[:400], 41)
    for _ in range(3):
        long.go()
    short = Answer(made.sessions, OTHER[:10], 4)
    by_turns([short])
    assert not long.is_done and short.tokens == alone(OTHER[:10])


def test_while_others_are_answered_chunks_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlx_engine.sessions._SHARED_CHUNK_S", 0)
    monkeypatch.setattr("mlx_engine.sessions._SHARED_CHUNK_TOKENS", 6)
    made = Made()
    long, short = Answer(made.sessions, IDS[:200], 41), Answer(made.sessions, OTHER[:50], 4)

    def chunk(answer: Answer) -> int:
        before = made.model.tokens
        answer.go()
        return made.model.tokens - before

    assert [chunk(long) for _ in range(3)] == [0, CHUNK_TOKENS, CHUNK_TOKENS]
    chunk(short)
    assert [chunk(long) for _ in range(4)] == [6, 2, 6, 6]
    by_turns([short])
    assert chunk(long) == CHUNK_TOKENS
    by_turns([long])
    assert long.tokens == alone(long.prompt) and short.tokens == alone(short.prompt)


def test_a_session_in_use_has_only_its_checkpoints_for_others() -> None:
    made = Made()
    reading = Answer(made.sessions, IDS[:150], 41)
    while reading.done_tokens < 56:
        reading.go()
    # It may fork where that one's checkpoint is; the next goes on from this one, which has more.
    free, _, computed = made.sync(IDS[:50])
    assert computed == 10
    session, _, computed = made.sync([*IDS[:56], *OTHER[:9]])
    assert session is free and computed == 6 + 9
    by_turns([reading])
    assert reading.tokens == alone(IDS[:150])


def budget_for(*tokens: int) -> int:
    return sum(memory.answer_bytes(subject().config, n) for n in tokens)


def test_without_room_a_prompt_waits_until_another_has_ended() -> None:
    budget = budget_for(100 + N, 100 + N)
    made = Made(budget_bytes=budget)
    answers = [Answer(made.sessions, [5 + i, *IDS[:99]], 41) for i in range(4)]
    most = 0

    def check() -> None:
        nonlocal most
        assert made.sessions.n_bytes <= budget
        most = max(most, sum(0 < answer.done_tokens and not answer.is_done for answer in answers))

    by_turns(answers, check)
    assert most == 2
    assert [answer.tokens for answer in answers] == [alone(answer.prompt) for answer in answers]


def test_without_room_and_anybody_who_goes_on_a_prompt_is_refused() -> None:
    made = Made(budget_bytes=budget_for(105))
    first, second = (Answer(made.sessions, [5 + i, *IDS[:99]], 41) for i in range(2))
    first.go()
    second.go()
    with pytest.raises(BadRequest, match="end one first"):
        second.go()
    by_turns([first])
    again = Answer(made.sessions, second.prompt, 41)
    by_turns([again])
    assert again.tokens == alone(again.prompt)


def test_small_prompts_do_not_pass_a_large_one_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "SHORT_TOKENS", 8)
    made = Made(budget_bytes=budget_for(60, 60, 300))
    first, second = (Answer(made.sessions, [5 + i, *IDS[:40]], 20) for i in range(2))
    large = Answer(made.sessions, IDS[:350], 41)
    for answer in (first, second, large):
        answer.go()
    assert large.waits is not None
    # It would fit, and so would the next.
    late = Answer(made.sessions, OTHER[:40], 20)
    late.go()
    assert late.waits is not None
    first.close()
    late.go()
    large.go()
    assert large.waits is None or not late.may_go
    by_turns([second, large, late])
    assert late.tokens == alone(OTHER[:40]) and large.tokens == alone(IDS[:350])


def test_a_session_in_use_is_neither_taken_nor_dropped() -> None:
    made = Made(budget_bytes=budget_for(130, 130))
    answer = Answer(made.sessions, IDS[:100], 41, 20)
    while not answer.tokens:
        answer.go()
    # One that would have gone on from it, one that would have rewound it, one that needs its room.
    for prompt in ([*IDS[:100], answer.tokens[0], 9, 9], [*IDS[:60], 9], OTHER[:100]):
        made.answer(prompt, 2, 41)
        answer.go()
    by_turns([answer])
    assert answer.tokens == alone(IDS[:100], 20)


@dataclass(frozen=True)
class Op:
    """A prompt of some earlier beginning, and how many steps of others come before it goes on."""

    base: int
    cut: int
    new: int
    seed: int
    closes_after: int | None


OPS = st.builds(
    Op,
    base=st.integers(0, 2),
    cut=st.integers(0, 60),
    new=st.integers(1, 40),
    seed=st.integers(0, 2),
    closes_after=st.none() | st.integers(0, 12),
)


@lru_cache
def recomputed(ids: tuple[int, ...]) -> list[int]:
    """The answer at full depth and in one piece."""
    state = SessionState(subject().config, UNROUNDED)
    tokens: list[int] = []
    rows = subject().engram_rows(list(ids), 0, len(ids))
    logits = subject().model.forward(list(ids), state, rows)[-1]
    while True:
        tokens.append(best(logits))
        if len(tokens) == N:
            return tokens
        every = [*ids, *tokens]
        rows = subject().engram_rows(every, len(every) - 1, len(every))
        logits = subject().model.forward([tokens[-1]], state, rows)[-1]


@settings(deadline=None, max_examples=8, derandomize=True, database=None, phases=[Phase.generate])
@given(
    st.lists(OPS, min_size=2, max_size=6),
    st.lists(st.integers(0, 5), min_size=40, max_size=40),
    st.sampled_from([1, 2, 6]),
    st.booleans(),
)
def test_any_order_of_steps_ends_with_the_same_answers(
    ops: list[Op], order: list[int], n_fitting: int, has_cache: bool
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        own = memory.held_bytes

        def held_bytes(config: ModelConfig, context_tokens: int) -> int:
            """Unrounded rows are wider than those that are counted."""
            return 7 * own(config, context_tokens)

        patch.setattr(memory, "held_bytes", held_bytes)
        budget = n_fitting * budget_for(100 + N)
        sessions = Sessions(
            CountingModel(subject()),
            subject().reader,
            budget_bytes=budget,
            chunk_tokens=CHUNK_TOKENS,
            formats=UNROUNDED,
            cache=MemoryCache() if has_cache else None,
            least_save_tokens=8,
        )
        check_any_order(sessions, ops, order, budget)


def check_any_order(sessions: Sessions, ops: list[Op], order: list[int], budget: int) -> None:
    answers: list[Answer] = []
    for op in ops:
        new = np.random.default_rng(op.seed).integers(3, 250, op.new).tolist()
        prompt = [*(IDS, OTHER, OTHER[::-1])[op.base][: op.cut], *new]
        answers.append(Answer(sessions, prompt, op.cut))
    closing_after = {id(a): op.closes_after for a, op in zip(answers, ops, strict=True)}
    turns = iter([*order, *range(10_000)])
    while not all(answer.is_done for answer in answers):
        ready = [answer for answer in answers if answer.may_go]
        assert ready, "all wait for each other"
        answer = ready[next(turns) % len(ready)]
        left = closing_after[id(answer)]
        if left == 0:
            answer.close()
        else:
            closing_after[id(answer)] = None if left is None else left - 1
            answer.go()
        assert sessions.n_bytes <= budget
    for answer in answers:
        expected = recomputed(tuple(answer.prompt))
        assert answer.tokens == expected[: len(answer.tokens)]
        assert len(answer.tokens) == N or closing_after[id(answer)] is not None
    # Nothing is in use any more.
    for answer in answers:
        session, logits = sessions.sync(answer.prompt)
        assert best(logits) == recomputed(tuple(answer.prompt))[0] and session in sessions


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
