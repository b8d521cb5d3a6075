"""The tiny random model behind the real engine and a server on a port."""

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from mlx_engine import memory
from mlx_engine.diskcache.cache import DiskCache
from mlx_engine.engine import Engine
from mlx_engine.fingerprint import fingerprint
from mlx_engine.loading import OpenModel, open_model
from mlx_engine.server.app import create_app
from mlx_engine.server.security import Access
from mlx_engine.server.service import Service
from mlx_engine.state_transfer import parts
from mlx_engine.tiny import tiny_checkpoint
from mlx_engine.worker import Worker
from tests.server.support import on_port, until, working

CONTEXT_TOKENS = 4096
# Short, so that a prompt is several chunks.
CHUNK_TOKENS = 64


@dataclass(frozen=True)
class RealServer:
    """A server at an address; `engine` is its worker's, and may be asked while that is idle."""

    address: str
    worker: Worker
    engine: Engine


def session_bytes(opened: OpenModel, contexts: int) -> int:
    """Room for so many full contexts and some checkpoints."""
    return contexts * memory.default_session_bytes(opened.config, CONTEXT_TOKENS)


def load(
    opened: OpenModel, folder: Path, contexts: int, disk_cache: DiskCache | None = None
) -> AbstractContextManager[Engine]:
    """Load the engine in float32."""
    return opened.load(
        "float32",
        chunk_tokens=CHUNK_TOKENS,
        session_bytes=session_bytes(opened, contexts),
        disk_cache=disk_cache,
        cache_dir=folder,
    )


def open_tiny(folder: Path) -> OpenModel:
    """The tiny model, written into a folder."""
    return open_model(tiny_checkpoint(folder), context_tokens=CONTEXT_TOKENS)


@contextmanager
def open_disk_cache(opened: OpenModel, folder: Path, space_bytes: int) -> Generator[DiskCache]:
    """A disk cache for the tiny model in float32, in `folder`/kv."""
    cache = DiskCache.open(
        folder / "kv",
        fingerprint=fingerprint(opened.checkpoint, "float32", folder),
        parts=parts(opened.config),
        space_bytes=space_bytes,
    )
    try:
        yield cache
    finally:
        cache.close()


@contextmanager
def real_server(
    opened: OpenModel, folder: Path, *, contexts: int, disk_cache: DiskCache | None = None
) -> Generator[RealServer]:
    """A server on a port of this machine, its model loaded in the worker's thread."""
    engines: list[Engine] = []

    @contextmanager
    def load_here(on_progress: Callable[[int, int], None]) -> Generator[Engine]:
        with load(opened, folder, contexts, disk_cache) as engine:
            engines.append(engine)
            yield engine

    with working(load_here) as worker:
        service = Service(worker, opened.tokenizer, opened.context_tokens)
        with on_port(create_app(service, Access())) as address:
            until(lambda: worker.state != "loading")
            assert worker.state == "ready", worker.error
            yield RealServer(address, worker, engines[0])
