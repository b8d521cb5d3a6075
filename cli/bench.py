"""`ds41 bench`, and its `kernels`: what the kernels are worth on this Mac.

Prints a line an operation as it is done, and one line of JSON at the end; checking and timing are
kernel_bench's. Nothing heavy is imported before the command runs.
"""

import json
import os
import platform
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Annotated, Any

import typer

import mlx_engine
from mlx_engine.cli.bench_model import model_command

if TYPE_CHECKING:
    from mlx_engine.kernel_bench import Result

_TRACKER_LABELS = {"issues", "tracker", "issue tracker", "bug tracker"}
# After how much of either MLX ends a command buffer; unset, it has a choice for each device.
_VARIABLES = ("MLX_MAX_OPS_PER_BUFFER", "MLX_MAX_MB_PER_BUFFER")
_ROW = "{:<10} {:<30} {:>6} {:>11} {:>8} {:>9} {:>8} {:>6} {:>8} {:>9}"

bench_app = typer.Typer()
bench_app.command("model")(model_command)


@dataclass(frozen=True)
class Machine:
    """What runs the kernels; the peak in GB/s is published, None for a device that is not known."""

    name: str
    memory_bytes: int
    peak_gb_per_s: int | None


def tracker() -> str:
    """Where results are to be sent: the address in the package's metadata, if there is one."""
    for entry in metadata.metadata("ds41").get_all("Project-URL") or ():
        label, _, address = str(entry).partition(", ")
        if label.lower() in _TRACKER_LABELS:
            return address
    return "the issue tracker of the project"


@bench_app.callback(invoke_without_command=True)
def _bench(context: typer.Context) -> None:  # pyright: ignore[reportUnusedFunction]
    """Measure this machine."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@bench_app.command("kernels")
def kernels_command(
    power: Annotated[
        bool,
        typer.Option(
            "--power", help="Joules too, from macOS's powermetrics; sudo asks for a password."
        ),
    ] = False,
) -> None:
    """Check and time each operation on random data at the model's widths; takes 2 GB of memory."""
    import mlx.core as mx

    from mlx_engine import kernel_bench
    from mlx_engine.power import PowerMeter

    factory = kernel_bench.metal_factory()
    info = mx.device_info()
    name = str(info["device_name"])
    machine = Machine(name, int(info["memory_size"]), kernel_bench.PEAK_GB_S.get(name))
    with ExitStack() as stack:
        meter = stack.enter_context(PowerMeter()) if power else None
        code = report(machine, kernel_bench.run(factory, meter=meter))
    raise typer.Exit(code)


def report(machine: Machine, results: "Iterable[Result]") -> int:
    """Print the results as they come and the JSON line: 1 if a kernel is wrong, else 0."""
    import mlx.core as mx

    from mlx_engine.kernel_bench import totals

    peak = machine.peak_gb_per_s
    record: dict[str, Any] = {
        "bench": "kernels",
        "machine": machine.name,
        "memory_bytes": machine.memory_bytes,
        "peak_gb_per_s": peak,
        "system": f"{platform.system()} {platform.mac_ver()[0] or platform.release()}",
        "python": platform.python_version(),
        "mlx": metadata.version("mlx"),
        "ds41": mlx_engine.__version__,
        **{variable.lower(): os.environ.get(variable) for variable in _VARIABLES},
    }
    for what in ("machine", "system", "mlx", "ds41"):
        typer.echo(f"{what}: {record[what]}")
    typer.echo(
        f"peak bandwidth: {'unknown' if peak is None else f'{peak} GB/s'}, as Apple publishes it"
    )
    typer.echo("")
    header = ("family", "operation", "tokens", "us", "host us", "MB", "GB/s", "%", "launches", "mJ")
    typer.echo(_ROW.format(*header).rstrip())
    done: list[Result] = []
    for result in results:
        done.append(result)
        typer.echo(_line(result, peak))
    seconds, joules = totals(done)
    energy = "" if joules is None else f" and {joules:.3g} J of CPU, GPU and neural engine"
    if any(result.measured and result.measured.is_floored for result in done):
        typer.echo("< less than the clock can tell from the noise of what links two calls")
    typer.echo(
        f"\nA decode step of the release calls these for {seconds * 1e3:.3g} ms{energy} in all: "
        "an estimate, since nothing here runs side by side.\n"
        f"Please send the line below to {tracker()}."
    )
    wrong = [result for result in done if result.fault]
    record |= {
        "results": [_figures(result, peak) for result in done],
        "wrong": len(wrong),
        "token_ms": _short(seconds * 1e3),
        "token_joules": _short(joules),
        "peak_memory_bytes": mx.get_peak_memory(),
    }
    typer.echo(json.dumps(record))
    return 1 if wrong else 0


def _line(result: "Result", peak: int | None) -> str:
    about = (result.family, result.name, result.tokens)
    measured = result.measured
    if measured is None:
        return _ROW.format(*about, *[""] * 7).rstrip() + f"  WRONG, not timed: {result.fault}"
    share = "" if peak is None else f"{100 * result.gb_per_s / peak:.0f}"
    energy = "" if measured.joules is None else f"{measured.joules * 1e3:.3g}"
    return _ROW.format(
        *about,
        f"{'<' if measured.is_floored else ''}{measured.seconds * 1e6:,.1f}",
        f"{measured.host_s * 1e6:,.1f}",
        f"{result.n_bytes / 1e6:.4g}",
        f"{result.gb_per_s:.4g}",
        share,
        result.launches,
        energy,
    ).rstrip()


def _figures(result: "Result", peak: int | None) -> dict[str, Any]:
    about = {
        "family": result.family,
        "operation": result.name,
        "tokens": result.tokens,
        "bytes": result.n_bytes,
        "touched_bytes": result.touched_bytes,
    }
    measured = result.measured
    if measured is None:
        return {**about, "fault": result.fault}
    return {
        **about,
        "us": _short(measured.seconds * 1e6),
        "floored": measured.is_floored,
        "host_us": _short(measured.host_s * 1e6),
        "gb_per_s": _short(result.gb_per_s),
        "share_of_peak": None if peak is None else _short(result.gb_per_s / peak),
        "launches": result.launches,
        "joules": _short(measured.joules),
    }


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")
