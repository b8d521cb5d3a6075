"""Keeps the checkout's root off sys.path, so that the mapped folders have one name each.

With the root on the path (`python -m pytest` puts it there) `cli` could be imported beside
`mlx_engine.cli`, as a second module with its own classes.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent

sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT]
