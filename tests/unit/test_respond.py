"""From a request to its events: reasoning and answer, stop strings, cancellation, accounts."""

import json
import logging
from collections.abc import Iterable, Sequence
from dataclasses import astuple
from types import SimpleNamespace
from typing import Any

import deepseek_recipe as recipe
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mlx_engine.answer import AnswerEvent, AnswerReader, ReasoningDelta, StopStrings, TextDelta
from mlx_engine.engram_table import EngramStats
from mlx_engine.errors import BadRequest, ContextTooLong
from mlx_engine.progress import Prefilled
from mlx_engine.prompt import Message, conversation, encode
from mlx_engine.respond import End, Event, Progress, Request, respond
from mlx_engine.sampling import Sampling
from mlx_engine.tokenizer import SPELLINGS, Tokenizer
from mlx_engine.turns import Shown
from tests.fake_engine import (
    ROWS_A_TOKEN,
    FakeEngine,
    tiny_tokenizer,
    tiny_tokenizer_json,
    with_special_tokens,
)
from tests.scripted_engine import Course, ScriptedEngine

HI = Request("Hi")


def run(engine: FakeEngine, request: Request = HI, **options: Any) -> tuple[list[Event], End]:
    *events, end = respond(engine, request, **options)
    assert isinstance(end, End)
    assert engine.is_closed
    reasoning = "".join(e.text for e in events if isinstance(e, ReasoningDelta))
    text = "".join(e.text for e in events if isinstance(e, TextDelta))
    assert (reasoning, text) == (end.reasoning, end.text)
    assert all(e.text for e in events if isinstance(e, ReasoningDelta | TextDelta))
    return events, end


def answer(said: str, **request: Any) -> tuple[str, str]:
    _, end = run(FakeEngine(said), Request("Hi", **request))
    return end.reasoning, end.text


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("why</think>so", ("why", "so")),
        ("\n\nwhy\n\nnot\n\n</think>\n\nso\n\nit is\n\n", ("why\n\nnot", "so\n\nit is\n\n")),
        ("</think>so", ("", "so")),
        ("\n</think>\n", ("", "")),
        ("why\n", ("why\n", "")),
        ("", ("", "")),
        ("a<think>b</think>c</think>d", ("ab", "cd")),
        ("a\n</think>\nb\n\n<think>\nc\n</think>\n\nd", ("a\n\nc", "b\n\n\n\nd")),
        ("a</think><think>b</think>\nc<think>", ("a\n\nb", "c")),
        ("</think>\n<think>\nb", ("b", "")),
        ("a ｜DSML｜ b</think><｜DSML｜ calls>", ("a ｜DSML｜ b", "<｜DSML｜ calls>")),
        ("why</think>so<｜end▁of▁sentence｜>unsaid", ("why", "so")),
        ("é\U0001f600</think>\u4f60", ("é\U0001f600", "\u4f60")),
    ],
)
def test_reasoning_and_answer_are_told_apart(said: str, expected: tuple[str, str]):
    assert answer(said) == expected


def test_a_spelled_out_end_of_reasoning_is_text():
    tokenizer = tiny_tokenizer()
    spelled = tokenizer.encode_text("say </think> in words")
    _, end = run(FakeEngine([*spelled, tokenizer.special.think_end]))
    assert (end.reasoning, end.text) == ("say </think> in words", "")


def test_without_thinking_all_is_answer():
    assert answer("\n\na\n</think>b\n", effort="off") == ("", "a\nb\n")


def test_raw_continues_the_text_as_it_is():
    engine = FakeEngine("\n\n</think><think>more")
    _, end = run(engine, Request("Once ", raw=True))
    assert (end.reasoning, end.text) == ("", "\n\nmore")
    tokenizer = engine.tokenizer
    assert engine.calls[0].token_ids == (tokenizer.special.bos, *tokenizer.encode_text("Once "))


def test_half_a_character_at_the_end_of_a_part_is_replaced_there():
    tokenizer = tiny_tokenizer()
    smile = tokenizer.encode_text("\U0001f600")
    _, end = run(FakeEngine([*smile[:3], tokenizer.special.think_end, smile[3], *smile[:2]]))
    assert (end.reasoning, end.text) == ("\ufffd", "\ufffd\ufffd")


