"""Hyper-connections: kernels against float64 and against MLX's operations."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_engine.ops import launch
from mlx_engine.ops.mhc import (
    MhcSublayer,
    Mixing,
    agrees,
    mhc_between,
    mhc_collapse_norm,
    mhc_enter,
    mhc_expand,
)
from mlx_engine.ops.mhc_bytes import (
    mhc_between_traffic,
    mhc_collapse_norm_traffic,
    mhc_enter_traffic,
    mhc_expand_traffic,
)
from mlx_engine.weights import MhcWeights
from tests.kernels.counted import Launches, check_traffic
from tests.msl.emulator import EmulatedKernel
from tests.msl.memory import as_float64

HC, COLUMNS = 4, 24
# The first is large enough to be missed; the second is the released one.
HC_EPS, NORM_EPS = 0.02, 1e-20
DTYPES = [mx.bfloat16, mx.float32]
# What one rounding to the type costs at most: 8 significant bits, and 24.
ROUNDING = {mx.bfloat16: 2.0**-8, mx.float32: 2.0**-24}
F32 = ROUNDING[mx.float32]

# Tokens, channels, Sinkhorn rounds: groups of up to 8 tokens, slices of 64 channels, and the
# released width and rounds; after few rounds each of them shows.
SIZES = [
    *[(1, 32, 2), (3, 96, 3), (8, 64, 2), (17, 160, 2), (31, 64, 1), (33, 32, 2)],
    *[(63, 32, 1), (65, 64, 2), (127, 32, 1), (129, 32, 2), (1, 5120, 20), (8, 5120, 20)],
]


def rows(seed: int, *shape: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


def sublayer(D: int, *, spread: float = 1.0, iters: int = 3, dtype: mx.Dtype) -> MhcSublayer:
    """Weights whose 24 values have about that spread, so that the gates differ."""
    w = MhcWeights(
        fn=rows(1, COLUMNS, HC * D) * (HC * D) ** -0.5,
        base=spread * rows(2, COLUMNS),
        scale=mx.array([1.5, 0.5, 1.0]),
    )
    return MhcSublayer(w, 1 + 0.2 * rows(3, D).astype(dtype), iters, HC_EPS, NORM_EPS)


def mixing(T: int) -> Mixing:
    """Coefficients as a sublayer has them."""
    pre, comb = (mx.softmax(rows(4 + n, T, n, HC), axis=-1) for n in (1, HC))
    return Mixing(pre[:, 0], 2 * mx.sigmoid(rows(9, T, HC)), comb)


def check_coefficients(found: Mixing, streams: mx.array, to: MhcSublayer) -> None:
    """Within what f32 sums leave of the 24 values, and of the rounds after them.

    A Sinkhorn round does not enlarge relative errors of the matrix, so those of all rounds add up.
    """
    T = streams.shape[0]
    flat, fn, base = (as_float64(a) for a in (streams.reshape(T, -1), to.w.fn, to.w.base))
    scale = np.repeat(as_float64(to.w.scale), [HC, HC, HC * HC])
    r = 1 / np.sqrt((flat**2).mean(-1, keepdims=True) + NORM_EPS)
    m = flat @ fn.T * r * scale + base
    size = np.abs(flat) @ np.abs(fn).T * r * np.abs(scale) + np.abs(base)
    error = ((flat.shape[1] + 8) * F32 * size).max()
    gates = 1 / (1 + np.exp(-m[:, : 2 * HC]))
    c = m[:, 2 * HC :].reshape(T, HC, HC)
    c = np.exp(c - c.max(-1, keepdims=True))
    c = c / c.sum(-1, keepdims=True) + HC_EPS
    c = c / (c.sum(-2, keepdims=True) + HC_EPS)
    for _ in range(to.iters - 1):
        c = c / (c.sum(-1, keepdims=True) + HC_EPS)
        c = c / (c.sum(-2, keepdims=True) + HC_EPS)
    # The exponential errs by its argument's rounding too.
    relative = 2 * error + np.abs(m).max() * 4 * F32 + (2 * to.iters * 6 + 16) * F32
    for values, exact in (
        (found.pre, gates[:, :HC] + HC_EPS),
        (found.post, 2 * gates[:, HC:]),
        (found.comb, c),
    ):
        assert values.dtype == mx.float32
        assert (np.abs(as_float64(values) - exact) <= relative * np.abs(exact)).all()


def check_input(x: mx.array, streams: mx.array, pre: mx.array, to: MhcSublayer) -> None:
    """Within three roundings to the type: of the sum, of the norm through it, and of the result."""
    values, weight = as_float64(streams), as_float64(to.norm_weight)
    collapsed = np.einsum("tk,tkd->td", as_float64(pre), values)
    size = np.einsum("tk,tkd->td", np.abs(as_float64(pre)), np.abs(values))
    r = 1 / np.sqrt((collapsed**2).mean(-1, keepdims=True) + NORM_EPS)
    exact = collapsed * r * weight
    bound = 3.1 * ROUNDING[x.dtype] * np.abs(exact) + 8 * F32 * size * r * np.abs(weight)
    bound += x.shape[-1] * F32 * np.abs(exact)
    assert x.dtype == streams.dtype
    assert (np.abs(as_float64(x) - exact) <= bound).all()


def check_streams(found: mx.array, h: mx.array, streams: mx.array, last: Mixing) -> None:
    """Within a sum of five products and one rounding."""
    post, comb, old, new = (as_float64(a) for a in (last.post, last.comb, streams, h))
    exact = post[:, :, None] * new[:, None] + np.einsum("tjk,tjd->tkd", comb, old)
    size = np.abs(post[:, :, None] * new[:, None])
    size += np.einsum("tjk,tjd->tkd", np.abs(comb), np.abs(old))
    assert found.dtype == streams.dtype
    bound = 1.01 * ROUNDING[found.dtype] * np.abs(exact) + 8 * F32 * size
    assert (np.abs(as_float64(found) - exact) <= bound).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("T", "D", "iters"), SIZES)
def test_between(T: int, D: int, iters: int, dtype: mx.Dtype, kernels_on: Launches) -> None:
    """Input and coefficients are checked for the streams that the kernel itself rounded."""
    h, streams = rows(T, T, D, dtype=dtype), rows(D, T, HC, D, dtype=dtype)
    to, last, pre = sublayer(D, iters=iters, dtype=dtype), mixing(T), mx.sigmoid(rows(5, T, HC))
    found, x, coefficients = mhc_between(h, streams, last, pre, to)
    check_streams(found, h, streams, last)
    check_input(x, found, pre, to)
    check_coefficients(coefficients, found, to)
    sizes = {"value_bytes": dtype.size, "norm_bytes": dtype.size}
    check_traffic(kernels_on, *mhc_between_traffic(T, D, **sizes))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("T", "D", "iters"), [(3, 96, 3), (9, 64, 1)])
def test_each_step_alone(T: int, D: int, iters: int, dtype: mx.Dtype, kernels_on: Launches) -> None:
    h, streams = rows(T, T, D, dtype=dtype), rows(D, T, HC, D, dtype=dtype)
    to, last = sublayer(D, iters=iters, dtype=mx.bfloat16), mixing(T)
    check_streams(mhc_expand(h, streams, last.post, last.comb), h, streams, last)
    check_input(
        mhc_collapse_norm(streams, last.pre, to.norm_weight, NORM_EPS), streams, last.pre, to
    )
    x, coefficients = mhc_enter(streams, last.pre, to)
    check_input(x, streams, last.pre, to)
    check_coefficients(coefficients, streams, to)
    check_traffic(
        kernels_on,
        mhc_expand_traffic(T, D, value_bytes=dtype.size),
        mhc_collapse_norm_traffic(T, D, value_bytes=dtype.size),
        *mhc_enter_traffic(T, D, value_bytes=dtype.size),
    )


@pytest.mark.parametrize(("D", "is_fitting"), [(8160, True), (8192, False)])
def test_a_token_too_wide_for_a_threadgroup_stays_with_the_reference(
    D: int, is_fitting: bool, kernels_on: Launches
) -> None:
    """The emulator refuses a threadgroup that is too large."""
    streams, pre, to = rows(1, 1, HC, D), mixing(1).pre, sublayer(D, dtype=mx.bfloat16)
    check_input(mhc_collapse_norm(streams, pre, to.norm_weight, NORM_EPS), streams, pre, to)
    assert kernels_on is None or bool(kernels_on) == is_fitting


def test_saturated_gates(kernels_on: Launches) -> None:
    """Values so far apart that gates are 0 or 1 and the matrix is nearly a permutation."""
    streams, to = rows(1, 3, HC, 96), sublayer(96, spread=60, dtype=mx.bfloat16)
    assert np.abs(as_float64(to.w.base)).max() > 100  # beyond f32's exponential
    _, coefficients = mhc_enter(streams, mixing(3).pre, to)
    check_coefficients(coefficients, streams, to)


def test_silent_streams(kernels_on: Launches) -> None:
    """Zeros stay zeros, and the bases alone decide."""
    streams, to = mx.zeros((3, HC, 96)), sublayer(96, dtype=mx.bfloat16)
    x, coefficients = mhc_enter(streams, mixing(3).pre, to)
    assert (x == 0).all().item()
    check_coefficients(coefficients, streams, to)


def test_the_first_layer_reads_stream_0(kernels_on: Launches) -> None:
    """And streams that are a slice of more tokens."""
    streams, to = rows(1, 4, HC, 96)[1:], sublayer(96, dtype=mx.bfloat16)
    pre = mx.zeros((3, HC)) + (mx.arange(HC) == 0)
    x, _ = mhc_enter(streams, pre, to)
    only = mx.fast.rms_norm(streams[:, 0], to.norm_weight.astype(mx.float32), NORM_EPS)
    assert mx.allclose(x, only, rtol=1e-5, atol=1e-6).item()


def test_the_self_test_sees_a_wrong_kernel(kernels_on: Launches) -> None:
    assert agrees()
    if kernels_on is None:
        pytest.skip("a GPU's kernels are not wrong on purpose")

    def wrong(**arguments: Any) -> Callable[..., list[mx.array]]:
        kernel = EmulatedKernel(**arguments)

        def run(**call: Any) -> list[mx.array]:
            return [1.1 * out for out in kernel(**call)]

        return run

    with launch.using(wrong):
        assert not agrees()
