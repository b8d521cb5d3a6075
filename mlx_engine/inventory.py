"""Every tensor that a checkpoint of a configuration must hold: name, dtype, shape and owner.

The one place that spells the released names (docs/model.md, section 2.3). Reads no file.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from math import prod

import numpy as np
from numpy.typing import NDArray

from mlx_engine.config import TILE, DraftConfig, EngramConfig, ModelConfig, VisionConfig
from mlx_engine.layer_plan import LayerKind, LayerPlan, layer_plan

DTYPE_BYTES = {"F8_E4M3": 1, "F8_E8M0": 1, "I8": 1, "BF16": 2, "F32": 4}


def is_nan(codes: NDArray[np.uint8], dtype: str) -> NDArray[np.bool_]:
    """Which codes of F8_E4M3 or F8_E8M0 are no number."""
    return codes & 0x7F == 0x7F if dtype == "F8_E4M3" else codes == 0xFF


class Owner(Enum):
    """The parts of the checkpoint by which its bytes are reported (section 2.4)."""

    ENCODER = "encoder layers"
    DECODER = "decoder layers"
    EMBED = "embed"
    HEAD = "head and norm"
    ENGRAM = "engram projections"
    ENGRAM_TABLES = "engram tables"
    DRAFTS = "draft stages (mtp)"
    VISION = "vision"


# What the text model keeps in memory; the tables are read by row, the rest stays on disk.
RESIDENT = frozenset({Owner.ENCODER, Owner.DECODER, Owner.EMBED, Owner.HEAD, Owner.ENGRAM})


@dataclass(frozen=True)
class TensorSpec:
    """One tensor as the files name it; `dtype` is the safetensors name.

    `axis`: along which several devices share it out; None where each of them has all of it.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    owner: Owner
    axis: int | None = None

    @property
    def n_bytes(self) -> int:
        return prod(self.shape) * DTYPE_BYTES[self.dtype]

    def held_bytes(self, count: int) -> int:
        """What one of `count` devices keeps of it."""
        return self.n_bytes if self.axis is None else self.n_bytes // count

    def read_bytes(self, count: int) -> int:
        """What one of `count` devices reads of it: all where its share is a piece of every row."""
        return self.n_bytes // count if self.axis == 0 else self.n_bytes


def tensor_specs(config: ModelConfig) -> Iterator[TensorSpec]:
    """Yield every tensor of the checkpoint, layer by layer."""
    D, V = config.hidden_size, config.vocab_size
    yield TensorSpec("embed.weight", "BF16", (V, D), Owner.EMBED, axis=1)
    yield TensorSpec("head.weight", "BF16", (V, D), Owner.HEAD, axis=0)
    yield TensorSpec("norm.weight", "BF16", (D,), Owner.HEAD)
    for plan in layer_plan(config):
        yield from _layer(config, plan)
        if config.engram is not None and plan.engram_index is not None:
            yield from _engram(config, config.engram, plan.layer, plan.engram_index)
    if config.draft is not None:
        yield from _drafts(config, config.draft)
    if config.vision is not None:
        yield from _vision(config, config.vision)


