"""Text to ids and back: injection, missing tokens, and characters spread over tokens."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_engine.config_file import parse_config
from mlx_engine.errors import BadRequest, ModelFileError
from mlx_engine.tiny import tiny_config
from mlx_engine.tiny_tokenizer import MIN_VOCAB_SIZE
from mlx_engine.tokenizer import SPELLINGS, TextDecoder, Tokenizer
from tests.fake_engine import (
    released_tokenizer,
    released_tokenizer_json,
    tiny_tokenizer,
    tiny_tokenizer_json,
)

# The tiny configuration, with the vocabulary of `tiny_tokenizer`.
CONFIG = replace(parse_config(tiny_config()), vocab_size=MIN_VOCAB_SIZE)

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


def without(*spellings: str) -> str:
    """The tiny tokenizer's file without some of its added tokens."""
    content = json.loads(tiny_tokenizer_json())
    content["added_tokens"] = [t for t in content["added_tokens"] if t["content"] not in spellings]
    return json.dumps(content)


def test_all_missing_tokens_are_named_with_the_file(tmp_path: Path):
    lost = (SPELLINGS["system"], SPELLINGS["think_end"])
    path = tmp_path / "tokenizer.json"
    path.write_text(without(*lost, SPELLINGS["image"]))
    with pytest.raises(ModelFileError) as caught:
        Tokenizer.load(tmp_path, CONFIG)
    for part in (str(path), *lost):
        assert part in str(caught.value)
    for spelling in (SPELLINGS["user"], SPELLINGS["image"]):
        assert spelling not in str(caught.value)


def test_text_does_not_need_an_image_token(tmp_path: Path):
    (tmp_path / "tokenizer.json").write_text(without(SPELLINGS["image"]))
    tokenizer = Tokenizer.load(tmp_path, replace(CONFIG, vocab_size=MIN_VOCAB_SIZE - 1))
    assert tokenizer.special.image is None
    assert replace(tokenizer.special, image=tiny_tokenizer().special.image) == (
        tiny_tokenizer().special
    )


def test_a_tokenizer_of_another_configuration_is_refused(tmp_path: Path):
    path = tmp_path / "tokenizer.json"
    path.write_text(tiny_tokenizer_json())
    tokenizer = Tokenizer.load(tmp_path, CONFIG)
    assert tokenizer.n_ids == CONFIG.vocab_size
    # Fewer rows than ids are a vocabulary with a margin.
    Tokenizer.load(tmp_path, replace(CONFIG, vocab_size=CONFIG.vocab_size - 1))
    for changes, said in (
        ({"bos_token_id": 7}, f"{SPELLINGS['bos']} has the id 0, but .* bos_token_id is 7: fetch"),
        ({"eos_token_id": 7}, f"{SPELLINGS['eos']} has the id 1, but .* eos_token_id is 7: fetch"),
        ({"image_token_id": 7}, f"{SPELLINGS['image']} has .* image_token_id is 7: fetch"),
        ({"vocab_size": MIN_VOCAB_SIZE + 1}, "has 274 ids, but .* vocab_size is 275: fetch"),
    ):
        with pytest.raises(ModelFileError, match=f"{path}: .*{said}"):
            Tokenizer.load(tmp_path, replace(CONFIG, **changes))


@pytest.mark.parametrize("make_json", [released_tokenizer_json, tiny_tokenizer_json])
def test_ids_are_counted_as_the_library_does(make_json: Callable[[], str]):
    library = tokenizers.Tokenizer.from_str(make_json())
    n_ids = library.get_vocab_size(with_added_tokens=True)
    assert Tokenizer.from_json(make_json()).n_ids == n_ids


def test_missing_and_broken_files(tmp_path: Path):
    path = tmp_path / "tokenizer.json"
    with pytest.raises(ModelFileError, match=r"tokenizer\.json is missing: fetch"):
        Tokenizer.load(tmp_path, CONFIG)
    for source in ("", "{}", "[]", '{"added_tokens": []}', '{"added_tokens": [{}], "model": 1}'):
        path.write_text(source)
        with pytest.raises(ModelFileError, match=r"tokenizer\.json: this is no tokenizer"):
            Tokenizer.load(tmp_path, CONFIG)


def test_a_lone_surrogate_is_refused():
    with pytest.raises(BadRequest, match="character 2"):
        tiny_tokenizer().encode_text("ab\ud800")


def test_a_tokenizer_file_of_noise_is_not_shown_in_full() -> None:
    with pytest.raises(ModelFileError, match="no tokenizer") as caught:
        Tokenizer.from_json(b"\xff\xfe" * 100_000)
    assert len(str(caught.value)) < 400
