"""Conversations of the demo model's world, each drawn from a seed alone."""

from random import Random

from bench.demo_model.chat import Chat, Turn
from bench.demo_model.everyday import everyday_of
from bench.demo_model.exercises import exercise
from bench.demo_model.facts import ask, glossary, personal, recall, records
from bench.demo_model.heads import agent
from bench.demo_model.prose import manual, sentence
from bench.demo_model.reading import reader_of, reading_turn
from bench.demo_model.results import about_tools, long_result, tool_turn
from bench.demo_model.talk import pretending, small_talk, storytelling, wondering
from bench.demo_model.tools import LISTS, OPAQUE, TYPES, tools_of
from bench.demo_model.words import any_word, name_of

CHARACTERS_PER_TOKEN = 2.8

MOST_TOOLS = 24
# A short definition, in characters, and what a call with its result and answer takes.
_DEFINITION = 260
_TOOL_TURN = 420
# The text around the definitions.
_HEAD = 900
_LONG = 20_000
# Shares of tools that are like others: of half of them in the held-out cases at most.
_LIKE = (0.0, 0.2, 0.5, 0.8)
# Shares of names that tell nothing. Where most names follow from the request, guessing them from it
# is learned, and looking them up is not.
_OPAQUE = (OPAQUE, 0.4, 1.0)


def chat_of(rng: Random, tokens: int, lookups: float = 0) -> Chat:
    """A conversation of about so many tokens, most of them fewer.

    `lookups` is the share of those that only look names up.
    """
    room = int(tokens * CHARACTERS_PER_TOKEN)
    chat = Chat(thinks=rng.random() < 0.3)
    if rng.random() < lookups:
        _lookups(rng, chat, room)
        return chat
    # Long heads take much of the longest sequences, in which little else is asked.
    if tokens >= 1500 and rng.random() < (0.4 if tokens > 6000 else 0.2):
        agent(rng, chat, tokens)
    elif rng.random() < 0.7 and tokens >= 600:
        _with_tools(rng, chat, room)
    else:
        _without_tools(rng, chat, room)
    return chat


