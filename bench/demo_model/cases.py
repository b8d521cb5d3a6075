"""What the demo model must do: conversations that end with the one right answer.

Held out by their seeds, which training never draws. Names and values are new in every context, of
which several questions are asked where it is long to read.
"""

from collections.abc import Callable
from random import Random

from bench.demo_model.chat import Chat
from bench.demo_model.errands import ToolKind
from bench.demo_model.everyday import EVERYDAY, WORDED, everyday_of
from bench.demo_model.exercises import EXERCISES, exercise
from bench.demo_model.facts import ask, facts_of, notes_of, personal
from bench.demo_model.heads import CHARACTERS_PER_TOKEN, surround, with_tools
from bench.demo_model.prose import manual
from bench.demo_model.reading import reader_of, reading_turn
from bench.demo_model.results import parallel_turn, single_turn
from bench.demo_model.stock import Stock
from bench.demo_model.talk import small_talk, storytelling
from bench.demo_model.tools import Tool, tools_of
from bench.demo_model.unfamiliar import UNFAMILIAR

# Characters per token of the demo tokenizer: of notes, and of instructions and definitions.
_NOTES = 3.15
_INSTRUCTIONS = 2.9

KINDS = (
    "recall of 500",
    "recall of 1900",
    "recall of 7900",
    "call of 1",
    "call of 8",
    "call of 24",
    "call in 16000",
    "everyday call",
    "service call",
    "unfamiliar call",
    "result of 8",
    "parallel of 4",
    "read of call",
    "read of answer",
    "read in 16000",
    "read under 8000",
    "read under 20000",
    "told under 8000",
    "personal",
    "small talk",
    *EXERCISES,
)
LONGEST = (
    "recall of 7900",
    "call in 16000",
    "read in 16000",
    "read under 8000",
    "read under 20000",
    "told under 8000",
)
# Without one right answer: judged by what a story must have.
STORY = "story"
GOALS = {
    "recall of 1900": 0.95,
    "recall of 7900": 0.85,
    "call of 1": 0.95,
    "call of 8": 0.95,
    "call of 24": 0.95,
    "call in 16000": 0.95,
    "result of 8": 0.95,
    "parallel of 4": 0.90,
}


def case(kind: str, number: int, *, thinks: bool = False) -> Chat:
    """A case of a kind, the same for the same number: its last turn is the expected answer."""
    chat = Chat(thinks=thinks)
    make, argument, questions = _kind(kind)
    context = Random(f"held out {kind} {number // questions}")
    make(context, Random(f"held out {kind} question {number}"), chat, argument)
    return chat


# Makes the context from the first generator and the question from the second.
Maker = Callable[[Random, Random, Chat, int], None]


def _kind(kind: str) -> tuple[Maker, int, int]:
    """How a kind is made, its number, and how many questions one context is asked."""
    *_, last = kind.split()
    number = int(last) if last.isdigit() else 0
    for start, (make, questions) in _MAKERS.items():
        if kind.startswith(start):
            return make, number, questions
    return lambda _, rng, chat, __: exercise(rng, chat, kind), 0, 1


def _recall(context: Random, rng: Random, chat: Chat, tokens: int) -> None:
    """A fact stated anywhere in notes of so many tokens."""
    facts = facts_of(context, 24)
    chat.user("Read this:\n" + notes_of(context, facts, int(tokens * _NOTES)))
    chat.answer("I have read it.", "These are notes.")
    ask(rng, chat, rng.choice(facts))


def _tools(context: Random, chat: Chat, count: int) -> list[Tool]:
    tools = tools_of(context, count)
    chat.tools = [tool.definition for tool in tools]
    return tools


def _call(context: Random, rng: Random, chat: Chat, count: int) -> None:
    """The right call out of so many tools."""
    single_turn(rng, chat, rng.choice(_tools(context, chat, count)))
    del chat.turns[2:]


