"""What the model takes in memory, and what this machine has.

Asked before anything is read: a model that cannot fit is refused with the numbers and the remedy,
and Metal's wired limit is raised. Allocates nothing; the sizes that bound what others allocate are
here. Section numbers refer to docs/model.md.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import mlx.core as mx

from mlx_engine.config import TILE, ModelConfig
from mlx_engine.errors import DeviceError
from mlx_engine.formats import COMPRESSED, INDEX, WINDOW
from mlx_engine.host_memory import host_memory
from mlx_engine.inventory import RESIDENT, Owner, TensorSpec, tensor_specs

# Tokens of a prompt that pass the layers at once. Large enough that an expert's weights serve many
# tokens each time they are read, small enough that a chunk's activations stay small beside them.
CHUNK_TOKENS = 2048

# Engram rows that many prompts share stay in memory; as released this holds two million of them.
ENGRAM_CACHE_BYTES = 512 * 2**20

# Unused rows at the end of a buffer that grows with the context: at most, and to begin with.
SPARE_ROWS = 1 << 16
FIRST_ROWS = 256

# Checkpoints that sessions may keep beside one full context, or other sessions in their place.
CHECKPOINTS = 128

# A prompt up to this long, with its answer, finds room without the end of a longer session.
SHORT_TOKENS = 4096

# Answers at once, of which one computes: an agent, its subagents and a short request beside them.
ANSWERS = 4

# A tile of the index scan: queries times heads times rows. Bounds a prefill at any context.
SCAN_VALUES = 1 << 21

# Queries of a tile of attention: its window slab is at most this much longer than the window.
TILE_QUERIES = 64

_WORD_BYTES = 4
_F32_BYTES = 4

# Buffers of one size that MLX has at once when a loop makes them: it allocates ahead of what runs.
_IN_FLIGHT = 40


@dataclass(frozen=True)
class MachineMemory:
    """A machine's memory and the part of it that a model may take.

    `kind` is "Metal", "CUDA" or "CPU": what computes, and so what `usable_bytes` limits.
    """

    kind: str
    total_bytes: int
    usable_bytes: int


@dataclass(frozen=True)
class Needs:
    """What a model needs at some context.

    weights_bytes: as released. kept_bytes: made or read while it runs, and kept. state_bytes: of
    the sessions together. activation_bytes: room to compute in.
    """

    weights_bytes: int
    kept_bytes: int
    state_bytes: int
    activation_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.kept_bytes + self.state_bytes + self.activation_bytes


def resident_specs(config: ModelConfig) -> Iterator[TensorSpec]:
    """Yield the tensors that the text model keeps in memory."""
    for spec in tensor_specs(config):
        # The router's second bias serves image tokens alone.
        if spec.owner in RESIDENT and not spec.name.endswith(".ffn.gate.bias_vl"):
            yield spec


def resident_bytes(config: ModelConfig, devices: int = 1) -> int:
    """The weights in the memory of one of so many devices, as released."""
    return sum(spec.held_bytes(devices) for spec in resident_specs(config))


def read_bytes(config: ModelConfig, devices: int) -> int:
    """What one of so many devices reads of the files to have its weights."""
    return sum(spec.read_bytes(devices) for spec in resident_specs(config))


def kept_bytes(config: ModelConfig, devices: int = 1) -> int:
    """What stays beside the weights: `Fp8.row_scale` of each, and the hot rows of Engram."""
    row_scales = sum(_dense_values(config, devices)) // TILE
    tables = sum(s.n_bytes for s in tensor_specs(config) if s.owner is Owner.ENGRAM_TABLES)
    # A hot row and its place take less than two rows of the table.
    return row_scales + min(ENGRAM_CACHE_BYTES, 2 * tables)


def window_bytes(config: ModelConfig) -> int:
    """The layers' windows, which are whole from the start."""
    row_bytes = WINDOW.words(config.head_dim) * _WORD_BYTES
    return config.num_hidden_layers * config.sliding_window * row_bytes


def growing_bytes(config: ModelConfig, context_tokens: int) -> int:
    """What grows with the context: the compressed rows and index keys of every kv source."""
    return sum(_source_rows(config, context_tokens)) * _row_bytes(config)


def growing_bytes_per_token(config: ModelConfig) -> float:
    """By how much a session's state grows for each token, over many tokens (section 7)."""
    return sum(_row_bytes(config) / ratio for ratio in _source_ratios(config))


def state_bytes(config: ModelConfig, context_tokens: int) -> int:
    """A session's state after `context_tokens`: windows, rows, keys, and pending rows in f32."""
    return checkpoint_bytes(config) + growing_bytes(config, context_tokens)


def checkpoint_bytes(config: ModelConfig) -> int:
    """A checkpoint of a session: the windows, and pending rows in f32."""
    pending_rows = sum(ratio - 1 for ratio in _source_ratios(config))
    return window_bytes(config) + pending_rows * 2 * config.head_dim * _F32_BYTES


def held_bytes(config: ModelConfig, context_tokens: int) -> int:
    """A session's state in memory: with the rows that its growing buffers have to spare."""
    spare = sum(max(FIRST_ROWS, min(n, SPARE_ROWS)) for n in _source_rows(config, context_tokens))
    return state_bytes(config, context_tokens) + spare * _row_bytes(config)


