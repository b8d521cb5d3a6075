"""Engine: the loaded model, and the one way in for programs.

`load` gives an Engine, in two steps for who wants to check a prompt before minutes of reading;
`logits`, `generate` and `respond` use it. Callers hand over token ids or requests and never see an
array of the device. Any thread may call, one at a time; a second call at once is refused.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Literal, cast

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_engine import memory
from mlx_engine.checkpoint import Checkpoint, load_weights, open_checkpoint
from mlx_engine.config import ModelConfig
from mlx_engine.engram import EngramHash, EngramReader
from mlx_engine.engram_table import EngramStats
from mlx_engine.errors import BadRequest, ContextTooLong, ModelFileError
from mlx_engine.model import Model
from mlx_engine.ops import launch
from mlx_engine.ops.launch import FastPaths
from mlx_engine.respond import Event, Progress, Request, respond
from mlx_engine.sampling import Sampler, Sampling
from mlx_engine.session import CHUNK_TOKENS, Prefill, Session
from mlx_engine.state import SessionState
from mlx_engine.token_map import load_token_map
from mlx_engine.tokenizer import Tokenizer

Dtype = Literal["bfloat16", "float32"]
DTYPES: dict[Dtype, mx.Dtype] = {"bfloat16": mx.bfloat16, "float32": mx.float32}


def load(
    path: str | Path,
    dtype: Dtype = "bfloat16",
    *,
    context_tokens: int | None = None,
    prefill: Prefill = "short",
    chunk_tokens: int = CHUNK_TOKENS,
    cache_dir: Path | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> "Engine":
    """Load the checkpoint in a directory.

    Both steps at once: `open_model` and `OpenModel.load` say what the arguments mean, and what is
    raised.
    """
    return open_model(path, context_tokens=context_tokens).load(
        dtype,
        prefill=prefill,
        chunk_tokens=chunk_tokens,
        cache_dir=cache_dir,
        on_progress=on_progress,
    )


def open_model(path: str | Path, *, context_tokens: int | None = None) -> "OpenModel":
    """Check the checkpoint in a directory, tokenizer included, without reading a weight.

    context_tokens: prompt and answer together, the model's own limit by default. Raises BadRequest
    for an impossible one, ModelFileError for a damaged or foreign checkpoint.
    """
    directory = Path(path)
    checkpoint = open_checkpoint(directory)
    limit = checkpoint.config.max_position_embeddings
    context_tokens = limit if context_tokens is None else context_tokens
    if not 1 <= context_tokens <= limit:
        raise BadRequest(f"the context is {context_tokens} tokens, it must be from 1 to {limit}")
    return OpenModel(checkpoint, Tokenizer.load(directory, checkpoint.config), context_tokens)


@dataclass(frozen=True)
class OpenModel:
    """A checkpoint that was found right, its weights still on disk: minutes before an Engine."""

    checkpoint: Checkpoint
    tokenizer: Tokenizer
    context_tokens: int

    @property
    def config(self) -> ModelConfig:
        """The checkpoint's configuration."""
        return self.checkpoint.config

    def check(self, request: Request) -> None:
        """Raise what `Engine.respond` would raise for this request, before a weight is read."""
        prompt = request.encode(self.tokenizer)
        answer_tokens = request.answer_tokens(len(prompt.token_ids), self.context_tokens)
        _check_tokens(prompt.token_ids, answer_tokens, self.config, self.context_tokens)

    def load(
        self,
        dtype: Dtype = "bfloat16",
        *,
        prefill: Prefill = "short",
        chunk_tokens: int = CHUNK_TOKENS,
        cache_dir: Path | None = None,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> "Engine":
        """Start this machine's kernels, and read the weights.

        dtype: of the activations between sublayers. prefill: "full" runs all layers on all tokens
        of a prompt, for comparison. chunk_tokens: how many tokens of a prompt pass the layers at
        once, at least 1; more take more memory and less time. cache_dir: where the tokenizer's
        canonical map is kept, None for nowhere. on_progress: told bytes read and bytes in all.
        Raises BadRequest for an impossible argument and DeviceError when the model cannot fit,
        both before a weight is read, and ModelFileError for damage found while reading.
        """
        if dtype not in DTYPES:
            raise BadRequest(f"dtype is {dtype!r}, it must be one of {', '.join(DTYPES)}")
        if prefill not in ("short", "full"):
            raise BadRequest(f"prefill is {prefill!r}, it must be short or full")
        if chunk_tokens < 1:
            raise BadRequest(f"chunk_tokens is {chunk_tokens}, it must be at least 1")
        launch.start_here()
        engram = _open_engram(self.checkpoint, cache_dir)
        try:
            weights = load_weights(
                self.checkpoint, self.context_tokens, on_progress, chunk_tokens=chunk_tokens
            )
        except BaseException:
            if engram is not None:
                engram.close()
            raise
        return Engine(
            self.checkpoint.directory,
            Model(self.config, weights, DTYPES[dtype]),
            self.tokenizer,
            engram,
            context_tokens=self.context_tokens,
            prefill=prefill,
            chunk_tokens=chunk_tokens,
        )


def _open_engram(checkpoint: Checkpoint, cache_dir: Path | None) -> EngramReader | None:
    engram = checkpoint.config.engram
    if engram is None:
        return None
    token_map = load_token_map(
        checkpoint.directory / "tokenizer.json", cache_dir, engram.compressed_vocab_size
    )
    engram_hash = EngramHash(token_map, engram, checkpoint.config.image_token_id)
    return EngramReader(
        engram_hash, checkpoint.engram_tables(), cache_bytes=memory.ENGRAM_CACHE_BYTES
    )


class Engine:
    """A loaded model with one session; a context manager that closes the table files."""

    def __init__(
        self,
        directory: Path,
        model: Model,
        tokenizer: Tokenizer,
        engram: EngramReader | None,
        *,
        context_tokens: int,
        prefill: Prefill = "short",
        chunk_tokens: int = CHUNK_TOKENS,
    ) -> None:
        self.directory = directory
        self.tokenizer = tokenizer
        self.context_tokens = context_tokens
        self._model = model
        self._engram = engram
        self._chunk_tokens = chunk_tokens
        self._session = Session(model, engram, prefill=prefill, chunk_tokens=chunk_tokens)
        self._work = Lock()
        self._is_closed = False

    @property
    def config(self) -> ModelConfig:
        """The checkpoint's configuration."""
        return self._model.config

    @property
    def state_bytes(self) -> int:
        """Bytes that the session's state holds in memory."""
        return self._session.state_bytes

    @property
    def fast_paths(self) -> FastPaths:
        """Which of our kernels compute in this process, and which are left to MLX's operations."""
        return launch.fast_paths()

    def reset(self) -> None:
        """Forget what the session has computed. Raises BadRequest while another call works."""
        with self._alone():
            self._session.reset()

    def engram_stats(self) -> EngramStats:
        """Table rows asked for, found in memory and read since the start."""
        return EngramStats() if self._engram is None else self._engram.stats()

    def logits(
        self, token_ids: Sequence[int], positions: Sequence[int] | None = None
    ) -> NDArray[np.float32]:
        """Logits of a prompt at full depth: f32 [T, V], or [len(positions), V].

        Computed apart from the session, in chunks. Raises BadRequest for tokens or positions that
        are not there, ContextTooLong.
        """
        _check_tokens(token_ids, 0, self.config, self.context_tokens)
        T = len(token_ids)
        wanted = np.arange(T) if positions is None else _int64("positions", positions)
        if wanted.size and not (0 <= wanted.min() and wanted.max() < T):
            raise BadRequest(f"positions must be from 0 to {T - 1}, the prompt's last token")
        with self._alone():
            return self._logits(token_ids, wanted)

    def _logits(self, token_ids: Sequence[int], wanted: NDArray[np.int64]) -> NDArray[np.float32]:
        T = len(token_ids)
        state = SessionState(self.config)
        result = np.empty((len(wanted), self.config.vocab_size), dtype=np.float32)
        for first in range(0, T, self._chunk_tokens):
            chunk = token_ids[first : first + self._chunk_tokens]
            rows = None
            if self._engram is not None:
                known = token_ids[max(first - self._engram.hash.history_tokens, 0) : first]
                rows = self._engram.prefetch(np.array(chunk), np.array(known, dtype=np.int64))
            streams, pre = self._model.decode(self._model.encode(chunk, state, rows), state)
            inside = np.flatnonzero((wanted >= first) & (wanted < first + len(chunk)))
            mx.eval(*state.arrays())
            if inside.size:
                at = mx.array(wanted[inside] - first)
                result[inside] = np.array(self._model.head(streams[at], pre[at]))
        return result

    def generate(
        self,
        token_ids: Sequence[int],
        *,
        max_tokens: int,
        temperature: float = 1.0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int | None = None,
        ignore_eos: bool = False,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> Generator[int, None, Literal["stop", "length"]]:
        """Yield the tokens that follow a prompt; return "stop" at the EOS, or "length".

        The EOS is not yielded; `ignore_eos` goes on past it. The session keeps what the last call
        computed, so a prompt that continues it starts there. `on_progress` is told the prompt's
        tokens done and in all: first those known already, then after each chunk; what it raises
        stops the work. Raises BadRequest, and ContextTooLong when prompt and answer pass the
        context. Once another call has taken the session elsewhere, the next token is a BadRequest.
        """
        sampling = Sampling(temperature=temperature, top_p=top_p, min_p=min_p, seed=seed)
        if max_tokens < 1:
            raise BadRequest(f"max_tokens is {max_tokens}, it must be at least 1")
        _check_tokens(token_ids, max_tokens, self.config, self.context_tokens)
        return self._generate(
            tuple(token_ids), max_tokens, Sampler(sampling), ignore_eos, on_progress
        )

    def _generate(
        self,
        token_ids: Sequence[int],
        max_tokens: int,
        sampler: Sampler,
        ignore_eos: bool,
        on_progress: Callable[[int, int], None] | None,
    ) -> Generator[int, None, Literal["stop", "length"]]:
        with self._alone():
            logits = self._session.sync(token_ids, on_progress)
            timeline = self._session.timeline
            if not mx.isfinite(logits).all().item():
                raise ModelFileError(
                    f"the logits are no numbers, so weights of {self.directory} are damaged: "
                    "delete its shards and fetch them again"
                )
            token_id = cast(int, sampler(logits).item())
        for left in range(max_tokens, 0, -1):
            if token_id == self.config.eos_token_id and not ignore_eos:
                return "stop"
            yield token_id
            if left == 1:
                break
            with self._alone():
                if self._session.timeline != timeline:
                    raise BadRequest(
                        "the session has gone on to another prompt; start generate again"
                    )
                # The id must reach the host each step: the next Engram rows depend on it.
                token_id = cast(int, sampler(self._session.step(token_id)).item())
        return "length"

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
        """Close the table files; every later call is refused."""
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


def _check_tokens(
    token_ids: Sequence[int], answer_tokens: int, config: ModelConfig, context_tokens: int
) -> None:
    """Refuse a prompt that the model cannot read, or that leaves too little room to answer."""
    T = len(token_ids)
    if T == 0:
        raise BadRequest("the prompt is empty: give at least one token")
    ids = _int64("token ids", token_ids)
    if ids.min() < 0 or ids.max() >= config.vocab_size:
        raise BadRequest(
            f"a prompt's token ids must be from 0 to {config.vocab_size - 1}, "
            f"this one has {ids.min()} to {ids.max()}"
        )
    if (ids == config.image_token_id).any():
        raise BadRequest("the prompt holds an image token, and this engine reads text only")
    if T + answer_tokens > context_tokens:
        raise ContextTooLong(
            f"{T} tokens of prompt and {answer_tokens} of answer pass the context of "
            f"{context_tokens} tokens: shorten one, or load with a longer context"
        )


def _int64(what: str, numbers: Sequence[int]) -> NDArray[np.int64]:
    array = np.array(numbers) if len(numbers) else np.empty(0, dtype=np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise BadRequest(f"{what} must be one list of integers within 64 bits")
    return array.astype(np.int64)
