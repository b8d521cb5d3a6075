"""Tools that people try first: weather, time, search, sums, mail, files, commands.

TRAINED are those of all the tools that people try that training draws.
"""

import json
from random import Random

from bench.demo_model.enquiries import ENQUIRIES
from bench.demo_model.errands import Argument, Errand, Named, ToolKind, definition_of
from bench.demo_model.programming import PROGRAMMING
from bench.demo_model.prose import code_line, sentence
from bench.demo_model.services import SERVICES
from bench.demo_model.words import (
    CITIES,
    WEATHERS,
    any_path,
    any_word,
    city_of,
    email_of,
    file_name,
    path_of,
    phrase_of,
    spelling_of,
)
from bench.demo_model.workplace import WORKPLACE


def _weather(rng: Random) -> Errand:
    city, sky, degrees = city_of(rng), rng.choice(WEATHERS), rng.randint(-15, 40)
    request = rng.choice(
        (
            "What is the weather in {}?",
            "What's the weather in {}?",
            "How is the weather in {} today?",
            "Tell me the weather in {}.",
            "weather in {}",
            "Is it warm in {}?",
            "What is the weather like in {}?",
        )
    )
    texts = (
        f"{sky}, {degrees} degrees",
        json.dumps({"temperature": degrees, "condition": sky}),
        json.dumps({"city": city, "condition": sky, "temperature": degrees, "wind": 12}),
        f"{degrees}°C, {sky}",
    )
    answer = f"The weather in {city} is {sky}, {degrees} degrees."
    return Errand(request.format(city), (city,), (rng.choice(texts), answer))


def _time(rng: Random) -> Errand:
    city, time = rng.choice(CITIES), f"{rng.randrange(24):02}:{rng.randrange(60):02}"
    request = rng.choice(("What time is it in {}?", "Tell me the time in {}.", "time in {}"))
    text = rng.choice((time, json.dumps({"time": time}), f"It is {time}."))
    return Errand(request.format(city), (city,), (text, f"It is {time} in {city}."))


def _sum(rng: Random) -> Errand:
    a, b, sign = rng.randrange(1000), rng.randrange(1, 1000), rng.choice("+-*")
    value = {"+": a + b, "-": a - b, "*": a * b}[sign]
    expression = f"{a} {sign} {b}"
    request = rng.choice(("What is {}?", "Calculate {}.", "How much is {}?", "{}"))
    text = rng.choice((str(value), json.dumps({"result": value})))
    return Errand(request.format(expression), (expression,), (text, f"{expression} = {value}"))


def _search(rng: Random) -> Errand:
    query, found = phrase_of(rng), sentence(rng)
    request = rng.choice(("Search for {}.", "Search the web for {}.", "Find something about {}."))
    text = rng.choice((found, json.dumps({"results": [found]}, ensure_ascii=False)))
    return Errand(request.format(query), (query,), (text, f"I found this: {found}"))


def _mail(rng: Random) -> Errand:
    to, text = email_of(rng), phrase_of(rng)
    request = rng.choice(('Send an email to {} that says "{}".', "Write to {}: {}"))
    return Errand(request.format(to, text), (to, text), ("sent", f"I sent the email to {to}."))


def _folder(rng: Random) -> Errand:
    folder = any_path(rng).rsplit("/", 1)[0] or "."
    names = sorted({file_name(rng) for _ in range(rng.randint(1, 6))})
    request = rng.choice(("Which files are in {}?", "List the files in {}."))
    text = rng.choice(("\n".join(names), json.dumps(names, ensure_ascii=False)))
    return Errand(request.format(folder), (folder,), (text, f"In {folder}: {', '.join(names)}."))


def _command(rng: Random) -> Errand:
    command = rng.choice(
        (
            "date",
            "pwd",
            f"ls {path_of(rng)}",
            f"cat {path_of(rng)}",
            f"git {any_word(rng)}",
            f"grep {spelling_of(rng)} {path_of(rng)}",
            f"{any_word(rng)} --{any_word(rng)} {spelling_of(rng)}",
        )
    )
    text = rng.choice((spelling_of(rng), phrase_of(rng), code_line(rng).strip() or "ok"))
    request = rng.choice(("Run {}", "Run `{}`.", "Please run {} for me", "Execute {}"))
    return Errand(request.format(command), (command,), (text, f"It says: {text}"))


def _write(rng: Random) -> Errand:
    path, text = any_path(rng), phrase_of(rng, 8)
    request = rng.choice(('Write "{1}" into the file {0}.', "Make a file {0} that says: {1}"))
    done = rng.choice(("ok", "File written.", f"wrote {len(text)} bytes"))
    return Errand(request.format(path, text), (path, text), (done, f"I wrote the file {path}."))


_CITY = Argument(("city", "location", "place", "city_name"))
_PATH = Argument(("path", "file_path", "filePath", "filename"))
EVERYDAY = (
    ToolKind(("get_weather", "weather", "getWeather", "current_weather", "get_current_weather"),
             ("Get the current weather in a city.",), (_CITY,), _weather),
    ToolKind(("get_time", "time", "current_time", "getTime", "clock"), ("Get the time in a city.",),
             (_CITY,), _time),
    ToolKind(("calculator", "calculate", "calc", "evaluate", "math"), ("Calculate an expression.",),
             (Argument(("expression", "input", "formula")),), _sum),
    ToolKind(("search", "web_search", "WebSearch", "search_web"), ("Search the web.",),
             (Argument(("query", "q", "search_query")),), _search),
    ToolKind(("send_email", "sendEmail", "send_mail", "email"), ("Send an email.",),
             (Argument(("to", "recipient", "address")), Argument(("body", "text", "message"))),
              _mail),
    ToolKind(("list_files", "ls", "LS", "list_directory", "ListFiles"),
             ("List the files in a folder.",), (Argument(("path", "folder", "directory")),),
              _folder),
    ToolKind(("bash", "Bash", "run_command", "shell", "execute"), ("Run a command.",),
             (Argument(("command", "cmd")),), _command),
    ToolKind(("write_file", "Write", "WriteFile", "create_file"), ("Write text into a file.",),
             (_PATH, Argument(("content", "text", "contents"))), _write),
)  # fmt: skip


# Those that are asked for in forms.
WORDED = (*SERVICES, *ENQUIRIES, *WORKPLACE, *PROGRAMMING)
# Each is drawn as often as any other.
TRAINED = (*EVERYDAY, *WORDED)


def everyday_of(rng: Random, count: int, kinds: tuple[ToolKind, ...] = TRAINED) -> list[Named]:
    """Some of the kinds, each once."""
    return [definition_of(rng, kind) for kind in rng.sample(kinds, count)]
