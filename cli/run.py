"""`ds41 run`: one prompt in, its answer out.

Reads options and standard input, and says which checkpoint is meant; what is shown is terminal's
part, the work the library's. Nothing heavy is imported before the command runs.
"""

import json
import sys
from contextlib import closing
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from mlx_engine.cli.devices import DevicesOption, HostsOption, Spread, StallOption
from mlx_engine.cli.kv_disk import SPACE
from mlx_engine.cli.loaded import loaded_engine
from mlx_engine.cli.options import (
    ContextOption,
    DiskSpaceOption,
    DtypeOption,
    EffortOption,
    MaxTokensOption,
    MinPOption,
    ModelOption,
    PrefillOption,
    SeedOption,
    SystemOption,
    TemperatureOption,
    TinyRandomOption,
    TopKOption,
    TopPOption,
    sampling,
)
from mlx_engine.cli.signals import Signals
from mlx_engine.cli.terminal import Terminal
from mlx_engine.errors import BadRequest
from mlx_engine.ranks import STALL_S

if TYPE_CHECKING:
    from mlx_engine.respond import End


def run_command(
    prompt: Annotated[
        str | None,
        typer.Argument(help="What to answer; without it, or with -, it is read from stdin."),
    ] = None,
    model: ModelOption = None,
    tiny_random: TinyRandomOption = False,
    system: SystemOption = None,
    effort: EffortOption = "high",
    max_tokens: MaxTokensOption = None,
    temperature: TemperatureOption = None,
    top_p: TopPOption = None,
    top_k: TopKOption = None,
    min_p: MinPOption = None,
    seed: SeedOption = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="End the answer before this text; may be repeated.")
    ] = None,
    ctx: ContextOption = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the text as it is, without the chat format.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of the text as it comes.")
    ] = False,
    dtype: DtypeOption = "bfloat16",
    prefill: PrefillOption = "short",
    kv_disk_dir: Annotated[
        str,
        typer.Option(
            metavar="DIR|none",
            help="Keep on disk what reading the prompt has computed, so that a later run whose "
            "prompt begins the same starts at once; private to you, but it can be turned back "
            "into the text.",
        ),
    ] = "none",
    kv_disk_space: DiskSpaceOption = SPACE,
    devices: DevicesOption = 1,
    hosts: HostsOption = None,
    stall_timeout: StallOption = STALL_S,
) -> None:
    """Answer a prompt: text to stdout, reasoning, progress and statistics to stderr."""
    from mlx_engine.respond import Request

    request = Request(
        _read_stdin() if prompt in (None, "-") else prompt,
        system=system,
        effort=effort,
        max_tokens=max_tokens,
        sampling=sampling(
            temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed
        ),
        stop=stop or (),
        raw=raw,
    )
    terminal = Terminal(is_streaming=not as_json)
    # Noted from before the load, so that what waits for the disk is written under their eyes.
    with (
        Signals.noted() as signals,
        loaded_engine(
            request,
            terminal,
            signals,
            model=model,
            tiny_random=tiny_random,
            ctx=ctx,
            dtype=dtype,
            kv_disk_dir=kv_disk_dir,
            kv_disk_space=kv_disk_space,
            prefill=prefill,
            spread=Spread.of(devices, hosts, stall_timeout),
        ) as engine,
    ):
        signals.are_awaited = True
        events = engine.respond(request, cancelled=lambda: bool(signals.numbers))
        with closing(events):
            end = terminal.show(events)
        if as_json:
            typer.echo(_json(end, terminal.load_s))
        terminal.statistics(end)
    if end.finish_reason == "cancelled":
        raise typer.Exit(128 + signals.numbers[0])


def _read_stdin() -> str:
    if sys.stdin is None or sys.stdin.isatty():  # None where the caller closed it
        raise BadRequest("there is no prompt: give one as an argument or on standard input")
    try:
        text = typer.get_binary_stream("stdin").read().decode()
    except UnicodeDecodeError as error:
        raise BadRequest(
            f"standard input is not UTF-8 text at byte {error.start}: convert it first"
        ) from None
    return text.removesuffix("\n")  # the shell's, not the prompt's


def _json(end: "End", load_s: float) -> str:
    fields = asdict(end)
    fields["timings"] = {"load_s": load_s, **fields["timings"]}
    return json.dumps(fields, ensure_ascii=False)