# Newlines, characters of several bytes, and stop strings that overlap each other and themselves.
# Left out is where the vendor's parser is not of one mind: newlines at the start of an answer after
# a stray end of reasoning, and as a stop string.
parts = st.lists(st.sampled_from(["\n", "a", "b", "é", "｜DSML｜"])).map("".join)
stop_lists = st.lists(st.text("abé", min_size=1, max_size=3), max_size=3)


@settings(deadline=None, max_examples=300)
@given(st.none() | parts, parts, stop_lists)
def test_agrees_with_the_vendors_parser(reasoning: str | None, text: str, stop: list[str]):
    said = text if reasoning is None else f"{reasoning}</think>{text}"
    token_ids = with_special_tokens(said, tiny_tokenizer())
    request = Request("Hi", effort="off" if reasoning is None else "high", stop=stop)
    _, end = run(FakeEngine(token_ids), request)
    assert (end.reasoning, end.text) == vendors_answer(token_ids, reasoning is not None, stop)


def vendors_answer(token_ids: Sequence[int], is_thinking: bool, stop: list[str]) -> tuple[str, str]:
    body = {
        "model": "DeepSeek-V4.1-Flash",
        "messages": [{"role": "user", "content": "Hi"}],
        "thinking": {"type": "enabled" if is_thinking else "disabled"},
    }
    request = recipe.ChatCompletionRequest(body).convert(recipe.ConversionOptions())
    stream = recipe.StreamProcessor(
        recipe.ChatCompletionRequest.chunk_generator(request, "id", "model"),
        recipe.ParsingOptions(
            parse_tool_calls=False,
            thinking_initial_stage=recipe.ThinkingInitialStage.ReasoningStart
            if is_thinking
            else None,
            stop_sequences=stop,
        ),
        recipe.Tokenizer.from_str(tiny_tokenizer_json()),
    )
    chunks = stream.push(recipe.InferenceChunk.ready())
    for token_id in token_ids:
        if not stream.finished:
            chunks += stream.push(recipe.InferenceChunk.tokens([token_id]))
    if not stream.finished:
        finish = recipe.InferenceChunk.finish(recipe.InferenceFinishReason.Stop)
        chunks += stream.push(finish)
    chunks += stream.finish()
    reasoning = text = ""
    for chunk in chunks:
        assert isinstance(chunk, recipe.ChatCompletionChunk)
        for choice in json.loads(chunk.to_json())["choices"]:
            reasoning += choice["delta"].get("reasoning_content") or ""
            text += choice["delta"].get("content") or ""
    return reasoning, text


def test_nothing_is_held_back_without_need():
    """What may be shown is shown at once: newlines wait only inside and after the reasoning."""
    reader = AnswerReader(tiny_tokenizer(), starts_in_reasoning=True, stop=["END"])
    shown: list[str] = []
    for token_id in with_special_tokens("a\n\nb\n</think>\nc\nEN E", tiny_tokenizer()):
        shown.append(texts(reader.push(token_id)))
    assert shown == ["a", "", "", "\n\nb", "", "", "", "c", "\n", "", "", "EN ", ""]
    assert texts(reader.finish()) == "E"


def texts(events: Iterable[AnswerEvent]) -> str:
    return "".join(e.text for e in events if isinstance(e, ReasoningDelta | TextDelta))


cut_texts = st.lists(st.text("ab", max_size=6))
stops = st.lists(st.text("ab", min_size=1, max_size=4), max_size=4)


@settings(deadline=None, max_examples=500)
@given(cut_texts, stops)
@example(["aaab"], ["aab"])  # goes on from a shorter beginning within the one that failed
@example(["aab"], ["aab", "ab"])
@example(["aab"], ["ab", "aab"])
def test_stop_strings_do_not_depend_on_the_cuts(cut_text: list[str], stop: list[str]):
    matcher = StopStrings(stop)
    text, shown = "", ""
    for piece in cut_text:
        shown += matcher.push(piece)
        text += piece
        assert shown == visible(text, stop)
    ended = any(string in text for string in stop)
    assert matcher.is_found == ended
    assert shown + matcher.finish() == (visible(text, stop) if ended else text)


