"""Calls: what rank 0 tells the other ranks, in the order in which all do it.

Imports no MLX, for a rank learns from its first message which device it may see.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mlx_engine.hosts import Backend, Environment


@dataclass(frozen=True)
class Plan:
    """How the model is to be loaded, on every rank the same."""

    directory: Path
    context_tokens: int
    dtype: Literal["bfloat16", "float32"]
    prefill: Literal["short", "full"]
    chunk_tokens: int
    session_bytes: int
    cache_dir: Path | None


@dataclass(frozen=True)
class Start:
    """A rank's first message: what it is part of; it answers with its `identity`."""

    plan: Plan
    backend: Backend
    environment: Environment
    stall_s: float


@dataclass(frozen=True)
class Do:
    """One of the steps of a start; a rank answers with its name."""

    what: Literal["listen", "reach", "join", "load"]


@dataclass(frozen=True)
class Call:
    """A call of a session, by its number and the method's name; `gone` are sessions to forget."""

    session: int
    name: str
    args: tuple[Any, ...] = ()
    gone: tuple[int, ...] = ()
