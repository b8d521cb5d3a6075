"""Tools that strangers would try: what is asked for says all that the call needs."""

import json
import re
from dataclasses import replace
from random import Random
from string import Formatter
from typing import cast

import pytest

from bench.demo_model.cases import case
from bench.demo_model.chat import Chat, Encoder, format_texts, spans
from bench.demo_model.enquiries import ENQUIRIES
from bench.demo_model.errands import ToolKind, Wordings, definition_of
from bench.demo_model.evaluate import conversation_of
from bench.demo_model.everyday import EVERYDAY, TRAINED, WORDED, everyday_of
from bench.demo_model.heads import agent
from bench.demo_model.programming import PROGRAMMING
from bench.demo_model.services import SERVICES
from bench.demo_model.tasks import chat_of
from bench.demo_model.unfamiliar import UNFAMILIAR
from bench.demo_model.words import listed
from bench.demo_model.workplace import WORKPLACE
from mlx_engine.prompt import encode
from tests.fake_engine import tiny_tokenizer, tiny_tokenizer_json

# Of each list, in the order below.
NUMBERS = [8, 22, 19, 16, 20, 12]

ALL = (*TRAINED, *UNFAMILIAR)
FORMS = [kind for kind in ALL if isinstance(kind.errand, Wordings)]


def named(kind: ToolKind) -> str:
    return kind.names[0]


def fields(form: str) -> set[str]:
    return {name for _, name, _, _ in Formatter().parse(form) if name is not None}


def spoken(value: object) -> str:
    if isinstance(value, list):
        return listed(cast("list[str]", value))
    return value if isinstance(value, str) else json.dumps(value)


def test_there_are_many_tools_and_each_name_is_of_one():
    lists = EVERYDAY, SERVICES, ENQUIRIES, WORKPLACE, PROGRAMMING, UNFAMILIAR
    assert [len(kinds) for kinds in lists] == NUMBERS
    assert [kind for kinds in lists for kind in kinds] == list(ALL)
    assert FORMS == [*WORDED, *UNFAMILIAR]
    names = [name for kind in ALL for name in kind.names]
    assert len(set(names)) == len(names)
    descriptions = [each for kind in ALL for each in kind.descriptions]
    assert len(set(descriptions)) == len(descriptions)


@pytest.mark.parametrize("kind", FORMS, ids=named)
def test_a_request_says_what_is_required_and_an_answer_no_more_than_is_known(kind: ToolKind):
    errand = kind.errand
    assert isinstance(errand, Wordings)
    required = {each.names[0] for each in kind.parameters if each.is_required}
    every = {each.names[0] for each in kind.parameters}
    spelled = [name for each in kind.parameters for name in each.names]
    assert len(set(spelled)) == len(spelled), "two parameters of one name"
    assert len(kind.names) >= 3 and len(kind.descriptions) == 3
    assert len(errand.requests) >= 5 and len(set(errand.requests)) == len(errand.requests)
    assert not every & errand.found.keys()
    for form in errand.requests:
        assert required <= fields(form) <= every, form
    for form in (*errand.results, errand.answer):
        assert fields(form) <= required | errand.found.keys(), form
    for form in errand.results:
        assert fields(errand.answer) & errand.found.keys() <= fields(form), form
    assert every == {name for form in errand.requests for name in fields(form)}


@pytest.mark.parametrize("kind", ALL, ids=named)
def test_an_argument_stands_in_the_request_as_it_is_given(kind: ToolKind):
    for seed in range(40):
        chat = Chat()
        (tool,) = everyday_of(Random(seed), 1, (kind,))
        tool.turn(Random(seed), chat)
        schema = tool.definition["parameters"]
        for call in chat.turns[1].calls:
            assert call.name == tool.definition["name"]
            assert set(schema["required"]) <= set(call.arguments) <= set(schema["properties"])
            for value in call.arguments.values():
                for part in cast("list[object]", value if type(value) is list else [value]):
                    said = part if isinstance(part, str) else json.dumps(part)
                    assert said in chat.turns[0].text
        assert not re.search(r"[{][a-z_]*[}]", chat.turns[0].text + chat.turns[-1].text)


