"""From products to cached rows: norms, RoPE, rounding and packing (sections 3.4 to 3.6, 3.8).

Products come before, state takes the rows after. Shapes: T tokens, Q queries (the last tokens), L
q_lora_rank, G groups of tokens, D head_dim or index_head_dim.
"""

import mlx.core as mx

from mlx_engine.formats import COMPRESSED, INDEX, WINDOW, RowFormat
from mlx_engine.ops import launch
from mlx_engine.ops.compressor import compressed_rows, pool_groups
from mlx_engine.ops.norm import rms_norm
from mlx_engine.ops.rope import Rotation, rotate

_WIDEST = 512


def attention_front(
    latent: mx.array,
    kv: mx.array,
    q_norm: mx.array,
    kv_norm: mx.array,
    at: Rotation,
    *,
    eps: float,
    fmt: RowFormat,
) -> tuple[mx.array, mx.array]:
    """The normed query latents and the packed window rows of a layer.

    latent: [Q, L], kv: [T, D], both the plain products, at: of the T positions -> [Q, L] in
    latent's dtype and uint32 [T, words].
    """
    front = attention_front_reference
    is_fitting = _is_fitting(kv) and latent.shape[-1] % 2 == 0 and latent.dtype == kv.dtype
    if launch.is_on("front") and fmt == WINDOW and is_fitting:
        front = _attention_front_metal
    return front(latent, kv, q_norm, kv_norm, at, eps=eps, fmt=fmt)


def attention_front_reference(
    latent: mx.array,
    kv: mx.array,
    q_norm: mx.array,
    kv_norm: mx.array,
    at: Rotation,
    *,
    eps: float,
    fmt: RowFormat,
) -> tuple[mx.array, mx.array]:
    """`attention_front` in MLX's operations, with any format."""
    rows = fmt.pack(rotate(rms_norm(kv, kv_norm, eps), at))
    return rms_norm(latent, q_norm, eps), rows


def pooled_rows(
    kv: mx.array,
    gate: mx.array | None,
    norm: mx.array,
    at: Rotation,
    *,
    ratio: int,
    dtype: mx.Dtype,
    eps: float,
    fmt: RowFormat,
) -> tuple[mx.array, mx.array]:
    """The normed latents of full groups, for the index keys, and their packed rows.

    kv, gate: f32 [G * ratio, D], gate None where the ratio is 1; at: of the groups' first
    positions -> [G, D] of a dtype and uint32 [G, words].
    """
    pool = pooled_rows_reference
    if launch.is_on("front") and fmt == COMPRESSED and _is_fitting(kv):
        pool = _pooled_rows_metal
    return pool(kv, gate, norm, at, ratio=ratio, dtype=dtype, eps=eps, fmt=fmt)


def pooled_rows_reference(
    kv: mx.array,
    gate: mx.array | None,
    norm: mx.array,
    at: Rotation,
    *,
    ratio: int,
    dtype: mx.Dtype,
    eps: float,
    fmt: RowFormat,
) -> tuple[mx.array, mx.array]:
    """`pooled_rows` in MLX's operations, with any format."""
    pooled = kv if gate is None else pool_groups(kv, gate, ratio)
    latent = rms_norm(pooled.astype(dtype), norm, eps)
    return latent, compressed_rows(latent, at, fmt)


def encoded_keys(
    key: mx.array, norm: mx.array, at: Rotation, *, dtype: mx.Dtype, eps: float, fmt: RowFormat
) -> tuple[mx.array, mx.array]:
    """Index keys from their product: f32 [G, D] -> codes uint32 [G, D/8], scales uint8 [G, D/32].

    Between the steps values are rounded to a dtype.
    """
    encode = encoded_keys_reference
    if launch.is_on("front") and fmt == INDEX and _is_fitting(key):
        encode = _encoded_keys_metal
    return encode(key, norm, at, dtype=dtype, eps=eps, fmt=fmt)


def encoded_keys_reference(
    key: mx.array, norm: mx.array, at: Rotation, *, dtype: mx.Dtype, eps: float, fmt: RowFormat
) -> tuple[mx.array, mx.array]:
    """`encoded_keys` in MLX's operations, with any format."""
    return fmt.encode(rotate(rms_norm(key.astype(dtype), norm, eps), at))


