"""The bytes that traced launches move, and those that no engine could do without.

A kernel moves what the function of a `*_bytes` module says, which its own test compares with the
bytes that the emulator saw. So do MLX's operations, taken to read each array once, but for gathers
and slice updates, which touch their rows only. What is passed to those functions here is found from
shapes; test_launches.py compares a whole step with what the emulator saw.
"""

from collections.abc import Callable

from mlx_engine.config import ModelConfig
from mlx_engine.formats import COMPRESSED, INDEX, WINDOW
from mlx_engine.inventory import Owner, tensor_specs
from mlx_engine.layer_plan import LayerKind, layer_plan
from mlx_engine.ops.attention import Chosen
from mlx_engine.ops.attention_bytes import Seen, merge_traffic, sparse_attention_traffic
from mlx_engine.ops.engram_bytes import engram_rows_traffic, gate_value_traffic
from mlx_engine.ops.experts_bytes import down_traffic, gate_up_traffic
from mlx_engine.ops.front_bytes import (
    attention_front_traffic,
    encoded_keys_traffic,
    in_ring_traffic,
    index_queries_traffic,
    pooled_rows_traffic,
)
from mlx_engine.ops.indexer_bytes import best_traffic, index_scores_traffic
from mlx_engine.ops.linear_bytes import fp8_linear_traffic, linear_f32_traffic
from mlx_engine.ops.mhc_bytes import (
    mhc_between_traffic,
    mhc_collapse_norm_traffic,
    mhc_enter_traffic,
    mhc_expand_traffic,
)
from mlx_engine.ops.router_bytes import router_scores_traffic
from mlx_engine.ops.sampling_bytes import draw_traffic, first_traffic
from mlx_engine.ops.topk import Selection
from mlx_engine.ops.traffic import Traffic, moved
from tests.kernels.trace import Array, Launch

_WORD_BYTES = 4


def traffic(launch: Launch) -> Traffic:
    """The bytes that a launch moves. Every kernel of a step must have its formula."""
    if launch.kernel is not None:
        return _OF_KERNELS[launch.name](launch)
    formula = _OF_MLX.get(launch.name)
    return moved(given_bytes(launch)) if formula is None else formula(launch)


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


def _fp8_rows(launch: Launch) -> Traffic:
    x, (out,) = launch.inputs[0], launch.outputs
    T, G, K = x.shape
    return fp8_linear_traffic(T, out.shape[-1], K=K, value_bytes=_value_bytes(x), G=G)


def _fp8_rows_pair(launch: Launch) -> Traffic:
    x = launch.inputs[0]
    T, K = x.shape
    outputs = (out.shape[-1] for out in launch.outputs)
    return fp8_linear_traffic(T, *outputs, K=K, value_bytes=_value_bytes(x))


def _plain_rows(launch: Launch) -> Traffic:
    x, *weights = launch.inputs
    T, K = x.shape
    sizes = {"value_bytes": _value_bytes(x), "weight_bytes": _value_bytes(weights[0])}
    return linear_f32_traffic(T, *(w.shape[0] for w in weights), K=K, **sizes)


def _mhc_between(launch: Launch) -> Traffic:
    T, D = launch.inputs[0].shape
    return mhc_between_traffic(T, D, value_bytes=_value_bytes(launch.inputs[0]))[0]


def _mhc_enter(launch: Launch) -> Traffic:
    T, _, D = launch.inputs[0].shape
    return mhc_enter_traffic(T, D, value_bytes=_value_bytes(launch.inputs[0]))[0]


def _mhc_finish(launch: Launch) -> Traffic:
    T, D = launch.outputs[-1].shape
    return mhc_enter_traffic(T, D, **_norm_sizes(launch))[1]


def _norm_sizes(launch: Launch) -> dict[str, int]:
    norm, x = launch.inputs[5], launch.outputs[-1]
    return {"value_bytes": _value_bytes(x), "norm_bytes": _value_bytes(norm)}


def _mhc_collapse_norm(launch: Launch) -> Traffic:
    streams, _, norm, _ = launch.inputs
    T, _, D = streams.shape
    sizes = {"value_bytes": _value_bytes(streams), "norm_bytes": _value_bytes(norm)}
    return mhc_collapse_norm_traffic(T, D, **sizes)


def _mhc_expand(launch: Launch) -> Traffic:
    T, D = launch.inputs[0].shape
    return mhc_expand_traffic(T, D, value_bytes=_value_bytes(launch.inputs[0]))


def _moe_gate_up(launch: Launch) -> Traffic:
    """Of different experts for each slot."""
    x, scores = launch.inputs[:2]
    act, ids = launch.outputs
    (T, D), E, k, I_D = x.shape, scores.shape[1], ids.shape[1], act.shape[-1]
    return gate_up_traffic(T, k, E, D, I_D, _value_bytes(x), experts=T * k)


def _moe_down(launch: Launch) -> Traffic:
    act, ids = launch.inputs[:2]
    (T, k), I_D, (out,) = ids.shape, act.shape[-1], launch.outputs
    return down_traffic(T, k, out.shape[-1], I_D, _value_bytes(out), experts=T * k)


def _router_scores(launch: Launch) -> Traffic:
    T, E = launch.outputs[0].shape
    D, gate = launch.template["D"], launch.inputs[6]
    sizes = _norm_sizes(launch)
    return router_scores_traffic(T, E, D, **sizes, gate_bytes=_value_bytes(gate))


def _attention_front(launch: Launch) -> Traffic:
    latent, kv = launch.inputs[:2]
    (Q, L), (T, D) = latent.shape, kv.shape
    return attention_front_traffic(T, Q, L, D, launch.template["R"], _value_bytes(kv))


