"""Manifold-constrained hyper-connections: the residual as hc parallel streams (section 3.2).

Shapes: T tokens, hc streams, D hidden_size. All coefficients are f32; streams are stored in the
activation dtype between sublayers. `mhc_between` is all that lies between two sublayers, in two
launches of metal/mhc.metal.
"""

from dataclasses import dataclass
from functools import cache

import mlx.core as mx

from mlx_engine.ops import launch
from mlx_engine.ops.linear import times_transposed
from mlx_engine.ops.mhc_bytes import HC, MAX_TOKENS, SLICE, SUMS, THREADS
from mlx_engine.ops.mhc_native import FINISH
from mlx_engine.ops.norm import rms_norm
from mlx_engine.weights import MhcWeights


@dataclass(frozen=True)
class Mixing:
    """A sublayer's coefficients: pre f32 [T, hc], post f32 [T, hc], comb f32 [T, hc, hc]."""

    pre: mx.array
    post: mx.array
    comb: mx.array

    def last(self, tokens: int) -> "Mixing":
        """The coefficients of the last `tokens` tokens."""
        if tokens == self.pre.shape[0]:
            return self
        return Mixing(self.pre[-tokens:], self.post[-tokens:], self.comb[-tokens:])

    def then(self, later: "Mixing") -> "Mixing":
        """These and the ones that follow them."""
        return Mixing(
            mx.concatenate([self.pre, later.pre]),
            mx.concatenate([self.post, later.post]),
            mx.concatenate([self.comb, later.comb]),
        )


@dataclass(frozen=True)
class MhcSublayer:
    """What a sublayer reads the streams with; norm_weight [D] is its norm's, iters Sinkhorn's."""

    w: MhcWeights
    norm_weight: mx.array
    iters: int
    hc_eps: float
    norm_eps: float

    @property
    def epsilons(self) -> mx.array:
        """Both epsilons as the kernels read them: f32 [2]."""
        return _epsilons(self.hc_eps, self.norm_eps)


@launch.falls_back
def mhc_between(
    h: mx.array, streams: mx.array, last: Mixing, pre: mx.array, to: MhcSublayer
) -> tuple[mx.array, mx.array, Mixing]:
    """Write a sublayer's output h [T, D] back, and make the next one's input and coefficients.

    streams: [T, hc, D] and `last` are what that sublayer began with; the next one reads with `pre`,
    f32 [T, hc]. Returns streams, x [T, D], coefficients.
    """
    between = _between_metal if is_on(streams) else mhc_between_reference
    return between(h, streams, last, pre, to)


@launch.falls_back
def mhc_enter(streams: mx.array, pre: mx.array, to: MhcSublayer) -> tuple[mx.array, Mixing]:
    """As `mhc_between` for streams that no sublayer has just written: x [T, D], coefficients."""
    enter = _enter_metal if is_on(streams) else mhc_enter_reference
    return enter(streams, pre, to)


@launch.falls_back
def mhc_collapse_norm(
    streams: mx.array, pre: mx.array, norm_weight: mx.array, norm_eps: float
) -> mx.array:
    """A sublayer's input: the streams summed with weights `pre`, then RMSNorm.

    streams: [T, hc, D], pre: f32 [T, hc] -> [T, D] in the streams' dtype.
    """
    # The kernel keeps the channels of a token, and 32 sums besides.
    is_fitting = 4 * (streams.shape[-1] + 32) <= launch.MOST_THREADGROUP_BYTES
    if is_on(streams) and is_fitting:
        return _collapse_norm_metal(streams, pre, norm_weight, norm_eps)
    return mhc_collapse_norm_reference(streams, pre, norm_weight, norm_eps)


@launch.falls_back
def mhc_expand(h: mx.array, streams: mx.array, post: mx.array, comb: mx.array) -> mx.array:
    """Write a sublayer's output back: out[k] = post[k] h + sum_j comb[j, k] streams[j].

    h: [T, D], streams: [T, hc, D], post: f32 [T, hc], comb: f32 [T, hc, hc] -> [T, hc, D].
    The first index of comb is the one summed.
    """
    if is_on(streams):
        return _expand_metal(h, streams, post, comb)
    return mhc_expand_reference(h, streams, post, comb)


