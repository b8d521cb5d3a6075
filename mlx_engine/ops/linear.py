"""Products with the dense weights: FP8 read packed, bf16 read as it is and multiplied in f32.

Shapes: T tokens, K inputs, N outputs, G groups. The kernels are in metal/linear.metal: up to 8 rows
read every byte of the weight once, up to 32 once for each 8, more go through simdgroup matrices.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from mlx_engine.ops import launch, linear_native
from mlx_engine.weights import Fp8

# Rows from which a CPU gains by unpacking or turning the weight once, instead of in every product.
_FEW_ROWS = 4

# Most rows of the kernel that is bound by the weight's bytes, and most that it makes at once.
MAX_ROWS = 32
_BLOCK_ROWS = 8
# A simdgroup makes four outputs; so many simdgroups keep the memory of 80 cores busy.
OUTPUTS = 4
_BUSY_SIMDGROUPS = 1280
_MAX_SPLIT = 8
PIECE_BYTES = 16
# Outputs each way and threads of a threadgroup of the kernel for more rows.
BLOCK = 64
_BLOCK_THREADS = 128


@launch.falls_back
def fp8_linear(x: mx.array, w: Fp8) -> mx.array:
    """x [T, K] times w [N, K] transposed, accumulated in f32: [T, N] in x's dtype."""
    if launch.is_on("linear"):
        return _fp8_metal(x, w)
    return fp8_linear_reference(x, w)


@launch.falls_back
def fp8_linear_pair(x: mx.array, a: Fp8, b: Fp8) -> tuple[mx.array, mx.array]:
    """x [T, K] times two weights of the same K, each transposed: [T, N_a] and [T, N_b].

    A few rows take one launch.
    """
    if launch.is_on("linear") and x.shape[0] <= MAX_ROWS:
        return _fp8_pair_metal(x, a, b)
    return fp8_linear(x, a), fp8_linear(x, b)


@launch.falls_back
def grouped_output(o: mx.array, wo_a: Fp8, wo_b: Fp8) -> mx.array:
    """The output projection: heads in G groups, each through its own wo_a, then wo_b.

    o: [T, H, head_dim] -> [T, D]. Group g holds heads g*H/G up to (g+1)*H/G (section 3.4).
    """
    if not launch.is_on("linear"):
        return grouped_output_reference(o, wo_a, wo_b)
    T, G = o.shape[0], wo_a.weight.shape[0]
    if _is_few_native(o):
        return linear_native.fp8_rows(linear_native.fp8_rows(o, wo_a), wo_b)
    y = _grouped_metal(o.reshape(T, G, -1), wo_a)  # [T, G, o_lora_rank]
    return _fp8_metal(y.reshape(T, -1), wo_b)


@launch.falls_back
def linear_f32(x: mx.array, weight: mx.array) -> mx.array:
    """x [T, K] times a bf16 or f32 weight [N, K] transposed, all in f32: f32 [T, N]."""
    if launch.is_on("linear"):
        return _linear_f32_metal(x, weight)
    return linear_f32_reference(x, weight)


@launch.falls_back
def linear_f32_pair(x: mx.array, a: mx.array, b: mx.array) -> tuple[mx.array, mx.array]:
    """x [T, K] times two weights of one dtype and K, each transposed: f32 [T, N_a] and [T, N_b].

    A few rows take one launch.
    """
    if launch.is_on("linear") and x.shape[0] <= MAX_ROWS:
        return _linear_f32_pair_metal(x, a, b)
    return linear_f32(x, a), linear_f32(x, b)


def fp8_linear_reference(x: mx.array, w: Fp8) -> mx.array:
    """`fp8_linear` in MLX's operations; x [.., T, K] and w [.., N, K] may have leading groups."""
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


def grouped_output_reference(o: mx.array, wo_a: Fp8, wo_b: Fp8) -> mx.array:
    """`grouped_output` in MLX's operations."""
    T = o.shape[0]
    G = wo_a.weight.shape[0]
    grouped = o.reshape(T, G, -1).swapaxes(0, 1)  # [G, T, H*head_dim/G]
    y = fp8_linear_reference(grouped, wo_a).swapaxes(0, 1)  # [T, G, o_lora_rank]
    return fp8_linear_reference(y.reshape(T, -1), wo_b)


