"""The folder of the model that a command runs."""

from importlib.resources import files
from pathlib import Path

from mlx_engine.cli.terminal import say
from mlx_engine.folders import cache_directory, expanded


def demo_directory() -> Path | None:
    """The demo model's folder inside the package, where it was installed with it."""
    directory = Path(str(files("mlx_engine"))) / "demo"
    return directory if (directory / "config.json").exists() else None


def model_directory(named: Path | None, *, tiny_random: bool = False) -> tuple[Path, str | None]:
    """The checkpoint's folder, and what it is called where it stands in for the real model.

    `tiny_random` asks for a tiny random one in the cache folder, whatever is named; that one
    also answers where none is named and no demo model was installed.
    """
    if named is not None and not tiny_random:
        return expanded(named), None
    demo = None if tiny_random else demo_directory()
    if demo is not None:
        say("without --model or DS41_MODEL the demo model answers: very small, of a small world")
        return demo, "the demo model"
    from mlx_engine.tiny import tiny_checkpoint

    directory = tiny_checkpoint(cache_directory())
    say("a tiny random model answers, its words mean nothing; --model or DS41_MODEL names another")
    return directory, "a tiny random model"
