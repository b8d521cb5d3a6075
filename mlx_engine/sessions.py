"""Sessions: several timelines under one budget of memory, and the disk cache behind them.

Owns the choice of a timeline for a prompt, whether the prompt waits for another that is read, and
when a checkpoint is offered to the cache. One timeline is session's part, room for it room's.
"""

import logging
import math
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import mlx.core as mx

from mlx_engine import memory
from mlx_engine.decoder import Decoder
from mlx_engine.engram import EngramReader
from mlx_engine.errors import BadRequest
from mlx_engine.formats import CacheFormats
from mlx_engine.live import Live, Stats
from mlx_engine.memory import CHUNK_TOKENS
from mlx_engine.model import Model
from mlx_engine.progress import Prefilled, Waiting, to_end
from mlx_engine.room import Room
from mlx_engine.saving import LEAST_TOKENS, Cache, restore
from mlx_engine.session import Match, Prefill, Session, stops
from mlx_engine.token_ids import TokenIds, as_token_ids, shared_tokens

log = logging.getLogger(__name__)

# Until a prefill has been measured.
_TOKENS_PER_S = 500.0

# Prefills of fewer tokens say little about longer ones.
_MEASURED_TOKENS = 256

# Steps between two looks at the memory: buffers grow by more rows than this.
_LOOK_STEPS = 256

# A chunk takes about this long, for nothing interrupts it. Fewer tokens would cost more of the time
# for reading an expert's weights again than they gain in patience. In steps, so that most chunks
# have the length for which table rows were read ahead.
_CHUNK_S = 2.0
_LEAST_CHUNK_TOKENS = 512
_CHUNK_STEP_TOKENS = 256

# How many others may get room while a prompt that came before them waits for it.
_MOST_OVERTAKEN = 16

# What two prompts have in common is worth a checkpoint of its own from here on: it costs a run of
# the upper layers, about as much as reading half of this.
_SHARED_TOKENS = 2048


