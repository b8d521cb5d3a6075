"""config.json -> ModelConfig -> layer plan: both layouts, and every way to be wrong."""

import copy
import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlx_engine.config import ModelConfig
from mlx_engine.config_file import load_config, parse_config
from mlx_engine.errors import ModelFileError
from mlx_engine.layer_plan import LayerKind, layer_plan
from tests.reference.random_tensors import TINY_CONFIG

DATA = Path(__file__).parents[1] / "data"
RELEASED_VISION = json.loads((DATA / "released_config.json").read_text())["vision_config"]

# The flat layout's names, from the table of section 1 in docs/model.md.
FLAT_NAMES = {
    "hidden_size": "dim",
    "moe_intermediate_size": "moe_inter_dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "qk_rope_head_dim": "rope_head_dim",
    "rms_norm_eps": "norm_eps",
    "max_position_embeddings": "max_seq_len",
    "factor": "rope_factor",
    "original_max_position_embeddings": "original_seq_len",
    "num_experts_per_tok": "n_activated_experts",
    "scoring_func": "score_func",
    "routed_scaling_factor": "route_scale",
    "sliding_window": "window_size",
    "kv_source_layer_ids": "kv_source_layers",
    "index_source_layer_ids": "index_source_layers",
    "candidate_source_layer_id": "candidate_source_layer",
    "engram_pad_token_id": "engram_pad_id",
    "num_nextn_predict_layers": "n_mtp_layers",
    "dspark_num_experts_per_tok": "dspark_n_activated_experts",
}


@pytest.fixture
def raw() -> dict[str, Any]:
    return copy.deepcopy(TINY_CONFIG)


@pytest.fixture(scope="module")
def released() -> ModelConfig:
    return parse_config(json.loads((DATA / "released_config.json").read_text()))


def flattened(raw: dict[str, Any]) -> dict[str, Any]:
    """The same configuration in the flat layout."""
    text = {k: v for k, v in raw["text_config"].items() if k not in ("model_type", "rope_scaling")}
    scaling = {k: v for k, v in raw["text_config"]["rope_scaling"].items() if k != "rope_type"}
    ids = {k: v for k, v in raw.items() if k.endswith("_token_id")}
    return {FLAT_NAMES.get(k, k): v for k, v in {**ids, **text, **scaling}.items()}


def refusal(raw: dict[str, Any]) -> str:
    with pytest.raises(ModelFileError) as caught:
        parse_config(raw)
    return str(caught.value)


def test_the_released_file_gives_the_released_numbers(released: ModelConfig) -> None:
    assert released.rms_norm_eps == 1e-20
    assert (released.hidden_size, released.num_attention_heads, released.head_dim) == (
        5120,
        64,
        512,
    )
    assert released.yarn.original_max_position_embeddings == 65536
    assert released.engram is not None and released.engram.columns == 24
    assert released.draft is not None and released.draft.target_layer_ids == (37, 38, 39)
    assert released.vision is not None and released.vision.num_hidden_layers == 32
    text_only = json.loads((DATA / "released_config.json").read_text()) | {"vision_config": None}
    assert parse_config(text_only) == replace(released, vision=None)
    assert released.gate_temp == 1.0
    assert released.reach_tokens(21) == 2414 and released.reach_tokens(39) == 128


def test_the_flat_layout_is_the_same_configuration(raw: dict[str, Any]) -> None:
    flat = flattened(raw)
    assert set(FLAT_NAMES.values()) <= set(flat)
    assert parse_config(flat) == parse_config(raw)


def test_a_flat_text_model_of_another_type_is_refused(raw: dict[str, Any]) -> None:
    assert "deepseek_v41" in refusal({**flattened(raw), "model_type": "deepseek_v4"})


def test_rope_scaling_takes_either_spelling_of_its_type(raw: dict[str, Any]) -> None:
    expected = parse_config(raw)
    scaling = raw["text_config"]["rope_scaling"]
    scaling["type"] = scaling.pop("rope_type")
    assert parse_config(raw) == expected
    scaling["type"] = "linear"
    assert "linear" in refusal(raw)


