"""A checkpoint directory -> Weights, as released.

Checks every name, dtype and shape before any data is read, and says which tensor goes where in the
model: nothing is converted, widened or held twice. Where tensors lie is shards' part, reading them
tensor_reader's, what a session needs of memory is memory's.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from mlx_engine import memory
from mlx_engine.config import ModelConfig
from mlx_engine.config_file import load_config
from mlx_engine.devices import ONE, Devices
from mlx_engine.engram_table import TableLocation
from mlx_engine.errors import ModelFileError
from mlx_engine.inventory import Owner, tensor_specs
from mlx_engine.layer_plan import LayerKind, LayerPlan, layer_plan
from mlx_engine.shards import Listing, TensorLocation, list_tensors, some
from mlx_engine.tensor_reader import Progress, TensorReader
from mlx_engine.weights import (
    AttentionWeights,
    CompressorWeights,
    EngramWeights,
    FfnWeights,
    IndexerWeights,
    LayerWeights,
    MhcWeights,
    Weights,
)

# Parts of the model that a configuration may leave out while the files still hold them. Engram is
# none of them: without its configuration the text model would compute something else.
_OPTIONAL_PARTS = {Owner.VISION: ("vision.", "aligner.", "image_"), Owner.DRAFTS: ("mtp.",)}


@dataclass(frozen=True)
class Checkpoint:
    """A directory whose tensors are all there, in the files' own dtypes and shapes."""

    directory: Path
    config: ModelConfig
    locations: Mapping[str, TensorLocation]

    def read_weights(self, on_progress: Progress | None = None, devices: Devices = ONE) -> Weights:
        """Read the text model's weights; `on_progress` is told bytes read and bytes in all.

        BF16 and F32 keep their types, whatever the activations are. One of several devices keeps
        its share alone. Holds no more than the weights themselves at any time, and a few chunks of
        what is shared by columns. Raises ModelFileError for a failed read and for a code that is no
        number.
        """
        specs = list(memory.resident_specs(self.config))
        with TensorReader(specs, self.locations, on_progress, devices) as read:
            weights = Weights(
                embed=read.tensor("embed.weight"),
                head=read.tensor("head.weight"),
                norm=read.tensor("norm.weight"),
                layers=tuple(_layer(read, self.config, plan) for plan in layer_plan(self.config)),
            )
            read.finish()
        return weights

    def engram_tables(self) -> list[TableLocation]:
        """Where the table of each Engram layer lies, in the order of the layers; reads nothing.

        Raises ModelFileError when a table's weight and scale lie in different files, which the row
        reader cannot use.
        """
        tables: list[TableLocation] = []
        for layer in self.config.engram.layer_ids if self.config.engram else ():
            name = f"layers.{layer}.engram.embed"
            weight, scale = self.locations[f"{name}.weight"], self.locations[f"{name}.scale"]
            if weight.path != scale.path:
                raise ModelFileError(
                    f"{name}.weight is in {weight.path} and its scale in {scale.path}, they must "
                    "be in one file as they are in the release; fetch the checkpoint again"
                )
            n_rows, head_dim = weight.shape
            tables.append(TableLocation(weight.path, weight.offset, scale.offset, n_rows, head_dim))
        return tables


def open_checkpoint(directory: Path) -> Checkpoint:
    """Check a directory against its own `config.json`; reads headers only.

    Raises ModelFileError with all that is missing, unexpected or wrong.
    """
    listing = list_tensors(directory)
    config = load_config(directory)
    problems = find_problems(config, listing)
    if problems:
        raise problems_error(directory, problems)
    return Checkpoint(directory, config, listing.locations)


def load_weights(
    checkpoint: Checkpoint,
    context_tokens: int,
    on_progress: Progress | None = None,
    *,
    chunk_tokens: int = memory.CHUNK_TOKENS,
    session_bytes: int | None = None,
    machine: memory.MachineMemory | None = None,
    set_wired_limit: Callable[[int], object] = mx.set_wired_limit,
    devices: Devices = ONE,
) -> Weights:
    """Make sure that the model fits, raise the wired limit, and only then read the weights.

    context_tokens: of a session; chunk_tokens: of a prompt that pass the layers at once;
    session_bytes: of all sessions, by default `memory.default_session_bytes`. Raises DeviceError
    when the memory is too small, ModelFileError as `Checkpoint.read_weights`.
    """
    machine = machine or memory.machine_memory()
    memory.require_memory(
        checkpoint.config, context_tokens, machine, chunk_tokens, session_bytes, devices.count
    )
    memory.raise_wired_limit(machine, set_wired_limit)
    return checkpoint.read_weights(on_progress, devices)


def find_problems(config: ModelConfig, listing: Listing) -> list[str]:
    """Everything that keeps these files from being this model: file faults first, then tensors."""
    owners = owners_of(config, listing)
    missing: list[str] = []
    wrong: list[str] = []
    for spec in tensor_specs(config):
        at = listing.locations.get(spec.name)
        if at is None:
            if spec.name not in listing.unreadable:
                missing.append(spec.name)
        elif (at.dtype, at.shape) != (spec.dtype, spec.shape):
            wrong.append(
                f"{spec.name} is {at.dtype} {list(at.shape)}, not {spec.dtype} {list(spec.shape)}"
            )
    unexpected = sorted(name for name, owner in owners.items() if owner is None)
    kinds = {"missing": missing, "unexpected": unexpected, "of another dtype or shape": wrong}
    return [
        *listing.problems,
        *(f"{_count(names)} {kind}: {some(names)}" for kind, names in kinds.items() if names),
    ]


