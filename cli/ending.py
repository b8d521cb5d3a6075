"""The end of the process, the same for every command: without the interpreter's own end.

That aborts under a thread that is at work in MLX, and waits for a device that waits for another,
for ever where the other's process was killed.
"""

import os
import sys
from typing import NoReturn


def leave(code: int) -> NoReturn:
    """End the process now, whatever is at work in it; output that cannot be written makes it 1."""
    try:
        for stream in (sys.stderr, sys.stdout):
            if stream is None:  # the caller closed it
                continue
            try:
                stream.flush()
            except (OSError, ValueError):
                code = code or 1
    finally:
        os._exit(code)
