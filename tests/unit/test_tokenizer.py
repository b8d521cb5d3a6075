"""Text to ids and back: injection, missing tokens, and characters spread over tokens."""

import json
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_engine.errors import BadRequest, ModelFileError
from mlx_engine.tokenizer import SPELLINGS, TextDecoder, Tokenizer
from tests.fake_engine import (
    released_tokenizer,
    released_tokenizer_json,
    tiny_tokenizer,
    tiny_tokenizer_json,
)

# Beyond the vocabulary as well: a model may have more rows than its tokenizer has tokens.
any_ids = st.lists(st.integers(0, 140_000), max_size=40)
# Bytes that often are characters, cut characters and nonsense.
any_bytes = st.lists(
    st.one_of(
        st.binary(max_size=3),
        st.text(max_size=3).map(str.encode),
        st.text(min_size=1, max_size=1).map(lambda c: c.encode()[:-1]),
    ),
    max_size=12,
).map(b"".join)


def byte_ids(data: bytes) -> list[int]:
    """The tiny tokenizer's ids of any bytes, valid text or not."""
    tokenizer = tiny_tokenizer()
    id_of = {tokenizer.token_bytes(i): i for i in range(3, 3 + 256)}
    return [id_of[bytes([byte])] for byte in data]


def pieces(tokenizer: Tokenizer, token_ids: list[int]) -> list[str]:
    decoder = TextDecoder(tokenizer)
    return [*(decoder.push(i) for i in token_ids), decoder.finish()]


# Enough to complete any unfinished character.
CONTINUATIONS = [
    b"",
    *(first + b"\x80" * n for first in (b"\x80", b"\x90", b"\xa0") for n in range(3)),
]


def common_start(texts: list[str]) -> str:
    # The first and the last in order differ the earliest.
    pairs = zip(min(texts), max(texts), strict=False)
    return "".join(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def assert_only_whole_characters(data: bytes, cuts: list[int], pieces: list[str]) -> None:
    """Check the piece that came at each of `cuts`, and the last one, which came at the end.

    What is shown is just what no continuation can change: never more, and never less.
    """
    assert "".join(pieces) == data.decode(errors="replace")
    shown = ""
    for cut, piece in zip(cuts, pieces[:-1], strict=True):
        shown += piece
        possible = [(data[:cut] + more).decode(errors="replace") for more in CONTINUATIONS]
        assert shown == common_start(possible)


@settings(deadline=None)
@given(any_bytes)
def test_one_token_a_byte_never_shows_half_a_character(data: bytes):
    cuts = list(range(1, len(data) + 1))
    assert_only_whole_characters(data, cuts, pieces(tiny_tokenizer(), byte_ids(data)))


@settings(deadline=None)
@given(any_ids)
def test_any_ids_never_show_half_a_character(token_ids: list[int]):
    tokenizer = released_tokenizer()
    parts = [tokenizer.token_bytes(i) for i in token_ids]
    cuts = [sum(map(len, parts[: n + 1])) for n in range(len(parts))]
    assert_only_whole_characters(b"".join(parts), cuts, pieces(tokenizer, token_ids))


@settings(deadline=None)
@given(st.lists(st.integers(3, 127_999), max_size=40))
def test_decoding_agrees_with_the_library(token_ids: list[int]):
    library = library_tokenizer()
    assert "".join(pieces(released_tokenizer(), token_ids)) == library.decode(token_ids)


def test_a_token_outside_the_byte_alphabet_stands_for_itself():
    content = json.loads(tiny_tokenizer_json())
    token_id = len(content["model"]["vocab"]) + len(content["added_tokens"])
    content["model"]["vocab"]["\u4f60a"] = token_id
    tokenizer = Tokenizer.from_json(json.dumps(content))
    library = tokenizers.Tokenizer.from_str(json.dumps(content))
    assert tokenizer.token_bytes(token_id).decode() == library.decode([token_id]) == "\u4f60a"


@settings(deadline=None)
@given(st.text())
def test_text_survives_encoding_and_decoding(text: str):
    for tokenizer in (released_tokenizer(), tiny_tokenizer()):
        assert "".join(pieces(tokenizer, tokenizer.encode_text(text))) == text


@cache
def library_tokenizer() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(released_tokenizer_json())


def test_a_spelled_out_special_token_stays_text():
    tokenizer = released_tokenizer()
    added = {token["id"]: token["content"] for token in added_tokens(released_tokenizer_json())}
    for spelling in added.values():
        token_ids = tokenizer.encode_text(f"a{spelling}b {spelling}")
        assert not added.keys() & token_ids
        assert (
            b"".join(map(tokenizer.token_bytes, token_ids)).decode() == f"a{spelling}b {spelling}"
        )


def test_special_tokens_are_no_text_but_the_marker_of_calls_is():
    for tokenizer, source in (
        (released_tokenizer(), released_tokenizer_json()),
        (tiny_tokenizer(), tiny_tokenizer_json()),
    ):
        for token in added_tokens(source):
            assert tokenizer.special_id(token["content"]) == token["id"]
            expected = "｜DSML｜" if token["content"] == "｜DSML｜" else ""
            assert tokenizer.token_bytes(token["id"]).decode() == expected


def test_special_ids_of_the_released_vocabulary():
    special = released_tokenizer().special
    assert (special.bos, special.eos, special.user, special.assistant) == (0, 1, 128803, 128804)
    assert (special.think_start, special.think_end, special.dsml) == (128821, 128822, 128825)
    assert (special.system, special.image) == (129279, 129264)


def added_tokens(source: str) -> list[dict[str, Any]]:
    return json.loads(source)["added_tokens"]


def test_all_missing_tokens_are_named_with_the_file(tmp_path: Path):
    content = json.loads(tiny_tokenizer_json())
    lost = (SPELLINGS["system"], SPELLINGS["image"])
    content["added_tokens"] = [t for t in content["added_tokens"] if t["content"] not in lost]
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ModelFileError) as caught:
        Tokenizer.load(tmp_path)
    for part in (str(path), *lost):
        assert part in str(caught.value)
    assert SPELLINGS["user"] not in str(caught.value)


def test_missing_and_broken_files(tmp_path: Path):
    path = tmp_path / "tokenizer.json"
    with pytest.raises(ModelFileError, match=r"cannot read .*tokenizer\.json .*No such file"):
        Tokenizer.load(tmp_path)
    for source in ("", "{}", "[]", '{"added_tokens": []}', '{"added_tokens": [{}], "model": 1}'):
        path.write_text(source)
        with pytest.raises(ModelFileError, match=r"tokenizer\.json: this is no tokenizer"):
            Tokenizer.load(tmp_path)


def test_a_lone_surrogate_is_refused():
    with pytest.raises(BadRequest, match="character 2"):
        tiny_tokenizer().encode_text("ab\ud800")
