"""Kernels for NVIDIA GPUs: those of metal/ as they are, and some written in CUDA C++.

`CudaKernels` takes what `mx.fast.metal_kernel` takes. metal_on_cuda.h stands for Metal's library;
what remains, a kernel's signature, is made here at its first launch, when types are known.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from math import prod
from typing import Any, TypeAlias, cast

import mlx.core as mx
import numpy as np

from mlx_engine.cuda import compiler
from mlx_engine.cuda.handles import handle

Run: TypeAlias = Callable[..., list[mx.array]]
Size: TypeAlias = tuple[int, int, int]

_TYPES = {
    mx.bool_: "bool",
    mx.uint8: "uchar",
    mx.uint16: "ushort",
    mx.uint32: "uint",
    mx.int32: "int",
    mx.float16: "half",
    mx.bfloat16: "bfloat16_t",
    mx.float32: "float",
}
# A threadgroup array's declaration; elsewhere the word qualifies a pointer.
_THREADGROUP_ARRAY = re.compile(r"^(\s*)threadgroup\b(?=[^;(*&]*\[)", re.MULTILINE)
_EXTENT = re.compile(r"\b(\w+)_shape\[(\d+)\]")


class CudaKernels:
    """What `launch.start` takes on an NVIDIA GPU."""

    def __call__(self, **arguments: Any) -> Run:
        """A kernel of metal/, for the arguments of `mx.fast.metal_kernel`."""
        return CudaKernel(**arguments, is_native=False)

    def native(self, **arguments: Any) -> Run:
        """A kernel in CUDA C++, whose body sees the same names.

        `shared_memory`: bytes of it; `blocks`: how many a multiprocessor should have room for.
        """
        return CudaKernel(**arguments, is_native=True)


@dataclass(frozen=True)
class CudaKernel:
    """One kernel, with the call of those that `mx.fast.metal_kernel` makes."""

    name: str
    input_names: Sequence[str]
    output_names: Sequence[str]
    source: str
    header: str
    is_native: bool
    shared_memory: int = 0
    blocks: int = 1
    _sources: dict[Any, bytes] = field(default_factory=dict[Any, bytes])

    def __call__(
        self,
        *,
        inputs: Sequence[mx.array | float],
        template: Sequence[tuple[str, Any]],
        grid: Size,
        threadgroup: Size,
        output_shapes: Sequence[tuple[int, ...]],
        output_dtypes: Sequence[mx.Dtype],
        init_value: float | None = None,
    ) -> list[mx.array]:
        types = tuple((x.dtype, x.ndim == 0) if isinstance(x, mx.array) else None for x in inputs)
        threads = most_threads(grid, threadgroup)
        key = (types, tuple(template), threads, tuple(output_dtypes))
        if key not in self._sources:
            text = self.text(inputs, template, threads, output_dtypes)
            self._sources[key] = _source(self.name, text)
        assert not any(g % min(t, g) for g, t in zip(grid, threadgroup, strict=True)), (
            # Metal cuts the last threadgroups off at the grid's end; CUDA runs them whole.
            f"{self.name}: a grid of {grid} threads is no multiple of threadgroups {threadgroup}"
        )
        named = dict(zip(self.input_names, inputs, strict=True))
        # MLX takes a number only if f32 holds it.
        numbers = [float(np.float32(x)) for x in inputs if not isinstance(x, mx.array)]
        # An array that stands in for one that is not read may have fewer axes.
        shapes = {name: cast(mx.array, named[name]).shape for name, _ in self._extents()}
        lengths = [shapes[n][axis] if axis < len(shapes[n]) else 0 for n, axis in self._extents()]
        return cast(Run, mx.fast.precompiled_cuda_kernel)(
            name=self.name,
            compiled_source=self._sources[key],
            inputs=[x for x in inputs if isinstance(x, mx.array)],
            output_shapes=list(output_shapes),
            output_dtypes=list(output_dtypes),
            scalars=[*numbers, *lengths],
            grid=grid,
            threadgroup=threadgroup,
            shared_memory=self.shared_memory,
            init_value=init_value,
            ensure_row_contiguous=True,
            # Self-tests leave all else to the CPU.
            stream=mx.gpu,
        )

    def text(
        self,
        inputs: Sequence[mx.array | float],
        template: Sequence[tuple[str, Any]],
        threads: int,
        output_dtypes: Sequence[mx.Dtype],
    ) -> str:
        """The translation unit for these types: what stands before the kernel, and the kernel."""
        function = self.function(self.name, inputs, template, threads, output_dtypes)
        return f"{self.before()}{function}\n}}\n"

    def before(self) -> str:
        """What stands before the kernels of a family, which follow in the namespace it opens."""
        return f"{source_text('metal_on_cuda.h')}\nnamespace msl {{\n{self.header}\n"

    def function(
        self,
        name: str,
        inputs: Sequence[mx.array | float],
        template: Sequence[tuple[str, Any]],
        threads: int,
        output_dtypes: Sequence[mx.Dtype],
    ) -> str:
        """The kernel's function for these types and blocks of at most so many threads.

        MLX passes arrays before numbers, and numbers last.
        """
        named = list(zip(self.input_names, inputs, strict=True))
        arrays = [(n, x) for n, x in named if isinstance(x, mx.array)]
        # An array without axes is a value to Metal's bodies.
        values = {n: x for n, x in arrays if x.ndim == 0}
        parameters = [
            f"const {_TYPES[x.dtype]}* __restrict__ {n}{'_at' * (n in values)}" for n, x in arrays
        ]
        outputs = zip(self.output_names, output_dtypes, strict=True)
        parameters += [f"{_TYPES[dtype]}* __restrict__ {n}" for n, dtype in outputs]
        parameters += [f"const float {n}" for n, x in named if not isinstance(x, mx.array)]
        parameters += [f"const int {n}_extent_{axis}" for n, axis in self._extents()]
        body = _EXTENT.sub(r"\1_extent_\2", self.source)
        if not self.is_native:
            body = _THREADGROUP_ARRAY.sub(r"\1__shared__ __align__(16)", body)
        return (
            f'extern "C" __global__ void __launch_bounds__({threads}, {self.blocks}) {name}(\n    '
            + ",\n    ".join(parameters)
            + ") {\n"
            + "".join(f"{_constant(*entry)};\n" for entry in template)
            + "".join(f"const {_TYPES[x.dtype]} {n} = *{n}_at;\n" for n, x in values.items())
            + f"{body}\n}}\n"
        )

    def _extents(self) -> list[tuple[str, int]]:
        """Which lengths of its inputs the body names."""
        return _extents_of(self.source)


def most_threads(grid: Size, threadgroup: Size) -> int:
    """How many threads of a block a launch is compiled for: a power of two, at least 32.

    Blocks of some kernels grow with the context, and every number is a compilation of its own.
    """
    threads = prod(min(g, t) for g, t in zip(grid, threadgroup, strict=True))
    return max(32, 1 << (threads - 1).bit_length())


@cache
def _extents_of(source: str) -> list[tuple[str, int]]:
    return sorted({(name, int(axis)) for name, axis in _EXTENT.findall(source)})


def _constant(name: str, value: bool | int | mx.Dtype) -> str:
    if isinstance(value, bool):
        return f"constexpr bool {name} = {str(value).lower()}"
    if isinstance(value, int):
        return f"constexpr int {name} = {value}"
    return f"using {name} = {_TYPES[value]}"


def _source(name: str, text: str) -> bytes:
    return handle(name, compiler.cubin(text, architecture()), architecture())


@cache
def architecture() -> str:
    """The GPU's, as the compiler names it."""
    info = cast(Mapping[str, Any], mx.device_info(mx.Device(mx.gpu, 0)))
    return f"sm_{info['compute_capability_major']}{info['compute_capability_minor']}"


@cache
def source_text(name: str) -> str:
    """A file of this folder."""
    return files("mlx_engine.cuda").joinpath(name).read_text(encoding="utf-8")
