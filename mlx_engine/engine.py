"""Engine: the loaded model, and the one way in for programs.

`logits`, `generate` and `respond` use it. Callers hand over token ids or requests and never see an
array of the device. Any thread may call, one at a time; a second call at once is refused.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Protocol

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_engine import memory
from mlx_engine.config import ModelConfig
from mlx_engine.diskcache.cache import CacheStats
from mlx_engine.engram import EngramReader
from mlx_engine.engram_table import EngramStats
from mlx_engine.errors import BadRequest, ModelFileError
from mlx_engine.full_logits import full_logits
from mlx_engine.lead import Lead
from mlx_engine.live import Stats
from mlx_engine.model import Model
from mlx_engine.ops import launch
from mlx_engine.ops.launch import FastPaths
from mlx_engine.progress import Prefilled, Waiting
from mlx_engine.respond import Event, Request, Steps, respond
from mlx_engine.sampling import Sampler, Sampling, score
from mlx_engine.saving import Cache
from mlx_engine.session import CHUNK_TOKENS, Prefill, Session
from mlx_engine.sessions import Sessions
from mlx_engine.token_ids import as_int64, check_tokens
from mlx_engine.tokenizer import Tokenizer
from mlx_engine.turns import TurnRecord, TurnStore


class DiskCache(Cache, TurnStore, Protocol):
    """What the engine needs of a disk cache: states, the tokens of turns, and counts."""

    def stats(self) -> CacheStats: ...


class Engine:
    """A loaded model and its sessions; a context manager that closes the table files.

    `turns` remembers the tokens of its answers.
    """

    def __init__(
        self,
        directory: Path,
        model: Model,
        tokenizer: Tokenizer,
        engram: EngramReader | None,
        *,
        context_tokens: int,
        session_bytes: int,
        prefill: Prefill = "short",
        chunk_tokens: int = CHUNK_TOKENS,
        disk_cache: DiskCache | None = None,
        lead: Lead | None = None,
    ) -> None:
        self.directory = directory
        self.tokenizer = tokenizer
        self.context_tokens = context_tokens
        self._model = model
        self._engram = engram
        self._chunk_tokens = chunk_tokens
        self._disk_cache = disk_cache
        self._lead = lead
        self._sessions = Sessions(
            model,
            engram,
            budget_bytes=session_bytes,
            short_bytes=memory.short_session_bytes(model.config, context_tokens),
            prefill=prefill,
            chunk_tokens=chunk_tokens,
            cache=disk_cache,
            session_type=Session if lead is None else lead.session,
        )
        self.turns = TurnRecord(disk_cache)
        self._work = Lock()
        self._is_closed = False

    @property
    def config(self) -> ModelConfig:
        """The checkpoint's configuration."""
        return self._model.config

    @property
    def state_bytes(self) -> int:
        """Bytes that the sessions' states and checkpoints hold in memory."""
        return self._sessions.n_bytes

    def session_stats(self) -> Stats:
        """Numbers about the sessions and the prompts that they served; any thread may ask."""
        return self._sessions.stats()

    def disk_stats(self) -> CacheStats | None:
        """Numbers about the disk cache, None without one; any thread may ask."""
        return None if self._disk_cache is None else self._disk_cache.stats()

    @property
    def fast_paths(self) -> FastPaths:
        """Which of our kernels compute in this process, and which are left to MLX's operations."""
        return launch.fast_paths()

    def reset(self) -> None:
        """Forget what the sessions have computed. Raises BadRequest while another call works."""
        with self._alone():
            self._sessions.reset()

    def engram_stats(self) -> EngramStats:
        """Table rows asked for, found in memory and read since the start."""
        return EngramStats() if self._engram is None else self._engram.stats()

    def logits(
        self, token_ids: Sequence[int], positions: Sequence[int] | None = None
    ) -> NDArray[np.float32]:
        """Logits of a prompt at full depth: f32 [T, V], or [len(positions), V].

        Computed apart from the sessions, in chunks. Raises BadRequest for tokens or positions that
        are not there, ContextTooLong.
        """
        check_tokens(token_ids, 0, self.config, self.context_tokens)
        T = len(token_ids)
        wanted = np.arange(T) if positions is None else as_int64("positions", positions)
        if wanted.size and not (0 <= wanted.min() and wanted.max() < T):
            raise BadRequest(f"positions must be from 0 to {T - 1}, the prompt's last token")
        given = token_ids, wanted, self._chunk_tokens
        with self._alone(), nullcontext() if self._lead is None else self._lead.logits(*given):
            return full_logits(self._model, self._engram, *given)

    def generate(
        self,
        token_ids: Sequence[int],
        *,
        anchors: Sequence[int] = (),
        max_tokens: int,
        temperature: float = 1.0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int | None = None,
        top_k: int = 0,
        logprobs: int | None = None,
        ignore_eos: bool = False,
    ) -> Steps:
        """Yield the tokens that follow a prompt; return "stop" at the EOS, or "length".

        Ahead of the tokens it yields Prefilled: first with the prompt's tokens that are known
        already, then after each chunk. Whoever closes it there leaves what was computed to the next
        call. The EOS is not yielded; `ignore_eos` goes on past it. `anchors` are positions of the
        prompt where a later one may part from it, the end of system and tools first. With
        `logprobs` tokens come scored, with so many of the most likely ones.

        Several may be under way; each goes on by its own session. It yields Waiting while another
        one reads what both begin with, or holds the memory that it needs. Raises BadRequest, also
        where that other one is never gone on with; ContextTooLong when prompt and answer pass the
        context.
        """
        sampling = Sampling(temperature, top_p, min_p, seed, top_k)
        if max_tokens < 1:
            raise BadRequest(f"max_tokens is {max_tokens}, it must be at least 1")
        check_tokens(token_ids, max_tokens, self.config, self.context_tokens)
        return self._generate(
            tuple(token_ids), tuple(anchors), max_tokens, Sampler(sampling), logprobs, ignore_eos
        )

    def _generate(
        self,
        token_ids: Sequence[int],
        anchors: Sequence[int],
        max_tokens: int,
        sampler: Sampler,
        logprobs: int | None,
        ignore_eos: bool,
    ) -> Steps:
        session, logits = yield from self._read(token_ids, anchors, max_tokens)
        try:
            with self._alone():
                self._require_finite(logits)
            token_id = 0
            for n in range(max_tokens):
                with self._alone():
                    if n:
                        logits = self._sessions.step(session, token_id)
                    token_id = session.draw(sampler.next())
                    drawn = token_id if logprobs is None else score(logits, token_id, logprobs)
                if token_id == self.config.eos_token_id and not ignore_eos:
                    return "stop"
                yield drawn
        finally:
            self._end_turn(session)
        return "length"

    def _read(
        self, token_ids: Sequence[int], anchors: Sequence[int], max_tokens: int
    ) -> Generator[Prefilled | Waiting, None, tuple[Session, mx.array]]:
        """Read a prompt, and hold the device only between two yields."""
        with closing(self._sessions.read(token_ids, anchors, max_tokens)) as reading:
            while True:
                with self._alone():
                    try:
                        step = next(reading)
                    except StopIteration as end:
                        return end.value
                yield step

    def _require_finite(self, logits: mx.array) -> None:
        if not mx.isfinite(logits).all().item():
            raise ModelFileError(
                f"the logits are no numbers, so weights of {self.directory} are damaged: "
                "delete its shards and fetch them again"
            )

    def _end_turn(self, session: Session) -> None:
        """Keep the end of an answer, unless another call is at work."""
        self._sessions.leave(session)
        with self._if_free() as is_free:
            if is_free:
                self._sessions.end_turn(session)

    def save_piece(self) -> bool:
        """Hand the disk cache one piece of what waits for it, which takes a millisecond or two.

        Steps do that as well. Returns whether anything waited, so that who has nothing else to do
        calls again. Nothing happens while another call works.
        """
        with self._if_free() as is_free:
            return is_free and self._sessions.save_piece()

    @contextmanager
    def _alone(self) -> Generator[None]:
        """Hold the device's state; a call from another thread meanwhile is refused."""
        if self._is_closed:
            raise BadRequest("the engine is closed: load the model again")
        with self._if_free() as is_free:
            if not is_free:
                raise BadRequest(
                    "the engine is at work for another call: wait until it has returned"
                )
            yield

    @contextmanager
    def _if_free(self) -> Generator[bool]:
        """Hold the device's state where the engine is open and no other call does; whether so."""
        is_free = not self._is_closed and self._work.acquire(blocking=False)
        try:
            yield is_free
        finally:
            if is_free:
                self._work.release()

    def respond(
        self,
        request: Request,
        *,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> Generator[Event]:
        """Answer a request with events, the last one an End; see `respond.respond`."""
        return respond(self, request, cancelled=cancelled)

    def close(self) -> None:
        """Hand what only memory has to the disk cache, and close the table files.

        Every later call is refused.
        """
        with self._if_free() as is_free:
            if is_free:
                self._sessions.close()
        self._is_closed = True
        if self._engram is not None:
            self._engram.close()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
