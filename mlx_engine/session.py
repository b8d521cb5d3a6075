"""Session: one mutable timeline of tokens, which owns the state that they left behind.

Callers hand over the whole token prefix; `sync` decides what to keep, what to return to and what to
compute. Nobody else changes the SessionState. Which session a prompt goes to is sessions's part.
"""

from array import array
from bisect import bisect_right
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, cast

import mlx.core as mx
import numpy as np

from mlx_engine.decoder import Begun, Decoder
from mlx_engine.engram import EngramReader, EngramRows, read_ahead
from mlx_engine.formats import CacheFormats
from mlx_engine.memory import CHUNK_TOKENS
from mlx_engine.model import Boundary, Model
from mlx_engine.progress import to_end
from mlx_engine.state import Checkpoint, SessionState
from mlx_engine.token_ids import TokenIds, as_token_ids, shared_tokens

Prefill = Literal["short", "full"]
# Between checkpoints inside a prefill: each takes a run of the upper layers, which at this distance
# adds 8% to their work as released.
SPACING_TOKENS = 16_384


def stops(
    known: int, total: int, anchors: Sequence[int], last_checkpoint: int = 0, spacing: int = 0
) -> list[int]:
    """Where a prefill from `known` to `total` tokens pauses for a checkpoint, ascending, even.

    At the prompt's end, the last even position before the last token; at the first anchor; at
    others no closer than `spacing`, by default SPACING_TOKENS, to the checkpoint before and to the
    end; and so far apart in between, where no anchor is. A prefill that goes on where another broke
    off pauses where that would have.
    """
    spacing = (spacing or SPACING_TOKENS) + 1 & ~1
    end = (total - 1) // 2 * 2
    even = sorted({anchor // 2 * 2 for anchor in anchors})
    chosen: list[int] = []
    for anchor in even:
        before = chosen[-1] if chosen else last_checkpoint
        is_apart = min(anchor - before, end - anchor) >= spacing
        if known < anchor < end and (anchor == even[0] or is_apart):
            chosen.append(anchor)
    if known < end:
        chosen.append(end)
    filled: list[int] = []
    for before, pause in pairwise([last_checkpoint, *chosen]):
        filled += [n for n in range(before + spacing, pause - spacing + 1, spacing) if n > known]
        filled.append(pause)
    return filled


@dataclass(frozen=True)
class Match:
    """What a timeline has of a prompt: tokens in common, and tokens not to be computed again."""

    shared: int
    kept: int


class Session:
    """A timeline over a model, and the only writer of its `state`.

    `prefill` "full" runs every layer on every token of a prompt; "short" runs the layers above the
    last source of compressed rows only on the tokens that the last token's logits and the windows
    depend on, which gives the same result. `checkpoints` ascend. `chunk_tokens` may change between
    chunks. `pauses` are the checkpoints that a prefill under way has still to take, ascending.
    """

    def __init__(
        self,
        model: Model,
        engram: EngramReader | None,
        *,
        prefill: Prefill = "short",
        chunk_tokens: int = CHUNK_TOKENS,
        formats: CacheFormats | None = None,
        decoder: Decoder | None = None,
    ) -> None:
        self._model = model
        self._decoder = decoder or Decoder(model)
        self._engram = engram
        self._prefill: Prefill = prefill
        self.chunk_tokens = chunk_tokens
        self._formats = formats
        self._reach = model.config.reach_tokens(model.config.last_kv_source)
        self.reset()

    def reset(self) -> None:
        """Forget the timeline."""
        self._take(SessionState(self._model.config, self._formats), [])

    def restore(self, token_ids: Sequence[int] | TokenIds, state: SessionState) -> None:
        """Go on from a state that these tokens left behind elsewhere."""
        assert state.position == len(token_ids)
        self._take(state, token_ids)
        self._keep(state.checkpoint())

    def fork(self, checkpoint: Checkpoint) -> "Session":
        """A session of its own at one of this session's checkpoints, which it has too."""
        other = self._beside()
        other._take(self.state.fork(checkpoint), self._token_ids[: checkpoint.position])
        before = [each for each in self.checkpoints if each.position < checkpoint.position]
        other.checkpoints = [*before, checkpoint]
        return other

    def _beside(self) -> "Session":
        """An empty session of the same kind."""
        return Session(
            self._model,
            self._engram,
            prefill=self._prefill,
            chunk_tokens=self.chunk_tokens,
            formats=self._formats,
            decoder=self._decoder,
        )

    def _take(self, state: SessionState, token_ids: Sequence[int] | TokenIds) -> None:
        self.state = state
        self.checkpoints: list[Checkpoint] = []
        self.pauses: list[int] = []
        # Of the prompt that `sync` was given last; what is past it was generated.
        self.prompt_tokens = len(token_ids)
        self._token_ids = array("I", token_ids)
        # What the upper layers may still need and have not seen, in a prefill that was broken off.
        self._waiting: Boundary | None = None
        self._logits: mx.array | None = None
        self._begun: Begun | None = None

    @property
    def position(self) -> int:
        """The tokens of the timeline."""
        return len(self._token_ids)

    @property
    def token_ids(self) -> TokenIds:
        """The timeline, a copy."""
        return np.array(self._token_ids, dtype=np.uint32)

    @property
    def is_whole(self) -> bool:
        """Whether the upper layers have seen all of the timeline."""
        return self._waiting is None

    @property
    def state_bytes(self) -> int:
        """Bytes of the state in memory, and of what a broken-off prefill left for the retry."""
        waiting = self._waiting  # read once, for other threads than the engine's
        arrays = () if waiting is None else waiting.arrays()
        return self.state.n_bytes + sum(x.nbytes for x in arrays)

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of the checkpoints in memory."""
        return sum(checkpoint.n_bytes for checkpoint in self.checkpoints)

    def match(self, token_ids: Sequence[int] | TokenIds, *, is_fork: bool = False) -> Match:
        """What `read` of these tokens would keep, here or in a fork, which takes a checkpoint."""
        ids = as_token_ids(token_ids)
        shared = shared_tokens(np.asarray(self._token_ids, np.uint32), ids)
        is_useful = shared < ids.size or self._logits is not None or self._waiting is not None
        if shared == self.position and is_useful and not is_fork:
            return Match(shared, shared)
        checkpoint = self.checkpoint_at(min(shared, ids.size - 1))
        return Match(shared, checkpoint.position if checkpoint else 0)

    def checkpoint_at(self, position: int) -> Checkpoint | None:
        """The last checkpoint that does not lie past a position."""
        i = bisect_right(self.checkpoints, position, key=lambda each: each.position)
        return self.checkpoints[i - 1] if i else None

    def sync(self, token_ids: Sequence[int] | TokenIds, anchors: Sequence[int] = ()) -> mx.array:
        """`read`, all at once: f32 logits [V] after the last token."""
        return to_end(self.read(token_ids, anchors))

    def read(
        self, token_ids: Sequence[int] | TokenIds, anchors: Sequence[int] = ()
    ) -> Generator[int, None, mx.array]:
        """Bring the timeline to exactly these tokens, at least one: f32 logits [V] after the last.

        Yields the tokens done: first those that were there, then after each chunk. Who goes no
        further leaves them, and the same tokens go on there. Kept is what they continue; from a
        place where they differ the timeline returns to the checkpoint before it. `anchors` are
        positions that a later prompt may return to, the end of system and tools first; `stops` says
        which become checkpoints. A chunk that fails leaves the timeline where the chunk began.
        """
        ids = as_token_ids(token_ids)
        if self.state.position != self.position:
            # A return failed, and so did the reset after it.
            self.reset()
        kept = self.match(ids).kept
        if kept < self.position:
            self.rewind(kept)
            kept = self.position
        self.prompt_tokens = ids.size
        is_done = kept == ids.size and self._waiting is None
        self.pauses = [] if is_done else self._pauses(ids.size, anchors)
        yield kept
        if not is_done:
            yield from self._extend(ids)
        assert self._logits is not None
        return self._logits

    def pause_at(self, position: int) -> None:
        """Let the prefill under way take a checkpoint at an even position before it too."""
        assert position % 2 == 0
        if position > self.position:
            self.pauses = sorted({*self.pauses, position})

    def step(self, token_id: int) -> mx.array:
        """Append one token: f32 logits [V] after it, not waited for.

        A step that fails takes the timeline back to the last checkpoint.
        """
        assert self.is_whole
        begun, self._begun = self._begun, None
        try:
            past = self._engram.hash.history_tokens if self._engram else 0
            ids = np.array([*self._token_ids[max(self.position - past, 0) :], token_id], np.uint32)
            rows = read_ahead(self._engram, ids, ids.size - 1, ids.size)
            if self._decoder.fits(self.state):
                self._logits = self._decoder.step(token_id, self.state, rows, begun)
                self._token_ids.append(token_id)
            else:
                self._compute(ids, rows, new=1)
                assert self._logits is not None
                mx.async_eval(self._logits, *self.state.arrays())
        except BaseException:
            self.rewind(self.position)
            raise
        return self._logits

    def draw(self, choose: Callable[[mx.array], mx.array]) -> int:
        """The id that follows, as `choose` makes a uint32 scalar of the logits [V].

        The device may begin its step already. A draw that fails takes the timeline back to the last
        checkpoint.
        """
        assert self._logits is not None
        try:
            token = choose(self._logits)
            mx.async_eval(token)
            self.begin_step(token)
            # The id must reach the host each step: the next Engram rows depend on it.
            return cast(int, token.item())
        except BaseException:
            # The device may have failed after the step was handed to it.
            self.rewind(self.position)
            raise

    def begin_step(self, token: mx.array) -> None:
        """Let the device begin a step with a token, of one id, that only it knows so far.

        Where that gains nothing, nothing happens. The step itself may come or not.
        """
        self._begun = self._decoder.begin(token, self.state)

    def rewind(self, position: int) -> None:
        """Return to the last checkpoint that does not lie past a position, or to the start."""
        checkpoint = self.checkpoint_at(position)
        if checkpoint is None:
            self.reset()
        else:
            self._return_to(checkpoint, None)

    def keep_checkpoint(self) -> None:
        """Take a checkpoint at the last even position, if the upper layers have seen it."""
        if self._waiting is None:
            checkpoint = self.state.checkpoint().even()
            if checkpoint.position and checkpoint.position not in self._positions():
                self._keep(checkpoint)

    def keep_unfinished(self) -> None:
        """Let the upper layers catch up where a prefill was broken off, and take a checkpoint."""
        if self._waiting is not None:
            self.pauses = [self.position]
            to_end(self._extend(self.token_ids))

    def expendable(self) -> list[tuple[Checkpoint, int]]:
        """The checkpoints that may go, missed least first, and tokens from the one before each.

        Far from the end they may lie further apart: what is edited is mostly what came last. The
        first stays, and so do the newest two, for an exact retry.
        """
        found: list[tuple[Checkpoint, int]] = []
        left = [*self.checkpoints]
        while len(left) > 3:
            at = [0, *(each.position for each in left)]
            gaps = [((at[i + 1] - at[i - 1]) / (at[-1] - at[i]), i) for i in range(2, len(at) - 2)]
            _, i = min(gaps)
            found.append((left.pop(i - 1), at[i] - at[i - 1]))
        return found

    def drop_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Forget a checkpoint."""
        self.checkpoints = [each for each in self.checkpoints if each is not checkpoint]

    def _positions(self) -> list[int]:
        return [each.position for each in self.checkpoints]

    def _keep(self, checkpoint: Checkpoint) -> None:
        i = bisect_right(self.checkpoints, checkpoint.position, key=lambda each: each.position)
        self.checkpoints.insert(i, checkpoint)

    def _pauses(self, total: int, anchors: Sequence[int]) -> list[int]:
        known = self.position
        before = self.checkpoint_at(known)
        pauses = stops(known, total, anchors, before.position if before else 0)
        if not pauses:
            # The prompt's end lies at most a token behind: it is where the timeline is.
            self.keep_checkpoint()
            pauses = [] if self.is_whole else [known]
        return pauses

    def _extend(self, ids: TokenIds) -> Generator[int, None, None]:
        end, n_chunks = self.position, 0
        ahead, ahead_end = None, -1
        while n_chunks == 0 or end < ids.size:
            first, end = end, min([end + self.chunk_tokens, *self.pauses, ids.size])
            start, waiting = self.state.checkpoint(), self._waiting
            try:
                if ahead_end != end:
                    # The first chunk, or one of another length than was foreseen.
                    ahead = read_ahead(self._engram, ids, first, end)
                rows = ahead
                later = [each for each in self.pauses if each > end]
                ahead_end = min([end + self.chunk_tokens, *later, ids.size])
                ahead = read_ahead(self._engram, ids, end, ahead_end)
                is_pause = end in self.pauses or end == ids.size
                self._compute(ids[:end], rows, new=end - first, is_last=is_pause)
                mx.eval(self._logits, *self.state.arrays())
            except BaseException:
                self._return_to(start, waiting)
                raise
            if end in self.pauses:
                self.keep_checkpoint()
                self.pauses = later
            n_chunks += 1
            yield end
        if n_chunks > 2:
            # What the chunks allocated is no use to single steps.
            mx.clear_cache()

    def _compute(
        self, ids: TokenIds, rows: EngramRows | None, *, new: int, is_last: bool = True
    ) -> None:
        """Run the last `new` of the tokens; with `is_last` the upper layers catch up."""
        assert self.state.position == len(self._token_ids)
        model, is_short = self._model, self._prefill == "short"
        self._logits = self._begun = None
        if new:
            chunk = ids[-new:]
            boundary = model.encode(chunk.tolist(), self.state, rows)
            self._token_ids.extend(chunk.tolist())
            self._waiting = self._waits(boundary)
        if is_last or not is_short:
            assert self._waiting is not None
            streams, pre = model.decode(self._waiting, self.state, is_narrow=is_short)
            self._waiting = None
            self._logits = model.head(streams[-1:], pre[-1:]).reshape(-1)
        else:
            assert self._waiting is not None
            mx.eval(*self._waiting.arrays())

    def _waits(self, boundary: Boundary) -> Boundary:
        """What waits already and what comes to it, no more than the upper layers can need."""
        if self._prefill == "full":
            return boundary
        more = self._reach - boundary.x.shape[0]
        if self._waiting is None or more <= 0:
            return boundary.last(self._reach)
        return self._waiting.last(more).then(boundary)

    def _return_to(self, checkpoint: Checkpoint, waiting: Boundary | None) -> None:
        """Go back to a place of this timeline, whatever a broken-off chunk left behind."""
        self._logits = self._begun = None
        self._waiting = waiting
        del self._token_ids[checkpoint.position :]
        self.prompt_tokens = min(self.prompt_tokens, checkpoint.position)
        self.checkpoints = [c for c in self.checkpoints if c.position <= checkpoint.position]
        try:
            self.state.rewind(checkpoint)
            mx.eval(list(self.state.arrays()))
        except BaseException as error:
            # Some rows were not cut, or the device did not finish what the rows before are in.
            self.reset()
            if not isinstance(error, Exception):
                raise
