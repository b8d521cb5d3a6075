"""What the demo model must do: conversations that end with the one right answer.

Held out by their seeds, which training never draws. Names and values are new in every case.
"""

from collections.abc import Callable
from random import Random

from bench.demo_model import tools as tooling
from bench.demo_model.chat import Chat
from bench.demo_model.tasks import (
    EXERCISES,
    ask,
    exercise,
    facts_of,
    notes_of,
    personal,
)

# Characters of the world's prose per token of the demo tokenizer, a little low.
_CHARACTERS_PER_TOKEN = 3.7


def case(kind: str, number: int, *, thinks: bool = False) -> Chat:
    """A case of a kind, the same for the same number: its last turn is the expected answer."""
    chat = Chat(thinks=thinks)
    name, _, argument = kind.partition(" of ")
    _MAKERS.get(name, _exercise)(Random(f"held out {kind} {number}"), chat, argument or name)
    return chat


def _exercise(rng: Random, chat: Chat, name: str) -> None:
    exercise(rng, chat, name)


def _recall(rng: Random, chat: Chat, tokens: str) -> None:
    """A fact stated anywhere in notes of so many tokens."""
    facts = facts_of(rng, 24)
    notes = notes_of(rng, facts, int(int(tokens) * _CHARACTERS_PER_TOKEN))
    ask(rng, chat, rng.choice(facts), notes + "\n\n")


def _call(rng: Random, chat: Chat, count: str) -> None:
    """The right call out of so many tools."""
    _with_tools(rng, chat, int(count), lambda calls: calls == 1)
    del chat.turns[2:]


def _result(rng: Random, chat: Chat, count: str) -> None:
    """The answer to a call's result."""
    _with_tools(rng, chat, int(count), lambda calls: calls == 1)


def _parallel(rng: Random, chat: Chat, count: str) -> None:
    """Two or three calls at once."""
    _with_tools(rng, chat, int(count), lambda calls: calls > 1)
    del chat.turns[2:]


def _with_tools(rng: Random, chat: Chat, count: int, wanted: Callable[[int], bool]) -> None:
    tools = tooling.tools_of(rng, count)
    chat.tools = [tool.definition for tool in tools]
    while not chat.turns or not wanted(len(chat.turns[1].calls)):
        chat.turns.clear()
        tooling.tool_turn(rng, chat, tools)


def _read(rng: Random, chat: Chat, what: str) -> None:
    """A file is to be read, or has been."""
    chat.tools = [tooling.reader_of(rng)]
    tooling.reading_turn(rng, chat, chat.tools[0])
    if what == "call":
        del chat.turns[2:]


def _personal(rng: Random, chat: Chat, _: str) -> None:
    personal(rng, chat)


_MAKERS: dict[str, Callable[[Random, Chat, str], None]] = {
    "recall": _recall,
    "call": _call,
    "result": _result,
    "parallel": _parallel,
    "read": _read,
    "personal": _personal,
}

KINDS = (
    "recall of 500",
    "recall of 1900",
    "recall of 7900",
    "call of 1",
    "call of 8",
    "call of 24",
    "result of 8",
    "parallel of 4",
    "read of call",
    "read of answer",
    "personal",
    *EXERCISES,
)
