"""How far the reading of a prompt has come: what is said between its chunks, and while it waits.

Sessions say it, the engine passes it on ahead of the tokens, and answers add the time.
"""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Prefilled:
    """After each chunk of a prompt, and before the first: its tokens done and in all.

    parted_at: before the first, where the prompt goes another way than the nearest session did.
    """

    done_tokens: int
    total_tokens: int
    parted_at: int | None = None


@dataclass(frozen=True)
class Waiting:
    """A prompt waits for another answer: until it has read what both begin with, or has ended.

    It is not worth while to ask again before `is_over`. Who does, where nothing has happened
    meanwhile, gets what can be had without the other.
    """

    is_over: Callable[[], bool]
