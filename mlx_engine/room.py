"""Room: the sessions in memory under one budget, and what goes when there is too little of it.

Owns the list of sessions, what leaves by way of the disk cache, and the counts. Which session a
prompt goes to is sessions's part, what a session is worth live's, the choice by worth eviction's.
"""

import logging
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial

from mlx_engine import eviction, memory
from mlx_engine.config import ModelConfig
from mlx_engine.eviction import Plan
from mlx_engine.live import Live, Stats, Victim, Worth, holdings
from mlx_engine.saving import Cache, Saving
from mlx_engine.session import Session, stops
from mlx_engine.state import Checkpoint
from mlx_engine.token_ids import TokenIds

log = logging.getLogger(__name__)


class Room:
    """The sessions in memory, together within `budget_bytes`, of which long prompts leave some.

    requests, tokens_per_s: how many there have been and how fast prompts are read, which says what
    a session is worth.
    """

    def __init__(
        self,
        config: ModelConfig,
        budget_bytes: int,
        short_bytes: int,
        cache: Cache | None,
        least_save_tokens: int,
        tokens_per_s: float,
    ) -> None:
        self.budget_bytes = budget_bytes
        self.requests = 0
        self.tokens_per_s = tokens_per_s
        self._config = config
        self._short_bytes = short_bytes
        self._cache = cache
        self._least_save_tokens = least_save_tokens
        self._live: dict[Session, Live] = {}
        # Evicted between two steps, and not yet wholly handed to the cache.
        self._leaving: list[Live] = []
        self._counts = Stats()

    @property
    def lives(self) -> list[Live]:
        """The sessions."""
        return [*self._live.values()]

    @property
    def n_bytes(self) -> int:
        """Bytes of all states and checkpoints in memory."""
        return eviction.held_bytes(holdings([*self.lives, *self._leaving]))

    def find(self, session: Session) -> Live | None:
        """One of the sessions, None once it has gone."""
        return self._live.get(session)

    def stats(self) -> Stats:
        """Numbers about the sessions and the prompts that they served."""
        # Copies, for other threads than the engine's: what leaves meanwhile is in one or both.
        lives = self.lives
        leaving = [live for live in self._leaving if live not in lives]
        held, states = holdings(lives), {id(live.session) for live in lives}
        held_bytes = eviction.held_bytes(held)
        state_bytes = eviction.held_bytes(each for each in held if each.item in states)
        return replace(
            self._counts,
            sessions=len(lives),
            in_use=sum(live.is_in_use for live in lives),
            state_bytes=state_bytes,
            checkpoint_bytes=held_bytes - state_bytes,
            leaving_bytes=eviction.held_bytes([*held, *holdings(leaving)]) - held_bytes,
            budget_bytes=self.budget_bytes,
            prefill_tokens_per_s=self.tokens_per_s,
        )

    def count(self, name: str, n: int = 1) -> None:
        """Add to one of the counts."""
        self._counts = replace(self._counts, **{name: asdict(self._counts)[name] + n})

    def add(self, session: Session) -> Live:
        """Take in a session."""
        count = partial(self.count, "saved_anchors")
        live = Live(session, Saving(session, self._cache, self._least_save_tokens, count))
        self._live[session] = live
        return live

    def clear(self) -> None:
        """Forget all sessions, and what leaves."""
        self._live.clear()
        self._leaving.clear()

    def close(self) -> None:
        """Hand to the cache what only the sessions have, and forget them."""
        for live in self.lives:
            self._forget(live)
        self._let_leave()

    def save_newest(self, live: Live) -> None:
        """Offer a session's newest checkpoint to the cache."""
        live.saving.offer(self.tokens_per_s)

    def save_piece(self, *first: Live) -> bool:
        """Hand over one piece of what waits: of what leaves, then of these, then of others.

        Returns whether anything waited. A save that fails is given up, whoever's answer is next.
        """
        lives = (*self._leaving, *first, *self._live.values())
        live = next((each for each in lives if each.saving.is_pending), None)
        if live is not None:
            try:
                live.saving.advance()
            except Exception as error:
                log.warning("what was computed is not saved: %s", error)
        self._leaving = [each for each in self._leaving if each.saving.is_pending]
        return live is not None

    def fits(self, tokens: int) -> bool:
        """Whether a session that comes to so many tokens fits beside those in use, however long.

        Without any in use it always does.
        """
        reserved_bytes = sum(live.reserved_bytes for live in self.lives)
        needed_bytes = reserved_bytes + memory.answer_bytes(self._config, tokens)
        return not reserved_bytes or needed_bytes <= self._limit(tokens)

    def missing_bytes(self, session: Session, ids: TokenIds, anchors: Sequence[int]) -> int:
        """What a session will take more when it has read a prompt."""
        kept = session.match(ids).kept
        before = session.checkpoint_at(kept)
        pauses = stops(kept, ids.size, anchors, before.position if before else 0)
        return max(self.read_bytes(ids.size, len(pauses)) - session.state_bytes, 0)

    def read_bytes(self, tokens: int, checkpoints: int) -> int:
        """What a session of so many tokens and checkpoints takes."""
        config = self._config
        return memory.held_bytes(config, tokens) + checkpoints * memory.checkpoint_bytes(config)

    def make(self, more_bytes: int, live: Live, tokens: int, *, at_once: bool = False) -> None:
        """Forget others until so many bytes are free for a session, or all that may go has gone."""
        self.commit(self.plan(more_bytes, (live,), tokens), at_once=at_once)

    def plan(
        self,
        more_bytes: int,
        kept: Sequence[Live],
        tokens: int,
        wanted: Checkpoint | None = None,
    ) -> Plan[Victim]:
        """What to forget for so many bytes more, for a prompt of `tokens`; none that is in use."""
        held = holdings(self._live.values())
        over_bytes = eviction.held_bytes(held) + more_bytes - self._limit(tokens)
        kept = [*kept, *(live for live in self.lives if live.is_in_use)]
        candidates = self.worth().candidates(self.lives, kept, wanted)
        return eviction.plan(candidates if over_bytes > 0 else (), held, over_bytes)

    def commit(self, plan: Plan[Victim], *, at_once: bool) -> None:
        """Forget what a plan says; at_once: what goes to the cache goes now."""
        for live, checkpoint in plan.victims:
            if checkpoint is not None:
                live.session.drop_checkpoint(checkpoint)
                self.count("dropped_checkpoints")
            else:
                log.debug("a session of %d tokens makes room", live.session.position)
                self._forget(live)
                self.count("evicted")
                if at_once:
                    self._let_leave()
        if at_once:
            self._let_leave()

    def worth(self) -> Worth:
        """What sessions are worth now."""
        return Worth(self._config, self._cache, self.requests, self.tokens_per_s)

    def _limit(self, tokens: int) -> int:
        is_short = tokens <= memory.SHORT_TOKENS
        return self.budget_bytes - (0 if is_short else self._short_bytes)

    def _forget(self, live: Live) -> None:
        """Let a session go, by way of the cache if that has not got it."""
        if self._cache is not None:
            self._keep_unfinished(live.session)
        live.session.keep_checkpoint()
        self.save_newest(live)
        del self._live[live.session]
        if live.saving.is_pending:
            self._leaving.append(live)

    def _keep_unfinished(self, session: Session) -> None:
        """Let the cache have what a prefill read since its last checkpoint, if it is a chunk."""
        last = session.checkpoint_at(session.position)
        if session.position - (last.position if last else 0) < session.chunk_tokens:
            return
        try:
            session.keep_unfinished()
        except Exception as error:
            log.warning("what was read of a prompt is not saved: %s", error)

    def _let_leave(self) -> None:
        """Hand over what only sessions that leave have."""
        while self._leaving:
            self.save_piece()
