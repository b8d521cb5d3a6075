"""The model's configuration: frozen dataclasses with the checkpoint's own names.

A ModelConfig checks itself across its fields, so that nothing behind it has to. Reading the file
is config_file's part, which layer owns what is layer_plan's. Section numbers refer to
docs/model.md.
"""

from dataclasses import dataclass

from mlx_engine.errors import ModelFileError

# Far beyond the release's 384: a damaged number must not become a list of a billion names.
_MAX_EXPERTS = 1 << 14

# Inputs that share a scale in the released weights; in FP8 as many outputs share it too.
TILE = 32


@dataclass(frozen=True)
class YarnConfig:
    """The frequency ramp of the layers with compressed attention (section 3.3)."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class EngramConfig:
    """The n-gram memory's shape (section 4).

    `vocab_size` is where the search for primes starts, not a vocabulary.
    """

    layer_ids: tuple[int, ...]
    num_embeddings: tuple[int, ...]
    max_ngram_size: int
    vocab_size: int
    n_heads: int
    head_dim: int
    pad_token_id: int
    compressed_vocab_size: int

    @property
    def columns(self) -> int:
        """Table rows read per token and layer: one per n-gram size and head."""
        return (self.max_ngram_size - 1) * self.n_heads


@dataclass(frozen=True)
class DraftConfig:
    """The DSpark draft stages' shape (section 5): read for the tensor list only."""

    num_stages: int
    block_size: int
    noise_token_id: int
    target_layer_ids: tuple[int, ...]
    markov_rank: int
    n_routed_experts: int
    num_experts_per_tok: int


@dataclass(frozen=True)
class VisionConfig:
    """The image encoder's shape (section 6): read for the tensor list only."""

    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    intermediate_size: int
    patch_size: int
    downsample_ratio: int


@dataclass(frozen=True)
class ModelConfig:
    """The text model as `config.json` describes it (section 1), with the checkpoint's own names."""

    vocab_size: int
    hidden_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    swiglu_limit: float
    rms_norm_eps: float
    max_position_embeddings: int
    rope_theta: float
    compress_rope_theta: float
    yarn: YarnConfig
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    gate_temp: float
    sliding_window: int
    compress_ratios: tuple[int, ...]
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    candidate_source_layer_id: int
    candidate_topk_blocks: int
    candidate_block_size: int
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    bos_token_id: int
    eos_token_id: int
    pad_token_id: int
    image_token_id: int
    engram: EngramConfig | None
    draft: DraftConfig | None
    vision: VisionConfig | None

    def __post_init__(self) -> None:
        _check_shapes(self)
        _check_layers(self)

    @property
    def last_kv_source(self) -> int:
        """The layer above which the past arrives only through its rows and the windows."""
        return max(self.kv_source_layer_ids, default=self.num_hidden_layers - 1)

    def reach_tokens(self, layer: int) -> int:
        """How many of the last inputs of `layer` the state and logits at the end depend on.

        Holds above `last_kv_source`: each layer up to the top reaches one window further back.
        """
        return 1 + (self.sliding_window - 1) * (self.num_hidden_layers - layer)


