"""A conversation's definitions, plans and calls, read off its tokens' text and its JSON."""

import json
import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from pathlib import Path

from bench.demo_model.chat import Chat, Encoder, FormatTexts, format_texts
from bench.demo_model.lookups import KINDS_OF_LOOKS, NOWHERE

TOKENIZER = Path(__file__).parents[2] / "mlx_engine" / "demo" / "tokenizer.json"


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


@dataclass(frozen=True)
class Plan:
    """A tool's name and its task as an answer says them, and where each begins."""

    name: str
    named: int
    task: str
    begins: int


class Read:
    """A conversation's tokens with their text, and the definitions in it by the tool's name."""

    def __init__(self, chat: Chat) -> None:
        self.chat = chat
        document = encoder().document(chat, texts())
        self.ids: list[int] = document.ids.tolist()
        assert document.looks.shape == (KINDS_OF_LOOKS, len(self.ids))
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

    def covering(self, at: int, text: str) -> range:
        """Those that have a part of a text that begins at a character."""
        return range(self.token(at), self.token(at + len(text) - 1) + 1)

    def plans(self) -> Iterator[Plan]:
        """Where an answer says which tool has a task."""
        for begins, text in self.answers():
            for name in self.definitions:
                for end in re.finditer(rf" is {re.escape(name)}\.", text):
                    said, how = text[: end.start()].rpartition("The tool ")[::2]
                    link, _, task = how.partition(" ")
                    at = begins + len(said) + len(f"The tool {link} ")
                    if link in ("to", "for") and "." not in how:
                        yield Plan(name, begins + end.start() + len(" is "), task, at)

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