def answer_bytes(config: ModelConfig, tokens: int) -> int:
    """What a session of so many tokens takes: with the three checkpoints that it always keeps."""
    return held_bytes(config, tokens) + 3 * checkpoint_bytes(config)


def short_session_bytes(config: ModelConfig, context_tokens: int) -> int:
    """What is kept free of longer sessions: one of SHORT_TOKENS."""
    return answer_bytes(config, min(SHORT_TOKENS, context_tokens))


def least_session_bytes(config: ModelConfig, context_tokens: int) -> int:
    """What sessions take at least: one full context with another checkpoint, and a short one."""
    full = answer_bytes(config, context_tokens) + checkpoint_bytes(config)
    return full + short_session_bytes(config, context_tokens)


def default_session_bytes(config: ModelConfig, context_tokens: int) -> int:
    """What sessions may take by default: as many full contexts as answers, and CHECKPOINTS more.

    A request that sets no limit to its answer may fill the context, and is no reason to wait.
    """
    others = (ANSWERS - 1) * answer_bytes(config, context_tokens)
    least = least_session_bytes(config, context_tokens)
    return least + others + CHECKPOINTS * checkpoint_bytes(config)


def activation_bytes(
    config: ModelConfig, context_tokens: int, chunk_tokens: int = CHUNK_TOKENS, devices: int = 1
) -> int:
    """A bound on what a prefill holds at once beside weights and state, all of it counted as f32.

    The streams stay while a layer runs, and what the upper layers have not seen of other prompts
    half read; of attention, experts, Engram and the head, the largest counts. The factors are the
    buffers that each part was seen to hold on a CPU, and a fifth to a half more.
    """
    D, hc, H = config.hidden_size, config.hc_mult, config.num_attention_heads // devices
    chunk = min(chunk_tokens, context_tokens)
    # The last pass above the last kv source has this many inputs, however small the chunks are.
    tail = min(config.reach_tokens(config.last_kv_source), context_tokens)
    T = max(chunk, tail)
    S = max(_source_rows(config, context_tokens), default=0)

    streams = 8 * hc * D * T + (hc + 1) * D * (2 * (tail + chunk) + (ANSWERS - 1) * tail)
    scan = min(2 * (config.index_n_heads + 8) * S * T, _IN_FLIGHT * max(SCAN_VALUES, 2 * S))
    selected = min(config.index_topk, S)
    scores = 2 * H * (selected + config.sliding_window + TILE_QUERIES)
    tiles = (selected * config.head_dim + scores) * min(T, _IN_FLIGHT * TILE_QUERIES)
    attention = tiles + 4 * H * config.head_dim * T
    experts = (
        8 * (config.num_experts_per_tok + 1) * (D + config.moe_intermediate_size // devices) * T
    )
    columns = config.engram.columns // devices * config.engram.head_dim if config.engram else 0
    engram = 3 * (columns + (hc + 1) * D) * chunk
    head = config.vocab_size // devices * D
    unpacked = _unpacked_values(config, devices)
    values = streams + scan + max(attention, experts, engram, head) + unpacked
    return values * _F32_BYTES + _growth_bytes(config, context_tokens)


def needs(
    config: ModelConfig,
    context_tokens: int,
    chunk_tokens: int = CHUNK_TOKENS,
    session_bytes: int | None = None,
    devices: int = 1,
) -> Needs:
    """All of it, for sessions of up to `context_tokens` that read prompts by `chunk_tokens`.

    session_bytes: what they may take together, by default `default_session_bytes`. Of several
    `devices` it is what one needs; each of them keeps the sessions whole.
    """
    if session_bytes is None:
        session_bytes = default_session_bytes(config, context_tokens)
    return Needs(
        weights_bytes=resident_bytes(config, devices),
        kept_bytes=kept_bytes(config, devices),
        state_bytes=session_bytes,
        activation_bytes=activation_bytes(config, context_tokens, chunk_tokens, devices),
    )


def machine_memory(
    proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")
) -> MachineMemory:
    """This machine's memory as MLX's default device sees it.

    Metal: the recommended working set, which the system lets be raised. CUDA: what is free on the
    device. CPU: what the kernel calls available, within the limits of the control groups.
    """
    info = mx.device_info()
    if "max_recommended_working_set_size" in info:
        usable = int(info["max_recommended_working_set_size"])
        return MachineMemory("Metal", int(info["memory_size"]), usable)
    if "free_memory" in info:
        return MachineMemory("CUDA", int(info["total_memory"]), int(info["free_memory"]))
    return MachineMemory("CPU", *host_memory(proc, cgroup))


def require_memory(
    config: ModelConfig,
    context_tokens: int,
    machine: MachineMemory | None = None,
    chunk_tokens: int = CHUNK_TOKENS,
    session_bytes: int | None = None,
    devices: int = 1,
) -> Needs:
    """Return what the model needs; raises DeviceError when this machine cannot hold it."""
    needed = needs(config, context_tokens, chunk_tokens, session_bytes, devices)
    machine = machine or machine_memory()
    if needed.total_bytes > machine.usable_bytes:
        raise DeviceError(
            f"{describe(needed, context_tokens)}, but {describe_machine(machine)}: "
            f"{remedy(config, needed, context_tokens, machine, chunk_tokens, devices)}"
        )
    return needed


def raise_wired_limit(
    machine: MachineMemory, set_limit: Callable[[int], object] = mx.set_wired_limit
) -> None:
    """On Metal, let all that the GPU may use stay resident, so that no weight is ever paged out."""
    if machine.kind == "Metal":
        set_limit(machine.usable_bytes)


def describe(needed: Needs, context_tokens: int) -> str:
    """The needs as the beginning of a sentence."""
    return (
        f"the model needs {format_bytes(needed.total_bytes)} "
        f"({format_bytes(needed.weights_bytes)} of weights, "
        f"{format_bytes(needed.kept_bytes)} kept beside them, "
        f"{format_bytes(needed.state_bytes)} for sessions of {context_tokens:,} tokens, "
        f"{format_bytes(needed.activation_bytes)} to compute in)"
    )


def describe_machine(machine: MachineMemory) -> str:
    """What the machine has, as a clause."""
    usable, total = format_bytes(machine.usable_bytes), format_bytes(machine.total_bytes)
    if machine.kind == "Metal":
        return f"this Mac lets its GPU use {usable} of {total}"
    if machine.kind == "CUDA":
        return f"this GPU has {usable} of {total} free"
    return f"this machine has {usable} of {total} available"


def format_bytes(n_bytes: int) -> str:
    """A size in decimal units with three or more digits that count."""
    value, unit = float(n_bytes), "B"
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            break
        value /= 1000
    return f"{n_bytes} B" if unit == "B" else f"{value:.{2 if value < 10 else 1}f} {unit}"


def remedy(
    config: ModelConfig,
    needed: Needs,
    context_tokens: int,
    machine: MachineMemory,
    chunk_tokens: int = CHUNK_TOKENS,
    devices: int = 1,
) -> str:
    """What to do about a model that does not fit."""
    room_bytes = machine.usable_bytes - needed.weights_bytes - needed.kept_bytes
    fitting = _fitting_context(config, context_tokens, chunk_tokens, room_bytes, devices)
    remedies: list[str] = []
    if fitting:
        remedies.append(f"give a context of at most {fitting:,} tokens (--ctx {fitting})")
    # The system itself needs a part; a limit at the very total would freeze it.
    if machine.kind == "Metal" and needed.total_bytes < 0.95 * machine.total_bytes:
        limit_mb = -(-needed.total_bytes // 2**20)
        remedies.append(f"raise the GPU's share (sudo sysctl iogpu.wired_limit_mb={limit_mb})")
    elif machine.kind != "Metal" and needed.total_bytes < 0.95 * machine.total_bytes:
        remedies.append("stop other programs that hold memory")
    if not remedies:
        return f"use a machine with more than {format_bytes(needed.total_bytes)} for the model"
    return " or ".join(remedies)


def _fitting_context(
    config: ModelConfig, context_tokens: int, chunk_tokens: int, room_bytes: int, devices: int
) -> int:
    """The longest shorter context that fits, in steps of 1,024 tokens; 0 for none."""

    def needed_bytes(tokens: int) -> int:
        return default_session_bytes(config, tokens) + activation_bytes(
            config, tokens, chunk_tokens, devices
        )

    steps = range(1024, context_tokens, 1024)
    return 1024 * bisect_right(steps, room_bytes, key=needed_bytes)


def _source_ratios(config: ModelConfig) -> list[int]:
    """Tokens per row of every layer that writes compressed rows and index keys."""
    return [config.compress_ratios[source] for source in config.kv_source_layer_ids]


def _source_rows(config: ModelConfig, context_tokens: int) -> list[int]:
    """The rows of each such layer."""
    return [context_tokens // ratio for ratio in _source_ratios(config)]


def _row_bytes(config: ModelConfig) -> int:
    """A compressed row in whole words, and its index key, whose codes and scales lie apart."""
    row_bytes = COMPRESSED.words(config.head_dim) * _WORD_BYTES
    width = config.index_head_dim
    return row_bytes + width * INDEX.bits // 8 + width // INDEX.group


def _growth_bytes(config: ModelConfig, context_tokens: int) -> int:
    """The copy of the buffer that grows."""
    return max(_source_rows(config, context_tokens), default=0) * _row_bytes(config)


def _unpacked_values(config: ModelConfig, devices: int) -> int:
    """Values of the FP8 weights that are unpacked at once: on a CPU two, each in two copies."""
    return 4 * max(_dense_values(config, devices)) if mx.default_device() == mx.cpu else 0


@lru_cache(maxsize=4)
def _dense_values(config: ModelConfig, devices: int) -> tuple[int, ...]:
    """Values of each FP8 weight in memory."""
    specs = (spec for spec in resident_specs(config) if spec.dtype == "F8_E4M3")
    return tuple(spec.held_bytes(devices) for spec in specs)