def mhc_between_reference(
    h: mx.array, streams: mx.array, last: Mixing, pre: mx.array, to: MhcSublayer
) -> tuple[mx.array, mx.array, Mixing]:
    """`mhc_between` in MLX's operations."""
    streams = mhc_expand_reference(h, streams, last.post, last.comb)
    return streams, *mhc_enter_reference(streams, pre, to)


def mhc_enter_reference(
    streams: mx.array, pre: mx.array, to: MhcSublayer
) -> tuple[mx.array, Mixing]:
    """`mhc_enter` in MLX's operations."""
    coefficients = mhc_coefficients_reference(
        streams, to.w, iters=to.iters, hc_eps=to.hc_eps, norm_eps=to.norm_eps
    )
    x = mhc_collapse_norm_reference(streams, pre, to.norm_weight, to.norm_eps)
    return x, Mixing(*coefficients)


def mhc_coefficients_reference(
    streams: mx.array, w: MhcWeights, *, iters: int, hc_eps: float, norm_eps: float
) -> tuple[mx.array, mx.array, mx.array]:
    """The mixing weights of one sublayer, from the streams that enter it, in MLX's operations.

    streams: [T, hc, D] -> pre f32 [T, hc], post f32 [T, hc], comb f32 [T, hc, hc].
    comb is made doubly stochastic by `iters` Sinkhorn rounds, columns last.
    """
    T, hc, _ = streams.shape
    flat = streams.reshape(T, -1).astype(mx.float32)
    rms = mx.rsqrt(mx.mean(flat * flat, axis=-1, keepdims=True) + norm_eps)
    mix = times_transposed(flat, w.fn) * rms * w.column_scale + w.base  # [T, (2 + hc) * hc]
    gates = mx.sigmoid(mix[:, : 2 * hc])
    comb = mx.softmax(mix[:, 2 * hc :].reshape(T, hc, hc), axis=-1) + hc_eps
    # A product with ones sums an axis, keeps it, and adds the epsilon in the same operation; of one
    # shape with comb neither needs a broadcast, of which a decode step would make a thousand.
    ones, eps = mx.ones((T, hc, hc)), mx.full((T, hc, hc), hc_eps)
    comb = comb / mx.addmm(eps, ones, comb)
    for _ in range(iters - 1):
        comb = comb / mx.addmm(eps, comb, ones)
        comb = comb / mx.addmm(eps, ones, comb)
    return gates[:, :hc] + hc_eps, 2 * gates[:, hc:], comb


def mhc_collapse_norm_reference(
    streams: mx.array, pre: mx.array, norm_weight: mx.array, norm_eps: float
) -> mx.array:
    """`mhc_collapse_norm` in MLX's operations."""
    collapsed = mx.sum(pre[..., None] * streams.astype(mx.float32), axis=1)
    return rms_norm(collapsed.astype(streams.dtype), norm_weight, norm_eps)


def mhc_expand_reference(
    h: mx.array, streams: mx.array, post: mx.array, comb: mx.array
) -> mx.array:
    """`mhc_expand` in MLX's operations."""
    mixed = comb.swapaxes(-1, -2) @ streams.astype(mx.float32)
    out = post[..., None] * h.astype(mx.float32)[:, None, :] + mixed
    return out.astype(streams.dtype)


def is_on(streams: mx.array) -> bool:
    """Whether the kernels compute for these streams."""
    return launch.is_on("mhc") and streams.shape[1] == HC


# The threads of a slice of tokens, and what they do with it.
_SLICE_BODY = """
    threadgroup float values[M * HC * SLICE];
    const uint2 at = threadgroup_position_in_grid.xy;
    const uint tokens = uint(streams_shape[0]);
    const uint thread_index = thread_index_in_threadgroup;
    const uint simdgroup = simdgroup_index_in_threadgroup;
    const uint lane = thread_index_in_simdgroup;"""
_LOAD = """
    load_slice<T, M, D>(streams, values, tokens, at, thread_index);"""
_EXPAND = """
    expand_slice<T, M, D>(h, streams, post, comb, out, values, tokens, at, thread_index);"""
_SUM = """
    sum_slice<M, D>(values, fn, sums, tokens, at, simdgroup, lane);"""
