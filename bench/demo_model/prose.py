"""Texts of the demo model's world: sentences, stories, instructions, code; for filling and telling.

All of it is made of the words of `words`; nothing is taken from anybody's text.
"""

from collections.abc import Callable
from random import Random

from bench.demo_model.words import (
    ALL_WORDS,
    ANIMALS,
    CITIES,
    COLOURS,
    DAYS,
    FOODS,
    JOBS,
    KINDS_OF_WORK,
    LINKS,
    MATTERS,
    MOODS,
    PLACES,
    QUALITIES,
    SIZES,
    THINGS,
    VERBS,
    WEATHERS,
    an,
    any_word,
    camel,
    capital,
    name_of,
    number_of,
    snake,
    spelling_of,
)


def sentence(rng: Random) -> str:
    """A sentence from the world's daily life."""
    who = rng.choice((name_of(rng), f"The {rng.choice(ANIMALS)}", f"The {rng.choice(JOBS)}"))
    size, thing, place = rng.choice(SIZES), rng.choice(THINGS), rng.choice(PLACES)
    return rng.choice(
        (
            f"{who} {rng.choice(VERBS)} {an(size)} {thing} near the {place}.",
            f"{who} was {rng.choice(MOODS)} and went to the {place}.",
            f"On {rng.choice(DAYS)} {_inside(who)} ate {rng.choice(FOODS)} in the {place}.",
            f"There was {an(rng.choice(COLOURS))} {thing} in the {place}.",
            f"{who} and {an(rng.choice(ANIMALS))} looked for the {thing}.",
            f"{who} {rng.choice(VERBS)} the {thing} and felt {rng.choice(MOODS)}.",
            f"It was {rng.choice(WEATHERS)} in {rng.choice(CITIES)}.",
            f"{who} has {rng.randint(2, 40)} {thing}s and {an(rng.choice(COLOURS))} box.",
        )
    )


def _inside(who: str) -> str:
    return who[0].lower() + who[1:] if who.startswith("The ") else who


def instruction(rng: Random) -> str:
    """A sentence that tells how something is to be done."""
    work, other = rng.choice(KINDS_OF_WORK), rng.choice(KINDS_OF_WORK)
    matter, what = rng.choice(MATTERS), rng.choice(ALL_WORDS)
    quality, link = rng.choice(QUALITIES), rng.choice(LINKS)
    return rng.choice(
        (
            f"Always {work} the {quality} {matter} {link} you {other} a {what}.",
            f"Never {work} a {what} of the {matter} {link} it is {quality}.",
            f"Use this to {work} one {matter} at a time; it does not {other} the {what}.",
            f"The {matter} must be {quality}, {link} the {what} should {other} it.",
            f"If the {matter} is {quality}, {work} it and {other} the {what} again.",
            f"You can {work} up to {rng.randrange(1, 5000)} {what}s by default.",
            f"When the user wants to {work} a {what}, you should not {other} any {matter}.",
            f"IMPORTANT: {work} only {quality} {matter}s, and tell the user about the {what}.",
            f"This returns the {what} with its {matter} ({quality}, {spelling_of(rng)}).",
            f"For example, `{snake(rng)}` or `{spelling_of(rng)}` will {work} the {what}.",
        )
    )


def code_line(rng: Random) -> str:
    """A line as programs have them."""
    return rng.choice(
        (
            f"{snake(rng)} = {camel(rng)}({any_word(rng)}, {number_of(rng)})",
            f"    return {any_word(rng)}[{rng.randrange(9)}] + {snake(rng)}",
            f"def {snake(rng)}({any_word(rng)}, {any_word(rng)}):",
            f"import {any_word(rng)}.{any_word(rng)}",
            f"    if {any_word(rng)} > {number_of(rng)}:",
            f"# {instruction(rng)}",
            f'{any_word(rng)}: "{spelling_of(rng)}",',
            f"- {any_word(rng)}: {spelling_of(rng)}",
            f"class {camel(rng)}:",
            "",
        )
    )


def manual(rng: Random, characters: int) -> str:
    """Instructions of about so many characters: headings, lists, paragraphs, code."""
    parts: list[str] = []
    length = 0
    while length < characters:
        kind = rng.random()
        if kind < 0.15:
            part = "#" * rng.randint(1, 3) + f" {capital(any_word(rng))} {any_word(rng)}"
        elif kind < 0.45:
            part = "\n".join(f"- {instruction(rng)}" for _ in range(rng.randint(2, 5)))
        elif kind < 0.55:
            part = "```\n" + "\n".join(code_line(rng) for _ in range(rng.randint(2, 6))) + "\n```"
        elif kind < 0.65:
            tag = any_word(rng)
            part = f"<{tag}>\n{instruction(rng)}\n</{tag}>"
        else:
            part = " ".join(instruction(rng) for _ in range(rng.randint(1, 5)))
        parts.append(part)
        length += len(part) + 2
    return "\n\n".join(parts)


def notice(rng: Random) -> str:
    """A note in tags, which programs put beside what the user says."""
    tag = rng.choice(("note", "hint", "context", "system-note", "info", any_word(rng)))
    short = " ".join(instruction(rng) for _ in range(rng.randint(1, 4)))
    text = short if rng.random() < 0.7 else manual(rng, rng.randint(200, 1500))
    return f"<{tag}>\n{text}\n</{tag}>"


FILLERS: tuple[Callable[[Random], str], ...] = (sentence, sentence, instruction)


def filler(rng: Random, characters: int) -> list[str]:
    """Sentences of about so many characters in all, mostly of one sort."""
    make = rng.choice(FILLERS)
    texts: list[str] = []
    length = 0
    while length < characters:
        texts.append(make(rng))
        length += len(texts[-1])
    return texts


def story(rng: Random, hero: str, animal: str, thing: str) -> str:
    """A little story about a hero, an animal and a thing."""
    place, friend, food = rng.choice(PLACES), name_of(rng), rng.choice(FOODS)
    colour, mood = rng.choice(COLOURS), rng.choice(MOODS)
    helper = rng.choice([a for a in ANIMALS if a != animal])
    middle = rng.choice(
        (
            f"One day {hero} lost {an(colour)} {thing}. {hero} looked in the {place}, but the "
            f"{thing} was not there. {capital(an(helper))} named {friend} came by and said: "
            f'"I saw your {thing} under a tree." Together they found it.',
            f"One day {hero} found {an(colour)} {thing} in the {place}. It belonged to {friend} "
            f"the {helper}. {hero} brought the {thing} back, and {friend} said: "
            f'"Thank you, {hero}!"',
            f"One day {hero} wanted to give {an(colour)} {thing} to {friend} the {helper}. The way "
            f"through the {place} was long, but {hero} did not stop. "
            f'"What a fine {thing}!" said {friend}.',
            f"One day it was very {rng.choice(WEATHERS)}. {hero} hid in the {place} and met "
            f"{friend} the {helper}, who had {an(colour)} {thing}. They played with the {thing} "
            f"until the evening.",
        )
    )
    end = rng.choice(
        (
            f"Then they ate {food} and were happy.",
            f"In the evening they shared some {food} and laughed.",
            f"After that {hero} and {friend} were friends forever.",
        )
    )
    return f"Once there was {an(mood)} {animal} named {hero}. {middle} {end}"
