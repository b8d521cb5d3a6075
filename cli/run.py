"""`ds41 run`: one prompt in, its answer out.

Reads options and standard input, and says which checkpoint is meant; what is shown is terminal's
part, the work the library's. Nothing heavy is imported before the command runs.
"""

import json
import signal
import sys
from collections.abc import Generator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from mlx_engine.cli.folders import cache_directory, model_directory
from mlx_engine.cli.kv_disk import SPACE, kv_directory, kv_disk, parse_bytes
from mlx_engine.cli.terminal import Terminal
from mlx_engine.errors import BadRequest
from mlx_engine.prompt import Effort

if TYPE_CHECKING:
    from mlx_engine.respond import End

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def run_command(
    prompt: Annotated[
        str | None,
        typer.Argument(help="What to answer; without it, or with -, it is read from stdin."),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(
            envvar="DS41_MODEL",
            help="The checkpoint's folder; without it a tiny random model shows that all works.",
        ),
    ] = None,
    system: Annotated[str | None, typer.Option(help="The system text.")] = None,
    effort: Annotated[Effort, typer.Option(help="How long to reason before the answer.")] = "high",
    max_tokens: Annotated[
        int | None,
        typer.Option(
            help="Tokens of reasoning and answer.", show_default="by effort, the vendor's"
        ),
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="0 takes the most likely token.", show_default="1")
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(help="Draw from the likeliest tokens of this share.", show_default="1"),
    ] = None,
    min_p: Annotated[
        float | None,
        typer.Option(help="Drop tokens below this share of the likeliest.", show_default="0"),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(help="The same seed gives the same answer.", show_default="a new one"),
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="End the answer before this text; may be repeated.")
    ] = None,
    ctx: Annotated[
        int | None,
        typer.Option(help="Tokens of prompt and answer together.", show_default="the model's"),
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the text as it is, without the chat format.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of the text as it comes.")
    ] = False,
    dtype: Annotated[
        Literal["bfloat16", "float32"], typer.Option(help="Numbers between the layers.")
    ] = "bfloat16",
    prefill: Annotated[
        Literal["short", "full"],
        typer.Option(help="full runs all layers on all of the prompt, for comparison."),
    ] = "short",
    kv_disk_dir: Annotated[
        str,
        typer.Option(
            metavar="DIR|none",
            help="Keep on disk what reading the prompt has computed, so that a later run whose "
            "prompt begins the same starts at once; private to you, but it can be turned back "
            "into the text.",
        ),
    ] = "none",
    kv_disk_space: Annotated[
        str, typer.Option(metavar="SIZE", help="The most that all files of that folder may take.")
    ] = SPACE,
) -> None:
    """Answer a prompt: text to stdout, reasoning, progress and statistics to stderr."""
    from mlx_engine.loading import open_model
    from mlx_engine.respond import Request
    from mlx_engine.sampling import Sampling

    given = {"temperature": temperature, "top_p": top_p, "min_p": min_p, "seed": seed}
    chosen: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    request = Request(
        _read_stdin() if prompt in (None, "-") else prompt,
        system=system,
        effort=effort,
        max_tokens=max_tokens,
        sampling=Sampling(**chosen),
        stop=stop or (),
        raw=raw,
    )
    kv_folder, kv_space_bytes = kv_directory(kv_disk_dir), parse_bytes(kv_disk_space)
    terminal = Terminal(is_streaming=not as_json)
    directory = model_directory(model)
    with ExitStack() as stack:
        # Before the cache, so that what waits for the disk is written under its eyes.
        signals = stack.enter_context(Signals.noted())
        with terminal.loading() as on_progress:
            opened = open_model(directory, context_tokens=ctx)
            opened.check(request)
            disk_cache = stack.enter_context(
                kv_disk(opened, dtype, kv_folder, kv_space_bytes, signals.numbers)
            )
            engine = opened.load(
                dtype,
                prefill=prefill,
                disk_cache=disk_cache,
                cache_dir=cache_directory(),
                on_progress=on_progress,
            )
        terminal.fast_paths(engine.fast_paths)
        stack.enter_context(engine)
        signals.are_awaited = True
        events = engine.respond(
            request, on_progress=terminal.prefill, cancelled=lambda: bool(signals.numbers)
        )
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


class Signals:
    """The Ctrl-C and SIGTERM that came.

    One that is awaited is asked for between tokens: the answer so far is written, and so is what
    the disk cache has waiting. Any other ends the program, and so does the second one.
    """

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.are_awaited = False

    @classmethod
    @contextmanager
    def noted(cls) -> "Generator[Signals]":
        """Note signals until the context is left."""
        signals = cls()
        before = {number: signal.signal(number, signals._note) for number in _SIGNALS}
        try:
            yield signals
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.numbers.append(number)
        if self.are_awaited and len(self.numbers) == 1:
            return
        if number == signal.SIGTERM:
            raise SystemExit(128 + number)
        raise KeyboardInterrupt


def _json(end: "End", load_s: float) -> str:
    fields = asdict(end)
    fields["timings"] = {"load_s": load_s, **fields["timings"]}
    return json.dumps(fields, ensure_ascii=False)
