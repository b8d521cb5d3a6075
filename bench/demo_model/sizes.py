"""The demo model's configuration, in the released keys.

Every mechanism of the release in 8 layers: window, rows of two tokens and of one, index selection
among far more rows than it takes, candidate blocks, Engram. Under 5 million parameters work for a
token. No draft stages and no vision, which the engine does not run.
"""

from typing import Any

from mlx_engine.config_file import small_config
from mlx_engine.engram import primes_from

VOCAB_SIZE = 2048

_ENGRAM_LAYER_IDS = (1, 3)
_ENGRAM_HEADS = 2
_ENGRAM_MAX_NGRAM = 4
_ENGRAM_PRIMES_FROM = 4001


def demo_config(compressed_vocab_size: int, image_token_id: int) -> dict[str, Any]:
    """The content of `config.json`; both arguments follow from the tokenizer."""
    columns = (_ENGRAM_MAX_NGRAM - 1) * _ENGRAM_HEADS
    primes = primes_from(_ENGRAM_PRIMES_FROM, columns * len(_ENGRAM_LAYER_IDS))
    rows = [sum(primes[i * columns : (i + 1) * columns]) for i in range(len(_ENGRAM_LAYER_IDS))]
    text: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 256,
        "moe_intermediate_size": 96,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "head_dim": 128,
        "qk_rope_head_dim": 32,
        "q_lora_rank": 96,
        "o_lora_rank": 64,
        "o_groups": 2,
        "max_position_embeddings": 65536,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 16,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 4096,
        },
        "n_routed_experts": 16,
        "num_experts_per_tok": 2,
        "compress_ratios": [0, 0, 2, 2, 1, 1, 1, 1],
        "kv_source_layer_ids": [2, 4],
        "index_source_layer_ids": [2, 4, 6],
        "index_n_heads": 4,
        "index_head_dim": 64,
        "candidate_source_layer_id": 4,
        "candidate_topk_blocks": 512,
        "engram_layer_ids": list(_ENGRAM_LAYER_IDS),
        "engram_num_embeddings": rows,
        "engram_max_ngram_size": _ENGRAM_MAX_NGRAM,
        "engram_vocab_size": _ENGRAM_PRIMES_FROM,
        "engram_n_heads": _ENGRAM_HEADS,
        "engram_head_dim": 32,
        "engram_compressed_vocab_size": compressed_vocab_size,
        "num_nextn_predict_layers": 0,
        "dspark_noise_token_id": 2,
        "dspark_target_layer_ids": [],
        "dspark_markov_rank": 32,
        "dspark_n_routed_experts": 16,
        "dspark_num_experts_per_tok": 2,
    }
    return small_config(text, image_token_id=image_token_id)
