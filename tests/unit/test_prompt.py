"""Prompts: the format's golden texts, ids as the vendor's encoder gives them, and injection."""

import gc
import weakref
from collections.abc import Callable
from functools import cache

import deepseek_recipe as recipe
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_engine import prompt as chat
from mlx_engine.errors import BadRequest, Cancelled, ModelFileError
from mlx_engine.prompt import (
    EFFORTS,
    Bounds,
    Effort,
    Message,
    TooManyTokens,
    conversation,
    encode,
    encode_raw,
    render,
)
from mlx_engine.tokenizer import SPELLINGS, Tokenizer, parts
from tests.fake_engine import (
    released_tokenizer,
    released_tokenizer_json,
    tiny_tokenizer,
    tiny_tokenizer_json,
    with_special_tokens,
)

BOS, EOS = SPELLINGS["bos"], SPELLINGS["eos"]
EFFORT_LINE = (
    "<｜System｜>Reasoning Effort: {} (range 1-100, the higher the value, "
    "the more thorough the reasoning)\n\n"
)
EFFORT_NUMBERS: dict[Effort, int] = {"low": 50, "high": 75, "max": 100}
TURNS = [
    Message("user", "1 + 1?"),
    Message("assistant", "2"),
    Message("system", "Be brief."),
    Message("user", "and 2 + 2?"),
    Message("user", "quick!"),
]
# What deepseek-recipe 0.2.0 wrote, without the BOS; the package may not change it under us.
GOLDEN: list[tuple[Effort, list[Message], str]] = [
    ("off", [Message("user", "Hi")], "<｜User｜>Hi<｜Assistant｜></think>"),
    (
        "off",
        [Message("system", "Be brief."), Message("user", "Hi")],
        "<｜System｜>Be brief.<｜User｜>Hi<｜Assistant｜></think>",
    ),
    (
        "off",
        TURNS,
        f"<｜User｜>1 + 1?<｜Assistant｜></think>2{EOS}<｜System｜>Be brief."
        "<｜User｜>and 2 + 2?\n\nquick!<｜Assistant｜></think>",
    ),
]
for _effort, _number in EFFORT_NUMBERS.items():
    _head = EFFORT_LINE.format(_number)
    GOLDEN.append((_effort, [Message("user", "Hi")], f"{_head}<｜User｜>Hi<｜Assistant｜><think>"))
    GOLDEN.append(
        (
            _effort,
            [Message("system", "Be brief."), Message("user", "Hi")],
            f"{_head}Be brief.<｜User｜>Hi<｜Assistant｜><think>",
        )
    )
    GOLDEN.append(
        (
            _effort,
            TURNS,
            f"{_head}<｜User｜>1 + 1?<｜Assistant｜></think>2{EOS}<｜System｜>Be brief."
            "<｜User｜>and 2 + 2?\n\nquick!<｜Assistant｜><think>",
        )
    )

message_texts = st.lists(
    st.one_of(st.text(max_size=8), st.sampled_from(sorted(SPELLINGS.values()))), max_size=5
).map("".join)
conversations = st.tuples(
    st.lists(
        st.builds(Message, st.sampled_from(["system", "user", "assistant"]), message_texts),
        max_size=4,
    ),
    message_texts,
).map(lambda drawn: [*drawn[0], Message("user", drawn[1])])


def text_of(pieces: list[chat.Piece]) -> str:
    return "".join(piece.text for piece in pieces)


@pytest.mark.parametrize(("effort", "messages", "expected"), GOLDEN)
def test_golden_prompts(effort: Effort, messages: list[Message], expected: str):
    conversation = chat.conversation(messages, effort)
    assert text_of(chat.render(conversation)) == BOS + expected
    for tokenizer in (released_tokenizer(), tiny_tokenizer()):
        prompt = chat.encode(conversation, tokenizer)
        assert list(prompt.token_ids) == with_special_tokens(BOS + expected, tokenizer)
        assert prompt.starts_in_reasoning == (effort != "off")


def test_reasoning_stands_where_the_format_keeps_it():
    """After the last message of the user, which only a turn that goes on can show."""
    messages = [Message("user", "Hi"), Message("assistant", "so", "why")]
    went_on = recipe.Conversation(
        [*chat.conversation([*messages, Message("user", "")]).messages[:2]], tools=None
    )
    assert "<think>" not in text_of(chat.render(went_on)).split("so")[0]
    tools = [recipe.ToolDefinition("f", "", {})]
    kept = recipe.Conversation(went_on.messages, tools=tools)
    assert "<think>why</think>so" in text_of(chat.render(kept))


@settings(deadline=None)
@given(conversations, st.sampled_from(EFFORTS))
def test_ids_are_those_of_the_vendors_encoder(messages: list[Message], effort: Effort):
    conversation = chat.conversation(messages, effort)
    for tokenizer, source in (
        (released_tokenizer(), released_tokenizer_json()),
        (tiny_tokenizer(), tiny_tokenizer_json()),
    ):
        expected = vendors_encoding(source).encode(conversation)
        assert list(chat.encode(conversation, tokenizer).token_ids) == expected