def _result(context: Random, rng: Random, chat: Chat, count: int) -> None:
    """The answer to a call's result."""
    single_turn(rng, chat, rng.choice(_tools(context, chat, count)))


def _parallel(context: Random, rng: Random, chat: Chat, count: int) -> None:
    """Two or three calls at once."""
    parallel_turn(rng, chat, _tools(context, chat, count))
    del chat.turns[2:]


def _everyday(kinds: tuple[ToolKind, ...]) -> Maker:
    """A call of one of four tools of the kinds."""

    def make(_: Random, rng: Random, chat: Chat, __: int) -> None:
        tools = everyday_of(rng, 4, kinds)
        chat.tools = [tool.definition for tool in tools]
        rng.choice(tools).turn(rng, chat)
        del chat.turns[2:]

    return make


def _long_call(context: Random, rng: Random, chat: Chat, tokens: int) -> None:
    """The right call where instructions and 24 wordy definitions take so many tokens."""
    single_turn(rng, chat, rng.choice(_long_context(context, chat, tokens)))
    del chat.turns[2:]


def _long_context(context: Random, chat: Chat, tokens: int) -> list[Tool]:
    characters = int(tokens * _INSTRUCTIONS)
    tools = tools_of(context, 24, characters // 50)
    chat.tools = [tool.definition for tool in tools]
    chat.system = manual(context, max(0, characters - len(str(chat.tools))))
    return tools


def _reading(_: Random, rng: Random, chat: Chat, __: int) -> None:
    """A file is to be read, or has been."""
    chat.tools = [reader_of(rng)]
    reading_turn(rng, chat, chat.tools[0])


def _read_call(context: Random, rng: Random, chat: Chat, _: int) -> None:
    _reading(context, rng, chat, 0)
    del chat.turns[2:]


def _long_reading(context: Random, rng: Random, chat: Chat, tokens: int) -> None:
    """What a file says, after instructions and definitions of so many tokens."""
    _long_context(context, chat, tokens)
    chat.tools.insert(12, reader_of(context, 1000))
    reading_turn(rng, chat, chat.tools[12])


def _told_under_head(context: Random, rng: Random, chat: Chat, tokens: int) -> None:
    """What a file says, asked between the long texts of a program of so many tokens."""
    stock = Stock(context)
    characters = int(tokens * CHARACTERS_PER_TOKEN)
    called = with_tools(context, chat, stock, characters * 6 // 10)
    chat.system = stock.passage(characters * 15 // 100)
    reading_turn(rng, chat, called.reader)
    surround(rng, chat, 0, stock, characters * 2 // 100, characters * 2 // 10)


def _under_head(context: Random, rng: Random, chat: Chat, tokens: int) -> None:
    """The call which such a request needs."""
    _told_under_head(context, rng, chat, tokens)
    del chat.turns[next(i for i, turn in enumerate(chat.turns) if turn.calls) + 1 :]


def _story(_: Random, rng: Random, chat: Chat, __: int) -> None:
    """A story about somebody and something that are named."""
    storytelling(rng, chat, asks_for_names=True)
    del chat.turns[2:]


# By how the kind's name begins, the first that fits: how many questions a context is asked.
_MAKERS: dict[str, tuple[Maker, int]] = {
    "recall": (_recall, 5),
    "call of": (_call, 2),
    "call in": (_long_call, 5),
    "result": (_result, 2),
    "parallel": (_parallel, 2),
    "everyday": (_everyday(EVERYDAY), 1),
    "service": (_everyday(WORDED), 1),
    "unfamiliar": (_everyday(UNFAMILIAR), 1),
    "read of call": (_read_call, 1),
    "read of answer": (_reading, 1),
    "read in": (_long_reading, 5),
    "read under": (_under_head, 5),
    "told under": (_told_under_head, 5),
    "personal": (lambda _, rng, chat, __: personal(rng, chat), 1),
    "small talk": (lambda _, rng, chat, __: small_talk(rng, chat), 1),
    STORY: (_story, 1),
}