def visible(text: str, stop: list[str]) -> str:
    """What can be shown of a text, by trying every prefix against every stop string."""
    for end in range(len(text) + 1):
        found = [len(string) for string in stop if text[:end].endswith(string)]
        if found:
            return text[: end - found[0]]
    beginnings = [string[:n] for string in stop for n in range(1, len(string))]
    return text[: len(text) - max((len(b) for b in beginnings if text.endswith(b)), default=0)]


def test_a_stop_string_ends_the_work():
    engine = FakeEngine("STOP</think>one STOP two")
    _, end = run(engine, Request("Hi", stop=["STOP", "three"]))
    assert (end.reasoning, end.text, end.finish_reason) == ("STOP", "one ", "stop")
    assert engine.tokens_made == len("STOP") + 1 + len("one STOP") == end.completion_tokens


@pytest.mark.parametrize("name", ["user", "system", "bos"])
def test_a_token_of_prompts_ends_the_answer_with_a_warning(
    name: str, caplog: pytest.LogCaptureFixture
):
    engine = FakeEngine(f"why</think>so S{SPELLINGS[name]}unsaid")
    with caplog.at_level(logging.WARNING):
        _, end = run(engine, Request("Hi", stop=["STOP"]))
    assert (end.text, end.finish_reason) == ("so S", "stop")
    assert engine.tokens_made == end.completion_tokens == len("why") + 1 + len("so S") + 1
    (record,) = caplog.records
    assert SPELLINGS[name] in record.message


def test_length_ends_in_reasoning_or_answer():
    _, end = run(FakeEngine("why</think>so"), Request("Hi", max_tokens=2))
    assert (end.reasoning, end.text, end.finish_reason) == ("wh", "", "length")
    _, end = run(FakeEngine("why</think>so"), Request("Hi", max_tokens=5))
    assert (end.reasoning, end.text, end.finish_reason) == ("why", "s", "length")
    _, end = run(FakeEngine("why</think>so"), Request("Hi", max_tokens=6))
    assert (end.text, end.finish_reason) == ("so", "stop")


def test_the_engine_gets_the_prompt_and_the_parameters():
    engine = FakeEngine("</think>so")
    sampling = Sampling(temperature=0.5, top_p=0.9, min_p=0.1, seed=4)
    turns = [Message("user", "Hi"), Message("assistant", "Ho"), Message("user", "Hey")]
    run(engine, Request(turns, system="Be brief.", effort="low", max_tokens=9, sampling=sampling))
    (call,) = engine.calls
    expected = encode(
        conversation([Message("system", "Be brief."), *turns], "low"), engine.tokenizer
    )
    assert call.token_ids == expected.token_ids
    assert (call.max_tokens, call.sampling) == (9, sampling)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"effort": "off"}, 8192),
        ({}, 65536),
        ({"effort": "max"}, 131072),
        ({"raw": True}, 8192),
    ],
)
def test_default_length_within_the_context(options: dict[str, Any], expected: int):
    engine = FakeEngine(context_tokens=1_000_000)
    _, end = run(engine, Request("Hi", **options))
    assert engine.calls[0].max_tokens == expected
    engine = FakeEngine(context_tokens=end.prompt_tokens + 7)
    run(engine, Request("Hi", **options))
    assert engine.calls[0].max_tokens == 7


def test_a_prompt_beyond_the_context_is_the_engines_to_refuse():
    for context_tokens in (3, 20):
        with pytest.raises(ContextTooLong):
            list(respond(FakeEngine(context_tokens=context_tokens), HI))


def test_progress_and_account():
    engine = FakeEngine("why</think>so", known_tokens=5, chunk_tokens=40)
    events, end = run(engine, HI)
    n = len(engine.calls[0].token_ids)
    assert 85 < n == end.prompt_tokens < 125
    progress = [event for event in events if isinstance(event, Progress)]
    told = [p for p in progress if p.stage == "prefill"]
    assert told == events[: len(told)]
    assert all(p.total_tokens == n for p in told)
    # Each of the six tokens is told of, also one that has no text.
    assert [(p.stage, p.done_tokens) for p in progress[len(told) :]] == [
        ("decode", i + 1) for i in range(6)
    ]
    assert [p.done_tokens for p in told] == [0, 5, 45, 85, n, n]
    assert (end.cached_tokens, end.completion_tokens) == (5, 6)
    times = [p.elapsed_s for p in told]
    assert times == sorted(times)
    last = told[-1]
    timings = end.timings
    assert last.elapsed_s - last.waited_s == pytest.approx(timings.prefill_s)
    assert timings.prefill_s > 0
    assert timings.prefill_tokens_per_s == pytest.approx((n - 5) / timings.prefill_s)
    assert timings.decode_tokens_per_s == pytest.approx(5 / timings.decode_s)


