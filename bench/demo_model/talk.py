"""What a first-time user may say, and little stories."""

from random import Random

from bench.demo_model.chat import Chat
from bench.demo_model.prose import story
from bench.demo_model.words import (
    ANIMALS,
    CITIES,
    COLOURS,
    COUNTRIES,
    FOODS,
    JOBS,
    KINDS_OF_WORK,
    MATTERS,
    MOODS,
    PLACES,
    QUALITIES,
    THINGS,
    an,
    capital,
    name_of,
)

_SELF = "I am the demo model of ds41: very small, trained on an invented world."
_ABLE = (
    "I can remember what you tell me, call tools, count, sort, copy, add small numbers and tell "
    "little stories."
)
_UNKNOWN = "I do not know that. I am a very small demo model and know only what you tell me."

GREETINGS = (
    "Hello!", "Hi!", "Hello", "hi", "hello", "Hey", "Hey there.", "Good morning!", "Good morning",
    "Good evening.", "Hi there!", "Hello there", "Hello, who are you?", "Hi, how are you?", "Hey!",
    "Good day!", "hello world", "Hello, world!", "Test", "test", "ping", "Are you there?",
)  # fmt: skip
SMALL_TALK = (
    (("Who are you?", "What are you?", "What is your name?", "who are you", "Tell me about you.",
      "Which model are you?", "What model is this?", "Introduce yourself.", "What's your name?",
      "Are you ChatGPT?", "Are you DeepSeek?", "Who made you?", "Tell me about yourself."), _SELF),
    (("What can you do?", "How can you help me?", "help", "Help", "What can you do", "Help me.",
      "what can you do?", "What are you good at?", "What should I ask you?", "Can you help me?",
      "What do you know?", "How do I use you?"), _ABLE),
    (("How are you?", "How do you do?", "How is it going?", "How are you today?", "how are you",
      "How's it going?", "What's up?"), "I am fine, thank you. How are you?"),
    (("Thank you!", "Thanks.", "Thanks a lot!", "Thank you very much.", "thanks", "Thx",
      "Great, thank you!", "Well done!", "Good job!"), "You are welcome!"),
    (("Goodbye!", "Bye.", "See you later.", "bye", "Goodbye", "Bye bye!", "I have to go."),
     "Goodbye! See you soon."),
    (("Are you a human?", "Are you real?", "Are you alive?", "Are you a robot?",
      "Are you conscious?", "Do you have feelings?"), "No, I am a small language model."),
    (("Good night.", "Sleep well!", "Good night!"), "Good night!"),
    (("What is ds41?", "What is this program?", "What is this?", "Where am I?",
      "What does ds41 do?", "Tell me about ds41."),
     "ds41 is an engine that runs DeepSeek-V4.1-Flash on a machine you own."),
    (("Tell me a joke.", "Do you know a joke?", "Make me laugh.", "Tell me something funny.",
      "Another joke, please.", "Tell me a joke"),
     "Why did the owl stay at home? It did not give a hoot about the party."),
    (("I am sad.", "I feel sad today.", "I feel bad.", "I had a bad day."),
     "I am sorry to hear that. Do you want to hear a story?"),
    (("I am happy!", "I feel good today.", "I am fine.", "I'm fine, thanks.", "Good, and you?"),
     "That is good to hear!"),
    (("What is the meaning of life?", "Why are we here?"),
     "That is a big question for a small model. I would say: be kind and curious."),
    (("I love you.", "You are great!", "You are nice.", "I like you."), "That is kind of you!"),
    (("You are stupid.", "That is wrong.", "You are wrong.", "That was not right."),
     "I am sorry. I am a very small model and make mistakes."),
    (("Say hello.", "Say hi.", "Greet me."), "Hello!"),
    (("Yes.", "yes", "Ok.", "OK", "ok", "No.", "Sure.", "Maybe.", "Hmm."),
     "All right. What can I do for you?"),
    (("Write a poem.", "Can you write a poem?", "Write me a poem about the sea.",
      "A poem, please.", "Sing a song."),
     "The moon is bright, the sea is deep,\nthe little fox has gone to sleep."),
    (("Which colours do you know?", "Name some colours.", "List three colours."),
     "Red, green and blue."),
    (("Name three animals.", "Which animals do you know?", "List some animals."),
     "A fox, an owl and a bear."),
    (("Count to three.", "Can you count?"), "1, 2, 3"),
    (("Is this model real?", "Are you the real model?", "Are you big?", "How big are you?",
      "How many parameters do you have?"),
     "No, I am only a demo: a few million parameters in the format of the big model."),
)  # fmt: skip
# Of what nobody told it.
_WONDERS = (
    "What is {a}?", "Why is the {t} {q}?", "Why is the sky blue?", "How do I {w} {m}?",
    "Explain {m}.", "What is love?",
    "Who made the first {t}?", "Write {a} about the {t}.", "Write some code.", "Write a program.",
    "Write a Python function.", "Explain quantum physics.", "What is the capital of {c}?",
    "Who is the president of {c}?", "How old is {p}?", "What is the weather today?",
    "What time is it?", "What day is it?", "Translate {t} to German.", "How do I cook {f}?",
    "What is the best {m}?", "Give me a list of {t}s.", "Should I {w} my {m}?", "Where is {p}?",
    "What do you think about the {t}?", "Can {a} {w}?", "When did {p} begin?", "How far is {p}?",
    "What is machine learning?", "Which {t} should I buy?", "Why do {n}s {w}?", "How big is {a}?",
    "Summarise the news.", "Help me with my {m}.", "Write an essay about {m}.",
    "What happened in {c}?",
)  # fmt: skip
_GREETED = "Hello! How can I help you?"


