"""The one seam through which our kernels are launched, and the choice whether they are.

A family is one file of metal/ with its wrappers in ops/. Kernels are built on first use, since MLX
refuses to build them where no device can run them. Tests put an emulator in the place of MLX's
`mx.fast.metal_kernel`; without a factory every operation computes its reference.
"""

import logging
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, TypeAlias

import mlx.core as mx

log = logging.getLogger(__name__)

# Called with the arguments of `mx.fast.metal_kernel`.
KernelFactory: TypeAlias = Callable[..., Callable[..., list[mx.array]]]

_factory: KernelFactory | None = None
_probes: dict[str, Callable[[], bool]] = {}
_off: set[str] = set()


def is_on(family: str) -> bool:
    """Whether a family's kernels compute, and not its reference."""
    return _factory is not None and family not in _off


def probe(family: str) -> Callable[[Callable[[], bool]], Callable[[], bool]]:
    """Register a family's self-test: true when its kernels agree with its reference."""

    def register(check: Callable[[], bool]) -> Callable[[], bool]:
        _probes[family] = check
        return check

    return register


def start(factory: KernelFactory) -> tuple[list[str], list[str]]:
    """Switch on every family whose self-test passes: the families on and off.

    A family that does not compile here, or computes something else, stays off with one warning.
    """
    global _factory
    _factory = factory
    _off.clear()
    for family, check in _probes.items():
        try:
            fault = "" if check() else "its results differ from the reference"
        except Exception as error:  # whatever a compiler or driver raises, the reference remains
            fault = str(error).splitlines()[0] if str(error) else type(error).__name__
        if fault:
            _off.add(family)
            log.warning("the %s kernels are off, MLX's operations stand in: %s", family, fault)
    return sorted(set(_probes) - _off), sorted(_off)


@contextmanager
def using(factory: KernelFactory | None) -> Generator[None]:
    """Within the block, run every kernel through `factory`, or none for None."""
    global _factory, _off
    before, off_before = _factory, _off
    _factory, _off = factory, set()
    try:
        yield
    finally:
        _factory, _off = before, off_before


@dataclass(frozen=True)
class Kernel:
    """One kernel of a family: its parameters and its body, a call into the family's file."""

    family: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    body: str

    def __call__(
        self,
        inputs: Sequence[mx.array],
        *,
        template: Sequence[tuple[str, Any]] = (),
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        shapes: Sequence[tuple[int, ...]],
        dtypes: Sequence[mx.Dtype],
        init_value: float | None = None,
    ) -> list[mx.array]:
        """Launch over `grid` threads in groups of `threadgroup`: the outputs, in order."""
        assert _factory is not None, f"{self.name} is launched while kernels are off"
        return _build(_factory, self)(
            inputs=list(inputs),
            template=list(template),
            grid=grid,
            threadgroup=threadgroup,
            output_shapes=list(shapes),
            output_dtypes=list(dtypes),
            init_value=init_value,
        )


@cache
def _build(factory: KernelFactory, kernel: Kernel) -> Callable[..., list[mx.array]]:
    return factory(
        name=kernel.name,
        input_names=list(kernel.inputs),
        output_names=list(kernel.outputs),
        source=kernel.body,
        header=_source("common.h") + _source(f"{kernel.family}.metal"),
    )


@cache
def _source(name: str) -> str:
    return files("mlx_engine.metal").joinpath(name).read_text(encoding="utf-8")
