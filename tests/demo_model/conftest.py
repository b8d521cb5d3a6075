"""Makes the package `bench` known: the checkout's root is off the path, see the root's conftest."""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

if "bench" not in sys.modules:
    source = Path(__file__).parents[2] / "bench" / "__init__.py"
    spec = spec_from_file_location("bench", source)
    assert spec is not None and spec.loader is not None
    module = sys.modules["bench"] = module_from_spec(spec)
    spec.loader.exec_module(module)