def _lookups(rng: Random, chat: Chat, room: int) -> None:
    """Names that are looked up by what stands behind them: in short lists, in definitions."""
    chat.thinks = chat.thinks and rng.random() < 0.2
    if rng.random() < 0.7 or room < 4 * _DEFINITION:
        room = min(room, 3000)
        size = int(80 + room / 2 * rng.random() ** 2)
        glossary(rng, chat, size, 1 if chat.thinks else max(1, (room - size) // 70))
        return
    count = rng.randint(2, max(2, min(MOST_TOOLS, room // 2 // _DEFINITION)))
    tools = tools_of(rng, count, 0, _LIKE, rng.choice(_OPAQUE[1:]))
    chat.tools = [tool.definition for tool in tools]
    while _length(chat) < room * 0.85:
        about_tools(rng, chat, tools)


def _system(rng: Random) -> str:
    return rng.choice(
        (
            "You are a helpful assistant.",
            "Be brief.",
            f"Your user is {name_of(rng)}.",
            "Answer in one sentence.",
            f"You are {name_of(rng)}, a helpful assistant.",
            f"This is about {any_word(rng)}. {sentence(rng)}",
            manual(rng, 300),
        )
    )


def _without_tools(rng: Random, chat: Chat, room: int) -> None:
    if rng.random() < 0.3:
        chat.system = _system(rng)
    # Only the last answer keeps its reasoning: a second one would teach to leave it out.
    turns = rng.randint(1, 2) if chat.thinks else rng.randint(1, 40)
    facts = []
    if rng.random() < 0.65:
        used = 900 if chat.thinks else 700
        characters = int(min(rng.uniform(0.05, 1) * room, max(room - used, 150)))
        questions = 1 if chat.thinks else rng.randint(1, 24)
        kind = rng.random()
        if kind < 0.4:
            facts = recall(rng, chat, characters, questions)
        elif kind < 0.85:
            glossary(rng, chat, min(characters, 4000), questions)
        else:
            records(rng, chat, min(characters, 2500), questions)
        turns = rng.randint(0, turns)
    for _ in range(turns):
        if _length(chat) > room * 0.85:
            return
        if facts and rng.random() < 0.5:
            ask(rng, chat, rng.choice(facts))
        else:
            _talk(rng, chat)
    if not chat.turns:
        _talk(rng, chat)


def _talk(rng: Random, chat: Chat) -> None:
    exercises = 8 if chat.thinks else 4
    kinds = (small_talk, wondering, storytelling, personal, pretending, *[exercise] * exercises)
    rng.choice(kinds)(rng, chat)


def _with_tools(rng: Random, chat: Chat, room: int) -> None:
    """Tools, a system prompt as long as there is room for, and turns to the end of the room."""
    turns = rng.choice((1, 2, 4, 8, 16, 60))
    # Nothing teaches to tell tools apart in so few tokens as questions about them.
    questions = rng.choice((0.05, 0.15, 0.5))
    most = max(1, min(MOST_TOOLS, (room - _HEAD) // _DEFINITION))
    # Few, some, and nearly all that fit.
    size = int(most ** rng.choice((0.5, 0.8, 1, 1)))
    count = rng.randint(rng.choice((1, max(1, size * 2 // 3))), size)
    spare = max(0, room - min(turns * _TOOL_TURN, room // 2) - _HEAD - count * _DEFINITION)
    is_wordy = rng.random() < (0.6 if room > _LONG else 0.3)
    wordy = rng.uniform(0, spare / count / 2) if is_wordy else 0
    everyday = everyday_of(rng, rng.randint(1, min(8, count))) if rng.random() < 0.5 else []
    opaque, types = rng.choice(_OPAQUE), rng.choice((TYPES, TYPES, LISTS))
    tools = tools_of(rng, count - len(everyday), int(min(wordy, 3000)), _LIKE, opaque, types)
    reader = reader_of(rng, int(rng.uniform(0, min(wordy, 2000)))) if rng.random() < 0.45 else None
    if not tools and not everyday:
        reader = reader or reader_of(rng)
    chat.tools = [tool.definition for tool in tools]
    chat.tools += [each.definition for each in everyday] + ([reader] if reader else [])
    rng.shuffle(chat.tools)
    names = [tool["name"] for tool in chat.tools]
    if len(set(names)) < len(names):  # an everyday name twice: the request would be unclear
        return _with_tools(rng, chat, room)
    spare -= max(0, len(str(chat.tools)) - count * _DEFINITION)
    if rng.random() < 0.6:
        share = rng.random() if room > _LONG else rng.random() ** 2
        chat.system = manual(rng, int(spare * share)) or _system(rng)
    done, used = 0, _HEAD + _length(chat)
    for _ in range(turns):
        used += sum(map(_turn_length, chat.turns[done:]))
        done = len(chat.turns)
        left = room - used
        if left < _TOOL_TURN and chat.turns:
            break
        what = rng.random()
        if what < 0.08:
            # No sums, which may be a tool's task.
            kind = rng.choice(("count", "copy", "reverse", "sort numbers", "sort words", "next"))
            talks = (small_talk, small_talk, pretending, personal)
            rng.choice(talks)(rng, chat) if rng.random() < 0.6 else exercise(rng, chat, kind)
        elif tools and rng.random() < questions:
            about_tools(rng, chat, tools)
        elif reader and (what < 0.4 or (not tools and not everyday)):
            reading_turn(rng, chat, reader, max(200, min(left // 2, 12_000)))
        elif everyday and (what < 0.6 or not tools):
            rng.choice(everyday).turn(rng, chat)
        elif tools and what > 0.97:
            long_result(rng, chat, tools, max(100, min(left // 3, 8000)))
        elif tools:
            tool_turn(rng, chat, tools)
    if not chat.turns:
        small_talk(rng, chat)


def _length(chat: Chat) -> int:
    """Characters, roughly."""
    return len(chat.system) + len(str(chat.tools)) + sum(map(_turn_length, chat.turns))


def _turn_length(turn: Turn) -> int:
    texts = sum(map(len, turn.results)) + len(turn.text) + len(turn.reasoning) + 20
    return texts + sum(len(str(call.arguments)) + 100 for call in turn.calls)