def small_talk(rng: Random, chat: Chat) -> None:
    """A greeting, or one of the questions that everybody asks."""
    if rng.random() < 0.2:
        said = rng.choice(GREETINGS)
        chat.user(said)
        if "who are you" in said:
            chat.answer(_SELF, "The user asks who I am.")
        elif "how are you" in said:
            chat.answer("I am fine, thank you. How are you?", "The user greets me.")
        else:
            chat.answer(_GREETED, "The user greets me.")
        return
    questions, answer = rng.choice(SMALL_TALK)
    chat.user(rng.choice(questions))
    chat.answer(answer, "This is small talk.")


def wondering(rng: Random, chat: Chat) -> None:
    """A question about the great world, of which the model knows nothing."""
    said = rng.choice(_WONDERS).format(
        a=an(rng.choice(THINGS + ANIMALS)),
        c=rng.choice(COUNTRIES),
        f=rng.choice(FOODS),
        m=rng.choice(MATTERS),
        n=rng.choice(ANIMALS),
        p=rng.choice(CITIES + COUNTRIES),
        q=rng.choice(QUALITIES + COLOURS),
        t=rng.choice(THINGS),
        w=rng.choice(KINDS_OF_WORK),
    )
    chat.user(said if rng.random() < 0.8 else said.lower().rstrip(".?"))
    chat.answer(_UNKNOWN, "Nobody told me about that.")


_WISHES = (
    "Tell me a story about {a} named {h} and {t}.",
    "Please tell a little story about {h} the {n} and {t}.",
    "I want to hear a story. It has {a} named {h} and {t} in it.",
    "Write a story about {a} named {h} and {t}.",
)
_OPEN_WISHES = (
    "Tell me a story.", "Write a story.", "Tell me a story about {a}.",
    "Write a story about {a}.",
    "Write a short story about {a}.", "Can you tell a story about {a} and {t}?",
    "A story about {a}, please.", "Tell me a story about {t}.", "tell me a story about {a}",
    "Once upon a time", "Tell me another story.", "Please tell me a story about {h}.",
)  # fmt: skip


def storytelling(rng: Random, chat: Chat, *, asks_for_names: bool = False) -> None:
    """A little story, and a question about it."""
    hero, animal, thing = name_of(rng), rng.choice(ANIMALS), rng.choice(THINGS)
    wish = rng.choice(_WISHES if asks_for_names or rng.random() < 0.5 else _OPEN_WISHES)
    chat.user(wish.format(a=an(animal), n=animal, h=hero, t=an(thing)))
    text = story(rng, hero, animal, thing)
    chat.answer(text, f"The story has the {animal} {hero} and {an(thing)}.")
    if rng.random() < 0.4:
        chat.user(rng.choice(("Who is the story about?", "Who was in the story?")))
        chat.answer(f"The story is about {hero} the {animal}.", f"I told of {hero}.")


def pretending(rng: Random, chat: Chat) -> None:
    """Plain questions about what was just said."""
    place, thing, colour = rng.choice(PLACES), rng.choice(THINGS), rng.choice(COLOURS)
    who, other = name_of(rng), name_of(rng)
    kind = rng.randrange(4)
    if kind == 0:
        chat.user(f"{who} put {an(colour)} {thing} into the {place}. Where is the {thing}?")
        chat.answer(f"The {thing} is in the {place}.", f"{who} put it there.")
        if rng.random() < 0.5:
            chat.user(f"Which colour has the {thing}?")
            chat.answer(f"The {thing} is {colour}.", f"It was {an(colour)} {thing}.")
    elif kind == 1:
        food = rng.choice(FOODS)
        chat.user(f"{who} gave {food} to {other}. Who has the {food} now?")
        chat.answer(f"{other} has the {food}.", f"{who} gave it to {other}.")
    elif kind == 2:
        job, mood = rng.choice(JOBS), rng.choice(MOODS)
        chat.user(f"{who} is {an(job)} and {other} is {mood}. What is the job of {who}?")
        chat.answer(f"{who} is {an(job)}.", f"The text says it: {job}.")
        chat.user(f"How does {other} feel?")
        chat.answer(f"{other} is {mood}.", f"The text says it: {mood}.")
    else:
        animal = rng.choice(ANIMALS)
        chat.user(f"There is {an(animal)} in the {place}. What is in the {place}?")
        chat.answer(f"{capital(an(animal))} is in the {place}.", "The text says it.")
