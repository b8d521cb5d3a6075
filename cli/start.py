"""The program's entry: imports the command line where a Ctrl-C already ends it quietly."""

import os
import sys
from contextlib import suppress


def main() -> None:
    """Run `ds41`; its exit code for a Ctrl-C that comes before a command could see it is 130."""
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
