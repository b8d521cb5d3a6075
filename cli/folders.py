"""The folder of the model that a command runs."""

from pathlib import Path

import typer

from mlx_engine.folders import cache_directory, expanded


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
