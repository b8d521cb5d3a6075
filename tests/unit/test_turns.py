"""Turns that come back: which are the same, where their tokens go, and how many are kept."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import deepseek_recipe as recipe
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from mlx_engine.prompt import Prompt, encode
from mlx_engine.tokenizer import SPELLINGS
from mlx_engine.turns import Shown, Turn, TurnRecord
from tests.fake_engine import released_tokenizer, tiny_tokenizer

Mode = Literal["off", "tools", "dropping"]

# What a sampled answer may hold: tokens of text in any order, so seldom as the tokenizer would cut
# that text, and the special tokens that do not end an answer.
TOKENIZER = tiny_tokenizer()
SPECIAL = TOKENIZER.special
TEXT_IDS = [i for i in range(TOKENIZER.n_ids) if TOKENIZER.token_bytes(i)]
MARKERS = [SPECIAL.think_start, SPECIAL.think_end, SPECIAL.dsml, SPECIAL.assistant]
ROLE_IDS = {
    *(SPECIAL.system, SPECIAL.user, SPECIAL.assistant),
    TOKENIZER.special_id("<｜latest_reminder｜>"),
}

texts = st.lists(st.sampled_from(["a", " ", "\n\n", "é", *SPELLINGS.values()]), max_size=4).map(
    "".join
)
said = st.lists(st.sampled_from(TEXT_IDS) | st.sampled_from(MARKERS), max_size=12)


@dataclass(frozen=True)
class Exchange:
    """A message of the user, the answer to it, and what the client makes of that answer."""

    asks: str
    reminder: str | None
    token_ids: list[int]
    text: str
    reasoning: str
    n_calls: int
    has_signature: bool
    sends_reasoning: bool
    sends_signature: bool
    spaces: tuple[str, str]


spaces = st.sampled_from(["", " ", "\n\n"])
exchanges = st.builds(
    Exchange,
    asks=texts,
    reminder=st.none() | texts,
    token_ids=said,
    text=texts,
    reasoning=texts,
    n_calls=st.integers(0, 2),
    has_signature=st.booleans(),
    sends_reasoning=st.booleans(),
    sends_signature=st.booleans(),
    spaces=st.tuples(spaces, spaces),
)


class Client:
    """Keeps a conversation in its own spelling, and sends all of it each time."""

    def __init__(self, mode: Mode) -> None:
        self.mode = mode
        self.messages: list[recipe.Message] = [recipe.SystemMessage("Be brief.")]
        self.signatures: list[str] = []
        self._open_calls: list[str] = []

    def ask(self, exchange: Exchange) -> recipe.Conversation:
        for call_id in reversed(self._open_calls):
            self.messages.append(recipe.ToolMessage("done", call_id))
        if exchange.reminder is not None:
            self.messages.append(recipe.LatestReminderMessage(exchange.reminder))
        self.messages.append(recipe.UserMessage(exchange.asks))
        return self.conversation()

    def conversation(self) -> recipe.Conversation:
        tools = [recipe.ToolDefinition("f", "", {})] if self.mode == "tools" else None
        return recipe.Conversation(
            self.messages, thinking_mode=self.mode != "off", tools=tools, reasoning_effort="high"
        )

    def take(self, exchange: Exchange, shown: Shown) -> None:
        before, after = exchange.spaces
        calls = [recipe.ToolCall(i, "f", '{"a" : 1.50}') for i in shown.call_ids]
        self._open_calls = list(shown.call_ids)
        self.messages.append(
            recipe.AssistantMessage(
                before + shown.text.strip() + after,
                shown.reasoning if exchange.sends_reasoning else None,
                calls or None,
            )
        )
        self.signatures.append(shown.signature if exchange.sends_signature else "")


@settings(deadline=None, max_examples=200)
@given(st.sampled_from(["off", "tools", "dropping"]), st.lists(exchanges, min_size=2, max_size=5))
def test_what_was_computed_stays_the_beginning(mode: Mode, conversation: list[Exchange]):
    client, turns = Client(mode), TurnRecord()
    before, kept = Prompt((), False), ()
    for i, exchange in enumerate(conversation):
        prompt = encode(client.ask(exchange), TOKENIZER, turns, client.signatures)
        assert prompt.token_ids[: len(kept)] == kept
        assert set(before.anchors) <= set(prompt.anchors)
        assert i == 0 or len(kept) in prompt.anchors
        assert prompt.starts_in_reasoning == (mode != "off")
        shown = Shown(
            exchange.text,
            exchange.reasoning if prompt.starts_in_reasoning else "",
            [f"call_{i}_{n}" for n in range(exchange.n_calls)],
            f"signature_{i}" if exchange.has_signature else "",
        )
        client.take(exchange, shown)
        turns.put(
            prompt.turn_prefix,
            shown,
            exchange.token_ids,
            starts_in_reasoning=prompt.starts_in_reasoning,
        )
        before, kept = prompt, after_answer(prompt, exchange.token_ids, mode, client)


def after_answer(
    prompt: Prompt, token_ids: Sequence[int], mode: Mode, client: Client
) -> tuple[int, ...]:
    """What the next prompt must begin with: the end mark included."""
    if mode != "dropping":
        return (*prompt.token_ids, *token_ids, SPECIAL.eos)
    header = (*prompt.token_ids[:-1], SPECIAL.think_end)
    if SPECIAL.think_end in token_ids:
        said = token_ids[token_ids.index(SPECIAL.think_end) + 1 :]
        return (*header, *said, SPECIAL.eos)
    # Nobody can tell where the answer begins: it is rendered.
    alone = recipe.Conversation([recipe.UserMessage(""), client.messages[-1]], thinking_mode=False)
    rendered = encode(alone, TOKENIZER).token_ids
    first = rendered.index(SPECIAL.assistant) + 2
    return (*header, *rendered[first : rendered.index(SPECIAL.eos) + 1])


@settings(deadline=None)
@given(st.sampled_from(["off", "tools", "dropping"]), st.lists(exchanges, min_size=1, max_size=4))
def test_without_a_record_anchors_stand_before_every_role_token(
    mode: Mode, conversation: list[Exchange]
):
    client = Client(mode)
    for exchange in conversation:
        client.ask(exchange)
        client.take(exchange, Shown(exchange.text, exchange.reasoning))
    prompt = encode(client.ask(conversation[0]), TOKENIZER)
    assert encode(client.conversation(), TOKENIZER, TurnRecord()) == prompt
    at_roles = [i for i, token_id in enumerate(prompt.token_ids) if token_id in ROLE_IDS]
    assert list(prompt.anchors) == at_roles[1:]


def test_the_first_anchor_ends_what_all_conversations_share():
    tools = [recipe.ToolDefinition("f", "", {})]
    system = recipe.SystemMessage("Be brief.")
    one, other = (
        encode(recipe.Conversation([system, recipe.UserMessage(asks)], tools=tools), TOKENIZER)
        for asks in ("one", "other")
    )
    head = one.anchors[0]
    assert head == other.anchors[0]
    assert one.token_ids[: head + 1] == other.token_ids[: head + 1]
    assert one.token_ids[head] == SPECIAL.user


def test_a_lone_bos_is_no_anchor():
    conversation = recipe.Conversation([recipe.UserMessage("Hi")], thinking_mode=False)
    assert encode(conversation, TOKENIZER).anchors == (4,)


def test_tokens_that_no_tokenizer_would_give_come_back():
    tokenizer = released_tokenizer()
    canonical = tokenizer.encode_text("The answer is 42.")
    sampled = [i for letter in "The answer is 42." for i in tokenizer.encode_text(letter)]
    assert sampled != canonical
    asked = recipe.UserMessage("Hi")
    turns = TurnRecord()
    first = encode(recipe.Conversation([asked], thinking_mode=False), tokenizer, turns)
    turns.put(first.turn_prefix, Shown("The answer is 42."), sampled, starts_in_reasoning=False)
    told = recipe.AssistantMessage("The answer is 42.")
    conversation = recipe.Conversation([asked, told, asked], thinking_mode=False)
    n = len(first.token_ids)
    for record, expected in ((turns, sampled), (None, canonical)):
        token_ids = encode(conversation, tokenizer, record).token_ids
        assert list(token_ids[n : token_ids.index(tokenizer.special.eos)]) == expected


FULL = Shown("so\n", "why not", ("c1", "c2"), "s1")


@pytest.mark.parametrize(
    ("returned", "here", "elsewhere"),
    [
        (FULL, True, True),
        (replace(FULL, text=" \nso"), True, True),
        (replace(FULL, reasoning=""), True, True),
        (replace(FULL, reasoning="why\n\nnot "), True, True),
        (replace(FULL, reasoning="why"), False, False),
        (replace(FULL, signature=""), True, True),
        (replace(FULL, signature="s2"), True, True),
        (replace(FULL, text="s o"), False, False),
        (replace(FULL, text=""), False, False),
        (replace(FULL, call_ids=("c2", "c1")), False, False),
        (replace(FULL, call_ids=("c1",)), False, False),
        (replace(FULL, call_ids=()), False, False),
        (replace(FULL, call_ids=("c1", "c2", "c3")), False, False),
        (replace(FULL, call_ids=("c1c2",)), False, False),
    ],
)
def test_which_turn_is_the_same(returned: Shown, here: bool, elsewhere: bool):
    turns = TurnRecord()
    turns.put(b"here", FULL, [1, 2], starts_in_reasoning=True)
    assert (turns.find(b"here", returned) is not None) == here
    assert (turns.find(b"elsewhere", returned) is not None) == elsewhere


@pytest.mark.parametrize(
    ("given_out", "returned", "elsewhere"),
    [
        (Shown("so"), Shown("so"), False),
        (Shown("so", signature="s1"), Shown("so", signature="s1"), True),
        (Shown("so", signature="s1"), Shown("so"), False),
        (Shown("so"), Shown("so", signature="of another server"), False),
    ],
)
def test_a_turn_without_calls_is_known_by_what_precedes_it(
    given_out: Shown, returned: Shown, elsewhere: bool
):
    turns = TurnRecord()
    turns.put(b"here", given_out, [1, 2], starts_in_reasoning=True)
    assert turns.find(b"here", returned) is not None
    assert (turns.find(b"elsewhere", returned) is not None) == elsewhere


def test_an_edit_leaves_the_later_turns_that_have_only_their_place():
    """The changed turn is rendered, and so are those after it that only their prefix names."""
    client, turns = Client("tools"), TurnRecord()
    exchange = Exchange("Hi", None, [], "", "", 0, False, False, False, ("", ""))
    for i, (text, call_ids) in enumerate([("one", ()), ("two", ()), ("three", ("c1",))]):
        prompt = encode(client.ask(exchange), TOKENIZER, turns)
        shown = Shown(text, call_ids=call_ids)
        client.take(exchange, shown)
        turns.put(prompt.turn_prefix, shown, [TEXT_IDS[i]] * 3, starts_in_reasoning=True)
    client.ask(exchange)
    marks = [[TEXT_IDS[i]] * 3 for i in range(3)]
    assert bodies(encode(client.conversation(), TOKENIZER, turns)) == marks
    rendered = bodies(encode(client.conversation(), TOKENIZER))
    asked, told = client.messages[1:3]
    client.messages[1] = recipe.UserMessage("Ho")
    assert bodies(encode(client.conversation(), TOKENIZER, turns)) == [*rendered[:2], marks[2]]
    client.messages[1:3] = asked, recipe.AssistantMessage("two")
    rendered[0] = rendered[1]
    assert bodies(encode(client.conversation(), TOKENIZER, turns)) == [*rendered[:2], marks[2]]
    client.messages[2] = told
    assert bodies(encode(client.conversation(), TOKENIZER, turns)) == marks


def bodies(prompt: Prompt) -> list[list[int]]:
    """The tokens of each finished turn of the assistant, without header and end mark."""
    found: list[list[int]] = []
    ids = list(prompt.token_ids)
    while SPECIAL.eos in ids:
        end = ids.index(SPECIAL.eos)
        found.append(ids[ids.index(SPECIAL.assistant) + 2 : end])
        ids = ids[end + 1 :]
    return found


def test_a_reasoning_that_the_format_drops_makes_no_other_turn():
    asked = recipe.UserMessage("Hi")
    turns = TurnRecord()
    prompt = encode(recipe.Conversation([asked]), TOKENIZER, turns)
    turns.put(
        prompt.turn_prefix, Shown("so", "why"), [SPECIAL.think_end, 7], starts_in_reasoning=True
    )
    told = recipe.AssistantMessage("so", "in the client's words")
    tools = [recipe.ToolDefinition("f", "", {})]
    assert bodies(encode(recipe.Conversation([asked, told, asked]), TOKENIZER, turns)) == [[7]]
    kept = recipe.Conversation([asked, told, asked], tools=tools)
    assert encode(kept, TOKENIZER, turns) == encode(kept, TOKENIZER)


def test_an_unfinished_turn_begins_no_other():
    begun = [recipe.UserMessage("Hi"), recipe.AssistantMessage("so", prefix=True)]
    prompt = encode(recipe.Conversation(begun, thinking_mode=False), TOKENIZER, TurnRecord())
    assert prompt.turn_prefix == b""
    assert prompt.token_ids[-2:] == tuple(TOKENIZER.encode_text("so"))
    assert encode(recipe.Conversation(begun[:1]), TOKENIZER).turn_prefix != b""


def test_an_unfinished_turn_in_between_is_not_taken_for_another():
    asked, begun = recipe.UserMessage("Hi"), recipe.AssistantMessage("be", prefix=True)
    messages = [asked, begun, recipe.AssistantMessage("so"), asked]
    turns = TurnRecord()
    for text, token_id in (("be", 7), ("so", 8)):
        signed = Shown(text, signature=text)
        turns.put(b"", signed, [token_id], starts_in_reasoning=False)
    conversation = recipe.Conversation(messages, thinking_mode=False)
    token_ids = encode(conversation, TOKENIZER, turns, ["be", "so"]).token_ids
    first = token_ids.index(SPECIAL.assistant) + 2
    begun_ids = TOKENIZER.encode_text("be")
    assert list(token_ids[first : first + 6]) == [
        *(*begun_ids, SPECIAL.assistant, SPECIAL.think_end, 8, SPECIAL.eos),
    ]


def test_an_answer_without_reasoning_keeps_its_tokens_after_a_reasoning_header():
    asked = recipe.UserMessage("Hi")
    told = recipe.AssistantMessage("so", None, [recipe.ToolCall("c1", "f", "{}")])
    turns = TurnRecord()
    turns.put(b"", Shown("so", call_ids=["c1"]), [SPECIAL.think_end, 7], starts_in_reasoning=False)
    for tools, expected in (
        (None, [SPECIAL.think_end, 7]),
        ([recipe.ToolDefinition("f", "", {})], [SPECIAL.think_end, SPECIAL.think_end, 7]),
    ):
        conversation = recipe.Conversation(
            [asked, told, recipe.ToolMessage("done", "c1")], tools=tools
        )
        assert bodies(encode(conversation, TOKENIZER, turns)) == [expected]


class Store:
    """Keeps records in memory, as the disk cache does in files."""

    def __init__(self) -> None:
        self.kept: dict[bytes, NDArray[np.uint32]] = {}

    def record_put(self, key: bytes, token_ids: NDArray[np.uint32]) -> None:
        assert (len(key), token_ids.dtype, token_ids.ndim) == (32, np.uint32, 1)
        self.kept[key] = token_ids

    def records(self) -> Iterable[tuple[bytes, NDArray[np.uint32]]]:
        return self.kept.items()


puts = st.tuples(
    st.sampled_from([b"p1", b"p2"]),
    st.builds(
        Shown,
        st.sampled_from(["", "a", "b"]),
        st.sampled_from(["", "r"]),
        st.lists(st.sampled_from(["c1", "c2"]), max_size=2).map(tuple),
        st.sampled_from(["", "s1"]),
    ),
    st.lists(st.integers(0, 2**32 - 1), max_size=4),
    st.booleans(),
)


def said_by(turn: Turn | None) -> tuple[list[int], bool] | None:
    return turn and (turn.token_ids.tolist(), turn.starts_in_reasoning)


@settings(deadline=None)
@given(st.lists(puts, max_size=6, unique_by=lambda put: (put[0], put[1].text, put[1].call_ids)))
def test_a_restart_forgets_nothing(record: list[tuple[bytes, Shown, list[int], bool]]):
    store = Store()
    turns = TurnRecord(store)
    for prefix, shown, token_ids, starts_in_reasoning in record:
        turns.put(prefix, shown, token_ids, starts_in_reasoning=starts_in_reasoning)
    again = TurnRecord(store)
    assert again.n_bytes == turns.n_bytes
    for prefix, shown, *_ in record:
        assert said_by(again.find(prefix, shown)) == said_by(turns.find(prefix, shown))
    if record:
        prefix, shown, token_ids, starts_in_reasoning = record[-1]
        assert said_by(again.find(prefix, shown)) == (token_ids, starts_in_reasoning)


@given(st.lists(st.integers(0, 3) | st.integers(0, 2**32 - 1), max_size=60))
def test_words_of_another_kind_are_passed_over(words: list[int]):
    store = Store()
    store.kept[bytes(32)] = np.array(words, np.uint32)
    turns = TurnRecord(store)
    assert turns.n_bytes == 0 or words[0] == 1


@pytest.mark.parametrize("n_words", range(30))
def test_a_shortened_record_gives_no_other_keys(n_words: int):
    store = Store()
    TurnRecord(store).put(b"p", FULL, [], starts_in_reasoning=True)
    ((key, words),) = store.kept.items()
    store.kept[key] = words[:n_words]
    assert TurnRecord(store).n_bytes == 0


def test_what_was_unused_longest_goes_first():
    one = TurnRecord()
    one.put(b"", Shown("0"), [0] * 1000, starts_in_reasoning=False)
    turns = TurnRecord(max_bytes=3 * one.n_bytes)
    for i in range(3):
        turns.put(b"", Shown(str(i)), [i] * 1000, starts_in_reasoning=False)
    assert turns.n_bytes == 3 * one.n_bytes
    assert turns.find(b"", Shown("0")) is not None
    turns.put(b"", Shown("3"), [3] * 1000, starts_in_reasoning=False)
    turns.put(b"", Shown("4"), [4] * 5000, starts_in_reasoning=False)  # fits in no way
    known = [i for i in range(5) if turns.find(b"", Shown(str(i)))]
    assert known == [0, 2, 3]
    assert turns.n_bytes == 3 * one.n_bytes


def test_a_turn_said_again_is_the_one_that_counts():
    turns = TurnRecord(max_bytes=1400)
    signed = Shown("so", signature="s1")
    turns.put(b"", signed, [1], starts_in_reasoning=False)
    turns.put(b"", Shown("so"), [2], starts_in_reasoning=False)
    assert said_by(turns.find(b"", Shown("so"))) == ([2], False)
    assert said_by(turns.find(b"", signed)) == ([1], False)
    assert said_by(turns.find(b"", Shown("so"))) == ([2], False)
    turns.put(b"", Shown("other"), [3], starts_in_reasoning=False)
    assert said_by(turns.find(b"", Shown("so"))) == ([2], False)
    assert said_by(turns.find(b"", signed)) == ([2], False)
