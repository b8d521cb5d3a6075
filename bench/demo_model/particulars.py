"""What the tools that people try are given and tell: days, times, people, places, messages."""

from random import Random

from bench.demo_model.words import (
    COLOURS,
    DAYS,
    MATTERS,
    MONTHS,
    MOODS,
    PLACES,
    PLAIN_WORDS,
    QUALITIES,
    SIZES,
    VERBS,
    any_word,
    camel,
    city_of,
    kebab,
    letters_of,
    mixed,
    name_of,
    number_of,
    phrase_of,
    snake,
    word_of,
)

_CHORES = (
    "buy find wash sell open close clean paint bring order check water feed fix book return cook "
    "print send read cancel renew"
).split()
_LANGUAGES = (
    "German French Italian Spanish English Japanese Norwegian Greek Polish Hindi Chinese Swedish "
    "Portuguese Arabic Russian Turkish Dutch Danish Korean Latin Finnish Czech"
).split()
# Days before which no "on" stands.
_WHENS = ("today", "today", "next week", "this weekend", "next month")


def clock_of(rng: Random) -> str:
    """A time of the day as people write it."""
    hour, minute = rng.randint(1, 12), rng.randrange(60)
    return rng.choice(
        (
            f"{hour}:{minute:02}",
            f"{rng.randrange(24):02}:{minute:02}",
            f"{hour} {rng.choice(('am', 'pm'))}",
            f"{hour}{rng.choice(('am', 'pm'))}",
            f"{hour}:{minute:02} {rng.choice(('am', 'pm'))}",
            f"{hour}",
        )
    )


def day_of(rng: Random) -> str:
    """A day as people write it."""
    day, month = rng.randint(1, 28), rng.choice(MONTHS)
    return rng.choice(
        (
            f"{rng.randint(2020, 2035)}-{rng.randint(1, 12):02}-{day:02}",
            f"{month} {day}",
            f"{day} {month}",
            f"{day} {month} {rng.randint(2020, 2035)}",
            rng.choice(DAYS),
            f"next {rng.choice(DAYS)}",
            rng.choice(_WHENS),
        )
    )


def is_own_day(text: str) -> bool:
    """Whether it is a day before which no "on" stands."""
    return text in _WHENS or (text.removeprefix("next ") in DAYS and text.startswith("next "))


def money_of(rng: Random) -> float:
    """An amount, whole or with two digits."""
    most = 10 ** rng.randint(1, 4)
    return rng.randrange(1, most + 1) if rng.random() < 0.5 else rng.randrange(1, most * 100) / 100


def person_of(rng: Random) -> str:
    """A person by one name or two."""
    return name_of(rng) if rng.random() < 0.7 else f"{name_of(rng)} {name_of(rng)}"


def title_of(rng: Random) -> str:
    """What people call an event, a note or a task."""
    kind = rng.random()
    if kind < 0.4:
        return phrase_of(rng, 3)
    first = rng.choice((*QUALITIES, *SIZES, *COLOURS)) if kind < 0.7 else name_of(rng)
    return f"{first} {rng.choice(PLAIN_WORDS + MATTERS)}"


def chore_of(rng: Random) -> str:
    """Something to be done."""
    if rng.random() < 0.25:
        return f"{rng.choice(('call', 'meet', 'pay', 'visit', 'thank', 'write to'))} {name_of(rng)}"
    what = rng.choice(PLAIN_WORDS + MATTERS) if rng.random() < 0.7 else word_of(rng)
    article = rng.choice(("the ", "the ", "my ", ""))
    return f"{rng.choice(_CHORES)} {article}{what}"


def statement_of(rng: Random) -> str:
    """A clause that "that" or "because" may stand before."""
    thing = rng.choice(PLAIN_WORDS + MATTERS)
    return rng.choice(
        (
            f"the {thing} is {rng.choice(MOODS + SIZES + QUALITIES)}",
            f"I {rng.choice(VERBS)} the {thing}",
            f"I need {number_of(rng)} for the {thing}",
        )
    )


def message_of(rng: Random) -> str:
    """What somebody is told."""
    return rng.choice(
        (
            statement_of(rng),
            statement_of(rng),
            statement_of(rng),
            f"see you in {city_of(rng)}",
            f"where is the {rng.choice(PLAIN_WORDS + MATTERS)}",
            chore_of(rng),
            phrase_of(rng, 5),
        )
    )


def spot_of(rng: Random) -> str:
    """Where somebody wants to go: a city, a place, an address."""
    kind = rng.random()
    if kind < 0.5:
        return city_of(rng)
    if kind < 0.75:
        return f"{rng.randint(1, 300)} {name_of(rng)} {rng.choice(('Street', 'Road', 'Lane'))}"
    return f"{rng.choice(('the', name_of(rng)))} {rng.choice(PLACES)}"


def language_of(rng: Random) -> str:
    """A language, a real one or an invented one."""
    return rng.choice(_LANGUAGES) if rng.random() < 0.6 else f"{word_of(rng, 2).capitalize()}ish"


def reference_of(rng: Random) -> str:
    """What an order, an invoice or a ticket goes by."""
    letters = letters_of(rng)[:3].upper()
    return rng.choice(
        (
            number_of(rng),
            f"{letters}-{number_of(rng)}",
            f"{letters}{rng.randrange(10_000)}",
            mixed(rng),
            f"{any_word(rng)}-{rng.randrange(1000)}",
        )
    )


def phone_of(rng: Random) -> str:
    """A telephone number."""
    parts = [str(rng.randrange(10 ** rng.randint(2, 4))) for _ in range(rng.randint(2, 4))]
    return ("+" if rng.random() < 0.5 else "") + rng.choice((" ", "-", "")).join(parts)


def repository_of(rng: Random) -> str:
    """What a program's sources, or a service, go by."""
    if rng.random() < 0.3:
        return f"{any_word(rng)}/{rng.choice((any_word, kebab))(rng)}"
    return rng.choice((any_word, kebab, kebab, snake, camel))(rng)


def count_of(rng: Random) -> int:
    """How many of something there are: not one, which its word would show."""
    return rng.randint(2, 500)


def symbol_of(rng: Random) -> str:
    """The letters by which a stock is traded."""
    return "".join(rng.choices("ABCDEFGHIJKLMNOPQRSTUVWXYZ", k=rng.randint(2, 5)))


def length_of(rng: Random) -> str:
    """How far something is."""
    return f"{rng.randint(2, 900)} {rng.choice(('km', 'miles'))}"
