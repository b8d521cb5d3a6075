"""Files of a checkpoint that are read whole, and the JSON in them.

Owns what is said of a file that cannot be read; what its content means is the reader's part.
"""

import json
import stat
from pathlib import Path
from typing import Any

from mlx_engine.errors import ModelFileError


def read_file(path: Path) -> bytes:
    """The content of a file. Raises FileNotFoundError, and ModelFileError for any other fault."""
    try:
        require_file(path)
        return path.read_bytes()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read: {error.strerror}") from None


def read_json(path: Path) -> Any:
    """The JSON in a file. Raises as `read_file` does, and ModelFileError for what is no JSON."""
    try:
        return json.loads(read_file(path).decode())
    except UnicodeDecodeError as error:
        reason = f"byte {error.start + 1} is not UTF-8 text"
    except json.JSONDecodeError as error:
        reason = f"see line {error.lineno}, column {error.colno}"
    except (ValueError, RecursionError):
        reason = "it has numbers that are too long, or values nested too deeply"
    raise ModelFileError(f"{path} cannot be read as JSON ({reason}): fetch it again")


def require_file(path: Path) -> None:
    """Raise ModelFileError for a folder, a pipe or a device, which would keep a reader waiting."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise ModelFileError(f"{path} is not a file: fetch it again")