def test_unverified_keys_are_optional_and_heard(raw: dict[str, Any]) -> None:
    raw["text_config"]["gate_temp"] = 2.0
    raw["transformers_version"] = "5.0"
    raw["tie_word_embeddings"] = False
    assert parse_config(raw).gate_temp == 2.0
    raw["tie_word_embeddings"] = True
    assert "tie_word_embeddings" in refusal(raw)


def test_the_top_level_names_the_model_and_the_text_part_wins_elsewhere(
    raw: dict[str, Any],
) -> None:
    raw["hidden_size"] = 999
    assert parse_config(raw).hidden_size == TINY_CONFIG["text_config"]["hidden_size"]


@pytest.mark.parametrize(
    "key",
    sorted({*TINY_CONFIG["text_config"], "image_token_id", "pad_token_id"} - {"model_type"}),
)
def test_a_missing_key_is_named(raw: dict[str, Any], key: str) -> None:
    raw.pop(key, None)
    raw["text_config"].pop(key, None)
    message = refusal(raw)
    parts = ("factor", "beta_fast") if key == "rope_scaling" else (key,)
    assert message.startswith("missing") and all(part in message for part in parts)


def test_all_missing_keys_are_named_at_once(raw: dict[str, Any]) -> None:
    for key in ("head_dim", "index_topk", "engram_head_dim"):
        del raw["text_config"][key]
    del raw["text_config"]["rope_scaling"]["beta_slow"]
    assert refusal(raw) == "missing beta_slow, engram_head_dim, head_dim, index_topk"


def test_a_missing_vision_key_is_named() -> None:
    raw = json.loads((DATA / "released_config.json").read_text())
    del raw["vision_config"]["patch_size"], raw["text_config"]["head_dim"]
    assert refusal(raw) == "missing head_dim, vision_config.patch_size"


Edit = Callable[[dict[str, Any]], None]


def text(**values: Any) -> Edit:
    return lambda raw: raw["text_config"].update(values)


def top(**values: Any) -> Edit:
    return lambda raw: raw.update(values)


