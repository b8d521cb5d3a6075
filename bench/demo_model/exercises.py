"""Exercises with one right answer: counting, sorting, copying, sums."""

from collections.abc import Callable
from random import Random

from bench.demo_model.chat import Chat
from bench.demo_model.words import ALL_WORDS, PLAIN_WORDS, any_word, spelling_of, word_of

Exercise = tuple[str, str, str]  # request, answer, reasoning

_NUMBERS = "zero one two three four five six seven eight nine ten eleven twelve".split()


def _count(rng: Random) -> Exercise:
    first = 1 if rng.random() < 0.3 else rng.randint(0, 90)
    last = first + rng.randint(2, 14)
    numbers = [str(i) for i in range(first, last + 1)]
    request = rng.choice(
        ("Count from {} to {}.", "Count from {} to {}", "Please count from {} to {}.")
    )
    request = request.format(first, last)
    if first == 1 and last < len(_NUMBERS) and rng.random() < 0.6:
        request = rng.choice(
            ("Count to {}.", "Please count to {}.", "Count up to {}", "count to {}")
        )
        request = request.format(rng.choice((_NUMBERS[last], str(last))))
    elif rng.random() < 0.2:
        request = f"Count down from {last} to {first}."
        numbers.reverse()
    return request, ", ".join(numbers), f"I start at {numbers[0]} and stop at {numbers[-1]}."


def _sort_numbers(rng: Random) -> Exercise:
    values = [rng.randrange(100) for _ in range(rng.randint(3, 7))]
    request = rng.choice(("Sort these numbers: ", "Put these numbers in order: ", "Sort: "))
    # One after another is taken out, so that each step only looks for the least of what is left.
    left, steps = list(values), list[str]()
    for value in sorted(values)[:-1]:
        left.remove(value)
        steps.append(f"{value} leaves {', '.join(map(str, left))}")
    return (
        request + ", ".join(map(str, values)),
        ", ".join(map(str, sorted(values))),
        "; ".join(steps),
    )


def _sort_words(rng: Random) -> Exercise:
    words = rng.sample(PLAIN_WORDS, rng.randint(3, 6))
    request = rng.choice(("Sort these words: ", "Put these words in order: "))
    answer = ", ".join(sorted(words))
    firsts = ", ".join(f"{word[0]} {word}" for word in words)
    return request + ", ".join(words), answer, firsts


def _copy(rng: Random) -> Exercise:
    make = rng.choice((spelling_of, spelling_of, word_of, any_word))
    text = " ".join(make(rng) for _ in range(rng.randint(1, 14)))
    request = rng.choice(("Repeat: ", "Say exactly this: ", "Copy this text: ", "Say ", "Repeat "))
    return request + text, text, "I have to copy the words."


def _reverse(rng: Random) -> Exercise:
    make = rng.choice((spelling_of, any_word))
    words = [make(rng) for _ in range(rng.randint(3, 7))]
    answer = ", ".join(reversed(words))
    return "Reverse the order: " + ", ".join(words), answer, f"The last word is {words[-1]}."


def _how_many(rng: Random) -> Exercise:
    words = rng.sample(ALL_WORDS, rng.randint(2, 9))
    request = "How many words are these: " + ", ".join(words) + "?"
    why = ", ".join(f"{i + 1} {word}" for i, word in enumerate(words))
    return request, f"These are {len(words)} words.", why


def _sum(rng: Random) -> Exercise:
    most = rng.choice((10, 20, 20, 50))
    a, b = rng.randint(0, most), rng.randint(0, most)
    request = rng.choice(
        ("What is {}+{}?", "What is {} + {}?", "How much is {} plus {}?", "{} + {} = ?", "{}+{}")
    )
    ones, tens = a % 10 + b % 10, a // 10 * 10 + b // 10 * 10
    why = f"{a % 10} + {b % 10} = {ones}, {a - a % 10} + {b - b % 10} = {tens}"
    return request.format(a, b), f"{a} + {b} = {a + b}", f"{why}, {tens} + {ones} = {a + b}"


def _times(rng: Random) -> Exercise:
    if rng.random() < 0.5:
        a, b = rng.randint(0, 10), rng.randint(0, 10)
        request = rng.choice(("What is {}*{}?", "What is {} times {}?", "{} * {} = ?"))
        return request.format(a, b), f"{a} * {b} = {a * b}", f"I multiply {a} and {b}."
    b, rest = rng.randint(0, 10), rng.randint(0, 10)
    request = rng.choice(("What is {}-{}?", "What is {} minus {}?", "{} - {} = ?"))
    return request.format(b + rest, b), f"{b + rest} - {b} = {rest}", f"I take {b} away."


def _next(rng: Random) -> Exercise:
    words = list(dict.fromkeys(spelling_of(rng) for _ in range(rng.randint(3, 8))))
    words += [word for word in ("last", "end") if len(words) < 2]
    i = rng.randrange(len(words) - 1)
    request = f"In this list: {', '.join(words)}. Which word comes after {words[i]}?"
    return request, f"After {words[i]} comes {words[i + 1]}.", f"I look for {words[i]}."


_MAKERS: dict[str, Callable[[Random], Exercise]] = {
    "count": _count,
    "sort numbers": _sort_numbers,
    "sort words": _sort_words,
    "copy": _copy,
    "reverse": _reverse,
    "how many": _how_many,
    "sum": _sum,
    "times": _times,
    "next": _next,
}
EXERCISES = tuple(_MAKERS)
# Those that took longest to learn come more often.
_DRAWN = [*EXERCISES, *["sort numbers"] * 3, "sort words", "sum", "sum", "copy"]


def exercise(rng: Random, chat: Chat, kind: str | None = None) -> None:
    """One of the EXERCISES."""
    request, answer, why = _MAKERS[kind or rng.choice(_DRAWN)](rng)
    chat.user(request)
    chat.answer(answer, why)
