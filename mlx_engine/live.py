"""Live: the sessions in memory, what each of them holds and is worth, and counts about them.

What goes for want of memory is planned by eviction, and done by sessions.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from mlx_engine import memory
from mlx_engine.config import ModelConfig
from mlx_engine.eviction import Candidate, Holding
from mlx_engine.saving import Cache, Saving
from mlx_engine.session import Session
from mlx_engine.state import Checkpoint
from mlx_engine.token_ids import TokenIds

# Requests after which a session that none of them used counts half.
_HALF_LIFE = 16

# What an SSD reads.
_DISK_BYTES_PER_S = 2e9


@dataclass(frozen=True)
class Stats:
    """Counts since the start, but for the bytes, the sessions, those in use and the speed.

    continued, rewound, forked, restored and fresh count prompts by where their session came from;
    cached_tokens and computed_tokens are of those prompts. dropped_checkpoints went for want of
    memory; saved_anchors have been handed to the disk cache. leaving_bytes are of sessions that
    are handed to it before they go.
    """

    sessions: int = 0
    in_use: int = 0
    state_bytes: int = 0
    checkpoint_bytes: int = 0
    leaving_bytes: int = 0
    budget_bytes: int = 0
    continued: int = 0
    rewound: int = 0
    forked: int = 0
    restored: int = 0
    fresh: int = 0
    evicted: int = 0
    dropped_checkpoints: int = 0
    saved_anchors: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    prefill_tokens_per_s: float = 0.0


class Live:
    """A session in memory, and the number of the request that used it last.

    reserved_bytes: what it may come to take before its answer has ended; 0 while nobody uses it.
    prompt: what is being read into it, None otherwise.
    """

    def __init__(self, session: Session, saving: Saving) -> None:
        self.session, self.saving = session, saving
        self.used_at = 0
        self.reserved_bytes = 0
        self.prompt: TokenIds | None = None

    @property
    def is_in_use(self) -> bool:
        """Whether an answer is under way in it, so that it must stay as it is for others."""
        return self.reserved_bytes > 0

    def holdings(self) -> frozenset[Holding]:
        """The state, and the checkpoints that forks have too.

        What a prompt under way leaves for its next chunk lies in the room to compute in.
        """
        session = self.session
        n_bytes = session.state_bytes if self.prompt is None else session.state.n_bytes
        state = Holding(id(self), id(session), n_bytes)
        return frozenset({state, *(self.holding(each) for each in self.session.checkpoints)})

    def holding(self, checkpoint: Checkpoint) -> Holding:
        """One of its checkpoints."""
        return Holding(id(self), id(checkpoint), checkpoint.n_bytes)


# A session that goes, or one checkpoint of it.
Victim = tuple[Live, Checkpoint | None]


def holdings(lives: Iterable[Live]) -> list[Holding]:
    """All that sessions hold."""
    return [holding for live in lives for holding in live.holdings()]


@dataclass(frozen=True)
class Worth:
    """What it takes to have things again, at a time: after so many requests, at such a speed."""

    config: ModelConfig
    cache: Cache | None
    requests: int
    tokens_per_s: float

    def of(self, live: Live, found: int) -> float:
        """The seconds that a session is likely to save, where `found` tokens of it stay."""
        ids = live.session.token_ids
        stored = self.cache.lookup(ids) if self.cache else 0
        seconds = (ids.size - max(stored, found)) / self.tokens_per_s
        if stored > found:
            seconds += memory.growing_bytes(self.config, stored) / _DISK_BYTES_PER_S
        return self._weight(live) * seconds

    def candidates(
        self, lives: Sequence[Live], kept: Sequence[Live], wanted: Checkpoint | None = None
    ) -> Iterator[Candidate[Victim]]:
        """What may go: sessions but for those `kept`, and checkpoints but for one `wanted`."""
        for live in lives:
            weight = self._weight(live)
            for checkpoint, tokens in live.session.expendable():
                if checkpoint is not wanted:
                    seconds = weight * tokens / self.tokens_per_s
                    parts = frozenset({live.holding(checkpoint)})
                    yield Candidate((live, checkpoint), seconds, parts)
            if live not in kept:
                # Of two that could stand in for each other, one stays.
                ids = live.session.token_ids
                later = (each.session for each in lives if each.used_at > live.used_at)
                found = max((session.match(ids).kept for session in later), default=0)
                yield Candidate((live, None), self.of(live, found), live.holdings())

    def _weight(self, live: Live) -> float:
        return 0.5 ** ((self.requests - live.used_at) / _HALF_LIFE)
