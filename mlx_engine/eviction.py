"""Eviction: which of the things in memory to forget for room, as a plan that changes nothing.

What things are worth and how large they are is told; to forget them is the caller's part.
"""

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Holding:
    """That an owner keeps an item in memory; the bytes go when the last owner lets it go."""

    owner: int
    item: int
    n_bytes: int


@dataclass(frozen=True)
class Candidate(Generic[T]):
    """Something that may go: the seconds that it is likely to save, and what goes with it."""

    what: T
    worth_s: float
    holdings: frozenset[Holding]


@dataclass(frozen=True)
class Plan(Generic[T]):
    """What goes, in order. missing_bytes: what is wanted still when all of it has gone."""

    victims: tuple[T, ...]
    freed_bytes: int
    worth_s: float
    missing_bytes: int


def held_bytes(held: Iterable[Holding]) -> int:
    """The bytes of all items, each counted once."""
    return sum({holding.item: holding.n_bytes for holding in held}.values())


def plan(
    candidates: Iterable[Candidate[T]], held: Collection[Holding], needed_bytes: int
) -> Plan[T]:
    """Let go of what is worth least per byte until `needed_bytes` are free.

    `held` is all that is in memory. What shares its bytes with others that stay frees none, and
    what went with an earlier candidate is no victim again.
    """
    users = Counter(holding.item for holding in held)

    def worth_per_byte(candidate: Candidate[T]) -> float:
        alone = sum(each.n_bytes for each in candidate.holdings if users[each.item] == 1)
        return candidate.worth_s / max(alone, 1)

    order = sorted(candidates, key=worth_per_byte)
    left = Counter(users)
    gone: set[Holding] = set()
    victims: list[T] = []
    freed_bytes, worth_s = 0, 0.0
    for candidate in order:
        if freed_bytes >= needed_bytes:
            break
        going = candidate.holdings - gone
        if not going:
            continue
        for holding in going:
            left[holding.item] -= 1
            if not left[holding.item]:
                freed_bytes += holding.n_bytes
        gone |= going
        victims.append(candidate.what)
        worth_s += candidate.worth_s
    return Plan(tuple(victims), freed_bytes, worth_s, max(needed_bytes - freed_bytes, 0))