def linear_f32_reference(x: mx.array, weight: mx.array) -> mx.array:
    """`linear_f32` in MLX's operations, which widen the weight."""
    return times_transposed(x.astype(mx.float32), weight.astype(mx.float32))


def times_transposed(x: mx.array, w: mx.array) -> mx.array:
    """x [.., T, K] times w [.., N, K] transposed, both of one dtype: [.., T, N]."""
    turned = w.swapaxes(-1, -2)
    if mx.default_device() == mx.cpu and x.shape[-2] >= _FEW_ROWS:
        # MLX's product on the CPU takes half the time when the right side's rows are contiguous.
        turned = mx.contiguous(turned)
    return x @ turned


def _packed_product(x: mx.array, w: Fp8) -> mx.array:
    operands = x, w.weight, w.row_scale
    if x.ndim > 2 and mx.default_device() == mx.gpu and mx.cuda.is_available():
        # In CUDA MLX multiplies no stacks of packed weights.
        return mx.stack([_mxfp8_product(*group) for group in zip(*operands, strict=True)])
    return _mxfp8_product(*operands)


def _mxfp8_product(x: mx.array, codes: mx.array, scales: mx.array) -> mx.array:
    return mx.quantized_matmul(
        x, codes, scales, transpose=True, group_size=32, bits=8, mode="mxfp8"
    )


# In the bodies TW is the type of a weight's value and G the number of groups.
_FP8_SCALE = "tile_scale(scale, K)"
_ROWS_CALL = """
    few_rows<T, TW, M, {N}, K, G, SPLIT, TEAMS>(
        x, (const device uint4*){weight}, {scale}, {out}, uint(x_shape[0]), scratch, {at},
        simdgroup_index_in_threadgroup, thread_index_in_simdgroup);"""
_ROWS_BODY = """
    threadgroup float scratch[SIMD * SPLIT * TEAMS];
    const uint3 at = threadgroup_position_in_grid;"""
_TILES_BODY = """
    threadgroup C left[BLOCK * pitch<C>()];
    threadgroup C right[BLOCK * pitch<C>()];
    threadgroup float stripes[8 * BLOCK_THREADS];
    many_rows<T, TW, C, N, K, G>(
        x, (const device uint4*)weight, {scale}, out, uint(x_shape[0]), left, right, stripes,
        threadgroup_position_in_grid, thread_index_in_threadgroup,
        simdgroup_index_in_threadgroup, thread_index_in_simdgroup);"""


def _rows_body(scale: str) -> str:
    call = _ROWS_CALL.format(N="N", weight="weight", scale=scale, out="out", at="at")
    return _ROWS_BODY + call


def _pair_body(scale_a: str, scale_b: str) -> str:
    a = _ROWS_CALL.format(N="NA", weight="weight_a", scale=scale_a, out="out_a", at="at")
    b = _ROWS_CALL.format(
        N="NB", weight="weight_b", scale=scale_b, out="out_b", at="at - uint3(FIRST, 0, 0)"
    )
    return _ROWS_BODY + f"\n    if (at.x < FIRST) {{{a}\n    }} else {{{b}\n    }}"


_FP8_ROWS = launch.Kernel(
    "linear", "fp8_rows", ("x", "weight", "scale"), ("out",), _rows_body(_FP8_SCALE)
)
_FP8_PAIR = launch.Kernel(
    "linear",
    "fp8_rows_pair",
    ("x", "weight_a", "scale_a", "weight_b", "scale_b"),
    ("out_a", "out_b"),
    _pair_body("tile_scale(scale_a, K)", "tile_scale(scale_b, K)"),
)
_FP8_TILES = launch.Kernel(
    "linear",
    "fp8_tiles",
    ("x", "weight", "scale"),
    ("out",),
    _TILES_BODY.format(scale=_FP8_SCALE),
)
_PLAIN_ROWS = launch.Kernel(
    "linear", "plain_rows", ("x", "weight"), ("out",), _rows_body("NoScale()")
)
_PLAIN_PAIR = launch.Kernel(
    "linear",
    "plain_rows_pair",
    ("x", "weight_a", "weight_b"),
    ("out_a", "out_b"),
    _pair_body("NoScale()", "NoScale()"),
)
_PLAIN_TILES = launch.Kernel(
    "linear", "plain_tiles", ("x", "weight"), ("out",), _TILES_BODY.format(scale="NoScale()")
)


