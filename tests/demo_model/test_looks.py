"""Where the tokens of calls look: what is expected is read off the tokens' text and its JSON."""

import json
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, chain
from pathlib import Path
from random import Random
from typing import Any, cast

import numpy as np
import pytest

from bench.demo_model.cases import KINDS, case
from bench.demo_model.chat import Chat, Document, Encoder, FormatTexts, format_texts
from bench.demo_model.heads import agent
from bench.demo_model.lookups import ASKED, LOOKS, NEXT, NOWHERE, TOOL
from bench.demo_model.packing import NO_DOCUMENT, pack
from bench.demo_model.tasks import chat_of

TOKENIZER = Path(__file__).parents[2] / "mlx_engine" / "demo" / "tokenizer.json"
CALLS = [kind for kind in KINDS if re.match("call|everyday|service|unfamiliar|parallel|read", kind)]
# Tokens of a conversation.
DRAWN = (1000, 2000, 4000, 8000)


@dataclass(frozen=True)
class Definition:
    """Of a tool: the first and the last token of its name, the characters of its description's
    text, the first tokens of each parameter's name and type, the first and the last token of all.
    """

    name: tuple[int, int]
    description: tuple[int, int]
    parameters: dict[str, tuple[int, int]]
    whole: tuple[int, int]


@dataclass(frozen=True)
class Argument:
    """A parameter of a call: its tool, its name and where that begins, which kind of value it is
    said to have, the value and where that begins.
    """

    tool: str
    name: str
    named: int
    is_string: str
    value: str
    begins: int


class Read:
    """A conversation's tokens with their text, and the definitions in it by the tool's name."""

    def __init__(self, chat: Chat) -> None:
        self.chat = chat
        document = encoder().document(chat, texts())
        self.ids: list[int] = document.ids.tolist()
        assert document.looks.shape == (LOOKS, len(self.ids))
        self._looks: list[list[int]] = document.looks.tolist()
        spelled = [spellings()[token] for token in self.ids]
        self.text = b"".join(spelled).decode()
        # Of each token and of each character the number of bytes before it.
        self._tokens = list(accumulate(map(len, spelled), initial=0))
        self._characters = list(accumulate((len(c.encode()) for c in self.text), initial=0))
        self.definitions = dict(self._defined()) if chat.tools else {}

    def looks(self, kind: int) -> dict[int, int]:
        """The places of the tokens that have one."""
        return {i: place for i, place in enumerate(self._looks[kind]) if place != NOWHERE}

    def token(self, at: int) -> int:
        """The token that has a character."""
        return bisect_right(self._tokens, self._characters[at]) - 1

    def is_edge(self, at: int) -> bool:
        """Whether a token begins with a character."""
        return self._tokens[self.token(at)] == self._characters[at]

    def begins(self, at: int) -> int:
        """The token that begins with a character."""
        assert self.is_edge(at)
        return self.token(at)

    def ends(self, at: int) -> int:
        """The token that ends before a character."""
        return self.begins(at) - 1

    def tokens(self, at: int, text: str) -> range:
        """Those of a text that begins at a character."""
        return range(self.begins(at), self.begins(at + len(text)))

    def spelled(self, token: int) -> str:
        return spellings()[self.ids[token]].decode()

    def answers(self) -> Iterator[tuple[int, str]]:
        """Each of our answers, and where it begins."""
        pattern = "<｜Assistant｜>(?:<think>|</think>)(.*?)<｜end▁of▁sentence｜>"
        for match in re.finditer(pattern, self.text, re.DOTALL):
            yield match.start(1), match[1]

    def planned(self) -> Iterator[tuple[int, str, str]]:
        """Where an answer says what a tool is called, its name, and the last word before that."""
        for begins, text in self.answers():
            for name in self.definitions:
                for match in re.finditer(rf"(\w+) is {re.escape(name)}\.", text):
                    yield begins + match.end() - len(name) - 1, name, match[1]

    def arguments(self) -> list[Argument]:
        """Those of all calls."""
        found: list[Argument] = []
        for begins, text in self.answers():
            for call in re.finditer(r' invoke name="([^"]+)">(.*?)</｜DSML｜ invoke>', text, re.S):
                inside = r' parameter name="([^"]+)" string="(\w+)">(.*?)</｜DSML｜ parameter>'
                at = begins + call.start(2)
                for match in re.finditer(inside, call[2], re.S):
                    named, value = at + match.start(1), at + match.start(3)
                    found.append(Argument(call[1], match[1], named, match[2], match[3], value))
        return found

    def _defined(self) -> Iterator[tuple[str, Definition]]:
        at = self.text.index(texts().tools_head) + len(texts().tools_head)
        for tool in self.chat.tools:
            known, ends = json.JSONDecoder().raw_decode(self.text, at)
            assert known == tool
            top = members(self.text, at)
            name, description = top["name"][1] + 1, top["description"][1] + 1
            named = self.tokens(name, tool["name"])
            parameters: dict[str, tuple[int, int]] = {}
            inside = members(self.text, top["parameters"][1])
            if "properties" in inside:
                for key, (word, schema) in members(self.text, inside["properties"][1]).items():
                    kind = type_of(self.text, schema) + 1
                    parameters[key] = self.begins(word + 1), self.begins(kind)
            last = json.JSONDecoder().raw_decode(self.text, description - 1)[1] - 1
            whole = self.token(at), self.token(ends - 1)
            span = named[0], named[-1]
            yield tool["name"], Definition(span, (description, last), parameters, whole)
            at = ends + 1