def test_calls_are_written_as_the_engine_writes_them():
    """Also those without arguments, and with lists and numbers."""
    encoder, texts = Encoder(tiny_tokenizer_json()), format_texts()
    for kind in ALL:
        chat = Chat()
        (tool,) = everyday_of(Random(1), 1, (kind,))
        chat.tools = [tool.definition]
        tool.turn(Random(1), chat)
        expected = encode(conversation_of(chat), tiny_tokenizer()).token_ids
        asked = replace(chat, turns=chat.turns[:-1])
        text = "".join(text for text, _ in spans(asked, texts, opens=True))
        assert encoder.marked(text) == list(expected), kind.names


def test_requests_and_definitions_of_a_tool_are_seldom_alike():
    kind = next(kind for kind in FORMS if "set_timer" in kind.names)
    requests, definitions = set[str](), set[str]()
    for seed in range(200):
        (tool,) = everyday_of(Random(seed), 1, (kind,))
        definitions.add(json.dumps(tool.definition))
        requests.add(re.sub(r"\d+", "", kind.errand(Random(seed)).request))
    assert len(requests) > 60 and len(definitions) > 150


def test_no_training_conversation_has_the_unfamiliar_tools():
    names = "|".join(re.escape(name) for kind in UNFAMILIAR for name in kind.names)
    told = "|".join(re.escape(each) for kind in UNFAMILIAR for each in kind.descriptions)
    pattern = re.compile(rf"(?<!\w)(?:{names})(?!\w)|{told}")
    trained = re.compile("|".join(re.escape(f'"{n}"') for kind in TRAINED for n in kind.names))
    seen = 0
    for seed in range(300):
        chat, other = chat_of(Random(seed), 2000), Chat()
        agent(Random(seed), other, 3000)
        for each in (chat, other):
            text = json.dumps(each.tools) + str(each.turns) + each.system
            assert not pattern.search(text), pattern.search(text)
            seen += len(trained.findall(text))
    assert seen > 300


def test_training_draws_all_tools_alike():
    drawn = [tool.kind for seed in range(2000) for tool in everyday_of(Random(seed), 3)]
    counts = [drawn.count(kind) for kind in TRAINED]
    assert min(counts) > 0.5 * len(drawn) / len(TRAINED)
    assert max(counts) < 2 * len(drawn) / len(TRAINED)


@pytest.mark.parametrize(
    ("kind", "among"),
    [("everyday call", EVERYDAY), ("service call", WORDED), ("unfamiliar call", UNFAMILIAR)],
)
def test_a_case_offers_four_tools_of_its_kind_and_asks_for_one(
    kind: str, among: tuple[ToolKind, ...]
):
    names = {name for each in among for name in each.names}
    asked: set[str] = set()
    for number in range(60):
        chat = case(kind, number)
        offered = {tool["name"] for tool in chat.tools}
        assert len(offered) == 4 and offered <= names
        (name,) = {call.name for call in chat.turns[-1].calls}
        assert name in offered
        asked.add(name)
    assert len(asked) > 20


@pytest.mark.parametrize("kind", FORMS, ids=named)
def test_a_definition_tells_the_task(kind: ToolKind):
    """As the plan says it, but for the ending of its verb."""
    for seed in range(60):
        tool = definition_of(Random(seed), kind)
        assert not tool.task.startswith(("use this", "call this"))
        told = tool.definition["description"].lower()
        task = tool.task.lower()
        verb, _, rest = task.partition(" ")
        assert task in told or re.match(rf"{verb[:2]}\w* {re.escape(rest)}", told)


def test_a_description_has_no_second_verb():
    """Only the first would get the ending of the third person."""
    verbs = {text.split()[0].lower() for kind in FORMS for text in kind.descriptions} - {"use"}
    for text in (text for kind in FORMS for text in kind.descriptions):
        _, _, rest = text.split(". ")[0].partition(" ")
        if not rest.startswith(("or ", "and ")):
            assert not verbs & set(re.findall(r" (?:and|or) (\w+)", rest)), text


