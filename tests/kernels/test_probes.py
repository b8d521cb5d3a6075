"""At start each family is checked: its self-test launches every kernel of the family."""

import inspect
import pkgutil
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any, cast

import mlx.core as mx
import pytest

from mlx_engine import ops
from mlx_engine.ops import launch
from mlx_engine.ops.launch import Kernel
from tests.msl import emulator
from tests.msl.conftest import require_emulator
from tests.msl.emulator import EmulatedKernel

OPS = [import_module(f"mlx_engine.ops.{m.name}") for m in pkgutil.iter_modules(ops.__path__)]


def kernels_in(value: Any) -> Iterator[Kernel]:
    """The kernels that a module's name stands for: one, or those of a table."""
    if isinstance(value, Kernel):
        yield value
    elif isinstance(value, dict):
        yield from kernels_in(tuple(cast("dict[Any, Any]", value).values()))
    elif isinstance(value, tuple):
        for part in cast("tuple[Any, ...]", value):
            yield from kernels_in(part)


# Those written for CUDA run nowhere else.
KERNELS = {
    kernel
    for module in OPS
    for _, value in inspect.getmembers(module)
    for kernel in kernels_in(value)
    if not kernel.is_native
}
FAMILIES = sorted({kernel.family for kernel in KERNELS})


def test_every_family_has_a_self_test() -> None:
    assert sorted(launch._probes) == FAMILIES  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_self_test_launches_every_kernel(family: str) -> None:
    require_emulator()
    launched: set[tuple[str, Any]] = set()

    def factory(**arguments: Any) -> Callable[..., list[mx.array]]:
        kernel = EmulatedKernel(**arguments)

        def run(**call: Any) -> list[mx.array]:
            launched.add((arguments["name"], dict(call["template"]).get("CHOSEN")))
            return kernel(**call)

        return run

    check = launch._probes[family]  # pyright: ignore[reportPrivateUsage]
    with emulator.using(checked=False, strict=False), launch.using(factory):
        assert check()
    names = {name for name, _ in launched}
    assert {kernel.name for kernel in KERNELS if kernel.family == family} <= names
    if family == "attention":
        # No compressed rows, all that are visible, and listed ones.
        whole_and_slices = ("attend_whole", "attend_slices")
        assert {(name, kind) for name in whole_and_slices for kind in range(3)} <= launched