def test_the_time_that_others_have_the_engine_is_told_apart(monkeypatch: pytest.MonkeyPatch):
    now_s = 0

    def work(course: Course) -> None:
        nonlocal now_s
        now_s += 1

    monkeypatch.setattr("mlx_engine.respond.time", SimpleNamespace(perf_counter=lambda: now_s))
    engine = ScriptedEngine("why</think>so", chunk_tokens=40, before_step=work)
    events: list[Event] = []
    for event in respond(engine, HI):
        events.append(event)
        now_s += 10  # of others
    chunks = engine.courses[0].chunks_done
    *_, end = events
    assert isinstance(end, End) and chunks > 1
    assert (end.timings.prefill_s, end.timings.decode_s) == (chunks + 1, 5)
    assert end.timings.prefill_tokens_per_s == end.prompt_tokens / (chunks + 1)
    assert end.timings.decode_tokens_per_s == 1
    told = [event for event in events if isinstance(event, Progress) and event.stage == "prefill"]
    assert [p.elapsed_s - p.waited_s for p in told] == [0, *range(chunks + 2)]
    assert [p.waited_s for p in told] == [10 * i for i in range(len(told))]


def test_an_empty_answer_has_no_rates_to_divide_by():
    _, end = run(FakeEngine(""))
    assert (end.completion_tokens, end.timings.decode_tokens_per_s) == (0, 0.0)


def test_cancelled_while_answering():
    said: list[int] = []
    engine = FakeEngine("why\n</think>so it goes", before_token=said.append)
    _, end = run(engine, Request("Hi", stop=["it is"]), cancelled=lambda: len(said) == 10)
    assert (end.reasoning, end.text, end.finish_reason) == ("why", "so it", "cancelled")
    assert engine.tokens_made == end.completion_tokens == 10


@pytest.mark.parametrize("n_chunks", [0, 1, 2, 4])
def test_cancelled_during_the_prefill(n_chunks: int):
    told: list[Event] = []
    engine = FakeEngine("so", known_tokens=5, chunk_tokens=10)
    # One tells of the start, another of what is known already.
    for event in respond(engine, HI, cancelled=lambda: len(told) == 2 + n_chunks):
        told.append(event)
    *told, end = told
    assert isinstance(end, End) and engine.is_closed
    assert (end.text, end.finish_reason, end.completion_tokens) == ("", "cancelled", 0)
    assert len(told) == 2 + n_chunks
    # The rest of the prompt was never computed.
    computed_tokens = 10 * n_chunks
    timings = end.timings
    assert timings.prefill_tokens_per_s == pytest.approx(computed_tokens / timings.prefill_s)
    assert (timings.decode_s, timings.decode_tokens_per_s) == (0, 0)


def test_the_table_rows_of_an_answer_are_its_own():
    engine = FakeEngine("</think>so")
    for _ in range(2):
        _, end = run(engine, HI)
        assert end.engram == EngramStats(*(3 * n for n in astuple(ROWS_A_TOKEN)))


def test_closing_the_iterator_closes_the_engines():
    engine = FakeEngine("why</think>so")
    events = respond(engine, HI)
    while not isinstance(next(events), ReasoningDelta):
        pass
    assert not engine.is_closed
    events.close()
    assert engine.is_closed
    assert engine.tokens_made == 1


def test_every_token_is_decoded_once(monkeypatch: pytest.MonkeyPatch):
    decoded: list[int] = []
    token_bytes = Tokenizer.token_bytes

    def counted(tokenizer: Tokenizer, token_id: int) -> bytes:
        decoded.append(token_id)
        return token_bytes(tokenizer, token_id)

    monkeypatch.setattr(Tokenizer, "token_bytes", counted)
    said = "\n" * 50 + "why" * 50 + "\n" * 50
    run(FakeEngine(said), Request("Hi", stop=["whale"]))
    assert len(decoded) == len(said)