@pytest.mark.parametrize("kind", FORMS, ids=named)
def test_a_parameter_is_described_in_words_that_tell_something(kind: ToolKind):
    for each in kind.parameters:
        name = each.names[0].replace("_", " ")
        is_noun = name not in ("from", "to", "on", "who", "which", "days", "minutes")
        assert each.about or (is_noun and name.removesuffix(" id") != kind.noun), name


def test_nothing_stands_behind_an_open_value():
    """It would be taken for a part of the value."""
    opened = 0
    for errand in (kind.errand for kind in FORMS):
        assert isinstance(errand, Wordings)
        for form in filter(errand.is_open, errand.requests):
            opened += 1
            last = re.findall(r"{(\w+)}", form)[-1]
            at = [argument.names[0] for argument, _ in errand.slots].index(last)
            for seed in range(30):
                made = replace(errand, requests=(form,))(Random(seed))
                assert made.request.endswith(spoken(made.values[at])), made
    assert opened > 60


def test_manners_do_not_stand_behind_free_text():
    play = next(kind.errand for kind in FORMS if "play_music" in kind.names)
    assert isinstance(play, Wordings)
    for form in ("I want to hear {song}.", "start the song {song}"):
        made = [replace(play, requests=(form,))(Random(seed)) for seed in range(200)]
        assert not any(each.request.endswith("please") for each in made)
    made = [replace(play, requests=('play "{song}"',))(Random(seed)) for seed in range(200)]
    assert any(each.request.endswith('" please') for each in made)


def test_what_is_said_is_english():
    """What forms and values, each right by itself, could become together."""
    wrong = re.compile(
        r"please,? please|\b[Oo]n (?:today|this weekend|next (?:week|month|\w+day))\b|Calls this"
        r"| 1 (?:people|nights|guests|days|minutes|words)\b|\b(?:qR code|pR [#\d])"
    )
    for seed in range(60):
        for kind in FORMS:
            chat = Chat()
            (tool,) = everyday_of(Random(seed), 1, (kind,))
            tool.turn(Random(seed), chat)
            said = [turn.text + str(turn.results) for turn in chat.turns]
            text = "\n".join((*said, tool.definition["description"]))
            assert not wrong.search(text), text


def test_a_clause_follows_that_and_because():
    forms = [
        (kind.errand, form, match[1])
        for kind in FORMS
        if isinstance(kind.errand, Wordings)
        for form in kind.errand.requests
        if (match := re.search(r"\b(?:that|because) {(\w+)}", form))
    ]
    assert len(forms) > 4
    for errand, form, name in forms:
        at = [argument.names[0] for argument, _ in errand.slots].index(name)
        for seed in range(30):
            values = replace(errand, requests=(form,))(Random(seed)).values
            assert re.match(r"I \w+ |the \w+ is ", values[at])


def test_a_result_fits_what_was_asked():
    kinds = {kind.names[0]: kind for kind in FORMS}
    for seed in range(100):
        dice = kinds["roll_dice"].errand(Random(seed))
        sides, count = dice.values
        assert count <= int(re.findall(r"\d+", dice.outcome[1])[-1]) <= sides * count
        number = kinds["random_number"].errand(Random(seed))
        least, most = number.values
        assert least <= int(re.findall(r"\d+", number.outcome[1])[-1]) <= most
        words = kinds["count_words"].errand(Random(seed))
        assert words.outcome[1].endswith(f" {len(words.values[0].split())}.")


def test_two_answers_are_two_sentences_or_lines():
    """An answer that ends with a value ends with its line, too."""
    both = 0
    kind = next(kind for kind in FORMS if "send_message" in kind.names)
    for seed in range(100):
        chat = Chat()
        (tool,) = everyday_of(Random(seed), 1, (kind,))
        tool.turn(Random(seed), chat)
        if len(chat.turns[1].calls) == 2:
            assert re.fullmatch(r"I told .+\nI told .+", chat.turns[-1].text)
            both += 1
    assert both
