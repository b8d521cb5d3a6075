"""Random checkpoints in the released layout, for tests; and the tiny configuration of spec 9.

Owns the names, dtypes and shapes of spec 2.3, written down a second time for the tests' sake.
The scales keep activations near one over many layers, gates and softmaxes away from saturation,
and the logits' standard deviation near three.
"""

import json
import math
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.reference.formats import E2M1, E4M3, bf16_round

DATA = Path(__file__).parents[1] / "data"
TINY_CONFIG: dict[str, Any] = json.loads((DATA / "tiny_config.json").read_text())

Shape = tuple[int, ...]


class Layout(dict[str, tuple[str, Shape]]):
    """Tensor name -> (safetensors dtype, stored shape)."""

    def bf16(self, name: str, *shape: int) -> None:
        self[name] = ("BF16", shape)

    def f32(self, name: str, *shape: int) -> None:
        self[name] = ("F32", shape)

    def fp8(self, name: str, rows: int, columns: int) -> None:
        self[f"{name}.weight"] = ("F8_E4M3", (rows, columns))
        self[f"{name}.scale"] = ("F8_E8M0", (-(-rows // 32), -(-columns // 32)))

    def fp4(self, name: str, rows: int, columns: int) -> None:
        self[f"{name}.weight"] = ("I8", (rows, columns // 2))
        self[f"{name}.scale"] = ("F8_E8M0", (rows, columns // 32))


def tensor_layout(config: dict[str, Any], *, engram_rows: bool = True) -> Layout:
    """Every tensor of a checkpoint with this configuration (spec 2.3).

    Vision tensors are there if the configuration has a `vision_config`; `engram_rows=False` leaves
    the Engram tables out.
    """
    c = {**config, **config.get("text_config", {})}
    D, V = c["hidden_size"], c["vocab_size"]
    out = Layout()
    out.bf16("embed.weight", V, D)
    out.bf16("head.weight", V, D)
    out.bf16("norm.weight", D)
    for layer in range(c["num_hidden_layers"]):
        name = f"layers.{layer}"
        _add_block(out, name, c, c["n_routed_experts"])
        _add_compressed(out, f"{name}.attn", c, layer)
    for layer, rows in zip(c["engram_layer_ids"], c["engram_num_embeddings"], strict=True):
        _add_engram(out, f"layers.{layer}.engram", c, rows if engram_rows else 0)
    stages = c["num_nextn_predict_layers"]
    for stage in range(stages):
        _add_block(out, f"mtp.{stage}", c, c["dspark_n_routed_experts"])
    if stages:
        rank, last = c["dspark_markov_rank"], f"mtp.{stages - 1}"
        out.fp8("mtp.0.main_proj", D, len(c["dspark_target_layer_ids"]) * D)
        out.bf16("mtp.0.main_norm.weight", D)
        out.bf16(f"{last}.norm.weight", D)
        out.bf16(f"{last}.markov_head.embed.weight", V, rank)
        out.bf16(f"{last}.markov_head.head.weight", V, rank)
        out.bf16(f"{last}.confidence_head.proj.weight", 1, D + rank)
    if "vision_config" in config:
        _add_vision(out, config["vision_config"], D)
    return out


def _add_block(out: Layout, name: str, c: dict[str, Any], experts: int) -> None:
    D, hc, inter = c["hidden_size"], c["hc_mult"], c["moe_intermediate_size"]
    heads, head_dim, groups = c["num_attention_heads"], c["head_dim"], c["o_groups"]
    out.bf16(f"{name}.attn_norm.weight", D)
    out.bf16(f"{name}.ffn_norm.weight", D)
    for part in ("attn", "ffn"):
        out.f32(f"{name}.hc_{part}_fn", (2 + hc) * hc, hc * D)
        out.f32(f"{name}.hc_{part}_base", (2 + hc) * hc)
        out.f32(f"{name}.hc_{part}_scale", 3)
    out.f32(f"{name}.attn.attn_sink", heads)
    out.fp8(f"{name}.attn.wq_a", c["q_lora_rank"], D)
    out.bf16(f"{name}.attn.q_norm.weight", c["q_lora_rank"])
    out.fp8(f"{name}.attn.wq_b", heads * head_dim, c["q_lora_rank"])
    out.fp8(f"{name}.attn.wkv", head_dim, D)
    out.bf16(f"{name}.attn.kv_norm.weight", head_dim)
    out.fp8(f"{name}.attn.wo_a", groups * c["o_lora_rank"], heads * head_dim // groups)
    out.fp8(f"{name}.attn.wo_b", D, groups * c["o_lora_rank"])
    out.bf16(f"{name}.ffn.gate.weight", experts, D)
    out.f32(f"{name}.ffn.gate.bias", experts)
    out.f32(f"{name}.ffn.gate.bias_vl", experts)
    for expert in range(experts):
        out.fp4(f"{name}.ffn.experts.{expert}.w1", inter, D)
        out.fp4(f"{name}.ffn.experts.{expert}.w3", inter, D)
        out.fp4(f"{name}.ffn.experts.{expert}.w2", D, inter)
    out.fp8(f"{name}.ffn.shared_experts.w1", inter, D)
    out.fp8(f"{name}.ffn.shared_experts.w3", inter, D)
    out.fp8(f"{name}.ffn.shared_experts.w2", D, inter)


def _add_compressed(out: Layout, attn: str, c: dict[str, Any], layer: int) -> None:
    D, head_dim, index_dim = c["hidden_size"], c["head_dim"], c["index_head_dim"]
    kv_source = layer in c["kv_source_layer_ids"]
    index_source = layer in c["index_source_layer_ids"]
    if kv_source:
        out.bf16(f"{attn}.compressor.wkv.weight", head_dim, D)
        out.bf16(f"{attn}.compressor.norm.weight", head_dim)
        if c["compress_ratios"][layer] > 1:
            out.bf16(f"{attn}.compressor.wgate.weight", head_dim, D)
    if index_source:
        out.fp8(f"{attn}.indexer.wq_b", c["index_n_heads"] * index_dim, c["q_lora_rank"])
        out.bf16(f"{attn}.indexer.weights_proj.weight", c["index_n_heads"], D)
    if kv_source and index_source:
        out.bf16(f"{attn}.indexer.wk.weight", index_dim, head_dim)
        out.bf16(f"{attn}.indexer.k_norm.weight", index_dim)


def _add_engram(out: Layout, name: str, c: dict[str, Any], rows: int) -> None:
    D, hc, head_dim = c["hidden_size"], c["hc_mult"], c["engram_head_dim"]
    columns = (c["engram_max_ngram_size"] - 1) * c["engram_n_heads"]
    if rows:
        out[f"{name}.embed.weight"] = ("F8_E4M3", (rows, head_dim))
        out[f"{name}.embed.scale"] = ("F8_E8M0", (rows, head_dim // 32))
    out.fp8(f"{name}.wkv", (hc + 1) * D, columns * head_dim)
    out.bf16(f"{name}.q_weight", hc, D)
    out.bf16(f"{name}.k_weight", hc, D)


def _add_vision(out: Layout, c: dict[str, Any], D: int) -> None:
    width, inter, fold = c["hidden_size"], c["intermediate_size"], c["downsample_ratio"] ** 2

    def linear(name: str, rows: int, columns: int, bias: bool = True) -> None:
        out.bf16(f"{name}.weight", rows, columns)
        if bias:
            out.bf16(f"{name}.bias", rows)

    linear("vision.patch_embed.proj", width, 3 * c["patch_size"] ** 2)
    for block in range(c["num_hidden_layers"]):
        name = f"vision.blocks.{block}"
        out.bf16(f"{name}.norm1.weight", width)
        out.bf16(f"{name}.norm2.weight", width)
        linear(f"{name}.attn.wqkv", 3 * width, width)
        linear(f"{name}.attn.wo", width, width)
        linear(f"{name}.mlp.w1", 2 * inter, width, bias=False)
        linear(f"{name}.mlp.w2", width, inter, bias=False)
    out.bf16("vision.norm.weight", width)
    linear("aligner.w1", D, fold * width)
    linear("aligner.w2", D, D)
    for part in ("image_start", "image_end", "image_newline"):
        out.bf16(part, D)


# Standard deviation of a linear layer's output per unit of its input's.
GAINS = {
    "head": 3.0,
    "ffn.gate": 1.5,
    "compressor.wgate": 1.5,
    "wo_a": 1.5,
    "wo_b": 1.5,
    "w1": 3.0,
    "w3": 3.0,
    "w2": 0.1,
}
NORMS = ("norm.weight", "norm1.weight", "norm2.weight", "q_weight", "k_weight")
# Weights draw from these e4m3 magnitude codes, all below 32, and from all e2m1 codes.
E4M3_CODES = np.arange(0x50, dtype=np.uint8)
E4M3_RMS = float(np.sqrt(np.mean(E4M3[E4M3_CODES] ** 2)))
E2M1_RMS = float(np.sqrt(np.mean(E2M1**2)))
# Scale exponents vary about their mean, which makes the values' RMS larger by about this factor.
SCALE_SPREAD_RMS = 1.43


def random_tensors(
    config: dict[str, Any], seed: int, *, engram_rows: bool = True
) -> dict[str, NDArray[Any]]:
    """A checkpoint: FP8, packed FP4 and E8M0 codes as uint8, BF16 and F32 values as float32.

    There are no NaN codes. A tensor depends on its name, its shape and the seed alone, so that
    configurations with a common part have common tensors.
    """
    layout = tensor_layout(config, engram_rows=engram_rows)
    tensors: dict[str, NDArray[Any]] = {}
    for name, (dtype, shape) in layout.items():
        rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
        if dtype == "F8_E4M3":
            sign = rng.integers(0, 2, shape, np.uint8) << 7
            tensors[name] = rng.choice(E4M3_CODES, shape) | sign
        elif dtype == "I8":
            tensors[name] = rng.integers(0, 256, shape, np.uint8)
        elif dtype == "F8_E8M0":
            tensors[name] = _scales(rng, name.removesuffix(".scale"), layout)
        else:
            values = _values(rng, name, shape).astype(np.float32)
            tensors[name] = bf16_round(values) if dtype == "BF16" else values
    return tensors


def _std(name: str, inputs: int) -> float:
    """Standard deviation of the weights of a linear layer; the rows of a table are near one."""
    if name.endswith("embed"):
        return 1.0
    gain = next((g for suffix, g in GAINS.items() if f".{name}".endswith(f".{suffix}")), 1.0)
    return gain * inputs**-0.5


def _scales(rng: np.random.Generator, name: str, layout: Layout) -> NDArray[np.uint8]:
    dtype, (_, columns) = layout[f"{name}.weight"]
    code_rms, inputs = (E2M1_RMS, 2 * columns) if dtype == "I8" else (E4M3_RMS, columns)
    mean = np.log2(_std(name, inputs) / (code_rms * SCALE_SPREAD_RMS))
    _, shape = layout[f"{name}.scale"]
    return np.floor(127 + mean + rng.uniform(-1, 2, shape)).astype(np.uint8)


def _values(rng: np.random.Generator, name: str, shape: Shape) -> NDArray[np.float64]:
    normal = rng.standard_normal(shape)
    if name.endswith((*NORMS, "_scale")):
        return 1 + 0.2 * normal
    if name.endswith("_base"):
        # Each stream keeps mostly to itself: mixed evenly, all four would soon be the same.
        hc = math.isqrt(shape[0] + 1) - 1
        normal[2 * hc :] += 3 * np.eye(hc).reshape(-1)
        return normal
    if name.endswith((".bias", ".bias_vl")):
        return 0.2 * normal
    if name.endswith(".weight"):
        return normal * _std(name.removesuffix(".weight"), shape[-1])
    if name.endswith("_fn"):
        return normal * shape[-1] ** -0.5
    return normal
