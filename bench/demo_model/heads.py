"""Requests under the long heads of prompts that programs with many tools write.

Owns what stands around a request: instructions, tools that are asked for among many that are not,
notes before the request, and a system turn behind it. Their texts are stock's.
"""

from dataclasses import dataclass
from random import Random

from bench.demo_model.chat import Chat, Json, Turn
from bench.demo_model.errands import Named
from bench.demo_model.everyday import everyday_of
from bench.demo_model.exercises import exercise
from bench.demo_model.facts import personal
from bench.demo_model.reading import reader_of, reading_turn
from bench.demo_model.results import about_parameters, tool_turn
from bench.demo_model.stock import Stock
from bench.demo_model.talk import pretending, small_talk
from bench.demo_model.tools import Tool, tools_of
from bench.demo_model.words import capital, deep_path

# Such texts are cut smaller than others.
CHARACTERS_PER_TOKEN = 2.15
# What a request with its call, result and answer takes.
_TURN = 750
# What the format says of tools.
_FIXED_TOKENS = 450
_MOST_OTHERS = 36


def agent(rng: Random, chat: Chat, tokens: int) -> None:
    """A program's long head, and requests to read files, to use its tools, or to talk.

    Not longer than so many tokens, most of the time.
    """
    stock = Stock(rng)
    chat.thinks = rng.random() < 0.7
    chat.others_weight = 0  # nothing in it could be foretold
    most = max(0, tokens - _FIXED_TOKENS) * CHARACTERS_PER_TOKEN
    turns = rng.choice((1, 2, 4, 8, 12) if tokens > 5000 else (1, 1, 1, 2, 3))
    turns = max(1, min(turns, int(most / 2 / _TURN)))
    room = max(0, most - turns * _TURN) * rng.choice((1, 1, rng.uniform(0.4, 1)))
    share = {
        "system": rng.random() * rng.choice((0, 0.5, 1)),
        "tools": rng.uniform(0.1, 1) * rng.choice((0.3, 1, 2)),
        "before": rng.random() ** 2 * rng.choice((0, 0.2, 0.6)),
        "behind": rng.random() * rng.choice((0, 0.3, 1, 1)),
    }
    whole = sum(share.values())
    room_of = {key: int(room * part / whole) for key, part in share.items()}
    called = with_tools(rng, chat, stock, room_of["tools"])
    if room_of["system"] > 100:
        chat.system = stock.passage(room_of["system"])
    # Of all those tools few are called, and their parameters are known after the first call.
    for _ in range(int(rng.choice((0, 2, 8, 16)) * min(1, most / 10_000))):
        about_parameters(rng, chat, rng.choice(chat.tools))
    used = len(chat.system) + len(str(chat.tools)) + len(str(chat.turns))
    around = min(1, max(0, room - used) / (1 + room_of["before"] + room_of["behind"]))
    parts = [rng.random() ** 3 + 0.02 for _ in range(turns)]
    for part in parts:
        first = len(chat.turns)
        called.turn(rng, chat)
        part *= around / sum(parts)
        before, behind = int(room_of["before"] * part), int(room_of["behind"] * part)
        surround(rng, chat, first, stock, before, behind)
        used += sum(len(str(turn)) for turn in chat.turns[first:])
        if used > most - _TURN:
            break


@dataclass(frozen=True)
class Called:
    """The tools of a conversation that are asked for."""

    reader: Json
    everyday: list[Named]
    tools: list[Tool]

    def turn(self, rng: Random, chat: Chat) -> None:
        """A request, what it needs, and its answer; most read a file."""
        what = rng.random()
        if what < 0.12 and self.everyday:
            rng.choice(self.everyday).turn(rng, chat)
        elif what < 0.25 and self.tools:
            tool_turn(rng, chat, self.tools)
        elif what < 0.29:
            exercise(rng, chat, rng.choice(("count", "copy", "reverse", "sort words", "next")))
        elif what < 0.35:
            rng.choice((small_talk, small_talk, pretending, personal))(rng, chat)
        else:
            reading_turn(rng, chat, self.reader, rng.choice((150, 400, 900)))


def with_tools(rng: Random, chat: Chat, stock: Stock, characters: int) -> Called:
    """Give the conversation tools: a reader, some that are asked for, and many that are not."""
    reader = _reader(rng, stock, int(rng.uniform(0, min(2500, characters / 3))))
    everyday = everyday_of(rng, min(rng.randint(0, 4), characters // 400))
    tools = tools_of(rng, min(rng.randint(0, 5), characters // 500), min(600, characters // 12))
    chosen = {tool.name: tool.definition for tool in tools}
    chosen |= {each.definition["name"]: each.definition for each in everyday}
    chosen[reader["name"]] = reader
    tools = [tool for tool in tools if chosen[tool.name] is tool.definition]
    stock.names += chosen
    left = characters - sum(len(str(each)) for each in chosen.values())
    count = min(_MOST_OTHERS, int(left / 10 ** rng.uniform(2.6, 3.6)))
    sizes = [rng.expovariate(1) + 0.05 for _ in range(count)]
    for size in sizes:
        form = rng.choice(("{n}", "{v}", "{v}_{n}", "{v}-{n}", "{l}", "{v} {n}"))
        name = form.format_map(stock)
        if " " in name or rng.random() < 0.5:
            name = "".join(map(capital, name.replace(" ", "_").split("_")))
        # A schema takes some hundred characters.
        chosen.setdefault(name, stock.tool(name, int(left * size / sum(sizes)) - 600))
    chat.tools = list(chosen.values())
    rng.shuffle(chat.tools)
    return Called(reader, everyday, tools)


def _reader(rng: Random, stock: Stock, characters: int) -> Json:
    reader = reader_of(rng)
    if rng.random() < 0.4:
        reader["name"] = "Read"
    if characters > 100:
        reader["description"] += "\n\n" + stock.passage(characters)
    parameters = reader["parameters"]
    for name in list(parameters["properties"])[1:]:
        parameters["properties"][name] = stock.schema(3)
    if rng.random() < 0.6:
        schema = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
        reader["parameters"] = schema | parameters
    return reader


def surround(rng: Random, chat: Chat, at: int, stock: Stock, before: int, behind: int) -> None:
    """Put notes before the request at a place, and a system turn behind it."""
    request = chat.turns[at].text
    notes: list[str] = []
    while before > 60:
        size = rng.randint(60, max(60, before))
        notes.append(stock.note(size))
        before -= size
    joint = rng.choice(("\n\n", "\n\n\n", "\n\n\n\n", "\n"))
    chat.turns[at] = Turn("user", joint.join([*notes, request]))
    if behind > 60:
        words = request.split()
        folder = next((w.rsplit("/", 1)[0] for w in words if w.count("/") > 1), "")
        text = stock.surroundings(folder if rng.random() < 0.7 else deep_path(rng), behind)
        chat.turns.insert(at + 1, Turn("system", text))
