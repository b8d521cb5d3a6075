"""The folders that commands use, as the environment and the user's system name them."""

import os
from pathlib import Path

import typer

from mlx_engine.errors import BadRequest


def cache_directory() -> Path:
    """The folder for what can be made again: DS41_CACHE_DIR, or the user's cache folder."""
    import platformdirs

    named = os.environ.get("DS41_CACHE_DIR")
    return expanded(Path(named)) if named else platformdirs.user_cache_path("ds41")


def model_directory(named: Path | None) -> Path:
    """The checkpoint that was named, or a tiny random one in the cache folder, which is said."""
    if named is not None:
        return expanded(named)
    from mlx_engine.tiny import tiny_checkpoint

    directory = tiny_checkpoint(cache_directory())
    typer.echo(
        "ds41: without --model or DS41_MODEL a tiny random model answers, its words mean nothing",
        err=True,
    )
    return directory


def expanded(path: Path) -> Path:
    """The path with `~` filled in; raises BadRequest where nobody has that home."""
    try:
        return path.expanduser()
    except RuntimeError as error:
        raise BadRequest(f"{path} cannot be found: {error}") from None
