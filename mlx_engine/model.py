"""The forward pass of DeepSeek-V4.1-Flash, top to bottom: read `Model.forward` first.

Names follow the model's report and the checkpoint. State comes in as an argument, computation is
in ops/. Shapes: T tokens of the chunk, Q queries (the last tokens of it whose output is needed),
hc streams, D hidden_size, V vocab_size. Section numbers refer to docs/model.md.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_engine.chunk import Chunk
from mlx_engine.config import ModelConfig
from mlx_engine.devices import ONE, Devices
from mlx_engine.engram import EngramRows
from mlx_engine.layer_plan import LayerKind, LayerPlan, layer_plan
from mlx_engine.ops.attention import SelectedRows, sparse_attention
from mlx_engine.ops.engram import engram_gate
from mlx_engine.ops.experts import moe
from mlx_engine.ops.front import attention_front, encoded_keys, index_queries, pooled_rows
from mlx_engine.ops.head import head_logits
from mlx_engine.ops.indexer import IndexKeys, IndexQueries, choose_rows
from mlx_engine.ops.linear import (
    fp8_linear,
    fp8_linear_pair,
    grouped_output,
    linear_f32,
    linear_f32_pair,
)
from mlx_engine.ops.mhc import (
    MhcSublayer,
    Mixing,
    mhc_collapse_norm,
    mhc_enter,
    mhc_expand,
)
from mlx_engine.ops.project import mhc_project
from mlx_engine.ops.router import Router, mhc_route
from mlx_engine.state import SessionState
from mlx_engine.weights import AttentionWeights, FfnWeights, IndexerWeights, MhcWeights, Weights


@dataclass(frozen=True)
class Boundary:
    """What enters a layer, for the last T tokens: its streams as the attention reads them.

    streams: [T, hc, D]; x: [T, D], the attention's normed input; mixing: its coefficients;
    products: of x with wq_a and wkv, where they are made already. That of
    the last kv source crosses from the encoder layers to the decoder layers, when the source's
    compressed rows and index keys are published already.
    """

    streams: mx.array
    x: mx.array
    mixing: Mixing
    products: tuple[mx.array, mx.array] | None = None

    def last(self, tokens: int) -> "Boundary":
        """The part of the last `tokens` tokens."""
        first = max(self.x.shape[0] - tokens, 0)
        if first == 0:
            return self
        return Boundary(self.streams[first:], self.x[first:], self.mixing.last(tokens))

    def then(self, later: "Boundary") -> "Boundary":
        """This part and the one that follows it."""
        return Boundary(
            mx.concatenate([self.streams, later.streams]),
            mx.concatenate([self.x, later.x]),
            self.mixing.then(later.mixing),
        )

    def arrays(self) -> tuple[mx.array, ...]:
        """Every array of it: what must have been computed before it waits for a later chunk."""
        return self.streams, self.x, self.mixing.pre, self.mixing.post, self.mixing.comb


@dataclass(frozen=True)
class Output:
    """A layer's output h [T, D], and the streams and coefficients to write it back with."""

    h: mx.array
    streams: mx.array
    mixing: Mixing

    def written(self) -> mx.array:
        """The streams with the output in them: [T, hc, D]."""
        return mhc_expand(self.h, self.streams, self.mixing.post, self.mixing.comb)


