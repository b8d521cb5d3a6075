"""Engram: n-gram memory rows, gated into each stream (section 4.4).

Shapes: T tokens, hc streams, D hidden_size, E the channels of a token's rows together. With the
kernels of metal/engram.metal three launches: rows, the product with wkv, gate.
"""

from math import gcd

import mlx.core as mx

from mlx_engine.devices import ONE, Devices
from mlx_engine.ops import launch
from mlx_engine.ops.linear import fp8_linear, fp8_linear_reference
from mlx_engine.weights import EngramWeights, Fp8

# Values that a thread takes at once, and the most threads of a stream's gate: two turns for 5,120.
VALUES = 4
_MAX_THREADS = 640
_ROW_THREADS = 128


def engram_gate(
    streams: mx.array,
    codes: mx.array,
    scales: mx.array,
    w: EngramWeights,
    norm_eps: float,
    devices: Devices = ONE,
) -> mx.array:
    """Add the value of a token's memory rows to every stream that its key agrees with.

    streams: [T, hc, D]; codes: uint8 [T, columns, head_dim] e4m3; scales: uint8
    [T, columns, head_dim/32] e8m0 -> [T, hc, D]. The columns are this device's, as wkv's inputs.
    """
    kv = fp8_linear(memory_rows(codes, scales, streams.dtype), w.wkv)
    # Nothing of the layers below is in it.
    return gate_value(streams, devices.sum(kv, after=streams), w, norm_eps)


@launch.falls_back
def memory_rows(codes: mx.array, scales: mx.array, dtype: mx.Dtype) -> mx.array:
    """The dequantised rows of each token, one after the other: [T, E] in an activation's dtype."""
    compute = _rows_metal if launch.is_on("engram") else _rows_reference
    return compute(codes, scales, dtype)


@launch.falls_back
def gate_value(streams: mx.array, kv: mx.array, w: EngramWeights, norm_eps: float) -> mx.array:
    """The second half of `engram_gate`: kv [T, (hc+1)*D] is a key for each stream, then a value."""
    compute = _gate_metal if launch.is_on("engram") else _gate_reference
    return compute(streams, kv, w, norm_eps)


def engram_gate_reference(
    streams: mx.array, codes: mx.array, scales: mx.array, w: EngramWeights, norm_eps: float
) -> mx.array:
    """`engram_gate` in MLX's operations."""
    kv = fp8_linear_reference(_rows_reference(codes, scales, streams.dtype), w.wkv)
    return _gate_reference(streams, kv, w, norm_eps)


def _rows_reference(codes: mx.array, scales: mx.array, dtype: mx.Dtype) -> mx.array:
    rows = mx.dequantize(
        codes.view(mx.uint32), scales, group_size=32, bits=8, mode="mxfp8", dtype=mx.float32
    )
    return rows.reshape(codes.shape[0], -1).astype(dtype)


def _gate_reference(streams: mx.array, kv: mx.array, w: EngramWeights, norm_eps: float) -> mx.array:
    T, hc, D = streams.shape
    kv = kv.astype(mx.float32)
    key = kv[:, : hc * D].reshape(T, hc, D)
    value = kv[:, None, hc * D :]
    h = streams.astype(mx.float32)
    r = mx.rsqrt(mx.mean(h * h, axis=-1) + norm_eps) * mx.rsqrt(
        mx.mean(key * key, axis=-1) + norm_eps
    )
    weight = w.q_weight.astype(mx.float32) * w.k_weight.astype(mx.float32)
    dot = mx.sum(h * weight * key, axis=-1) * r * D**-0.5  # [T, hc]
    root = mx.sqrt(mx.maximum(mx.abs(dot), 1e-6))
    gate = mx.sigmoid(mx.where(dot < 0, -root, root))
    return (h + gate[..., None] * value).astype(streams.dtype)


_ROWS = launch.Kernel(
    "engram",
    "engram_rows",
    ("codes", "scales"),
    ("rows",),
    """
    engram_rows<T>(codes, scales, rows, thread_position_in_grid.x);""",
)
_GATE = launch.Kernel(
    "engram",
    "engram_gate",
    ("streams", "kv", "q_weight", "k_weight", "norm_eps"),
    ("out",),
    """
    threadgroup float scratch[SIMD];
    engram_gate<T, W, HC, D, THREADS>(
        streams, kv, q_weight, k_weight, norm_eps, out, scratch, threadgroup_position_in_grid.xy,
        thread_index_in_threadgroup, simdgroup_index_in_threadgroup, thread_index_in_simdgroup);""",
)


def gate_threads(D: int) -> int:
    """Threads of a stream's gate."""
    return min(_MAX_THREADS, -(-D // (32 * VALUES)) * 32)


def _rows_metal(codes: mx.array, scales: mx.array, dtype: mx.Dtype) -> mx.array:
    T, threads = codes.shape[0], codes.size // VALUES
    (rows,) = _ROWS(
        (codes.view(mx.uint32), scales),
        template=[("T", dtype)],
        grid=(threads, 1, 1),
        # Whole threadgroups: CUDA has no others.
        threadgroup=(gcd(threads, _ROW_THREADS), 1, 1),
        shapes=[(T, codes.size // T)],
        dtypes=[dtype],
    )
    return rows


def _gate_metal(streams: mx.array, kv: mx.array, w: EngramWeights, norm_eps: float) -> mx.array:
    T, hc, D = streams.shape
    threads = gate_threads(D)
    (out,) = _GATE(
        (streams, kv, w.q_weight, w.k_weight, norm_eps),
        template=[
            *(("T", streams.dtype), ("W", w.q_weight.dtype)),
            *(("HC", hc), ("D", D), ("THREADS", threads)),
        ],
        grid=(threads * hc, T, 1),
        threadgroup=(threads, 1, 1),
        shapes=[streams.shape],
        dtypes=[streams.dtype],
    )
    return out


@launch.probe("engram")
def agrees() -> bool:
    """Whether the kernels give the reference's results in both types of activations."""
    T, hc, D, E = 3, 4, 160, 64
    codes = (mx.arange(T * E) * 37 % 127 + 128 * (mx.arange(T * E) % 2)).astype(mx.uint8)
    codes = codes.reshape(T, 2, 32)
    scales = (mx.arange(T * 2) % 3 + 120).astype(mx.uint8).reshape(T, 2, 1)
    wave = mx.sin(mx.arange(T * (hc + 1) * D))
    q, k = (f(mx.arange(hc * D)).reshape(hc, D).astype(mx.bfloat16) for f in (mx.sin, mx.cos))
    no_product = Fp8(mx.zeros((1, 1), dtype=mx.uint32), mx.zeros((1, 1), dtype=mx.uint8))
    w = EngramWeights(no_product, q, k)
    for dtype in (mx.bfloat16, mx.float32):
        rows = _rows_metal(codes, scales, dtype)
        if not mx.array_equal(rows, _rows_reference(codes, scales, dtype)).item():
            return False
        streams = mx.cos(mx.arange(T * hc * D)).reshape(T, hc, D).astype(dtype)
        kv = wave.reshape(T, -1).astype(dtype)
        ours, reference = (f(streams, kv, w, 1e-20) for f in (_gate_metal, _gate_reference))
        limit = 2.0**-7 if dtype == mx.bfloat16 else 2.0**-16
        if not mx.all(mx.abs(ours - reference) <= limit * mx.max(mx.abs(reference))).item():
            return False
    return True
