"""The program's entry: imports the command line where a Ctrl-C already ends it quietly."""

import sys
from typing import NoReturn

from mlx_engine.cli.ending import leave


def main() -> NoReturn:
    """Run `ds41`; its exit code for a Ctrl-C that comes before a command could see it is 130."""
    try:
        from mlx_engine.cli.main import app

        app()
    except SystemExit as end:
        leave(_code(end))
    except KeyboardInterrupt:
        leave(130)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        leave(1)
    leave(0)


def _code(end: SystemExit) -> int:
    """The exit code, as the interpreter reads it."""
    if isinstance(end.code, int):
        return end.code
    if end.code is not None:
        print(end.code, file=sys.stderr)
    return 0 if end.code is None else 1