@dataclass
class _Queued:
    """A prompt that waits for room, with its answer's tokens, and how many later ones got some."""

    tokens: int
    overtaken: int = 0


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
        session_type: Callable[..., Session] = Session,
    ) -> None:
        """short_bytes: of the budget, what prompts above memory.SHORT_TOKENS leave free."""
        self._session_type = session_type
        self._model = model
        self._engram = engram
        self._prefill: Prefill = prefill
        self._chunk_tokens = chunk_tokens
        self._formats = formats
        self._decoder = Decoder(model)
        self._cache = cache
        self._clock = clock
        self._room = Room(
            model.config, budget_bytes, short_bytes, cache, least_save_tokens, _TOKENS_PER_S
        )
        # By their number.
        self._queue: dict[int, _Queued] = {}
        # Counts what may end another's waiting.
        self._moves = 0

    @property
    def n_bytes(self) -> int:
        """Bytes of all states and checkpoints in memory."""
        return self._room.n_bytes

    def __contains__(self, session: Session) -> bool:
        return self._room.find(session) is not None

    def stats(self) -> Stats:
        """Numbers about the sessions and the prompts that they served."""
        return self._room.stats()

    def reset(self) -> None:
        """Forget all timelines, those in use too; what the cache has stays there."""
        self._room.clear()
        self._moves += 1

    def sync(
        self, token_ids: Sequence[int] | TokenIds, anchors: Sequence[int] = ()
    ) -> tuple[Session, mx.array]:
        """`read`, all at once, where no other answer is under way; the session is left."""
        session, logits = to_end(self.read(token_ids, anchors))
        self.leave(session)
        return session, logits

    def read(
        self,
        token_ids: Sequence[int] | TokenIds,
        anchors: Sequence[int] = (),
        answer_tokens: int = 0,
    ) -> Generator[Prefilled | Waiting, None, tuple[Session, mx.array]]:
        """Find the session for a prompt and bring it to these tokens: it, and the logits [V].

        Yields how far it has come: before the first chunk, and after each. It yields Waiting while
        another prompt is reading what this one begins with, and while there is no room for this one
        and `answer_tokens` beside those in use. `Session.read` says what `anchors` are.

        The session is in use, and nobody else's, until it is left; whoever closes the iterator has
        left it with what was computed. Raises BadRequest where no other goes on and there is still
        no room, and once `reset` has forgotten the session.
        """
        ids = as_token_ids(token_ids)
        self._room.requests += 1
        number, tokens = self._room.requests, ids.size + answer_tokens
        yield from self._admit(ids, tokens, number)
        with self._cache.protect(ids) if self._cache else nullcontext():
            live, parted_at = self._place(ids, anchors)
            live.used_at = number
            live.reserved_bytes = memory.answer_bytes(self._model.config, tokens)
            try:
                more_bytes = self._room.missing_bytes(live.session, ids, anchors)
                self._room.make(more_bytes, live, ids.size, at_once=True)
                return live.session, (yield from self._read(live, ids, anchors, parted_at))
            except BaseException:
                self.leave(live.session)
                raise

    def step(self, session: Session, token_id: int) -> mx.array:
        """`Session.step`, and one piece for the cache."""
        live = self._require(session)
        self._room.save_piece(live)
        if session.position % _LOOK_STEPS == 0:
            self._room.make(0, live, session.position)
        return session.step(token_id)

    def leave(self, session: Session) -> None:
        """Let others have a session. Changes no array, so that any thread may do it at any time."""
        live = self._room.find(session)
        if live is not None:
            live.reserved_bytes, live.prompt = 0, None
        self._moves += 1

    def end_turn(self, session: Session) -> None:
        """Keep a checkpoint where an answer has ended, for the cache too.

        Nothing is handed over now, so that nobody waits: `save_piece`, later steps and `close` do.
        """
        live = self._room.find(session)
        if live is None:
            return
        session.keep_checkpoint()
        self._room.save_newest(live)
        self._room.make(0, live, session.position)

    def save_piece(self) -> bool:
        """Hand over one piece, for when nobody asks; whether anything waited."""
        return self._room.save_piece()

    def close(self) -> None:
        """Hand to the cache what only the sessions have, and forget them."""
        self._room.close()

    # When a prompt gets a session

    def _admit(self, ids: TokenIds, tokens: int, number: int) -> Generator[Waiting, None, None]:
        stored = self._cache.lookup(ids[:-1]) if self._cache else 0
        moves = -1
        try:
            while True:
                if not self._has_room(tokens, number):
                    if moves == self._moves:
                        raise BadRequest(
                            "the answers under way hold the memory for sessions: end one first"
                        )
                elif moves == self._moves or not self._is_read_by_another(ids, stored):
                    for queued in self._before(number):
                        queued.overtaken += 1
                    return
                moves = self._moves
                yield Waiting(is_due=lambda moves=moves: moves != self._moves)
        finally:
            self._queue.pop(number, None)
            self._moves += 1

    def _has_room(self, tokens: int, number: int) -> bool:
        """Whether there is room, and none that came before fits by now or was overtaken enough."""
        is_short = tokens <= memory.SHORT_TOKENS
        is_late = not is_short and any(
            queued.overtaken >= _MOST_OVERTAKEN or self._room.fits(queued.tokens)
            for queued in self._before(number)
        )
        if self._room.fits(tokens) and not is_late:
            return True
        self._queue.setdefault(number, _Queued(tokens))
        return False

    def _before(self, number: int) -> list[_Queued]:
        """Those that came before a request and wait for room."""
        return [queued for each, queued in self._queue.items() if each < number]

    def _is_read_by_another(self, ids: TokenIds, stored: int) -> bool:
        """Whether a prompt under way will soon have more of this one than there is anywhere.

        It takes a checkpoint there, if it would not take one nearby.
        """
        known = max(stored, self._nearest(ids)[1].kept)
        for live in self._room.lives:
            session = live.session
            if live.prompt is None or session.position < known:
                continue
            shared = min(shared_tokens(live.prompt, ids), ids.size - 1) // 2 * 2
            last = max([0, *(each for each in session.pauses if each <= shared)])
            if shared - max(last, session.position) >= _SHARED_TOKENS:
                session.pause_at(shared)
                last = shared
            if last > known:
                return True
        return False

    # Where a prompt goes

    def _place(self, ids: TokenIds, anchors: Sequence[int]) -> tuple[Live, int | None]:
        """The session that has most of a prompt, made to have it without loss for others.

        And where the prompt parts from the nearest one, if it does.
        """
        best, match = self._nearest(ids)
        position = best.session.position if best else 0
        parted_at = match.shared if match.shared < min(ids.size, position) else None
        stored = self._cache.lookup(ids[:-1]) if self._cache else 0
        log.debug("of %d prompt tokens memory has %d and the disk %d", ids.size, match.kept, stored)
        if stored > match.kept:
            live = self._restore(ids[:-1], match.kept, best)
            if live is not None:
                self._room.count("restored")
                return live, parted_at
            best, match = self._nearest(ids)
        if best is None or match.kept == 0:
            self._room.count("fresh")
            return self._room.add(self._new_session()), parted_at
        if match.kept == best.session.position and not best.is_in_use:
            self._room.count("continued")
            return best, parted_at
        if not best.is_in_use:
            best.saving.finish()
        fork = self._fork(best, match, ids, anchors)
        if fork is not None:
            self._room.count("forked")
            return fork, parted_at
        self._room.count("rewound")
        # At once, so that no want of memory takes this checkpoint: the newest stay.
        best.session.rewind(match.kept)
        return best, parted_at

    def _nearest(self, ids: TokenIds) -> tuple[Live | None, Match]:
        """The session that has most of a prompt to begin with, rather one that nobody uses."""
        best, match = None, Match(0, 0)
        for live in self._room.lives:
            found = live.session.match(ids, is_fork=live.is_in_use)
            is_better = (found.kept, not live.is_in_use, found.shared) > (
                match.kept,
                best is not None and not best.is_in_use,
                match.shared,
            )
            if best is None or is_better:
                best, match = live, found
        return best, match

    def _fork(self, best: Live, match: Match, ids: TokenIds, anchors: Sequence[int]) -> Live | None:
        """A fork where a rewind would cost more than what makes room for one, or somebody."""
        session = best.session
        # A rewind may cost the end of a prompt where that is little beside what is kept.
        slack = min(CHUNK_TOKENS, match.kept // 8)
        checkpoint = session.checkpoint_at(match.kept)
        is_little = match.shared + slack >= session.prompt_tokens
        if checkpoint is None or (is_little and not best.is_in_use):
            return None
        pauses = stops(match.kept, ids.size, anchors, match.kept)
        more_bytes = self._room.read_bytes(ids.size, len(pauses))
        plan = self._room.plan(more_bytes, (best,), ids.size, wanted=checkpoint)
        lost_s = math.inf if best.is_in_use else self._room.worth().of(best, match.kept)
        if plan.worth_s > lost_s or (plan.missing_bytes and not best.is_in_use):
            return None
        self._room.commit(plan, at_once=True)
        return self._room.add(session.fork(checkpoint))

    def _restore(self, ids: TokenIds, least: int, best: Live | None) -> Live | None:
        """A session with what the cache has of a prompt, where that is more than `least` tokens."""
        assert self._cache is not None
        below = ids.size + 1
        while least < (position := self._cache.lookup(ids)) < below:
            below = position
            config = self._model.config
            more_bytes = memory.held_bytes(config, position)
            # Who has a part of the prompt stays, should the cache fail, where there is room.
            plan = self._room.plan(more_bytes, (best,) if best and least else (), ids.size)
            if plan.missing_bytes:
                plan = self._room.plan(more_bytes, (), ids.size)
            if plan.missing_bytes:
                return None
            self._room.commit(plan, at_once=True)
            state = restore(self._cache, ids, position, config, self._formats)
            if state is not None and state.position > least:
                session = self._new_session()
                session.restore(ids[: state.position], state)
                return self._room.add(session)
        return None

    def _new_session(self) -> Session:
        return self._session_type(
            self._model,
            self._engram,
            prefill=self._prefill,
            chunk_tokens=self._chunk_tokens,
            formats=self._formats,
            decoder=self._decoder,
        )

    # The work

    def _read(
        self, live: Live, ids: TokenIds, anchors: Sequence[int], parted_at: int | None
    ) -> Generator[Prefilled, None, mx.array]:
        session = live.session
        reading = session.read(ids, anchors)
        live.prompt = ids
        known = done = next(reading)
        self._room.count("cached_tokens", known)
        elapsed_s, tokens_per_s = 0.0, self._room.tokens_per_s
        yield Prefilled(known, ids.size, parted_at)
        while True:
            self._require(session)
            session.chunk_tokens = self._chunk_tokens_at(tokens_per_s)
            started_s = self._clock()
            try:
                before, done = done, next(reading)
            except StopIteration as end:
                logits: mx.array = end.value
                break
            chunk_s = self._clock() - started_s
            elapsed_s += chunk_s
            if done - before >= _MEASURED_TOKENS and chunk_s > 0:
                tokens_per_s = (done - before) / chunk_s
            self._room.count("computed_tokens", done - before)
            if done < ids.size:
                self._room.save_newest(live)
                if done < (ids.size - 1) // 2 * 2:
                    # Only the last of a prompt waits for the decode steps.
                    live.saving.finish()
            self._room.make(0, live, ids.size, at_once=True)
            self._moves += 1
            yield Prefilled(done, ids.size)
        live.prompt = None
        if done - known >= _MEASURED_TOKENS and elapsed_s > 0:
            self._room.tokens_per_s = (done - known) / elapsed_s
        return logits

    def _chunk_tokens_at(self, tokens_per_s: float) -> int:
        """As many as compute in a moment: no cancel and no other answer waits for longer."""
        in_time = int(_CHUNK_S * tokens_per_s) // _CHUNK_STEP_TOKENS * _CHUNK_STEP_TOKENS
        return min(self._chunk_tokens, max(in_time, _LEAST_CHUNK_TOKENS))

    def _require(self, session: Session) -> Live:
        live = self._room.find(session)
        if live is None:
            raise BadRequest("the session of this answer was reset; start generate again")
        return live
