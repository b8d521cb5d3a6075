"""From options to a loaded engine and back, for commands that answer in the terminal."""

from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from mlx_engine.cli.devices import Spread
from mlx_engine.cli.folders import model_directory
from mlx_engine.cli.kv_disk import check_named, kv_directory, kv_disk, parse_bytes
from mlx_engine.cli.signals import Signals
from mlx_engine.cli.terminal import Terminal
from mlx_engine.folders import cache_directory

if TYPE_CHECKING:
    from mlx_engine.engine import Engine
    from mlx_engine.loading import Dtype
    from mlx_engine.request import Request
    from mlx_engine.session import Prefill


@contextmanager
def loaded_engine(
    request: "Request",
    terminal: Terminal,
    signals: Signals,
    *,
    model: Path | None,
    tiny_random: bool,
    ctx: int | None,
    dtype: "Dtype",
    kv_disk_dir: str | None,
    kv_disk_space: str,
    prefill: "Prefill" = "short",
    spread: Spread,
) -> "Generator[Engine]":
    """Load the model that the options name, once a request is found right for it.

    At the end what waits for the disk is written, for as long as `signals` let it. Raises what
    opening and loading do.
    """
    from mlx_engine.loading import open_model

    kv_folder, kv_space_bytes = kv_directory(kv_disk_dir), parse_bytes(kv_disk_space)
    directory, _ = model_directory(model, tiny_random=tiny_random)
    with ExitStack() as stack:
        with terminal.loading() as on_progress:
            opened = open_model(directory, context_tokens=ctx)
            opened.check(request)
            check_named(kv_disk_dir, kv_space_bytes)
            # What waits for the disk is written before the other devices' end can fail.
            lead = stack.enter_context(spread.lead(opened, dtype, prefill))
            disk_cache = stack.enter_context(
                kv_disk(opened, dtype, kv_folder, kv_space_bytes, signals.numbers)
            )
            engine = opened.load(
                dtype,
                prefill=prefill,
                disk_cache=disk_cache,
                cache_dir=cache_directory(),
                on_progress=on_progress,
                lead=lead,
            )
        terminal.fast_paths(engine.fast_paths)
        yield stack.enter_context(engine)