def _is_few_native(x: mx.array) -> bool:
    is_native = launch.is_native("linear") and x.dtype == mx.bfloat16
    return is_native and x.shape[0] <= linear_native.MAX_ROWS


def _fp8_metal(x: mx.array, w: Fp8) -> mx.array:
    T, K = x.shape
    if _is_few_native(x):
        return linear_native.fp8_rows(x, w)
    return _grouped_metal(x.reshape(T, 1, K), w).reshape(T, -1)


def _grouped_metal(x: mx.array, w: Fp8) -> mx.array:
    """x [T, G, K] times each group's w [G, N, K], or [N, K] for one group: [T, G, N]."""
    T, G, K = x.shape
    N = w.weight.shape[-2]
    assert w.weight.size * 4 == G * N * K, f"x {x.shape} does not fit the weight {w.weight.shape}"
    if launch.is_native("linear") and x.dtype == mx.bfloat16:
        few = T <= linear_native.MAX_ROWS
        product = linear_native.fp8_rows if few else linear_native.fp8_product
        return product(x, w).reshape(T, G, N)
    inputs = (x, w.weight, w.scale)
    if T <= MAX_ROWS:
        (out,) = _rows(_FP8_ROWS, inputs, mx.uint8, T, (N,), K, x.dtype, G)
        return out
    return _tiles(_FP8_TILES, inputs, mx.uint8, x.dtype, (T, G, N), K, x.dtype)


def _fp8_pair_metal(x: mx.array, a: Fp8, b: Fp8) -> tuple[mx.array, mx.array]:
    if launch.is_native("linear") and x.dtype == mx.bfloat16:
        return linear_native.fp8_rows_pair(x, a, b)
    T, K = x.shape
    N = a.weight.shape[0], b.weight.shape[0]
    inputs = (x, a.weight, a.scale, b.weight, b.scale)
    out_a, out_b = _rows(_FP8_PAIR, inputs, mx.uint8, T, N, K, x.dtype)
    return out_a.reshape(T, -1), out_b.reshape(T, -1)


def _linear_f32_metal(x: mx.array, weight: mx.array) -> mx.array:
    T, K = x.shape
    N = weight.shape[0]
    if T <= MAX_ROWS:
        (out,) = _rows(_PLAIN_ROWS, (x, weight), weight.dtype, T, (N,), K, mx.float32)
    else:
        staged = x.dtype if x.dtype == weight.dtype else mx.float32
        out = _tiles(_PLAIN_TILES, (x, weight), weight.dtype, staged, (T, 1, N), K, mx.float32)
    return out.reshape(T, N)


def _linear_f32_pair_metal(x: mx.array, a: mx.array, b: mx.array) -> tuple[mx.array, mx.array]:
    T, K = x.shape
    N = a.shape[0], b.shape[0]
    out_a, out_b = _rows(_PLAIN_PAIR, (x, a, b), a.dtype, T, N, K, mx.float32)
    return out_a.reshape(T, -1), out_b.reshape(T, -1)


@dataclass(frozen=True)
class FewRows:
    """How few rows are launched: blocks of M rows, threadgroups for each weight's outputs, teams of
    a threadgroup, and the simdgroups of a team, which share K.
    """

    M: int
    blocks: int
    groups: tuple[int, ...]
    teams: int
    split: int


