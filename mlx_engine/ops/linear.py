"""Products with the dense weights: FP8 read packed, bf16 widened by the row only.

Shapes: T tokens, K inputs, N outputs, G groups.
"""

import mlx.core as mx

from mlx_engine.weights import Fp8

# Rows from which a CPU gains by unpacking or turning the weight once, instead of in every product.
_FEW_ROWS = 4


def fp8_linear(x: mx.array, w: Fp8) -> mx.array:
    """x [.., T, K] times w [.., N, K] transposed, accumulated in f32: [.., T, N] in x's dtype."""
    if mx.default_device() == mx.gpu:
        return _packed_product(x, w)
    # MLX's product on the CPU accumulates in its input's type.
    wide = x.astype(mx.float32)
    if x.shape[-2] < _FEW_ROWS:
        return _packed_product(wide, w).astype(x.dtype)
    unpacked = mx.dequantize(
        w.weight, w.row_scale, group_size=32, bits=8, mode="mxfp8", dtype=mx.float32
    )
    return times_transposed(wide, unpacked).astype(x.dtype)


def times_transposed(x: mx.array, w: mx.array) -> mx.array:
    """x [.., T, K] times w [.., N, K] transposed, both of one dtype: [.., T, N]."""
    turned = w.swapaxes(-1, -2)
    if mx.default_device() == mx.cpu and x.shape[-2] >= _FEW_ROWS:
        # MLX's product on the CPU takes half the time when the right side's rows are contiguous.
        turned = mx.contiguous(turned)
    return x @ turned


def grouped_output(o: mx.array, wo_a: Fp8, wo_b: Fp8) -> mx.array:
    """The output projection: heads in G groups, each through its own wo_a, then wo_b.

    o: [T, H, head_dim] -> [T, D]. Group g holds heads g*H/G up to (g+1)*H/G (section 3.4).
    """
    T = o.shape[0]
    G = wo_a.weight.shape[0]
    grouped = o.reshape(T, G, -1).swapaxes(0, 1)  # [G, T, H*head_dim/G]
    y = fp8_linear(grouped, wo_a).swapaxes(0, 1)  # [T, G, o_lora_rank]
    return fp8_linear(y.reshape(T, -1), wo_b)


def linear_f32(x: mx.array, weight: mx.array) -> mx.array:
    """x [T, K] times a bf16 or f32 weight [N, K] transposed, all in f32: f32 [T, N]."""
    return times_transposed(x.astype(mx.float32), weight.astype(mx.float32))


def _packed_product(x: mx.array, w: Fp8) -> mx.array:
    return mx.quantized_matmul(
        x, w.weight, w.row_scale, transpose=True, group_size=32, bits=8, mode="mxfp8"
    )