def problems_error(directory: Path, problems: list[str]) -> ModelFileError:
    """One error that lists all problems of a checkpoint."""
    lines = "".join(f"\n  - {problem}" for problem in problems)
    return ModelFileError(
        f"{directory} does not hold the model that its config.json describes; "
        f"fetch the files named here again, or give another folder:{lines}"
    )


def owners_of(config: ModelConfig, listing: Listing) -> dict[str, Owner | None]:
    """The owner of every tensor that is there; None for one that the model does not have."""
    owners = {spec.name: spec.owner for spec in tensor_specs(config)}
    present = {Owner.VISION: config.vision, Owner.DRAFTS: config.draft}
    absent = {owner: _OPTIONAL_PARTS[owner] for owner, part in present.items() if part is None}

    def owner_of(name: str) -> Owner | None:
        left_out = (owner for owner, prefixes in absent.items() if name.startswith(prefixes))
        return owners.get(name) or next(left_out, None)

    return {name: owner_of(name) for name in listing.locations}


def _count(names: list[str]) -> str:
    return f"{len(names):,} tensor{'s are' if len(names) != 1 else ' is'}"


def _layer(read: TensorReader, config: ModelConfig, plan: LayerPlan) -> LayerWeights:
    name = f"layers.{plan.layer}"
    return LayerWeights(
        attn_norm=read.tensor(f"{name}.attn_norm.weight"),
        ffn_norm=read.tensor(f"{name}.ffn_norm.weight"),
        hc_attn=_mhc(read, f"{name}.hc_attn"),
        hc_ffn=_mhc(read, f"{name}.hc_ffn"),
        attn=_attention(read, config, plan, f"{name}.attn"),
        ffn=_ffn(read, config, f"{name}.ffn"),
        engram=None if plan.engram_index is None else _engram(read, f"{name}.engram"),
    )


def _mhc(read: TensorReader, name: str) -> MhcWeights:
    return MhcWeights(
        fn=read.tensor(f"{name}_fn"),
        base=read.tensor(f"{name}_base"),
        scale=read.tensor(f"{name}_scale"),
    )


def _attention(
    read: TensorReader, config: ModelConfig, plan: LayerPlan, name: str
) -> AttentionWeights:
    is_indexer = plan.kind in (LayerKind.FULL, LayerKind.REINDEX)
    return AttentionWeights(
        attn_sink=read.tensor(f"{name}.attn_sink"),
        wq_a=read.fp8(f"{name}.wq_a"),
        q_norm=read.tensor(f"{name}.q_norm.weight"),
        wq_b=read.fp8(f"{name}.wq_b"),
        wkv=read.fp8(f"{name}.wkv"),
        kv_norm=read.tensor(f"{name}.kv_norm.weight"),
        wo_a=read.fp8(f"{name}.wo_a", groups=config.o_groups),
        wo_b=read.fp8(f"{name}.wo_b"),
        compressor=_compressor(read, plan, name) if plan.kind is LayerKind.FULL else None,
        indexer=_indexer(read, plan, name) if is_indexer else None,
    )


def _compressor(read: TensorReader, plan: LayerPlan, name: str) -> CompressorWeights:
    return CompressorWeights(
        wkv=read.tensor(f"{name}.compressor.wkv.weight"),
        wgate=read.tensor(f"{name}.compressor.wgate.weight") if plan.ratio > 1 else None,
        norm=read.tensor(f"{name}.compressor.norm.weight"),
    )


def _indexer(read: TensorReader, plan: LayerPlan, name: str) -> IndexerWeights:
    makes_keys = plan.kind is LayerKind.FULL
    return IndexerWeights(
        wq_b=read.fp8(f"{name}.indexer.wq_b"),
        weights_proj=read.tensor(f"{name}.indexer.weights_proj.weight"),
        wk=read.tensor(f"{name}.indexer.wk.weight") if makes_keys else None,
        k_norm=read.tensor(f"{name}.indexer.k_norm.weight") if makes_keys else None,
    )


def _ffn(read: TensorReader, config: ModelConfig, name: str) -> FfnWeights:
    E = config.n_routed_experts
    return FfnWeights(
        gate_weight=read.tensor(f"{name}.gate.weight"),
        gate_bias=read.tensor(f"{name}.gate.bias"),
        w1=read.experts(f"{name}.experts", E, "w1"),
        w2=read.experts(f"{name}.experts", E, "w2"),
        w3=read.experts(f"{name}.experts", E, "w3"),
        shared_w1=read.fp8(f"{name}.shared_experts.w1"),
        shared_w2=read.fp8(f"{name}.shared_experts.w2"),
        shared_w3=read.fp8(f"{name}.shared_experts.w3"),
    )


def _engram(read: TensorReader, name: str) -> EngramWeights:
    return EngramWeights(
        wkv=read.fp8(f"{name}.wkv"),
        q_weight=read.tensor(f"{name}.q_weight"),
        k_weight=read.tensor(f"{name}.k_weight"),
    )
