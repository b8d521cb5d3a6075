"""The library's boundary on a small random checkpoint: load, logits, generate, respond."""

import dataclasses
import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

import mlx_engine
from mlx_engine import (
    BadRequest,
    ContextTooLong,
    DeviceError,
    End,
    Engine,
    EngramStats,
    Request,
    Sampling,
    TextDelta,
    load,
    open_model,
)
from mlx_engine.memory import least_session_bytes
from mlx_engine.progress import Prefilled
from mlx_engine.respond import Steps
from mlx_engine.sampling import ScoredToken
from mlx_engine.tiny import tiny_config, write_tiny_checkpoint
from tests.engine.timelines import next_token, tokens_of

# Two chunks.
PROMPT = [3 + i * 7 % 200 for i in range(60)]
OTHER = [5 + i * 11 % 200 for i in range(20)]
CHUNK_TOKENS = 32


@pytest.fixture(scope="module")
def loaded(checkpoint: Path) -> Iterator[Engine]:
    with load(checkpoint, "float32", context_tokens=1024, chunk_tokens=CHUNK_TOKENS) as engine:
        yield engine


@pytest.fixture
def engine(loaded: Engine) -> Engine:
    loaded.reset()
    return loaded


def _start(engine: Engine, prompt: list[int], n: int) -> Steps:
    return engine.generate(prompt, max_tokens=n, temperature=0, ignore_eos=True)


def _greedy(engine: Engine, prompt: list[int], n: int) -> list[int]:
    return tokens_of(_start(engine, prompt, n))


def _greedy_and_progress(
    engine: Engine, prompt: list[int], n: int
) -> tuple[list[int], list[tuple[int, int]]]:
    steps = [*_start(engine, prompt, n)]
    read = [step for step in steps if isinstance(step, Prefilled)]
    return tokens_of(steps), [(step.done_tokens, step.total_tokens) for step in read]


def test_greedy_tokens_are_the_best_logits_at_full_depth(engine: Engine) -> None:
    answer = _greedy(engine, PROMPT, 6)
    logits = engine.logits([*PROMPT, *answer[:-1]])
    assert logits.dtype == np.float32
    assert logits.shape == (len(PROMPT) + 5, engine.config.vocab_size)
    assert logits[len(PROMPT) - 1 :].argmax(axis=1).tolist() == answer


def test_logits_of_some_positions_are_those_rows(engine: Engine) -> None:
    positions = [59, 0, 31, 32, 59]
    some = engine.logits(PROMPT, positions)
    np.testing.assert_array_equal(some, engine.logits(PROMPT)[positions])
    assert engine.logits(PROMPT, []).shape == (0, engine.config.vocab_size)


def test_a_prompt_that_continues_the_last_one_starts_there(engine: Engine) -> None:
    answer = _greedy(engine, PROMPT, 4)
    known = [*PROMPT, *answer[:-1]]
    longer = [*known, *OTHER]
    again, seen = _greedy_and_progress(engine, longer, 3)
    # It pauses for a checkpoint at the last even position before the last token.
    assert seen == [(n, len(longer)) for n in (len(known), 82, len(longer))]
    engine.reset()
    anew, seen = _greedy_and_progress(engine, longer, 3)
    assert seen[0] == (0, len(longer))
    assert anew == again


def test_the_same_prompt_again_needs_no_work(engine: Engine) -> None:
    first = _greedy(engine, PROMPT, 1)
    again, seen = _greedy_and_progress(engine, PROMPT, 1)
    assert again == first
    assert seen == [(len(PROMPT), len(PROMPT))]


def test_a_prefill_that_is_stopped_leaves_the_engine_usable(engine: Engine) -> None:
    known = PROMPT[:20]

    expected = _greedy(engine, PROMPT, 1)
    # What has been read by then is not read again.
    for tokens, kept in ((20, 20), (20 + CHUNK_TOKENS, 52), (58, 58), (60, 60)):
        engine.reset()
        _greedy(engine, known, 1)
        with closing(_start(engine, PROMPT, 1)) as steps:
            for step in steps:
                assert isinstance(step, Prefilled)
                if step.done_tokens >= tokens:
                    break
        answer, seen = _greedy_and_progress(engine, PROMPT, 1)
        assert seen[0] == (kept, len(PROMPT))
        assert answer == expected


