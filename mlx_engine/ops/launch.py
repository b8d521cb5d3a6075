"""The one seam through which our kernels are launched, and the choice whether they are.

A family is one file of metal/ with its wrappers in ops/. Kernels are built on first use, since MLX
refuses to build them where no device can run them. Tests put an emulator in the place of MLX's
`mx.fast.metal_kernel`; without a factory every operation computes its reference.

MLX compiles a kernel for the sizes that it is called with, and not before its results are needed.
So what passes a self-test may still be refused at the model's sizes, by the compiler or for its
threadgroup's size. After `start` the results of every kernel's first call with such sizes are
computed at once, after its inputs, whose faults are not its own. If that fails the family goes off
with one warning, and `falls_back` repeats the operation with its reference. A fault of the GPU
while it runs, or a crash of the driver, is not caught.
"""

import logging
import re
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, wraps
from importlib import import_module
from importlib.resources import files
from typing import Any, NamedTuple, ParamSpec, Protocol, TypeAlias, TypeVar, cast, runtime_checkable

import mlx.core as mx

log = logging.getLogger(__name__)

# Called with the arguments of `mx.fast.metal_kernel`.
KernelFactory: TypeAlias = Callable[..., Callable[..., list[mx.array]]]

# What Metal gives the arrays of a threadgroup; a kernel that asks for more is refused.
MOST_THREADGROUP_BYTES = 32 << 10

# Of a compiler's output: its errors, how many of them are repeated, and how much of each.
_DIAGNOSTIC = re.compile(r"\berror\b", re.IGNORECASE)
_MOST_DIAGNOSTICS = 3
_MOST_CHARACTERS = 200


@runtime_checkable
class NativeFactory(Protocol):
    """A factory for CUDA: it takes kernels of metal/, and those that are written for it."""

    def __call__(self, **arguments: Any) -> Callable[..., list[mx.array]]: ...

    def native(self, **arguments: Any) -> Callable[..., list[mx.array]]:
        """Called with the arguments of `mx.fast.cuda_kernel`."""
        ...


P = ParamSpec("P")
R = TypeVar("R")

_factory: KernelFactory | None = None
_probes: dict[str, Callable[[], bool]] = {}
_off: set[str] = set()
# Of kernels that were started: which have been computed once, with which sizes and types.
_is_started = False
_computed: set[object] = set()


class FastPaths(NamedTuple):
    """The families whose kernels compute, and those that are left to MLX's operations."""

    on: tuple[str, ...]
    off: tuple[str, ...]


class KernelFailed(Exception):
    """A kernel cannot be used here; its family is off now."""


def is_on(family: str) -> bool:
    """Whether a family's kernels compute, and not its reference."""
    return _factory is not None and family not in _off


def is_native(family: str) -> bool:
    """Whether a family's kernels may be those written for CUDA."""
    return is_on(family) and isinstance(_factory, NativeFactory)


def probe(family: str) -> Callable[[Callable[[], bool]], Callable[[], bool]]:
    """Register a family's self-test: true when all its kernels agree with its reference.

    A family may have several.
    """

    def register(check: Callable[[], bool]) -> Callable[[], bool]:
        earlier = _probes.get(family)
        _probes[family] = check if earlier is None else lambda: earlier() and check()
        return check

    return register


def falls_back(operation: Callable[P, R]) -> Callable[P, R]:
    """Repeat an operation that chooses by `is_on` when one of its kernels has failed."""

    @wraps(operation)
    def run(*args: P.args, **options: P.kwargs) -> R:
        while True:
            try:
                return operation(*args, **options)
            except KernelFailed:
                continue  # a family fewer is on, so this ends

    return run


def start(factory: KernelFactory) -> FastPaths:
    """Switch on every family whose self-test passes.

    A family that does not compile here, or computes something else, stays off with one warning.
    """
    global _factory, _is_started
    _factory, _is_started = factory, True
    _off.clear()
    _computed.clear()
    # MLX compiles many of its operations for CUDA at their first use, seconds each.
    with mx.stream(mx.cpu) if isinstance(factory, NativeFactory) else nullcontext():
        for family, check in _probes.items():
            try:
                if not check():
                    _turn_off(family, "its results differ from the reference")
            except Exception as error:
                # Whatever a compiler or driver raises, the reference remains.
                _turn_off(family, complaint(error))
    return fast_paths()


def fast_paths() -> FastPaths:
    """What computes now."""
    on = [family for family in _probes if is_on(family)]
    return FastPaths(tuple(sorted(on)), tuple(sorted(set(_probes) - set(on))))


