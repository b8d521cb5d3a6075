"""What a step launches on a Mac, found from shapes: kernels are recorded and nothing is computed.

A launch is a kernel of ours, or an operation of MLX that makes an array: all but views (reshape,
transpose, slice, broadcast, split, a view as another dtype). A copy counts: of what a reshape or a
view cannot have in place, and of each input of a kernel that does not lie row by row. Operations
that MLX's Metal backend launches in parts count them all (`_LAUNCHES`); one each count quantised
operations and what the tracing CPU would break up (`_ONE_LAUNCH`). A sort or a reduction counts one
too, which is right only for one short enough to need no second pass. Constants from the host and
what no result needs are none.
"""

import dataclasses
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from math import prod
from typing import Any, TypeAlias
from unittest.mock import patch

import mlx.core as mx
import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from mlx_engine.ops import launch

# Of an array: (name in the trace, shape, dtype).
Named: TypeAlias = tuple[str, tuple[int, ...], mx.Dtype]
# Strides in values, of an array that has no memory.
Layout: TypeAlias = NDArray[np.uint8]

# How MLX begins the name of a kernel called n, which a number follows.
_NODE = "custom_kernel_n"
_COPY = "copy"
_PLACE = "place"


@dataclasses.dataclass(frozen=True)
class Array:
    """An array that a launch reads or writes.

    `unique_bytes` leaves out what is broadcast, and an input that is there already.
    """

    shape: tuple[int, ...]
    dtype: mx.Dtype
    unique_bytes: int


@dataclasses.dataclass(frozen=True)
class Launch:
    """One launch. `kernel` is ours or None, `template` its constants and types.

    `inputs` come as the kernel names them, `source` is the highest rank of an argument of the
    traced function that it depends on, -1 for none.
    """

    name: str
    kernel: launch.Kernel | None
    template: dict[str, Any]
    inputs: tuple[Array, ...]
    outputs: tuple[Array, ...]
    source: int


def trace(
    function: Callable[..., Sequence[mx.array]],
    arguments: dict[str, mx.array],
    rank: Callable[[str], int] = lambda name: -1,
) -> list[Launch]:
    """The launches of a function of named arrays, which may be lazy and larger than the memory.

    `rank` gives an argument's rank by its name.
    """
    seam = _Seam()
    graph: list[dict[str, Any]] = []
    with _as_on_a_mac(seam):
        mx.export_function(graph.append, function, arguments)
    return _launches(graph, seam, rank)


class _Seam:
    """Stands for `mx.fast.metal_kernel`: kernels get a number and no source."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, launch.Kernel | None, dict[str, Any]]] = []

    def __call__(self, **arguments: Any) -> Callable[..., list[mx.array]]:
        name: str = arguments["name"]
        kernel = launch.Kernel("", name, arguments["input_names"], arguments["output_names"], "")

        def run(**call: Any) -> list[mx.array]:
            return self.record(name, kernel, **call)

        return run

    def record(
        self, name: str, kernel: launch.Kernel | None, *, inputs: Sequence[mx.array], **call: Any
    ) -> list[mx.array]:
        """Put one node into the trace."""
        assert call.get("init_value") is None, "a kernel's outputs are filled by a launch each"
        serial = len(self.calls)
        self.calls.append((name, kernel, dict(call["template"])))
        node: Any = mx.fast.metal_kernel(
            name=f"n{serial}",
            input_names=[f"in{i}" for i in range(len(inputs))],
            output_names=[f"out{i}" for i in range(len(call["output_shapes"]))],
            source=";",
        )
        return node(inputs=list(inputs), **{**call, "template": []})

    def call_of(self, entry: dict[str, Any]) -> tuple[str, launch.Kernel | None, dict[str, Any]]:
        """The name of a primitive's launch, and its kernel and template if it is one of ours."""
        if entry["name"] == "CustomKernel":
            return self.calls[int(entry["arguments"][0].removeprefix(_NODE).split("_")[0])]
        return (_COPY if entry["name"] in _VIEWS else entry["name"]), None, {}

    def one_launch(
        self, name: str, shape_of: Callable[..., tuple[tuple[int, ...], mx.Dtype]]
    ) -> Any:
        """A stand-in for an operation of MLX: its arrays are the inputs of one node."""

        def operation(*args: Any, **options: Any) -> mx.array:
            shape, dtype = shape_of(*args, **options)
            (out,) = self.record(
                name,
                None,
                inputs=[x for x in args if isinstance(x, mx.array)],
                template=[],
                grid=(1, 1, 1),
                threadgroup=(1, 1, 1),
                output_shapes=[shape],
                output_dtypes=[dtype],
            )
            return out

        return operation


