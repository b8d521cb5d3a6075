"""The program's entry and its end: an early Ctrl-C is quiet, and nothing holds the end up."""

import os
import sys
from contextlib import suppress
from typing import NoReturn


def main() -> NoReturn:
    """Run `ds41` and end the process; 130 for a Ctrl-C that comes before a command could see it.

    Neither threads nor destructors are waited for: MLX's wait for the device, and that may wait for
    ever for another one which is gone.
    """
    code: object = 0
    try:
        from mlx_engine.cli.main import app

        app()
    except KeyboardInterrupt:
        code = 130
    except SystemExit as end:
        code = end.code
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code if isinstance(code, int) else 1 if code else 0)
