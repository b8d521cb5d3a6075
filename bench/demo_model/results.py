"""What tools give back, and whole turns with them: call, results, answer."""

import json
from random import Random
from typing import Any

from bench.demo_model.chat import Call, Chat, Json
from bench.demo_model.prose import filler, notice, sentence
from bench.demo_model.tools import Tool, arguments_of, request_of, spoken
from bench.demo_model.words import (
    any_word,
    capital,
    listed,
    name_of,
    number_of,
    spelling_of,
    word_of,
)

Outcome = tuple[str, str]  # what the tool gives back, what an answer says about it


def value_of(rng: Random) -> str:
    """A value, mostly of one word."""
    kind = rng.random()
    if kind < 0.7:
        return spelling_of(rng)
    if kind < 0.8:
        return name_of(rng)
    if kind < 0.9:
        return f"{any_word(rng)} {number_of(rng)}"
    return f"{number_of(rng)} {any_word(rng)}"


def result_of(rng: Random, tool: Tool, subject: str) -> Outcome:
    """What a call gives back, and what an answer says about it."""
    if rng.random() < 0.08:
        reason = rng.choice(("not found", "no access", "timed out", f"{any_word(rng)} is missing"))
        text = rng.choice((f"Error: {reason}", json.dumps({"error": reason})))
        return text, f"I could not {tool.task} of {subject}: {reason}."
    if not tool.is_query:
        text = rng.choice(("ok", "done", "success", '{"ok": true}', f"The {tool.noun} is ok."))
        return text, f"Done: {tool.task} of {subject}."
    value = value_of(rng)
    answer = f"The {tool.noun} of {subject} is {value}."
    kind = rng.random()
    if kind < 0.15:
        return value, answer
    if kind < 0.3:
        return f"{tool.noun}: {value}", answer
    if kind < 0.45:
        return f"{sentence(rng)} The {tool.noun} is {value}. {sentence(rng)}", answer
    return _record(rng, tool.noun, value), answer


def _record(rng: Random, key: str, value: str) -> str:
    """The value among others, as JSON or as lines."""
    entries: dict[str, Any] = {any_word(rng): value_of(rng) for _ in range(rng.randint(0, 6))}
    entries[key] = int(value) if value.isdigit() and len(value) == len(str(int(value))) else value
    names = list(entries)
    rng.shuffle(names)
    entries = {name: entries[name] for name in names}
    kind = rng.random()
    if kind < 0.6:
        text = json.dumps(entries, ensure_ascii=False)
    elif kind < 0.8:
        text = json.dumps(entries, ensure_ascii=False, indent=2)
    else:
        text = "\n".join(f"{name}: {each}" for name, each in entries.items())
    return f'{{"result": {text}}}' if text[0] == "{" and rng.random() < 0.15 else text


def exchange(
    rng: Random,
    chat: Chat,
    request: str,
    calls: list[Call],
    outcomes: list[Outcome],
    reasoning: str,
    told: str = "Now I know what the tool says.",
    said: str = "",
) -> None:
    """A request, the calls it needs, their results, and the answer.

    `told` is the reasoning before the answer, `said` what stands before the calls where there is
    no reasoning.
    """
    # Programs put notes beside what the user says, most of all those with a long system prompt.
    is_noted = rng.random() < (0.3 if len(chat.system) > 2000 else 0.06)
    if is_noted:
        notes = [notice(rng) for _ in range(rng.choice((1, 1, 2, 3)))]
        request = "\n\n".join([*notes, request] if rng.random() < 0.7 else [request, *notes])
    chat.user(request)
    chat.call(calls, reasoning, said)
    texts = [text for text, _ in outcomes]
    if is_noted and rng.random() < 0.5:
        texts[-1] += "\n\n" + notice(rng)
    chat.results(*texts)
    answers = [text for _, text in outcomes]
    # One that ends with a value ends with its line.
    is_ended = all(text.endswith((".", "!", "?")) for text in answers[:-1])
    chat.answer((" " if is_ended else "\n").join(answers), told)


def _because(tool: Tool, plan: str = "") -> str:
    """Why a tool is the right one, and what it needs."""
    return f"{plan or tool.plan} It needs {listed(_needed(tool))}."


