"""The chat format as text, for training: messages, and what the model shall learn of them.

A small second writer of the format (the engine's own renders with the vendor's package, which the
training machine lacks); a test holds the two together. Fixed texts of the format are not spelled
here but taken from the vendor's package by `format_texts`.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from bench.demo_model.lookups import KINDS_OF_LOOKS, NOWHERE, Piece, looks_of

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
SYSTEM, USER, ASSISTANT = "<｜System｜>", "<｜User｜>", "<｜Assistant｜>"
THINK, END_THINK, DSML = "<think>", "</think>", "｜DSML｜"
SPECIAL = re.compile("|".join(map(re.escape, (BOS, EOS, SYSTEM, USER, ASSISTANT, DSML)))
                      + "|</?think>")  # fmt: skip

OTHERS_WEIGHT = 0.05

# Which piece that `spans` yields of a conversation with tools has their definitions.
_DEFINITIONS = 2

Json = dict[str, Any]


@dataclass(frozen=True)
class Call:
    """A tool's name and its arguments."""

    name: str
    arguments: Json


@dataclass(frozen=True)
class Turn:
    """One message: of the `user`, of the `system`, which may speak again behind the user, of a
    `tool` (its results, in the order of the calls), or ours."""

    role: str
    text: str = ""
    reasoning: str = ""
    calls: tuple[Call, ...] = ()
    results: tuple[str, ...] = ()


@dataclass
class Chat:
    """A conversation; `thinks` asks for reasoning before each answer.

    others_weight: how much the loss counts a token of what others write, where ours counts 1.
    """

    system: str = ""
    tools: list[Json] = field(default_factory=list[Json])
    thinks: bool = False
    turns: list[Turn] = field(default_factory=list[Turn])
    others_weight: float = OTHERS_WEIGHT

    def user(self, text: str) -> None:
        self.turns.append(Turn("user", text))

    def answer(self, text: str = "", reasoning: str = "", calls: Sequence[Call] = ()) -> None:
        self.turns.append(Turn("assistant", text, reasoning, tuple(calls)))

    def call(self, calls: Sequence[Call], reasoning: str, said: str = "") -> None:
        """Calls; `said` stands before them where there is no reasoning."""
        self.answer("" if self.thinks else said, reasoning, calls)

    def results(self, *texts: str) -> None:
        self.turns.append(Turn("tool", results=texts))


@dataclass(frozen=True)
class FormatTexts:
    """What the format says by itself: the effort line, and around the tools' definitions."""

    effort: str
    tools_head: str
    tools_tail: str


def format_texts() -> FormatTexts:
    """Read the fixed texts off a prompt that the vendor's package renders."""
    import deepseek_recipe as recipe

    from mlx_engine import prompt

    tool = recipe.ToolDefinition("f", "d", {})
    conversation = recipe.Conversation(
        [recipe.SystemMessage("sys"), recipe.UserMessage("hi")],
        tools=[tool],
        reasoning_effort="high",
    )
    text = "".join(piece.text for piece in prompt.render(conversation))
    effort, rest = text.removeprefix(BOS + SYSTEM).split("sys", 1)
    head, tail = rest.split(json.dumps({"name": "f", "description": "d", "parameters": {}}))
    return FormatTexts(effort, head, tail.split(USER)[0])


def spans(chat: Chat, texts: FormatTexts, *, opens: bool = False) -> Iterator[tuple[str, float]]:
    """Yield the prompt's text in pieces with the weight of their loss.

    `opens` ends it with the header of the answer that is asked for.
    """
    yield BOS, 0
    head = (texts.effort if chat.thinks else "") + chat.system
    if chat.tools:
        # In its definition a tool's words come again and again: there they are learned as one.
        yield SYSTEM + head + texts.tools_head, 0
        # The first end of line has a token together with what stands before it.
        # `Encoder.document` finds this piece as number _DEFINITIONS.
        definitions = (json.dumps(tool, ensure_ascii=False) for tool in chat.tools)
        yield "\n".join(definitions) + texts.tools_tail[:1], chat.others_weight
        yield texts.tools_tail[1:], 0
    elif head:
        yield SYSTEM + head, 0
    last_user = max((i for i, turn in enumerate(chat.turns) if turn.role != "assistant"), default=0)
    header = ""
    for i, turn in enumerate(chat.turns):
        keeps = chat.thinks and (bool(chat.tools) or i > last_user)
        if turn.role == "assistant":
            yield ASSISTANT + (THINK if keeps else END_THINK), 0
            yield (turn.reasoning + END_THINK if keeps else "") + _answer(turn) + EOS, 1
        elif turn.role == "system":
            yield SYSTEM + turn.text, 0
        else:
            text = turn.text or "\n\n".join(f"<tool_result>{r}</tool_result>" for r in turn.results)
            yield USER + text, chat.others_weight
            header = ASSISTANT + (THINK if chat.thinks else END_THINK)
    if opens:
        yield header, 0


