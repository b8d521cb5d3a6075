"""The bytes that traced launches read and write, and those that no engine could do without.

A kernel moves what the `*_bytes` function beside its wrapper says, which its own test compares with
the bytes that the emulator saw; one that is not named here reads all it is given and writes its
outputs. So do MLX's operations, but for gathers and slice updates, which touch their rows only.
"""

from collections.abc import Callable

from mlx_engine.config import TILE, ModelConfig
from mlx_engine.formats import COMPRESSED, INDEX, WINDOW
from mlx_engine.inventory import Owner, tensor_specs
from mlx_engine.layer_plan import LayerKind, layer_plan
from mlx_engine.ops.attention_bytes import sparse_attention_bytes
from mlx_engine.ops.engram import engram_gate_bytes
from mlx_engine.ops.experts import moe_bytes
from mlx_engine.ops.front_bytes import (
    attention_front_bytes,
    encoded_keys_bytes,
    in_ring_bytes,
    index_queries_bytes,
    pooled_rows_bytes,
)
from mlx_engine.ops.indexer import choose_rows_bytes
from mlx_engine.ops.linear import fp8_linear_bytes, linear_f32_bytes
from mlx_engine.ops.mhc_bytes import (
    mhc_between_bytes,
    mhc_collapse_norm_bytes,
    mhc_enter_bytes,
    mhc_expand_bytes,
)
from mlx_engine.ops.router import router_scores_bytes
from mlx_engine.ops.sampling import draw_bytes
from mlx_engine.ops.topk import selection_bytes
from tests.kernels.trace import Array, Launch

_WORD_BYTES = 4


def launch_bytes(launch: Launch) -> int:
    """Bytes that a launch moves. Of kernels that share a formula the first has them, others 0."""
    formula = _FORMULAS.get(launch.name)
    return given_bytes(launch) if formula is None else formula(launch)


def given_bytes(launch: Launch) -> int:
    """Bytes of all arrays that a launch reads and writes."""
    return sum(array.unique_bytes for array in (*launch.inputs, *launch.outputs))


def floor_bytes(config: ModelConfig) -> int:
    """Bytes of weights that one token needs: without experts and rows that it did not choose."""
    total = 0
    for spec in tensor_specs(config):
        if spec.owner is Owner.EMBED:
            total += spec.n_bytes // config.vocab_size
        elif ".experts." in spec.name and spec.owner in (Owner.ENCODER, Owner.DECODER):
            expert = int(spec.name.split(".experts.")[1].split(".")[0])
            total += spec.n_bytes if expert < config.num_experts_per_tok else 0
        elif spec.owner in (Owner.ENCODER, Owner.DECODER, Owner.HEAD, Owner.ENGRAM):
            total += spec.n_bytes
        elif spec.owner is Owner.ENGRAM_TABLES and config.engram is not None:
            total += spec.n_bytes // spec.shape[0] * config.engram.columns
    return total


