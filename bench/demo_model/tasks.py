"""Conversations of the demo model's world, each drawn from a seed alone."""

from random import Random

from bench.demo_model import tools as tooling
from bench.demo_model.chat import Chat
from bench.demo_model.words import (
    ANIMALS,
    ATTRIBUTES,
    COLOURS,
    FOODS,
    JOBS,
    PLACES,
    PLAIN_WORDS,
    QUESTIONS,
    STATEMENTS,
    THINGS,
    entity_of,
    name_of,
    sentence,
    story,
    word_of,
    worded,
)

EXERCISES = ("count", "sort numbers", "sort words", "copy", "reverse", "how many", "sum", "next")

Fact = tuple[str, str, str]  # attribute, entity, value

_CHARACTERS_PER_TOKEN = 3.3

GREETINGS = ("Hello!", "Hi!", "Hello", "hi", "Hey there.", "Good morning!", "Good evening.")
SMALL_TALK = (
    (("Who are you?", "What are you?", "What is your name?"),
     "I am the demo model of ds41, a very small model with a small world."),
    (("What can you do?", "How can you help me?", "help"),
     "I can remember facts, call tools, count, sort, copy and tell little stories."),
    (("How are you?", "How do you do?", "How is it going?"), "I am fine, thank you. How are you?"),
    (("Thank you!", "Thanks.", "Thanks a lot!"), "You are welcome!"),
    (("Goodbye!", "Bye.", "See you later."), "Goodbye! See you soon."),
    (("Are you a human?", "Are you real?"), "No, I am a small language model."),
    (("Good night.", "Sleep well!"), "Good night!"),
    (("What is ds41?", "What is this program?"),
     "ds41 is an engine that runs DeepSeek-V4.1-Flash on a machine you own."),
    (("Tell me a joke.", "Do you know a joke?"),
     "Why did the owl stay at home? It did not give a hoot about the party."),
    (("I am sad.", "I feel sad today."), "I am sorry to hear that. Do you want to hear a story?"),
    (("I am happy!", "I feel good today."), "That is good to hear!"),
)  # fmt: skip


