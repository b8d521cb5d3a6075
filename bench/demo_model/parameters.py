"""Which master weight a tensor of the checkpoint is: those of equal layers are stacked.

A parameter's key is the tensor's name without its layer and expert; the stack has the layers that
own such a tensor, in order.
"""

import re
from typing import Any


def parameter_of(name: str, config: dict[str, Any]) -> tuple[str, tuple[int, ...]]:
    """Where a tensor of the checkpoint is: a parameter's key, and its place in the stack."""
    at_layer = re.fullmatch(r"layers\.(\d+)\.(.+)", name)
    if at_layer is None:
        return name, ()
    layer, key = int(at_layer[1]), at_layer[2]
    place = owners(key, config).index(layer)
    at_expert = re.fullmatch(r"ffn\.experts\.(\d+)\.(.+)", key)
    if at_expert is None:
        return key, (place,)
    return f"ffn.experts.{at_expert[2]}", (place, int(at_expert[1]))


def owners(key: str, config: dict[str, Any]) -> list[int]:
    """The layers that have a tensor of this name."""
    text: dict[str, Any] = config["text_config"]
    if key.startswith("engram."):
        return text["engram_layer_ids"]
    if key.startswith("attn.compressor.wgate"):
        return [s for s in text["kv_source_layer_ids"] if text["compress_ratios"][s] > 1]
    if key.startswith(("attn.compressor.", "attn.indexer.wk.", "attn.indexer.k_norm.")):
        return text["kv_source_layer_ids"]
    if key.startswith("attn.indexer."):
        return text["index_source_layer_ids"]
    return list(range(text["num_hidden_layers"]))