def state_read_bytes(config: ModelConfig, tokens: int) -> int:
    """Bytes of state that the last of `tokens` tokens reads: windows, chosen rows, index keys."""
    total = 0
    for plan in layer_plan(config):
        total += min(tokens, config.sliding_window) * _row_bytes(WINDOW.words(config.head_dim))
        if plan.ratio == 0:
            continue
        rows = tokens // plan.ratio
        chosen = min(rows, config.index_topk)
        total += chosen * _row_bytes(COMPRESSED.words(config.head_dim))
        scanned = rows if plan.kind in (LayerKind.FULL, LayerKind.REINDEX) else 0
        if plan.uses_candidates:
            scanned = min(rows, config.candidate_topk_blocks * config.candidate_block_size)
        if rows > config.index_topk:
            total += scanned * (config.index_head_dim // 2 + config.index_head_dim // INDEX.group)
    return total


def _row_bytes(words: int) -> int:
    return words * _WORD_BYTES


def _value_bytes(array: Array) -> int:
    return array.dtype.size


def _fp8_rows(launch: Launch) -> int:
    x, (out,) = launch.inputs[0], launch.outputs
    T, G, K = x.shape
    return fp8_linear_bytes(T, out.shape[-1], K, value_bytes=_value_bytes(x), G=G)


def _fp8_rows_pair(launch: Launch) -> int:
    x = launch.inputs[0]
    T, K = x.shape
    both = (
        fp8_linear_bytes(T, out.shape[-1], K, value_bytes=_value_bytes(x)) for out in launch.outputs
    )
    return sum(both) - x.unique_bytes  # x is read once


def _plain_rows(launch: Launch) -> int:
    x, *weights = launch.inputs
    T, K = x.shape
    products = (
        linear_f32_bytes(
            T, w.shape[0], K, value_bytes=_value_bytes(x), weight_bytes=_value_bytes(w)
        )
        for w in weights
    )
    return sum(products) - (len(weights) - 1) * x.unique_bytes


def _mhc_between(launch: Launch) -> int:
    T, D = launch.inputs[0].shape
    return mhc_between_bytes(T, D, value_bytes=_value_bytes(launch.inputs[0]))[0]


def _mhc_enter(launch: Launch) -> int:
    T, _, D = launch.inputs[0].shape
    return mhc_enter_bytes(T, D, value_bytes=_value_bytes(launch.inputs[0]))[0]


def _mhc_finish(launch: Launch) -> int:
    T, D = launch.outputs[-1].shape
    norm, x = launch.inputs[5], launch.outputs[-1]
    sizes = {"value_bytes": _value_bytes(x), "norm_bytes": _value_bytes(norm)}
    return mhc_enter_bytes(T, D, **sizes)[1]


def _mhc_collapse_norm(launch: Launch) -> int:
    streams, _, norm, _ = launch.inputs
    T, _, D = streams.shape
    sizes = {"value_bytes": _value_bytes(streams), "norm_bytes": _value_bytes(norm)}
    return mhc_collapse_norm_bytes(T, D, **sizes)


def _mhc_expand(launch: Launch) -> int:
    T, D = launch.inputs[0].shape
    return mhc_expand_bytes(T, D, value_bytes=_value_bytes(launch.inputs[0]))


def _moe(launch: Launch) -> int:
    x, scores = launch.inputs[:2]
    act, ids = launch.outputs
    (T, D), E, k, I_D = x.shape, scores.shape[1], ids.shape[1], act.shape[-1]
    return moe_bytes(T, k, E, D, I_D, _value_bytes(x))


def _router_scores(launch: Launch) -> int:
    """The launch finishes the sublayer's coefficients and input besides."""
    T, E = launch.outputs[0].shape
    return _mhc_finish(launch) + router_scores_bytes(T, E, launch.template["D"])


def _attention_front(launch: Launch) -> int:
    latent, kv = launch.inputs[:2]
    (Q, L), (T, D) = latent.shape, kv.shape
    return attention_front_bytes(T, Q, L, D, launch.template["R"], _value_bytes(kv))


def _attention_front_in_ring(launch: Launch) -> int:
    latent, kv, *_, ring, _ = launch.inputs
    L, D, R = latent.shape[1], kv.shape[1], launch.template["R"]
    return in_ring_bytes(ring.shape[0], L, D, R, _value_bytes(kv))


def _pooled_rows(launch: Launch) -> int:
    G, D = launch.outputs[0].shape
    template, latent = launch.template, launch.outputs[0]
    return pooled_rows_bytes(G, template["RATIO"], D, template["R"], _value_bytes(latent))


def _encoded_keys(launch: Launch) -> int:
    G, D = launch.inputs[0].shape
    return encoded_keys_bytes(G, D, launch.template["R"])


def _index_queries(launch: Launch) -> int:
    q, x = launch.inputs[:2]
    (Q, H, D), (_, K) = q.shape, x.shape
    return index_queries_bytes(Q, H, D, K, launch.template["R"], _value_bytes(q))


def _engram_rows(launch: Launch) -> int:
    (rows,) = launch.outputs
    T, E = rows.shape
    return engram_gate_bytes(T, 1, TILE, E, value_bytes=_value_bytes(rows))[0]


def _engram_gate(launch: Launch) -> int:
    streams, _, q_weight = launch.inputs[:3]
    sizes = {"value_bytes": _value_bytes(streams), "weight_bytes": _value_bytes(q_weight)}
    T, hc, D = streams.shape
    return engram_gate_bytes(T, hc, D, TILE, **sizes)[2]


def _index_scores(launch: Launch) -> int:
    q, _, codes, _, _, *blocks = launch.inputs
    Q, H, D = q.shape
    N = launch.outputs[0].shape[1]
    count = blocks[0].shape[1] if blocks else None
    both = choose_rows_bytes(
        *(Q, codes.shape[0], H, D, 0),
        itemsize=_value_bytes(q),
        block_size=launch.template.get("SIZE", 1),
        candidate_blocks=count,
    )
    # A choice of none still reads the scores and the blocks.
    return both - 4 * Q * (N + (count or 0))


def _selection(launch: Launch) -> int:
    scores, k = launch.inputs[0], launch.template["K"]
    Q, N = scores.shape
    entries = -(-N // launch.template["SIZE"]) if "best_blocks" in launch.name else N
    return sum(x.unique_bytes for x in launch.inputs) + selection_bytes(Q, entries, k)


def _sparse_attention(launch: Launch) -> int:
    q, window, compressed, chosen = launch.inputs[:4]
    template = launch.template
    shape = (q.shape[0], q.shape[1], q.shape[2])
    window_rows = min(window.shape[0], template["REACH"] + shape[0] - 1)
    own_rows = min(window_rows, template["REACH"])
    kind: int = template["CHOSEN"]
    # Compressed rows of one query: none, all that it sees, or listed ones.
    rows = (0, compressed.shape[0], chosen.shape[-1])[kind]
    given = (0, chosen.shape[0], shape[0] * chosen.shape[-1])[kind]
    return sparse_attention_bytes(
        shape,
        template["R"],
        window_rows=window_rows,
        compressed_rows=rows,
        most_rows=own_rows + rows,
        chosen=given,
        value_bytes=_value_bytes(q),
        turns_q=template["TURNS"],
    )


def _sampling(launch: Launch) -> int:
    (V,) = launch.inputs[0].shape
    of_all, of_nucleus = draw_bytes(V, has_top_p=False), draw_bytes(V, has_top_p=True)
    return {
        "sampling_greatest": of_all[0],
        "sampling_draw": of_all[1],
        "sampling_histogram_0": of_nucleus[1],
        "sampling_histogram_1": of_nucleus[2],
        "sampling_histogram_2": of_nucleus[3],
        "sampling_draw_nucleus": of_nucleus[4],
    }[launch.name]


def _gather(launch: Launch) -> int:
    rows = sum(out.unique_bytes for out in launch.outputs)
    return 2 * rows + sum(ids.unique_bytes for ids in launch.inputs[1:])


def _slice_update(launch: Launch) -> int:
    _, rows, *start = launch.inputs
    return 2 * rows.unique_bytes + sum(x.unique_bytes for x in start)


def _counted_before(_: Launch) -> int:
    return 0


_FORMULAS: dict[str, Callable[[Launch], int]] = {
    "fp8_rows": _fp8_rows,
    "fp8_rows_pair": _fp8_rows_pair,
    "plain_rows": _plain_rows,
    "plain_rows_pair": _plain_rows,
    "mhc_between": _mhc_between,
    "mhc_enter": _mhc_enter,
    "mhc_finish": _mhc_finish,
    "mhc_collapse_norm": _mhc_collapse_norm,
    "mhc_expand": _mhc_expand,
    "moe_gate_up": _moe,
    "moe_down": _counted_before,
    "router_scores": _router_scores,
    "attention_front": _attention_front,
    "attention_front_in_ring": _attention_front_in_ring,
    "pooled_rows": _pooled_rows,
    "encoded_keys": _encoded_keys,
    "index_queries": _index_queries,
    "engram_rows": _engram_rows,
    "engram_gate": _engram_gate,
    "index_scores": _index_scores,
    "index_scores_of_blocks": _index_scores,
    "best_rows": _selection,
    "best_rows_of_parts": _selection,
    "best_blocks": _selection,
    "best_blocks_of_parts": _selection,
    "best_rows_of_blocks": _selection,
    "best_rows_of_blocks_of_parts": _selection,
    "best_survivors": _counted_before,
    "attend_whole": _sparse_attention,
    "attend_slices": _sparse_attention,
    "merge_slices": _counted_before,
    "sampling_greatest": _sampling,
    "sampling_draw": _sampling,
    "sampling_histogram_0": _sampling,
    "sampling_histogram_1": _sampling,
    "sampling_histogram_2": _sampling,
    "sampling_draw_nucleus": _sampling,
    "Gather": _gather,
    "SliceUpdate": _slice_update,
    "DynamicSliceUpdate": _slice_update,
}
