"""Writes a small random checkpoint in the released format, so that all of the real code can run.

Owns its configuration and its random weights; the tensor list is inventory's, the tokenizer
tiny_tokenizer's. Headers are written here by hand: numpy lacks the types F8_E4M3, F8_E8M0 and
BF16, and neither MLX nor torch is needed. What such a model says means nothing.
"""

import errno
import hashlib
import json
import logging
import math
import os
import secrets
import shutil
import zlib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from mlx_engine.config import ModelConfig
from mlx_engine.config_file import parse_config, small_config
from mlx_engine.engram import primes_from
from mlx_engine.errors import BadRequest, DeviceError
from mlx_engine.inventory import TILE, Owner, TensorSpec, tensor_specs
from mlx_engine.tiny_tokenizer import (
    EOS,
    IMAGE,
    MIN_VOCAB_SIZE,
    PLACEHOLDER,
    THINK_END,
    build_tiny_tokenizer,
    tokenizer_config,
)
from mlx_engine.token_map import build_token_map

log = logging.getLogger(__name__)

# Part of the folder's name in the cache: raise it when the weights or files change.
_WRITER_VERSION = 2

# The sha256 of every other file, by name.
_CHECKSUMS = "checksums.json"

_VOCAB_SIZE = 320
_ENGRAM_LAYER_IDS = (1, 4)
_ENGRAM_COLUMNS = 3 * 2
_ENGRAM_PRIMES_FROM = 997

# Quantised weights draw from all e2m1 codes and all e4m3 codes but NaN; their root mean squares.
_E2M1_RMS = 2.93
_E4M3_RMS = 100.1

# How much larger than its input a linear layer's output is; 1 where none is given.
_GAINS = {
    "ffn.gate": 1.5,
    "wo_b": 0.5,
    "w1": 2.0,
    "w3": 2.0,
    "w2": 0.1,
    "engram.wkv": 0.5,
    "head": 3.0,
}
_NORMS = ("norm.weight", "norm1.weight", "norm2.weight", "q_weight", "k_weight")


def tiny_config() -> dict[str, Any]:
    """Return the default configuration, nested as in the released `config.json`.

    It has every kind of layer, two Engram layers, draft stages and no vision. What follows from
    the tokenizer and from the search for primes is computed.
    """
    tokenizer = build_tiny_tokenizer(_VOCAB_SIZE)
    L = len(_ENGRAM_LAYER_IDS)
    primes = np.array(primes_from(_ENGRAM_PRIMES_FROM, L * _ENGRAM_COLUMNS)).reshape(L, -1)
    text: dict[str, Any] = {
        "vocab_size": _VOCAB_SIZE,
        "hidden_size": 128,
        "moe_intermediate_size": 64,
        "num_hidden_layers": 10,
        "num_attention_heads": 4,
        "head_dim": 64,
        "qk_rope_head_dim": 16,
        "q_lora_rank": 64,
        "o_lora_rank": 32,
        "o_groups": 2,
        "max_position_embeddings": 131072,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 16,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 8192,
        },
        "n_routed_experts": 16,
        "num_experts_per_tok": 3,
        "compress_ratios": [0, 0, 2, 2, 2, 1, 1, 1, 1, 1, 0, 0],
        "kv_source_layer_ids": [2, 4, 5],
        "index_source_layer_ids": [2, 4, 5, 7],
        "index_n_heads": 4,
        "index_head_dim": 32,
        "index_topk": 64,
        "candidate_source_layer_id": 5,
        "candidate_topk_blocks": 32,
        "engram_layer_ids": list(_ENGRAM_LAYER_IDS),
        "engram_num_embeddings": primes.sum(1).tolist(),
        "engram_vocab_size": _ENGRAM_PRIMES_FROM,
        "engram_n_heads": 2,
        "engram_head_dim": 64,
        "engram_compressed_vocab_size": int(build_token_map(tokenizer).max()) + 1,
        "num_nextn_predict_layers": 2,
        "dspark_noise_token_id": tokenizer.token_to_id(PLACEHOLDER.format(0)),
        "dspark_target_layer_ids": [7, 8, 9],
        "dspark_markov_rank": 32,
        "dspark_n_routed_experts": 8,
        "dspark_num_experts_per_tok": 2,
    }
    return small_config(text, image_token_id=tokenizer.token_to_id(IMAGE))


