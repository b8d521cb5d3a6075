"""From products to cached rows: norms, RoPE, rounding and packing (sections 3.4 to 3.6, 3.8).

Products come before, state takes the rows after. Shapes: T tokens, Q queries (the last tokens), L
q_lora_rank, G groups of tokens, D head_dim or index_head_dim, H index heads, K hidden_size.
"""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlx_engine.formats import COMPRESSED, INDEX, WINDOW, RowFormat
from mlx_engine.ops import launch
from mlx_engine.ops.linear import linear_f32_reference
from mlx_engine.ops.norm import rms_norm
from mlx_engine.ops.pooling import Pending, pool_groups
from mlx_engine.ops.rope import Rotation, rotate

_WIDEST = 512


@dataclass(frozen=True)
class Ring:
    """A full window uint32 [N, words] of which row `slot` is the oldest: the next token's place."""

    rows: mx.array
    slot: int | mx.array


@launch.falls_back
def attention_front(
    latent: mx.array,
    kv: mx.array,
    q_norm: mx.array,
    kv_norm: mx.array,
    at: Rotation,
    *,
    eps: float,
    fmt: RowFormat,
    ring: Ring | None = None,
) -> tuple[mx.array, mx.array]:
    """The normed query latents and the packed window rows of a layer.

    latent: [Q, L], kv: [T, D], both the plain products, at: of the T positions -> [Q, L] in
    latent's dtype and uint32 [T, words]. For a single token with its ring the rows are the ring's
    [N, words], its own in its place.
    """
    front = attention_front_reference
    is_fitting = _is_fitting(kv) and latent.shape[-1] % 2 == 0 and latent.dtype == kv.dtype
    if launch.is_on("front") and fmt == WINDOW and is_fitting:
        front = _attention_front_metal
    return front(latent, kv, q_norm, kv_norm, at, eps=eps, fmt=fmt, ring=ring)


def attention_front_reference(
    latent: mx.array,
    kv: mx.array,
    q_norm: mx.array,
    kv_norm: mx.array,
    at: Rotation,
    *,
    eps: float,
    fmt: RowFormat,
    ring: Ring | None = None,
) -> tuple[mx.array, mx.array]:
    """`attention_front` in MLX's operations, with any format."""
    rows = fmt.pack(rotate(rms_norm(kv, kv_norm, eps), at))
    if ring is not None:
        rows = mx.slice_update(ring.rows, rows, mx.array([ring.slot]), axes=[0])
    return rms_norm(latent, q_norm, eps), rows


@launch.falls_back
def pooled_rows(
    kv: mx.array,
    gate: mx.array | None,
    norm: mx.array,
    at: Rotation,
    *,
    pending: Pending = None,
    ratio: int,
    dtype: mx.Dtype,
    eps: float,
    fmt: RowFormat,
) -> tuple[mx.array, mx.array]:
    """The normed latents of full groups, for the index keys, and their packed rows.

    kv, gate: f32 [G * ratio - n, D], gate None where the ratio is 1, after those of the first n
    tokens in `pending`; at: of the groups' first positions -> [G, D] of a dtype and uint32
    [G, words].
    """
    pool = pooled_rows_reference
    if launch.is_on("front") and fmt == COMPRESSED and _is_fitting(kv):
        pool = _pooled_rows_metal
    return pool(kv, gate, norm, at, pending=pending, ratio=ratio, dtype=dtype, eps=eps, fmt=fmt)


def pooled_rows_reference(
    kv: mx.array,
    gate: mx.array | None,
    norm: mx.array,
    at: Rotation,
    *,
    pending: Pending = None,
    ratio: int,
    dtype: mx.Dtype,
    eps: float,
    fmt: RowFormat,
) -> tuple[mx.array, mx.array]:
    """`pooled_rows` in MLX's operations, with any format."""
    pooled = kv if gate is None else pool_groups(kv, gate, ratio, pending)
    latent = rms_norm(pooled.astype(dtype), norm, eps)
    return latent, fmt.pack(rotate(latent, at))


@launch.falls_back
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


@launch.falls_back
def index_queries(
    q: mx.array, x: mx.array, weights_proj: mx.array, at: Rotation, *, fmt: RowFormat
) -> tuple[mx.array, mx.array]:
    """The indexer's queries, rotated and rounded as its keys are, and the weights of its heads.

    q: [Q, H, D], the plain product, x: [Q, K], the attention's input, weights_proj: [H, K] ->
    [Q, H, D] in q's dtype and f32 [Q, H], with both scale factors.
    """
    compute = index_queries_reference
    if launch.is_on("front") and fmt == INDEX and _is_fitting(q) and x.shape[-1] % 4 == 0:
        compute = _index_queries_metal
    return compute(q, x, weights_proj, at, fmt=fmt)