@cache
def encoder() -> Encoder:
    return Encoder(TOKENIZER.read_text())


@cache
def texts() -> FormatTexts:
    return format_texts()


@cache
def spellings() -> dict[int, bytes]:
    """Each token's bytes: a byte-level vocabulary writes those that do not show from 256 on."""
    content = json.loads(TOKENIZER.read_text())
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = (byte for byte in range(256) if byte not in shown)
    byte_of = {chr(256 + i): byte for i, byte in enumerate(hidden)}
    byte_of |= {chr(byte): byte for byte in shown}
    special = {token["id"]: token["content"].encode() for token in content["added_tokens"]}
    vocabulary: dict[str, int] = content["model"]["vocab"]
    plain = {number: token for token, number in vocabulary.items() if number not in special}
    return special | {number: bytes(byte_of[c] for c in plain[number]) for number in plain}


def members(text: str, at: int) -> dict[str, tuple[int, int]]:
    """Where each key and each value of a JSON object begins, as `json.dumps` spaces them."""
    found: dict[str, tuple[int, int]] = {}
    assert text[at] == "{"
    while text[at] != "}" and text[at : at + 2] != "{}":
        key, ends = json.JSONDecoder().raw_decode(text, at + len(", " if found else "{"))
        found[key] = ends - len(json.dumps(key, ensure_ascii=False)), ends + len(": ")
        _, at = json.JSONDecoder().raw_decode(text, ends + len(": "))
    return found


def type_of(text: str, at: int) -> int:
    """Where the value of a schema's type begins: of one of several types, the first one's."""
    schema = members(text, at)
    return schema["type"][1] if "type" in schema else type_of(text, schema["anyOf"][1] + 1)


def agent_of(rng: Random, tokens: int) -> Chat:
    chat = Chat()
    agent(rng, chat, tokens)
    return chat


@cache
def drawn(tokens: int) -> list[Read]:
    """Conversations of training."""
    chats = [chat_of(Random(seed), tokens, float(seed % 5 == 4)) for seed in range(100)]
    if tokens >= 4000:
        chats += [agent_of(Random(seed), tokens) for seed in range(4)]
    return [Read(chat) for chat in chats]


@cache
def called(kind: str) -> list[Read]:
    """Cases of a kind, with reasoning and without: few of the longest, which take long to read."""
    count = 2 if kind.endswith("000") else 8
    return [Read(case(kind, n, thinks=thinks)) for n in range(count) for thinks in (False, True)]


READERS = [
    *(pytest.param(drawn, tokens, id=f"drawn of {tokens}") for tokens in DRAWN),
    *(pytest.param(called, kind, id=kind) for kind in CALLS),
]
Reader = Callable[[Any], list[Read]]
every = pytest.mark.parametrize(("of", "what"), READERS)


@every
def test_calls_are_read_as_they_were_meant(of: Reader, what: Any):
    """What the other tests expect is of all tools, calls and arguments."""
    calls = 0
    for read in of(what):
        said = [
            (call.name, name, value)
            for turn in read.chat.turns
            for call in turn.calls
            for name, value in call.arguments.items()
        ]
        found = [
            (
                each.tool,
                each.name,
                each.value if each.is_string == "true" else json.loads(each.value),
            )
            for each in read.arguments()
        ]
        assert found == said
        assert list(read.definitions) == [tool["name"] for tool in read.chat.tools]
        calls += len(said)
    assert calls > (10 if of is drawn else 0)


@every
def test_names_and_types_in_definitions_look_at_the_name_of_their_tool(of: Reader, what: Any):
    for read in of(what):
        expected: dict[int, int] = {}
        for tool, defined in read.definitions.items():
            text, _ = defined.description
            before = read.ends(text)
            expected |= dict.fromkeys(chain(*defined.parameters.values()), before)
            begins = text - len(between := '", "description": "') - len(tool)
            assert read.text[begins:text] == tool + between
            assert read.begins(begins) == defined.name[0]
        assert read.looks(TOOL) == expected