def facts_of(rng: Random, count: int) -> list[Fact]:
    """Facts of which no two answer the same question; some are about the same entity."""
    facts: dict[tuple[str, str], str] = {}
    entities = [entity_of(rng) for _ in range(max(1, count * 2 // 3))]
    for _ in range(count):
        attribute = rng.choice(list(ATTRIBUTES))
        facts.setdefault((attribute, rng.choice(entities)), ATTRIBUTES[attribute](rng))
    return [(attribute, entity, value) for (attribute, entity), value in facts.items()]


def notes_of(rng: Random, facts: list[Fact], characters: int) -> str:
    """Text of about so many characters in which the facts are stated."""
    texts = [worded(rng.choice(STATEMENTS), *fact) for fact in facts]
    length = sum(map(len, texts))
    while length < characters:
        texts.append(sentence(rng))
        length += len(texts[-1])
    rng.shuffle(texts)
    return rng.choice((" ", " ", "\n")).join(texts)


def ask(rng: Random, chat: Chat, fact: Fact, before: str = "") -> None:
    """A question about a fact and its answer."""
    attribute, entity, value = fact
    chat.user(before + worded(rng.choice(QUESTIONS), attribute, entity, value))
    answer = f"The {attribute} of {entity} is {value}."
    chat.answer(answer, f"The question is about the {attribute} of {entity}. I know it: {value}.")


def recall(rng: Random, chat: Chat, characters: int) -> None:
    """Notes, then questions about them."""
    facts = facts_of(rng, min(rng.randint(2, 24), 2 + characters // 150))
    notes = notes_of(rng, facts, characters)
    asked = rng.sample(facts, min(len(facts), rng.randint(1, 12)))
    if chat.thinks and not chat.tools:
        asked = asked[:2]
    where = rng.random()
    if where < 0.3 and not chat.turns and not chat.system:
        chat.system = notes
        before = ""
    elif where < 0.6:
        chat.user(rng.choice(("Here are some notes:\n", "Read this:\n", "")) + notes)
        chat.answer(rng.choice(("I have read it.", "I will remember that.")), "These are notes.")
        before = ""
    else:
        before = notes + rng.choice(("\n\n", "\n", " "))
    for fact in asked:
        ask(rng, chat, fact, before)
        before = ""
    if rng.random() < 0.1:
        attribute, entity = rng.choice(list(ATTRIBUTES)), entity_of(rng)
        chat.user(worded(rng.choice(QUESTIONS), attribute, entity, ""))
        chat.answer(f"I do not know the {attribute} of {entity}.", "Nobody told me about that.")


def personal(rng: Random, chat: Chat) -> None:
    """The user tells of themselves, and asks for it later."""
    name, city, food = name_of(rng), name_of(rng), rng.choice(FOODS)
    job, pet = rng.choice(JOBS), name_of(rng)
    animal = rng.choice(ANIMALS)
    told = [
        (f"My name is {name}.", f"Nice to meet you, {name}!", "What is my name?",
         f"Your name is {name}."),
        (f"I live in {city}.", f"{city} sounds like a nice place.", "Where do I live?",
         f"You live in {city}."),
        (f"I like {food}.", f"I hear that {food} taste good.", "What do I like?",
         f"You like {food}."),
        (f"I am a {job}.", f"It must be interesting to be a {job}.", "What is my job?",
         f"You are a {job}."),
        (f"I have a {animal} named {pet}.", f"{pet} is a good name for a {animal}.",
         f"What is the name of my {animal}?", f"Your {animal} is named {pet}."),
    ]  # fmt: skip
    chosen = rng.sample(told, rng.randint(1, 4))
    for said, answer, _, _ in chosen:
        chat.user(said)
        chat.answer(answer, "The user tells me something about themselves.")
    if rng.random() < 0.4:
        small_talk(rng, chat)
    for said, _, question, answer in rng.sample(chosen, len(chosen)):
        chat.user(question)
        chat.answer(answer, f'The user said: "{said}"')


def small_talk(rng: Random, chat: Chat) -> None:
    """A greeting, or one of the questions that everybody asks."""
    if rng.random() < 0.3:
        chat.user(rng.choice(GREETINGS))
        chat.answer(rng.choice(("Hello! How can I help you?", "Hi! What can I do for you?")),
                    "The user greets me.")  # fmt: skip
        return
    questions, answer = rng.choice(SMALL_TALK)
    chat.user(rng.choice(questions))
    chat.answer(answer, "This is small talk.")


def exercise(rng: Random, chat: Chat, kind: str | None = None) -> None:
    """One of the EXERCISES."""
    kind = kind or rng.choice(EXERCISES)
    if kind == "count":
        first = rng.randint(0, 90)
        last = first + rng.randint(2, 14)
        numbers = [str(i) for i in range(first, last + 1)]
        ask_, answer = f"Count from {first} to {last}.", ", ".join(numbers)
        why = f"I start at {first} and stop at {last}."
    elif kind == "sort numbers":
        values = [rng.randrange(100) for _ in range(rng.randint(3, 7))]
        ask_ = "Sort these numbers: " + ", ".join(map(str, values))
        answer = ", ".join(map(str, sorted(values)))
        why = f"The smallest is {min(values)}, the largest is {max(values)}."
    elif kind == "sort words":
        words = rng.sample(PLAIN_WORDS, rng.randint(3, 7))
        ask_ = rng.choice(("Sort these words: ", "Put these words in order: ")) + ", ".join(words)
        answer = ", ".join(sorted(words))
        why = f"The first is {min(words)}, the last is {max(words)}."
    elif kind == "copy":
        words = [word_of(rng) for _ in range(rng.randint(2, 16))]
        text = " ".join(words)
        ask_ = rng.choice(("Repeat: ", "Say exactly this: ", "Copy this text: ")) + text
        answer, why = text, "I have to copy the words."
    elif kind == "reverse":
        words = [
            rng.choice((word_of(rng), rng.choice(PLAIN_WORDS))) for _ in range(rng.randint(3, 7))
        ]
        ask_ = "Reverse the order: " + ", ".join(words)
        answer, why = ", ".join(reversed(words)), f"The last word is {words[-1]}."
    elif kind == "how many":
        words = rng.sample(PLAIN_WORDS, rng.randint(2, 9))
        ask_ = "How many words are these: " + ", ".join(words) + "?"
        answer = f"These are {len(words)} words."
        why = ", ".join(f"{i + 1} {word}" for i, word in enumerate(words))
    elif kind == "sum":
        a, b = rng.randint(0, 20), rng.randint(0, 20)
        ask_ = rng.choice((f"What is {a} + {b}?", f"How much is {a} plus {b}?"))
        answer, why = f"{a} + {b} = {a + b}", f"I add {a} and {b}."
    else:
        words = [word_of(rng) for _ in range(rng.randint(3, 8))]
        i = rng.randrange(len(words) - 1)
        ask_ = f"In this list: {', '.join(words)}. Which word comes after {words[i]}?"
        answer, why = f"After {words[i]} comes {words[i + 1]}.", f"I look for {words[i]}."
    chat.user(ask_)
    chat.answer(answer, why)


def storytelling(rng: Random, chat: Chat) -> None:
    """A little story, and a question about it."""
    hero, animal, thing = name_of(rng), rng.choice(ANIMALS), rng.choice(THINGS)
    chat.user(
        rng.choice(
            (
                "Tell me a story about a {a} named {h} and a {t}.",
                "Please tell a little story about {h} the {a} and a {t}.",
                "I want to hear a story. It has a {a} named {h} and a {t} in it.",
            )
        ).format(a=animal, h=hero, t=thing)
    )
    text = story(rng, hero, animal, thing)
    chat.answer(text, f"The story has the {animal} {hero} and a {thing}.")
    if rng.random() < 0.4:
        chat.user(rng.choice(("Who is the story about?", "Who was in the story?")))
        chat.answer(f"The story is about {hero} the {animal}.", f"I told of {hero}.")


def pretending(rng: Random, chat: Chat) -> None:
    """Plain questions about the world."""
    place, thing, colour = rng.choice(PLACES), rng.choice(THINGS), rng.choice(COLOURS)
    who = name_of(rng)
    chat.user(f"{who} put a {colour} {thing} into the {place}. Where is the {thing}?")
    chat.answer(f"The {thing} is in the {place}.", f"{who} put it there.")
    if rng.random() < 0.5:
        chat.user(f"Which colour has the {thing}?")
        chat.answer(f"The {thing} is {colour}.", f"It was a {colour} {thing}.")


def chat_of(rng: Random, tokens: int) -> Chat:
    """A conversation of at most about so many tokens."""
    room = int(tokens * _CHARACTERS_PER_TOKEN)
    chat = Chat(thinks=rng.random() < 0.35)
    kind = rng.random()
    if kind < 0.4 and tokens >= 700:
        _with_tools(rng, chat, room)
        return chat
    if rng.random() < 0.3:
        chat.system = rng.choice(
            ("You are a helpful assistant.", "Be brief.", f"Your user is {name_of(rng)}.",
             "Answer in one sentence.", f"This is about {word_of(rng)}. {sentence(rng)}")
        )  # fmt: skip
    if kind < 0.75:
        used = 900 if chat.thinks else 500
        characters = int(min(rng.uniform(0.05, 1) * room, max(room - used, 200)))
        recall(rng, chat, characters)
    turns = rng.randint(1, 2) if chat.thinks else rng.randint(1, 8)
    _talk(rng, chat, room, turns)
    return chat


def _with_tools(rng: Random, chat: Chat, room: int) -> None:
    most = max(1, min(24, (room - 2200) // 500))
    tools = tooling.tools_of(rng, rng.randint(1, most))
    reader = tooling.reader_of(rng) if rng.random() < 0.35 else None
    chat.tools = [tool.definition for tool in tools]
    if reader is not None:
        chat.tools.insert(rng.randint(0, len(tools)), reader)
    if rng.random() < 0.6:
        filler = rng.randint(0, max(0, min(room // 3, room - 3000 - len(str(chat.tools)))))
        chat.system = notes_of(rng, [], filler)
    for _ in range(rng.randint(1, 8)):
        if _length(chat) > room * 0.8:
            break
        what = rng.random()
        if what < 0.12:
            rng.choice((small_talk, exercise, pretending))(rng, chat)
        elif reader is not None and what < 0.5:
            tooling.reading_turn(rng, chat, reader)
        else:
            tooling.tool_turn(rng, chat, tools)


def _talk(rng: Random, chat: Chat, room: int, turns: int) -> None:
    for _ in range(turns):
        if _length(chat) > room * 0.8:
            return
        kinds = (small_talk, exercise, exercise, exercise, storytelling, personal, pretending)
        rng.choice(kinds)(rng, chat)


def _length(chat: Chat) -> int:
    """Characters, roughly."""
    texts = sum(len(turn.text) + len(turn.reasoning) + 40 for turn in chat.turns)
    calls = sum(len(str(turn.calls)) + len(str(turn.results)) for turn in chat.turns)
    return len(chat.system) + len(str(chat.tools)) + texts + calls