def few_rows(T: int, outputs: Sequence[int], row_bytes: int, G: int = 1) -> FewRows:
    """The launch for T rows and weights of so many outputs, their rows of so many bytes."""
    M = min(T, _BLOCK_ROWS)
    split = _split(G * sum(outputs), row_bytes // PIECE_BYTES)
    teams = max(1, 4 // split)
    groups = tuple(-(-N // (OUTPUTS * teams)) for N in outputs)
    return FewRows(M, -(-T // M), groups, teams, split)


def _rows(
    kernel: launch.Kernel,
    inputs: Sequence[mx.array],
    weight_dtype: mx.Dtype,
    T: int,
    outputs: tuple[int, ...],
    K: int,
    dtype: mx.Dtype,
    G: int = 1,
) -> list[mx.array]:
    """Launch a kernel of few rows for one weight of N outputs or two: [T, G, N] each."""
    shape = few_rows(T, outputs, K * weight_dtype.size, G)
    M, split, teams = shape.M, shape.split, shape.teams
    threads, groups = 32 * split * teams, shape.groups
    if len(outputs) == 1:
        sizes = [("N", outputs[0])]
    else:
        sizes = [("NA", outputs[0]), ("NB", outputs[1]), ("FIRST", groups[0])]
    return kernel(
        inputs,
        template=[
            ("T", inputs[0].dtype),
            ("TW", weight_dtype),
            *(("M", M), ("K", K), ("G", G), ("SPLIT", split), ("TEAMS", teams)),
            *sizes,
        ],
        grid=(threads * sum(groups), G, shape.blocks),
        threadgroup=(threads, 1, 1),
        shapes=[(T, G, N) for N in outputs],
        dtypes=[dtype] * len(outputs),
    )


def _split(outputs: int, pieces: int) -> int:
    """How many simdgroups share K: enough to keep the memory busy, each lane with a piece."""
    split = 1
    while (
        split < _MAX_SPLIT
        and outputs * split < OUTPUTS * _BUSY_SIMDGROUPS
        and pieces >= 2 * split * 32
    ):
        split *= 2
    return split


def _tiles(
    kernel: launch.Kernel,
    inputs: Sequence[mx.array],
    weight_dtype: mx.Dtype,
    staged: mx.Dtype,
    shape: tuple[int, int, int],
    K: int,
    dtype: mx.Dtype,
) -> mx.array:
    """Launch a kernel of many rows with operands staged in a type: [T, G, N]."""
    T, G, N = shape
    (out,) = kernel(
        inputs,
        template=[
            *(("T", inputs[0].dtype), ("TW", weight_dtype), ("C", staged)),
            *(("N", N), ("K", K), ("G", G)),
        ],
        grid=(_BLOCK_THREADS * -(-T // BLOCK), -(-N // BLOCK), G),
        threadgroup=(_BLOCK_THREADS, 1, 1),
        shapes=[shape],
        dtypes=[dtype],
    )
    return out


@launch.probe("linear")
def agrees() -> bool:
    """Whether few and many rows of every kind of weight give the reference's results."""
    G, N, K = 2, 33, 64
    codes = (mx.arange(G * N * K) * 37 % 127 + 128 * (mx.arange(G * N * K) % 2)).astype(mx.uint8)
    scale = (mx.arange(G * 2 * K // 32) % 3 + 120).astype(mx.uint8).reshape(G, 2, K // 32)
    stacked = Fp8(codes.view(mx.uint32).reshape(G, N, K // 4), scale)
    one, other = (Fp8(stacked.weight[g], stacked.scale[g]) for g in range(G))
    bf16 = mx.sin(mx.arange(N * K)).reshape(N, K).astype(mx.bfloat16)
    for T in (1, MAX_ROWS + 1):
        for dtype in (mx.bfloat16, mx.float32):
            x = mx.cos(mx.arange(T * G * K)).reshape(T, G, K).astype(dtype)
            pairs = [
                (_grouped_metal(x, stacked)[:, g], fp8_linear_reference(x[:, g], w))
                for g, w in enumerate((one, other))
            ]
            pairs.append((_linear_f32_metal(x[:, 0], bf16), linear_f32_reference(x[:, 0], bf16)))
            if T == 1:
                both = _fp8_pair_metal(x[:, 0], one, other)
                pairs += [
                    (y, fp8_linear_reference(x[:, 0], w))
                    for y, w in zip(both, (one, other), strict=True)
                ]
                plain = bf16, bf16[: N // 2]
                both = _linear_f32_pair_metal(x[:, 0], *plain)
                pairs += [
                    (y, linear_f32_reference(x[:, 0], w)) for y, w in zip(both, plain, strict=True)
                ]
            for ours, reference in pairs:
                rounding = 2.0**-7 if ours.dtype == mx.bfloat16 else 2.0**-16
                limit = rounding * mx.max(mx.abs(reference))
                if not mx.all(mx.abs(ours - reference) <= limit).item():
                    return False
    return True
