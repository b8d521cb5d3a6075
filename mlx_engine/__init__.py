"""ds41: an engine for one model, DeepSeek-V4.1-Flash, on a machine you own.

    import mlx_engine

    with mlx_engine.load("DeepSeek-V4.1-Flash") as engine:
        for event in engine.respond(mlx_engine.Request("Hello")):
            ...

The names below are the whole public interface. They are imported on first use, so that
`import mlx_engine` alone costs nothing.
"""

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlx_engine.answer import ReasoningDelta, TextDelta, TokenLogprob
    from mlx_engine.engine import Engine
    from mlx_engine.engram_table import EngramStats
    from mlx_engine.errors import (
        BadRequest,
        CacheCorrupt,
        Cancelled,
        ContextTooLong,
        DeviceError,
        EngineError,
        ModelFileError,
    )
    from mlx_engine.loading import OpenModel, load, open_model
    from mlx_engine.progress import Prefilled, Waiting
    from mlx_engine.prompt import Message
    from mlx_engine.respond import End, Event, Progress, Request
    from mlx_engine.sampling import Sampling, ScoredToken

if sys.platform == "linux":
    # On CUDA MLX gathers launches in graphs until their inputs have so many million elements, by
    # default fewer than one layer's experts. It reads this when its first stream is made.
    os.environ.setdefault("MLX_MAX_MB_PER_BUFFER", "4000")

__all__ = [
    "BadRequest",
    "CacheCorrupt",
    "Cancelled",
    "ContextTooLong",
    "DeviceError",
    "End",
    "Engine",
    "EngineError",
    "EngramStats",
    "Event",
    "Message",
    "ModelFileError",
    "OpenModel",
    "Prefilled",
    "Progress",
    "ReasoningDelta",
    "Request",
    "Sampling",
    "ScoredToken",
    "TextDelta",
    "TokenLogprob",
    "Waiting",
    "load",
    "open_model",
]

_HOMES = {
    "answer": ("ReasoningDelta", "TextDelta", "TokenLogprob"),
    "engine": ("Engine",),
    "engram_table": ("EngramStats",),
    "loading": ("OpenModel", "load", "open_model"),
    "progress": ("Prefilled", "Waiting"),
    "prompt": ("Message",),
    "respond": ("End", "Event", "Progress", "Request"),
    "sampling": ("Sampling", "ScoredToken"),
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("ds41")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = next((module for module, names in _HOMES.items() if name in names), "errors")
    return getattr(import_module(f"{__name__}.{home}"), name)