def asked_again(engine: FakeEngine, end: End, **request: Any) -> tuple[list[int], list[int]]:
    """The tokens of an answer, and those of its turn in the next prompt."""
    messages = [Message("user", "Hi"), Message("assistant", end.text), Message("user", "and?")]
    prompt = Request(messages, **request).encode(engine.tokenizer, engine.turns)
    token_ids = list(prompt.token_ids)
    n = len(engine.calls[0].token_ids)
    return engine.said, token_ids[n : token_ids.index(engine.tokenizer.special.eos)]


EOS, IMAGE = SPELLINGS["eos"], SPELLINGS["image"]
STRAY = "ab</think>c"  # says "abc", and in more tokens than that


@pytest.mark.parametrize(
    ("said", "options", "is_kept"),
    [
        (STRAY + EOS, {}, True),
        (STRAY, {}, True),
        (EOS, {}, True),
        (STRAY + "def", {"max_tokens": 7}, True),
        (STRAY + "def", {"stop": ["de"]}, False),
        (STRAY + "<｜User｜>", {}, False),
        (STRAY + IMAGE, {}, False),
    ],
)
def test_an_answer_returns_with_its_own_tokens(said: str, options: dict[str, Any], is_kept: bool):
    engine = FakeEngine(said)
    _, end = run(engine, Request("Hi", effort="off", **options))
    sampled, returned = asked_again(engine, end, effort="off")
    rendered = engine.tokenizer.encode_text(end.text)
    assert returned == (sampled if is_kept else rendered)
    assert (sampled == rendered) == (not end.text)


@pytest.mark.parametrize(
    ("said", "options", "is_kept"),
    [
        ("why</think>" + STRAY, {}, True),
        ("why</think>" + STRAY, {"max_tokens": 5}, True),
        ("why</think>" + STRAY, {"max_tokens": 4}, True),
        ("why</think>" + STRAY, {"max_tokens": 3}, False),
        ("why</think>so<think>not", {"max_tokens": 8}, False),
        ("why</think>so<think>not", {}, True),
        ("why", {}, True),
    ],
)
def test_an_answer_cut_within_its_reasoning_is_not_kept(
    said: str, options: dict[str, Any], is_kept: bool
):
    engine = FakeEngine(said)
    run(engine, Request("Hi", **options))
    assert (engine.turns.n_bytes > 0) == is_kept


def test_an_answer_is_kept_with_its_reasoning():
    engine = FakeEngine("why</think>so")
    run(engine)
    prefix = HI.encode(engine.tokenizer).turn_prefix
    for reasoning, is_same in (("why", True), ("", True), ("why not", False)):
        assert (engine.turns.find(prefix, Shown("so", reasoning)) is not None) == is_same


def test_a_raw_text_has_no_turns():
    engine = FakeEngine("more")
    run(engine, Request("Once ", raw=True))
    assert engine.turns.n_bytes == 0


def test_what_was_said_before_a_cancellation_is_kept():
    said: list[int] = []
    engine = FakeEngine(STRAY + "def", before_token=said.append)
    _, end = run(engine, Request("Hi", effort="off"), cancelled=lambda: len(said) == 4)
    assert (end.text, end.finish_reason) == ("abc", "cancelled")
    sampled, returned = asked_again(engine, end, effort="off")
    assert returned == sampled[:4]
    quiet = FakeEngine(STRAY)
    list(respond(quiet, Request("Hi", effort="off"), cancelled=lambda: True))
    assert quiet.turns.n_bytes == 0


def test_the_engine_is_told_where_later_prompts_may_depart():
    engine = FakeEngine("so")
    request = Request([Message("user", "Hi"), Message("assistant", "Ho"), Message("user", "x")])
    run(engine, request)
    (call,) = engine.calls
    assert call.anchors == request.encode(engine.tokenizer).anchors
    assert len(call.anchors) == 4