def _is_fitting(rows: mx.array) -> bool:
    return rows.shape[-1] % 64 == 0 and rows.shape[-1] <= _WIDEST


def _rotated(at: Rotation) -> int:
    return 2 * at.cos.shape[-2]


_BEGIN = """
threadgroup float scratch[SIMD];
const uint row = threadgroup_position_in_grid.x;
const uint thread_index = thread_index_in_threadgroup;
const uint simdgroup = simdgroup_index_in_threadgroup;
const uint lane = thread_index_in_simdgroup;
"""

_attention_front = launch.Kernel(
    "front",
    "attention_front",
    ("latent", "kv", "q_norm", "kv_norm", "cos", "sin", "eps"),
    ("normed", "packed"),
    _BEGIN
    + """
if (row < uint(kv_shape[0])) {
    device uchar* codes = reinterpret_cast<device uchar*>(packed + row * row_words(WINDOW_ROW, D));
    pad_row<WINDOW_ROW, D>(codes, thread_index);
    cached_row<T, D, R, 1, WINDOW_ROW, false>(
        kv + size_t(row) * D, kv, kv_norm, eps, cos + row * R, sin + row * R, normed, codes,
        codes + code_bytes(WINDOW_ROW, D), scratch, thread_index, simdgroup, lane);
} else {
    const size_t first = size_t(row - uint(kv_shape[0])) * L;
    normed_latent<T, L>(
        latent + first, q_norm, eps, normed + first, scratch, D / 2, thread_index, simdgroup, lane);
}
""",
)


