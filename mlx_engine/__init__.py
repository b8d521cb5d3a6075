"""ds41: an engine for one model, DeepSeek-V4.1-Flash, on a machine you own.

`load(path)` gives an `Engine`; everything else hangs off it.
"""

from importlib.metadata import version

__version__ = version("ds41")