def _fp8(
    name: str, out_dim: int, in_dim: int, owner: Owner, axis: int | None = None
) -> Iterator[TensorSpec]:
    yield TensorSpec(f"{name}.weight", "F8_E4M3", (out_dim, in_dim), owner, axis)
    tiles = (-(-out_dim // TILE), -(-in_dim // TILE))
    yield TensorSpec(f"{name}.scale", "F8_E8M0", tiles, owner, axis)


def _fp4(name: str, out_dim: int, in_dim: int, owner: Owner, axis: int) -> Iterator[TensorSpec]:
    yield TensorSpec(f"{name}.weight", "I8", (out_dim, in_dim // 2), owner, axis)
    yield TensorSpec(f"{name}.scale", "F8_E8M0", (out_dim, in_dim // TILE), owner, axis)


def _layer(config: ModelConfig, plan: LayerPlan) -> Iterator[TensorSpec]:
    is_encoder = plan.layer < config.last_kv_source
    owner = Owner.ENCODER if is_encoder else Owner.DECODER
    prefix = f"layers.{plan.layer}"
    yield from _block(config, prefix, owner, config.n_routed_experts)
    D, H_D = config.hidden_size, config.head_dim
    if plan.kind is LayerKind.FULL:
        yield TensorSpec(f"{prefix}.attn.compressor.wkv.weight", "BF16", (H_D, D), owner)
        yield TensorSpec(f"{prefix}.attn.compressor.norm.weight", "BF16", (H_D,), owner)
        if plan.ratio > 1:
            yield TensorSpec(f"{prefix}.attn.compressor.wgate.weight", "BF16", (H_D, D), owner)
        yield TensorSpec(
            f"{prefix}.attn.indexer.wk.weight", "BF16", (config.index_head_dim, H_D), owner
        )
        yield TensorSpec(
            f"{prefix}.attn.indexer.k_norm.weight", "BF16", (config.index_head_dim,), owner
        )
    if plan.kind in (LayerKind.FULL, LayerKind.REINDEX):
        width = config.index_n_heads * config.index_head_dim
        yield from _fp8(f"{prefix}.attn.indexer.wq_b", width, config.q_lora_rank, owner)
        yield TensorSpec(
            f"{prefix}.attn.indexer.weights_proj.weight", "BF16", (config.index_n_heads, D), owner
        )


def _block(
    config: ModelConfig, prefix: str, owner: Owner, n_routed_experts: int
) -> Iterator[TensorSpec]:
    """What every layer and every draft stage has.

    Devices share heads, in whole output groups, and the width of every expert.
    """
    D, H, I_D = config.hidden_size, config.num_attention_heads, config.moe_intermediate_size
    mix = (2 + config.hc_mult) * config.hc_mult
    for part in ("attn", "ffn"):
        yield TensorSpec(f"{prefix}.{part}_norm.weight", "BF16", (D,), owner)
        yield TensorSpec(f"{prefix}.hc_{part}_fn", "F32", (mix, config.hc_mult * D), owner)
        yield TensorSpec(f"{prefix}.hc_{part}_base", "F32", (mix,), owner)
        yield TensorSpec(f"{prefix}.hc_{part}_scale", "F32", (3,), owner)
    attn, ffn = f"{prefix}.attn", f"{prefix}.ffn"
    heads_width, o_width = H * config.head_dim, config.o_groups * config.o_lora_rank
    yield TensorSpec(f"{attn}.attn_sink", "F32", (H,), owner, axis=0)
    yield from _fp8(f"{attn}.wq_a", config.q_lora_rank, D, owner)
    yield TensorSpec(f"{attn}.q_norm.weight", "BF16", (config.q_lora_rank,), owner)
    yield from _fp8(f"{attn}.wq_b", heads_width, config.q_lora_rank, owner, axis=0)
    yield from _fp8(f"{attn}.wkv", config.head_dim, D, owner)
    yield TensorSpec(f"{attn}.kv_norm.weight", "BF16", (config.head_dim,), owner)
    yield from _fp8(f"{attn}.wo_a", o_width, heads_width // config.o_groups, owner, axis=0)
    yield from _fp8(f"{attn}.wo_b", D, o_width, owner, axis=1)
    yield TensorSpec(f"{ffn}.gate.weight", "BF16", (n_routed_experts, D), owner)
    yield TensorSpec(f"{ffn}.gate.bias", "F32", (n_routed_experts,), owner)
    yield TensorSpec(f"{ffn}.gate.bias_vl", "F32", (n_routed_experts,), owner)
    for expert in range(n_routed_experts):
        yield from _fp4(f"{ffn}.experts.{expert}.w1", I_D, D, owner, axis=0)
        yield from _fp4(f"{ffn}.experts.{expert}.w3", I_D, D, owner, axis=0)
        yield from _fp4(f"{ffn}.experts.{expert}.w2", D, I_D, owner, axis=1)
    yield from _fp8(f"{ffn}.shared_experts.w1", I_D, D, owner, axis=0)
    yield from _fp8(f"{ffn}.shared_experts.w3", I_D, D, owner, axis=0)
    yield from _fp8(f"{ffn}.shared_experts.w2", D, I_D, owner, axis=1)


def _engram(
    config: ModelConfig, engram: EngramConfig, layer: int, index: int
) -> Iterator[TensorSpec]:
    D, hc = config.hidden_size, config.hc_mult
    prefix, rows = f"layers.{layer}.engram", engram.num_embeddings[index]
    tables = Owner.ENGRAM_TABLES
    yield TensorSpec(f"{prefix}.embed.weight", "F8_E4M3", (rows, engram.head_dim), tables)
    yield TensorSpec(f"{prefix}.embed.scale", "F8_E8M0", (rows, engram.head_dim // TILE), tables)
    width = engram.columns * engram.head_dim
    yield from _fp8(f"{prefix}.wkv", (hc + 1) * D, width, Owner.ENGRAM, axis=1)
    yield TensorSpec(f"{prefix}.q_weight", "BF16", (hc, D), Owner.ENGRAM)
    yield TensorSpec(f"{prefix}.k_weight", "BF16", (hc, D), Owner.ENGRAM)


def _drafts(config: ModelConfig, draft: DraftConfig) -> Iterator[TensorSpec]:
    D, V, owner = config.hidden_size, config.vocab_size, Owner.DRAFTS
    for stage in range(draft.num_stages):
        yield from _block(config, f"mtp.{stage}", owner, draft.n_routed_experts)
    yield from _fp8("mtp.0.main_proj", D, len(draft.target_layer_ids) * D, owner)
    yield TensorSpec("mtp.0.main_norm.weight", "BF16", (D,), owner)
    last, rank = f"mtp.{draft.num_stages - 1}", draft.markov_rank
    yield TensorSpec(f"{last}.norm.weight", "BF16", (D,), owner)
    yield TensorSpec(f"{last}.markov_head.embed.weight", "BF16", (V, rank), owner)
    yield TensorSpec(f"{last}.markov_head.head.weight", "BF16", (V, rank), owner)
    yield TensorSpec(f"{last}.confidence_head.proj.weight", "BF16", (1, D + rank), owner)


def _vision(config: ModelConfig, vision: VisionConfig) -> Iterator[TensorSpec]:
    D, W, I_W = config.hidden_size, vision.hidden_size, vision.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        "vision.patch_embed.proj.weight": (W, 3 * vision.patch_size**2),
        "vision.patch_embed.proj.bias": (W,),
    }
    for i in range(vision.num_hidden_layers):
        block = f"vision.blocks.{i}"
        shapes |= {
            f"{block}.norm1.weight": (W,),
            f"{block}.norm2.weight": (W,),
            f"{block}.attn.wqkv.weight": (3 * W, W),
            f"{block}.attn.wqkv.bias": (3 * W,),
            f"{block}.attn.wo.weight": (W, W),
            f"{block}.attn.wo.bias": (W,),
            f"{block}.mlp.w1.weight": (2 * I_W, W),
            f"{block}.mlp.w2.weight": (W, I_W),
        }
    shapes |= {
        "vision.norm.weight": (W,),
        "aligner.w1.weight": (D, W * vision.downsample_ratio**2),
        "aligner.w1.bias": (D,),
        "aligner.w2.weight": (D, D),
        "aligner.w2.bias": (D,),
        "image_start": (D,),
        "image_end": (D,),
        "image_newline": (D,),
    }
    for name, shape in shapes.items():
        yield TensorSpec(name, "BF16", shape, Owner.VISION)