@pytest.mark.parametrize(
    ("edit", "parts"),
    [
        pytest.param(text(compress_ratios=[0, 2, 2]), ["3 entries", "must have 10"], id="short"),
        pytest.param(text(compress_ratios=[0] * 11), ["11 entries", "must have 10"], id="long"),
        pytest.param(
            text(compress_ratios=[0, 2, 2, 2, 1, 1, 1, 1, 1, 0]), ["draft stages"], id="drafts"
        ),
        pytest.param(
            text(compress_ratios=[0, 2, 2, 2, 1, 2, 1, 1, 0, 0]), ["layer 5", "ratio 2"], id="ratio"
        ),
        pytest.param(
            text(compress_ratios=[2, 2, 2, 2, 1, 1, 1, 1, 0, 0]), ["layer 0"], id="no source"
        ),
        pytest.param(
            text(candidate_source_layer_id=3), ["candidate_source_layer_id is 3"], id="candidate"
        ),
        pytest.param(
            text(candidate_source_layer_id=6), ["candidate_source_layer_id is 6"], id="reindexer"
        ),
        pytest.param(text(kv_source_layer_ids=[0, 3, 4]), ["kv_source_layer_ids"], id="kv on SWA"),
        pytest.param(text(kv_source_layer_ids=[3, 1, 4]), ["ascend"], id="descending"),
        pytest.param(
            text(index_source_layer_ids=[1, 3, 8]), ["index_source_layer_ids"], id="beyond the top"
        ),
        pytest.param(text(index_source_layer_ids=[1, 3, 6]), ["[4]"], id="unindexed rows"),
        pytest.param(text(engram_layer_ids=[4, 1]), ["engram_layer_ids"], id="engram order"),
        pytest.param(text(engram_num_embeddings=[630]), ["engram_num_embeddings"], id="tables"),
        pytest.param(text(engram_layer_ids=[1, 8]), ["engram_layer_ids"], id="engram beyond"),
        pytest.param(text(hidden_size=100), ["hidden_size is 100", "32"], id="untileable"),
        pytest.param(text(o_groups=3), ["o_groups"], id="groups"),
        pytest.param(text(qk_rope_head_dim=15), ["qk_rope_head_dim"], id="odd rope"),
        pytest.param(text(num_experts_per_tok=9), ["9", "8 n_routed_experts"], id="too many"),
        pytest.param(text(vocab_size=0), ["vocab_size is 0"], id="zero"),
        pytest.param(text(vocab_size=True), ["vocab_size is True"], id="not a number"),
        pytest.param(text(swiglu_limit="10"), ["swiglu_limit"], id="text for a number"),
        pytest.param(text(compress_ratios="0"), ["compress_ratios"], id="text for a list"),
        pytest.param(text(scoring_func="softmax"), ["scoring_func", "sqrtsoftplus"], id="router"),
        pytest.param(text(num_key_value_heads=8), ["num_key_value_heads is 8"], id="kv heads"),
        pytest.param(
            text(rope_scaling={"rope_type": "yarn", "factor": 1, "mscale": 2}),
            ["mscale"],
            id="yarn",
        ),
        pytest.param(top(eos_token_id=256), ["eos_token_id is 256"], id="eos"),
        pytest.param(top(model_type="deepseek_v4"), ["'deepseek_v4'"], id="v4"),
        pytest.param(top(model_type=None), ["model_type is None"], id="untyped"),
        pytest.param(top(quantization_config=None), ["quantization_config"], id="unquantised"),
        pytest.param(
            top(
                quantization_config={
                    **TINY_CONFIG["quantization_config"],
                    "weight_block_size": [128, 128],
                }
            ),
            ["weight_block_size is [128, 128]", "[32, 32]"],
            id="tiles",
        ),
    ],
)
def test_a_wrong_value_is_refused_by_name(
    raw: dict[str, Any], edit: Edit, parts: list[str]
) -> None:
    edit(raw)
    message = refusal(raw)
    assert all(part in message for part in parts), message


