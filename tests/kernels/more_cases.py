"""Cases for the sweep of what `kernel_cases` leaves out, since no decode step of the bench has it.

The operations that a prefill or the first and last layers have, the other forms of an operation,
and selections among as many rows as the longest context has.
"""

from functools import partial

import mlx.core as mx

from mlx_engine import kernel_state_cases as state
from mlx_engine.kernel_cases import Case
from mlx_engine.kernel_inputs import Numbers, Sizes, Work, work
from mlx_engine.ops import launch, mhc
from mlx_engine.ops.attention import Chosen
from mlx_engine.ops.indexer import candidate_blocks, select_rows
from mlx_engine.ops.indexer_bytes import selection_traffic
from mlx_engine.ops.mhc import MhcSublayer
from mlx_engine.ops.mhc_bytes import (
    HC,
    mhc_collapse_norm_traffic,
    mhc_enter_traffic,
    mhc_expand_traffic,
)
from mlx_engine.ops.sampling import draw
from mlx_engine.ops.sampling_bytes import draw_traffic
from mlx_engine.ops.topk import Selection, select_metal
from mlx_engine.ops.traffic import added
from mlx_engine.weights import MhcWeights

_EPS = 1e-20


def _enter(s: Sizes, T: int, numbers: Numbers) -> Work:
    D, columns = s.hidden_size, (2 + HC) * HC
    fn = numbers.normal(columns, HC * D, dtype=mx.float32) * (HC * D) ** -0.5
    base, scale = numbers.normal(columns, dtype=mx.float32), mx.array([0.5, 0.5, 0.5])
    weights = MhcWeights(fn, base, scale)
    to = MhcSublayer(weights, numbers.normal(D), s.hc_sinkhorn_iters, 1e-6, _EPS)
    pre = numbers.normal(T, HC, dtype=mx.float32)
    n_bytes = added(*mhc_enter_traffic(T, D, value_bytes=2)).unique_bytes
    return work(numbers.normal(T, HC, D), lambda x, to: mhc.mhc_enter(x, pre, to), [to], n_bytes)


def _expand(s: Sizes, T: int, numbers: Numbers) -> Work:
    D, shares = s.hidden_size, numbers.normal(T, 1 + HC, HC, dtype=mx.float32)
    streams, post, comb = numbers.normal(T, HC, D), shares[:, 0], shares[:, 1:]
    n_bytes = mhc_expand_traffic(T, D, value_bytes=2).unique_bytes
    return work(
        numbers.normal(T, D), lambda h, _: mhc.mhc_expand(h, streams, post, comb), [None], n_bytes
    )


def _collapse_norm(s: Sizes, T: int, numbers: Numbers) -> Work:
    D, pre = s.hidden_size, numbers.normal(T, HC, dtype=mx.float32)
    n_bytes = mhc_collapse_norm_traffic(T, D, value_bytes=2).unique_bytes
    return work(
        numbers.normal(T, HC, D),
        lambda x, norm: mhc.mhc_collapse_norm(x, pre, norm, _EPS),
        [numbers.normal(D)],
        n_bytes,
    )


def _best(
    s: Sizes, T: int, numbers: Numbers, *, kind: Selection, rows: int, k: int | None = None
) -> Work:
    """The k best of so many rows or their blocks, by default as many as the release chooses."""
    is_of_blocks = kind is Selection.BLOCKS
    k = k or (s.candidate_topk_blocks if is_of_blocks else s.index_topk)
    size = 1 if kind is Selection.ROWS else s.candidate_block_size
    visible = mx.full((T,), rows, dtype=mx.int32)
    # All blocks in their order, so that a row's place is its id.
    blocks = mx.broadcast_to(mx.arange(rows // size, dtype=mx.int32), (T, rows // size))
    more = {Selection.BLOCKS: (visible,), Selection.ROWS_OF_BLOCKS: (blocks,)}.get(kind, ())

    def best(scores: mx.array, _: None) -> mx.array:
        if launch.is_on("indexer"):
            return select_metal(kind, (scores, *more), k, size)
        if is_of_blocks:
            return candidate_blocks(scores, visible, block_size=size, topk_blocks=k)
        return select_rows(scores, k)

    n_bytes = added(*selection_traffic(kind, T, rows, k, size)).unique_bytes
    return work(numbers.normal(T, rows, dtype=mx.float32), best, [None], n_bytes)


def _draw_of_all(s: Sizes, _: int, numbers: Numbers) -> Work:
    return work(
        numbers.normal(s.vocab_size, dtype=mx.float32),
        lambda logits, key: draw(logits, key, temperature=1.0, top_p=1.0, min_p=0.0),
        [mx.random.key(0)],
        added(*draw_traffic(s.vocab_size, has_top_p=False)).unique_bytes,
    )


# Family, name, how to prepare it.
_TABLE = (
    ("mhc", "the first input", _enter),
    ("mhc", "the last output", _expand),
    ("mhc", "the head's input", _collapse_norm),
    ("front", "compressed row of one token", partial(state.compressed_row, ratio=1)),
    ("attention", "window", partial(state.attend, chosen=Chosen.NONE)),
    ("attention", "window and all rows", partial(state.attend, chosen=Chosen.VISIBLE)),
    ("indexer", "blocks of few keys", partial(_best, kind=Selection.BLOCKS, rows=20_000)),
    # The longest context: rows and blocks in parts, with so many survivors that they are cut too.
    ("indexer", "among a million keys", partial(_best, kind=Selection.ROWS, rows=1 << 20)),
    ("indexer", "blocks of a million keys", partial(_best, kind=Selection.BLOCKS, rows=1 << 20)),
    # More than any context makes of the released candidates.
    (
        "indexer",
        "among many candidates",
        partial(_best, kind=Selection.ROWS_OF_BLOCKS, rows=20_000, k=64),
    ),
)


def more_cases(tokens: tuple[int, ...]) -> list[Case]:
    """Each for every number of tokens; a draw has one."""
    return [
        *(Case(family, name, T, 0, prepare) for family, name, prepare in _TABLE for T in tokens),
        Case("sampling", "a draw of all", 1, 0, _draw_of_all),
    ]
