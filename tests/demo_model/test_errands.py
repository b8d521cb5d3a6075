"""Tools that strangers would try: what is asked for says all that the call needs."""

import hashlib
import json
import re
from dataclasses import replace
from random import Random
from string import Formatter
from typing import cast

import pytest

from bench.demo_model.cases import case
from bench.demo_model.chat import Chat, Encoder, format_texts, spans
from bench.demo_model.errands import Everyday, Wordings
from bench.demo_model.evaluate import conversation_of
from bench.demo_model.everyday import EVERYDAY, TRAINED, everyday_of
from bench.demo_model.heads import agent
from bench.demo_model.tasks import chat_of
from bench.demo_model.unfamiliar import UNFAMILIAR
from mlx_engine.prompt import encode
from tests.fake_engine import tiny_tokenizer, tiny_tokenizer_json

ALL = (*TRAINED, *UNFAMILIAR)
FORMS = [kind for kind in ALL if isinstance(kind.errand, Wordings)]


def named(kind: Everyday) -> str:
    return kind.names[0]


def fields(form: str) -> set[str]:
    return {name for _, name, _, _ in Formatter().parse(form) if name is not None}


def test_there_are_many_tools_and_each_name_is_of_one():
    assert len(FORMS) >= 45 + len(UNFAMILIAR) and len(UNFAMILIAR) == 12
    names = [name for kind in ALL for name in kind.names]
    assert len(set(names)) == len(names)
    descriptions = [each for kind in ALL for each in kind.descriptions]
    assert len(set(descriptions)) == len(descriptions)


@pytest.mark.parametrize("kind", FORMS, ids=named)
def test_a_request_says_what_is_required_and_an_answer_no_more_than_is_known(kind: Everyday):
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
def test_an_argument_stands_in_the_request_as_it_is_given(kind: Everyday):
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
    [("everyday call", EVERYDAY), ("service call", TRAINED), ("unfamiliar call", UNFAMILIAR)],
)
def test_a_case_offers_four_tools_of_its_kind_and_asks_for_one(
    kind: str, among: tuple[Everyday, ...]
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


def test_the_everyday_cases_stay_what_they_were():
    """Scores of one model are compared with those of the next."""
    cases = [case("everyday call", n, thinks=thinks) for n in range(50) for thinks in (False, True)]
    parts = [(c.tools, [(t.text, t.reasoning, str(t.calls)) for t in c.turns]) for c in cases]
    assert hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16] == "6e20f1e1f46376cf"
