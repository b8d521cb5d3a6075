"""A bench's output, which is tables, checks and one JSON line at the end; and paired timing."""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from bench.setting import surroundings


class Report:
    """Prints what a bench finds and keeps it for the JSON line and for `--out`.

    Made first, since it reads the command line and prints where the bench runs.
    """

    def __init__(self, bench: str, description: str | None) -> None:
        parser = argparse.ArgumentParser(prog=f"python -m bench.{bench}", description=description)
        parser.add_argument(
            "--out", type=Path, metavar="FILE.json", help="write the JSON here, the text beside it"
        )
        self._out: Path | None = parser.parse_args().out
        self._lines: list[str] = []
        self._checks: list[dict[str, Any]] = []
        self.results: dict[str, Any] = {}
        self._record: dict[str, Any] = {"bench": bench}
        self.facts(surroundings())

    def facts(self, facts: dict[str, Any]) -> None:
        """Print what was measured and where, one fact a line."""
        for name, fact in facts.items():
            self._record[name] = fact
            if isinstance(fact, dict):
                parts = cast("dict[str, Any]", fact)
                fact = ", ".join(f"{part} {_text(value)}" for part, value in parts.items())
            self.line(f"{name}: {_text(fact)}")

    def line(self, text: str = "") -> None:
        """Print one line."""
        print(text, flush=True)
        self._lines.append(text)

    def table(self, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Print rows under a header, the first column to the left and numbers to the right."""
        cells = [list(header), *[[_text(value) for value in row] for row in rows]]
        widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
        self.line()
        for row in cells:
            padded = [
                cell.rjust(width) if i else cell.ljust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            ]
            self.line("  ".join(padded).rstrip())
        self.line()

    def check(self, what: str, value: float, *, least: float = -1e9, most: float = 1e9) -> None:
        """Print whether a value reaches its goal, and remember it."""
        is_met = least <= value <= most
        goal = f"at least {least:g}" if least > -1e9 else f"at most {most:g}"
        self.line(f"{'ok    ' if is_met else 'MISSED'} {what}: {value:.3g} ({goal})")
        self._checks.append({"what": what, "value": value, "goal": goal, "is_met": is_met})

    def finish(self) -> int:
        """Print the JSON line, write the files, and return the exit code: 1 if a goal is missed."""
        record = _rounded({**self._record, "results": self.results, "checks": self._checks})
        text = json.dumps(record)
        if self._out is not None:
            self._out.parent.mkdir(parents=True, exist_ok=True)
            self._out.write_text(json.dumps(record, indent=1) + "\n")
            self._out.with_suffix(".txt").write_text("\n".join(self._lines) + "\n")
        print(text)
        return 0 if all(check["is_met"] for check in self._checks) else 1


def paired_s(
    first: Callable[[], object], second: Callable[[], object], repetitions: int
) -> tuple[list[float], list[float]]:
    """Seconds of each, run in pairs of alternating order, so that both see the same machine."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for repetition in range(repetitions):
        pair = [(first, seconds[0]), (second, seconds[1])]
        for run, times in pair if repetition % 2 == 0 else reversed(pair):
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
    return seconds


def speedup(slow_s: Sequence[float], fast_s: Sequence[float]) -> float:
    """The median over pairs of how many times longer the first took."""
    return statistics.median(a / b for a, b in zip(slow_s, fast_s, strict=True))


def _rounded(value: Any) -> Any:
    """Floats anywhere in nested dicts and lists to five digits."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: _rounded(part) for key, part in cast("dict[str, Any]", value).items()}
    if isinstance(value, list):
        return [_rounded(part) for part in cast("list[Any]", value)]
    return value


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
