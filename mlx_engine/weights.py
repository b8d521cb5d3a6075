"""The text model's weights in memory, as released: packed codes with their scales, by layer.

Nothing here is widened. `Fp8` and `Fp4` hold the codes as 32-bit words, the layout in which MLX's
quantised products and our kernels read them. Field names are the checkpoint's (docs/model.md,
section 2.3); dimensions: D hidden_size, V vocab_size, H heads, E experts, I moe_intermediate_size.
"""

from dataclasses import dataclass
from functools import cached_property
from math import isqrt

import mlx.core as mx

from mlx_engine.config import TILE


def _computed(x: mx.array) -> mx.array:
    """The array, computed now: left to wait, only the thread that made it could use it."""
    mx.eval(x)
    return x


@dataclass(frozen=True)
class Fp8:
    """A dense weight [.., N, K] in e4m3 with one e8m0 scale per 32 x 32 tile.

    weight: uint32 [.., N, K/4], four codes a word, lowest byte first;
    scale: uint8 [.., ceil(N/32), ceil(K/32)].
    """

    weight: mx.array
    scale: mx.array

    @cached_property
    def row_scale(self) -> mx.array:
        """The tile scales repeated for every row, as MLX's own operations want them: [.., N, K/32].

        Adds 1/32 of the weight; made on first use, so a path with kernels of ours never has it.
        """
        return _computed(mx.repeat(self.scale, TILE, axis=-2)[..., : self.weight.shape[-2], :])


@dataclass(frozen=True)
class Fp4:
    """Stacked expert weights [E, N, K] in e2m1 with one e8m0 scale per 32 inputs.

    weight: uint32 [E, N, K/8], eight codes a word, lowest nibble first; scale: uint8 [E, N, K/32].
    """

    weight: mx.array
    scale: mx.array


@dataclass(frozen=True)
class MhcWeights:
    """fn: f32 [(2+hc)*hc, hc*D]; base: f32 [(2+hc)*hc]; scale: f32 [3]."""

    fn: mx.array
    base: mx.array
    scale: mx.array

    @cached_property
    def column_scale(self) -> mx.array:
        """The scale of each of fn's rows, pre, post and comb in turn: f32 [(2+hc)*hc]."""
        columns = self.base.shape[0]
        hc = isqrt(columns + 1) - 1  # columns = (hc + 1)^2 - 1
        counts = (hc, hc, hc * hc)
        return _computed(
            mx.concatenate([mx.repeat(self.scale[i], n) for i, n in enumerate(counts)])
        )


@dataclass(frozen=True)
class CompressorWeights:
    """wkv, wgate: bf16 [head_dim, D]; norm: bf16 [head_dim]; no wgate where the ratio is 1."""

    wkv: mx.array
    wgate: mx.array | None
    norm: mx.array


@dataclass(frozen=True)
class IndexerWeights:
    """wq_b: Fp8 [heads*dim, q_lora_rank]; weights_proj: bf16 [heads, D]; wk: bf16 [dim, head_dim].

    wk and k_norm only in a layer that makes index keys.
    """

    wq_b: Fp8
    weights_proj: mx.array
    wk: mx.array | None
    k_norm: mx.array | None


@dataclass(frozen=True)
class AttentionWeights:
    """wo_a is split into its groups: Fp8 [o_groups, o_lora_rank, H*head_dim/o_groups]."""

    attn_sink: mx.array
    wq_a: Fp8
    q_norm: mx.array
    wq_b: Fp8
    wkv: Fp8
    kv_norm: mx.array
    wo_a: Fp8
    wo_b: Fp8
    compressor: CompressorWeights | None
    indexer: IndexerWeights | None


@dataclass(frozen=True)
class FfnWeights:
    """gate_weight: bf16 [E, D]; gate_bias: f32 [E]; w1, w3: Fp4 [E, I, D]; w2: Fp4 [E, D, I]."""

    gate_weight: mx.array
    gate_bias: mx.array
    w1: Fp4
    w2: Fp4
    w3: Fp4
    shared_w1: Fp8
    shared_w2: Fp8
    shared_w3: Fp8


@dataclass(frozen=True)
class EngramWeights:
    """wkv: Fp8 [(hc+1)*D, columns*head_dim]; q_weight, k_weight: bf16 [hc, D]."""

    wkv: Fp8
    q_weight: mx.array
    k_weight: mx.array


@dataclass(frozen=True)
class LayerWeights:
    """One of the text layers."""

    attn_norm: mx.array
    ffn_norm: mx.array
    hc_attn: MhcWeights
    hc_ffn: MhcWeights
    attn: AttentionWeights
    ffn: FfnWeights
    engram: EngramWeights | None


@dataclass(frozen=True)
class Weights:
    """embed, head: bf16 [V, D]; norm: bf16 [D].

    Of several devices each has its columns of embed and its ids of head.
    """

    embed: mx.array
    head: mx.array
    norm: mx.array
    layers: tuple[LayerWeights, ...]
