"""Identity: what must be the same on every device that shares a model."""

import hashlib
from importlib import metadata
from pathlib import Path

from mlx_engine.checkpoint import Checkpoint
from mlx_engine.fingerprint import fingerprint


def identity(files: Checkpoint, dtype: str, cache_dir: Path | None) -> dict[str, str]:
    """What must be the same on every rank, by the names that a message gives it."""
    config = (files.directory / "config.json").read_bytes()
    return {
        "version of ds41": metadata.version("ds41"),
        "version of MLX": metadata.version("mlx"),
        "config.json of the checkpoint": hashlib.sha256(config).hexdigest(),
        "checkpoint": fingerprint(files, dtype, cache_dir).hex(),
    }