_COLLAPSE = """
    collapse_slice<T, M, D>(values, pre, collapsed, sums, tokens, at, simdgroup, lane);"""
_BETWEEN = launch.Kernel(
    "mhc",
    "mhc_between",
    ("h", "streams", "post", "comb", "pre", "fn"),
    ("out", "collapsed", "sums"),
    _SLICE_BODY + _EXPAND + _SUM + _COLLAPSE,
)
_ENTER = launch.Kernel(
    "mhc",
    "mhc_enter",
    ("streams", "pre", "fn"),
    ("collapsed", "sums"),
    _SLICE_BODY + _LOAD + _SUM + _COLLAPSE,
)
_FINISH = launch.Kernel(
    "mhc",
    "mhc_finish",
    ("sums", "base", "scale", "epsilons", "collapsed", "norm_weight"),
    ("pre", "post", "comb", "x"),
    """
    threadgroup float totals[SUMS];
    finish<T, W, D, ITERS>(
        sums, base, scale, epsilons, collapsed, norm_weight, pre, post, comb, x, totals,
        threadgroup_position_in_grid.x, THREADS, thread_index_in_threadgroup,
        simdgroup_index_in_threadgroup, thread_index_in_simdgroup);""",
)
_COLLAPSE_NORM = launch.Kernel(
    "mhc",
    "mhc_collapse_norm",
    ("streams", "pre", "norm_weight", "epsilons"),
    ("x",),
    """
    threadgroup float collapsed[D];
    threadgroup float scratch[SIMD];
    collapse_norm<T, W, D>(
        streams, pre, norm_weight, epsilons, x, collapsed, scratch,
        threadgroup_position_in_grid.x, THREADS, thread_index_in_threadgroup,
        simdgroup_index_in_threadgroup, thread_index_in_simdgroup);""",
)
_EXPAND_ALONE = launch.Kernel(
    "mhc",
    "mhc_expand",
    ("h", "streams", "post", "comb"),
    ("out",),
    """
    expand<T, D>(h, streams, post, comb, out, thread_position_in_grid.xy);""",
)


def _between_metal(
    h: mx.array, streams: mx.array, last: Mixing, pre: mx.array, to: MhcSublayer
) -> tuple[mx.array, mx.array, Mixing]:
    out, collapsed, sums = between_slices(h, streams, last, pre, to)
    return out, *_finish(collapsed, sums, to)


def between_slices(
    h: mx.array, streams: mx.array, last: Mixing, pre: mx.array, to: MhcSublayer
) -> tuple[mx.array, mx.array, mx.array]:
    """The first launch of `mhc_between`: streams, x before its norm [T, D], sums f32 of slices."""
    T, hc, D = streams.shape
    out, collapsed, sums = _slices(
        _BETWEEN,
        (h, streams, last.post, last.comb, pre, to.w.fn),
        streams,
        [((T, hc, D), streams.dtype), ((T, D), streams.dtype)],
    )
    return out, collapsed, sums


def _enter_metal(streams: mx.array, pre: mx.array, to: MhcSublayer) -> tuple[mx.array, Mixing]:
    T, _, D = streams.shape
    collapsed, sums = _slices(_ENTER, (streams, pre, to.w.fn), streams, [((T, D), streams.dtype)])
    return _finish(collapsed, sums, to)


def _collapse_norm_metal(
    streams: mx.array, pre: mx.array, norm_weight: mx.array, norm_eps: float
) -> mx.array:
    T, _, D = streams.shape
    (x,) = _COLLAPSE_NORM(
        (streams, pre, norm_weight, _epsilons(0.0, norm_eps)),
        template=[
            *(("T", streams.dtype), ("W", norm_weight.dtype)),
            *(("D", D), ("THREADS", THREADS)),
        ],
        grid=(THREADS * T, 1, 1),
        threadgroup=(THREADS, 1, 1),
        shapes=[(T, D)],
        dtypes=[streams.dtype],
    )
    return x


def _expand_metal(h: mx.array, streams: mx.array, post: mx.array, comb: mx.array) -> mx.array:
    T, _, D = streams.shape
    (out,) = _EXPAND_ALONE(
        (h, streams, post, comb),
        template=[("T", streams.dtype), ("D", D)],
        grid=(D, T, 1),
        threadgroup=(min(D, 256), 1, 1),
        shapes=[streams.shape],
        dtypes=[streams.dtype],
    )
    return out


