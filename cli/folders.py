"""The folders that commands use, as the environment and the user's system name them."""

import os
from pathlib import Path

from mlx_engine.errors import BadRequest


def cache_directory() -> Path:
    """The folder for what can be made again: DS41_CACHE_DIR, or the user's cache folder."""
    import platformdirs

    named = os.environ.get("DS41_CACHE_DIR")
    return expanded(Path(named)) if named else platformdirs.user_cache_path("ds41")


def expanded(path: Path) -> Path:
    """The path with `~` filled in; raises BadRequest where nobody has that home."""
    try:
        return path.expanduser()
    except RuntimeError as error:
        raise BadRequest(f"{path} cannot be found: {error}") from None
