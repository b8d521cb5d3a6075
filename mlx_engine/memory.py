"""What the model takes in memory, and what this machine has.

Asked before anything is read: a model that cannot fit is refused with the numbers and the remedy,
and Metal's wired limit is raised. Allocates nothing. Section numbers refer to docs/model.md.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from mlx_engine.config import ModelConfig
from mlx_engine.errors import DeviceError
from mlx_engine.inventory import RESIDENT, TensorSpec, tensor_specs

_WORD_BYTES = 4
_F32_BYTES = 4

# Tokens that pass a layer at once: the longest chunk of a prefill.
_CHUNK_TOKENS = 2048


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
    """What a model needs at some context: weights, session state, and room for activations."""

    weights_bytes: int
    state_bytes: int
    activation_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.state_bytes + self.activation_bytes


def resident_specs(config: ModelConfig) -> Iterator[TensorSpec]:
    """Yield the tensors that the text model keeps in memory."""
    for spec in tensor_specs(config):
        # The router's second bias serves image tokens alone.
        if spec.owner in RESIDENT and not spec.name.endswith(".ffn.gate.bias_vl"):
            yield spec


def resident_bytes(config: ModelConfig) -> int:
    """The weights in memory, as released."""
    return sum(spec.n_bytes for spec in resident_specs(config))


def window_bytes(config: ModelConfig, context_tokens: int) -> int:
    """The layers' windows: a row is e4m3 with an e8m0 scale per 32 values (section 3.8)."""
    row = _whole_words(config.head_dim + config.head_dim // 32)
    return config.num_hidden_layers * min(context_tokens, config.sliding_window) * row


def growing_bytes(config: ModelConfig, context_tokens: int) -> int:
    """What grows with the context: the compressed rows and index keys of every kv source."""
    rows = sum(context_tokens // ratio for ratio in _source_ratios(config))
    return rows * _row_bytes(config)


def growing_bytes_per_token(config: ModelConfig) -> float:
    """By how much a session's state grows for each token, over many tokens (section 7)."""
    return sum(_row_bytes(config) / ratio for ratio in _source_ratios(config))


def state_bytes(config: ModelConfig, context_tokens: int) -> int:
    """A session's state after `context_tokens`: windows, rows, keys, and pending rows in f32."""
    pending_rows = sum(ratio - 1 for ratio in _source_ratios(config))
    pending_bytes = pending_rows * 2 * config.head_dim * _F32_BYTES
    growing = growing_bytes(config, context_tokens)
    return window_bytes(config, context_tokens) + growing + pending_bytes


def activation_bytes(config: ModelConfig) -> int:
    """An allowance for what one chunk of a prefill holds at once, in f32.

    Per token: the streams before and after a sublayer and their product, the rows that attention
    gathers, queries and outputs of all heads, and the inner values of the chosen experts.
    """
    D, I_D, hc = config.hidden_size, config.moe_intermediate_size, config.hc_mult
    streams = 3 * hc * D
    gathered = (config.index_topk + config.sliding_window) * config.head_dim
    heads = 2 * config.num_attention_heads * config.head_dim
    experts = config.num_experts_per_tok * (3 * I_D + D)
    chunk_tokens = min(_CHUNK_TOKENS, config.max_position_embeddings)
    return (streams + gathered + heads + experts) * _F32_BYTES * chunk_tokens


def needs(config: ModelConfig, context_tokens: int) -> Needs:
    """All of it, for one session of `context_tokens`."""
    return Needs(
        weights_bytes=resident_bytes(config),
        state_bytes=state_bytes(config, context_tokens),
        activation_bytes=activation_bytes(config),
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
    return _host_memory(proc, cgroup)


def require_memory(
    config: ModelConfig, context_tokens: int, machine: MachineMemory | None = None
) -> Needs:
    """Return what the model needs; raises DeviceError when this machine cannot hold it."""
    needed = needs(config, context_tokens)
    machine = machine or machine_memory()
    if needed.total_bytes > machine.usable_bytes:
        raise DeviceError(
            f"{describe(needed, context_tokens)}, but {describe_machine(machine)}: "
            f"{_remedy(config, needed, context_tokens, machine)}"
        )
    return needed


def raise_wired_limit(
    n_bytes: int,
    machine: MachineMemory | None = None,
    set_limit: Callable[[int], object] = mx.set_wired_limit,
) -> None:
    """On Metal, let the system keep `n_bytes` resident, so that it never pages the weights out."""
    machine = machine or machine_memory()
    if machine.kind == "Metal":
        # MLX refuses a limit above the system's own.
        set_limit(min(n_bytes, machine.usable_bytes))


def describe(needed: Needs, context_tokens: int) -> str:
    """The needs as the beginning of a sentence."""
    return (
        f"the model needs {format_bytes(needed.total_bytes)} "
        f"({format_bytes(needed.weights_bytes)} of weights, "
        f"{format_bytes(needed.state_bytes)} for {context_tokens:,} tokens of context, "
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


def _remedy(config: ModelConfig, needed: Needs, context_tokens: int, machine: MachineMemory) -> str:
    fitting = _fitting_context(config, needed, context_tokens, machine.usable_bytes)
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
    config: ModelConfig, needed: Needs, context_tokens: int, usable_bytes: int
) -> int:
    """The longest shorter context that fits, in steps of 1,024 tokens; 0 for none."""
    fixed_bytes = needed.total_bytes - growing_bytes(config, context_tokens)
    per_token = growing_bytes_per_token(config)
    if not per_token:
        return 0
    return max(0, int((usable_bytes - fixed_bytes) / per_token)) // 1024 * 1024


def _source_ratios(config: ModelConfig) -> list[int]:
    """Tokens per row of every layer that writes compressed rows and index keys."""
    return [config.compress_ratios[source] for source in config.kv_source_layer_ids]


def _row_bytes(config: ModelConfig) -> int:
    """A compressed row and its index key, each in whole words (section 3.8).

    The row is e2m1 with an e4m3 scale per 16 values, the key e2m1 with an e8m0 scale per 32.
    """
    row, key = config.head_dim, config.index_head_dim
    return _whole_words(row // 2 + row // 16) + _whole_words(key // 2 + key // 32)


def _whole_words(n_bytes: int) -> int:
    return -(-n_bytes // _WORD_BYTES) * _WORD_BYTES


def _host_memory(proc: Path, cgroup: Path) -> MachineMemory:
    """What the operating system gives this process."""
    try:
        lines = (proc / "meminfo").read_text().splitlines()
    except OSError:
        # Not Linux: only the total is told.
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return MachineMemory("CPU", total, total)
    fields = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if ":" in line}
    total, usable = fields["MemTotal"], fields["MemAvailable"]
    for limit, used in _control_groups(proc, cgroup):
        total, usable = min(total, limit), min(usable, max(0, limit - used))
    return MachineMemory("CPU", total, usable)


def _control_groups(proc: Path, cgroup: Path) -> Iterator[tuple[int, int]]:
    """Yield limit and use of each memory control group around this process, of either version.

    Pages of files are given back under pressure, so the idle ones do not count as used.
    """
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        hierarchy, controllers, path = line.split(":", 2)
        if hierarchy == "0":
            base, names, idle = cgroup, ("memory.max", "memory.current"), "inactive_file"
        elif "memory" in controllers.split(","):
            base, idle = cgroup / "memory", "total_inactive_file"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        group = base / path.strip("/")
        # In a container the path may be the host's; the mount's root then holds the limit.
        for folder in (group, *(f for f in group.parents if f.is_relative_to(base))):
            try:
                limit, used = ((folder / name).read_text().strip() for name in names)
                stat = dict(
                    line.split() for line in (folder / "memory.stat").read_text().splitlines()
                )
            except OSError:
                continue
            if limit != "max":
                yield int(limit), int(used) - int(stat.get(idle, 0))
