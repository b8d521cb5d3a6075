"""The tensor list of the released configuration, against the published counts and bytes."""

import json
from collections import Counter
from pathlib import Path

from mlx_engine.config_file import parse_config
from mlx_engine.inventory import Owner, tensor_specs
from tests.reference.random_tensors import TINY_CONFIG, tensor_layout

RELEASED = json.loads((Path(__file__).parents[1] / "data" / "released_config.json").read_text())

# Section 2.4 of docs/model.md: tensors and bytes by owner.
PUBLISHED = {
    Owner.ENCODER: (46_704, 147_838_599_136),
    Owner.DECODER: (46_699, 147_823_271_392),
    Owner.EMBED: (1, 1_323_827_200),
    Owner.HEAD: (2, 1_323_837_440),
    Owner.ENGRAM: (8, 315_043_840),
    Owner.ENGRAM_TABLES: (4, 202_758_032_400),
    Owner.DRAFTS: (2_401, 7_932_874_632),
    Owner.VISION: (266, 970_536_960),
}


def test_the_released_list_has_the_published_counts_and_bytes() -> None:
    tensors: Counter[Owner] = Counter()
    n_bytes: Counter[Owner] = Counter()
    names: set[str] = set()
    for spec in tensor_specs(parse_config(RELEASED)):
        names.add(spec.name)
        tensors[spec.owner] += 1
        n_bytes[spec.owner] += spec.n_bytes
    assert {owner: (tensors[owner], n_bytes[owner]) for owner in Owner} == PUBLISHED
    assert len(names) == tensors.total() == 96_085
    assert n_bytes.total() == 510_286_023_000


def test_the_parts_of_the_layers_have_the_published_bytes() -> None:
    parts: Counter[str] = Counter()
    for spec in tensor_specs(parse_config(RELEASED)):
        if spec.owner in (Owner.ENCODER, Owner.DECODER):
            part = spec.name.split(".")[2]
            parts[".".join(spec.name.split(".")[2:4]) if part == "ffn" else part] += spec.n_bytes
    assert parts["ffn.experts"] == 288_777_830_400
    assert parts["ffn.shared_experts"] == 1_416_960_000
    assert parts["ffn.gate"] == 157_409_280
    # The published sum for norms leaves the two norms inside attention with attention.
    assert parts["attn"] == 5_151_556_608
    assert parts["attn_norm"] + parts["ffn_norm"] == 819_200
    assert sum(n for part, n in parts.items() if part.startswith("hc_")) == 157_295_040


def test_the_lists_of_engine_and_reference_are_one() -> None:
    """The reference spells the names a second time, from the same section."""
    for raw in (TINY_CONFIG, RELEASED):
        specs = {s.name: (s.dtype, s.shape) for s in tensor_specs(parse_config(raw))}
        assert specs == dict(tensor_layout(raw))
