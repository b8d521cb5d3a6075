"""The training form of the model: the same arithmetic, dense and masked instead of gathered.

Whole sequences at once, several documents packed into each, every row scored against every query,
every expert computed. Weights are f32 masters, rounded in each step to the formats they are
released in. Shapes: B sequences of T tokens, N = B * T, S compressed rows, hc streams, D
hidden_size, H heads, V vocab_size. Section numbers refer to docs/model.md.
"""

# pyright: basic, reportMissingImports=false

import re
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from bench.demo_model import roundings, sublayers
from bench.demo_model.parameters import owners, parameter_of
from tests.reference import engram
from tests.reference.random_tensors import tensor_layout
from tests.reference.rope import rope_frequencies


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
    """Packed documents: token ids and document numbers, int64 [B, T]; documents begin evenly."""

    ids: Tensor
    documents: Tensor


@dataclass
class Output:
    """logits f32 [N, V]; index_loss: of the selections; load [L, E]: the experts' shares."""

    logits: Tensor
    index_loss: Tensor
    load: Tensor


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
        self._mix, self._expand, self._moe = (
            wrap(sublayers.mix),
            wrap(sublayers.expand),
            wrap(sublayers.moe),
        )
        self._collapse_norm = wrap(sublayers.collapse_norm)
        self._attend, self._index_loss = wrap(sublayers.attend), wrap(sublayers.index_loss)
        self._query, self._key_value = wrap(sublayers.query), wrap(sublayers.key_value)
        self._engram_gate = wrap(sublayers.engram_gate)
        self._index_scores = wrap(sublayers.index_scores)

    def __call__(self, parameters: dict[str, Tensor], batch: Batch, *, selects: bool) -> Output:
        """Run a batch; `selects` limits the rows to the indexer's choice, as the engine does."""
        c = self.c
        B, T = batch.ids.shape
        W, hc = c["sliding_window"], c["hc_mult"]
        assert T % W == 0
        w = {key: _rounded(key, master) for key, master in parameters.items()}
        layers = {key: value.unbind(0) if _is_stacked(key) else value for key, value in w.items()}
        positions = torch.arange(T, device=self.device, dtype=torch.float32)
        shared = _Shared(
            B=B,
            T=T,
            rotations=[positions[:, None] * f for f in self._frequencies],
            window_mask=sublayers.window_mask(batch.documents, W),
            documents=batch.documents,
            selects=selects,
        )
        streams = w["embed.weight"][batch.ids.reshape(-1)].to(self.dtype)
        streams = streams[:, None].expand(-1, hc, -1).contiguous()
        pre = torch.zeros(B * T, hc, device=self.device)
        pre[:, 0] = 1
        loads = []
        for layer in range(c["num_hidden_layers"]):
            if layer in c["engram_layer_ids"]:
                streams = self._engram(layer, streams, batch, layers)
            pick = lambda key: layers[key][layer]  # noqa: B023, E731
            a = self._mix(streams, *(pick(f"hc_attn_{p}") for p in ("fn", "base", "scale")))
            x = self._collapse_norm(streams, pre, pick("attn_norm.weight"))
            h = self._attention(layer, x, layers, shared)
            streams = self._expand(h, streams, a[1], a[2])
            f = self._mix(streams, *(pick(f"hc_ffn_{p}") for p in ("fn", "base", "scale")))
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
        return Output(logits, sum(shared.index_losses), torch.stack(loads))

    def _attention(self, layer: int, x: Tensor, layers: dict[str, Any], shared: "_Shared"):
        """Section 3.4 on x [N, D]."""
        c, B, T = self.c, shared.B, shared.T
        H, d, W = c["num_attention_heads"], c["head_dim"], c["sliding_window"]
        R = c["compress_ratios"][layer]
        pick = lambda key: layers[f"attn.{key}"][layer]  # noqa: E731
        angle = shared.rotations[R > 0]
        qr, q = self._query(
            x, pick("wq_a.weight"), pick("q_norm.weight"), pick("wq_b.weight"), angle, B, H
        )
        kv = self._key_value(x, pick("wkv.weight"), pick("kv_norm.weight"), angle, B)
        rows = mask = None
        if R:
            if layer in c["kv_source_layer_ids"]:
                self._compress(layer, x, layers, shared)
            if layer in c["index_source_layer_ids"]:
                self._index(layer, x, qr, layers, shared)
            rows, mask = shared.rows, shared.mask
        o, mass = checkpoint(
            self._attend,
            *(q, kv, rows, shared.window_mask, mask, pick("attn_sink"), angle),
            W,
            use_reentrant=False,
            preserve_rng_state=False,
        )
        if R:
            shared.masses.append(mass)
        G = c["o_groups"]
        o = o.reshape(B * T, G, H * d // G)
        wo_a = pick("wo_a.weight").to(o.dtype).unflatten(0, (G, -1))
        y = torch.einsum("ngi,gri->ngr", o, wo_a).flatten(1)
        return sublayers.linear(y, pick("wo_b.weight"))

    def _compress(self, layer: int, x: Tensor, layers: dict[str, Any], shared: "_Shared") -> None:
        """Sections 3.5 and 3.6: the rows and index keys of a source."""
        c, B = self.c, shared.B
        pick = lambda key: layers[f"attn.{key}"][owners(f"attn.{key}", self.config).index(layer)]  # noqa: E731
        R = c["compress_ratios"][layer]
        latent = x.float() @ pick("compressor.wkv.weight").T
        if R > 1:
            gate = x.float() @ pick("compressor.wgate.weight").T
            share = gate.unflatten(0, (-1, R)).softmax(1)
            latent = (latent.unflatten(0, (-1, R)) * share).sum(1)
        latent = sublayers.rms_norm(latent.to(x.dtype), pick("compressor.norm.weight"))
        angle = shared.rotations[1][::R]
        shared.rows = roundings.compressed(sublayers.rope(latent.unflatten(0, (B, -1)), angle))
        key = sublayers.linear(latent.detach(), pick("indexer.wk.weight"))
        key = sublayers.rms_norm(key, pick("indexer.k_norm.weight")).unflatten(0, (B, -1))
        shared.keys = roundings.index(sublayers.rope(key, angle))
        shared.visible = sublayers.visible(shared.documents, R)
        shared.candidates = None

    def _index(
        self, layer: int, x: Tensor, qr: Tensor, layers: dict[str, Any], shared: "_Shared"
    ) -> None:
        """Section 3.6: choose rows for this layer and its reusers."""
        c, B, T = self.c, shared.B, shared.T
        shared.finish_group(self)
        pick = lambda key: layers[f"attn.indexer.{key}"][  # noqa: E731
            owners(f"attn.indexer.{key}", self.config).index(layer)
        ]
        H, d = c["index_n_heads"], c["index_head_dim"]
        q = sublayers.linear(qr.detach(), pick("wq_b.weight")).view(B, T, H, d)
        q = roundings.index(sublayers.rope(q, shared.rotations[1][:, None]))
        weights = sublayers.linear(x.detach(), pick("weights_proj.weight")).view(B, T, H).float()
        weights = weights * (d**-0.5 * H**-0.5)
        shared.group = q, weights, shared.keys, shared.visible
        shared.mask = shared.visible
        if not shared.selects:
            return
        with torch.no_grad():
            score = self._index_scores(q, weights, shared.keys)
            score = score.masked_fill(~shared.visible, -torch.inf)
            if layer == c["candidate_source_layer_id"]:
                shared.candidates = sublayers.candidates(
                    score, shared.visible, c["candidate_block_size"], c["candidate_topk_blocks"]
                )
            elif shared.candidates is not None:
                score = score.masked_fill(~shared.candidates, -torch.inf)
            shared.mask = sublayers.best(score, c["index_topk"]) & (score > -torch.inf)

    def _engram(self, layer: int, streams: Tensor, batch: Batch, layers: dict[str, Any]) -> Tensor:
        """Section 4 on streams [N, hc, D]."""
        i = self.c["engram_layer_ids"].index(layer)
        multipliers, primes = self._hashes[i]
        rows = self._engram_rows(batch, multipliers, primes)
        return self._engram_gate(
            streams,
            layers["engram.embed.weight"][i][rows].flatten(1),
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
    window_mask: Tensor
    documents: Tensor
    selects: bool
    rows: Any = None
    keys: Any = None
    visible: Any = None
    candidates: Any = None
    mask: Any = None
    # Of the group: its queries, their weights, the keys and what each query sees of them.
    group: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        self.masses: list[Tensor] = []
        self.index_losses: list[Any] = []

    def finish_group(self, form: TrainingForm) -> None:
        """Teach a group's indexer the share of attention that its layers gave each row."""
        if self.masses:
            mass = torch.stack(self.masses).float().mean(0)
            args = (*self.group, mass)
            self.index_losses.append(
                checkpoint(form._index_loss, *args, use_reentrant=False, preserve_rng_state=False)
            )
        self.masses = []


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