def _check_shapes(config: ModelConfig) -> None:
    """Refuse widths that the number formats cannot tile."""
    widths = {
        "hidden_size": config.hidden_size,
        "moe_intermediate_size": config.moe_intermediate_size,
        "q_lora_rank": config.q_lora_rank,
        "head_dim": config.head_dim,
        "index_head_dim": config.index_head_dim,
        "o_groups * o_lora_rank": config.o_groups * config.o_lora_rank,
        "o_lora_rank": config.o_lora_rank,
    }
    heads_width = config.num_attention_heads * config.head_dim
    if heads_width % config.o_groups:
        raise ModelFileError(
            f"num_attention_heads * head_dim = {heads_width} does not split "
            f"into {config.o_groups} o_groups"
        )
    widths["width of an output group"] = heads_width // config.o_groups
    if config.engram is not None:
        widths["engram_head_dim"] = config.engram.head_dim
    for name, width in widths.items():
        if width % TILE:
            raise ModelFileError(
                f"{name} is {width}, it must be a multiple of {TILE} (scale tiles)"
            )
    if min(config.rope_theta, config.compress_rope_theta) <= 1:
        raise ModelFileError("rope_theta and compress_rope_theta must be above 1")
    yarn = config.yarn
    if not 1e-6 <= yarn.beta_slow < yarn.beta_fast <= 1e6:
        raise ModelFileError(
            f"rope_scaling has beta_slow {yarn.beta_slow} and beta_fast {yarn.beta_fast}, "
            "which must ascend from 1e-6 to 1e6"
        )
    rope = config.qk_rope_head_dim
    if rope % 2 or rope > min(config.head_dim, config.index_head_dim):
        raise ModelFileError(
            f"qk_rope_head_dim is {rope}, it must be even and at most head_dim and index_head_dim"
        )
    if config.num_experts_per_tok > config.n_routed_experts:
        raise ModelFileError(
            f"num_experts_per_tok is {config.num_experts_per_tok}, "
            f"but there are {config.n_routed_experts} n_routed_experts"
        )
    drafts = config.draft.n_routed_experts if config.draft else 0
    if max(config.n_routed_experts, drafts) > _MAX_EXPERTS:
        raise ModelFileError(
            f"{max(config.n_routed_experts, drafts)} experts a layer pass the limit of "
            f"{_MAX_EXPERTS}, so config.json is damaged: fetch it again"
        )
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id"):
        if getattr(config, name) >= config.vocab_size:
            raise ModelFileError(
                f"{name} is {getattr(config, name)}, beyond vocab_size {config.vocab_size}"
            )


def _check_layers(config: ModelConfig) -> None:
    """Refuse a schedule in which a layer has no source or one of another ratio (section 0)."""
    layers = config.num_hidden_layers
    stages = config.draft.num_stages if config.draft else 0
    ratios = config.compress_ratios
    if len(ratios) != layers + stages:
        raise ModelFileError(
            f"compress_ratios has {len(ratios)} entries, it must have {layers + stages}: "
            f"{layers} layers and {stages} draft stages"
        )
    kv, index = config.kv_source_layer_ids, config.index_source_layer_ids
    for name, ids in (("kv_source_layer_ids", kv), ("index_source_layer_ids", index)):
        if list(ids) != sorted(set(ids)) or any(s >= layers or ratios[s] == 0 for s in ids):
            raise ModelFileError(
                f"{name} is {list(ids)}, it must ascend and name layers with a compress ratio"
            )
    if not set(kv) <= set(index):
        raise ModelFileError(
            f"kv_source_layer_ids {sorted(set(kv) - set(index))} are no index_source_layer_ids, "
            "so nothing would select from their rows"
        )
    for layer in range(layers):
        sources = [s for s in kv if s <= layer]
        if ratios[layer] and not sources:
            raise ModelFileError(f"layer {layer} compresses, but no kv source stands before it")
        if ratios[layer] and ratios[layer] != ratios[sources[-1]]:
            raise ModelFileError(
                f"layer {layer} has compress ratio {ratios[layer]}, "
                f"but its source, layer {sources[-1]}, has {ratios[sources[-1]]}"
            )
    candidate = config.candidate_source_layer_id
    if candidate >= 0 and (not kv or candidate != kv[-1]):
        raise ModelFileError(
            f"candidate_source_layer_id is {candidate}, it must be the last of "
            f"kv_source_layer_ids {list(kv)}, whose rows its candidates name"
        )
    if any(ratios[layers:]):
        raise ModelFileError("compress_ratios of the draft stages must be 0")
    engram = config.engram
    if engram is not None and engram.layer_ids[-1] > config.last_kv_source:
        raise ModelFileError(
            f"engram_layer_ids {list(engram.layer_ids)} pass layer {config.last_kv_source}, the "
            "last kv source, above which this engine runs the end of a prompt only"
        )
    if engram is not None and min(engram.num_embeddings, default=0) < 1:
        raise ModelFileError(f"engram_num_embeddings {list(engram.num_embeddings)} must be above 0")
    if engram is not None and engram.pad_token_id >= config.vocab_size:
        raise ModelFileError(
            f"engram_pad_token_id is {engram.pad_token_id}, beyond vocab_size {config.vocab_size}"
        )
    if engram is not None and (
        len(engram.num_embeddings) != len(engram.layer_ids)
        or list(engram.layer_ids) != sorted(set(engram.layer_ids))
        or engram.layer_ids[-1] >= layers
    ):
        raise ModelFileError(
            f"engram_layer_ids {list(engram.layer_ids)} must ascend within {layers} layers "
            f"and match the {len(engram.num_embeddings)} engram_num_embeddings"
        )
