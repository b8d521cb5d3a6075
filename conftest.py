"""Keeps the checkout's root off sys.path, so that the mapped folders have one name each.

With the root on the path (`python -m pytest` puts it there) `cli` could be imported beside
`mlx_engine.cli`, as a second module with its own classes. `bench` is made known without.
"""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

ROOT = Path(__file__).resolve().parent

sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT]

if "bench" not in sys.modules:
    spec = spec_from_file_location("bench", ROOT / "bench" / "__init__.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules["bench"] = module_from_spec(spec)
    spec.loader.exec_module(module)
