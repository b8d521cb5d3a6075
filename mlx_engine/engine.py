"""Engine: the loaded model, and the one way in for programs.

`logits`, `generate` and `respond` use it. Callers hand over token ids or requests and never see an
array of the device. Any thread may call, one at a time; a second call at once is refused.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Literal, Protocol, cast

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_engine import memory
from mlx_engine.config import ModelConfig
from mlx_engine.engram import EngramReader
from mlx_engine.engram_table import EngramStats
from mlx_engine.errors import BadRequest, ModelFileError
from mlx_engine.live import Stats
from mlx_engine.model import Model
from mlx_engine.ops import launch
from mlx_engine.ops.launch import FastPaths
from mlx_engine.respond import Event, Progress, Request, respond
from mlx_engine.sampling import Sampler, Sampling
from mlx_engine.saving import Cache
from mlx_engine.session import CHUNK_TOKENS, Prefill, Session, full_logits
from mlx_engine.sessions import Sessions
from mlx_engine.token_ids import as_int64, check_tokens
from mlx_engine.tokenizer import Tokenizer
from mlx_engine.turns import TurnRecord, TurnStore


class DiskCache(Cache, TurnStore, Protocol):
    """What the engine needs of a disk cache: states, and the tokens of turns."""


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
    ) -> None:
        self.directory = directory
        self.tokenizer = tokenizer
        self.context_tokens = context_tokens
        self._model = model
        self._engram = engram
        self._chunk_tokens = chunk_tokens
        self._sessions = Sessions(
            model,
            engram,
            budget_bytes=session_bytes,
            short_bytes=memory.short_session_bytes(model.config, context_tokens),
            prefill=prefill,
            chunk_tokens=chunk_tokens,
            cache=disk_cache,
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
        """Numbers about the sessions and the prompts that they served."""
        return self._sessions.stats()

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
        with self._alone():
            return full_logits(self._model, self._engram, token_ids, wanted, self._chunk_tokens)

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
        ignore_eos: bool = False,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> Generator[int, None, Literal["stop", "length"]]:
        """Yield the tokens that follow a prompt; return "stop" at the EOS, or "length".

        The EOS is not yielded; `ignore_eos` goes on past it. What earlier calls computed is used
        again; `anchors` are positions of the prompt where a later one may part from it, the end of
        system and tools first. `on_progress` is told the prompt's tokens done and in all: first
        those known already, then after each chunk; what it raises stops the work. Raises
        BadRequest, and ContextTooLong when prompt and answer pass the context. Once another call
        has taken the session elsewhere, the next token is a BadRequest.
        """
        sampling = Sampling(temperature=temperature, top_p=top_p, min_p=min_p, seed=seed)
        if max_tokens < 1:
            raise BadRequest(f"max_tokens is {max_tokens}, it must be at least 1")
        check_tokens(token_ids, max_tokens, self.config, self.context_tokens)
        return self._generate(
            tuple(token_ids),
            tuple(anchors),
            max_tokens,
            Sampler(sampling),
            ignore_eos,
            on_progress,
        )

    def _generate(
        self,
        token_ids: Sequence[int],
        anchors: Sequence[int],
        max_tokens: int,
        sampler: Sampler,
        ignore_eos: bool,
        on_progress: Callable[[int, int], None] | None,
    ) -> Generator[int, None, Literal["stop", "length"]]:
        with self._alone():
            session, logits = self._sessions.sync(token_ids, anchors, on_progress)
            epoch = session.epoch
            if not mx.isfinite(logits).all().item():
                raise ModelFileError(
                    f"the logits are no numbers, so weights of {self.directory} are damaged: "
                    "delete its shards and fetch them again"
                )
            token_id = cast(int, sampler(logits).item())
        try:
            for left in range(max_tokens, 0, -1):
                if token_id == self.config.eos_token_id and not ignore_eos:
                    return "stop"
                yield token_id
                if left == 1:
                    break
                with self._alone():
                    if session not in self._sessions or session.epoch != epoch:
                        raise BadRequest(
                            "the session has gone on to another prompt; start generate again"
                        )
                    token_id = self._next_token(session, token_id, sampler)
        finally:
            self._end_turn(session, epoch)
        return "length"

    def _next_token(self, session: Session, token_id: int, sampler: Sampler) -> int:
        """Append a token and sample the one after it."""
        try:
            token = sampler(self._sessions.step(session, token_id))
            mx.async_eval(token)
            session.begin_step(token)
            # The id must reach the host each step: the next Engram rows depend on it.
            return cast(int, token.item())
        except BaseException:
            # The device may have failed after the step was handed to it.
            session.rewind(session.position)
            raise

    def _end_turn(self, session: Session, epoch: int) -> None:
        """Keep the end of an answer, unless another call is at work or has gone on from there."""
        if not self._is_closed and self._work.acquire(blocking=False):
            try:
                if session in self._sessions and session.epoch == epoch:
                    self._sessions.end_turn(session)
            finally:
                self._work.release()

    def save_piece(self) -> bool:
        """Hand the disk cache one piece of what waits for it, which takes a millisecond or two.

        Steps do that as well. Returns whether anything waited, so that who has nothing else to do
        calls again. Nothing happens while another call works.
        """
        if self._is_closed or not self._work.acquire(blocking=False):
            return False
        try:
            return self._sessions.save_piece()
        finally:
            self._work.release()

    @contextmanager
    def _alone(self) -> Generator[None]:
        """Hold the device's state; a call from another thread, or from a callback, is refused."""
        if self._is_closed:
            raise BadRequest("the engine is closed: load the model again")
        if not self._work.acquire(blocking=False):
            raise BadRequest("the engine is at work for another call: wait until it has returned")
        try:
            yield
        finally:
            self._work.release()

    def respond(
        self,
        request: Request,
        *,
        on_progress: Callable[[Progress], None] | None = None,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> Generator[Event]:
        """Answer a request with events, the last one an End; see `respond.respond`."""
        return respond(self, request, on_progress=on_progress, cancelled=cancelled)

    def close(self) -> None:
        """Hand what only memory has to the disk cache, and close the table files.

        Every later call is refused.
        """
        if not self._is_closed and self._work.acquire(blocking=False):
            try:
                self._sessions.close()
            finally:
                self._work.release()
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
