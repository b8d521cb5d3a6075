"""Session: one mutable timeline of tokens, which owns the state that they left behind.

Callers hand over the whole token prefix; `sync` decides what to keep and what to compute. Nobody
else touches the SessionState.
"""

from collections.abc import Callable, Sequence
from typing import Literal

import mlx.core as mx
import numpy as np

from mlx_engine.engram import EngramReader, EngramRows
from mlx_engine.formats import CacheFormats
from mlx_engine.memory import CHUNK_TOKENS
from mlx_engine.model import Boundary, Model
from mlx_engine.state import SessionState

Prefill = Literal["short", "full"]


class Session:
    """A timeline over a model, and the only writer of its `state`.

    `prefill` "full" runs every layer on every token of a prompt; "short" runs the layers above the
    last source of compressed rows only on the tokens that the last token's logits and the windows
    depend on, which gives the same result. `timeline` counts the calls of `reset` and `sync`: who
    remembers a lower count would go on over the tokens of somebody else.
    """

    def __init__(
        self,
        model: Model,
        engram: EngramReader | None,
        *,
        prefill: Prefill = "short",
        chunk_tokens: int = CHUNK_TOKENS,
        formats: CacheFormats | None = None,
    ) -> None:
        self._model = model
        self._engram = engram
        self._prefill: Prefill = prefill
        self._chunk_tokens = chunk_tokens
        self._formats = formats
        self.timeline = 0
        self.reset()

    def reset(self) -> None:
        """Forget the timeline."""
        self.timeline += 1
        self._token_ids: list[int] = []
        self.state = SessionState(self._model.config, self._formats)
        self._logits = mx.zeros((0,))

    @property
    def state_bytes(self) -> int:
        """Bytes of the state in memory."""
        return self.state.n_bytes

    def sync(
        self, token_ids: Sequence[int], on_progress: Callable[[int, int], None] | None = None
    ) -> mx.array:
        """Bring the timeline to exactly these tokens, at least one: f32 logits [V] after the last.

        A timeline that these tokens continue is kept, any other is computed anew. `on_progress` is
        told the tokens done and in all: first those that were there, then after each chunk. What it
        raises stops the work there: before the first chunk the timeline is what was there, after
        any other it is empty.
        """
        self.timeline += 1
        known, total = len(self._token_ids), len(token_ids)
        if self._token_ids != list(token_ids[:known]):
            self.reset()
            known = 0

        def report(done_tokens: int) -> None:
            if on_progress is not None:
                on_progress(known + done_tokens, total)

        report(0)
        if known < total:
            self._extend(token_ids[known:], report)
        return self._logits

    def step(self, token_id: int) -> mx.array:
        """Append one token: f32 logits [V] after it, not waited for."""
        self._extend([token_id], lambda _: None)
        return self._logits

    def _extend(self, new_ids: Sequence[int], report: Callable[[int], None]) -> None:
        try:
            self._run(new_ids, report)
        except BaseException:
            # Layers that got ahead of others cannot go on from here.
            self.reset()
            raise

    def _run(self, new_ids: Sequence[int], report: Callable[[int], None]) -> None:
        model, state, is_short = self._model, self.state, self._prefill == "short"
        reach = model.config.reach_tokens(model.config.last_kv_source)
        size = self._chunk_tokens
        chunks = [new_ids[first : first + size] for first in range(0, len(new_ids), size)]
        done = 0
        waiting: Boundary | None = None  # what the upper layers may still need and have not seen
        ahead = self._prefetch(chunks[0])
        for chunk, following in zip(chunks, [*chunks[1:], None], strict=True):
            rows = ahead
            self._token_ids.extend(chunk)
            if following is not None:
                ahead = self._prefetch(following)
            boundary = model.encode(chunk, state, rows)
            waiting = boundary if waiting is None else waiting.then(boundary)
            if following is None or not is_short:
                streams, pre = model.decode(waiting, state, is_narrow=is_short)
                waiting = None
                self._logits = model.head(streams[-1:], pre[-1:]).reshape(-1)
            else:
                waiting = waiting.last(reach)
                mx.eval(waiting.arrays())
            if len(new_ids) == 1:
                mx.async_eval(self._logits, *state.arrays())
            else:
                mx.eval(self._logits, *state.arrays())
            done += len(chunk)
            report(done)
        if len(chunks) > 1:
            # What the chunks allocated is no use to single steps.
            mx.clear_cache()

    def _prefetch(self, chunk: Sequence[int]) -> EngramRows | None:
        """Start to read the Engram rows of the tokens that follow the timeline."""
        if self._engram is None:
            return None
        history = self._token_ids[-self._engram.hash.history_tokens :]
        return self._engram.prefetch(
            np.array(chunk, dtype=np.int64), np.array(history, dtype=np.int64)
        )