def tiny_checkpoint(cache_dir: Path) -> Path:
    """Return the tiny checkpoint in the cache folder, written first where it is not there whole.

    Safe with several processes at once. Raises DeviceError when the folder cannot be written.
    """
    config = tiny_config()
    source = json.dumps([_WRITER_VERSION, config], sort_keys=True).encode()
    directory = cache_dir / f"tiny-{hashlib.sha256(source).hexdigest()[:12]}"
    try:
        if directory.is_dir() and not _is_whole(directory):
            log.warning("the tiny checkpoint in %s is damaged, it is written anew", directory)
            # Under another name first, so that nobody takes a half deleted folder for the whole.
            damaged = _beside(directory)
            with suppress(FileNotFoundError):
                directory.rename(damaged)
                shutil.rmtree(damaged)
        if not directory.is_dir():
            write_tiny_checkpoint(directory, config=config)
    except BadRequest:
        # Another process was faster, and what it wrote is the same.
        pass
    except OSError as error:
        raise _unwritable(directory, error) from error
    return directory


def _is_whole(directory: Path) -> bool:
    """Whether every file is as it was written: 6 MB, read in milliseconds."""
    try:
        sums: dict[str, str] = json.loads((directory / _CHECKSUMS).read_bytes())
        return all(_sha256(directory / name) == digest for name, digest in sums.items())
    except (OSError, ValueError, AttributeError):
        return False


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _beside(directory: Path) -> Path:
    """A hidden name next to a folder that nobody else uses."""
    return directory.with_name(f".{directory.name}.{os.getpid()}-{secrets.token_hex(4)}")


def write_tiny_checkpoint(
    directory: Path, *, seed: int = 0, config: dict[str, Any] | None = None
) -> None:
    """Write a random checkpoint of `config` (default: `tiny_config()`) as `directory`.

    A configuration and a seed give the same bytes each time. The files are written into a folder
    beside it that gets the name when all are on disk, so a part is never taken for the whole.
    Raises BadRequest when `directory` exists and is not empty or the configuration has too few
    token ids for the tokenizer, ModelFileError when it is none, DeviceError when it cannot be
    written.
    """
    raw = tiny_config() if config is None else config
    model = parse_config(raw)
    if model.vocab_size < MIN_VOCAB_SIZE:
        raise BadRequest(
            f"vocab_size is {model.vocab_size}, the tiny checkpoint's tokenizer needs at least "
            f"{MIN_VOCAB_SIZE}: one id for each byte and special token"
        )
    temporary = _beside(directory)
    try:
        temporary.mkdir(parents=True)
        try:
            _write_files(temporary, seed, raw, model)
            _sync(temporary)
            # Replaces an empty folder and refuses any other.
            temporary.rename(directory)
            _sync(directory.parent)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
            raise BadRequest(f"{directory} is not empty; give a new folder") from None
        raise _unwritable(directory, error) from error


def _unwritable(directory: Path, error: OSError) -> DeviceError:
    return DeviceError(
        f"cannot write the tiny checkpoint to {directory}: {error.strerror}; "
        "name another cache folder with DS41_CACHE_DIR, or a checkpoint with --model"
    )


def _write_files(directory: Path, seed: int, raw: dict[str, Any], model: ModelConfig) -> None:
    tokenizer = build_tiny_tokenizer(model.vocab_size)
    weights = _RandomWeights(seed, model, tokenizer)
    parts = _shards(model)
    weight_map: dict[str, str] = {}
    for i, part in enumerate(parts):
        shard = f"model-{i + 1:05d}-of-{len(parts):05d}.safetensors"
        _write_shard(directory / shard, part, weights)
        weight_map |= {spec.name: shard for spec in part}
    total_bytes = sum(spec.n_bytes for part in parts for spec in part)
    documents = {
        "config.json": raw,
        "model.safetensors.index.json": {
            "metadata": {"total_size": total_bytes},
            "weight_map": weight_map,
        },
        "tokenizer_config.json": tokenizer_config(model.max_position_embeddings),
    }
    for name, document in documents.items():
        _write(directory / name, [json.dumps(document, indent=2).encode()])
    _write(directory / "tokenizer.json", [tokenizer.to_str().encode()])
    sums = {path.name: _sha256(path) for path in sorted(directory.iterdir())}
    _write(directory / _CHECKSUMS, [json.dumps(sums, indent=2).encode()])


def _shards(config: ModelConfig) -> list[list[TensorSpec]]:
    """Divide the tensors as the release does: an Engram table has a shard with what belongs to it.

    The others come in the order encoder, decoder and globals, drafts and vision.
    """
    parts: dict[str, list[TensorSpec]] = {"encoder": [], "decoder": [], "rest": []}
    for spec in tensor_specs(config):
        if spec.owner in (Owner.ENGRAM, Owner.ENGRAM_TABLES):
            key = spec.name.partition(".engram.")[0]
        elif spec.owner is Owner.ENCODER:
            key = "encoder"
        elif spec.owner in (Owner.DECODER, Owner.EMBED, Owner.HEAD):
            key = "decoder"
        else:
            key = "rest"
        parts.setdefault(key, []).append(spec)
    return [part for part in parts.values() if part]


