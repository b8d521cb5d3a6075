"""The forward pass of DeepSeek-V4.1-Flash, top to bottom: read `Model.forward` first.

Names follow the model's report and the checkpoint. State comes in as an argument, computation is
in ops/. Shapes: T tokens of the chunk, Q queries (the last tokens of it whose output is needed),
hc streams, D hidden_size, V vocab_size. Section numbers refer to docs/model.md.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_engine.config import ModelConfig
from mlx_engine.engram import EngramRows
from mlx_engine.layer_plan import LayerKind, LayerPlan, layer_plan
from mlx_engine.ops.attention import SelectedRows, sparse_attention
from mlx_engine.ops.compressor import compressed_rows, index_keys, pool_groups
from mlx_engine.ops.engram import engram_gate
from mlx_engine.ops.experts import moe
from mlx_engine.ops.head import head_logits
from mlx_engine.ops.indexer import IndexKeys, IndexQueries, choose_rows
from mlx_engine.ops.linear import fp8_linear, grouped_output, linear_f32
from mlx_engine.ops.mhc import mhc_coefficients, mhc_collapse_norm, mhc_expand
from mlx_engine.ops.norm import rms_norm
from mlx_engine.ops.rope import Rotation, rotate, rotation
from mlx_engine.ops.router import route
from mlx_engine.state import SessionState
from mlx_engine.weights import AttentionWeights, FfnWeights, IndexerWeights, MhcWeights, Weights


@dataclass(frozen=True)
class Boundary:
    """What crosses from the encoder layers to the decoder layers, for the last T tokens.

    streams: [T, hc, D] and x: [T, D], the normed attention input of the last kv source, whose
    compressed rows and index keys are published already.
    """

    streams: mx.array
    x: mx.array

    def last(self, tokens: int) -> "Boundary":
        """The part of the last `tokens` tokens."""
        first = max(self.x.shape[0] - tokens, 0)
        return self if first == 0 else Boundary(self.streams[first:], self.x[first:])

    def then(self, later: "Boundary") -> "Boundary":
        """This part and the one that follows it."""
        return Boundary(
            mx.concatenate([self.streams, later.streams]), mx.concatenate([self.x, later.x])
        )


@dataclass
class _Chunk:
    """What the layers of one pass share: its end, the rotations, the rows chosen so far."""

    end: int
    plain: Rotation
    compressed: Rotation
    selections: dict[int, mx.array | None] = field(default_factory=dict[int, mx.array | None])
    candidates: mx.array | None = None

    def at(self, plan: LayerPlan, tokens: int) -> Rotation:
        """The rotation of a layer's last `tokens` positions."""
        return (self.compressed if plan.ratio else self.plain).last(tokens)

    def visible(self, plan: LayerPlan, queries: int) -> NDArray[np.int32]:
        """How many compressed rows each of the last queries sees: those closed at its position."""
        return (np.arange(self.end - queries, self.end, dtype=np.int32) + 1) // plan.ratio


