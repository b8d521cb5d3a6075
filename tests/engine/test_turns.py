"""Conversations on the tiny model, whose answers no tokenizer would cut as they were sampled."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from mlx_engine import End, Engine, Request, Sampling, open_model
from mlx_engine.diskcache.cache import DiskCache
from mlx_engine.fingerprint import fingerprint
from mlx_engine.prompt import Effort, Message
from mlx_engine.saving import LEAST_TOKENS
from mlx_engine.state_transfer import parts
from tests.engine.timelines import tokens_of

ASKED = ("Tell me of the sea, and of all that lives in it.", "Go on.", "And then?")
N_TOKENS = 24


def ask(engine: Engine, messages: Sequence[Message], effort: Effort) -> End:
    request = Request(messages, effort=effort, max_tokens=N_TOKENS, sampling=Sampling(seed=1))
    *_, end = engine.respond(request)
    assert isinstance(end, End)
    return end


def greedy(engine: Engine, token_ids: Sequence[int]) -> list[int]:
    return tokens_of(engine.generate(token_ids, max_tokens=12, temperature=0, ignore_eos=True))


def converse(engine: Engine, effort: Effort) -> tuple[list[Message], list[End]]:
    messages: list[Message] = []
    ends: list[End] = []
    for asked in ASKED:
        messages.append(Message("user", asked))
        ends.append(ask(engine, messages, effort))
        messages.append(Message("assistant", ends[-1].text.strip()))
    return messages, ends


def test_a_conversation_computes_only_what_is_new(checkpoint: Path) -> None:
    with open_model(checkpoint, context_tokens=1024).load("float32") as engine:
        messages, ends = converse(engine, "off")
        for before, end in pairwise(ends):
            # All of the answer, but for a last token that nothing followed, not even the EOS.
            answered = before.completion_tokens - (before.finish_reason == "length")
            assert end.cached_tokens == before.prompt_tokens + answered
        prompt = Request(messages[:-1], effort="off").encode(engine.tokenizer, engine.turns)
        rendered = Request(messages[:-1], effort="off").encode(engine.tokenizer)
        assert prompt.token_ids != rendered.token_ids


def test_dropped_reasoning_costs_only_the_answer(checkpoint: Path) -> None:
    with open_model(checkpoint, context_tokens=1024).load("float32") as engine:
        _, ends = converse(engine, "high")
        for before, end in pairwise(ends):
            # The header's second token tells the two prompts apart.
            assert end.cached_tokens in (before.prompt_tokens - 1, before.prompt_tokens - 2)


@pytest.mark.parametrize("effort", ["off", "high"])
def test_a_conversation_goes_on_after_a_restart(
    checkpoint: Path, tmp_path: Path, effort: Effort
) -> None:
    opened = open_model(checkpoint, context_tokens=1024)

    def cache() -> DiskCache:
        return DiskCache.open(
            tmp_path / "kv",
            fingerprint=fingerprint(opened.checkpoint, "float32", None),
            parts=parts(opened.config),
            free_floor_bytes=0,
        )

    disk = cache()
    with opened.load("float32", disk_cache=disk) as engine:
        messages, ends = converse(engine, effort)
        messages.append(Message("user", "Is that all?"))
        request = Request(messages, effort=effort)
        expected = request.encode(engine.tokenizer, engine.turns)
        tokens = greedy(engine, expected.token_ids)
    disk.close()
    disk = cache()
    with opened.load("float32", disk_cache=disk) as engine:
        assert request.encode(engine.tokenizer, engine.turns) == expected
        end = ask(engine, messages, effort)
        assert greedy(engine, expected.token_ids) == tokens
        # What is stored lies at least so far apart.
        assert end.cached_tokens > max(0, ends[-1].prompt_tokens - LEAST_TOKENS)
    disk.close()
