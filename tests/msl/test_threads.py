"""What threads know of themselves and of each other: attributes, simd operations, barriers."""

from collections.abc import Callable, Collection

import mlx.core as mx
import numpy as np
import pytest

from tests.msl.conftest import KernelFactory
from tests.msl.memory import as_float64, contents
from tests.msl.run_body import FLOATS, INTEGERS, LANES, Array, run
from tests.msl.source import ATTRIBUTES


def by_lane(metal_kernel: KernelFactory, expressions: Collection[str], x: mx.array) -> Array:
    """Every expression's value in every lane of two simdgroups: [expression, simdgroup, lane]."""
    source = "\n".join(f"out[{64 * n} + i] = {e};" for n, e in enumerate(expressions))
    shape = (len(expressions), 2, 32)
    return contents(run(metal_kernel, source, [x], threads=64, shape=shape, dtype=x.dtype))


def test_thread_attributes(metal_kernel: KernelFactory) -> None:
    grid, group = (7, 5, 3), (4, 2, 2)
    width = 3 * len(ATTRIBUTES)
    stores: list[str] = []
    for n, (name, kind, _) in enumerate(ATTRIBUTES):
        for axis in range(3):
            value = f"{name}[{axis}]" if kind == "uint3" else name
            stores.append(f"out[p * {width} + {3 * n + axis}] = {value};")
    kernel = metal_kernel(
        name="attributes",
        input_names=[],
        output_names=["out"],
        source="uint3 t = thread_position_in_grid; uint p = t.x + 7 * (t.y + 5 * t.z);\n"
        + "\n".join(stores),
    )
    shape = (grid[2], grid[1], grid[0], len(ATTRIBUTES), 3)
    (out,) = kernel(
        inputs=[], grid=grid, threadgroup=group, output_shapes=[shape], output_dtypes=[mx.uint32]
    )
    found = {name: contents(out)[:, :, :, n] for n, (name, _, _) in enumerate(ATTRIBUTES)}
    z, y, x = np.indices(shape[:3])
    position = np.stack([x, y, z], axis=-1)
    first = position // group * np.array(group)
    size = np.minimum(np.array(grid) - first, group)
    inside = position - first
    index = inside[..., 0] + size[..., 0] * (inside[..., 1] + size[..., 1] * inside[..., 2])
    groups = -(-np.array(grid) // group)
    threads = size.prod(-1)
    expected = {
        "dispatch_threads_per_threadgroup": np.broadcast_to(group, position.shape),
        "grid_size": np.broadcast_to(grid, position.shape),
        "quadgroup_index_in_threadgroup": index // 4,
        "quadgroups_per_threadgroup": -(-threads // 4),
        "simdgroup_index_in_threadgroup": index // 32,
        "simdgroups_per_threadgroup": -(-threads // 32),
        "thread_index_in_quadgroup": index % 4,
        "thread_index_in_simdgroup": index % 32,
        "thread_index_in_threadgroup": index,
        "thread_position_in_grid": position,
        "thread_position_in_threadgroup": inside,
        "threadgroup_position_in_grid": position // group,
        "threadgroups_per_grid": np.broadcast_to(groups, position.shape),
        "threads_per_grid": np.broadcast_to(grid, position.shape),
        "threads_per_simdgroup": np.full(shape[:3], 32),
        "threads_per_threadgroup": size,
    }
    for name, value in expected.items():
        wide = value if value.ndim == 4 else np.repeat(value[..., None], 3, axis=-1)
        np.testing.assert_array_equal(found[name], wide, err_msg=name)


REDUCTIONS: dict[str, Callable[[Array], Array]] = {
    "sum": lambda x: np.sum(x, axis=-1, keepdims=True, dtype=x.dtype),
    "min": lambda x: np.min(x, axis=-1, keepdims=True),
    "max": lambda x: np.max(x, axis=-1, keepdims=True),
    "and": lambda x: np.bitwise_and.reduce(x, axis=-1, keepdims=True),
    "or": lambda x: np.bitwise_or.reduce(x, axis=-1, keepdims=True),
    "xor": lambda x: np.bitwise_xor.reduce(x, axis=-1, keepdims=True),
    "product": lambda x: np.prod(x, axis=-1, keepdims=True, dtype=x.dtype),
}


@pytest.mark.parametrize(("scope", "size"), [("simd", 32), ("quad", 4)])
def test_reductions_of_integers(scope: str, size: int, metal_kernel: KernelFactory) -> None:
    x = contents(INTEGERS).reshape(-1, size)
    found = by_lane(metal_kernel, [f"{scope}_{name}(a[i])" for name in REDUCTIONS], INTEGERS)
    for values, (name, reduce) in zip(found, REDUCTIONS.items(), strict=True):
        expected = np.repeat(reduce(x), size, axis=-1).reshape(2, 32)
        np.testing.assert_array_equal(values, expected, err_msg=name)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_reductions_of_floats(dtype: mx.Dtype, metal_kernel: KernelFactory) -> None:
    """A sum has 31 roundings whatever its order; extremes are exact."""
    x = FLOATS.astype(dtype)
    source = "out[i] = simd_sum(a[i]); out[64 + i] = simd_max(a[i]);"
    out = run(metal_kernel, source, [x], threads=64, shape=(2, 2, 32), dtype=dtype)
    sums, largest = as_float64(out)
    wide = as_float64(x).reshape(2, 32)
    epsilon = {mx.float32: 2.0**-24, mx.float16: 2.0**-11, mx.bfloat16: 2.0**-8}[dtype]
    bound = 31 * epsilon * np.abs(wide).sum(-1, keepdims=True)
    assert (np.abs(sums - wide.sum(-1, keepdims=True)) <= bound).all()
    assert (largest == wide.max(-1, keepdims=True)).all()


def test_prefixes(metal_kernel: KernelFactory) -> None:
    x = contents(INTEGERS).reshape(2, 32)
    names = ["inclusive", "exclusive"]
    found = by_lane(metal_kernel, [f"simd_prefix_{n}_sum(a[i])" for n in names], INTEGERS)
    inclusive = np.cumsum(x, axis=-1, dtype=np.int32)
    np.testing.assert_array_equal(found, [inclusive, inclusive - x])


# Which lane every lane reads; -1 where Metal leaves the value open.
SHUFFLES = {
    "simd_shuffle(a[i], (7 * l) % 32)": 7 * LANES % 32,
    "simd_shuffle_xor(a[i], 5)": LANES ^ 5,
    "simd_shuffle_down(a[i], 3)": np.where(LANES < 29, LANES + 3, -1),
    "simd_shuffle_up(a[i], 2)": np.where(LANES < 2, -1, LANES - 2),
    "simd_shuffle_rotate_down(a[i], 3)": (LANES + 3) % 32,
    "simd_shuffle_rotate_up(a[i], 3)": (LANES - 3) % 32,
    "simd_shuffle_and_fill_up(a[i], a[i], 4)": (LANES - 4) % 32,
    "simd_shuffle_and_fill_down(a[i], a[i], 4)": (LANES + 4) % 32,
    "simd_broadcast(a[i], 9)": 0 * LANES + 9,
    "simd_broadcast_first(a[i])": 0 * LANES,
    "quad_broadcast(a[i], 2)": LANES // 4 * 4 + 2,
    "quad_shuffle(a[i], 3 - l % 4)": LANES // 4 * 4 + 3 - LANES % 4,
    "quad_shuffle_xor(a[i], 1)": LANES ^ 1,
}


def test_shuffles(metal_kernel: KernelFactory) -> None:
    found = by_lane(metal_kernel, SHUFFLES, FLOATS)
    x = contents(FLOATS).reshape(2, 32)
    for values, (expression, lanes) in zip(found, SHUFFLES.items(), strict=True):
        is_known = lanes >= 0
        np.testing.assert_array_equal(
            values[:, is_known], x[:, lanes[is_known]], err_msg=expression
        )


def test_votes(metal_kernel: KernelFactory) -> None:
    out = run(
        metal_kernel,
        "bool odd = a[i] & 1; out[5 * i] = uint(ulong(simd_ballot(odd)));"
        "out[5 * i + 1] = simd_any(odd); out[5 * i + 2] = simd_all(odd);"
        "out[5 * i + 3] = simd_all(a[i] > 0); out[5 * i + 4] = simd_is_first();",
        [INTEGERS],
        threads=64,
        shape=(2, 32, 5),
        dtype=mx.uint32,
    )
    odd = contents(INTEGERS).reshape(2, 32) & 1
    expected = np.zeros((2, 32, 5), np.uint32)
    expected[..., 0] = (odd.astype(np.uint64) << LANES.astype(np.uint64)).sum(-1)[:, None]
    expected[..., 1:4] = [1, 0, 1]
    expected[:, 0, 4] = 1
    np.testing.assert_array_equal(contents(out), expected)


def test_tree_reduction_with_1024_threads(metal_kernel: KernelFactory) -> None:
    source = """
        threadgroup float t[1024];
        const uint n = thread_index_in_threadgroup;
        t[n] = a[i];
        for (uint s = 512; s > 0; s /= 2) {
            threadgroup_barrier(mem_flags::mem_threadgroup);
            if (n < s) t[n] += t[n + s];
        }
        if (n == 0) out[threadgroup_position_in_grid.x] = t[0];
    """
    x = mx.random.normal((3, 1024), key=mx.random.key(8))
    out = run(
        metal_kernel, source, [x], threads=3072, shape=(3,), dtype=mx.float32, threadgroup=1024
    )
    wide = as_float64(x)
    assert (np.abs(as_float64(out) - wide.sum(-1)) <= 10 * 2.0**-24 * np.abs(wide).sum(-1)).all()
