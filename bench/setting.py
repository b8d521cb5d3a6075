"""What the benches measure and where: the small random model, and the machine with its versions."""

import math
import os
import platform
import re
import subprocess
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_engine.checkpoint import open_checkpoint
from mlx_engine.config import ModelConfig
from mlx_engine.weights import Weights
from tests.checkpoints import write_checkpoint
from tests.reference.random_tensors import TINY_CONFIG, random_tensors, tensor_layout

ROOT = Path(__file__).resolve().parents[1]
GIB = 2**30

# All layer kinds in the released order, half of the layers from the last kv source up. The widths
# keep a run within minutes on two cores; window, streams and Sinkhorn rounds are the released ones.
TEXT_CONFIG: dict[str, Any] = {
    **{key: v for key, v in TINY_CONFIG["text_config"].items() if not key.startswith("dspark")},
    "vocab_size": 512,
    "hidden_size": 192,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "head_dim": 64,
    "qk_rope_head_dim": 16,
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
    "sliding_window": 128,
    "compress_ratios": [0, 0, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1],
    "kv_source_layer_ids": [2, 4, 6],
    "index_source_layer_ids": [2, 4, 6, 9],
    "index_n_heads": 8,
    "index_head_dim": 32,
    "index_topk": 256,
    "candidate_source_layer_id": 6,
    "candidate_topk_blocks": 256,
    "candidate_block_size": 8,
    "engram_layer_ids": [],
    "engram_num_embeddings": [],
    "num_nextn_predict_layers": 0,
}
CONFIG: dict[str, Any] = {**TINY_CONFIG, "text_config": TEXT_CONFIG}
SEED = 0
# The engine's own, and mlx-lm's.
CHUNK_TOKENS = 2048


@dataclass(frozen=True)
class SmallModel:
    """A random checkpoint in the released format, Engram off: its files and its loaded weights."""

    directory: Path
    config: ModelConfig
    weights: Weights

    def prompt(self, tokens: int) -> list[int]:
        """Random token ids."""
        rng = np.random.default_rng(SEED)
        return rng.integers(0, self.config.image_token_id, tokens).tolist()

    def sizes(self) -> dict[str, Any]:
        """The model's shape and its parameters, in all and those that one token uses."""
        config, total, active = self.config, 0, 0
        for name, (dtype, shape) in tensor_layout(CONFIG).items():
            if name.endswith((".scale", ".bias_vl")):
                continue
            count = math.prod(shape) * (2 if dtype == "I8" else 1)
            total += count
            if ".experts." in name:
                active += count * config.num_experts_per_tok / config.n_routed_experts
            else:
                active += config.hidden_size if name == "embed.weight" else count
        shape = {
            "layers": config.num_hidden_layers,
            "of them from the last kv source up": config.num_hidden_layers - config.last_kv_source,
            "hidden_size": config.hidden_size,
            "heads": config.num_attention_heads,
            "head_dim": config.head_dim,
            "experts": config.n_routed_experts,
            "experts per token": config.num_experts_per_tok,
            "window": config.sliding_window,
            "index heads": config.index_n_heads,
            "index_head_dim": config.index_head_dim,
            "index_topk": config.index_topk,
        }
        return {"parameters": {"total": total, "active": round(active)}, "model": shape}


@contextmanager
def small_model() -> Generator[SmallModel]:
    """Write the checkpoint into a temporary folder, and load it."""
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "small"
        write_checkpoint(directory, CONFIG, random_tensors(CONFIG, SEED))
        checkpoint = open_checkpoint(directory)
        yield SmallModel(directory, checkpoint.config, checkpoint.read_weights())


def surroundings() -> dict[str, Any]:
    """Hardware, versions, commit and date of a run."""
    packages = ("mlx", "mlx-lm", "numpy")
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": _commit(),
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 1),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "device": str(mx.default_device()),
        "versions": {
            "python": platform.python_version(),
            **{name: _version(name) for name in packages},
        },
    }


def _version(package: str) -> str | None:
    """None where it is not installed, as the peer need not be."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str:
    commit = _output("git", "-C", str(ROOT), "rev-parse", "--short", "HEAD")
    is_changed = _output("git", "-C", str(ROOT), "status", "--porcelain", "--", "mlx_engine")
    return f"{commit}, with changes" if is_changed else commit or "unknown"


def _cpu_name() -> str:
    if platform.system() == "Darwin":
        return _output("sysctl", "-n", "machdep.cpu.brand_string")
    names = re.findall(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return names[0] if names else platform.processor()


def _output(*command: str) -> str:
    try:
        run = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return run.stdout.strip()
