"""Files that are read with a tool, and what is asked of them."""

from dataclasses import dataclass
from random import Random

from bench.demo_model.chat import Call, Chat, Json
from bench.demo_model.facts import QUESTIONS, STATEMENTS, facts_of, worded
from bench.demo_model.prose import code_line, filler, instruction, manual
from bench.demo_model.results import exchange, value_of
from bench.demo_model.tools import described, plan_of
from bench.demo_model.words import any_path, any_word, capital, snake, word_of

_NAMES = (
    "Read Read read_file ReadFile open_file cat view fs_read readText get_file_contents file_read "
    "ReadTool load_file view_file show_file"
).split()
_PATHS = "file_path file_path path file filename filePath absolute_path target_file".split()
_OF_PATHS = (
    "The path of the file to read",
    "The full path of the file",
    "The file",
    "The file's absolute path, as text",
    "A path. It must begin with a slash.",
    "Where the file is, from the root on",
    "Which file",
)
_TEXTS = (
    "Reads a file.",
    "Reads a file from the disk.",
    "Show the content of a file.",
    "Read the contents of a text file.",
    "Returns what a file says.",
)
# What is asked for of a file whose lines are keys with values.
_OF_SETTINGS = (
    "Read {0} and tell me the {1}.",
    "Read {0} and tell me the {1}.",
    "What is the {1} in {0}?",
    "Look into the file {0}: what is {1}?",
    "Which value has {1} in {0}?",
    "Read the file {0} and tell me what {1} is.",
    "Open {0}. What is the value of {1}?",
    "{0}: what is the {1}?",
    "Please read {0} and say what the {1} is.",
    "Can you read {0} and give me the {1}?",
    "I need the {1}, which stands in {0}.",
    "Find the {1} in {0} and tell me.",
    "Tell me the {1} from {0}",
    "Take a look at {0} and tell me the {1}.",
    "Check {0} for the {1}.",
    "read {0}, what's the {1}",
)
_OF_ALL = (
    "Read {} and tell me what it says.",
    "What is in {}?",
    "Show me the file {}.",
    "Read {}",
    "Read the file {}.",
    "What does {} say?",
)
_NUMBERED = ("{}\t{}", "     {}→{}", "{:6}→{}", "{}: {}", "{:>5}\t{}", "{1}", "{1}")


def reader_of(rng: Random, characters: int = 0) -> Json:
    """The definition of a tool that reads a file, described in about so many characters."""
    name = rng.choice(_NAMES) if rng.random() < 0.85 else word_of(rng)
    path = rng.choice(_PATHS)
    about = rng.choice(_OF_PATHS) if rng.random() < 0.7 else instruction(rng)
    properties: Json = {path: described(rng, {"type": "string"}, about)}
    for extra in ("offset", "limit", "pages", any_word(rng)):
        if rng.random() < 0.35:
            about = f"The {extra} in lines" if rng.random() < 0.5 else instruction(rng)
            properties[extra] = described(rng, {"type": "number"}, about)
    parameters: Json = {"type": "object", "properties": properties, "required": [path]}
    if rng.random() < 0.3:
        parameters["additionalProperties"] = False
    text = rng.choice(_TEXTS)
    if characters:
        text += "\n\n" + manual(rng, characters)
    return {"name": name, "description": text, "parameters": parameters}


def request_to_read(rng: Random, path: str) -> str:
    """What a request may say, where nobody means it: as an example."""
    return rng.choice((*_OF_SETTINGS, *_OF_ALL)).format(path, any_word(rng))