def test_an_exact_retry_reads_two_tokens_and_answers_alike(engine: Engine) -> None:
    first = _greedy(engine, PROMPT, 6)
    again, seen = _greedy_and_progress(engine, PROMPT, 6)
    assert seen[0] == (len(PROMPT) - 2, len(PROMPT))
    assert again == first


def test_a_prompt_that_shares_an_anchor_starts_there(engine: Engine) -> None:
    before = engine.session_stats()
    tokens_of(engine.generate(PROMPT, anchors=[21], max_tokens=3, temperature=0, ignore_eos=True))
    other = [*PROMPT[:21], *OTHER]
    answer, seen = _greedy_and_progress(engine, other, 3)
    assert seen[0] == (20, len(other))
    # The longer one is still there.
    assert _greedy_and_progress(engine, PROMPT, 1)[1][0] == (len(PROMPT) - 2, len(PROMPT))
    stats = engine.session_stats()
    assert (stats.sessions, stats.forked - before.forked) == (2, 1)
    engine.reset()
    assert _greedy(engine, other, 3) == answer


def test_an_answer_that_is_closed_leaves_the_engine_usable(engine: Engine) -> None:
    expected = _greedy(engine, PROMPT, 4)
    engine.reset()
    steps = _start(engine, PROMPT, 4)
    assert [next_token(steps), next_token(steps)] == expected[:2]
    steps.close()
    assert _greedy(engine, PROMPT, 4) == expected


def test_an_answer_does_not_outlive_a_reset(engine: Engine) -> None:
    for begin in (next, next_token):
        steps = _start(engine, PROMPT, 3)
        begin(steps)
        engine.reset()
        with pytest.raises(BadRequest, match="start generate again"):
            next(steps)
        assert len(_greedy(engine, PROMPT, 1)) == 1


def test_logits_leave_an_answer_under_way_alone(engine: Engine) -> None:
    expected = _greedy(engine, PROMPT, 3)
    engine.reset()
    steps = _start(engine, PROMPT, 3)
    begun = next_token(steps)
    engine.logits(OTHER)
    assert [begun, *tokens_of(steps)] == expected


