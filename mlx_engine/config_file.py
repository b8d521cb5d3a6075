"""`config.json` -> ModelConfig.

Owns the names of both published layouts (nested `text_config` and the flat one) and the rule for
keys that are missing, unknown or unsupported. Section numbers refer to docs/model.md.
"""

import json
import logging
import sys
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

from mlx_engine.config import (
    TILE,
    DraftConfig,
    EngramConfig,
    ModelConfig,
    VisionConfig,
    YarnConfig,
)
from mlx_engine.errors import ModelFileError
from mlx_engine.json_file import read_json

log = logging.getLogger(__name__)

MODEL_TYPE = "deepseek_v41"

_ALIASES = {
    "dim": "hidden_size",
    "moe_inter_dim": "moe_intermediate_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "rope_head_dim": "qk_rope_head_dim",
    "norm_eps": "rms_norm_eps",
    "max_seq_len": "max_position_embeddings",
    "rope_factor": "factor",
    "original_seq_len": "original_max_position_embeddings",
    "n_activated_experts": "num_experts_per_tok",
    "score_func": "scoring_func",
    "route_scale": "routed_scaling_factor",
    "window_size": "sliding_window",
    "kv_source_layers": "kv_source_layer_ids",
    "index_source_layers": "index_source_layer_ids",
    "candidate_source_layer": "candidate_source_layer_id",
    "engram_pad_id": "engram_pad_token_id",
    "n_mtp_layers": "num_nextn_predict_layers",
    "dspark_n_activated_experts": "dspark_num_experts_per_tok",
}

# Keys that may be there and say nothing about the computation of the text model.
_SILENT_KEYS = frozenset(
    """architectures auto_map _name_or_path dtype torch_dtype transformers_version use_cache
    initializer_range attention_dropout hidden_dropout pad_token_id text_config vision_config
    quantization_config max_batch_size model_type""".split()
)
# Of the image encoder's section those that this engine has no use for.
_SILENT_VISION_KEYS = frozenset(
    "model_type rope_theta max_image_tokens min_pixels max_wh_ratio".split()
)

# The only values this engine computes with; another one changes the result, so it is refused.
_REQUIRED_VALUES: dict[str, Any] = {
    "num_key_value_heads": 1,
    "n_shared_experts": 1,
    "hidden_act": "silu",
    "attention_bias": False,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
}
_QUANTIZATION: dict[str, Any] = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [TILE, TILE],
    "scale_fmt": "ue8m0",
    "expert_dtype": "fp4",
}

# An unknown key of one of these families would change the computation if it did anything.
_COMPUTING_FAMILIES = (
    "attention_ attn_ beta_ candidate_ compress_ engram_ gate_ hc_ head_ index_ kv_ moe_ "
    "n_ norm_ num_ o_ q_ qk_ v_ rms_ rope_ router_ routed_ scoring_ sliding_ swiglu_ topk_ mscale "
    "quantization_config."
).split()

_NULLS: tuple[object, ...] = (None, False, 0, "", [], {})


def load_config(directory: Path) -> ModelConfig:
    """Read and check `config.json` of a checkpoint directory; raises ModelFileError."""
    path = directory / "config.json"
    try:
        raw = read_json(path)
    except FileNotFoundError:
        raise ModelFileError(
            f"{directory} has no config.json; give the folder that holds the checkpoint"
        ) from None
    if not isinstance(raw, dict):
        raise ModelFileError(f"{path} holds no JSON object")
    try:
        return parse_config(cast("dict[str, Any]", raw))
    except ModelFileError as error:
        raise ModelFileError(f"{path}: {error}") from None


def released_config() -> ModelConfig:
    """The configuration of the release that this engine is made for."""
    return parse_config(_released_keys())


def small_config(text: Mapping[str, Any], **others: Any) -> dict[str, Any]:
    """The content of `config.json` for a small model of text alone.

    What `text`, its `text_config`, and `others` leave out is as in the release.
    """
    keys = _released_keys() | others
    del keys["vision_config"]
    keys["text_config"] |= text
    return keys


def _released_keys() -> dict[str, Any]:
    return json.loads(files("mlx_engine").joinpath("released_config.json").read_bytes())


