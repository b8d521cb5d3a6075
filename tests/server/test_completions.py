"""OpenAI's Completions: a text goes on, whole and streamed."""

from typing import Any

import pytest

from mlx_engine.sampling import Sampling
from mlx_engine.server.completions import PATH, read
from tests.server.openai_events import answering, ok, refused, streamed

Object = dict[str, Any]


def body(**fields: Any) -> Object:
    return {"model": "any", "prompt": "Once "} | fields


@pytest.mark.parametrize(
    ("said", "fields", "text", "finish_reason"),
    [
        ("upon", {}, "upon", "stop"),
        ("\nupon", {"prompt": ["Once"]}, "\nupon", "stop"),
        ("upon", {"echo": True}, "Once upon", "stop"),
        ("upon a time, long ago", {}, "upon a time, lon", "length"),
        ("upon a time", {"max_tokens": 4}, "upon", "length"),
        ("upon a time", {"stop": " a", "max_tokens": None}, "upon", "stop"),
    ],
)
def test_a_text_goes_on(said: str, fields: Object, text: str, finish_reason: str):
    with answering(said) as server:
        answer = ok(server, PATH, body(**fields))
        (choice,) = answer["choices"]
        assert (choice["text"], choice["finish_reason"]) == (text, finish_reason)
        assert (answer["object"], answer["model"]) == ("text_completion", "ds41")
        chunks = streamed(server, PATH, body(**fields, stream_options={"include_usage": True}))
        *parts, last = chunks
        assert "".join(chunk["choices"][0]["text"] for chunk in parts) == text
        reasons = [chunk["choices"][0]["finish_reason"] for chunk in parts]
        assert reasons == [None] * (len(parts) - 1) + [finish_reason]
        assert last["usage"]["total_tokens"] == answer["usage"]["total_tokens"]
        tokenizer = server.engine.tokenizer
        assert server.engine.courses[0].call.token_ids[0] == tokenizer.special.bos


def test_what_a_body_says_reaches_the_engine():
    request = read(body(temperature=0, top_p=0.5, seed=3, stop=["a"]))
    assert request.sampling == Sampling(0, 0.5, 0, 3)
    assert (request.raw, request.max_tokens, request.stop) == (True, 16, ["a"])


def test_the_answer_fits_into_the_context():
    with answering("x" * 99, context_tokens=20) as server:
        answer = ok(server, PATH, body(max_tokens=99))
        assert answer["usage"]["total_tokens"] == 20
        error = refused(server, PATH, body(prompt="x" * 20))
        assert error["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"prompt": None}, "prompt: it is one text"),
        ({"prompt": [1, 2]}, "prompt: it is one text"),
        ({"prompt": ["a", "b"]}, "prompt: it is one text"),
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": None, "echo": True}, "prompt: it is one text"),
        ({"suffix": "x"}, "suffix: it is not supported"),
        ({"best_of": 3}, "best_of: one answer"),
        ({"echo": "yes"}, "echo: it is true or false"),
        ({"max_tokens": 0}, "max_tokens is 0"),
    ],
)
def test_what_cannot_be_answered_is_refused_by_name(changed: Object, sentence: str):
    with answering("so") as server:
        assert sentence in refused(server, PATH, body(**changed))["message"]