class Model:
    """The text model over loaded weights; computes in `dtype` (bf16 or f32) between sublayers.

    One of several `devices` has its heads, its width of every expert and its part of the
    vocabulary; each sublayer's output is the sum of theirs, and all else every device does alike.
    """

    def __init__(
        self, config: ModelConfig, weights: Weights, dtype: mx.Dtype, devices: Devices = ONE
    ) -> None:
        self.config = config
        self.weights = weights
        self.dtype = dtype
        self.devices = devices
        self.plans = layer_plan(config)

    def forward(
        self, token_ids: Sequence[int], state: SessionState, engram_rows: EngramRows | None
    ) -> mx.array:
        """Run T tokens that follow the state through all layers: f32 logits [T, V]."""
        boundary = self.encode(token_ids, state, engram_rows)
        return self.head(*self.decode(boundary, state))

    def encode(
        self, token_ids: Sequence[int], state: SessionState, engram_rows: EngramRows | None
    ) -> Boundary:
        """Run the layers below the last kv source, and publish that source's rows.

        After this nothing above needs the past but through those rows and its own windows.
        """
        T, hc = len(token_ids), self.config.hc_mult
        chunk = Chunk.of(self.config, state.position + T, T)
        ids = mx.array(np.asarray(token_ids, dtype=np.int32).repeat(hc).reshape(T, hc))
        entered = self.enter(0, *self.embedded(ids), chunk, engram_rows)
        for layer in range(self.config.last_kv_source):
            self.publish(layer, entered.x, chunk, state)
            output = self.block(layer, entered, T, chunk, state)
            entered = self.between(output, layer + 1, chunk, engram_rows)
        self.publish(self.config.last_kv_source, entered.x, chunk, state)
        state.position += T
        return entered

    def decode(
        self, boundary: Boundary, state: SessionState, *, is_narrow: bool = False
    ) -> tuple[mx.array, mx.array]:
        """Run the layers from the last kv source up on the tokens of the boundary.

        `is_narrow` computes only what the logits of the last token and the windows after it depend
        on, which is exact: each layer needs one window fewer of the past than the one below.
        Returns the streams [Q, hc, D] and their last pre [Q, hc].
        """
        T, config = boundary.x.shape[0], self.config
        chunk = Chunk.of(config, state.position, T)
        top = config.num_hidden_layers - 1
        for layer in range(config.last_kv_source, top + 1):
            queries = T
            if is_narrow:
                boundary = boundary.last(config.reach_tokens(layer))
                queries = min(boundary.x.shape[0], config.reach_tokens(layer + 1))
            output = self.block(layer, boundary, queries, chunk, state)
            if layer == top:
                return output.written(), output.mixing.pre
            boundary = self.between(output, layer + 1, chunk, None)
        raise AssertionError("the last kv source is one of the layers")

    def head(self, streams: mx.array, pre: mx.array) -> mx.array:
        """Collapse with the last sublayer's pre, norm, and multiply by the head: f32 [T, V]."""
        x = mhc_collapse_norm(streams, pre, self.weights.norm, self.config.rms_norm_eps)
        return self.devices.gather(head_logits(x, self.weights.head))

    def embedded(self, ids: mx.array) -> tuple[mx.array, mx.array]:
        """What ids [T, hc], each token's once a stream, enter with: streams and the first pre."""
        T, hc = ids.shape
        first_only = mx.array(np.eye(1, hc, dtype=np.float32).repeat(T, axis=0))
        if self.devices.count == 1:
            return self.weights.embed[ids].astype(self.dtype), first_only
        rows = self.devices.gather(self.weights.embed[ids[:, 0]]).astype(self.dtype)
        return mx.repeat(rows[:, None], hc, axis=1), first_only

    def enter(
        self,
        layer: int,
        streams: mx.array,
        pre: mx.array,
        chunk: Chunk,
        engram_rows: EngramRows | None,
    ) -> Boundary:
        """Engram, and what the attention of a layer reads with the pre of the layer below."""
        w = self.weights.layers[layer]
        if w.engram is not None:
            assert engram_rows is not None
            # The layers below compute while the rows arrive.
            chunk.start(streams, pre)
            codes, scales = (_as_array(part) for part in engram_rows.result(layer))
            eps = self.config.rms_norm_eps
            streams = engram_gate(streams, codes, scales, w.engram, eps, self.devices)
        return Boundary(streams, *mhc_enter(streams, pre, self._sublayer(w.hc_attn, w.attn_norm)))

    def between(
        self, below: Output, layer: int, chunk: Chunk, engram_rows: EngramRows | None
    ) -> Boundary:
        """Write the output of the layer below back, and enter the next one."""
        w, pre = self.weights.layers[layer], below.mixing.pre
        if w.engram is not None:
            return self.enter(layer, below.written(), pre, chunk, engram_rows)
        to = self._sublayer(w.hc_attn, w.attn_norm)
        weights = w.attn.wq_a, w.attn.wkv
        return Boundary(*mhc_project(below.h, below.streams, below.mixing, pre, to, *weights))

    def block(
        self, layer: int, entered: Boundary, queries: int, chunk: Chunk, state: SessionState
    ) -> Output:
        """One layer (sections 3.2, 3.7) on what has entered it; the last Q tokens go on.

        The hand-off is one sublayer late: the attention's pre collapses the FFN's input, and the
        FFN's pre the next layer's.
        """
        w = self.weights.layers[layer]
        streams, mixing = entered.streams[-queries:], entered.mixing.last(queries)
        h = self._attention(self.plans[layer], w.attn, entered, queries, chunk, state)
        to = self._sublayer(w.hc_ffn, w.ffn_norm)
        streams, x, of_ffn, routing = mhc_route(
            h, streams, mixing, mixing.pre, to, self._router(w.ffn)
        )
        h = self.devices.sum(moe(x, routing, w.ffn, limit=self.config.swiglu_limit))
        return Output(h, streams, of_ffn)

    def _sublayer(self, w: MhcWeights, norm_weight: mx.array) -> MhcSublayer:
        config = self.config
        return MhcSublayer(
            w, norm_weight, config.hc_sinkhorn_iters, config.hc_eps, config.rms_norm_eps
        )

    def _router(self, w: FfnWeights) -> Router:
        config = self.config
        return Router(
            w.gate_weight,
            w.gate_bias,
            config.num_experts_per_tok,
            config.gate_temp,
            config.norm_topk_prob,
            config.routed_scaling_factor,
        )

    def _attention(
        self,
        plan: LayerPlan,
        w: AttentionWeights,
        entered: Boundary,
        queries: int,
        chunk: Chunk,
        state: SessionState,
    ) -> mx.array:
        """Section 3.4: window rows from all of x [T, D], output for the last Q: [Q, D]."""
        config, formats, x, T = self.config, state.formats, entered.x, entered.x.shape[0]
        at = chunk.at(plan, queries)
        if entered.products is not None:
            latent, kv = entered.products
        elif queries == T:
            latent, kv = fp8_linear_pair(x, w.wq_a, w.wkv)
        else:
            latent, kv = fp8_linear(x[-queries:], w.wq_a), fp8_linear(x, w.wkv)
        window, first = state.windows[plan.layer], chunk.end - T
        ring = window.ring(first, T)
        qr, rows = attention_front(
            latent,
            kv,
            w.q_norm,
            w.kv_norm,
            chunk.at(plan, T),
            eps=config.rms_norm_eps,
            fmt=formats.window,
            ring=ring,
        )
        seen = window.extend(rows, first) if ring is None else window.turn(rows, first)
        if self._is_scoring(plan, chunk, state):
            assert w.indexer is not None
            q, index_q = fp8_linear_pair(qr, w.wq_b, w.indexer.wq_b)
            self._select(plan, w.indexer, index_q, x[-queries:], chunk, state)
        else:
            q = fp8_linear(qr, w.wq_b)
        o = sparse_attention(
            q.reshape(queries, -1, config.head_dim),
            chunk.end - queries,
            seen,
            self._selected(plan, queries, chunk, state),
            w.attn_sink,
            sliding_window=config.sliding_window,
            at=at,
            formats=formats,
            turns_q=True,
        )
        return self.devices.sum(grouped_output(o, w.wo_a, w.wo_b))

    def _selected(
        self, plan: LayerPlan, queries: int, chunk: Chunk, state: SessionState
    ) -> SelectedRows | None:
        """The compressed rows that a layer's queries attend to, all visible ones if none chose."""
        if plan.kv_source is None or not state.compressed[plan.kv_source].length:
            return None
        assert plan.topk_source is not None
        ids = chunk.selections.get(plan.topk_source)
        return SelectedRows(
            rows=state.compressed[plan.kv_source].view(),
            visible=chunk.visible(plan, queries),
            ids=None if ids is None else ids[-queries:],
        )

    def publish(self, layer: int, x: mx.array, chunk: Chunk, state: SessionState) -> None:
        """Section 3.5: append the compressed rows and index keys of the groups that x closes."""
        plan, w = self.plans[layer], self.weights.layers[layer].attn
        if plan.kind is not LayerKind.FULL:
            return
        assert w.compressor is not None and w.indexer is not None
        assert w.indexer.wk is not None and w.indexer.k_norm is not None
        ratio, eps = plan.ratio, self.config.rms_norm_eps
        first, groups, earlier = state.compressed[layer].length, x.shape[0], None
        if w.compressor.wgate is None:
            kv, gate = linear_f32(x, w.compressor.wkv), None
        else:
            kv, gate = linear_f32_pair(x, w.compressor.wkv, w.compressor.wgate)
            pending = state.pending[layer]
            n = pending.kv.shape[0]
            groups = (n + groups) // ratio
            if n and groups:
                earlier = pending.kv, pending.gate
            elif n:
                kv, gate = mx.concatenate([pending.kv, kv]), mx.concatenate([pending.gate, gate])
            full = max(groups * ratio - n, 0)
            pending.kv, pending.gate = kv[full:], gate[full:]
            if groups == 0:
                return
            kv, gate = kv[:full], gate[:full]
        at = chunk.at_groups(first, groups, ratio)
        latent, rows = pooled_rows(
            *(kv, gate, w.compressor.norm, at),
            pending=earlier,
            ratio=ratio,
            dtype=x.dtype,
            eps=eps,
            fmt=state.formats.compressed,
        )
        state.compressed[layer].append(rows)
        key = linear_f32(latent, w.indexer.wk)
        codes, scales = encoded_keys(
            key, w.indexer.k_norm, at, dtype=x.dtype, eps=eps, fmt=state.formats.index
        )
        state.index_keys[layer].append(codes, scales)

    def _is_scoring(self, plan: LayerPlan, chunk: Chunk, state: SessionState) -> bool:
        """Whether a layer must choose among the rows: few are all attended to."""
        if plan.kind not in (LayerKind.FULL, LayerKind.REINDEX):
            return False
        assert plan.kv_source is not None
        return (
            state.index_keys[plan.kv_source].length > self.config.index_topk
            or self._makes_candidates(plan, state)
            or (plan.uses_candidates and chunk.candidates is not None)
        )

    def _makes_candidates(self, plan: LayerPlan, state: SessionState) -> bool:
        assert plan.kv_source is not None
        blocks = -(-state.index_keys[plan.kv_source].length // self.config.candidate_block_size)
        return plan.is_candidate_source and blocks > self.config.candidate_topk_blocks

    def _select(
        self,
        plan: LayerPlan,
        w: IndexerWeights,
        q: mx.array,
        x: mx.array,
        chunk: Chunk,
        state: SessionState,
    ) -> None:
        """Section 3.6: choose the rows for the queries of this layer and its reusers.

        q: the index queries' product [Q, heads * dim], x: [Q, D].
        """
        config, Q = self.config, x.shape[0]
        assert plan.kv_source is not None
        keys, fmt = state.index_keys[plan.kv_source], state.formats.index
        candidates = chunk.candidates if plan.uses_candidates else None
        rounded, head_weights = index_queries(
            q.reshape(Q, config.index_n_heads, config.index_head_dim),
            x,
            w.weights_proj,
            chunk.at(plan, Q),
            fmt=fmt,
        )
        rows, blocks = choose_rows(
            IndexQueries(rounded, head_weights, chunk.visible(plan, Q)),
            IndexKeys(keys.codes.view(), keys.scales.view(), fmt),
            k=config.index_topk,
            block_size=config.candidate_block_size,
            topk_blocks=(
                config.candidate_topk_blocks if self._makes_candidates(plan, state) else None
            ),
            candidates=None if candidates is None else candidates[-Q:],
        )
        chunk.selections[plan.layer] = rows
        if blocks is not None:
            chunk.candidates = blocks


def _as_array(part: mx.array | NDArray[np.uint8]) -> mx.array:
    """Of an array of the device no copy, for which `mx.array` would take a launch."""
    return part if isinstance(part, mx.array) else mx.array(part)