def _attention_front_in_ring(launch: Launch) -> Traffic:
    latent, kv, *_, ring, _ = launch.inputs
    L, D, R = latent.shape[1], kv.shape[1], launch.template["R"]
    return in_ring_traffic(ring.shape[0], L, D, R, _value_bytes(kv))


def _pooled_rows(launch: Launch) -> Traffic:
    G, D = launch.outputs[0].shape
    template, latent = launch.template, launch.outputs[0]
    return pooled_rows_traffic(G, template["RATIO"], D, template["R"], _value_bytes(latent))


def _encoded_keys(launch: Launch) -> Traffic:
    G, D = launch.inputs[0].shape
    return encoded_keys_traffic(G, D, launch.template["R"])


def _index_queries(launch: Launch) -> Traffic:
    q, x = launch.inputs[:2]
    (Q, H, D), (_, K) = q.shape, x.shape
    return index_queries_traffic(Q, H, D, K, launch.template["R"], _value_bytes(q))


def _engram_rows(launch: Launch) -> Traffic:
    (rows,) = launch.outputs
    T, E = rows.shape
    return engram_rows_traffic(T, E, value_bytes=_value_bytes(rows))


def _engram_gate(launch: Launch) -> Traffic:
    streams, _, q_weight = launch.inputs[:3]
    sizes = {"value_bytes": _value_bytes(streams), "weight_bytes": _value_bytes(q_weight)}
    return gate_value_traffic(*streams.shape, **sizes)


def _index_scores(launch: Launch) -> Traffic:
    q, _, codes, _, _, *blocks = launch.inputs
    Q, H, D = q.shape
    return index_scores_traffic(
        *(Q, codes.shape[0], H, D),
        value_bytes=_value_bytes(q),
        block_size=launch.template.get("SIZE", 1),
        candidate_blocks=blocks[0].shape[1] if blocks else None,
    )


def _selection(launch: Launch) -> Traffic:
    kind = Selection(launch.name.removeprefix("best_").removesuffix("_of_parts"))
    (Q, N), template = launch.inputs[0].shape, launch.template
    return best_traffic(kind, Q, N, template["K"], template.get("SIZE", 1))


def _sparse_attention(launch: Launch) -> Traffic:
    """Of one query, or of several that see as much: all of the window, and what is chosen."""
    q, window, compressed, ids = launch.inputs[:4]
    template, kind = launch.template, Chosen(launch.template["CHOSEN"])
    Q, H, D = q.shape
    own = min(window.shape[0], template["REACH"])
    rows = {Chosen.NONE: 0, Chosen.VISIBLE: compressed.shape[0], Chosen.LISTED: ids.shape[-1]}[kind]
    return sparse_attention_traffic(
        (Q, H, D),
        template["R"],
        kind,
        [Seen(own, rows, rows if kind is Chosen.LISTED else 0)] * Q,
        window_rows=min(window.shape[0], template["REACH"] + Q - 1),
        compressed_rows=rows,
        most_rows=own + rows,
        value_bytes=_value_bytes(q),
        turns_q=template["TURNS"],
    )[0]


def _merge_slices(launch: Launch) -> Traffic:
    (out,), (_, slices, *_) = launch.outputs, launch.inputs[0].shape
    Q, H, D = out.shape
    return merge_traffic((Q, H, D), launch.template["R"], slices, _value_bytes(out))


def _sampling(launch: Launch) -> Traffic:
    (V,) = launch.inputs[0].shape
    of_all, of_nucleus = draw_traffic(V, has_top_p=False), draw_traffic(V, has_top_p=True)
    return {
        "sampling_greatest": of_all[0],
        "sampling_draw": of_all[1],
        "sampling_histogram_0": of_nucleus[1],
        "sampling_histogram_1": of_nucleus[2],
        "sampling_histogram_2": of_nucleus[3],
        "sampling_draw_nucleus": of_nucleus[4],
    }[launch.name]


def _sampling_first(launch: Launch) -> Traffic:
    return first_traffic(*launch.inputs[0].shape)


def _gather(launch: Launch) -> Traffic:
    rows = sum(out.unique_bytes for out in launch.outputs)
    return moved(2 * rows + sum(ids.unique_bytes for ids in launch.inputs[1:]))


def _slice_update(launch: Launch) -> Traffic:
    _, rows, *start = launch.inputs
    return moved(2 * rows.unique_bytes + sum(x.unique_bytes for x in start))


_OF_KERNELS: dict[str, Callable[[Launch], Traffic]] = {
    "fp8_rows": _fp8_rows,
    "fp8_rows_pair": _fp8_rows_pair,
    "plain_rows": _plain_rows,
    "plain_rows_pair": _plain_rows,
    "mhc_between": _mhc_between,
    "mhc_enter": _mhc_enter,
    "mhc_finish": _mhc_finish,
    "mhc_collapse_norm": _mhc_collapse_norm,
    "mhc_expand": _mhc_expand,
    "moe_gate_up": _moe_gate_up,
    "moe_down": _moe_down,
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
    "best_survivors": _selection,
    "best_survivors_of_parts": _selection,
    "attend_whole": _sparse_attention,
    "attend_slices": _sparse_attention,
    "merge_slices": _merge_slices,
    "sampling_greatest": _sampling,
    "sampling_draw": _sampling,
    "sampling_histogram_0": _sampling,
    "sampling_histogram_1": _sampling,
    "sampling_histogram_2": _sampling,
    "sampling_draw_nucleus": _sampling,
    "sampling_first": _sampling_first,
}
_OF_MLX: dict[str, Callable[[Launch], Traffic]] = {
    "Gather": _gather,
    "SliceUpdate": _slice_update,
    "DynamicSliceUpdate": _slice_update,
}
