"""Sessions: several timelines under one budget of memory, and the disk cache behind them.

Owns the choice of a timeline for a prompt, when memory is made and when a checkpoint is offered to
the cache. One timeline is session's part, handing it over saving's, what may go live's.
"""

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import partial

import mlx.core as mx

from mlx_engine import eviction, memory
from mlx_engine.decoder import Decoder
from mlx_engine.engram import EngramReader
from mlx_engine.eviction import Plan
from mlx_engine.formats import CacheFormats
from mlx_engine.live import Live, Stats, Victim, Worth, holdings
from mlx_engine.memory import CHUNK_TOKENS
from mlx_engine.model import Model
from mlx_engine.saving import LEAST_TOKENS, Cache, Saving, restore
from mlx_engine.session import Match, Prefill, Session, stops
from mlx_engine.state import Checkpoint
from mlx_engine.token_ids import TokenIds, as_token_ids

log = logging.getLogger(__name__)

# Until a prefill has been measured.
_TOKENS_PER_S = 500.0

# Prefills of fewer tokens say little about longer ones.
_MEASURED_TOKENS = 256

# Steps between two looks at the memory: buffers grow by more rows than this.
_LOOK_STEPS = 256


class Sessions:
    """Timelines over a model, all of them together within `budget_bytes`.

    The budget holds at least what `memory.least_session_bytes` says. `cache` takes what is worth
    keeping longer, from checkpoints `least_save_tokens` apart. `clock` gives seconds.
    """

    def __init__(
        self,
        model: Model,
        engram: EngramReader | None,
        *,
        budget_bytes: int,
        short_bytes: int = 0,
        prefill: Prefill = "short",
        chunk_tokens: int = CHUNK_TOKENS,
        formats: CacheFormats | None = None,
        cache: Cache | None = None,
        least_save_tokens: int = LEAST_TOKENS,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """short_bytes: of the budget, what prompts above memory.SHORT_TOKENS leave free."""
        self._model = model
        self._engram = engram
        self._budget_bytes = budget_bytes
        self._short_bytes = short_bytes
        self._prefill: Prefill = prefill
        self._chunk_tokens = chunk_tokens
        self._formats = formats
        self._decoder = Decoder(model)
        self._cache = cache
        self._least_save_tokens = least_save_tokens
        self._clock = clock
        self._live: dict[Session, Live] = {}
        # Evicted between two steps, and not yet wholly handed to the cache.
        self._leaving: list[Live] = []
        self._requests = 0
        self._tokens_per_s = _TOKENS_PER_S
        self._counts = Stats()

    @property
    def n_bytes(self) -> int:
        """Bytes of all states and checkpoints in memory."""
        return eviction.held_bytes(holdings([*self._live.values(), *self._leaving]))

    def __contains__(self, session: Session) -> bool:
        return session in self._live

    def stats(self) -> Stats:
        """Numbers about the sessions and the prompts that they served."""
        state_bytes = sum(session.state_bytes for session in self._live)
        live_bytes = eviction.held_bytes(holdings(self._live.values()))
        return replace(
            self._counts,
            sessions=len(self._live),
            state_bytes=state_bytes,
            checkpoint_bytes=live_bytes - state_bytes,
            leaving_bytes=self.n_bytes - live_bytes,
            budget_bytes=self._budget_bytes,
            prefill_tokens_per_s=self._tokens_per_s,
        )

    def reset(self) -> None:
        """Forget all timelines; what the cache has stays there."""
        self._live.clear()
        self._leaving.clear()

    def sync(
        self,
        token_ids: Sequence[int] | TokenIds,
        anchors: Sequence[int] = (),
        on_progress: Callable[[int, int], None] | None = None,
    ) -> tuple[Session, mx.array]:
        """Find the session for a prompt and bring it to these tokens: it, and the logits [V].

        `Session.sync` says what `anchors` and `on_progress` are.
        """
        ids = as_token_ids(token_ids)
        self._requests += 1
        with self._cache.protect(ids) if self._cache else nullcontext():
            live = self._place(ids, anchors)
            live.used_at = self._requests
            more_bytes = self._missing_bytes(live.session, ids, anchors)
            self._make_room(more_bytes, live, ids.size, at_once=True)
            return live.session, self._sync(live, ids, anchors, on_progress)

    def step(self, session: Session, token_id: int) -> mx.array:
        """`Session.step`, and one piece for the cache."""
        live = self._live[session]
        self._save_piece(live)
        if session.position % _LOOK_STEPS == 0:
            self._make_room(0, live, session.position)
        return session.step(token_id)

    def end_turn(self, session: Session) -> None:
        """Keep a checkpoint where an answer has ended, for the cache too.

        Nothing is handed over now, so that nobody waits: `save_piece`, later steps and `close` do.
        """
        live = self._live[session]
        session.keep_checkpoint()
        live.saving.offer(self._tokens_per_s)
        self._make_room(0, live, session.position)

    def save_piece(self) -> bool:
        """Hand over one piece, for when nobody asks; whether anything waited."""
        return self._save_piece()

    def close(self) -> None:
        """Hand to the cache what only the sessions have, and forget them."""
        for live in [*self._live.values()]:
            self._forget(live)
        self._let_leave()

    # Where a prompt goes

    def _place(self, ids: TokenIds, anchors: Sequence[int]) -> Live:
        """The session that has most of a prompt, made to have it without loss for others."""
        best, match = self._nearest(ids)
        stored = self._cache.lookup(ids[:-1]) if self._cache else 0
        self._tell(ids, best, match, stored)
        if stored > match.kept:
            live = self._restore(ids[:-1], match.kept, best)
            if live is not None:
                self._count("restored")
                return live
            best, match = self._nearest(ids)
        if best is None or match.kept == 0:
            self._count("fresh")
            return self._add(self._new_session())
        if match.kept == best.session.position:
            self._count("continued")
            return best
        best.saving.finish()
        fork = self._fork(best, match, ids, anchors)
        if fork is not None:
            self._count("forked")
            return fork
        self._count("rewound")
        # At once, so that no want of memory takes this checkpoint: the newest stay.
        best.session.rewind(match.kept)
        return best

    def _nearest(self, ids: TokenIds) -> tuple[Live | None, Match]:
        best, match = None, Match(0, 0)
        for live in self._live.values():
            found = live.session.match(ids)
            if best is None or (found.kept, found.shared) > (match.kept, match.shared):
                best, match = live, found
        return best, match

    def _fork(self, best: Live, match: Match, ids: TokenIds, anchors: Sequence[int]) -> Live | None:
        """A fork where a rewind would cost more than what makes room for one."""
        session = best.session
        # A rewind may cost the end of a prompt where that is little beside what is kept.
        slack = min(CHUNK_TOKENS, match.kept // 8)
        checkpoint = session.checkpoint_at(match.kept)
        if checkpoint is None or match.shared + slack >= session.prompt_tokens:
            return None
        pauses = stops(match.kept, ids.size, anchors, match.kept)
        more_bytes = self._read_bytes(ids.size, len(pauses))
        plan = self._plan(more_bytes, (best,), ids.size, wanted=checkpoint)
        lost_s = self._worth().of(best, match.kept)
        if plan.missing_bytes or plan.worth_s > lost_s:
            return None
        self._commit(plan, at_once=True)
        return self._add(session.fork(checkpoint))

    def _restore(self, ids: TokenIds, least: int, best: Live | None) -> Live | None:
        """A session with what the cache has of a prompt, where that is more than `least` tokens."""
        assert self._cache is not None
        below = ids.size + 1
        while least < (position := self._cache.lookup(ids)) < below:
            below = position
            config = self._model.config
            more_bytes = memory.held_bytes(config, position)
            # Who has a part of the prompt stays, should the cache fail, where there is room.
            plan = self._plan(more_bytes, (best,) if best and least else (), ids.size)
            if plan.missing_bytes:
                plan = self._plan(more_bytes, (), ids.size)
            if plan.missing_bytes:
                return None
            self._commit(plan, at_once=True)
            state = restore(self._cache, ids, position, config, self._formats)
            if state is not None and state.position > least:
                session = self._new_session()
                session.restore(ids[: state.position], state)
                return self._add(session)
        return None

    def _new_session(self) -> Session:
        return Session(
            self._model,
            self._engram,
            prefill=self._prefill,
            chunk_tokens=self._chunk_tokens,
            formats=self._formats,
            decoder=self._decoder,
        )

    def _add(self, session: Session) -> Live:
        count = partial(self._count, "saved_anchors")
        live = Live(session, Saving(session, self._cache, self._least_save_tokens, count))
        self._live[session] = live
        return live

    def _tell(self, ids: TokenIds, best: Live | None, match: Match, stored: int) -> None:
        position = best.session.position if best else 0
        if match.shared < min(ids.size, position):
            log.info(
                "a prompt of %d tokens differs from the nearest session, of %d tokens, at token %d",
                ids.size,
                position,
                match.shared,
            )
        log.debug("of %d prompt tokens memory has %d and the disk %d", ids.size, match.kept, stored)

    # The work

    def _sync(
        self,
        live: Live,
        ids: TokenIds,
        anchors: Sequence[int],
        on_progress: Callable[[int, int], None] | None,
    ) -> mx.array:
        first: int | None = None
        done = 0

        def report(done_tokens: int, total_tokens: int) -> None:
            nonlocal first, done
            done = done_tokens
            if first is None:
                first = done_tokens
            elif done_tokens < total_tokens:
                self._save_newest(live, is_last=done_tokens >= (total_tokens - 1) // 2 * 2)
            if on_progress is not None:
                on_progress(done_tokens, total_tokens)

        started_s = self._clock()
        try:
            logits = live.session.sync(ids, anchors, report)
        finally:
            self._count("cached_tokens", first or 0)
            self._count("computed_tokens", done - (first or 0))
            self._make_room(0, live, ids.size)
        elapsed_s = self._clock() - started_s
        if done - (first or 0) >= _MEASURED_TOKENS and elapsed_s > 0:
            self._tokens_per_s = (done - (first or 0)) / elapsed_s
        return logits

    def _save_newest(self, live: Live, *, is_last: bool = False) -> None:
        """Offer the newest checkpoint; only the last of a prompt waits for the decode steps."""
        live.saving.offer(self._tokens_per_s)
        if not is_last:
            live.saving.finish()

    def _save_piece(self, *first: Live) -> bool:
        """Hand over one piece of what waits: of what leaves, then of these, then of others."""
        lives = (*self._leaving, *first, *self._live.values())
        live = next((each for each in lives if each.saving.is_pending), None)
        if live is not None:
            live.saving.advance()
        self._leaving = [each for each in self._leaving if each.saving.is_pending]
        return live is not None

    # What is forgotten

    def _missing_bytes(self, session: Session, ids: TokenIds, anchors: Sequence[int]) -> int:
        """What a session will take more when it has read a prompt."""
        kept = session.match(ids).kept
        before = session.checkpoint_at(kept)
        pauses = stops(kept, ids.size, anchors, before.position if before else 0)
        return max(self._read_bytes(ids.size, len(pauses)) - session.state_bytes, 0)

    def _read_bytes(self, tokens: int, checkpoints: int) -> int:
        config = self._model.config
        return memory.held_bytes(config, tokens) + checkpoints * memory.checkpoint_bytes(config)

    def _make_room(
        self, more_bytes: int, live: Live, tokens: int, *, at_once: bool = False
    ) -> None:
        """Forget others until so many bytes are free for a session, or all that may go has gone."""
        self._commit(self._plan(more_bytes, (live,), tokens), at_once=at_once)

    def _plan(
        self,
        more_bytes: int,
        kept: Sequence[Live],
        tokens: int,
        wanted: Checkpoint | None = None,
    ) -> Plan[Victim]:
        """What to forget for so many bytes more, for a prompt of `tokens`."""
        limit = self._budget_bytes
        if tokens > memory.SHORT_TOKENS:
            limit -= self._short_bytes
        held = holdings(self._live.values())
        over_bytes = eviction.held_bytes(held) + more_bytes - limit
        candidates = self._worth().candidates([*self._live.values()], kept, wanted)
        return eviction.plan(candidates if over_bytes > 0 else (), held, over_bytes)

    def _worth(self) -> Worth:
        return Worth(self._model.config, self._cache, self._requests, self._tokens_per_s)

    def _commit(self, plan: Plan[Victim], *, at_once: bool) -> None:
        for live, checkpoint in plan.victims:
            if checkpoint is not None:
                live.session.drop_checkpoint(checkpoint)
                self._count("dropped_checkpoints")
            else:
                log.debug("a session of %d tokens makes room", live.session.position)
                self._forget(live)
                self._count("evicted")
                if at_once:
                    self._let_leave()
        if at_once:
            self._let_leave()

    def _forget(self, live: Live) -> None:
        """Let a session go, by way of the cache if that has not got it."""
        live.session.keep_checkpoint()
        live.saving.offer(self._tokens_per_s)
        del self._live[live.session]
        if live.saving.is_pending:
            self._leaving.append(live)

    def _let_leave(self) -> None:
        """Hand over what only sessions that leave have."""
        while self._leaving:
            self._leaving.pop().saving.finish()

    def _count(self, name: str, n: int = 1) -> None:
        self._counts = replace(self._counts, **{name: asdict(self._counts)[name] + n})