def _answer(turn: Turn) -> str:
    if not turn.calls:
        return turn.text
    return f"{turn.text}\n\n<{DSML} calls>\n" + "".join(map(_call, turn.calls)) + f"</{DSML} calls>"


def _call(call: Call) -> str:
    lines = [_parameter(name, value) for name, value in call.arguments.items()]
    body = "\n".join(lines)
    return f'<{DSML} invoke name="{call.name}">\n{body}\n</{DSML} invoke>\n'


def _parameter(name: str, value: Any) -> str:
    is_string = isinstance(value, str)
    text = value if is_string else json.dumps(value)
    kind = "true" if is_string else "false"
    return f'<{DSML} parameter name="{name}" string="{kind}">{text}</{DSML} parameter>'


class Document(NamedTuple):
    """Token ids uint16 [T], the weight of each as a target f32 [T], and where it looks: int32
    [KINDS_OF_LOOKS, T], as `lookups` has it.
    """

    ids: NDArray[np.uint16]
    weights: NDArray[np.float32]
    looks: NDArray[np.int32]


class Encoder:
    """Text in the chat format to token ids, special tokens by their spelling."""

    def __init__(self, tokenizer_json: str) -> None:
        content = json.loads(tokenizer_json)
        self._special = {token["content"]: token["id"] for token in content["added_tokens"]}
        self._plain = Tokenizer.from_str(json.dumps(content | {"added_tokens": []}))
        self._memo: dict[str, list[int]] = {}

    def text(self, text: str) -> list[int]:
        """Plain text; short pieces are remembered, since the format repeats them."""
        known = self._memo.get(text)
        if known is None:
            known = self._plain.encode(text, add_special_tokens=False).ids
            if len(text) < 40 and len(self._memo) < 50_000:
                self._memo[text] = known
        return known

    def marked(self, text: str) -> list[int]:
        """Text in which special tokens are spelled out."""
        ids: list[int] = []
        for _, plain, special in _parts(text):
            ids += self.text(plain)
            if special:
                ids.append(self._special[special])
        return ids

    def piece(self, text: str, first: int) -> Piece:
        """Such a text's tokens with where each begins, the first one's number being `first`."""
        ids: list[int] = []
        starts: list[int] = []
        for at, plain, special in _parts(text):
            encoding = self._plain.encode(plain, add_special_tokens=False)
            ids += encoding.ids
            starts += [at + start for start, _ in encoding.offsets]
            if special:
                ids.append(self._special[special])
                starts.append(at + len(plain))
        return Piece(text, ids, starts, first)

    def document(self, chat: Chat, texts: FormatTexts) -> Document:
        """A whole conversation."""
        ids: list[int] = []
        weights: list[float] = []
        definitions: Piece | None = None
        answers: list[Piece] = []
        for number, (text, weight) in enumerate(spans(chat, texts)):
            if chat.tools and (number == _DEFINITIONS or weight == 1):
                piece = self.piece(text, len(ids))
                new = piece.ids
                if number == _DEFINITIONS:
                    definitions = piece
                else:
                    answers.append(piece)
            else:
                new = self.marked(text)
            ids += new
            weights += [weight] * len(new)
        looks = np.full((KINDS_OF_LOOKS, len(ids)), NOWHERE, np.int32)
        if definitions is not None:
            looks = looks_of(chat.tools, definitions, answers, len(ids))
        return Document(np.array(ids, np.uint16), np.array(weights, np.float32), looks)


def _parts(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield where each plain part begins, the part, and the special token behind it: none behind
    the last.
    """
    at = 0
    for match in SPECIAL.finditer(text):
        yield at, text[at : match.start()], match[0]
        at = match.end()
    yield at, text[at:], ""
