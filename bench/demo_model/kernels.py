"""Triton kernels of the training form: what a GPU would else do in thousands of small steps.

Attention without scores in memory, the indexer's scores and choice, and Sinkhorn, each with the
gradient it needs. `fused` calls them; `sublayers` says the same in PyTorch. Shapes: B sequences of
T tokens, H heads of size D, S rows of R tokens each, hc streams. A program takes `queries` queries
of one sequence with all their heads, M of both together, or `block` rows.
"""

# pyright: basic, reportMissingImports=false

import triton
import triton.language as tl


@triton.jit
def _place(first, b, T, queries: tl.constexpr, H: tl.constexpr):
    """Of each of M: its query, its head, and its place among [B, T, H]."""
    m = tl.arange(0, queries * H)
    t = first + m // H
    return t, m % H, (b * T + t).to(tl.int64) * H + m % H


@triton.jit
def _vectors(pointer, places, is_there, D: tl.constexpr):
    """One vector [D] for each place; zeros where there is none."""
    d = tl.arange(0, D)
    return tl.load(pointer + places[:, None] * D + d, mask=is_there[:, None], other=0.0)


@triton.jit
def _is_near(query, row, begins, W: tl.constexpr):
    """Whether a token's window reaches another: both broadcast, with the document's first."""
    return (row <= query) & (row > query - W) & (row >= begins)