class _RandomWeights:
    """The tensors' bytes: each depends on its name, its shape and the seed alone.

    Activations neither vanish nor explode, and the logits' standard deviation is near three.
    """

    def __init__(self, seed: int, config: ModelConfig, tokenizer: Tokenizer) -> None:
        self._seed = seed
        self._hc = config.hc_mult
        ids = [[i] for i in range(config.vocab_size)]
        texts = tokenizer.decode_batch(ids, skip_special_tokens=False)
        # All embeddings share a part, so what leans against it is hardly ever said: all but text.
        # Thinking ends sooner than the answer, so that there is one.
        self._shared = 0.5 * self._rng("shared").standard_normal(config.hidden_size)
        leans = {EOS: -0.1, THINK_END: 0.1, "\n": 0.0}
        leans |= {t: 0.0 for t in texts if len(t) == 1 and t.isascii() and t.isprintable()}
        self._lean = np.array([leans.get(t, -1.2) for t in texts])

    def data(self, spec: TensorSpec) -> bytes:
        """The little-endian bytes of a tensor; no e4m3 or e8m0 code of it is NaN."""
        rng = self._rng(spec.name)
        match spec.dtype:
            case "I8":
                return rng.bytes(spec.n_bytes)
            case "F8_E4M3":
                codes = rng.integers(0, 254, spec.shape, np.uint8)
                return (codes + (codes >= 0x7F)).astype(np.uint8).tobytes()
            case "F8_E8M0":
                return self._scales(rng, spec).tobytes()
            case _:
                values = self._values(rng, spec).astype("<f4")
                if spec.dtype == "F32":
                    return values.tobytes()
                bits = values.view("<u4") + 0x8000  # rounds half up
                return (bits >> 16).astype("<u2").tobytes()

    def _rng(self, name: str) -> np.random.Generator:
        return np.random.default_rng([self._seed, zlib.crc32(name.encode())])

    def _scales(self, rng: np.random.Generator, spec: TensorSpec) -> NDArray[np.uint8]:
        """Exponents that differ from tile to tile about what gives the weight its size."""
        name = spec.name.removesuffix(".scale")
        rms = _E2M1_RMS if ".experts." in name else _E4M3_RMS
        exponent = math.log2(_std(name, TILE * spec.shape[-1]) / rms)
        return np.round(127 + exponent + rng.uniform(-1, 1, spec.shape)).astype(np.uint8)

    def _values(self, rng: np.random.Generator, spec: TensorSpec) -> NDArray[np.float64]:
        name, normal = spec.name, rng.standard_normal(spec.shape)
        if name == "embed.weight":
            return normal + self._shared
        if name == "head.weight":
            rows = normal * _std("head", spec.shape[-1])
            rows[self._lean < -1] *= 0.3
            return rows + np.outer(self._lean, self._shared)
        if name.endswith((*_NORMS, "_scale")):
            return 1 + 0.2 * normal
        if name.endswith("_base"):
            # The streams keep mostly to themselves: mixed evenly, they would soon be the same.
            normal[2 * self._hc :] += 3 * np.eye(self._hc).ravel()
            return normal
        if name.endswith((".bias", ".bias_vl")):
            return 0.2 * normal
        if len(spec.shape) == 2:
            return normal * _std(name.removesuffix(".weight"), spec.shape[-1])
        return normal


def _std(name: str, inputs: int) -> float:
    """Standard deviation of the weights of a linear layer; the rows of a table are near one."""
    if name.endswith("embed"):
        return 1.0
    gain = next((g for suffix, g in _GAINS.items() if f".{name}".endswith(f".{suffix}")), 1.0)
    return gain / math.sqrt(inputs)


def _write_shard(path: Path, specs: Sequence[TensorSpec], weights: _RandomWeights) -> None:
    """Write one safetensors file: the header's length, the header, the tensors in its order."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    # Wide types first, so that each tensor starts at a multiple of its type's size.
    ordered = sorted(specs, key=lambda spec: -spec.n_bytes // math.prod(spec.shape))
    for spec in ordered:
        offsets = [end, end + spec.n_bytes]
        header[spec.name] = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": offsets}
        end = offsets[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = len(text).to_bytes(8, "little") + text
    _write(path, [start, *(weights.data(spec) for spec in ordered)])


def _write(path: Path, pieces: Iterable[bytes]) -> None:
    with path.open("wb") as file:
        file.writelines(pieces)
        file.flush()
        os.fsync(file.fileno())


def _sync(directory: Path) -> None:
    """Put the folder's entries on disk, not only its files' contents."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