@cache
def vendors_encoding(source: str) -> recipe.DeepseekV41Encoding:
    special_tokens = recipe.SpecialTokens(image=SPELLINGS["image"])
    encoding = recipe.DeepseekV41Encoding().with_special_tokens(special_tokens)
    return encoding.with_tokenizer(recipe.Tokenizer.from_str(source))


@pytest.mark.parametrize("spelling", SPELLINGS.values())
@pytest.mark.parametrize("make_tokenizer", [released_tokenizer, tiny_tokenizer])
def test_special_tokens_in_a_message_stay_text(
    make_tokenizer: Callable[[], Tokenizer], spelling: str
):
    tokenizer = make_tokenizer()
    added = {i for i in range(130_000) if not tokenizer.token_bytes(i)} | {tokenizer.special.dsml}

    def special_ids(text: str) -> list[int]:
        messages = [
            Message("system", text),
            Message("user", text),
            Message("assistant", text),
            Message("user", text),
        ]
        prompt = chat.encode(chat.conversation(messages), tokenizer)
        assert prompt.starts_in_reasoning
        return [i for i in prompt.token_ids if i in added]

    assert special_ids(f"say {spelling} now") == special_ids("say it now")
    assert special_ids(spelling) == special_ids("it")
    raw = chat.encode_raw(spelling, tokenizer)
    assert raw.token_ids == (tokenizer.special.bos, *tokenizer.encode_text(spelling))
    assert not raw.starts_in_reasoning


def test_a_conversation_that_asks_nothing_is_refused():
    for messages in ([], [Message("user", "Hi"), Message("assistant", "Ho")]):
        with pytest.raises(BadRequest, match="must end with a message of the user"):
            chat.conversation(messages)


def test_wrong_values_are_refused():
    with pytest.raises(BadRequest, match="effort is 'ultra', it must be one of off, low"):
        chat.conversation([Message("user", "Hi")], "ultra")  # pyright: ignore[reportArgumentType]
    with pytest.raises(BadRequest, match="role is 'tool', it must be one of system"):
        Message("tool", "Hi")  # pyright: ignore[reportArgumentType]
    for reasoning in ("", "a\udc80"):
        with pytest.raises(BadRequest, match="not valid Unicode at character 1"):
            Message("assistant", "" if reasoning else "a\udc80", reasoning)


def test_an_image_of_the_vendors_conversation_becomes_the_image_token():
    spelling, image = SPELLINGS["image"], recipe.BytesImageSource(b"")
    text = f"{spelling} and {spelling}"
    for images, expected in (([], 0), ([image], 1), ([image, image], 2)):
        message = recipe.UserMessage(text, images, image_token=spelling)
        prompt = chat.encode(recipe.Conversation([message]), tiny_tokenizer())
        assert prompt.token_ids.count(tiny_tokenizer().special.image) == expected


def test_a_token_that_the_tokenizer_lacks_is_named():
    lacking = Tokenizer.from_json(tiny_tokenizer_json().replace("latest_reminder", "other"))
    conversation = recipe.Conversation([recipe.LatestReminderMessage("x")])
    with pytest.raises(ModelFileError, match="lacks the special token <｜latest_reminder｜>"):
        chat.encode(conversation, lacking)


def test_a_grown_conversation_costs_what_is_new(monkeypatch: pytest.MonkeyPatch):
    encoded: list[str] = []
    tokenizer = Tokenizer.from_json(tiny_tokenizer_json())
    encode_text = tokenizer.encode_text

    def counted(text: str) -> list[int]:
        encoded.append(text)
        return encode_text(text)

    monkeypatch.setattr(tokenizer, "encode_text", counted)
    asked = chat.conversation([Message("user", "1 + 1?")], "off")
    prompt = chat.encode(asked, tokenizer)
    assert chat.encode(asked, tokenizer) == prompt
    chat.encode(chat.conversation(TURNS, "off"), tokenizer)
    assert encoded == ["1 + 1?", "2", "Be brief.", "and 2 + 2?\n\nquick!"]


