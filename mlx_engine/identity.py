"""Identity: what must be the same on every device that shares a model.

Each decides by itself how to route and which rows to choose, of numbers that are the same only
where equal devices compute them.
"""

import hashlib
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, cast

import mlx.core as mx

from mlx_engine.checkpoint import Checkpoint
from mlx_engine.fingerprint import fingerprint
from mlx_engine.ops.launch import FastPaths
from mlx_engine.state import SessionState


def identity(files: Checkpoint, dtype: str, cache_dir: Path | None) -> dict[str, str]:
    """What must be the same on every rank, by the names that a message gives it."""
    config = (files.directory / "config.json").read_bytes()
    return {
        "version of ds41": metadata.version("ds41"),
        "version of MLX": metadata.version("mlx"),
        "config.json of the checkpoint": hashlib.sha256(config).hexdigest(),
        "checkpoint": fingerprint(files, dtype, cache_dir).hex(),
        "device": str(mx.device_info()["device_name"]),
    }


def kernels(paths: FastPaths) -> dict[str, str]:
    """The same of which kernels compute, which is known after the load."""
    return {"set of kernels that work": ", ".join(sorted(paths.on))}


def different(own: Mapping[str, str], theirs: Mapping[str, Any]) -> str | None:
    """The name of something that another rank has otherwise, or not at all."""
    return next((what for what, value in own.items() if theirs.get(what) != value), None)


def state_digest(state: SessionState) -> int:
    """A number that follows from every bit of the last layer's window, and so of all before it."""
    rows = state.windows[-1].rows.reshape(-1)
    odd = 2 * mx.arange(rows.size, dtype=mx.uint32) + 1
    return cast(int, mx.sum(rows * odd).item())