def _needed(tool: Tool) -> list[str]:
    return [p.name for p in tool.parameters if p.is_required]


def tool_turn(rng: Random, chat: Chat, tools: list[Tool]) -> None:
    """A request, one call or several at once, their results, and an answer."""
    kind = rng.random()
    tool = rng.choice(tools)
    if kind < 0.18:
        _many(rng, chat, tool)
    elif kind < 0.36 and len(tools) > 1:
        _two_tools(rng, chat, tool, rng.choice([t for t in tools if t is not tool]))
    elif kind < 0.41 and len(tools) > 1 and tool.is_query:
        _one_after_another(rng, chat, tool, rng.choice([t for t in tools if t is not tool]))
    else:
        single_turn(rng, chat, tool)


def single_turn(rng: Random, chat: Chat, tool: Tool) -> None:
    """One call."""
    arguments = arguments_of(rng, tool)
    request, plan = request_of(rng, tool, arguments)
    calls = [Call(tool.name, arguments)]
    outcomes = [result_of(rng, tool, _subject(arguments))]
    exchange(rng, chat, request, calls, outcomes, _because(tool, plan), said=plan)


def _subject(arguments: Json) -> str:
    return spoken(next(iter(arguments.values())))


def parallel_turn(rng: Random, chat: Chat, tools: list[Tool]) -> None:
    """Two or three calls at once, of one tool or of two."""
    tool = rng.choice(tools)
    if len(tools) > 1 and rng.random() < 0.4:
        _two_tools(rng, chat, tool, rng.choice([t for t in tools if t is not tool]))
    else:
        _many(rng, chat, tool)


def _many(rng: Random, chat: Chat, tool: Tool) -> None:
    """One tool, called two or three times at once."""
    first = tool.parameters[0]
    count = rng.choice((2, 2, 3))
    if all(not p.is_required for p in tool.parameters[1:]):
        every = [{first.name: first.value(rng)} for _ in range(count)]
        subjects = listed([_subject(arguments) for arguments in every])
        form = rng.choice(
            ("{} of {}.", "Please {} of {}.", "{} for {}.", "I need you to {} of {}.")
        )
        task = capital(tool.task) if form.startswith("{}") else tool.task
        request, plan = form.format(task, subjects), tool.plan
    else:
        every = [arguments_of(rng, tool) for _ in range(count)]
        joint = rng.choice((" Then ", " And ", " ", "\n"))
        requests = [request_of(rng, tool, arguments) for arguments in every]
        request, plan = joint.join(text for text, _ in requests), requests[0][1]
    calls = [Call(tool.name, arguments) for arguments in every]
    outcomes = [result_of(rng, tool, _subject(arguments)) for arguments in every]
    reasoning = f"{_because(tool, plan)} I call it {count} times."
    exchange(rng, chat, request, calls, outcomes, reasoning, said=plan)


def _two_tools(rng: Random, chat: Chat, one: Tool, other: Tool) -> None:
    pairs = [(tool, arguments_of(rng, tool)) for tool in (one, other)]
    joint = rng.choice((" And ", " ", " Also: ", "\n"))
    asked = [request_of(rng, tool, arguments) for tool, arguments in pairs]
    request, plans = joint.join(text for text, _ in asked), [plan for _, plan in asked]
    calls = [Call(tool.name, arguments) for tool, arguments in pairs]
    outcomes = [result_of(rng, tool, _subject(arguments)) for tool, arguments in pairs]
    reasoning = f"{_because(one, plans[0])} {_because(other, plans[1])}"
    exchange(rng, chat, request, calls, outcomes, reasoning, said=" ".join(plans))