def index_queries_reference(
    q: mx.array, x: mx.array, weights_proj: mx.array, at: Rotation, *, fmt: RowFormat
) -> tuple[mx.array, mx.array]:
    """`index_queries` in MLX's operations, with any format."""
    _, H, D = q.shape
    rounded = fmt.decode(*fmt.encode(rotate(q, at))).astype(q.dtype)
    return rounded, linear_f32_reference(x, weights_proj) * (D**-0.5 * H**-0.5)


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

_WINDOW_ROW = """
    device uchar* codes = reinterpret_cast<device uchar*>(packed + row * row_words(WINDOW_ROW, D));
    pad_row<WINDOW_ROW, D>(codes, thread_index);
    cached_row<T, D, R, WINDOW_ROW, false>(
        pair_of(kv + size_t(token) * D, thread_index), kv_norm, eps, cos + token * R,
        sin + token * R, normed, codes, codes + code_bytes(WINDOW_ROW, D), scratch, thread_index,
        simdgroup, lane);
"""
_LATENT = """
    const size_t first = size_t(row - rows) * L;
    normed_latent<T, L>(
        latent + first, q_norm, eps, normed + first, scratch, D / 2, thread_index, simdgroup, lane);
"""
_INPUTS = ("latent", "kv", "q_norm", "kv_norm", "cos", "sin", "eps")

