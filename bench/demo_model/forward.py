"""The training form of the model: the same arithmetic, dense and masked instead of gathered.

Whole sequences at once, several documents packed into each, every row scored against every query,
every expert computed. Weights are f32 masters, rounded in each step to the formats they are
released in. Shapes: B sequences of T tokens, N = B * T, S compressed rows, hc streams, D
hidden_size, H heads, V vocab_size. Section numbers refer to docs/model.md.
"""

# pyright: basic, reportMissingImports=false

import re
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.demo_model import roundings, sublayers
from bench.demo_model.parameters import owners, parameter_of
from bench.demo_model.taught import Aims, layers_of, lookup_loss
from tests.reference import engram
from tests.reference.random_tensors import tensor_layout
from tests.reference.rope import rope_frequencies

# Queries of a sequence that teach the indexer.
_TEACHING_QUERIES = 2048


def empty_parameters(config: dict[str, Any], device: str) -> dict[str, Tensor]:
    """f32 zeros for every weight, those of equal layers stacked; Engram tables padded to one."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, (dtype, shape) in tensor_layout(config).items():
        if name.endswith(".scale"):
            continue
        key, place = parameter_of(name, config)
        whole = (shape[0], shape[1] * 2) if dtype == "I8" else shape
        stack = tuple(i + 1 for i in place)
        known = shapes.get(key, stack + whole)
        shapes[key] = tuple(max(pair) for pair in zip(known, stack + whole, strict=True))
    return {key: torch.zeros(shape, device=device) for key, shape in shapes.items()}


@dataclass(frozen=True)
class Batch:
    """Packed documents: token ids and document numbers, int64 [B, T]; documents begin evenly.

    aims: by the kind of look, where the head that is taught it shall look.
    """

    ids: Tensor
    documents: Tensor
    aims: dict[int, Aims] = field(default_factory=dict)


@dataclass
class Output:
    """logits f32 [N, V]; index_loss: of the selections; load [L, E]: the experts' shares;
    lookup_losses: of each head that is taught to look up, where the batch has aims, in the order of
    the layers: TOOL, ASKED, NEXT.
    """

    logits: Tensor
    index_loss: Tensor
    load: Tensor
    lookup_losses: list[Tensor]


class TrainingForm:
    """The forward pass over a dictionary of parameters.

    `is_compiled` puts torch.compile around the parts. dtype: of the activations between sublayers.
    """

    def __init__(
        self,
        config: dict[str, Any],
        token_map: np.ndarray,
        device: str,
        dtype: torch.dtype,
        is_compiled: bool,
    ) -> None:
        self.config = config
        self.c = c = config["text_config"]
        self.device, self.dtype = device, dtype
        self._teaches = layers_of(config)
        rope = c["qk_rope_head_dim"]
        plain = rope_frequencies(rope, c["rope_theta"], None)
        yarn = rope_frequencies(rope, c["compress_rope_theta"], c["rope_scaling"])
        self._frequencies = [
            torch.tensor(f, dtype=torch.float32, device=device) for f in (plain, yarn)
        ]
        n = c["engram_max_ngram_size"]
        primes = engram.primes(
            c["engram_layer_ids"], c["engram_vocab_size"], n, c["engram_n_heads"]
        )
        self._token_map = torch.tensor(token_map.astype(np.int64), device=device)
        self._pad = int(token_map[c["engram_pad_token_id"]])
        self._hashes = [
            (
                torch.tensor(
                    np.asarray(engram.multipliers(layer, c["engram_compressed_vocab_size"], n)),
                    device=device,
                ),
                torch.tensor(np.asarray(primes[layer]).reshape(n - 1, -1), device=device),
            )
            for layer in c["engram_layer_ids"]
        ]
        wrap = partial(torch.compile, dynamic=False) if is_compiled else (lambda f: f)
        self._mix, self._expand = wrap(sublayers.mix), wrap(sublayers.expand)
        self._moe, self._collapse_norm = wrap(sublayers.moe), wrap(sublayers.collapse_norm)
        self._query, self._key_value = wrap(sublayers.query), wrap(sublayers.key_value)
        self._compressed, self._output = wrap(sublayers.compressed), wrap(sublayers.output)
        self._index_query = wrap(sublayers.index_query)
        self._index_loss = wrap(sublayers.index_loss)
        self._engram_gate = wrap(sublayers.engram_gate)
        self.cross_entropy = wrap(sublayers.cross_entropy)
        if device == "cuda":
            from bench.demo_model import fused

            self._heavy: Any = fused
        else:
            self._heavy = sublayers

    def __call__(
        self,
        parameters: dict[str, Tensor],
        batch: Batch,
        *,
        rounds_weights: bool = True,
        selects: bool = True,
    ) -> Output:
        """Run a batch, with the weights as the checkpoint stores them or as they are.

        Unless it `selects`, every row is attended to, and the indexer learns from all of them.
        """
        c = self.c
        B, T = batch.ids.shape
        W, hc = c["sliding_window"], c["hc_mult"]
        assert T % W == 0
        w = parameters
        if rounds_weights:
            w = {key: _rounded(key, master) for key, master in parameters.items()}
        layers = {key: value.unbind(0) if _is_stacked(key) else value for key, value in w.items()}
        positions = torch.arange(T, device=self.device, dtype=torch.float32).repeat(B)
        shared = _Shared(
            B=B,
            T=T,
            rotations=[positions[:, None] * f for f in self._frequencies],
            layout=sublayers.layout_of(batch.documents),
            selects=selects,
            batch=batch,
        )
        streams = sublayers.rows_of(w["embed.weight"], batch.ids.reshape(-1)).to(self.dtype)
        streams = streams[:, None].expand(-1, hc, -1).contiguous()
        pre = torch.zeros(B * T, hc, device=self.device)
        pre[:, 0] = 1
        loads = []
        for layer in range(c["num_hidden_layers"]):
            if layer in c["engram_layer_ids"]:
                streams = self._engram(layer, streams, batch, layers)
            pick = lambda key: layers[key][layer]  # noqa: B023, E731
            a = self._mixed(streams, *(pick(f"hc_attn_{p}") for p in ("fn", "base", "scale")))
            x = self._collapse_norm(streams, pre, pick("attn_norm.weight"))
            h = self._attention(layer, x, layers, shared)
            streams = self._expand(h, streams, a[1], a[2])
            f = self._mixed(streams, *(pick(f"hc_ffn_{p}") for p in ("fn", "base", "scale")))
            x = self._collapse_norm(streams, a[0], pick("ffn_norm.weight"))
            h, load = self._moe(
                x,
                pick("ffn.gate.weight"),
                pick("ffn.gate.bias"),
                *(pick(f"ffn.experts.w{i}.weight") for i in (1, 2, 3)),
                *(pick(f"ffn.shared_experts.w{i}.weight") for i in (1, 2, 3)),
                c["num_experts_per_tok"],
                c["routed_scaling_factor"],
                c["swiglu_limit"],
            )
            loads.append(load)
            streams = self._expand(h, streams, f[1], f[2])
            pre = f[0]
        shared.finish_group(self)
        x = self._collapse_norm(streams, pre, w["norm.weight"])
        logits = (x @ w["head.weight"].to(self.dtype).T).float()
        index_loss = sum(shared.index_losses)
        return Output(logits, index_loss, torch.stack(loads), shared.lookup_losses)

    def _mixed(self, streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor):
        """Section 3.2: pre, post and comb."""
        pre, post, comb = self._mix(streams, fn, base, scale)
        return pre, post, self._heavy.sinkhorn(comb, self.c["hc_sinkhorn_iters"] - 1, 1e-6)

    def _attention(self, layer: int, x: Tensor, layers: dict[str, Any], shared: "_Shared"):
        """Section 3.4 on x [N, D]."""
        c, B, T = self.c, shared.B, shared.T
        H, W = c["num_attention_heads"], c["sliding_window"]
        R = c["compress_ratios"][layer]
        pick = lambda key: layers[f"attn.{key}"][layer]  # noqa: E731
        angle = shared.rotations[R > 0]
        qr, q = self._query(
            x, pick("wq_a.weight"), pick("q_norm.weight"), pick("wq_b.weight"), angle, H
        )
        kv = self._key_value(x, pick("wkv.weight"), pick("kv_norm.weight"), angle)
        q, kv = q.unflatten(0, (B, T)), kv.unflatten(0, (B, T))
        rows = mask = None
        if R:
            if layer in c["kv_source_layer_ids"]:
                self._compress(layer, x, layers, shared)
            if layer in c["index_source_layer_ids"]:
                self._index(layer, x, qr, layers, shared)
            rows, mask = shared.rows, shared.mask
            aims = shared.batch.aims.get(self._teaches.get(layer, -1))
            if aims is not None:
                shared.lookup_losses.append(lookup_loss(q[:, :, -1], rows, shared.layout, aims))
        o, lse = self._heavy.attend(q, kv, rows, mask, pick("attn_sink"), shared.layout, W)
        if R:
            # On so long sequences some of the queries are enough to teach the indexer.
            stride = max(1, T // _TEACHING_QUERIES)
            shared.shares.append(self._heavy.row_shares(q, rows, mask, lse, stride))
        o = o.flatten(0, 1)
        return self._output(o, pick("wo_a.weight"), pick("wo_b.weight"), angle, c["o_groups"])

    def _compress(self, layer: int, x: Tensor, layers: dict[str, Any], shared: "_Shared") -> None:
        """Sections 3.5 and 3.6: the rows and index keys of a source."""
        c, B = self.c, shared.B
        pick = lambda key: layers[f"attn.{key}"][owners(f"attn.{key}", self.config).index(layer)]  # noqa: E731
        R = c["compress_ratios"][layer]
        rows, keys = self._compressed(
            x,
            pick("compressor.wkv.weight"),
            pick("compressor.wgate.weight") if R > 1 else None,
            pick("compressor.norm.weight"),
            pick("indexer.wk.weight"),
            pick("indexer.k_norm.weight"),
            shared.rotations[1],
            R,
        )
        shared.rows, shared.keys = rows.unflatten(0, (B, -1)), keys.unflatten(0, (B, -1))
        shared.blocks = None

    def _index(
        self, layer: int, x: Tensor, qr: Tensor, layers: dict[str, Any], shared: "_Shared"
    ) -> None:
        """Section 3.6: choose rows for this layer and its reusers."""
        c, B, T = self.c, shared.B, shared.T
        shared.finish_group(self)
        pick = lambda key: layers[f"attn.indexer.{key}"][  # noqa: E731
            owners(f"attn.indexer.{key}", self.config).index(layer)
        ]
        q, weights = self._index_query(
            x, qr, pick("wq_b.weight"), pick("weights_proj.weight"), shared.rotations[1]
        )
        q, weights = q.unflatten(0, (B, T)), weights.unflatten(0, (B, T))
        shared.group = q, weights, shared.keys
        size = c["candidate_block_size"]
        args = q, weights, shared.keys, shared.layout, shared.blocks, size
        score = self._heavy.index_scores(*args)
        k = c["index_topk"] if shared.selects else score.shape[-1]
        shared.mask = self._heavy.best(score, k)
        if shared.selects and layer == c["candidate_source_layer_id"]:
            of_blocks = sublayers.block_scores(score, shared.layout, size)
            shared.blocks = self._heavy.best(of_blocks, c["candidate_topk_blocks"])

    def _engram(self, layer: int, streams: Tensor, batch: Batch, layers: dict[str, Any]) -> Tensor:
        """Section 4 on streams [N, hc, D]."""
        i = self.c["engram_layer_ids"].index(layer)
        multipliers, primes = self._hashes[i]
        rows = self._engram_rows(batch, multipliers, primes)
        return self._engram_gate(
            streams,
            sublayers.rows_of(layers["engram.embed.weight"][i], rows).flatten(1),
            layers["engram.wkv.weight"][i],
            layers["engram.q_weight"][i],
            layers["engram.k_weight"][i],
        )

    def _engram_rows(self, batch: Batch, multipliers: Tensor, primes: Tensor) -> Tensor:
        """Section 4.3: table rows int64 [N, columns]."""
        canonical = self._token_map[batch.ids]
        offsets = (primes.flatten().cumsum(0) - primes.flatten()).view_as(primes)
        mixed, rows = canonical * multipliers[0], []
        for shift in range(1, len(multipliers)):
            before = torch.full_like(canonical, self._pad)
            same = batch.documents[:, shift:] == batch.documents[:, :-shift]
            before[:, shift:] = torch.where(same, canonical[:, :-shift], self._pad)
            mixed = mixed ^ (before * multipliers[shift])
            rows.append(mixed[..., None] % primes[shift - 1] + offsets[shift - 1])
        return torch.cat(rows, -1).flatten(0, 1)


@dataclass
class _Shared:
    """What the layers of one pass share; a group is an index source and its reusers."""

    B: int
    T: int
    rotations: list[Tensor]
    layout: sublayers.Layout
    selects: bool
    batch: Batch
    rows: Any = None
    keys: Any = None
    blocks: Any = None
    mask: Any = None
    # Of the group: its queries, their weights and the keys.
    group: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        self.shares: list[Tensor] = []
        self.lookup_losses: list[Tensor] = []
        self.index_losses: list[Any] = []

    def finish_group(self, form: TrainingForm) -> None:
        """Teach a group's indexer the share of attention that its layers gave each row."""
        if self.shares:
            share = sum(self.shares) / len(self.shares)
            q, weights, keys = self.group
            stride = max(1, self.T // _TEACHING_QUERIES)
            visible = sublayers.visible(self.layout, self.T // keys.shape[1], stride)
            args = (q[:, ::stride], weights[:, ::stride], keys, visible, share)
            self.index_losses.append(form._index_loss(*args))
        self.shares = []


def _is_stacked(key: str) -> bool:
    return key not in ("embed.weight", "head.weight", "norm.weight")


def _rounded(key: str, w: Tensor) -> Tensor:
    """A master weight as the checkpoint stores it."""
    if ".experts." in key:
        return roundings.fp4_weight(w)
    if key == "engram.embed.weight":
        return roundings.fp8_rows(w)
    if re.search(r"\.(wq_a|wq_b|wkv|wo_a|wo_b|w1|w2|w3)\.weight$", key) and "compressor" not in key:
        return roundings.fp8_weight(w)
    if key.startswith("hc_") or key.endswith(("attn_sink", ".bias", ".bias_vl")):
        return w
    return roundings.bf16(w)