@every
def test_an_answer_looks_at_what_comes_next_in_the_definition(of: Reader, what: Any):
    """Every token of a name, and the type where a parameter's name ends: those and no others."""
    for read in of(what):
        names: dict[int, int] = {}
        types: dict[int, int] = {}
        for at, name, _ in read.planned():
            if not read.is_edge(at):  # " your" begins with one token: none of the definition
                assert f" {name}".startswith(read.spelled(read.token(at)))
                continue
            first, last = read.definitions[name].name
            for i, token in enumerate(read.tokens(at, name)):
                names[token - 1] = first + i
                assert first + i <= last
        for each in read.arguments():
            first, kind = read.definitions[each.tool].parameters[each.name]
            tokens = read.tokens(each.named, each.name)
            names |= {token - 1: first + i for i, token in enumerate(tokens)}
            types[tokens[-1]] = kind
        assert not names.keys() & types.keys()
        assert read.looks(NEXT) == names | types
        for token, place in names.items():
            assert read.ids[token + 1] == read.ids[place]
        for token, place in types.items():
            is_string = "true" if read.spelled(place) == "string" else "false"
            assert read.spelled(token + 1) == f'" string="{is_string}">'


@every
def test_an_answer_looks_at_what_it_is_asked_for(of: Reader, what: Any):
    """Before a tool's name, and before each parameter, which may be one of several of that name."""
    told = 0
    for read in of(what):
        expected: dict[int, int] = {}
        for each in read.arguments():
            parameters = read.definitions[each.tool].parameters
            first, kind = parameters[each.name]
            tokens = read.tokens(each.named, each.name)
            expected |= {tokens[0] - 1: first, tokens[-1]: kind}
            later = [name for name, _ in parameters.values()]
            for item in ends_of_items(read, each):
                if first != later[-1]:
                    expected[item] = later[later.index(first) + 1]
        found = read.looks(ASKED)
        for at, name, word in read.planned():
            token, defined = read.token(at) - 1, read.definitions[name]
            place = found[token]
            begins, ends = defined.description
            words = re.finditer(rf"\b{re.escape(word)}\b", read.text[begins:ends])
            places = {read.token(begins + match.end() - 1) for match in words}
            # Where the description does not say the word soon, what follows the name helps.
            assert place in places | {defined.name[1]}
            assert defined.whole[0] < place <= defined.whole[1]
            expected[token] = place
            told += place in places
        assert found == expected
    assert told or not any(read.definitions for read in of(what))


def ends_of_items(read: Read, argument: Argument) -> Iterator[int]:
    """The last token of each item of a list of texts: what follows it is its end alone."""
    items = json.loads(argument.value) if argument.value.startswith("[") else None
    if argument.is_string == "true" or not isinstance(items, list):
        return
    at = argument.begins + 1
    for item in cast("list[str]", items):
        ends = at + len(json.dumps(item)) - 1
        assert read.text[at : ends + 1] == json.dumps(item)
        yield read.ends(ends)
        at = ends + len('", ')


def test_what_is_easily_confused_is_there():
    """Parameters of one name in several tools, and lists that another parameter may follow."""
    shared = lists = plain = thought = 0
    for read in chain(*map(drawn, DRAWN)):
        for each in read.arguments():
            having = [tool for tool in read.definitions.values() if each.name in tool.parameters]
            shared += len(having) > 1
            lists += any(True for _ in ends_of_items(read, each))
        if read.definitions:
            plain, thought = plain + (not read.chat.thinks), thought + read.chat.thinks
    assert min(shared, lists, plain, thought) > 20


def test_without_tools_nothing_is_looked_at():
    reads = [read for read in chain(*map(drawn, DRAWN)) if not read.chat.tools]
    assert len(reads) > 20
    assert not any(read.looks(kind) for read in reads for kind in range(LOOKS))


class Recording(Encoder):
    """Keeps what it made."""

    def __init__(self) -> None:
        super().__init__(TOKENIZER.read_text())
        self.made: list[Document] = []

    def document(self, chat: Chat, texts: FormatTexts) -> Document:
        self.made.append(super().document(chat, texts))
        return self.made[-1]


@pytest.mark.parametrize("T", [1024, 4096])
def test_looks_are_packed_with_their_document(T: int):
    recording = Recording()
    packed = pack(Random(T), recording, texts(), 65536 // T, T, 0.2)
    made = iter(recording.made)
    looking = moved = 0
    for row in range(packed.ids.shape[0]):
        numbers = packed.documents[row]
        assert (packed.looks[:, row, numbers == NO_DOCUMENT] == NOWHERE).all()
        for number in range(int(numbers[numbers != NO_DOCUMENT].max()) + 1):
            at = np.flatnonzero(numbers == number)
            begins, size = int(at[0]), at.size
            ids, looks = packed.ids[row, at], packed.looks[:, row, at].astype(np.int32)
            # Those that came out too long were left out.
            document = next(each for each in made if np.array_equal(each.ids[:size], ids))
            where = document.looks[:, :size]
            assert np.array_equal(looks == NOWHERE, where == NOWHERE)
            looks, where, token = (x[where != NOWHERE] for x in (looks, where, at + 0 * where))
            assert np.array_equal(looks, where + begins)
            assert ((begins <= looks) & (looks < token)).all()
            # Also where a row has two tokens: it is the document's own, and closed.
            rows = looks // 2
            assert ((begins <= 2 * rows) & (rows < (token + 1) // 2)).all()
            looking += looks.size
            moved += looks.size if begins else 0
    assert looking > 1000 and moved > 100
