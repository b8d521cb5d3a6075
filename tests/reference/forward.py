"""The forward pass of DeepSeek-V4.1-Flash in float64, the whole sequence in one piece (spec 3).

Owns the blocks: mHC, attention, compressor, indexer, MoE. Activations are never rounded; only the
cached values are (spec 3.8). Attention is dense with an explicit mask, so that a row that is not
chosen, not visible or not a candidate has weight zero by construction.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.reference import engram
from tests.reference.formats import (
    Float,
    Rounded,
    fp4_weight,
    fp8_weight,
    round_compressed,
    round_index,
    round_window,
)
from tests.reference.rope import rope, rope_frequencies
from tests.reference.selection import listed, top_k

Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]


@dataclass
class Trace:
    """What one forward pass computed; T tokens, S compressed rows of the layer's source.

    `margins` gives, for each kind of discrete choice, how close the closest one was to falling the
    other way: for roundings as in `formats.Rounded`, for selections the gap between the last chosen
    and the first refused score, relative to the largest score of the query. Infinite: no choice.
    """

    # logits [T, V]; experts of a layer [T, K], ascending
    logits: Float = field(default_factory=lambda: np.empty(0))
    experts: dict[int, Ints] = field(default_factory=dict[int, Ints])
    # by index source: the chosen rows [T, k], ascending, then -1; the same as a mask [T, S]
    rows: dict[int, Ints] = field(default_factory=dict[int, Ints])
    chosen: dict[int, Bools] = field(default_factory=dict[int, Bools])
    # by candidate source: the candidate rows that the query sees [T, S]
    candidates: dict[int, Bools] = field(default_factory=dict[int, Bools])
    # by layer: window KV of all positions [T, head_dim]
    windows: dict[int, Float] = field(default_factory=dict[int, Float])
    # by KV source [S, head_dim], by key source [S, index_head_dim]
    compressed: dict[int, Float] = field(default_factory=dict[int, Float])
    index_keys: dict[int, Float] = field(default_factory=dict[int, Float])
    # by layer: streams [T, hc, D] entering it, after its Engram; one key more: leaving the last
    streams: dict[int, Float] = field(default_factory=dict[int, Float])
    margins: dict[str, float] = field(default_factory=dict[str, float])

    def note_margin(self, kind: str, margin: float) -> None:
        """Keep the smallest margin of a kind."""
        self.margins[kind] = min(margin, self.margins.get(kind, math.inf))


def sigmoid(x: Float) -> Float:
    return 1 / (1 + np.exp(-x))


def softmax(x: Float, axis: int) -> Float:
    e = np.exp(x - x.max(axis=axis, keepdims=True))
    return e / e.sum(axis=axis, keepdims=True)


def rms_norm(x: Float, weight: Float, eps: float) -> Float:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def collapse(streams: Float, weights: Float) -> Float:
    """Weighted sum of the streams [T, hc, D] with weights [T, hc] -> [T, D]."""
    return np.einsum("tk,tkd->td", weights, streams)


def expand(h: Float, streams: Float, post: Float, comb: Float) -> Float:
    """New streams: out[k] = post[k] h + sum over j of comb[j, k] streams[j]."""
    return post[..., None] * h[:, None] + np.einsum("tjk,tjd->tkd", comb, streams)


def sinkhorn(comb: Float, iters: int, eps: float) -> Float:
    """Make [T, hc, hc] matrices doubly stochastic; the columns are divided last (spec 3.2)."""
    c = softmax(comb, axis=-1) + eps
    c = c / (c.sum(axis=-2, keepdims=True) + eps)
    for _ in range(iters - 1):
        c = c / (c.sum(axis=-1, keepdims=True) + eps)
        c = c / (c.sum(axis=-2, keepdims=True) + eps)
    return c


class Reference:
    """The model: config.json (nested or flat) and tensors by their checkpoint names.

    Codes come as uint8, BF16 and F32 as float32. Without a token map, or without Engram layers,
    Engram is off. `round_cache=False` leaves the three cache roundings of spec 3.8 out.
    """

    def __init__(
        self,
        config: dict[str, Any],
        tensors: Mapping[str, NDArray[Any]],
        token_map: NDArray[Any] | None,
        *,
        round_cache: bool = True,
    ) -> None:
        c: dict[str, Any] = {**config, **config.get("text_config", {})}
        self.c = c
        self.eps: float = c["rms_norm_eps"]
        self.ratios: list[int] = c["compress_ratios"]
        self.kv_sources: list[int] = c["kv_source_layer_ids"]
        self.index_sources: list[int] = c["index_source_layer_ids"]
        self.key_sources = [s for s in self.kv_sources if s in self.index_sources]
        self.candidate_source: int | None = c.get("candidate_source_layer_id")
        self.tensors = tensors
        self.decoded: dict[str, Float] = {}
        self.token_map = None if token_map is None else token_map.astype(np.int64)
        self.engram_layers: list[int] = [] if token_map is None else c["engram_layer_ids"]
        self.round_cache = round_cache
        dim: int = c["qk_rope_head_dim"]
        self.window_frequencies = rope_frequencies(dim, c["rope_theta"], None)
        self.global_frequencies = rope_frequencies(dim, c["compress_rope_theta"], c["rope_scaling"])

    # Tensors

    def value(self, name: str) -> Float:
        """A tensor that is stored unquantised."""
        return self.tensors[name].astype(np.float64)

    def weight(self, name: str) -> Float:
        """The decoded matrix [out, in] of a linear layer."""
        if name not in self.decoded:
            stored = self.tensors[f"{name}.weight"]
            if f"{name}.scale" not in self.tensors:
                self.decoded[name] = stored.astype(np.float64)
            else:
                decode = fp4_weight if ".experts." in name else fp8_weight
                self.decoded[name] = decode(stored, self.tensors[f"{name}.scale"])
        return self.decoded[name]

    def linear(self, x: Float, name: str) -> Float:
        return x @ self.weight(name).T

    def norm(self, x: Float, name: str) -> Float:
        return rms_norm(x, self.value(f"{name}.weight"), self.eps)

    def rounded(self, trace: Trace, kind: str, x: Float) -> Float:
        """x as a cache of this kind stores it."""
        if not self.round_cache:
            return x
        by_kind = {"window": round_window, "compressed": round_compressed}
        result: Rounded = by_kind.get(kind, round_index)(x)
        trace.note_margin(kind, result.margin)
        return result.values

    # Driver (3.1) and block (3.2)

    def forward(
        self, token_ids: Sequence[int], image_positions: Sequence[int] | None = None
    ) -> Trace:
        """Run the tokens; logits and the discrete choices of every layer.

        Image positions default to those that carry image_token_id. They keep their token's
        embedding (no vision here), but route and pass Engram as image tokens do.
        """
        ids = np.asarray(token_ids, np.int64)
        image = ids == self.c["image_token_id"]
        if image_positions is not None:
            image = np.isin(np.arange(len(ids)), image_positions)
        trace = Trace()
        layers: int = self.c["num_hidden_layers"]
        hc: int = self.c["hc_mult"]
        embedding = self.tensors["embed.weight"][ids].astype(np.float64)
        streams = embedding[:, None].repeat(hc, axis=1)
        pre = np.zeros((len(ids), hc))
        pre[:, 0] = 1
        for layer in range(layers):
            if layer in self.engram_layers:
                streams = self.engram(layer, streams, ids, image)
            trace.streams[layer] = streams
            streams, pre = self.block(layer, streams, pre, image, trace)
        trace.streams[layers] = streams
        trace.logits = self.norm(collapse(streams, pre), "norm") @ self.weight("head").T
        return trace

    def block(
        self, layer: int, streams: Float, pre_in: Float, image: Bools, trace: Trace
    ) -> tuple[Float, Float]:
        name = f"layers.{layer}"
        a_pre, a_post, a_comb = self.mix(streams, f"{name}.hc_attn")
        x = self.norm(collapse(streams, pre_in), f"{name}.attn_norm")
        streams = expand(self.attention(layer, x, trace), streams, a_post, a_comb)
        f_pre, f_post, f_comb = self.mix(streams, f"{name}.hc_ffn")
        x = self.norm(collapse(streams, a_pre), f"{name}.ffn_norm")
        streams = expand(self.moe(layer, x, image, trace), streams, f_post, f_comb)
        return streams, f_pre

    def mix(self, streams: Float, name: str) -> tuple[Float, Float, Float]:
        """Weights pre [T, hc], post [T, hc] and comb [T, hc, hc] from the streams."""
        T, hc, _ = streams.shape
        v = streams.reshape(T, -1)
        r = 1 / np.sqrt((v**2).mean(-1, keepdims=True) + self.eps)
        m = v @ self.value(f"{name}_fn").T * r
        base, scale = self.value(f"{name}_base"), self.value(f"{name}_scale")
        pre = sigmoid(m[:, :hc] * scale[0] + base[:hc]) + self.c["hc_eps"]
        post = 2 * sigmoid(m[:, hc : 2 * hc] * scale[1] + base[hc : 2 * hc])
        comb = (m[:, 2 * hc :] * scale[2] + base[2 * hc :]).reshape(T, hc, hc)
        return pre, post, sinkhorn(comb, self.c["hc_sinkhorn_iters"], self.c["hc_eps"])

    # Attention (3.4)

    def attention(self, layer: int, x: Float, trace: Trace) -> Float:
        name = f"layers.{layer}.attn"
        T, R = len(x), self.ratios[layer]
        H, D, G = self.c["num_attention_heads"], self.c["head_dim"], self.c["o_groups"]
        p = np.arange(T)
        frequencies = self.global_frequencies if R else self.window_frequencies
        qr = self.norm(self.linear(x, f"{name}.wq_a"), f"{name}.q_norm")
        q = rope(self.linear(qr, f"{name}.wq_b").reshape(T, H, D), p, frequencies)
        kv = rope(self.norm(self.linear(x, f"{name}.wkv"), f"{name}.kv_norm"), p, frequencies)
        kv = trace.windows[layer] = self.rounded(trace, "window", kv)

        age = p[:, None] - p
        attended = (age >= 0) & (age < self.c["sliding_window"])
        if R:
            if layer in self.kv_sources:
                self.compress(layer, x, trace)
            if layer in self.index_sources:
                self.index(layer, x, qr, trace)
            kv = np.concatenate([kv, trace.compressed[newest(self.kv_sources, layer)]])
            chosen = trace.chosen[newest(self.index_sources, layer)]
            attended = np.concatenate([attended, chosen], axis=1)

        score = np.where(attended[:, None], q @ kv.T / math.sqrt(D), -np.inf)  # [T, H, rows]
        m = np.maximum(score.max(-1, keepdims=True), -1e30)
        e = np.exp(score - m)
        sink = np.exp(self.value(f"{name}.attn_sink")[:, None] - m)
        o = e / (e.sum(-1, keepdims=True) + sink) @ kv
        o = rope(o, p, frequencies, inverse=True).reshape(T, G, H * D // G)
        wo_a = self.weight(f"{name}.wo_a").reshape(G, -1, H * D // G)
        y = np.einsum("tgi,goi->tgo", o, wo_a, optimize=True)
        return self.linear(y.reshape(T, -1), f"{name}.wo_b")

    # Compressor (3.5) and index keys (3.6)

    def compress(self, layer: int, x: Float, trace: Trace) -> None:
        """Publish the layer's compressed KV, and its index keys if it has an indexer."""
        name = f"layers.{layer}.attn"
        R = self.ratios[layer]
        S, D = len(x) // R, self.c["head_dim"]
        complete = x[: S * R]
        latent = self.linear(complete, f"{name}.compressor.wkv")
        if R > 1:
            gate = self.linear(complete, f"{name}.compressor.wgate")
            per_token = softmax(gate.reshape(S, R, D), axis=1)
            latent = (latent.reshape(S, R, D) * per_token).sum(axis=1)
        latent = self.norm(latent, f"{name}.compressor.norm")
        first = np.arange(S) * R
        row = rope(latent, first, self.global_frequencies)
        trace.compressed[layer] = self.rounded(trace, "compressed", row)
        if layer in self.index_sources:
            key = self.norm(self.linear(latent, f"{name}.indexer.wk"), f"{name}.indexer.k_norm")
            key = rope(key, first, self.global_frequencies)
            trace.index_keys[layer] = self.rounded(trace, "index_keys", key)

    # Indexer (3.6)

    def index(self, layer: int, x: Float, qr: Float, trace: Trace) -> None:
        """Publish the compressed rows each query attends, and the candidates for later layers."""
        name = f"layers.{layer}.attn.indexer"
        T, H, D = len(x), self.c["index_n_heads"], self.c["index_head_dim"]
        p = np.arange(T)
        key = trace.index_keys[newest(self.key_sources, layer)]
        query = self.linear(qr, f"{name}.wq_b").reshape(T, H, D)
        query = self.rounded(trace, "index_queries", rope(query, p, self.global_frequencies))
        w = self.linear(x, f"{name}.weights_proj") * D**-0.5 * H**-0.5
        score = (w[..., None] * np.maximum(query @ key.T, 0)).sum(axis=1)

        visible_count = (p + 1) // self.ratios[layer]
        visible = np.arange(len(key)) < visible_count[:, None]
        if layer == self.candidate_source:
            trace.candidates[layer] = visible & self.candidate_rows(
                np.where(visible, score, -np.inf), visible_count, trace
            )
        elif self.candidate_source is not None and layer > self.candidate_source:
            visible = visible & trace.candidates[self.candidate_source]
        k = min(self.c["index_topk"], len(key))
        trace.chosen[layer], margin = top_k(np.where(visible, score, -np.inf), k)
        trace.rows[layer] = listed(trace.chosen[layer], k)
        trace.note_margin("rows", margin)

    def candidate_rows(self, score: Float, visible_count: Ints, trace: Trace) -> Bools:
        """Mask [T, S] of the rows in each query's best blocks; score is -inf where not visible."""
        T, S = score.shape
        size: int = self.c["candidate_block_size"]
        blocks = -(-S // size)
        padded = np.full((T, blocks * size), -np.inf)
        padded[:, :S] = score
        block_score = padded.reshape(T, blocks, size).max(axis=-1)
        has_rows = np.flatnonzero(visible_count > 0)
        block_score[has_rows, (visible_count[has_rows] - 1) // size] = np.inf
        kept, margin = top_k(block_score, min(self.c["candidate_topk_blocks"], blocks))
        trace.note_margin("candidates", margin)
        return kept.repeat(size, axis=1)[:, :S]

    # MoE (3.7)

    def moe(self, layer: int, x: Float, image: Bools, trace: Trace) -> Float:
        name = f"layers.{layer}.ffn"
        K: int = self.c["num_experts_per_tok"]
        logits = self.linear(x, f"{name}.gate") / self.c.get("gate_temp", 1.0)
        s = np.sqrt(np.maximum(logits, 0) + np.log1p(np.exp(-np.abs(logits))))
        bias, bias_vl = self.value(f"{name}.gate.bias"), self.value(f"{name}.gate.bias_vl")
        chosen, margin = top_k(s + np.where(image[:, None], bias_vl, bias), K)
        trace.experts[layer] = listed(chosen, K)
        trace.note_margin("router", margin)
        w = np.where(chosen, s, 0)
        if self.c["norm_topk_prob"]:
            w = w / (w.sum(-1, keepdims=True) + 1e-20)
        w = w * self.c["routed_scaling_factor"]
        out = self.expert(x, f"{name}.shared_experts")
        for e in np.flatnonzero(chosen.any(axis=0)):
            t = np.flatnonzero(chosen[:, e])
            out[t] += w[t, e, None] * self.expert(x[t], f"{name}.experts.{e}")
        return out

    def expert(self, x: Float, name: str) -> Float:
        limit: float = self.c["swiglu_limit"]
        g = np.minimum(self.linear(x, f"{name}.w1"), limit)
        u = np.clip(self.linear(x, f"{name}.w3"), -limit, limit)
        return self.linear(g * sigmoid(g) * u, f"{name}.w2")

    # Engram (4)

    def engram(self, layer: int, streams: Float, ids: Ints, image: Bools) -> Float:
        assert self.token_map is not None
        c, name = self.c, f"layers.{layer}.engram"
        n: int = c["engram_max_ngram_size"]
        primes = engram.primes(
            c["engram_layer_ids"], c["engram_vocab_size"], n, c["engram_n_heads"]
        )
        multipliers = engram.multipliers(layer, c["engram_compressed_vocab_size"], n)
        ngrams = engram.canonical_ngrams(ids, image, self.token_map, c["engram_pad_token_id"], n)
        rows = engram.hash_rows(ngrams, multipliers, primes[layer])
        table, scales = self.tensors[f"{name}.embed.weight"], self.tensors[f"{name}.embed.scale"]
        kv = self.linear(engram.look_up(table, scales, rows), f"{name}.wkv")
        q_weight, k_weight = self.value(f"{name}.q_weight"), self.value(f"{name}.k_weight")
        added = engram.add_gated(streams, kv, q_weight, k_weight)
        return np.where(image[:, None, None], streams, added)


def newest(sources: Sequence[int], layer: int) -> int:
    """The last source at or before the layer."""
    return max(s for s in sources if s <= layer)