def parse_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Build a ModelConfig from the parsed JSON of either published layout.

    Raises ModelFileError with every missing key, or with the first value that cannot be.
    """
    is_nested = "text_config" in raw
    keys = _Keys({**raw, **_section(raw, "text_config")}, _SILENT_KEYS)
    quantization = _Keys(_section(raw, "quantization_config"), section="quantization_config.")
    # A text-only copy may say that there is no image encoder.
    has_vision = raw.get("vision_config") is not None
    vision = _Keys(
        _section(raw, "vision_config") if has_vision else {}, _SILENT_VISION_KEYS, "vision_config."
    )
    model_type = raw.get("model_type", MODEL_TYPE if "dim" in raw else None)
    if model_type != MODEL_TYPE:
        raise ModelFileError(f"model_type is {model_type!r}, this engine runs {MODEL_TYPE!r} only")
    if is_nested or "quantization_config" in raw:
        _check_quantization(quantization)
    keys.require_values(_REQUIRED_VALUES)
    if keys.optional("tie_word_embeddings", False):
        raise ModelFileError("tie_word_embeddings is true, but the model has a head of its own")
    fields: dict[str, Any] = dict(
        vocab_size=keys.integer("vocab_size"),
        hidden_size=keys.integer("hidden_size"),
        moe_intermediate_size=keys.integer("moe_intermediate_size"),
        num_hidden_layers=keys.integer("num_hidden_layers"),
        num_attention_heads=keys.integer("num_attention_heads"),
        head_dim=keys.integer("head_dim"),
        qk_rope_head_dim=keys.integer("qk_rope_head_dim"),
        q_lora_rank=keys.integer("q_lora_rank"),
        o_lora_rank=keys.integer("o_lora_rank"),
        o_groups=keys.integer("o_groups"),
        swiglu_limit=keys.number("swiglu_limit"),
        rms_norm_eps=keys.number("rms_norm_eps"),
        max_position_embeddings=keys.integer("max_position_embeddings"),
        rope_theta=keys.number("rope_theta"),
        compress_rope_theta=keys.number("compress_rope_theta"),
        yarn=_parse_yarn(keys),
        n_routed_experts=keys.integer("n_routed_experts"),
        n_shared_experts=keys.integer("n_shared_experts"),
        num_experts_per_tok=keys.integer("num_experts_per_tok"),
        norm_topk_prob=keys.flag("norm_topk_prob"),
        routed_scaling_factor=keys.number("routed_scaling_factor"),
        # UNVERIFIED: whether the released file has the key; 1.0 leaves the router as it is.
        gate_temp=keys.number("gate_temp", default=1.0),
        sliding_window=keys.integer("sliding_window"),
        compress_ratios=keys.integers("compress_ratios"),
        kv_source_layer_ids=keys.integers("kv_source_layer_ids"),
        index_source_layer_ids=keys.integers("index_source_layer_ids"),
        index_n_heads=keys.integer("index_n_heads"),
        index_head_dim=keys.integer("index_head_dim"),
        index_topk=keys.integer("index_topk"),
        candidate_source_layer_id=keys.integer("candidate_source_layer_id", minimum=-1),
        candidate_topk_blocks=keys.integer("candidate_topk_blocks"),
        candidate_block_size=keys.integer("candidate_block_size"),
        hc_mult=keys.integer("hc_mult"),
        hc_sinkhorn_iters=keys.integer("hc_sinkhorn_iters"),
        hc_eps=keys.number("hc_eps"),
        bos_token_id=keys.integer("bos_token_id", minimum=0),
        eos_token_id=keys.integer("eos_token_id", minimum=0),
        pad_token_id=keys.integer("pad_token_id", minimum=0),
        image_token_id=keys.integer("image_token_id", minimum=0),
        engram=_parse_engram(keys),
        draft=_parse_draft(keys),
        vision=_parse_vision(vision) if vision.values else None,
    )
    # Missing keys come first: a check across fields would stumble over their stand-ins.
    _check_names(keys, quantization, vision)
    return ModelConfig(**fields)


def _section(raw: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The object at a key of the top level, empty where the key is not there."""
    section = raw.get(key, {})
    if not isinstance(section, dict):
        raise ModelFileError(f"{key} is {section!r}, it must be an object")
    return cast("dict[str, Any]", section)


