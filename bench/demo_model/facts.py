"""Facts of the demo model's world: stated in notes, asked for later."""

import json
from collections.abc import Callable
from random import Random

from bench.demo_model.chat import Chat
from bench.demo_model.prose import filler
from bench.demo_model.tools import plan_of
from bench.demo_model.words import (
    ANIMALS,
    CITIES,
    COLOURS,
    DAYS,
    FOODS,
    JOBS,
    KINDS_OF_WORK,
    MATTERS,
    MOODS,
    PLACES,
    SIZES,
    THINGS,
    an,
    any_word,
    capital,
    city_of,
    email_of,
    name_of,
    number_of,
    snake,
    spelling_of,
    word_of,
)

Fact = tuple[str, str, str]  # attribute, entity, value

# What a thing or person can have: attribute, and how a value of it is drawn.
ATTRIBUTES: dict[str, Callable[[Random], str]] = {
    "colour": lambda rng: rng.choice(COLOURS),
    "home": lambda rng: f"the {rng.choice(PLACES)} of {name_of(rng)}",
    "pet": lambda rng: an(rng.choice(ANIMALS)),
    "favourite food": lambda rng: rng.choice(FOODS),
    "job": lambda rng: rng.choice(JOBS),
    "password": spelling_of,
    "secret word": any_word,
    "number": number_of,
    "code": lambda rng: rng.choice((spelling_of(rng), f"{number_of(rng)}-{number_of(rng)}")),
    "friend": name_of,
    "city": city_of,
    "birthday": lambda rng: f"{rng.choice(DAYS)} {rng.randint(1, 30)}",
    "age": lambda rng: str(rng.randint(2, 99)),
    "owner": name_of,
    "mood": lambda rng: rng.choice(MOODS),
    "address": lambda rng: f"{rng.randint(1, 99)} {capital(any_word(rng))} Street",
    "email": email_of,
    "status": any_word,
    "title": lambda rng: f"{capital(any_word(rng))} {any_word(rng)}",
}

RELATIVES = (
    "sister brother mother father friend neighbour teacher boss dog cat son daughter".split()
)
FAVOURITES = {
    "colour": COLOURS,
    "animal": ANIMALS,
    "food": FOODS,
    "city": CITIES,
    "place": PLACES,
    "day": DAYS,
}

STATEMENTS = (
    "The {a} of {e} is {v}.",
    "{E} has the {a} {v}.",
    "Remember: the {a} of {e} is {v}.",
    "Note that the {a} of {e} is {v}.",
    "As for {e}, the {a} is {v}.",
    "{E}: {a} = {v}.",
)
# The value first, which is harder to look up: nothing tells yet what it belongs to.
BACKWARDS = (
    "{v} is the {a} of {e}.",
    "{v} has been the {a} of {e} for years.",
    "{v} = {a} of {e}",
    "We found that {v} is the {a} of {e}.",
)
QUESTIONS = (
    "What is the {a} of {e}?",
    "Tell me the {a} of {e}.",
    "Do you remember the {a} of {e}?",
    "Which {a} does {e} have?",
    "{E}: what is the {a}?",
    "Please say what the {a} of {e} is.",
    "What {a} does {e} have?",
)


def entity_of(rng: Random) -> str:
    """Somebody or something that facts are about."""
    kind = rng.random()
    if kind < 0.5:
        return name_of(rng)
    if kind < 0.65:
        return f"the {rng.choice(SIZES)} {rng.choice(THINGS)} of {name_of(rng)}"
    if kind < 0.75:
        return f"the {rng.choice(MATTERS)} {spelling_of(rng)}"
    if kind < 0.85:
        return f"the {rng.choice(COLOURS)} {rng.choice(THINGS)}"
    return f"{name_of(rng)} the {rng.choice(ANIMALS + JOBS)}"


def worded(template: str, attribute: str, entity: str, value: str) -> str:
    """A statement or question about a fact."""
    return template.format(a=attribute, e=entity, E=capital(entity), v=value)