def test_what_was_encoded_is_kept_within_a_bound(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(chat, "_MEMO_BYTES", 20_000)
    encoded: list[str] = []
    tokenizer = Tokenizer.from_json(tiny_tokenizer_json())
    encode_text = tokenizer.encode_text

    def counted(text: str) -> list[int]:
        encoded.append(text[:1])
        return encode_text(text)

    monkeypatch.setattr(tokenizer, "encode_text", counted)
    # Each takes a fourth of the bound and more: a byte a character, and four a token.
    for first in "abcadbx":
        chat.encode(chat.conversation([Message("user", first * 1000)], "off"), tokenizer)
    assert encoded == list("abcdbx")
    chat.encode(chat.conversation([Message("user", "y" * 10_000)], "off"), tokenizer)
    chat.encode(chat.conversation([Message("user", "x" * 1000)], "off"), tokenizer)
    assert encoded == list("abcdbxyx")


def test_a_tokenizer_is_not_kept_alive_by_what_it_has_encoded():
    tokenizer = Tokenizer.from_json(tiny_tokenizer_json())
    chat.encode(chat.conversation([Message("user", "Hi")]), tokenizer)
    gone = weakref.ref(tokenizer)
    del tokenizer
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize(
    ("effort", "expected"), [("off", 8192), ("low", 65536), ("high", 65536), ("max", 131072)]
)
def test_default_answer_length(effort: Effort, expected: int):
    assert chat.default_max_tokens(effort, 10, 1_000_000) == expected
    assert chat.default_max_tokens(effort, 10, 1000) == 990
    for prompt_tokens in (1000, 1001):
        assert chat.default_max_tokens(effort, prompt_tokens, 1000) == 1


LINES = st.lists(
    st.text(
        st.sampled_from(["a", "Z", " ", "\n", "\r", "\t", "1", ".", ";", "_", "é", "中", "\u0301"]),
        max_size=40,
    ),
    max_size=12,
).map("\n".join)


@settings(deadline=None, max_examples=200)
@given(LINES)
def test_a_text_in_parts_has_the_tokens_of_the_whole(text: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mlx_engine.tokenizer._PART_CHARACTERS", 5)
        assert "".join(parts(text)) == text
        for tokenizer in (tiny_tokenizer(), released_tokenizer()):
            in_parts = [i for part in parts(text) for i in tokenizer.encode_text(part)]
            assert in_parts == tokenizer.encode_text(text)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(LINES.filter(str.strip), LINES), min_size=1, max_size=5))
def test_a_conversation_that_grows_is_encoded_as_a_whole(turns: list[tuple[str, str]]) -> None:
    tokenizer = released_tokenizer()
    messages: list[Message] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mlx_engine.tokenizer._PART_CHARACTERS", 5)
        for asked, said in turns:
            messages.append(Message("user", asked))
            asking = conversation(messages, "off")
            expected: list[int] = []
            for piece in render(asking):
                is_special, text = piece.is_special, piece.text
                expected += (
                    [tokenizer.special_id(text)] if is_special else tokenizer.encode_text(text)
                )
            assert list(encode(asking, tokenizer).token_ids) == expected
            messages.append(Message("assistant", said))


def test_a_grown_conversation_encodes_only_what_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer.from_json(tiny_tokenizer_json())
    own, encoded = tokenizer.encode_text, list[str]()

    def encode_text(text: str) -> list[int]:
        encoded.append(text)
        return own(text)

    monkeypatch.setattr(tokenizer, "encode_text", encode_text)
    long = "".join(f"Line {i} of a long text.\n" for i in range(4000))
    messages = [Message("user", long), Message("assistant", "so"), Message("user", "And then?")]
    encode(conversation(messages[:1], "off"), tokenizer)
    assert "".join(encoded).count("Line") == 4000 and len(encoded) > 5
    encoded.clear()
    encode(conversation(messages, "off"), tokenizer)
    assert sorted(encoded) == ["And then?", "so"]
    encoded.clear()
    # What is added to the end of a long text costs its last part.
    encode_raw(long + "More of it.", tokenizer)
    assert sum(map(len, encoded)) < len(long) / 4


def test_a_prompt_beyond_its_bounds_is_refused_early(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer.from_json(tiny_tokenizer_json())
    text = "Line by line.\n" * 20_000
    own, n_encoded = tokenizer.encode_text, 0

    def encode_text(text: str) -> list[int]:
        nonlocal n_encoded
        n_encoded += len(text)
        return own(text)

    monkeypatch.setattr(tokenizer, "encode_text", encode_text)
    asked = conversation([Message("user", text)], "off")
    with pytest.raises(TooManyTokens) as refused:
        encode(asked, tokenizer, bounds=Bounds(most_tokens=100))
    # The length alone says that there are too many.
    assert n_encoded == 0
    assert refused.value.least_tokens == len(text) / tokenizer.longest_token_bytes
    monkeypatch.setattr(tokenizer, "longest_token_bytes", 10**6)
    with pytest.raises(TooManyTokens) as refused:
        encode(asked, tokenizer, bounds=Bounds(most_tokens=20_000))
    assert 20_000 < refused.value.least_tokens < 50_000 and 0 < n_encoded < 50_000
    asks = iter([False, False, False])
    n_encoded = 0
    with pytest.raises(Cancelled):
        encode_raw("x" + text, tokenizer, Bounds(cancelled=lambda: next(asks, True)))
    assert 0 < n_encoded < len(text) / 2


@settings(deadline=None, max_examples=100)
@given(st.text(st.sampled_from(" .=-_\u3000a"), min_size=1, max_size=400))
def test_no_token_stands_for_more_bytes_than_the_longest(text: str) -> None:
    tokenizer = released_tokenizer()
    n_bytes = [len(tokenizer.token_bytes(i)) for i in tokenizer.encode_text(text)]
    assert max(n_bytes) <= tokenizer.longest_token_bytes == 128