class _Keys:
    """The keys of a section, by their nested names; remembers which were used or are missing.

    `silent` are those that nobody has to use; `section` stands before each name in a message.
    """

    def __init__(
        self, raw: Mapping[str, Any], silent: frozenset[str] = frozenset(), section: str = ""
    ) -> None:
        for alias, name in _ALIASES.items():
            if alias in raw and name in raw and raw[alias] != raw[name]:
                raise ModelFileError(
                    f"{alias} is {raw[alias]!r} and {name} is {raw[name]!r}, "
                    "but they are two names of one key"
                )
        self.values = {_ALIASES.get(key, key): value for key, value in raw.items()}
        self.used: set[str] = set(silent)
        self.missing: list[str] = []
        self._section = section

    def optional(self, key: str, default: Any) -> Any:
        self.used.add(key)
        return self.values.get(key, default)

    def take(self, key: str, stand_in: Any = None) -> Any:
        """The value, or `stand_in` for a missing key, which `_check_names` reports."""
        if key not in self.values:
            self.missing.append(self._section + key)
        return self.optional(key, stand_in)

    def integer(self, key: str, minimum: int = 1) -> int:
        value = self.take(key, minimum)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise ModelFileError(
                f"{self._section}{key} is {value!r}, it must be an integer of at least {minimum}"
            )
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.take(key, 1.0) if default is None else self.optional(key, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 < value <= sys.float_info.max:
            raise ModelFileError(f"{key} is {value!r}, it must be a number above 0")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self.take(key, False)
        if not isinstance(value, bool):
            raise ModelFileError(f"{key} is {value!r}, it must be true or false")
        return value

    def integers(self, key: str) -> tuple[int, ...]:
        value = self.take(key, [])
        if not isinstance(value, list) or any(
            isinstance(item, bool) or not isinstance(item, int) or item < 0
            for item in cast("list[Any]", value)
        ):
            raise ModelFileError(f"{key} is {value!r}, it must be a list of integers from 0 up")
        return tuple(cast("list[int]", value))

    def require_values(self, required: Mapping[str, Any]) -> None:
        for key, expected in required.items():
            value = self.take(key, expected)
            if value != expected:
                raise ModelFileError(f"{key} is {value!r}, this engine computes {expected!r} only")

    def unknown(self) -> dict[str, Any]:
        """The keys that nobody asked for, with their values."""
        return {
            self._section + key: value for key, value in self.values.items() if key not in self.used
        }


def _check_names(*sections: _Keys) -> None:
    """Report every missing key at once, then every unknown one."""
    missing = sorted(key for keys in sections for key in keys.missing)
    if missing:
        raise ModelFileError(f"missing {', '.join(missing)}")
    unknown = {key: value for keys in sections for key, value in keys.unknown().items()}
    changing = sorted(
        key
        for key, value in unknown.items()
        if key.startswith(tuple(_COMPUTING_FAMILIES)) and value not in _NULLS
    )
    if changing:
        raise ModelFileError(
            f"unknown {', '.join(changing)} would change the computation, "
            "and this engine does not know how"
        )
    if unknown:
        log.warning("config.json: unknown keys are ignored: %s", ", ".join(sorted(unknown)))


def _check_quantization(keys: _Keys) -> None:
    for key, expected in _QUANTIZATION.items():
        value = keys.optional(key, None)
        if value != expected:
            raise ModelFileError(
                f"quantization_config.{key} is {value!r}, "
                f"this engine reads the released format with {expected!r} only"
            )


def _parse_yarn(keys: _Keys) -> YarnConfig:
    scaling = keys.optional("rope_scaling", None)
    if isinstance(scaling, dict):
        nested = cast("dict[str, Any]", scaling)
        # UNVERIFIED: which of the two spellings the released file has.
        kinds = [nested[key] for key in ("rope_type", "type") if key in nested]
        if not kinds or any(kind != "yarn" for kind in kinds):
            raise ModelFileError(f"rope_scaling has types {kinds}, this engine computes 'yarn'")
        known = ("factor", "beta_fast", "beta_slow", "original_max_position_embeddings")
        unknown = sorted(set(nested) - {*known, "rope_type", "type"})
        if unknown:
            raise ModelFileError(
                f"rope_scaling has unknown {', '.join(unknown)}, which would change the rotation"
            )
        keys.values.update({key: nested[key] for key in known if key in nested})
    return YarnConfig(
        factor=keys.number("factor"),
        beta_fast=keys.number("beta_fast"),
        beta_slow=keys.number("beta_slow"),
        original_max_position_embeddings=keys.integer("original_max_position_embeddings"),
    )


def _parse_engram(keys: _Keys) -> EngramConfig | None:
    layer_ids = keys.integers("engram_layer_ids")
    engram = EngramConfig(
        layer_ids=layer_ids,
        num_embeddings=keys.integers("engram_num_embeddings"),
        max_ngram_size=keys.integer("engram_max_ngram_size", minimum=2),
        vocab_size=keys.integer("engram_vocab_size"),
        n_heads=keys.integer("engram_n_heads"),
        head_dim=keys.integer("engram_head_dim"),
        pad_token_id=keys.integer("engram_pad_token_id", minimum=0),
        compressed_vocab_size=keys.integer("engram_compressed_vocab_size"),
    )
    return engram if layer_ids else None


def _parse_draft(keys: _Keys) -> DraftConfig | None:
    num_stages = keys.integer("num_nextn_predict_layers", minimum=0)
    if num_stages == 0:
        keys.used.update(key for key in keys.values if key.startswith("dspark_"))
        return None
    return DraftConfig(
        num_stages=num_stages,
        block_size=keys.integer("dspark_block_size"),
        noise_token_id=keys.integer("dspark_noise_token_id", minimum=0),
        target_layer_ids=keys.integers("dspark_target_layer_ids"),
        markov_rank=keys.integer("dspark_markov_rank"),
        n_routed_experts=keys.integer("dspark_n_routed_experts"),
        num_experts_per_tok=keys.integer("dspark_num_experts_per_tok"),
    )


def _parse_vision(keys: _Keys) -> VisionConfig:
    return VisionConfig(
        num_hidden_layers=keys.integer("num_hidden_layers"),
        hidden_size=keys.integer("hidden_size"),
        num_attention_heads=keys.integer("num_attention_heads"),
        intermediate_size=keys.integer("intermediate_size"),
        patch_size=keys.integer("patch_size"),
        downsample_ratio=keys.integer("downsample_ratio"),
    )
