"""Where the tokens of calls look: what is expected is read off the tokens' text and its JSON."""

import json
import re
from collections.abc import Callable, Iterator
from functools import cache
from itertools import chain, count, takewhile
from random import Random
from typing import Any, cast

import numpy as np
import pytest

from bench.demo_model.cases import KINDS, case
from bench.demo_model.chat import Chat, Document, Encoder, FormatTexts
from bench.demo_model.heads import agent
from bench.demo_model.lookups import ASKED, KINDS_OF_LOOKS, NEXT, NOWHERE, TOOL
from bench.demo_model.packing import NO_DOCUMENT, pack
from bench.demo_model.tasks import chat_of
from tests.demo_model.reading_back import TOKENIZER, Argument, Plan, Read, texts

CALLS = [kind for kind in KINDS if re.match("call|everyday|service|unfamiliar|parallel|read", kind)]
# Tokens of a conversation.
DRAWN = (1000, 2000, 4000, 8000)
# How far into a description its tool's task is looked for, in characters.
SOON = 160


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
    """Every token of a name and of a task, and the type where a parameter's name ends: those and no
    others.
    """
    for read in of(what):
        names: dict[int, int] = {}
        types: dict[int, int] = {}
        plans: dict[int, int] = {}
        for plan in read.plans():
            first, last = read.definitions[plan.name].name
            said = read.covering(plan.named, plan.name)
            plans |= {said[0] - 1: first} | same(read, said[1:], first + 1)
            # A name whose first token has the space before it, " your", is no other than that.
            if read.is_edge(plan.named):
                names |= {token - 1: first + i for i, token in enumerate(said)}
                assert first + len(said) - 1 == last
            if (there := task_of(read, plan)) is not None:
                said = read.covering(plan.begins, plan.task)
                plans |= {said[0] - 1: there[0]} | same(read, said[1:], there[0] + 1)
        assert names.items() <= plans.items()
        for each in read.arguments():
            first, kind = read.definitions[each.tool].parameters[each.name]
            tokens = read.tokens(each.named, each.name)
            names |= {token - 1: first + i for i, token in enumerate(tokens)}
            types[tokens[-1]] = kind
        assert not (names.keys() | plans.keys()) & types.keys()
        assert read.looks(NEXT) == names | plans | types
        for token, place in names.items():
            assert read.ids[token + 1] == read.ids[place]
        for token, place in types.items():
            is_string = "true" if read.spelled(place) == "string" else "false"
            assert read.spelled(token + 1) == f'" string="{is_string}">'


def same(read: Read, said: range, place: int) -> dict[int, int]:
    """Of tokens that are those from a place on, the token before each and its place."""
    pairs = takewhile(lambda pair: read.ids[pair[0]] == read.ids[pair[1]], zip(said, count(place)))
    return {token - 1: there for token, there in pairs}


def head_of(read: Read, plan: Plan) -> tuple[int, str]:
    """What a tool's description says first, and where that begins."""
    begins, ends = read.definitions[plan.name].description
    return begins, read.text[begins : min(ends, begins + SOON)]


def task_of(read: Read, plan: Plan) -> range | None:
    """The tokens of a plan's task in what the description says first."""
    begins, head = head_of(read, plan)
    match = re.search(re.escape(plan.task), head, re.IGNORECASE)
    return None if match is None else read.covering(begins + match.start(), match[0])


@every
def test_an_answer_looks_at_what_it_is_asked_for(of: Reader, what: Any):
    """Before a tool's task and its name, and before each parameter, which may be one of several of
    that name.
    """
    found = 0
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
        for plan in read.plans():
            begins, head = head_of(read, plan)
            # Where the description does not say the word soon, what follows the name helps.
            place = read.definitions[plan.name].name[1]
            if (there := task_of(read, plan)) is not None:
                expected[read.token(plan.begins) - 1] = place = there[-1]
            elif word := word_in(head, plan.task.rpartition(" ")[2]):
                place = read.token(begins + word.end() - 1)
            expected[read.token(plan.named) - 1] = place
            found += place != read.definitions[plan.name].name[1]
        assert read.looks(ASKED) == expected
    assert found or not any(read.definitions for read in of(what))


def word_in(text: str, word: str) -> re.Match[str] | None:
    """Where a text has a word first, whole."""
    return re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text)


def telling(description: str, said: str, name: str = "get_lot") -> Read:
    """An answer that tells a tool, which stands behind another."""
    what = {"type": "string", "description": "Where to find the lot"}
    schema = {"type": "object", "properties": {"city": what}}
    described = {"find_it": "To find the lot.", name: description}
    chat = Chat(
        tools=[{"name": n, "description": d, "parameters": schema} for n, d in described.items()]
    )
    chat.user("Which tool is it?")
    chat.answer(f"Let me see. {said} It is the only one.")
    return Read(chat)