_attention_front = launch.Kernel(
    "front",
    "attention_front",
    _INPUTS,
    ("normed", "packed"),
    f"""{_BEGIN}
const uint rows = uint(kv_shape[0]);
if (row < rows) {{
    const uint token = row;{_WINDOW_ROW}}} else {{{_LATENT}}}
""",
)
_attention_front_in_ring = launch.Kernel(
    "front",
    "attention_front_in_ring",
    (*_INPUTS, "ring", "slot"),
    ("normed", "packed"),
    f"""{_BEGIN}
const uint rows = uint(ring_shape[0]);
if (row == uint(slot)) {{
    const uint token = 0;{_WINDOW_ROW}}} else if (row < rows) {{
    copy_row<D>(ring, packed, row, thread_index);
}} else {{{_LATENT}}}
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
    ring: Ring | None = None,
) -> tuple[mx.array, mx.array]:
    """`attention_front` in one launch.

    A ring is copied, 68 KB at the released width: to place the row in it would take a launch more.
    """
    Q, L = latent.shape
    rows, D = kv.shape
    kernel, inputs = _attention_front, [latent, kv, q_norm, kv_norm, at.cos, at.sin, eps]
    if ring is not None:
        assert rows == 1, f"a ring takes one row, not {rows}"
        kernel, rows = _attention_front_in_ring, ring.rows.shape[0]
        # `mx.array` of an array would take a launch to copy it.
        slot = ring.slot if isinstance(ring.slot, mx.array) else mx.array(ring.slot)
        inputs += [ring.rows, slot]
    normed, packed = kernel(
        inputs,
        template=[("T", kv.dtype), ("L", L), ("D", D), ("R", _rotated(at))],
        grid=((rows + Q) * D // 2, 1, 1),
        threadgroup=(D // 2, 1, 1),
        shapes=[(Q, L), (rows, fmt.words(D))],
        dtypes=[latent.dtype, mx.uint32],
    )
    return normed, packed


_pooled_rows = launch.Kernel(
    "front",
    "pooled_rows",
    ("pending_kv", "pending_gate", "kv", "gate", "norm", "cos", "sin", "eps"),
    ("latent", "packed"),
    _BEGIN
    + """
device uchar* codes = reinterpret_cast<device uchar*>(packed + row * row_words(COMPRESSED_ROW, D));
pad_row<COMPRESSED_ROW, D>(codes, thread_index);
const Joined<D, PENDING> rows{pending_kv, kv};
const Joined<D, PENDING> gates{pending_gate, gate};
cached_row<T, D, R, COMPRESSED_ROW, true>(
    pooled_pair<RATIO>(rows, gates, row, 2 * thread_index), norm, eps, cos + row * R, sin + row * R,
    latent + size_t(row) * D, codes, codes + code_bytes(COMPRESSED_ROW, D), scratch, thread_index,
    simdgroup, lane);
""",
)


def _pooled_rows_metal(
    kv: mx.array,
    gate: mx.array | None,
    norm: mx.array,
    at: Rotation,
    *,
    pending: Pending = None,
    ratio: int,
    dtype: mx.Dtype,
    eps: float,
    fmt: RowFormat,
) -> tuple[mx.array, mx.array]:
    """`pooled_rows` in one launch."""
    n = 0 if pending is None else pending[0].shape[0]
    G, D = (n + kv.shape[0]) // ratio, kv.shape[1]
    gate = kv if gate is None else gate  # what is not read any array of floats stands in for
    latent, rows = _pooled_rows(
        [*(pending or (kv, gate)), kv, gate, norm, at.cos, at.sin, eps],
        template=[*(("T", dtype), ("RATIO", ratio), ("PENDING", n), ("D", D), ("R", _rotated(at)))],
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
cached_row<T, D, R, INDEX_KEY, false>(
    pair_of(key + size_t(row) * D, thread_index), norm, eps, cos + row * R, sin + row * R, nowhere,
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
        [key, norm, at.cos, at.sin, eps],
        template=[("T", dtype), ("D", D), ("R", _rotated(at))],
        grid=(G * D // 2, 1, 1),
        threadgroup=(D // 2, 1, 1),
        shapes=[(G, D // 8), (G, D // 32)],
        dtypes=[mx.uint32, mx.uint8],
    )
    return codes, scales


_index_queries = launch.Kernel(
    "front",
    "index_queries",
    ("q", "x", "weights_proj", "cos", "sin"),
    ("rounded", "head_weights"),
    """
threadgroup float scratch[SIMD];
const uint head = threadgroup_position_in_grid.x;
const uint query = threadgroup_position_in_grid.y;
const size_t row = size_t(query) * H + head;
rounded_query<T, D, R>(
    q + row * D, cos + query * R, sin + query * R, rounded + row * D, thread_index_in_threadgroup);
const float weight = head_weight<T, W, D, K, H>(
    x + size_t(query) * K, weights_proj + size_t(head) * K, scratch, thread_index_in_threadgroup,
    simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
if (thread_index_in_threadgroup == 0) {
    head_weights[row] = weight;
}
""",
)


def _index_queries_metal(
    q: mx.array, x: mx.array, weights_proj: mx.array, at: Rotation, *, fmt: RowFormat
) -> tuple[mx.array, mx.array]:
    """`index_queries` in one launch; a row of weights_proj is read for every query."""
    Q, H, D = q.shape
    rounded, head_weights = _index_queries(
        [q, x, weights_proj, at.cos, at.sin],
        template=[
            *(("T", q.dtype), ("W", weights_proj.dtype)),
            *(("D", D), ("R", _rotated(at)), ("K", x.shape[-1]), ("H", H)),
        ],
        grid=(H * D // 2, Q, 1),
        threadgroup=(D // 2, 1, 1),
        shapes=[q.shape, (Q, H)],
        dtypes=[q.dtype, mx.float32],
    )
    return rounded, head_weights


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
    ring = Ring(mx.arange(5 * WINDOW.words(D), dtype=mx.uint32).reshape(5, -1), 3)
    one = Rotation(at.cos[:1], at.sin[:1])
    for front, results in ((_attention_front_metal, found), (attention_front_reference, right)):
        results += front(half, half, norm, norm, at, eps=1e-20, fmt=WINDOW)
        results += front(half[:1], half[:1], norm, norm, one, eps=1e-20, fmt=WINDOW, ring=ring)
    kv, gate = mx.repeat(rows, 2, axis=0), mx.random.normal((2 * G, D), key=key)
    options: dict[str, Any] = {"ratio": 2, "dtype": half.dtype, "eps": 1e-20, "fmt": COMPRESSED}
    for pool, results in ((_pooled_rows_metal, found), (pooled_rows_reference, right)):
        results += pool(kv, gate, norm, at, **options)
        results += pool(kv[1:], gate[1:], norm, at, pending=(kv[:1], gate[:1]), **options)
    for encode, results in ((_encoded_keys_metal, found), (encoded_keys_reference, right)):
        results += encode(rows, norm, at, dtype=mx.bfloat16, eps=1e-20, fmt=INDEX)
    queries = (half[:, None] * mx.array([[0.75], [6.0]])).astype(half.dtype)
    for turn, results in ((_index_queries_metal, found), (index_queries_reference, right)):
        results += turn(queries, half, half[:2], at, fmt=INDEX)
    return all(mx.array_equal(a, b).item() for a, b in zip(found, right, strict=True))