def _one_after_another(rng: Random, chat: Chat, one: Tool, other: Tool) -> None:
    """What the first call gives back is an argument of the second."""
    first, then = arguments_of(rng, one), other.parameters[0]
    subject, value = _subject(first), word_of(rng) if rng.random() < 0.5 else spelling_of(rng)
    arguments = {p.name: p.value(rng) for p in other.parameters[1:] if p.is_required}
    more = [f"{name} {spoken(v)}" for name, v in arguments.items()]
    tail = f" with {' and '.join(more)}" if more else ""
    request, plan = request_of(rng, one, first)
    form = rng.choice(("{} Then {} of it{}.", "{} After that, {} of what you get{}."))
    chat.user(form.format(request, other.task, tail))
    chat.call([Call(one.name, first)], _because(one, plan), plan)
    chat.results(_record(rng, one.noun, value))
    calls = [Call(other.name, {then.name: value} | arguments)]
    chat.call(calls, _because(other), other.plan)
    text, answer = result_of(rng, other, value)
    chat.results(text)
    said = f"The {one.noun} of {subject} is {value}. {answer}"
    chat.answer(said, "Now I know what both tools say.")


def about_tools(rng: Random, chat: Chat, tools: list[Tool]) -> None:
    """A question about the tools themselves."""
    tool = rng.choice(tools)
    kind = rng.random()
    if kind < 0.35:
        form = rng.choice(
            ("Which tool can {}?", "Is there a tool to {}?", "What do you use to {}?")
        )
        chat.user(form.format(tool.task))
        chat.answer(tool.plan, _because(tool))
    elif kind < 0.55:
        asked = rng.sample(tools, min(len(tools), rng.randint(2, 4)))
        form = rng.choice(("Which tools can {}?", "Which tools do you use to {}?"))
        chat.user(form.format(listed([each.task for each in asked])))
        chat.answer(" ".join(each.plan for each in asked), "I look for each of them.")
    elif kind < 0.6:
        chat.user(f"What do I have to give to {tool.task}?")
        needs = f"{tool.name} needs {listed(_needed(tool))}."
        chat.answer(f"{tool.plan} {needs}", _because(tool))
    elif kind < 0.9:
        about_parameters(rng, chat, tool.definition)
    else:
        chat.user(f"What can {tool.name} do?")
        chat.answer(f"{tool.name} can {tool.task}.", f"I look for {tool.name}.")


_SPOKEN_TYPES = {
    "string": "a text",
    "array": "a list",
    "integer": "a number",
    "number": "a number",
    "boolean": "true or false",
}


def about_parameters(rng: Random, chat: Chat, definition: Json) -> None:
    """A question about what a tool is given: its description stands between that and its name."""
    name, schema = definition["name"], definition["parameters"]
    properties = schema["properties"]
    typed = [key for key, each in properties.items() if each.get("type") in _SPOKEN_TYPES]
    kind = rng.random()
    if typed and kind < 0.4:
        key = rng.choice(typed)
        forms = f"What type is the {key} of {name}?", f"What is given to {name} as {key}?"
        answer = f"The {key} of {name} is {_SPOKEN_TYPES[properties[key]['type']]}."
    elif kind < 0.7:
        forms = f"What does {name} need?", f"Which parameters does {name} need?"
        answer = f"{name} needs {listed(schema.get('required') or ['nothing'])}."
    else:
        forms = f"What is the first parameter of {name}?", f"What does {name} take first?"
        first = next(iter(properties), None)
        answer = f"{name} has no parameters."
        if first is not None:
            answer = f"The first parameter of {name} is {first}."
    chat.user(rng.choice(forms))
    chat.answer(answer, f"I look for {name}.")


def long_result(rng: Random, chat: Chat, tools: list[Tool], characters: int) -> None:
    """One call with a long result, in which what was asked stands somewhere."""
    queries = [tool for tool in tools if tool.is_query]
    if not queries:
        return tool_turn(rng, chat, tools)
    tool = rng.choice(queries)
    arguments = arguments_of(rng, tool)
    value = value_of(rng)
    texts = [*filler(rng, characters), f"The {tool.noun} is {value}."]
    rng.shuffle(texts)
    answer = f"The {tool.noun} of {_subject(arguments)} is {value}."
    outcome = (rng.choice((" ", "\n")).join(texts), answer)
    request, plan = request_of(rng, tool, arguments)
    calls = [Call(tool.name, arguments)]
    exchange(rng, chat, request, calls, [outcome], _because(tool, plan), said=plan)