def _slices(
    kernel: launch.Kernel,
    inputs: tuple[mx.array, ...],
    streams: mx.array,
    outputs: list[tuple[tuple[int, ...], mx.Dtype]],
) -> list[mx.array]:
    """Launch a kernel over slices of channels: its outputs, and the sums f32 of each slice."""
    T, _, D = streams.shape
    M, slices = min(T, MAX_TOKENS), -(-D // SLICE)
    threads = HC * SLICE
    return kernel(
        inputs,
        template=[("T", streams.dtype), ("M", M), ("D", D)],
        grid=(threads * slices, -(-T // M), 1),
        threadgroup=(threads, 1, 1),
        shapes=[*(shape for shape, _ in outputs), (T, slices, SUMS)],
        dtypes=[*(dtype for _, dtype in outputs), mx.float32],
    )


def _finish(collapsed: mx.array, sums: mx.array, to: MhcSublayer) -> tuple[mx.array, Mixing]:
    T, D = collapsed.shape
    kernel = FINISH if launch.is_native("mhc") else _FINISH
    pre, post, comb, x = kernel(
        (sums, to.w.base, to.w.scale, to.epsilons, collapsed, to.norm_weight),
        template=[
            *(("T", collapsed.dtype), ("W", to.norm_weight.dtype)),
            *(("D", D), ("ITERS", to.iters), ("THREADS", THREADS)),
        ],
        grid=(THREADS * T, 1, 1),
        threadgroup=(THREADS, 1, 1),
        shapes=[(T, HC), (T, HC), (T, HC, HC), (T, D)],
        dtypes=[*[mx.float32] * 3, collapsed.dtype],
    )
    return x, Mixing(pre, post, comb)


@cache
def _epsilons(hc_eps: float, norm_eps: float) -> mx.array:
    return mx.array([hc_eps, norm_eps])


@launch.probe("mhc")
def agrees() -> bool:
    """Whether the kernels give the reference's results for one token and for several."""
    D, columns = 96, (2 + HC) * HC
    wave = mx.sin(mx.arange(9 * (HC + 1) * D))
    w = MhcWeights(
        fn=mx.cos(mx.arange(columns * HC * D)).reshape(columns, -1),
        base=mx.sin(mx.arange(columns)),
        scale=mx.array([0.5, 0.25, 0.125]),
    )
    norm_weight = (1 + 0.1 * mx.cos(mx.arange(D))).astype(mx.bfloat16)
    to = MhcSublayer(w, norm_weight, iters=3, hc_eps=0.02, norm_eps=1e-20)
    for T in (1, 9):
        shares = mx.softmax(wave[: T * (2 + HC) * HC].reshape(T, -1, HC), axis=-1)
        last = Mixing(shares[:, 0], shares[:, 1], shares[:, 2:])
        for dtype in (mx.bfloat16, mx.float32):
            h = wave[: T * D].reshape(T, D).astype(dtype)
            streams = wave[-T * HC * D :].reshape(T, HC, D).astype(dtype)
            pre, norm = last.pre, (norm_weight, to.norm_eps)
            out, x, mixing = _between_metal(h, streams, last, pre, to)
            right, wanted, coefficients = mhc_between_reference(h, streams, last, pre, to)
            entered = _enter_metal(right, pre, to)
            pairs = [
                *((out, right), (_expand_metal(h, streams, last.post, last.comb), right)),
                *((x, wanted), (entered[0], wanted)),
                (_collapse_norm_metal(right, pre, *norm), wanted),
            ]
            for found in (mixing, entered[1]):
                pairs += zip(_arrays(found), _arrays(coefficients), strict=True)
            rounding = 2.0**-6 if dtype == mx.bfloat16 else 2.0**-14
            for a, b in pairs:
                if not mx.all(mx.abs(a - b) <= rounding * mx.max(mx.abs(b))).item():
                    return False
    return True


def _arrays(mixing: Mixing) -> tuple[mx.array, mx.array, mx.array]:
    return mixing.pre, mixing.post, mixing.comb