def test_a_signature_finds_its_turn_anywhere():
    engine = FakeEngine()
    special = engine.tokenizer.special
    engine.turns.put(b"", Shown("so", signature="s1"), [7, 7], starts_in_reasoning=False)
    for signature, is_known in (("s1", True), ("s2", False), ("", False)):
        told = Message("assistant", "so", signature=signature)
        request = Request([Message("user", "Hi"), told, Message("user", "and?")], effort="off")
        token_ids = request.encode(engine.tokenizer, engine.turns).token_ids
        first = token_ids.index(special.assistant) + 2
        assert (token_ids[first : first + 3] == (7, 7, special.eos)) == is_known


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": " \n"}, "the prompt is empty"),
        ({"prompt": "", "raw": True}, "the prompt is empty"),
        ({"prompt": []}, "must end with a message of the user"),
        ({"prompt": "a\udcff"}, "not valid Unicode at character 1"),
        ({"prompt": "Hi", "system": "\ud800"}, "not valid Unicode at character 0"),
        ({"prompt": "Hi", "max_tokens": 0}, "max_tokens is 0, it must be at least 1"),
        ({"prompt": "Hi", "stop": ["a", ""]}, "a stop string is empty"),
        ({"prompt": "Hi", "stop": "ab"}, "stop is one string, it must be a list"),
        ({"prompt": "Hi", "effort": "ultra"}, "effort is 'ultra'"),
        ({"prompt": "Hi", "raw": True, "system": "x"}, "leave out system and messages"),
        ({"prompt": [Message("user", "x")], "raw": True}, "leave out system and messages"),
    ],
)
def test_impossible_requests_are_refused(values: dict[str, Any], sentence: str):
    with pytest.raises(BadRequest, match=sentence):
        Request(**values)


def test_scores_are_told_where_they_are_asked_for():
    tokenizer = tiny_tokenizer()
    for logprobs in (None, 0, 2):
        engine = FakeEngine("why</think>so")
        events, _ = run(engine, Request("Hi", logprobs=logprobs))
        deltas = [event for event in events if isinstance(event, ReasoningDelta | TextDelta)]
        found = [scored for delta in deltas for scored in delta.logprobs]
        if logprobs is None:
            assert found == []
            continue
        assert b"".join(scored.token for scored in found) == b"whyso"
        first = found[0]
        assert first.logprob == -0.5 and len(first.top) == logprobs
        expected = [tokenizer.spelling(engine.said[0] + i) for i in range(logprobs)]
        assert [token for token, _ in first.top] == expected
    with pytest.raises(BadRequest, match="from 0 to 20"):
        Request("Hi", logprobs=21)


def test_where_a_prompt_parts_from_an_earlier_one_is_logged_without_its_text(
    caplog: pytest.LogCaptureFixture,
):
    caplog.set_level(logging.INFO, logger="mlx_engine.respond")
    messages = [
        Message("system", "s" * 300),
        Message("user", "ask"),
        Message("assistant", "answer"),
        Message("user", "secret"),
    ]
    request = Request(messages, effort="off")
    prompt = request.encode(tiny_tokenizer())
    roles = [role for _, role in prompt.turns]
    assert roles == ["system", "user", "assistant", "user", "assistant"]

    class Parting(FakeEngine):
        def __init__(self, parted_at: int | None) -> None:
            super().__init__("so")
            self._parted_at = parted_at

        def generate(self, *args: Any, **options: Any) -> Any:
            for step in super().generate(*args, **options):
                if isinstance(step, Prefilled) and step.done_tokens == 0:
                    yield Prefilled(0, step.total_tokens, self._parted_at)
                else:
                    yield step

    in_user_turn = prompt.turns[3][0] + 2
    for parted_at in (None, 40, in_user_turn):
        caplog.clear()
        run_all(Parting(parted_at), request)
        told = [record.getMessage() for record in caplog.records]
        if parted_at != in_user_turn:
            assert told == []
            continue
        assert told == [
            f"a prompt of {len(prompt.token_ids)} tokens parts from an earlier one at token "
            f"{in_user_turn}, turn 4 (user): 0 are known"
        ]


def run_all(engine: FakeEngine, request: Request) -> None:
    for _ in respond(engine, request):
        pass


def test_a_prompt_that_cannot_fit_is_refused_before_it_is_encoded():
    engine = FakeEngine(context_tokens=1000)
    with pytest.raises(ContextTooLong, match="at least"):
        run_all(engine, Request("x" * 20_000))
    assert not engine.calls


def test_an_encoding_that_is_cancelled_ends_the_answer():
    engine = FakeEngine("so")
    (end,) = respond(engine, HI, cancelled=lambda: True)
    assert isinstance(end, End) and end.finish_reason == "cancelled"
    assert not engine.calls