def facts_of(rng: Random, count: int) -> list[Fact]:
    """Facts of which no two answer the same question; some are about the same entity."""
    facts: dict[tuple[str, str], str] = {}
    entities = [entity_of(rng) for _ in range(max(1, count * 2 // 3))]
    names = list(ATTRIBUTES)
    for _ in range(count):
        attribute = rng.choice(names)
        facts.setdefault((attribute, rng.choice(entities)), ATTRIBUTES[attribute](rng))
    return [(attribute, entity, value) for (attribute, entity), value in facts.items()]


def notes_of(
    rng: Random, facts: list[Fact], characters: int, statements: tuple[str, ...] = STATEMENTS
) -> str:
    """Text of about so many characters in which the facts are stated."""
    texts = [worded(rng.choice(statements), *fact) for fact in facts]
    texts += filler(rng, characters - sum(map(len, texts)))
    rng.shuffle(texts)
    return rng.choice((" ", " ", "\n", "\n- ")).join(texts)


def ask(rng: Random, chat: Chat, fact: Fact, before: str = "") -> None:
    """A question about a fact and its answer."""
    attribute, entity, value = fact
    chat.user(before + worded(rng.choice(QUESTIONS), attribute, entity, value))
    answer = f"The {attribute} of {entity} is {value}."
    chat.answer(answer, f"I look for the {attribute} of {entity}. {answer}")


def recall(rng: Random, chat: Chat, characters: int, questions: int) -> list[Fact]:
    """Notes, then questions about them; the facts, for more questions later."""
    most = min(28, 2 + characters // 60)
    facts = facts_of(rng, rng.randint(rng.choice((1, most // 2)), most))
    statements = rng.choice((STATEMENTS, STATEMENTS + BACKWARDS))
    notes = notes_of(rng, facts, characters, statements)
    asked = rng.sample(facts, min(len(facts), questions))
    where = rng.random()
    before = ""
    if where < 0.25 and not chat.turns and not chat.system:
        chat.system = notes
    elif where < 0.5:
        chat.user(rng.choice(("Here are some notes:\n", "Read this:\n", "")) + notes)
        chat.answer(rng.choice(("I have read it.", "I will remember that.")), "These are notes.")
    else:
        before = notes + rng.choice(("\n\n", "\n", " "))
    for fact in asked:
        ask(rng, chat, fact, before)
        before = ""
    if rng.random() < 0.08:
        attribute, entity = rng.choice(list(ATTRIBUTES)), entity_of(rng)
        if (attribute, entity) not in [fact[:2] for fact in facts]:
            chat.user(before + worded(rng.choice(QUESTIONS), attribute, entity, ""))
            chat.answer(f"I do not know the {attribute} of {entity}.", "Nobody told me about that.")
    return facts


def records(rng: Random, chat: Chat, characters: int, questions: int) -> None:
    """Keys with values, as settings or JSON have them, and questions about them."""
    count = max(2, min(60, characters // 25))
    keys = list(dict.fromkeys(rng.choice((any_word, word_of, snake))(rng) for _ in range(count)))
    values = [spelling_of(rng) for _ in keys]
    if rng.random() < 0.3:
        text = json.dumps(dict(zip(keys, values, strict=True)), ensure_ascii=False)
    else:
        joint = rng.choice((": ", " = ", "=", "\t"))
        pairs = zip(keys, values, strict=True)
        text = "\n".join(f"{key}{joint}{value}" for key, value in pairs)
    before = text + "\n\n"
    for i in rng.sample(range(len(keys)), min(len(keys), questions)):
        question = rng.choice(("What is {}?", "What is the value of {}?", "Tell me {}.", "{}?"))
        chat.user(before + question.format(keys[i]))
        chat.answer(f"{keys[i]} is {values[i]}.", f"I look for {keys[i]}. It is {values[i]}.")
        before = ""


def glossary(rng: Random, chat: Chat, characters: int, questions: int) -> None:
    """Names before what they stand for, as lists and definitions have them, and questions.

    From neighbouring words, where such a lookup is learned first, to entries in JSON.
    """
    are_words = rng.random() < 0.5
    entry = rng.choice(_PAIRS if are_words else _ENTRIES)
    make = any_word if are_words else _task
    count = max(2, min(40, characters // (len(entry) + (14 if are_words else 30))))
    keys = list(dict.fromkeys(make(rng) for _ in range(count)))
    spelling = rng.choice((any_word, any_word, spelling_of))
    names = list(dict.fromkeys(spelling(rng) for _ in range(2 * count)))
    pairs = [(n, k) for n, k in zip(names, keys, strict=False) if n not in keys]
    before = "\n".join(entry.replace("K", k).replace("N", n, 1) for n, k in pairs) + "\n\n"
    for name, key in rng.sample(pairs, min(len(pairs), questions)):
        if are_words:
            form = rng.choice(("What is the name of {}?", "Which name has {}?", "{}?"))
            answer = f"The name of {key} is {name}."
        else:
            form = rng.choice(("Which one is there to {}?", "How do I {}?", "What can {}?"))
            answer = plan_of(key, name)
        chat.user(before + form.format(key))
        chat.answer(answer, f"I look for {key}.")
        before = ""


_PAIRS = ("N K", "N: K", "N = K", "N\tK", "N - K", "N,K", "| N | K |", "- N (K)")
_ENTRIES = (
    "N: K",
    "N - K",
    "- N (K)",
    "N means: K",
    "| N | K |",
    '{"name": "N", "description": "K"}',
    '{"name": "N", "description": "K"}',
    '{"id": "N", "text": "K"}',
    '{"key": "N", "type": "string", "about": "K"}',
)


def _task(rng: Random) -> str:
    words = [rng.choice((any_word, word_of))(rng) for _ in range(rng.choice((1, 1, 2)))]
    return f"{rng.choice(KINDS_OF_WORK)} the {' '.join(words)}"


def personal(rng: Random, chat: Chat) -> None:
    """The user tells of themselves, and asks for it later."""
    name, city, food = name_of(rng), city_of(rng), rng.choice(FOODS)
    job, pet = rng.choice(JOBS), name_of(rng)
    animal, number = rng.choice(ANIMALS), number_of(rng)
    relative, person = rng.choice(RELATIVES), name_of(rng)
    kind = rng.choice(list(FAVOURITES))
    favourite = rng.choice(FAVOURITES[kind])
    told = [
        (rng.choice(("My name is {}.", "I am {}.", "Call me {}.", "Hi, I'm {}.")).format(name),
         f"Nice to meet you, {name}!",
         rng.choice(("What is my name?", "Do you know my name?", "Who am I?")),
         f"Your name is {name}."),
        (f"I live in {city}.", f"{city} sounds like a nice place.",
         rng.choice(("Where do I live?", "Which city do I live in?")), f"You live in {city}."),
        (f"I like {food}.", f"I hear that {food} taste good.",
         rng.choice(("What do I like?", "What food do I like?")), f"You like {food}."),
        (f"I am {an(job)}.", f"It must be interesting to be {an(job)}.", "What is my job?",
         f"You are {an(job)}."),
        (f"I have {an(animal)} named {pet}.", f"{pet} is a good name for {an(animal)}.",
         f"What is the name of my {animal}?", f"Your {animal} is named {pet}."),
        (f"My favourite number is {number}.", f"{number} is a good number.",
         "What is my favourite number?", f"Your favourite number is {number}."),
        (rng.choice(("My {} is called {}.", "My {}'s name is {}.")).format(relative, person),
         f"{person} is a good name.",
         rng.choice(("What is my {} called?", "What is my {}'s name?", "Who is my {}?"))
         .format(relative), f"Your {relative} is called {person}."),
        (rng.choice(("My favourite {} is {}.", "Remember that my favourite {} is {}."))
         .format(kind, favourite), "I will remember that.",
         f"What is my favourite {kind}?", f"Your favourite {kind} is {favourite}."),
    ]  # fmt: skip
    chosen = rng.sample(told, rng.randint(1, 4))
    if rng.random() < 0.3:
        chat.user(" ".join(said for said, _, _, _ in chosen))
        chat.answer(chosen[-1][1], "The user tells me something about themselves.")
    else:
        for said, answer, _, _ in chosen:
            chat.user(said)
            chat.answer(answer, "The user tells me something about themselves.")
    for said, _, question, answer in rng.sample(chosen, len(chosen)):
        chat.user(question)
        chat.answer(answer, f'The user said: "{said}"')
