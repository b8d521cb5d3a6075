"""Products with the dense weights: FP8 read packed, bf16 widened by the row only.

Shapes: T tokens, K inputs, N outputs, G groups.
"""

import mlx.core as mx

from mlx_engine.weights import Fp8

# Rows from which it pays on a CPU to unpack the weight once instead of in every row's product.
_UNPACK_ROWS = 4


def fp8_linear(x: mx.array, w: Fp8) -> mx.array:
    """x [.., T, K] times w [.., N, K] transposed, accumulated in f32: [.., T, N] in x's dtype."""
    if mx.default_device() == mx.gpu:
        y = mx.quantized_matmul(
            x, w.weight, w.row_scale, transpose=True, group_size=32, bits=8, mode="mxfp8"
        )
        return y.astype(x.dtype)
    # MLX's product on the CPU accumulates in its input's type.
    wide = x.astype(mx.float32)
    if x.shape[-2] < _UNPACK_ROWS:
        y = mx.quantized_matmul(
            wide, w.weight, w.row_scale, transpose=True, group_size=32, bits=8, mode="mxfp8"
        )
    else:
        unpacked = mx.dequantize(
            w.weight, w.row_scale, group_size=32, bits=8, mode="mxfp8", dtype=mx.float32
        )
        y = wide @ unpacked.swapaxes(-1, -2)
    return y.astype(x.dtype)


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
    return x.astype(mx.float32) @ weight.astype(mx.float32).T