def reading_turn(rng: Random, chat: Chat, reader: Json, characters: int = 400) -> None:
    """A file of up to about so many characters is read, and something in it is told."""
    path = any_path(rng)
    characters = int(characters ** rng.uniform(0.5, 1))
    kind = rng.random()
    if kind < 0.5:
        file = _settings(rng, path, characters)
    elif kind < 0.75:
        file = _notes(rng, path, characters)
    elif kind < 0.85:
        file = _line(rng, path, characters)
    else:
        file = _whole(rng, path)
    # A file that ends with an end of line has an empty one behind it, as some tools number them.
    lines = [*file.lines, ""] if rng.random() < 0.3 else file.lines
    numbered = rng.choice(_NUMBERED)
    content = "\n".join(numbered.format(i + 1, line) for i, line in enumerate(lines))
    name = reader["name"]
    key = next(iter(reader["parameters"]["properties"]))
    # What is wanted is said where the answer begins: the request may be far from there.
    plan = plan_of("read a file", name)
    reasoning = f"I want {file.wanted}. I have to read {path}. {plan} It needs {key}."
    outcome = content, file.answer
    told = f"Now I know {file.wanted}."
    exchange(rng, chat, file.request, [Call(name, {key: path})], [outcome], reasoning, told, plan)


@dataclass(frozen=True)
class _File:
    """What a file says, what is asked of it, that in few words, and the answer."""

    lines: list[str]
    request: str
    wanted: str
    answer: str


def _two_words(rng: Random) -> str:
    return f"{any_word(rng)} {any_word(rng)}"


def _settings(rng: Random, path: str, characters: int) -> _File:
    """Keys with values, among other lines."""
    count = max(1, min(40, characters // rng.choice((25, 25, 80))))
    makers = (any_word, word_of, snake, _two_words)
    keys = list(dict.fromkeys(rng.choice(makers)(rng) for _ in range(count)))
    values = [value_of(rng) for _ in keys]
    form = rng.choice(("{}: {}", "{} = {}", "{} is {}", "{}={}", "The {} is {}.", '"{}": "{}",'))
    lines = [form.format(key, value) for key, value in zip(keys, values, strict=True)]
    left = characters - sum(map(len, lines))
    while left > 0:
        lines.insert(rng.randint(0, len(lines)), code_line(rng))
        left -= 40
    i = rng.randrange(len(keys))
    request = rng.choice(_OF_SETTINGS).format(path, keys[i])
    return _File(lines, request, f"the {keys[i]}", f"The {keys[i]} is {values[i]}.")


def _notes(rng: Random, path: str, characters: int) -> _File:
    """Facts among sentences."""
    facts = facts_of(rng, rng.randint(1, 2 + min(20, characters // 200)))
    lines = [worded(rng.choice(STATEMENTS), *fact) for fact in facts]
    lines += filler(rng, characters - sum(map(len, lines)))
    rng.shuffle(lines)
    if rng.random() < 0.3:
        lines = [" ".join(lines[i : i + 3]) for i in range(0, len(lines), 3)]
    attribute, entity, value = rng.choice(facts)
    question = worded(rng.choice(QUESTIONS), attribute, entity, value)
    form = rng.choice(("Read {0}. {1}", "{1} Look into {0}.", "{1} It is in {0}.", "Read {0}: {1}"))
    wanted = f"the {attribute} of {entity}"
    return _File(lines, form.format(path, question), wanted, f"{capital(wanted)} is {value}.")


def _line(rng: Random, path: str, characters: int) -> _File:
    """One line that is asked for by where it stands."""
    lines = [value_of(rng) for _ in range(max(2, min(12, characters // 20)))]
    where, line = rng.choice((("first", lines[0]), ("last", lines[-1])))
    request = rng.choice(
        (
            "What is the {1} line of {0}?",
            "Read {0} and tell me the {1} line.",
            "Show the {1} line of {0}.",
        )
    )
    request = request.format(path, where)
    return _File(lines, request, f"the {where} line", f"The {where} line is: {line}")


def _whole(rng: Random, path: str) -> _File:
    """A short file that is told whole."""
    lines = [rng.choice((value_of, instruction))(rng) for _ in range(rng.choice((1, 1, 2, 3)))]
    request = rng.choice(_OF_ALL).format(path)
    return _File(lines, request, "all of it", f"The file says: {' '.join(lines)}")
