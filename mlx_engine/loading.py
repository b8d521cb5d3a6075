"""From a checkpoint's directory to an Engine: checked first, minutes later loaded.

`load` does both; `open_model` and `OpenModel.load` are the two steps, for who wants to check a
prompt before the weights are read.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import mlx.core as mx

from mlx_engine import memory
from mlx_engine.checkpoint import Checkpoint, load_weights, open_checkpoint
from mlx_engine.config import ModelConfig
from mlx_engine.devices import ONE, Devices, require_fitting
from mlx_engine.engine import DiskCache, Engine
from mlx_engine.engram import EngramHash, EngramReader
from mlx_engine.errors import BadRequest
from mlx_engine.lead import Lead
from mlx_engine.model import Model
from mlx_engine.ops import launch
from mlx_engine.prompt import Bounds
from mlx_engine.respond import Request
from mlx_engine.session import CHUNK_TOKENS, Prefill
from mlx_engine.token_ids import check_tokens
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
    session_bytes: int | None = None,
    disk_cache: DiskCache | None = None,
    cache_dir: Path | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Engine:
    """Load the checkpoint in a directory.

    Both steps at once: `open_model`, `OpenModel.load` and `OpenModel.load_parts` say what the
    arguments mean, and what is raised.
    """
    return open_model(path, context_tokens=context_tokens).load(
        dtype,
        prefill=prefill,
        chunk_tokens=chunk_tokens,
        session_bytes=session_bytes,
        disk_cache=disk_cache,
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
        prompt = request.encode(self.tokenizer, bounds=Bounds(self.context_tokens))
        answer_tokens = request.answer_tokens(len(prompt.token_ids), self.context_tokens)
        check_tokens(prompt.token_ids, answer_tokens, self.config, self.context_tokens)

    def load(
        self,
        dtype: Dtype = "bfloat16",
        *,
        prefill: Prefill = "short",
        chunk_tokens: int = CHUNK_TOKENS,
        session_bytes: int | None = None,
        disk_cache: DiskCache | None = None,
        cache_dir: Path | None = None,
        on_progress: Callable[[int, int], None] | None = None,
        lead: Lead | None = None,
    ) -> Engine:
        """Start this machine's kernels, and read the weights.

        session_bytes: by default one full context and some more (`memory.default_session_bytes`).
        disk_cache: of this model, where states outlive the memory; whoever opened it closes it,
        after the engine. lead: of the other devices that share the model, None for one device.
        `load_parts` says what the other arguments mean, and what is raised.
        """
        if session_bytes is None:
            session_bytes = memory.default_session_bytes(self.config, self.context_tokens)
        with nullcontext(on_progress) if lead is None else lead.loading(on_progress) as on_progress:
            parts = self.load_parts(
                dtype,
                prefill=prefill,
                chunk_tokens=chunk_tokens,
                session_bytes=session_bytes,
                cache_dir=cache_dir,
                on_progress=on_progress,
                devices=ONE if lead is None else lead.devices,
            )
        return Engine(
            self.checkpoint.directory,
            parts.model,
            self.tokenizer,
            parts.engram,
            context_tokens=self.context_tokens,
            prefill=prefill,
            chunk_tokens=chunk_tokens,
            session_bytes=session_bytes,
            disk_cache=disk_cache,
            lead=lead,
        )

    def load_parts(
        self,
        dtype: Dtype,
        *,
        prefill: Prefill,
        chunk_tokens: int,
        session_bytes: int,
        cache_dir: Path | None,
        on_progress: Callable[[int, int], None] | None,
        devices: Devices = ONE,
    ) -> "Parts":
        """Start this machine's kernels, and read what one of the devices has of the weights.

        dtype: of the activations between sublayers. prefill: "full" runs all layers on all tokens
        of a prompt, for comparison. chunk_tokens: how many tokens of a prompt pass the layers at
        once, at least 1; more take more memory and less time. session_bytes: what the states of
        all sessions and their checkpoints may take, on every device. cache_dir: where the
        tokenizer's canonical map is kept, None for nowhere. on_progress: told bytes read and bytes
        in all. Raises BadRequest for an impossible argument and DeviceError when the model cannot
        fit, both before a weight is read, and ModelFileError for damage found while reading.
        """
        if dtype not in DTYPES:
            raise BadRequest(f"dtype is {dtype!r}, it must be one of {', '.join(DTYPES)}")
        if prefill not in ("short", "full"):
            raise BadRequest(f"prefill is {prefill!r}, it must be short or full")
        if chunk_tokens < 1:
            raise BadRequest(f"chunk_tokens is {chunk_tokens}, it must be at least 1")
        least_bytes = memory.least_session_bytes(self.config, self.context_tokens)
        if session_bytes < least_bytes:
            raise BadRequest(
                f"session_bytes is {session_bytes}, it must be at least {least_bytes} "
                f"for a context of {self.context_tokens} tokens"
            )
        require_fitting(self.config, devices.count)
        launch.start_here()
        engram = _open_engram(self.checkpoint, cache_dir, devices)
        try:
            weights = load_weights(
                self.checkpoint,
                self.context_tokens,
                on_progress,
                chunk_tokens=chunk_tokens,
                session_bytes=session_bytes,
                devices=devices,
            )
        except BaseException:
            if engram is not None:
                engram.close()
            raise
        return Parts(Model(self.config, weights, DTYPES[dtype], devices), engram)


@dataclass(frozen=True)
class Parts:
    """What computes: the model, and the reader of its Engram tables, to be closed by its owner."""

    model: Model
    engram: EngramReader | None


def _open_engram(
    checkpoint: Checkpoint, cache_dir: Path | None, devices: Devices
) -> EngramReader | None:
    engram = checkpoint.config.engram
    if engram is None:
        return None
    token_map = load_token_map(
        checkpoint.directory / "tokenizer.json", cache_dir, engram.compressed_vocab_size
    )
    engram_hash = EngramHash(token_map, engram, checkpoint.config.image_token_id)
    return EngramReader(
        engram_hash,
        checkpoint.engram_tables(),
        cache_bytes=memory.ENGRAM_CACHE_BYTES,
        devices=devices,
    )