@cache
def start_here() -> FastPaths:
    """Start the kernels on this machine's GPU, once a process; without one none is on."""
    if mx.default_device() == mx.gpu and mx.metal.is_available():
        return start(cast(KernelFactory, mx.fast.metal_kernel))
    if mx.default_device() == mx.gpu and mx.cuda.is_available():
        # Elsewhere its compiler would be looked for in vain.
        return start(import_module("mlx_engine.cuda.kernels").CudaKernels())
    return fast_paths()


def complaint(error: Exception) -> str:
    """What an exception of MLX's or a compiler's says, in one line of limited length.

    MLX's first line tells only that a kernel was not built; the lines with the reasons follow.
    """
    first, *more = str(error).splitlines() or [type(error).__name__]
    reasons = [line for line in more if _DIAGNOSTIC.search(line)][:_MOST_DIAGNOSTICS]
    return "; ".join(line.strip()[:_MOST_CHARACTERS] for line in (first, *reasons))


def _turn_off(family: str, fault: str) -> None:
    if family not in _off:
        _off.add(family)
        log.warning("the %s kernels are off, MLX's operations stand in: %s", family, fault)


@contextmanager
def using(factory: KernelFactory | None) -> Generator[None]:
    """Within the block, run every kernel through `factory`, or none for None; what fails raises."""
    global _factory, _off, _is_started
    before = _factory, _off, _is_started
    _factory, _off, _is_started = factory, set[str](), False
    try:
        yield
    finally:
        _factory, _off, _is_started = before


@dataclass(frozen=True)
class Kernel:
    """One kernel of a family: its parameters and its body, a call into the family's file.

    `also` names the families whose files the body or that file calls into, too. The file is that
    of metal/, or of cuda/ for a native one, with so much dynamic shared memory and so few registers
    that a multiprocessor holds `blocks` at once.
    """

    family: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    body: str
    also: tuple[str, ...] = ()
    is_native: bool = False
    shared_bytes: int = 0
    blocks: int = 1

    def __call__(
        self,
        inputs: Sequence[mx.array | float],
        *,
        template: Sequence[tuple[str, Any]] = (),
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        shapes: Sequence[tuple[int, ...]],
        dtypes: Sequence[mx.Dtype],
        init_value: float | None = None,
    ) -> list[mx.array]:
        """Launch over `grid` threads in groups of `threadgroup`: the outputs, in order.

        A number among the inputs is an f32 without axes. Raises KernelFailed after `start`, at the
        first call with these sizes and types.
        """
        assert _factory is not None, f"{self.name} is launched while kernels are off"
        call = {
            "inputs": [x if isinstance(x, mx.array) else float(x) for x in inputs],
            "template": list(template),
            "grid": grid,
            "threadgroup": threadgroup,
            "output_shapes": list(shapes),
            "output_dtypes": list(dtypes),
            "init_value": init_value,
        }
        # What MLX compiles a kernel for.
        forms = ((x.dtype, x.ndim == 0, x.size < 8) for x in inputs if isinstance(x, mx.array))
        variant = (self, *map(tuple, template), threadgroup, *forms)
        if not _is_started or variant in _computed:
            return _build(_factory, self)(**call)
        mx.eval(call["inputs"])
        try:
            outputs = _build(_factory, self)(**call)
            mx.eval(outputs)
        except Exception as error:
            _turn_off(self.family, f"{self.name}: {complaint(error)}")
            raise KernelFailed(f"{self.name} failed") from error
        _computed.add(variant)
        return outputs


@cache
def _build(factory: KernelFactory, kernel: Kernel) -> Callable[..., list[mx.array]]:
    families = (*kernel.also, kernel.family)
    names = {
        "name": kernel.name,
        "input_names": list(kernel.inputs),
        "output_names": list(kernel.outputs),
        "source": kernel.body,
    }
    header = _source("metal", "common.h")
    if kernel.is_native:
        assert isinstance(factory, NativeFactory), f"{kernel.name} is for CUDA only"
        header += _source("cuda", "common.cuh")
        header += "".join(_source("cuda", f"{family}.cu") for family in families)
        room = {"shared_memory": kernel.shared_bytes, "blocks": kernel.blocks}
        return factory.native(**names, header=header, **room)
    header += "".join(_source("metal", f"{family}.metal") for family in families)
    return factory(**names, header=header)


@cache
def _source(folder: str, name: str) -> str:
    return files(f"mlx_engine.{folder}").joinpath(name).read_text(encoding="utf-8")
