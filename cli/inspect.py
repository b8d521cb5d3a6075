"""`ds41 inspect`: what a checkpoint directory holds, and whether this machine can run it.

Reads `config.json`, the index and the shards' headers, never a weight.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import typer

from mlx_engine import memory
from mlx_engine.checkpoint import find_problems, owners_of, problems_error
from mlx_engine.cli.table import table
from mlx_engine.config import ModelConfig
from mlx_engine.config_file import load_config
from mlx_engine.errors import EngineError, ModelFileError
from mlx_engine.inventory import RESIDENT, Owner
from mlx_engine.shards import Listing, list_tensors


def inspect(directory: Path, machine: memory.MachineMemory | None = None) -> None:
    """Print the report on a directory.

    Raises ModelFileError, after the report, with everything that is wrong with the files.
    """
    listing = list_tensors(directory)
    try:
        config = load_config(directory)
    except ModelFileError as error:
        if not listing.problems:
            raise
        raise problems_error(directory, [str(error), *listing.problems]) from None
    for line in _report(directory, config, listing, machine or memory.machine_memory()):
        typer.echo(line)
    problems = find_problems(config, listing)
    if problems:
        raise problems_error(directory, problems)


def _report(
    directory: Path, config: ModelConfig, listing: Listing, machine: memory.MachineMemory
) -> Iterator[str]:
    yield str(directory)
    yield (
        f"{config.num_hidden_layers} layers, {config.n_routed_experts} experts of which "
        f"{config.num_experts_per_tok} a token, context {config.max_position_embeddings:,} tokens"
    )
    yield ""
    yield from _inventory(config, listing)
    yield ""
    yield from _memory(config, machine)


def _inventory(config: ModelConfig, listing: Listing) -> Iterator[str]:
    """A line for each owner with what the files hold of it, and one for all."""
    tensors: Counter[str] = Counter()
    n_bytes: Counter[str] = Counter()
    for name, owner in owners_of(config, listing).items():
        title = owner.value if owner else "unexpected"
        tensors[title] += 1
        n_bytes[title] += listing.locations[name].n_bytes
    place = {owner.value: "memory" if owner in RESIDENT else "disk" for owner in Owner}
    place[Owner.ENGRAM_TABLES.value] = "disk, read by row"
    titles = [title for title in (*place, "unexpected") if title in tensors]
    rows = [("", "tensors", "bytes", "kept in")]
    rows += [(t, f"{tensors[t]:,}", f"{n_bytes[t]:,}", place.get(t, "")) for t in titles]
    rows.append(("total", f"{tensors.total():,}", f"{n_bytes.total():,}", ""))
    yield from table(rows)


def _memory(config: ModelConfig, machine: memory.MachineMemory) -> Iterator[str]:
    context_tokens = config.max_position_embeddings
    needed = memory.needs(config, context_tokens)
    per_token = memory.growing_bytes_per_token(config)
    windows = memory.format_bytes(memory.window_bytes(config))
    yield from table(
        [
            ("", "bytes", ""),
            ("weights in memory", f"{needed.weights_bytes:,}", ""),
            ("kept beside them", f"{needed.kept_bytes:,}", "scales by row, hot Engram rows"),
            (
                "state at full context",
                f"{needed.state_bytes:,}",
                f"{per_token:g} B a token and {windows} of windows",
            ),
            ("room to compute in", f"{needed.activation_bytes:,}", ""),
            ("needed at full context", f"{needed.total_bytes:,}", ""),
            ("this machine", f"{machine.usable_bytes:,}", memory.describe_machine(machine)),
        ]
    )
    yield ""
    try:
        memory.require_memory(config, context_tokens, machine)
        yield "This machine can hold the model at its full context."
    except EngineError as error:
        yield f"This machine cannot hold the model at its full context: {error}"
