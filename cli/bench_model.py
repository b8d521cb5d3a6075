"""`ds41 bench model`: how fast a checkpoint reads prompts and answers here, by length of context.

Prints a line a context as it is done, and one line of JSON at the end. Nothing heavy is imported
before the command runs.
"""

import json
import platform
import statistics
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated

import typer

import mlx_engine
from mlx_engine.cli.devices import DevicesOption, HostsOption, Spread, StallOption
from mlx_engine.cli.folders import model_directory
from mlx_engine.cli.options import DtypeOption, ModelOption, PrefillOption, TinyRandomOption
from mlx_engine.cli.terminal import Terminal
from mlx_engine.errors import BadRequest
from mlx_engine.folders import cache_directory
from mlx_engine.ranks import STALL_S

if TYPE_CHECKING:
    import numpy as np

    from mlx_engine.engine import Engine

# Tokens of an answer that come before those that count.
_WARM_TOKENS = 4
_HEADER = ("context", "prefill s", "tokens/s", "decode ms", "tokens/s", "engram", "peak GB")
_ROW = "{:>8} {:>10} {:>10} {:>10} {:>10} {:>7} {:>8}"


@dataclass(frozen=True)
class Measured:
    """One context: its prompt read from nothing, then the tokens after it.

    decode_ms is the median of a token; engram_share how many of the table's rows were in memory.
    """

    context_tokens: int
    prefill_s: float
    prefill_tokens_per_s: float
    decode_ms: float
    decode_tokens_per_s: float
    engram_share: float
    peak_bytes: int


def model_command(
    model: ModelOption = None,
    tiny_random: TinyRandomOption = False,
    contexts: Annotated[
        str, typer.Option(metavar="N,N,..", help="Tokens of each prompt.")
    ] = "512,2048,8192,32768",
    tokens: Annotated[int, typer.Option(min=1, help="Tokens answered that count.")] = 64,
    dtype: DtypeOption = "bfloat16",
    prefill: PrefillOption = "short",
    devices: DevicesOption = 1,
    hosts: HostsOption = None,
    stall_timeout: StallOption = STALL_S,
) -> None:
    """Time prompts of random tokens and greedy answers to them, on one device or several.

    Random tokens find few Engram rows in memory: text does better. The memory is this process's.
    """
    import mlx.core as mx
    import numpy as np

    from mlx_engine.loading import open_model
    from mlx_engine.memory import machine_memory

    lengths = _lengths(contexts)
    n_answered = _WARM_TOKENS + tokens
    spread = Spread.of(devices, hosts, stall_timeout)
    directory, _ = model_directory(model, tiny_random=tiny_random)
    opened = open_model(directory)
    room = opened.context_tokens - n_answered
    if max(lengths) > room:
        raise BadRequest(
            f"--contexts has {max(lengths)}, but beside {n_answered} tokens of answer the model's "
            f"context has room for {room}"
        )
    opened = replace(opened, context_tokens=max(lengths) + n_answered)
    terminal = Terminal(is_streaming=False)
    with spread.lead(opened, dtype, prefill) as lead:
        with terminal.loading() as on_progress:
            engine = opened.load(
                dtype,
                prefill=prefill,
                cache_dir=cache_directory(),
                on_progress=on_progress,
                lead=lead,
            )
        with engine:
            terminal.fast_paths(engine.fast_paths)
            numbers = np.random.default_rng(0)
            # A first prompt pays for what is compiled and mapped once.
            _measure(engine, _random_tokens(engine, min(lengths), numbers), n_answered)
            typer.echo(_ROW.format(*_HEADER))
            done: list[Measured] = []
            for length in lengths:
                prompt = _random_tokens(engine, length, numbers)
                done.append(_measure(engine, prompt, n_answered))
                typer.echo(_line(done[-1]))
            record = {
                "bench": "model",
                "machine": str(mx.device_info().get("device_name", platform.machine())),
                "computes_by": machine_memory().kind,
                "system": f"{platform.system()} {platform.mac_ver()[0] or platform.release()}",
                "mlx": metadata.version("mlx"),
                "ds41": mlx_engine.__version__,
                "model": opened.checkpoint.directory.resolve().name,
                "layers": opened.config.num_hidden_layers,
                "devices": spread.count,
                "dtype": dtype,
                "prefill": prefill,
                "answered_tokens": tokens,
                "load_s": float(f"{terminal.load_s:.4g}"),
                "contexts": [_figures(each) for each in done],
            }
            typer.echo(json.dumps(record))


def _lengths(contexts: str) -> list[int]:
    try:
        lengths = [int(each) for each in contexts.split(",")]
    except ValueError:
        lengths = []
    if not lengths or min(lengths) < 1:
        raise BadRequest(
            f"--contexts is {contexts!r}, it must be numbers of tokens from 1 up: 512,2048"
        )
    return lengths


def _random_tokens(engine: "Engine", length: int, numbers: "np.random.Generator") -> list[int]:
    config = engine.config
    # One is left out, and those after it move down.
    drawn = numbers.integers(0, config.vocab_size - 1, length)
    return (drawn + (drawn >= config.image_token_id)).tolist()


def _measure(engine: "Engine", prompt: "Sequence[int]", n_answered: int) -> Measured:
    import mlx.core as mx

    engine.reset()
    mx.reset_peak_memory()
    engram = engine.engram_stats()
    moments: list[float] = []
    start_s = time.perf_counter()
    steps = engine.generate(prompt, max_tokens=n_answered, temperature=0, ignore_eos=True)
    with closing(steps):
        for step in steps:
            if isinstance(step, int):
                moments.append(time.perf_counter())
    prefill_s = moments[0] - start_s
    counted = moments[_WARM_TOKENS - 1 :]
    step_s = statistics.median(later - sooner for sooner, later in pairwise(counted))
    engram = engine.engram_stats() - engram
    return Measured(
        context_tokens=len(prompt),
        prefill_s=prefill_s,
        prefill_tokens_per_s=len(prompt) / prefill_s,
        decode_ms=1e3 * step_s,
        decode_tokens_per_s=1 / step_s,
        engram_share=engram.cache_hits / max(engram.rows_distinct, 1),
        peak_bytes=mx.get_peak_memory(),
    )


def _line(found: Measured) -> str:
    return _ROW.format(
        found.context_tokens,
        f"{found.prefill_s:.3f}",
        f"{found.prefill_tokens_per_s:,.0f}",
        f"{found.decode_ms:.2f}",
        f"{found.decode_tokens_per_s:.1f}",
        f"{found.engram_share:.0%}",
        f"{found.peak_bytes / 1e9:.2f}",
    )


def _figures(found: Measured) -> dict[str, float]:
    values = asdict(found).items()
    return {name: v if isinstance(v, int) else float(f"{v:.4g}") for name, v in values}
