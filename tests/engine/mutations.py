"""Faults to plant in the model, each of which a check must notice, and how to plant one.

A mutation is a piece of source text and what stands in its place. It is compiled into the live
module's functions, wherever they have been imported, and taken out again.
"""

import functools
import importlib
import inspect
import tomllib
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, cast

import pytest


@dataclass(frozen=True)
class Mutation:
    """`old`, which stands once in the source of `module`, becomes `new`; `caught_by` notices."""

    name: str
    module: str
    old: str
    new: str
    caught_by: str


def read_mutations() -> list[Mutation]:
    """The table, mutations.toml beside this file."""
    table = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
    return [Mutation(**entry) for entry in table["mutation"]]


@contextmanager
def planted(mutation: Mutation) -> Generator[None]:
    """Run the functions and constants of the mutated source while the context lasts."""
    live = importlib.import_module(f"mlx_engine.{mutation.module}")
    path = Path(inspect.getfile(live))
    source = path.read_text()
    found = source.count(mutation.old)
    assert found == 1, f"{mutation.name}: its text stands {found} times in {path.name}, not once"
    mutant = ModuleType(live.__name__)
    mutant.__file__ = str(path)
    changed = source.replace(mutation.old, mutation.new)
    with pytest.MonkeyPatch.context() as patch:
        # The mutant's self-tests of kernels must not take the place of the live ones.
        patch.setattr("mlx_engine.ops.launch._probes", {})
        exec(compile(changed, str(path), "exec", dont_inherit=True), vars(mutant))
    before = _functions(live)
    codes = {name: function.__code__ for name, function in before.items()}
    constants = _constants(live)
    try:
        for name, function in _functions(mutant).items():
            before[name].__code__ = function.__code__
        vars(live).update(_constants(mutant))
        _forget(live)
        yield
    finally:
        for name, function in before.items():
            function.__code__ = codes[name]
        vars(live).update(constants)
        _forget(live)


def _functions(module: ModuleType) -> dict[str, FunctionType]:
    """The functions and methods that the module's own source defines, by qualified name."""
    return {
        function.__qualname__: function
        for value in _owned(module)
        for member in (vars(value).values() if inspect.isclass(value) else [value])
        for function in _unwrapped(member)
        # Not those that dataclasses make: they have no source.
        if function.__code__.co_filename == module.__file__
    }


def _owned(module: ModuleType) -> Iterator[Any]:
    for value in vars(module).values():
        if getattr(value, "__module__", None) == module.__name__:
            yield value


def _unwrapped(member: Any) -> Iterator[FunctionType]:
    if isinstance(member, property):
        member = member.fget
    elif isinstance(member, functools.cached_property):
        member = cast("functools.cached_property[Any]", member).func
    member = inspect.unwrap(member) if callable(member) else member
    if isinstance(member, FunctionType):
        yield member


def _constants(module: ModuleType) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, int | float) and not name.startswith("__")
    }


def _forget(module: ModuleType) -> None:
    """Empty the caches of the module's functions."""
    for value in _owned(module):
        if hasattr(value, "cache_clear"):
            value.cache_clear()
