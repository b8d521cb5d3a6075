"""What commands show: the answer on standard output, all else on standard error.

Owns bars, dim text, the statistics line and how the program speaks for itself. Bars are drawn only
where standard error is a terminal, and are gone before text follows.
"""

import io
import sys
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from rich import progress

    from mlx_engine.answer import ReasoningDelta, TextDelta
    from mlx_engine.ops.launch import FastPaths
    from mlx_engine.respond import End, Event, Progress


def say(message: str) -> None:
    """Write a line of the program's own."""
    typer.echo(f"ds41: {message}", err=True)


def _is_terminal() -> bool:
    # Standard error is None where the caller closed it.
    return sys.stderr is not None and sys.stderr.isatty()


class Terminal:
    """Shows answers; without `is_streaming` neither reasoning nor text is written as it comes."""

    def __init__(self, *, is_streaming: bool) -> None:
        self.load_s = 0.0
        self._is_streaming = is_streaming
        self._prefill_bar: _Bar | None = None
        self._last: ReasoningDelta | TextDelta | None = None
        if isinstance(sys.stdout, io.TextIOWrapper):
            # An answer may hold characters that the terminal's encoding lacks.
            sys.stdout.reconfigure(errors="replace")

    @contextmanager
    def loading(self) -> Generator[Callable[[int, int], None] | None]:
        """Time the load, and draw a bar of bytes done and in all by the function this gives."""
        started_s = time.perf_counter()
        bar = _load_bar() if _is_terminal() else None
        try:
            yield bar and bar.update
        finally:
            if bar:
                bar.close()
        self.load_s = time.perf_counter() - started_s

    def fast_paths(self, paths: "FastPaths") -> None:
        """Write one line that says what computes on this machine."""
        line = "no GPU kernels, this machine computes with MLX's own operations"
        if paths.on:
            line = f"GPU kernels for {', '.join(paths.on)}"
            line += f"; MLX's own operations for {', '.join(paths.off)}" if paths.off else ""
        say(line)

    def prefill(self, progress: "Progress") -> None:
        """Draw how much of the prompt is done."""
        if self._prefill_bar is None and _is_terminal():
            self._prefill_bar = _prefill_bar()
        if self._prefill_bar is not None:
            self._prefill_bar.update(progress.done_tokens, progress.total_tokens)

    def show(self, events: "Iterable[Event]") -> "End":
        """Write reasoning and answer as they come, and return the end."""
        from mlx_engine.answer import ReasoningDelta, TextDelta
        from mlx_engine.errors import EngineError
        from mlx_engine.respond import End, Progress

        self._last = None
        is_waiting = False
        try:
            for event in events:
                if isinstance(event, Progress):
                    if event.stage == "waiting" and not is_waiting:
                        is_waiting = True
                        typer.echo("ds41: waiting for its turn", err=True)
                    elif event.stage == "prefill":
                        self.prefill(event)
                elif isinstance(event, End):
                    self._end_line()
                    return event
                elif isinstance(event, ReasoningDelta | TextDelta):
                    self._close_bar()
                    if self._is_streaming:
                        self._write(event)
        except EngineError:
            self._end_line()
            raise
        finally:
            self._close_bar()
        raise AssertionError("an answer has an end")

    def statistics(self, end: "End") -> None:
        """Write one line about a run with one answer."""
        timings, engram = end.timings, end.engram
        rows = engram.rows_distinct
        hits = f"engram {engram.cache_hits / rows:.0%} of rows in memory; " if rows else ""
        typer.echo(
            f"ds41: {_rates(end)}; {hits}"
            f"load {self.load_s:.1f} s, prefill {timings.prefill_s:.1f} s, "
            f"decode {timings.decode_s:.1f} s; {end.finish_reason}",
            err=True,
        )

    def turn(self, end: "End") -> None:
        """Write one line about an answer among others."""
        ended = "" if end.finish_reason == "stop" else f"; {end.finish_reason}"
        typer.secho(f"{_rates(end)}{ended}", err=True, dim=True)

    def _write(self, delta: "ReasoningDelta | TextDelta") -> None:
        from mlx_engine.answer import ReasoningDelta

        is_reasoning = isinstance(delta, ReasoningDelta)
        if not is_reasoning and isinstance(self._last, ReasoningDelta):
            typer.echo("\n", err=True)
        # Each piece is flushed, and dim only where the stream is a terminal.
        typer.secho(
            delta.text, nl=False, err=is_reasoning, dim=is_reasoning or None, reset=is_reasoning
        )
        self._last = delta

    def _end_line(self) -> None:
        from mlx_engine.answer import ReasoningDelta

        if self._last is not None and not self._last.text.endswith("\n"):
            typer.echo(err=isinstance(self._last, ReasoningDelta))

    def _close_bar(self) -> None:
        if self._prefill_bar is not None:
            self._prefill_bar.close()
            self._prefill_bar = None


def _rates(end: "End") -> str:
    cached = f" ({end.cached_tokens:,} cached)" if end.cached_tokens else ""
    timings = end.timings
    return (
        f"prompt {end.prompt_tokens:,} tokens{cached}, {timings.prefill_tokens_per_s:,.1f}/s; "
        f"answer {end.completion_tokens:,} tokens, {timings.decode_tokens_per_s:,.1f}/s"
    )


class _Bar:
    """One bar on standard error, which disappears when it is closed."""

    def __init__(self, title: str, *columns: "progress.ProgressColumn") -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self._progress = Progress(
            TextColumn(title),
            BarColumn(),
            *columns,
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._task = self._progress.add_task(title, total=None)
        self._progress.start()

    def update(self, done: int, total: int) -> None:
        self._progress.update(self._task, completed=done, total=total)

    def close(self) -> None:
        self._progress.stop()


def _load_bar() -> _Bar:
    from rich.progress import DownloadColumn, TransferSpeedColumn

    return _Bar("load", DownloadColumn(binary_units=True), TransferSpeedColumn())


def _prefill_bar() -> _Bar:
    from rich.progress import MofNCompleteColumn, ProgressColumn, Task
    from rich.text import Text

    class TokensPerSecond(ProgressColumn):
        def render(self, task: Task) -> Text:
            speed = task.finished_speed or task.speed
            return Text("" if speed is None else f"{speed:,.0f} tokens/s")

    return _Bar("prefill", MofNCompleteColumn(), TokensPerSecond())
