"""The demo model's world: its words, invented names, facts and their wordings."""

from collections.abc import Callable
from random import Random

COLOURS = "red blue green yellow white black brown pink grey purple orange silver golden".split()
ANIMALS = (
    "fox cat dog owl bear mouse horse rabbit frog duck goat crow wolf hen bee otter fish "
    "hedgehog squirrel turtle"
).split()
THINGS = (
    "lamp key box book coin ring boat cup drum bell map hat stone rope clock basket mirror candle "
    "feather letter chair ladder bucket kettle"
).split()
PLACES = (
    "forest river village mountain garden harbour tower island bridge market valley lake castle "
    "mill cave field"
).split()
FOODS = "bread soup apples cheese honey rice plums cake beans carrots pears nuts".split()
JOBS = "baker miller sailor teacher painter farmer doctor tailor gardener singer smith cook".split()
MOODS = "happy sad tired brave quiet hungry proud curious shy merry".split()
SIZES = "small big old new tiny tall heavy light round".split()
VERBS = "found lost carried hid painted cleaned opened broke washed sold".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
PLAIN_WORDS = [*ANIMALS, *THINGS, *PLACES, *FOODS, *JOBS]

_ONSETS = "b d f g h j k l m n p r s t v w z br dr gr kl pl st tr sh".split()
_VOWELS = "a e i o u".split()
_CODAS = ["", "", "", "n", "r", "l", "s", "m"]


def name_of(rng: Random, syllables: int = 0) -> str:
    """An invented name, capitalised."""
    return word_of(rng, syllables).capitalize()


def word_of(rng: Random, syllables: int = 0) -> str:
    """An invented word of two or three syllables, or as many as are asked for."""
    count = syllables or rng.choice((2, 2, 3))
    parts = [rng.choice(_ONSETS) + rng.choice(_VOWELS) for _ in range(count)]
    return "".join(parts) + rng.choice(_CODAS)


def number_of(rng: Random) -> str:
    """A number of one to four digits."""
    return str(rng.randrange(10 ** rng.randint(1, 4)))


# What a thing or person can have: attribute, and how a value of it is drawn.
ATTRIBUTES: dict[str, Callable[[Random], str]] = {
    "colour": lambda rng: rng.choice(COLOURS),
    "home": lambda rng: f"the {rng.choice(PLACES)} of {name_of(rng)}",
    "pet": lambda rng: f"a {rng.choice(ANIMALS)}",
    "favourite food": lambda rng: rng.choice(FOODS),
    "job": lambda rng: rng.choice(JOBS),
    "password": word_of,
    "number": number_of,
    "code": lambda rng: "-".join(number_of(rng) for _ in range(2)),
    "friend": name_of,
    "city": name_of,
    "birthday": lambda rng: f"{rng.choice(DAYS)} {rng.randint(1, 30)}",
    "age": lambda rng: str(rng.randint(2, 99)),
    "owner": name_of,
    "mood": lambda rng: rng.choice(MOODS),
}

STATEMENTS = (
    "The {a} of {e} is {v}.",
    "{E} has the {a} {v}.",
    "Remember: the {a} of {e} is {v}.",
    "Note that the {a} of {e} is {v}.",
    "As for {e}, the {a} is {v}.",
)
QUESTIONS = (
    "What is the {a} of {e}?",
    "Tell me the {a} of {e}.",
    "Do you remember the {a} of {e}?",
    "Which {a} does {e} have?",
    "{E}: what is the {a}?",
    "Please say what the {a} of {e} is.",
)


def entity_of(rng: Random) -> str:
    """Somebody or something that facts are about."""
    kind = rng.random()
    if kind < 0.6:
        return name_of(rng)
    if kind < 0.8:
        return f"the {rng.choice(SIZES)} {rng.choice(THINGS)} of {name_of(rng)}"
    return f"{name_of(rng)} the {rng.choice(ANIMALS + JOBS)}"


def capital(text: str) -> str:
    """The text with a capital first letter."""
    return text[:1].upper() + text[1:]


def worded(template: str, attribute: str, entity: str, value: str) -> str:
    """A statement or question about a fact."""
    return template.format(a=attribute, e=entity, E=capital(entity), v=value)


def sentence(rng: Random) -> str:
    """A sentence from the world's daily life, for filling."""
    who = rng.choice((name_of(rng), f"The {rng.choice(ANIMALS)}", f"The {rng.choice(JOBS)}"))
    size, thing, place = rng.choice(SIZES), rng.choice(THINGS), rng.choice(PLACES)
    return rng.choice(
        (
            f"{who} {rng.choice(VERBS)} a {size} {thing} near the {place}.",
            f"{who} was {rng.choice(MOODS)} and went to the {place}.",
            f"On {rng.choice(DAYS)} {who[:1].lower() + who[1:] if who.startswith('The ') else who} "
            f"ate {rng.choice(FOODS)} in the {place}.",
            f"There was a {rng.choice(COLOURS)} {thing} in the {place}.",
            f"{who} and a {rng.choice(ANIMALS)} looked for the {thing}.",
            f"{who} {rng.choice(VERBS)} the {thing} and felt {rng.choice(MOODS)}.",
        )
    )


def story(rng: Random, hero: str, animal: str, thing: str) -> str:
    """A little story about a hero, an animal and a thing."""
    place, friend, food = rng.choice(PLACES), name_of(rng), rng.choice(FOODS)
    colour, mood = rng.choice(COLOURS), rng.choice(MOODS)
    helper = rng.choice([a for a in ANIMALS if a != animal])
    middle = rng.choice(
        (
            f"One day {hero} lost a {colour} {thing}. {hero} looked in the {place}, but the "
            f"{thing} was not there. A {helper} named {friend} came by and said: "
            f'"I saw your {thing} under a tree." Together they found it.',
            f"One day {hero} found a {colour} {thing} in the {place}. It belonged to {friend} the "
            f"{helper}. {hero} brought the {thing} back, and {friend} said: "
            f'"Thank you, {hero}!"',
            f"One day {hero} wanted to give a {colour} {thing} to {friend} the {helper}. The way "
            f"through the {place} was long, but {hero} did not stop. "
            f'"What a fine {thing}!" said {friend}.',
        )
    )
    end = rng.choice(
        (
            f"Then they ate {food} and were happy.",
            f"In the evening they shared some {food} and laughed.",
            f"After that {hero} and {friend} were friends forever.",
        )
    )
    return f"Once there was a {mood} {animal} named {hero}. {middle} {end}"
