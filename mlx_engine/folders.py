"""Where files lie that belong to no checkpoint, as the environment and the user's system name it.

Owns the one rule for the cache folder; what is kept in it is for those who keep it.
"""

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