class Model:
    """The text model over loaded weights; computes in `dtype` (bf16 or f32) between sublayers."""

    def __init__(self, config: ModelConfig, weights: Weights, dtype: mx.Dtype) -> None:
        self.config = config
        self.weights = weights
        self.dtype = dtype
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
        T = len(token_ids)
        chunk = self._chunk(state.position + T, T)
        ids = mx.array(np.asarray(token_ids, dtype=np.int32))
        hc = self.config.hc_mult
        embedded = self.weights.embed[ids].astype(self.dtype)
        streams = mx.repeat(embedded[:, None, :], hc, axis=1)
        pre = mx.zeros((T, hc)) + (mx.arange(hc) == 0)  # the first layer reads stream 0
        for layer in range(self.config.last_kv_source):
            streams, x = self._enter(layer, streams, pre, engram_rows, state)
            streams, pre = self._block(layer, streams, x, T, chunk, state)
        streams, x = self._enter(self.config.last_kv_source, streams, pre, engram_rows, state)
        state.position += T
        return Boundary(streams, x)

    def decode(
        self, boundary: Boundary, state: SessionState, *, is_narrow: bool = False
    ) -> tuple[mx.array, mx.array]:
        """Run the layers from the last kv source up on the tokens of the boundary.

        `is_narrow` computes only what the logits of the last token and the windows after it depend
        on, which is exact: each layer needs one window fewer of the past than the one below.
        Returns the streams [Q, hc, D] and their last pre [Q, hc].
        """
        T, config = boundary.x.shape[0], self.config
        chunk = self._chunk(state.position, T)
        streams, x = boundary.streams, boundary.x
        pre: mx.array | None = None
        for layer in range(config.last_kv_source, config.num_hidden_layers):
            if pre is not None:
                norm = self.weights.layers[layer].attn_norm
                x = mhc_collapse_norm(streams, pre, norm, config.rms_norm_eps)
            queries = min(x.shape[0], config.reach_tokens(layer + 1)) if is_narrow else T
            if is_narrow:
                x = x[-config.reach_tokens(layer) :]
            streams, pre = self._block(layer, streams, x, queries, chunk, state)
        assert pre is not None
        return streams, pre

    def head(self, streams: mx.array, pre: mx.array) -> mx.array:
        """Collapse with the last sublayer's pre, norm, and multiply by the head: f32 [T, V]."""
        x = mhc_collapse_norm(streams, pre, self.weights.norm, self.config.rms_norm_eps)
        return head_logits(x, self.weights.head)

    def _chunk(self, end: int, tokens: int) -> _Chunk:
        positions = np.arange(end - tokens, end)
        return _Chunk(
            end=end,
            plain=rotation(self.config, positions, is_compressed=False),
            compressed=rotation(self.config, positions, is_compressed=True),
        )

    def _enter(
        self,
        layer: int,
        streams: mx.array,
        pre: mx.array,
        engram_rows: EngramRows | None,
        state: SessionState,
    ) -> tuple[mx.array, mx.array]:
        """Engram, the attention's input x [T, D], and the compressed rows made from it."""
        plan, w, eps = self.plans[layer], self.weights.layers[layer], self.config.rms_norm_eps
        if w.engram is not None:
            assert engram_rows is not None
            # The layers below compute while the rows arrive.
            mx.async_eval(streams, pre)
            codes, scales = engram_rows.result(layer)
            streams = engram_gate(streams, mx.array(codes), mx.array(scales), w.engram, eps)
        x = mhc_collapse_norm(streams, pre, w.attn_norm, eps)
        if plan.kind is LayerKind.FULL:
            self._publish(plan, w.attn, x, state)
        return streams, x

    def _block(
        self,
        layer: int,
        streams: mx.array,
        x: mx.array,
        queries: int,
        chunk: _Chunk,
        state: SessionState,
    ) -> tuple[mx.array, mx.array]:
        """One layer (section 3.2): x [T, D] is the attention's input, the last Q go on.

        The hand-off is one sublayer late: the attention's pre collapses the FFN's input, and the
        FFN's pre is returned for the next layer's.
        """
        plan, w, config = self.plans[layer], self.weights.layers[layer], self.config
        streams = streams[-queries:]
        pre, post, comb = self._coefficients(streams, w.hc_attn)
        h = self._attention(plan, w.attn, x, queries, chunk, state)
        streams = mhc_expand(h, streams, post, comb)
        next_pre, post, comb = self._coefficients(streams, w.hc_ffn)
        h = self._ffn(w.ffn, mhc_collapse_norm(streams, pre, w.ffn_norm, config.rms_norm_eps))
        return mhc_expand(h, streams, post, comb), next_pre

    def _coefficients(
        self, streams: mx.array, w: MhcWeights
    ) -> tuple[mx.array, mx.array, mx.array]:
        return mhc_coefficients(
            streams,
            w,
            iters=self.config.hc_sinkhorn_iters,
            hc_eps=self.config.hc_eps,
            norm_eps=self.config.rms_norm_eps,
        )

    def _attention(
        self,
        plan: LayerPlan,
        w: AttentionWeights,
        x: mx.array,
        queries: int,
        chunk: _Chunk,
        state: SessionState,
    ) -> mx.array:
        """Section 3.4: window rows from all of x [T, D], output for the last Q: [Q, D]."""
        config, formats, eps = self.config, state.formats, self.config.rms_norm_eps
        T, at = x.shape[0], chunk.at(plan, queries)
        kv = rms_norm(fp8_linear(x, w.wkv), w.kv_norm, eps)
        packed = formats.window.pack(rotate(kv, chunk.at(plan, T)))
        window = state.windows[plan.layer].extend(packed, chunk.end - T)
        x = x[-queries:]
        qr = rms_norm(fp8_linear(x, w.wq_a), w.q_norm, eps)
        q = fp8_linear(qr, w.wq_b).reshape(queries, config.num_attention_heads, config.head_dim)
        selected = None
        if plan.kv_source is not None and state.compressed[plan.kv_source].length:
            if w.indexer is not None:
                self._select(plan, w.indexer, x, qr, chunk, state)
            assert plan.topk_source is not None
            ids = chunk.selections[plan.topk_source]
            selected = SelectedRows(
                rows=state.compressed[plan.kv_source].view(),
                visible=mx.array(chunk.visible(plan, queries)),
                ids=None if ids is None else ids[-queries:],
            )
        o = sparse_attention(
            rotate(q, at),
            chunk.end - queries,
            window,
            selected,
            w.attn_sink,
            sliding_window=config.sliding_window,
            at=at,
            formats=formats,
        )
        return grouped_output(o, w.wo_a, w.wo_b)

    def _publish(
        self, plan: LayerPlan, w: AttentionWeights, x: mx.array, state: SessionState
    ) -> None:
        """Section 3.5: append the compressed rows and index keys of the groups that x closes."""
        assert w.compressor is not None and w.indexer is not None
        assert w.indexer.wk is not None and w.indexer.k_norm is not None
        source, ratio, eps = plan.layer, plan.ratio, self.config.rms_norm_eps
        first = state.compressed[source].length
        kv = linear_f32(x, w.compressor.wkv)
        if w.compressor.wgate is not None:
            pending = state.pending[source]
            kv = mx.concatenate([pending.kv, kv])
            gate = mx.concatenate([pending.gate, linear_f32(x, w.compressor.wgate)])
            full = kv.shape[0] // ratio * ratio
            pending.kv, pending.gate = kv[full:], gate[full:]
            if full == 0:
                return
            kv = pool_groups(kv[:full], gate[:full], ratio)
        latent = rms_norm(kv.astype(x.dtype), w.compressor.norm, eps)
        # A group stands at the position of its first token.
        positions = np.arange(first, first + latent.shape[0]) * ratio
        at = rotation(self.config, positions, is_compressed=True)
        state.compressed[source].append(compressed_rows(latent, at, state.formats.compressed))
        keys = index_keys(latent, w.indexer.wk, w.indexer.k_norm, at, state.formats.index, eps)
        state.index_keys[source].append(*keys)

    def _select(
        self,
        plan: LayerPlan,
        w: IndexerWeights,
        x: mx.array,
        qr: mx.array,
        chunk: _Chunk,
        state: SessionState,
    ) -> None:
        """Section 3.6: choose the rows for the queries x [Q, D] of this layer and its reusers."""
        config = self.config
        assert plan.kv_source is not None
        keys = state.index_keys[plan.kv_source]
        blocks = -(-keys.length // config.candidate_block_size)
        makes_candidates = plan.is_candidate_source and blocks > config.candidate_topk_blocks
        candidates = chunk.candidates if plan.uses_candidates else None
        if keys.length <= config.index_topk and not makes_candidates and candidates is None:
            chunk.selections[plan.layer] = None  # every visible row is chosen
            return
        Q, heads, D = x.shape[0], config.index_n_heads, config.index_head_dim
        q = rotate(fp8_linear(qr, w.wq_b).reshape(Q, heads, D), chunk.at(plan, Q))
        fmt = state.formats.index
        queries = IndexQueries(
            q=fmt.decode(*fmt.encode(q)),
            head_weights=linear_f32(x, w.weights_proj) * (D**-0.5 * heads**-0.5),
            visible=mx.array(chunk.visible(plan, Q)),
        )
        rows, blocks = choose_rows(
            queries,
            IndexKeys(keys.codes.view(), keys.scales.view(), fmt),
            k=config.index_topk,
            block_size=config.candidate_block_size,
            topk_blocks=config.candidate_topk_blocks if makes_candidates else None,
            candidates=None if candidates is None else candidates[-Q:],
        )
        chunk.selections[plan.layer] = rows
        if makes_candidates:
            chunk.candidates = blocks

    def _ffn(self, w: FfnWeights, x: mx.array) -> mx.array:
        """Section 3.7."""
        config = self.config
        ids, weights = route(
            x,
            w.gate_weight,
            w.gate_bias,
            k=config.num_experts_per_tok,
            gate_temp=config.gate_temp,
            norm_topk_prob=config.norm_topk_prob,
            scaling_factor=config.routed_scaling_factor,
        )
        return moe(x, ids, weights, w, limit=config.swiglu_limit)