def _attention_front_metal(
    latent: mx.array,
    kv: mx.array,
    q_norm: mx.array,
    kv_norm: mx.array,
    at: Rotation,
    *,
    eps: float,
    fmt: RowFormat,
) -> tuple[mx.array, mx.array]:
    """`attention_front` in one launch."""
    T, D = kv.shape
    Q, L = latent.shape
    normed, rows = _attention_front(
        [latent, kv, q_norm, kv_norm, at.cos, at.sin, mx.array(eps)],
        template=[("T", kv.dtype), ("L", L), ("D", D), ("R", _rotated(at))],
        grid=((T + Q) * D // 2, 1, 1),
        threadgroup=(D // 2, 1, 1),
        shapes=[(Q, L), (T, fmt.words(D))],
        dtypes=[latent.dtype, mx.uint32],
    )
    return normed, rows


_pooled_rows = launch.Kernel(
    "front",
    "pooled_rows",
    ("kv", "gate", "norm", "cos", "sin", "eps"),
    ("latent", "packed"),
    _BEGIN
    + """
device uchar* codes = reinterpret_cast<device uchar*>(packed + row * row_words(COMPRESSED_ROW, D));
pad_row<COMPRESSED_ROW, D>(codes, thread_index);
const size_t first = size_t(row) * RATIO * D;
cached_row<T, D, R, RATIO, COMPRESSED_ROW, true>(
    kv + first, gate + first, norm, eps, cos + row * R, sin + row * R, latent + size_t(row) * D,
    codes, codes + code_bytes(COMPRESSED_ROW, D), scratch, thread_index, simdgroup, lane);
""",
)


def _pooled_rows_metal(
    kv: mx.array,
    gate: mx.array | None,
    norm: mx.array,
    at: Rotation,
    *,
    ratio: int,
    dtype: mx.Dtype,
    eps: float,
    fmt: RowFormat,
) -> tuple[mx.array, mx.array]:
    """`pooled_rows` in one launch."""
    G, D = kv.shape[0] // ratio, kv.shape[1]
    latent, rows = _pooled_rows(
        # Without a gate none is read; any array of floats stands in.
        [kv, kv if gate is None else gate, norm, at.cos, at.sin, mx.array(eps)],
        template=[("T", dtype), ("RATIO", ratio), ("D", D), ("R", _rotated(at))],
        grid=(G * D // 2, 1, 1),
        threadgroup=(D // 2, 1, 1),
        shapes=[(G, D), (G, fmt.words(D))],
        dtypes=[dtype, mx.uint32],
    )
    return latent, rows


_encoded_keys = launch.Kernel(
    "front",
    "encoded_keys",
    ("key", "norm", "cos", "sin", "eps"),
    ("codes", "scales"),
    _BEGIN
    + """
device T* nowhere = nullptr;
cached_row<T, D, R, 1, INDEX_KEY, false>(
    key + size_t(row) * D, key, norm, eps, cos + row * R, sin + row * R, nowhere,
    reinterpret_cast<device uchar*>(codes + row * (D / 8)), scales + row * (D / 32), scratch,
    thread_index, simdgroup, lane);
""",
)


def _encoded_keys_metal(
    key: mx.array, norm: mx.array, at: Rotation, *, dtype: mx.Dtype, eps: float, fmt: RowFormat
) -> tuple[mx.array, mx.array]:
    """`encoded_keys` in one launch."""
    G, D = key.shape
    codes, scales = _encoded_keys(
        [key, norm, at.cos, at.sin, mx.array(eps)],
        template=[("T", dtype), ("D", D), ("R", _rotated(at))],
        grid=(G * D // 2, 1, 1),
        threadgroup=(D // 2, 1, 1),
        shapes=[(G, D // 8), (G, D // 32)],
        dtypes=[mx.uint32, mx.uint8],
    )
    return codes, scales


def attention_front_bytes(
    tokens: int, queries: int, q_lora_rank: int, head_dim: int, rotated: int, value_bytes: int
) -> int:
    """Bytes that `attention_front` reads and writes, for weights in bf16."""
    row = head_dim * value_bytes + 2 * 4 * rotated + 4 * WINDOW.words(head_dim)
    weights = 2 * (head_dim + q_lora_rank)
    return tokens * row + queries * 2 * q_lora_rank * value_bytes + weights + 4


def pooled_rows_bytes(
    groups: int, ratio: int, head_dim: int, rotated: int, value_bytes: int
) -> int:
    """Bytes that `pooled_rows` reads and writes, for a norm's weight in bf16; gates if it pools."""
    read = 4 * head_dim * (2 * ratio if ratio > 1 else 1) + 2 * 4 * rotated
    written = head_dim * value_bytes + 4 * COMPRESSED.words(head_dim)
    return groups * (read + written) + 2 * head_dim + 4


def encoded_keys_bytes(groups: int, head_dim: int, rotated: int) -> int:
    """Bytes that `encoded_keys` reads and writes, for a norm's weight in bf16."""
    key = 4 * head_dim + 2 * 4 * rotated + head_dim // 2 + head_dim // 32
    return groups * key + 2 * head_dim + 4


@launch.probe("front")
def _agrees() -> bool:
    """Rows of values whose norm and rotation are exact, since a last bit may move a code."""
    D, G, R = 128, 3, 16
    key = mx.random.key(0)
    rows = mx.where(mx.random.uniform(shape=(G, D), key=key) < 0.5, -1.0, 1.0)
    norm = mx.random.normal((D,), key=key).astype(mx.bfloat16)
    # A quarter of a turn.
    cos = mx.zeros((G, R // 2, 2))
    at = Rotation(cos, cos + mx.array([-1.0, 1.0]))
    found: list[mx.array] = []
    right: list[mx.array] = []
    half = rows.astype(mx.bfloat16)
    for front, results in ((_attention_front_metal, found), (attention_front_reference, right)):
        results += front(half, half, norm, norm, at, eps=1e-20, fmt=WINDOW)
    pairs, gate = mx.repeat(rows, 2, axis=0), mx.random.normal((2 * G, D), key=key)
    for pool, results in ((_pooled_rows_metal, found), (pooled_rows_reference, right)):
        results += pool(
            pairs, gate, norm, at, ratio=2, dtype=mx.bfloat16, eps=1e-20, fmt=COMPRESSED
        )
    for encode, results in ((_encoded_keys_metal, found), (encoded_keys_reference, right)):
        results += encode(rows, norm, at, dtype=mx.bfloat16, eps=1e-20, fmt=INDEX)
    return all(mx.array_equal(a, b).item() for a, b in zip(found, right, strict=True))
