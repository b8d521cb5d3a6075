"""Sparse attention's kernels against the reference and float64, for few queries and for many."""

from dataclasses import dataclass, replace
from functools import partial

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray

from mlx_engine.formats import COMPRESSED, WINDOW, CacheFormats
from mlx_engine.ops.attention import (
    Chosen,
    SelectedRows,
    WindowRows,
    sparse_attention,
    sparse_attention_reference,
)
from mlx_engine.ops.attention_bytes import Seen, sparse_attention_traffic
from mlx_engine.ops.rope import Rotation, rotate
from tests.kernels.counted import Launches, check_traffic
from tests.msl import emulator
from tests.unit.arrays import INF, Float, f32, host, normal
from tests.unrounded import UNROUNDED

# A code and a scale that are no numbers: what no query sees may hold them.
NO_NUMBER = 0xFFFFFFFF


@dataclass(frozen=True)
class Case:
    """One call: Q queries of H heads, W window rows a query, S compressed rows.

    `chosen`: "none", "all" or "some". `before`: tokens of the sequence before the first query.
    """

    Q: int
    H: int
    W: int
    S: int
    chosen: str
    before: int
    D: int = 64
    R: int = 16
    k: int = 5
    is_ring: bool = False
    dtype: mx.Dtype = mx.float32
    q_scale: float = 2.0
    turns_q: bool = False

    def q(self) -> mx.array:
        return f32(self.q_scale * normal(5, self.Q, self.H, self.D)).astype(self.dtype)

    def sinks(self) -> mx.array:
        return f32(normal(6, self.H))

    def at(self) -> Rotation:
        angle = normal(7, self.Q, self.R // 2)
        cos, sin = np.cos(angle), np.sin(angle)
        return Rotation(f32(np.stack([cos, cos], -1)), f32(np.stack([-sin, sin], -1)))

    def visible(self) -> NDArray[np.int64]:
        """Below the newest rows, so that some rows are seen by no query."""
        least = max(self.S - 3, 0) if self.Q == 1 else 0
        return np.random.default_rng(3).integers(least, self.S + 1, self.Q)

    def ids(self) -> NDArray[np.int64] | None:
        if self.chosen != "some":
            return None
        ids = np.argsort(normal(4, self.Q, self.S), axis=1)[:, : self.k]
        return np.where(ids < self.visible()[:, None], ids, -1)

    def seen(self) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Which query sees which window row, of those from the oldest on, and compressed row."""
        position = np.arange(self.before, self.before + self.Q)
        oldest = max(self.before - self.W + 1, 0)
        age = position[:, None] - np.arange(oldest, self.before + self.Q)
        compressed = np.arange(self.S) < self.visible()[:, None]
        ids = self.ids()
        if ids is not None:
            compressed = (np.arange(self.S)[:, None] == ids[:, None]).any(axis=-1)
        return (age >= 0) & (age < self.W), compressed & (self.chosen != "none")


def rows_of(case: Case) -> tuple[mx.array, mx.array]:
    """Packed window rows and compressed rows; compressed rows that nobody sees are no numbers."""
    in_window, compressed = case.seen()
    window = WINDOW.pack(f32(normal(1, in_window.shape[1], case.D)))
    rows = np.array(COMPRESSED.pack(f32(normal(2, case.S, case.D))), np.uint32)
    rows[~compressed.any(axis=0)] = NO_NUMBER
    return window, mx.array(rows)


def attend(case: Case, window: mx.array, rows: mx.array) -> mx.array:
    oldest = max(case.before - case.W + 1, 0)
    if case.is_ring:
        window = mx.roll(window, (case.before + 1) % case.W, 0)
    else:
        # Rows before the first query's reach, and after the last query.
        past, words = min(oldest, 3), window.shape[1]
        extra = mx.full((past + 2, words), NO_NUMBER, dtype=mx.uint32)
        window, oldest = mx.concatenate([extra[2:], window, extra[:2]]), oldest - past
    selected, ids = None, case.ids()
    if case.chosen != "none":
        selected = SelectedRows(
            rows,
            mx.array(case.visible().astype(np.int32)),
            None if ids is None else mx.array(ids.astype(np.int32)),
        )
    return sparse_attention(
        case.q(),
        case.before,
        WindowRows(window, None if case.is_ring else oldest),
        selected,
        case.sinks(),
        sliding_window=case.W,
        at=case.at(),
        formats=CacheFormats(),
        turns_q=case.turns_q,
    )


def expected(case: Case, window: mx.array, rows: mx.array) -> Float:
    """softmax(q k / sqrt(D)) k with a sink, then the pairs turned back, in float64."""
    q = rotate(case.q(), case.at()) if case.turns_q else case.q()
    q, sinks = host(q).astype(np.float64), host(case.sinks()).astype(np.float64)
    seen = np.concatenate(case.seen(), axis=1)
    values = [host(WINDOW.unpack(window, case.D)), host(COMPRESSED.unpack(rows, case.D))]
    keys = np.concatenate(values).astype(np.float64)
    keys[~seen.any(axis=0)] = 0
    scores = np.where(seen[:, None], q @ keys.T / np.sqrt(case.D), -INF)
    top = np.maximum(scores.max(-1, keepdims=True), sinks[None, :, None])
    e = np.exp(scores - top)
    out = e / (e.sum(-1, keepdims=True) + np.exp(sinks[None, :, None] - top)) @ keys
    angle = normal(7, case.Q, 1, case.R // 2)
    turned = out[..., -case.R :].reshape(*out.shape[:2], -1, 2) @ [1, 1j] * np.exp(-1j * angle)
    out[..., -case.R :] = np.stack([turned.real, turned.imag], -1).reshape(*out.shape[:2], -1)
    return out


def check(case: Case, packed: tuple[mx.array, mx.array] | None = None) -> None:
    window, rows = packed or rows_of(case)
    found = attend(case, window, rows)
    assert found.dtype == case.dtype
    right = expected(case, window, rows)
    # In f32 the roundings of the scores (at most about 10) and of two sums; bf16 rounds once more.
    rounding = 0.0 if case.dtype == mx.float32 else 2.0**-8
    bound = 5e-6 * np.abs(right).max() + rounding * np.abs(right)
    np.testing.assert_array_less(np.abs(host(found) - right), bound)


decode = partial(Case, Q=1, H=3, is_ring=True)


@pytest.mark.parametrize("n", [1, 31, 33, 63, 65, 127, 129])
@pytest.mark.parametrize("chosen", ["none", "all", "some"])
def test_one_query(n: int, chosen: str, kernels_on: Launches) -> None:
    check(decode(W=n, S=n, chosen=chosen, before=2 * n, k=n))
    # The first tokens of a sequence, whose window is no ring yet.
    check(decode(W=n, S=7, chosen=chosen, before=n // 2, is_ring=False))


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize(("H", "D", "R"), [(1, 64, 64), (8, 128, 32), (9, 192, 4), (17, 512, 64)])
def test_widths(H: int, D: int, R: int, dtype: mx.Dtype, kernels_on: Launches) -> None:
    check(
        decode(
            H=H, W=17, S=40, chosen="some", before=34, D=D, R=R, k=30, dtype=dtype, turns_q=H > 1
        )
    )


@pytest.mark.parametrize(
    ("Q", "H", "cut"),
    [
        (2, 9, (8, 2)),
        (7, 31, (8, 2)),
        (31, 3, (8, 2)),
        (33, 17, (8, 1)),
        (63, 18, (16, 1)),
        (65, 33, (32, 1)),
        (129, 1, (8, 1)),
    ],
)
@pytest.mark.parametrize("chosen", ["none", "all", "some"])
def test_many_queries(
    Q: int, H: int, cut: tuple[int, int], chosen: str, kernels_on: Launches
) -> None:
    dtype = mx.bfloat16 if Q % 2 else mx.float32
    case = Case(
        Q=Q, H=H, W=19, S=33, chosen=chosen, before=40, k=13, dtype=dtype, turns_q=Q % 3 == 0
    )
    check(case)
    if chosen == "some" and kernels_on is not None:
        heads, slices = cut
        assert kernels_on[0].threads == -(-H // heads) * 256 * slices * Q


def test_many_queries_at_the_released_widths(kernels_on: Launches) -> None:
    """The largest threadgroups, of 32 heads; without the emulator's checks."""
    case = Case(Q=40, H=64, W=9, S=12, chosen="some", before=20, D=512, R=64, k=5, turns_q=True)
    with emulator.using(checked=False):
        check(replace(case, dtype=mx.bfloat16))
    assert kernels_on is None or kernels_on[0].threads == 2 * 256 * 40


def test_every_code_and_far_scales(kernels_on: Launches) -> None:
    """Each row has codes of all values under one scale; the scores stay where f32 holds them."""
    D, n = 512, 16
    case = decode(H=9, W=n, S=n, chosen="all", before=2 * n, D=D, R=64)
    case = replace(case, q_scale=2.0**-12)
    rng = np.random.default_rng(8)
    e4m3 = np.tile(np.delete(np.arange(256), [0x7F, 0xFF]), 3)[:D]
    codes = np.stack([rng.permutation(e4m3) for _ in range(n)]).astype(np.uint8)
    scales = np.broadcast_to(np.linspace(4, 130, n).astype(np.uint8)[:, None], (n, D // 32))
    window = mx.array(np.concatenate([codes, scales], axis=1)).view(mx.uint32)
    # Each byte is two e2m1 codes; e4m3 scales are positive numbers.
    codes = np.stack([rng.permutation(256) for _ in range(n)]).astype(np.uint8)
    scales = rng.integers(1, 0x7F, (n, D // 16)).astype(np.uint8)
    rows = np.concatenate([codes, scales], axis=1)
    seen = case.seen()[1].any(axis=0)
    rows[~seen] = 0xFF
    check(case, (window, mx.array(rows).view(mx.uint32)))


def test_nothing_is_chosen(kernels_on: Launches) -> None:
    """A query that no compressed row is visible to, and one that only lists none."""
    case = Case(Q=2, H=3, W=5, S=40, chosen="all", before=9)
    window, rows = rows_of(case)
    alone = attend(replace(case, chosen="none"), window, rows)
    for ids in (None, mx.full((2, 40), -1, dtype=mx.int32)):
        selected = SelectedRows(
            mx.full(rows.shape, NO_NUMBER, dtype=mx.uint32), mx.array([0, 0]), ids
        )
        found = sparse_attention(
            case.q(),
            case.before,
            WindowRows(window, case.before - case.W + 1),
            selected,
            case.sinks(),
            sliding_window=case.W,
            at=case.at(),
            formats=CacheFormats(),
        )
        np.testing.assert_allclose(host(found), host(alone), rtol=0, atol=2e-6)


def test_a_sink_may_take_everything(kernels_on: Launches) -> None:
    for Q in (1, 80):
        case = Case(Q=Q, H=3, W=5, S=8, chosen="all", before=9)
        window, _ = rows_of(case)
        for sink, share in ((200.0, 0.0), (-200.0, 1.0)):
            out = sparse_attention(
                mx.zeros((Q, 3, case.D)),
                case.before,
                WindowRows(mx.concatenate([window[:1]] * window.shape[0]), 5),
                None,
                mx.full((3,), sink),
                sliding_window=case.W,
                at=Rotation(mx.ones((Q, 8, 2)), mx.zeros((Q, 8, 2))),
                formats=CacheFormats(),
            )
            right = share * host(WINDOW.unpack(window[:1], case.D))
            np.testing.assert_allclose(host(out), np.broadcast_to(right, out.shape), atol=1e-6)


def test_other_formats_and_widths_are_the_references(kernels_on: Launches) -> None:
    at = decode(W=1, S=1, chosen="none", before=0).at()
    for D, formats in ((64, UNROUNDED), (32, CacheFormats()), (704, CacheFormats())):
        q, sinks = mx.ones((1, 3, D)), mx.zeros((3,))
        window = WindowRows(formats.window.pack(mx.ones((1, D))), 0)
        found, right = (
            compute(q, 0, window, None, sinks, sliding_window=4, at=at, formats=formats)
            for compute in (sparse_attention, sparse_attention_reference)
        )
        assert mx.array_equal(found, right)
    assert not kernels_on


@pytest.mark.parametrize(
    ("Q", "W", "S", "k", "chosen", "before"),
    [
        *((1, 128, 1, 0, "none", 128), (1, 128, 600, 512, "some", 300)),
        *((3, 33, 64, 40, "some", 50), (40, 33, 64, 20, "some", 50)),
        *((3, 33, 64, 0, "all", 50), (40, 33, 64, 0, "all", 50), (40, 33, 64, 0, "none", 50)),
    ],
)
def test_bytes(
    Q: int, W: int, S: int, k: int, chosen: str, before: int, kernels_on: Launches
) -> None:
    """At one query the released widths, with every check of the emulator."""
    H, dtype = (64, mx.bfloat16) if Q == 1 else (9, mx.float32)
    case = Case(Q, H, W, S, chosen, before, D=512, R=64, k=k, is_ring=Q == 1, dtype=dtype)
    case = replace(case, turns_q=k > 0)
    check(case)
    kind = {"none": Chosen.NONE, "all": Chosen.VISIBLE, "some": Chosen.LISTED}[chosen]
    in_window, compressed = case.seen()
    counts = zip(in_window.sum(axis=1).tolist(), compressed.sum(axis=1).tolist(), strict=True)
    planned = sparse_attention_traffic(
        (Q, H, 512),
        64,
        kind,
        [Seen(window, rows, k) for window, rows in counts],
        window_rows=int(in_window.any(axis=0).sum()),
        compressed_rows=int(compressed.any(axis=0).sum()),
        most_rows=W + {"none": 0, "all": S, "some": k}[chosen],
        value_bytes=case.q().itemsize,
        turns_q=case.turns_q,
    )
    assert len(planned) == (1 if Q == 40 else 2)
    check_traffic(kernels_on, *planned)