def test_a_harmless_unknown_key_is_one_warning(
    raw: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    raw |= {"published_on": "a Friday", "colour": "blue"}
    raw["quantization_config"]["modules_to_not_convert"] = []
    raw["vision_config"] = {**RELEASED_VISION, "shutter": "slow", "num_heads": 8}
    with caplog.at_level(logging.WARNING):
        assert replace(parse_config(raw), vision=None) == parse_config(TINY_CONFIG)
    (record,) = caplog.records
    assert record.getMessage().endswith(
        "colour, published_on, quantization_config.modules_to_not_convert, "
        "vision_config.num_heads, vision_config.shutter"
    )


def test_an_unknown_key_that_would_compute_is_fatal_unless_it_is_off(raw: dict[str, Any]) -> None:
    raw["text_config"]["attn_logit_softcapping"] = None
    parse_config(raw)
    raw["text_config"]["attn_logit_softcapping"] = 30.0
    raw["quantization_config"]["zero_point"] = True
    assert refusal(raw).startswith(
        "unknown attn_logit_softcapping, quantization_config.zero_point would change"
    )


def test_a_known_configuration_warns_of_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        parse_config(json.loads((DATA / "released_config.json").read_text()))
        parse_config(TINY_CONFIG)
        parse_config(flattened(TINY_CONFIG))
    assert caplog.records == []


@pytest.mark.parametrize(
    ("content", "part"),
    [
        pytest.param(None, "no config.json", id="absent"),
        pytest.param(b"{", "cannot be read as JSON (see line 1, column 2)", id="cut"),
        pytest.param(b"\xff\xfe", "cannot be read as JSON (byte 1 is not UTF-8", id="binary"),
        pytest.param(b"[" * 100_000, "values nested too deeply", id="deep"),
        pytest.param(b"1" * 10_000, "numbers that are too long", id="long number"),
        pytest.param(b"[]", "no JSON object", id="list"),
        pytest.param(b'{"model_type": "llama"}', "'llama'", id="another model"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, content: bytes | None, part: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelFileError) as caught:
        load_config(tmp_path)
    assert part in str(caught.value) and str(tmp_path) in str(caught.value)


def test_the_released_plan(released: ModelConfig) -> None:
    plan = layer_plan(released)
    layers = {kind: [p.layer for p in plan if p.kind is kind] for kind in LayerKind}
    assert layers[LayerKind.SWA] == [0, 1]
    assert layers[LayerKind.FULL] == [2, 8, 14, 20]
    assert layers[LayerKind.REINDEX] == [24, 28, 32, 36]
    assert len(layers[LayerKind.REUSE]) == 30
    assert [p.layer for p in plan if p.engram_index is not None] == [1, 14]
    assert [p.layer for p in plan if p.is_candidate_source] == [20]
    assert [p.layer for p in plan if p.uses_candidates] == [24, 28, 32, 36]
    assert (plan[0].kv_source, plan[0].topk_source) == (None, None)
    assert (plan[13].ratio, plan[13].kv_source, plan[13].topk_source) == (2, 8, 8)
    assert (plan[31].ratio, plan[31].kv_source, plan[31].topk_source) == (1, 20, 28)


def test_without_a_candidate_source_no_layer_prunes(raw: dict[str, Any]) -> None:
    raw["text_config"]["candidate_source_layer_id"] = -1
    plan = layer_plan(parse_config(raw))
    assert not any(p.uses_candidates or p.is_candidate_source for p in plan)
    assert [p.layer for p in plan if p.kind is LayerKind.REINDEX] == [6]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"text_config": None}, "text_config"),
        ({"text_config": [1]}, "text_config"),
        ({"vision_config": "small"}, "vision_config"),
        ({"quantization_config": ["fp8"]}, "quantization_config"),
    ],
    ids=str,
)
def test_a_section_that_is_no_object(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelFileError, match=rf"{says} is .*must be an object"):
        parse_config({**TINY_CONFIG, **change})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("gate_temp", None),
        ("gate_temp", "hot"),
        ("gate_temp", 0),
        ("rope_theta", float("nan")),
        ("rope_theta", float("inf")),
        ("norm_topk_prob", "false"),
        ("engram_pad_token_id", 256),
        ("engram_num_embeddings", [0, 0]),
        ("engram_layer_ids", [1, 6]),
    ],
    ids=str,
)
def test_a_value_that_cannot_be(key: str, value: object) -> None:
    with pytest.raises(ModelFileError, match=key):
        parse_config({**TINY_CONFIG, "text_config": {**TINY_CONFIG["text_config"], key: value}})


def test_two_names_of_one_key_must_agree() -> None:
    text = TINY_CONFIG["text_config"]
    parse_config({**TINY_CONFIG, "text_config": {**text, "dim": text["hidden_size"]}})
    with pytest.raises(ModelFileError, match="dim is 64 and hidden_size is 128"):
        parse_config({**TINY_CONFIG, "text_config": {**text, "dim": 64}})


def test_the_two_spellings_of_the_rope_type_must_agree() -> None:
    scaling = {**TINY_CONFIG["text_config"]["rope_scaling"], "type": "linear"}
    with pytest.raises(ModelFileError, match="rope_scaling has types"):
        parse_config(
            {**TINY_CONFIG, "text_config": {**TINY_CONFIG["text_config"], "rope_scaling": scaling}}
        )


def test_draft_keys_without_draft_stages_are_no_news(caplog: pytest.LogCaptureFixture) -> None:
    text = TINY_CONFIG["text_config"]
    none = {"num_nextn_predict_layers": 0, "compress_ratios": text["compress_ratios"][:8]}
    assert parse_config({**TINY_CONFIG, "text_config": {**text, **none}}).draft is None
    assert caplog.text == ""
