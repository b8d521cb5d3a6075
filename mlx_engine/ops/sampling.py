"""From logits to a token, on the device: the greatest, or a draw by temperature, min-p and top-p.

V is the number of logits. Parameters and their checks are mlx_engine.sampling's. The kernels are in
metal/sampling.metal: three launches for a draw, six with top-p.
"""

import math
from collections.abc import Sequence
from functools import lru_cache

import mlx.core as mx

from mlx_engine.ops import launch

# The kernels' sizes; see metal/sampling.metal.
THREADS = 512
_PART = 2048
BINS = 2048
GROUP = 32
GROUPS = BINS // GROUP

# The least uniform value that is told from 0, half of what 32 random bits tell apart.
_LEAST_UNIFORM = 2.0**-33
# Of less no f32 can be a share; the most likely token reaches it alone.
_LEAST_TOP_P = 1e-30


def greedy(logits: mx.array) -> mx.array:
    """The id of the greatest of logits f32 [V], the lowest of equals: a uint32 scalar.

    MLX's own: one launch, in which one core reads 0.5 MB, while a kernel of ours that every core
    shares would take two.
    """
    return mx.argmax(logits)


def keep_top(logits: mx.array, k: int) -> mx.array:
    """All but the `k` greatest of logits f32 [V] become -inf; equal logits rank by id.

    MLX's own, ahead of `draw`: it is asked for seldom, and a sort of V values is little beside a
    step of the model. A logit that is no number counts as -inf.
    """
    if not 0 < k < logits.shape[0]:
        return logits
    logits = mx.where(mx.isnan(logits), -mx.inf, logits)
    least = -mx.sort(-logits)[k - 1]
    return mx.where(_first(logits, least, mx.array(k)), logits, -mx.inf)


@launch.falls_back
def draw(
    logits: mx.array, key: mx.array, *, temperature: float, top_p: float, min_p: float
) -> mx.array:
    """Draw from the probabilities softmax(logits / temperature): f32 [V] to a uint32 scalar.

    `key` is one of `mx.random.key`, temperature above 0. Kept are tokens of at least `min_p` of the
    greatest probability, and of these the fewest most likely whose sum reaches `top_p`; equal
    logits rank by id, the lowest first. A logit that is no number counts as -inf.
    """
    compute = draw_metal if launch.is_on("sampling") else draw_reference
    return compute(logits, key, temperature=temperature, top_p=top_p, min_p=min_p)


def draw_reference(
    logits: mx.array, key: mx.array, *, temperature: float, top_p: float, min_p: float
) -> mx.array:
    """`draw` in MLX's operations.

    A race: token i takes an exponential time over its weight, and the first one wins.
    """
    logits = mx.where(mx.isnan(logits), -mx.inf, logits)
    greatest = logits.max()

    def weigh(logits: mx.array) -> mx.array:
        # Equal infinities have no difference.
        scaled = mx.where(logits == greatest, 0.0, (logits - greatest) / temperature)
        return mx.where(scaled >= _log(min_p), mx.exp(scaled), 0.0)

    weights = weigh(logits)
    kept = weights > 0
    if top_p < 1:
        descending = -mx.sort(-logits)
        before = mx.cumsum(weigh(descending), inclusive=False)
        n_inside = (before < max(top_p, _LEAST_TOP_P) * weights.sum()).sum()
        kept = kept & _first(logits, descending[n_inside - 1], n_inside)
    uniform = mx.maximum(mx.random.uniform(shape=logits.shape, key=key), _LEAST_UNIFORM)
    return mx.argmax(mx.where(kept, weights / -mx.log1p(-uniform), -1.0))


def _first(logits: mx.array, least: mx.array, n: mx.array) -> mx.array:
    """Mark the n greatest logits, of which `least` is the last.

    Which of its equals are among them is counted from the lowest id.
    """
    above, equal = logits > least, logits == least
    return above | (equal & (mx.cumsum(equal.astype(mx.int32)) <= n - above.sum()))


def _log(min_p: float) -> float:
    return math.log(min_p) if min_p > 0 else -math.inf