def test_the_end_of_sequence_stops_unless_ignored(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = _greedy(engine, PROMPT, 5)
    eos = answer[3]
    n = answer.index(eos)
    # A model whose EOS is a token that this one is known to say.
    config = dataclasses.replace(engine.config, eos_token_id=eos)
    monkeypatch.setattr(Engine, "config", config)

    def drain(max_tokens: int, *, ignore_eos: bool) -> tuple[list[int], str]:
        steps = engine.generate(PROMPT, max_tokens=max_tokens, temperature=0, ignore_eos=ignore_eos)
        said: list[int] = []
        while True:
            try:
                said += tokens_of([next(steps)])
            except StopIteration as end:
                return said, end.value

    assert drain(5, ignore_eos=False) == (answer[:n], "stop")
    assert drain(5, ignore_eos=True) == (answer, "length")
    assert drain(n, ignore_eos=False) == (answer[:n], "length")


def test_a_seed_gives_the_same_tokens_and_another_seed_others(engine: Engine) -> None:
    def draw(seed: int) -> list[int]:
        return tokens_of(
            engine.generate(PROMPT, max_tokens=6, temperature=3, seed=seed, ignore_eos=True)
        )

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


def test_scores_are_those_of_the_logits_at_full_depth(engine: Engine) -> None:
    plain = _greedy(engine, PROMPT, 4)
    steps = engine.generate(PROMPT, max_tokens=4, temperature=0, ignore_eos=True, logprobs=3)
    scored = [step for step in steps if isinstance(step, ScoredToken)]
    assert [step.token_id for step in scored] == plain
    logits = engine.logits([*PROMPT, *plain[:-1]])[len(PROMPT) - 1 :].astype(np.float64)
    log_probs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    for step, expected in zip(scored, log_probs, strict=True):
        assert step.top[0] == (step.token_id, step.logprob) and len(step.top) == 3
        ids = [token_id for token_id, _ in step.top]
        np.testing.assert_allclose([logprob for _, logprob in step.top], expected[ids], atol=1e-3)


def test_respond_ends_with_the_whole_answer(engine: Engine) -> None:
    events = list(engine.respond(Request("Hello", effort="off", max_tokens=10)))
    end = events[-1]
    assert isinstance(end, End)
    assert end.text == "".join(event.text for event in events if isinstance(event, TextDelta))
    assert 0 < end.completion_tokens <= 10
    assert end.prompt_tokens > 0


def test_an_answer_counts_its_own_table_rows(checkpoint: Path) -> None:
    greedy = Sampling(temperature=0)
    request = Request("Hello, hello", effort="off", max_tokens=2, sampling=greedy)
    with load(checkpoint, "float32") as engine:
        *_, first = engine.respond(request)
        engine.reset()
        *_, second = engine.respond(request)
        total = engine.engram_stats()
    assert isinstance(first, End) and isinstance(second, End)
    cold, warm = first.engram, second.engram
    assert first.text == second.text
    assert cold.cache_hits < cold.rows_distinct < cold.rows_requested
    assert cold.bytes_read > 0
    # The same tokens again: every row is in memory now.
    assert warm.cache_hits == warm.rows_distinct == cold.rows_distinct
    assert warm.bytes_read == 0
    assert cold + warm == total


def test_a_model_without_tables_counts_none(tmp_path: Path) -> None:
    config = tiny_config()
    config["text_config"] |= {"engram_layer_ids": [], "engram_num_embeddings": []}
    write_tiny_checkpoint(tmp_path / "plain", config=config)
    with load(tmp_path / "plain", "float32") as engine:
        *_, end = engine.respond(Request("Hello", effort="off", max_tokens=1))
    assert isinstance(end, End)
    assert end.engram == EngramStats()


def test_short_and_full_prefill_answer_alike(checkpoint: Path) -> None:
    prompt = PROMPT * 2
    answers: list[list[int]] = []
    for prefill in ("short", "full"):
        with load(checkpoint, "float32", prefill=prefill, chunk_tokens=100) as engine:
            config = engine.config
            assert config.reach_tokens(config.last_kv_source) < len(prompt)
            answers.append(_greedy(engine, prompt, 4))
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
        engine.logits(PROMPT, [60])
    with pytest.raises(BadRequest, match="dtype"):
        load(checkpoint, "float16")  # pyright: ignore[reportArgumentType]
    with pytest.raises(BadRequest, match="prefill"):
        load(checkpoint, prefill="long")  # pyright: ignore[reportArgumentType]
    with pytest.raises(BadRequest, match="from 1 to 131072"):
        load(checkpoint, context_tokens=131_073)
    least = least_session_bytes(engine.config, 1024)
    with pytest.raises(BadRequest, match=f"session_bytes is 5, it must be at least {least}"):
        load(checkpoint, context_tokens=1024, session_bytes=5)
    with pytest.raises(DeviceError, match="for sessions of 1,024 tokens"):
        load(checkpoint, context_tokens=1024, session_bytes=10**18)
    for chunk_tokens in (0, -5):
        with pytest.raises(BadRequest, match=f"chunk_tokens is {chunk_tokens}, it must be at"):
            load(checkpoint, chunk_tokens=chunk_tokens)


def test_a_prompt_is_checked_before_a_weight_is_read(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "preadv", None)
    model = open_model(checkpoint, context_tokens=30)
    model.check(Request("Hi", effort="off", max_tokens=4))
    with pytest.raises(ContextTooLong, match="pass the context of 30 tokens"):
        model.check(Request("Hi", effort="off", max_tokens=40))
    with pytest.raises(ContextTooLong, match="pass the context of 30 tokens"):
        model.check(Request("Hi" * 30, effort="off"))


def test_exported_names_are_there() -> None:
    for name in mlx_engine.__all__:
        assert getattr(mlx_engine, name) is not None