@triton.jit
def attend_forward(
    q, kv, rows, mask, begins, sink, out, lse, T, S, scale,
    R: tl.constexpr, W: tl.constexpr, H: tl.constexpr, D: tl.constexpr,
    queries: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """out [B, T, H, D], lse f32 [B, T, H]; R = 0: there are no rows."""
    first, b = tl.program_id(0) * queries, tl.program_id(1)
    t, h, at = _place(first, b, T, queries, H)
    is_there = t < T
    vectors = _vectors(q, at, is_there, D)
    begin = tl.load(begins + b * T + t, mask=is_there, other=0)
    top = tl.load(sink + h)
    total = tl.full([queries * H], 1.0, tl.float32)
    sums = tl.zeros([queries * H, D], tl.float32)
    oldest = tl.load(begins + b * T + first)
    end = tl.minimum(first + queries, T)
    for start in range(tl.maximum(first - W, 0), end, block):
        s = start + tl.arange(0, block)
        keys = _vectors(kv, (b * T + s).to(tl.int64), s < T, D)
        seen = _is_near(t[:, None], s[None, :], begin[:, None], W)
        score = tl.where(seen, tl.dot(vectors, tl.trans(keys)) * scale, float("-inf"))
        higher = tl.maximum(top, tl.max(score, 1))
        p = tl.exp(score - higher[:, None])
        shrink = tl.exp(top - higher)
        total = total * shrink + tl.sum(p, 1)
        sums = sums * shrink[:, None] + tl.dot(p.to(keys.dtype), keys)
        top = higher
    if R > 0:
        query = (b * T + t).to(tl.int64) * S
        for start in range(oldest // R // block * block, end // R, block):
            s = start + tl.arange(0, block)
            is_real = is_there[:, None] & (s < S)[None, :]
            seen = tl.load(mask + query[:, None] + s, mask=is_real, other=0)
            if tl.max(tl.max(seen.to(tl.int32), 1), 0) > 0:
                keys = _vectors(rows, (b * S + s).to(tl.int64), s < S, D)
                score = tl.dot(vectors, tl.trans(keys)) * scale
                score = tl.where(seen != 0, score, float("-inf"))
                higher = tl.maximum(top, tl.max(score, 1))
                p = tl.exp(score - higher[:, None])
                shrink = tl.exp(top - higher)
                total = total * shrink + tl.sum(p, 1)
                sums = sums * shrink[:, None] + tl.dot(p.to(keys.dtype), keys)
                top = higher
    result = (sums / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + at[:, None] * D + tl.arange(0, D), result, mask=is_there[:, None])
    tl.store(lse + at, top + tl.log(total), mask=is_there)


@triton.jit
def attend_backward_queries(
    q, kv, rows, mask, begins, lse, d_out, delta, d_q, T, S, scale,
    R: tl.constexpr, W: tl.constexpr, H: tl.constexpr, D: tl.constexpr,
    queries: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """d_q [B, T, H, D]; delta f32 [B, T, H] is the sum of out * d_out."""
    first, b = tl.program_id(0) * queries, tl.program_id(1)
    t, _, at = _place(first, b, T, queries, H)
    is_there = t < T
    vectors = _vectors(q, at, is_there, D)
    gradient = _vectors(d_out, at, is_there, D)
    begin = tl.load(begins + b * T + t, mask=is_there, other=0)
    norm = tl.load(lse + at, mask=is_there, other=0.0)
    less = tl.load(delta + at, mask=is_there, other=0.0)
    sums = tl.zeros([queries * H, D], tl.float32)
    oldest = tl.load(begins + b * T + first)
    end = tl.minimum(first + queries, T)
    for start in range(tl.maximum(first - W, 0), end, block):
        s = start + tl.arange(0, block)
        keys = _vectors(kv, (b * T + s).to(tl.int64), s < T, D)
        seen = _is_near(t[:, None], s[None, :], begin[:, None], W)
        score = tl.where(seen, tl.dot(vectors, tl.trans(keys)) * scale, float("-inf"))
        p = tl.exp(score - norm[:, None])
        d_score = p * (tl.dot(gradient, tl.trans(keys)) - less[:, None]) * scale
        sums += tl.dot(d_score.to(keys.dtype), keys)
    if R > 0:
        query = (b * T + t).to(tl.int64) * S
        for start in range(oldest // R // block * block, end // R, block):
            s = start + tl.arange(0, block)
            is_real = is_there[:, None] & (s < S)[None, :]
            seen = tl.load(mask + query[:, None] + s, mask=is_real, other=0)
            if tl.max(tl.max(seen.to(tl.int32), 1), 0) > 0:
                keys = _vectors(rows, (b * S + s).to(tl.int64), s < S, D)
                score = tl.dot(vectors, tl.trans(keys)) * scale
                p = tl.where(seen != 0, tl.exp(score - norm[:, None]), 0.0)
                d_score = p * (tl.dot(gradient, tl.trans(keys)) - less[:, None]) * scale
                sums += tl.dot(d_score.to(keys.dtype), keys)
    result = sums.to(d_q.dtype.element_ty)
    tl.store(d_q + at[:, None] * D + tl.arange(0, D), result, mask=is_there[:, None])


@triton.jit
def attend_backward_rows(
    q, rows, mask, begins, ends, lse, d_out, delta, d_rows, T, S, scale,
    R: tl.constexpr, W: tl.constexpr, H: tl.constexpr, D: tl.constexpr,
    queries: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """d_rows [B, S, D]: of rows under their mask, or with R = 0 of the windows' tokens, S = T."""
    start, b = tl.program_id(0) * block, tl.program_id(1)
    s = start + tl.arange(0, block)
    places = (b * S + s).to(tl.int64)
    keys = _vectors(rows, places, s < S, D)
    sums = tl.zeros([block, D], tl.float32)
    last = tl.minimum(start + block, S) - 1
    if R > 0:
        low = start * R
        high = tl.load(ends + b * T + last * R)
    else:
        low = start
        high = tl.minimum(last + W, T)
    for first in range(low // queries * queries, high, queries):
        t, _, at = _place(first, b, T, queries, H)
        is_there = t < T
        if R > 0:
            query = (b * T + t).to(tl.int64) * S
            is_real = is_there[None, :] & (s < S)[:, None]
            marks = tl.load(mask + query[None, :] + s[:, None], mask=is_real, other=0)
            seen = marks != 0
        else:
            begin = tl.load(begins + b * T + t, mask=is_there, other=T)
            seen = is_there[None, :] & _is_near(t[None, :], s[:, None], begin[None, :], W)
        if tl.max(tl.max(seen.to(tl.int32), 1), 0) > 0:
            vectors = _vectors(q, at, is_there, D)
            gradient = _vectors(d_out, at, is_there, D)
            norm = tl.load(lse + at, mask=is_there, other=0.0)
            less = tl.load(delta + at, mask=is_there, other=0.0)
            score = tl.dot(keys, tl.trans(vectors)) * scale
            p = tl.where(seen, tl.exp(score - norm[None, :]), 0.0)
            sums += tl.dot(p.to(gradient.dtype), gradient)
            d_score = p * (tl.dot(keys, tl.trans(gradient)) - less[None, :]) * scale
            sums += tl.dot(d_score.to(vectors.dtype), vectors)
    result = sums.to(d_rows.dtype.element_ty)
    tl.store(d_rows + places[:, None] * D + tl.arange(0, D), result, mask=(s < S)[:, None])


@triton.jit
def row_shares(
    q, rows, mask, lse, out, T, S, U, scale,
    stride: tl.constexpr, H: tl.constexpr, D: tl.constexpr,
    queries: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """out f32 [B, U, S]: what each row got of every stride-th query, summed over heads."""
    b = tl.program_id(2)
    u = tl.program_id(0) * queries + tl.arange(0, queries)
    s = tl.program_id(1) * block + tl.arange(0, block)
    to = out + (b * U + u).to(tl.int64)[:, None] * S + s
    is_inside = (u < U)[:, None] & (s < S)[None, :]
    of_queries = (b * T + u * stride).to(tl.int64)
    seen = tl.load(mask + of_queries[:, None] * S + s, mask=is_inside, other=0)
    share = tl.zeros([queries, block], tl.float32)
    if tl.max(tl.max(seen.to(tl.int32), 1), 0) > 0:
        keys = _vectors(rows, (b * S + s).to(tl.int64), s < S, D)
        for h in range(H):
            vectors = _vectors(q, of_queries * H + h, u < U, D)
            norm = tl.load(lse + of_queries * H + h, mask=u < U, other=0.0)
            score = tl.dot(vectors, tl.trans(keys)) * scale
            share += tl.where(seen != 0, tl.exp(score - norm[:, None]), 0.0)
    tl.store(to, share, mask=is_inside)


@triton.jit
def index_scores(
    q, weights, keys, begins, blocks, out, T, S,
    R: tl.constexpr, size: tl.constexpr, H: tl.constexpr, D: tl.constexpr,
    queries: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """out f32 [B, T, S], -inf where a query does not see a row; size > 0: or not its block."""
    b = tl.program_id(2)
    t = tl.program_id(0) * queries + tl.arange(0, queries)
    start = tl.program_id(1) * block
    s = start + tl.arange(0, block)
    is_inside = (t < T)[:, None] & (s < S)[None, :]
    of_queries = (b * T + t).to(tl.int64)
    begin = tl.load(begins + of_queries, mask=t < T, other=T)
    seen = is_inside & (s[None, :] < ((t + 1) // R)[:, None]) & (s[None, :] * R >= begin[:, None])
    if size > 0:
        places = of_queries[:, None] * tl.cdiv(S, size) + (s // size)[None, :]
        seen = seen & (tl.load(blocks + places, mask=is_inside, other=0) != 0)
    score = tl.zeros([queries, block], tl.float32)
    if tl.max(tl.max(seen.to(tl.int32), 1), 0) > 0:
        vectors_of_rows = _vectors(keys, (b * S + s).to(tl.int64), s < S, D)
        for h in range(H):
            vectors = _vectors(q, of_queries * H + h, t < T, D)
            weight = tl.load(weights + of_queries * H + h, mask=t < T, other=0.0)
            product = tl.dot(vectors, tl.trans(vectors_of_rows))
            score += tl.maximum(product, 0.0) * weight[:, None]
    score = tl.where(seen, score, float("-inf"))
    tl.store(out + of_queries[:, None] * S + s, score, mask=is_inside)


@triton.jit
def choose(score, out, S, k, width: tl.constexpr):
    """out u8 [rows, S]: 1 at the k highest, the lowest of equal ones; never at -inf."""
    row = tl.program_id(0).to(tl.int64) * S
    s = tl.arange(0, width)
    value = tl.load(score + row + s, mask=s < S, other=float("-inf"))
    is_real = value > float("-inf")
    chosen = is_real
    if tl.sum(is_real.to(tl.int32)) > k:
        # Bits in the order of the values: the k-th highest is found bit by bit from the top.
        bits = (value + 0.0).to(tl.int32, bitcast=True)
        order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
        least = tl.full([], -2147483648, tl.int64)
        for i in range(32):
            trial = least + (tl.full([], 2147483648, tl.int64) >> i)
            if tl.sum((order >= trial.to(tl.int32)).to(tl.int32)) >= k:
                least = trial
        is_higher = order > least.to(tl.int32)
        is_equal = order == least.to(tl.int32)
        room = k - tl.sum(is_higher.to(tl.int32))
        chosen = is_higher | (is_equal & (tl.cumsum(is_equal.to(tl.int32)) <= room))
    tl.store(out + row + s, chosen.to(tl.uint8), mask=s < S)


@triton.jit
def sinkhorn_forward(x, out, sums, N, eps, rounds, hc: tl.constexpr, block: tl.constexpr):
    """out [N, hc, hc]; sums [1 + 2 rounds, N, hc]: what each normalisation divided by."""
    n = tl.program_id(0) * block + tl.arange(0, block)
    i = tl.arange(0, hc)
    at = (n * hc * hc)[:, None, None] + (i * hc)[None, :, None] + i[None, None, :]
    is_there = (n < N)[:, None, None]
    c = tl.load(x + at, mask=is_there, other=0.0)
    c = tl.exp(c - tl.max(c, 2)[:, :, None])
    c = c / tl.sum(c, 2)[:, :, None] + eps
    to = sums + (n * hc)[:, None] + i[None, :]
    of = tl.sum(c, 1) + eps
    tl.store(to, of, mask=(n < N)[:, None])
    c = c / of[:, None, :]
    for _ in range(rounds):
        to += N * hc
        of = tl.sum(c, 2) + eps
        tl.store(to, of, mask=(n < N)[:, None])
        c = c / of[:, :, None]
        to += N * hc
        of = tl.sum(c, 1) + eps
        tl.store(to, of, mask=(n < N)[:, None])
        c = c / of[:, None, :]
    tl.store(out + at, c, mask=is_there)


@triton.jit
def sinkhorn_backward(out, sums, d_out, d_x, N, eps, rounds, hc: tl.constexpr, block: tl.constexpr):
    """d_x [N, hc, hc], undoing one normalisation after the other."""
    n = tl.program_id(0) * block + tl.arange(0, block)
    i = tl.arange(0, hc)
    at = (n * hc * hc)[:, None, None] + (i * hc)[None, :, None] + i[None, None, :]
    is_there = (n < N)[:, None, None]
    c = tl.load(out + at, mask=is_there, other=0.0)
    d = tl.load(d_out + at, mask=is_there, other=0.0)
    to = sums + 2 * rounds * N * hc + (n * hc)[:, None] + i[None, :]
    for _ in range(rounds):
        of = tl.load(to, mask=(n < N)[:, None], other=1.0)
        d = (d - tl.sum(d * c, 1)[:, None, :]) / of[:, None, :]
        c = c * of[:, None, :]
        to -= N * hc
        of = tl.load(to, mask=(n < N)[:, None], other=1.0)
        d = (d - tl.sum(d * c, 2)[:, :, None]) / of[:, :, None]
        c = c * of[:, :, None]
        to -= N * hc
    of = tl.load(to, mask=(n < N)[:, None], other=1.0)
    d = (d - tl.sum(d * c, 1)[:, None, :]) / of[:, None, :]
    c = c * of[:, None, :] - eps
    d = c * (d - tl.sum(d * c, 2)[:, :, None])
    tl.store(d_x + at, d, mask=is_there)