def _normed(x: mx.array, *_: Any) -> tuple[tuple[int, ...], mx.Dtype]:
    return x.shape, x.dtype


def _unpacked(
    w: mx.array, *_: Any, bits: int, dtype: mx.Dtype, **__: Any
) -> tuple[tuple[int, ...], mx.Dtype]:
    return (*w.shape[:-1], w.shape[-1] * 32 // bits), dtype


def _encoded(x: mx.array) -> tuple[tuple[int, ...], mx.Dtype]:
    return x.shape, mx.uint8


def _decoded(x: mx.array, dtype: mx.Dtype) -> tuple[tuple[int, ...], mx.Dtype]:
    return x.shape, dtype


# Operations of MLX that a GPU runs as one and a CPU, or its export, as several.
_ONE_LAUNCH: tuple[tuple[Any, str, Callable[..., tuple[tuple[int, ...], mx.Dtype]]], ...] = (
    (mx.fast, "rms_norm", _normed),
    (mx, "dequantize", _unpacked),
    (mx, "to_fp8", _encoded),
    (mx, "from_fp8", _decoded),
    # It has no export, and copies a part of a larger buffer even if it lies row by row.
    (mx, "contiguous", _normed),
)


def _copies(entry: dict[str, Any]) -> int:
    """A concatenation is a copy for each input that is not empty."""
    return sum(1 for _, shape, _ in entry["inputs"] if prod(shape))


# Launches of an operation of MLX beside the one that bears its name: of Metal's backend, v0.32.
_LAUNCHES: dict[str, Callable[[dict[str, Any]], list[str]]] = {
    "Concatenate": lambda entry: [_COPY] * (_copies(entry) - 1),
    # A place in an array is turned into an offset.
    "DynamicSlice": lambda _: [_PLACE],
    "DynamicSliceUpdate": lambda _: [_PLACE],
    # First all is filled.
    "Pad": lambda _: [_COPY],
}


@contextmanager
def _as_on_a_mac(seam: _Seam) -> Generator[None]:
    """Take the paths of a GPU, and evaluate nothing."""

    def nothing(*arrays: Any) -> None:
        pass

    with ExitStack() as stack:
        for name in ("eval", "async_eval"):
            stack.enter_context(patch.object(mx, name, nothing))
        stack.enter_context(patch.object(mx, "default_device", lambda: mx.Device(mx.gpu)))
        for module, name, shape_of in _ONE_LAUNCH:
            stack.enter_context(patch.object(module, name, seam.one_launch(name, shape_of)))
        stack.enter_context(launch.using(seam))
        yield


def _launches(graph: list[dict[str, Any]], seam: _Seam, rank: Callable[[str], int]) -> list[Launch]:
    layouts: dict[str, Layout] = {}
    sources: dict[str, int] = {}
    found: list[Launch] = []
    for entry in graph:
        if entry["type"] == "keyword_inputs":
            sources |= {name: rank(keyword) for keyword, name in entry["keywords"]}
        if entry["type"] != "primitive":
            continue
        named: list[Named] = entry["inputs"]
        for name, shape, _ in named:
            layouts.setdefault(name, _row_by_row(shape))
        source = max((sources.get(name, -1) for name, _, _ in named), default=-1)
        sources |= {name: source for name, _, _ in entry["outputs"]}
        if (views := _views(entry, layouts)) is not None:
            layouts |= views
            continue
        reads, writes = _arrays(named, layouts), _arrays(entry["outputs"], {})
        name, kernel, template = seam.call_of(entry)
        if entry["name"] == "CustomKernel" and name != "contiguous":
            found += [_copy(read.array, source) for read in reads if not read.is_row_by_row]
        parts = _LAUNCHES.get(entry["name"], lambda _: [])(entry)
        # Their bytes are those of the operation.
        found += [Launch(part, None, {}, (), (), source) for part in parts]
        inputs, outputs = (tuple(laid.array for laid in some) for some in (reads, writes))
        found.append(Launch(name, kernel, template, inputs, outputs, source))
    return found


def _copy(array: Array, source: int) -> Launch:
    whole = Array(array.shape, array.dtype, prod(array.shape) * array.dtype.size)
    return Launch(_COPY, None, {}, (array,), (whole,), source)


@dataclasses.dataclass(frozen=True)
class _Laid:
    array: Array
    is_row_by_row: bool


def _arrays(named: Sequence[Named], layouts: dict[str, Layout]) -> list[_Laid]:
    found: list[_Laid] = []
    for name, shape, dtype in named:
        layout = layouts.get(name)
        sizes = shape
        if layout is not None:
            sizes = [n for n, stride in zip(shape, layout.strides, strict=True) if stride or n == 0]
        is_first = name not in {earlier for earlier, _, _ in named[: len(found)]}
        array = Array(tuple(shape), dtype, prod(sizes) * dtype.size * is_first)
        found.append(_Laid(array, layout is None or layout.flags.c_contiguous))
    return found


def _row_by_row(shape: Sequence[int]) -> Layout:
    strides = np.cumprod([1, *[max(n, 1) for n in shape[:0:-1]]], dtype=np.int64)[::-1]
    return _layout(shape, strides.tolist() if shape else [])


def _layout(shape: Sequence[int], strides: Sequence[int]) -> Layout:
    return as_strided(np.empty(1, np.uint8), tuple(shape), tuple(strides), writeable=False)


def _reshaped(x: Layout, shape: Sequence[int]) -> Layout | None:
    try:
        return x.reshape(tuple(shape), copy=False)
    except ValueError:
        return None


def _sliced(x: Layout, shape: Sequence[int], steps: Sequence[int]) -> Layout:
    return _layout(shape, [stride * step for stride, step in zip(x.strides, steps, strict=True)])


def _viewed(x: Layout, shape: Sequence[int]) -> Layout | None:
    """As another dtype: where the size of a value differs the last axis must have no gaps."""
    if tuple(shape) == x.shape:
        return x
    is_gapless = x.flags.c_contiguous or (shape[-1] > x.shape[-1] and x.strides[-1] == 1)
    if not is_gapless:
        return None
    if x.flags.c_contiguous:
        return _row_by_row(shape)
    wider = shape[-1] // x.shape[-1]
    return _layout(shape, [*(stride * wider for stride in x.strides[:-1]), 1])


# Of each view: its layout from the input's, the output's shape and the primitive's arguments, or
# None where it must be a copy.
_VIEWS: dict[str, Callable[[Layout, Sequence[int], Any], Layout | None]] = {
    "Reshape": lambda x, shape, _: _reshaped(x, shape),
    "Flatten": lambda x, shape, _: _reshaped(x, shape),
    "Unflatten": lambda x, shape, _: _reshaped(x, shape),
    "ExpandDims": lambda x, shape, _: _reshaped(x, shape),
    "Squeeze": lambda x, shape, _: _reshaped(x, shape),
    "Transpose": lambda x, shape, arguments: x.transpose(arguments[0]),
    "Slice": lambda x, shape, arguments: _sliced(x, shape, arguments[2]),
    "Split": lambda x, shape, _: _layout(shape, x.strides),
    "Broadcast": lambda x, shape, _: np.broadcast_to(x, tuple(shape)),
    "View": lambda x, shape, _: _viewed(x, shape),
    "StopGradient": lambda x, shape, _: x,
}


def _views(entry: dict[str, Any], layouts: dict[str, Layout]) -> dict[str, Layout] | None:
    """The layouts of a primitive's outputs if it only looks at its input's memory."""
    view = _VIEWS.get(entry["name"])
    if view is None:
        return None
    x = layouts[entry["inputs"][0][0]]
    found = {name: view(x, shape, entry["arguments"]) for name, shape, _ in entry["outputs"]}
    seen = {name: layout for name, layout in found.items() if layout is not None}
    return seen if len(seen) == len(found) else None