def parts_of(V: int) -> int:
    """Parts of the logits, a threadgroup each."""
    return -(-V // _PART)


_BODY = """
    threadgroup float scratch[SIMD];
    const uint V = uint(logits_shape[0]);
    const Place at = Place{
        threadgroup_position_in_grid.x, thread_index_in_threadgroup,
        simdgroup_index_in_threadgroup, thread_index_in_simdgroup};"""
_RULE = """
    const Rule whole = whole_rule(maxima, rule, V, scratch, at);"""
_SEARCH = """
    threadgroup float masses[GROUPS + GROUP];
    const Edge edge = narrowed<{level}>(
        {known}, last_bins, last_groups, parts_of(V), whole, masses,
        at.thread_index);"""
_STORE = """
    if (at.part == 0 && at.thread_index == 0) {
        store_edge(edge, edge_out);
    }"""
_NO_EDGE = """
    const Edge edge = Edge{0, 0.0f, 0.0f};"""
_HISTOGRAM = """
    threadgroup atomic_uint integers[BINS];
    threadgroup atomic_uint fractions[BINS];
    sampling_histogram<{level}>(
        logits, V, whole, edge.key, bins, groups, integers, fractions, at);"""
_DRAW = """
    threadgroup uint counts[SIMD];
    sampling_draw<{nucleus}>(
        logits, V, whole, edge, uint2(key[0], key[1]), {bins}, values, ids, scratch, counts, at);"""
_FRESH, _KNOWN = "Edge{0, 0.0f, rule[2]}", "stored_edge(edge_in)"
_TABLES = ("last_bins", "last_groups")

_GREATEST = launch.Kernel(
    "sampling",
    "sampling_greatest",
    ("logits",),
    ("maxima",),
    _BODY
    + """
    sampling_greatest(logits, V, maxima, scratch, at);""",
)
_LEVELS = (
    launch.Kernel(
        "sampling",
        "sampling_histogram_0",
        ("logits", "maxima", "rule"),
        ("bins", "groups"),
        _BODY + _RULE + _NO_EDGE + _HISTOGRAM.format(level=0),
    ),
    launch.Kernel(
        "sampling",
        "sampling_histogram_1",
        ("logits", "maxima", "rule", *_TABLES),
        ("bins", "groups", "edge_out"),
        _BODY + _RULE + _SEARCH.format(level=0, known=_FRESH) + _STORE + _HISTOGRAM.format(level=1),
    ),
    launch.Kernel(
        "sampling",
        "sampling_histogram_2",
        ("logits", "maxima", "rule", *_TABLES, "edge_in"),
        ("bins", "groups", "edge_out"),
        _BODY + _RULE + _SEARCH.format(level=1, known=_KNOWN) + _STORE + _HISTOGRAM.format(level=2),
    ),
)
_DRAW_ALL = launch.Kernel(
    "sampling",
    "sampling_draw",
    ("logits", "maxima", "rule", "key"),
    ("values", "ids"),
    _BODY + _RULE + _NO_EDGE + _DRAW.format(nucleus="false", bins="nullptr"),
)
_DRAW_NUCLEUS = launch.Kernel(
    "sampling",
    "sampling_draw_nucleus",
    ("logits", "maxima", "rule", "key", *_TABLES, "edge_in"),
    ("values", "ids"),
    _BODY
    + _RULE
    + _SEARCH.format(level=2, known=_KNOWN)
    + _DRAW.format(nucleus="true", bins="last_bins"),
)
_FIRST = launch.Kernel(
    "sampling",
    "sampling_first",
    ("values", "ids"),
    ("token",),
    """
    sampling_first(values, ids, uint(values_shape[0]), token, thread_index_in_simdgroup);""",
)


def draw_metal(
    logits: mx.array, key: mx.array, *, temperature: float, top_p: float, min_p: float
) -> mx.array:
    """`draw` in three launches, or six if top_p is below 1."""
    (V,) = logits.shape
    P = parts_of(V)
    rule = _rule(temperature, top_p, min_p)
    (maxima,) = _launch(_GREATEST, (logits,), P, [(P,)], [mx.float32])
    known = (logits, maxima, rule)
    candidates = [(P,)] * 2, [mx.float32, mx.uint32]
    if top_p < 1:
        found: list[mx.array] = []
        for kernel in _LEVELS:
            shapes = [(P, BINS), (P, GROUPS), (3,)][: len(kernel.outputs)]
            dtypes = [mx.float32, mx.float32, mx.uint32][: len(kernel.outputs)]
            found = _launch(kernel, (*known, *found), P, shapes, dtypes)
        values, ids = _launch(_DRAW_NUCLEUS, (*known, key, *found), P, *candidates)
    else:
        values, ids = _launch(_DRAW_ALL, (*known, key), P, *candidates)
    (token,) = _FIRST(
        (values, ids), grid=(32, 1, 1), threadgroup=(32, 1, 1), shapes=[(1,)], dtypes=[mx.uint32]
    )
    return token.reshape(())


def _launch(
    kernel: launch.Kernel,
    inputs: Sequence[mx.array],
    parts: int,
    shapes: Sequence[tuple[int, ...]],
    dtypes: Sequence[mx.Dtype],
) -> list[mx.array]:
    return kernel(
        inputs,
        grid=(THREADS * parts, 1, 1),
        threadgroup=(THREADS, 1, 1),
        shapes=shapes,
        dtypes=dtypes,
    )


@lru_cache(maxsize=8)
def _rule(temperature: float, top_p: float, min_p: float) -> mx.array:
    """Kept, since what the host has just made a GPU waits for."""
    return mx.array([temperature, _log(min_p), max(top_p, _LEAST_TOP_P)])


@launch.probe("sampling")
def agrees() -> bool:
    """Whether the kernels draw what the reference draws, from parts with equals among them."""
    logits = mx.floor(8 * mx.sin(mx.arange(2 * _PART + 100) ** 2))
    for seed in range(3):
        key = mx.random.key(seed)
        for temperature, top_p, min_p in ((1.0, 1.0, 0.0), (2.0, 1.0, 0.3), (3.0, 0.7, 0.1)):
            ours, reference = (
                compute(logits, key, temperature=temperature, top_p=top_p, min_p=min_p)
                for compute in (draw_metal, draw_reference)
            )
            if ours.item() != reference.item():
                return False
    return True
