"""Which layer owns what: SWA, Full, Reindex and Reuse with their sources, from the configuration.

Section numbers refer to docs/model.md.
"""

from dataclasses import dataclass
from enum import Enum

from mlx_engine.config import ModelConfig


class LayerKind(Enum):
    """What a layer owns besides its window (section 0)."""

    SWA = "swa"
    FULL = "full"
    REINDEX = "reindex"
    REUSE = "reuse"


@dataclass(frozen=True)
class LayerPlan:
    """One layer's part in the shared compressed attention (section 0).

    `ratio` is tokens per compressed row, 0 for a layer that sees its window only. `kv_source` is
    the layer whose compressed rows it reads and whose index keys its selection scores,
    `topk_source` the one whose selection it uses; None where there is none. `engram_index` is the
    layer's place among the Engram layers.
    """

    layer: int
    kind: LayerKind
    ratio: int
    kv_source: int | None
    topk_source: int | None
    is_candidate_source: bool
    uses_candidates: bool
    engram_index: int | None


def layer_plan(config: ModelConfig) -> tuple[LayerPlan, ...]:
    """The plan of every layer, in order."""
    return tuple(_plan(config, layer) for layer in range(config.num_hidden_layers))


def _plan(config: ModelConfig, layer: int) -> LayerPlan:
    ratio = config.compress_ratios[layer]
    kv = [s for s in config.kv_source_layer_ids if s <= layer]
    index = [s for s in config.index_source_layer_ids if s <= layer]
    if ratio == 0:
        kind = LayerKind.SWA
    elif layer in kv:
        kind = LayerKind.FULL
    elif layer in index:
        kind = LayerKind.REINDEX
    else:
        kind = LayerKind.REUSE
    candidate = config.candidate_source_layer_id
    engram_ids = config.engram.layer_ids if config.engram else ()
    return LayerPlan(
        layer=layer,
        kind=kind,
        ratio=ratio,
        kv_source=kv[-1] if ratio else None,
        topk_source=index[-1] if ratio else None,
        is_candidate_source=layer == candidate,
        uses_candidates=kind is LayerKind.REINDEX and 0 <= candidate < layer,
        engram_index=engram_ids.index(layer) if layer in engram_ids else None,
    )