QUICK = "Be quick. " * 20
BEFORE_TASK, BEFORE_WORD = (QUICK[: SOON - len(text)] for text in (" find the lot", " lot"))


@pytest.mark.parametrize(
    ("description", "how"),
    [
        ("{Find the lot|}.", "to find the lot"),
        ("Use this to {find the lot|}.", "to find the lot"),
        ("Use this to {find the lot|}, or to find the lot.", "to find the lot"),
        # It ends where the task does, though both go on alike.
        ("Of all to {find the lot|} is the only one.", "to find the lot"),
        ("{Find} THE lot|.", "to find the lot"),
        # Nothing after a token that differs, though there are as many and the rest is the same.
        ("{Use }Find again|.", "to use find again"),
        ("{Find the} Lot again and again|.", "to find the lot again and again"),
        ("{Find the} lot|.", "to find the Lot"),
        ("Tells {the lot|} of a city.", "for the lot"),
        # One token is two where a capital begins them: "The", " ".
        ("{The} lot| of a city.", "for the lot"),
        ("Tells if {it is the lot|} of a city.", "for it is the lot"),
        ("{Find the} lot|s.", "to find the lot"),
        ("A lot: {find the lot|}.", "to find the lot"),
        ("A lot| of one lot.", "to find the lot"),
        ("Allot lots or a_lot.", "to find the lot"),
        ("Allot lots to the lot|.", "to find the lot"),
        ("The Lot.", "to find the lot"),
        ("What to find.", "to find the lot"),
        ("Runs nodexjs, of c.", "to run node.js"),
        ("Runs nodexjs, of c.", "to speak c++"),
        ("", "to find the lot"),
        (f"{BEFORE_TASK} {{find the lot|}} {QUICK}", "to find the lot"),
        (f"{BEFORE_TASK}, find the lot {QUICK}", "to find the lot"),
        (f"{BEFORE_WORD} lot| {QUICK}", "to find the lot"),
        (f"{BEFORE_WORD}, lot {QUICK}", "to find the lot"),
    ],
)
@pytest.mark.parametrize("name", ["get_lot", "your_lot"])
def test_a_task_is_looked_up_in_what_its_description_says_first(
    description: str, how: str, name: str
):
    """{What} is copied, and what is asked for ends at the |: without one, at the name's end."""
    marks = {mark: plain(description[: description.find(mark)]) for mark in "{}|"}
    read = telling(plain(description), f"The tool {how} is {name}.", name)
    defined = read.definitions[name]
    at = read.text.index(f"The tool {how}") + len("The tool to ")
    at += how.startswith("for ")
    named = read.text.index(f" is {name}.", at) + len(" is ")
    said = read.covering(named, name)
    copied = {token - 1: defined.name[0] + i for i, token in enumerate(said)}
    asked = {said[0] - 1: defined.name[1]}
    begins, _ = defined.description
    if "|" in description:
        asked[said[0] - 1] = end = read.token(begins + len(marks["|"]) - 1)
        if "{" in description:
            task = read.token(at)
            asked[task - 1] = end
            text = marks["}"].removeprefix(marks["{"])
            there = read.covering(begins + len(marks["{"]), text)
            copied |= {task - 1 + i: place for i, place in enumerate(there)}
    assert read.looks(ASKED) == asked
    assert read.looks(NEXT) == copied


def plain(description: str) -> str:
    return re.sub(r"[{}|]", "", description)


@pytest.mark.parametrize(
    "said",
    [
        "A tool to find the lot is get_lot.",
        "The tool of the lot is get_lot.",
        "The tool to find the lot is get_lots.",
        "The tool to find the lot is get_lot, which",
        "The tool to find the lot was get_lot.",
        "To find the lot is get_lot.",
    ],
)
def test_what_is_no_plan_looks_nowhere(said: str):
    read = telling("Find the lot.", said)
    assert not read.looks(ASKED) and not read.looks(NEXT)


def test_each_plan_of_an_answer_is_looked_up():
    unknown, last = "The tool to find the lots is get_lots.", "The tool to find the lot is get_lot."
    first = "The tool to find the lot is find_it."
    one = telling("Find the lot.", last)
    all_of_them = telling("Find the lot.", f"{first} {unknown} {last}")
    moved = len(all_of_them.ids) - len(one.ids)
    for kind, more in ((ASKED, 2), (NEXT, 6)):
        looks, expected = all_of_them.looks(kind), one.looks(kind)
        assert len(looks) == len(expected) + more
        assert looks.items() > {token + moved: at for token, at in expected.items()}.items() > set()


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
    assert not any(read.looks(kind) for read in reads for kind in range(KINDS_OF_LOOKS))


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
