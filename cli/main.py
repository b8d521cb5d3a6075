"""The command `ds41`: its subcommands, and how a failure leaves the program.

The one place that turns errors into a line on standard error and an exit code: 2 for what the
caller can put right, 130 for Ctrl-C. Commands are in modules of their own; those that load slowly
are imported when they are called.
"""

import errno
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import mlx_engine
from mlx_engine.cli.bench import bench_app
from mlx_engine.cli.cache import cache_app
from mlx_engine.cli.chat import chat_command
from mlx_engine.cli.doctor import doctor_command
from mlx_engine.cli.download import download_command
from mlx_engine.cli.launch import launch_app
from mlx_engine.cli.options import folder
from mlx_engine.cli.ps import ps_command
from mlx_engine.cli.run import run_command
from mlx_engine.cli.serve import serve_command
from mlx_engine.cli.terminal import say
from mlx_engine.errors import EngineError


class _Commands(TyperGroup):
    """Says in one line what was wrong, for this engine's errors and for the command line's."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        try:
            # Returns the code of typer.Exit; Ctrl-C is 130 there, and a closed pipe ends quietly.
            code = super().main(args, prog_name, complete_var, False, windows_expand_args, **extra)
        except EngineError as error:
            code = _fail(str(error), 2)
        except ImportError as error:
            code = _not_imported(error)
        except OSError as error:
            # What commands read and write themselves raises EngineError; this is the output.
            if error.errno not in (errno.ENOSPC, errno.EIO):
                raise
            code = _fail(f"the output cannot be written: {error.strerror}", 2)
        except typer.TyperException as error:
            code = _fail(" ".join(error.format_message().split()), error.exit_code)
        if standalone_mode:
            sys.exit(code)
        return code


def _not_imported(error: ImportError) -> int:
    # So a Ctrl-C leaves an extension module that is being imported.
    if isinstance(error.__cause__, KeyboardInterrupt):
        return 130
    # Without a back-end MLX's compiled module is there and the library behind it is not.
    if Path(error.path or "").parent.name != "mlx":
        raise error
    return _fail(
        f"MLX cannot start ({error}): on Linux install ds41 with one of the extras cpu, "
        "cuda12 and cuda13, as in pip install '.[cpu]' in its clone",
        2,
    )


def _fail(message: str, code: int) -> int:
    say(message)
    return code


app = typer.Typer(
    name="ds41",
    cls=_Commands,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(f"ds41 {mlx_engine.__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _ds41(  # pyright: ignore[reportUnusedFunction]
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Run DeepSeek-V4.1-Flash in its released form on this machine.

    What can be made again is kept in the user's cache folder, or in the one
    that DS41_CACHE_DIR names: the disk cache (kv in it), compiled CUDA kernels
    (cuda) and a tiny random model.
    """
    logging.basicConfig(format="ds41: %(message)s")
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


app.command("run")(run_command)
app.command("chat")(chat_command)
app.command("serve")(serve_command)
app.command("ps")(ps_command)
app.command("doctor")(doctor_command)
app.command("download")(download_command)
app.add_typer(bench_app, name="bench")
app.add_typer(cache_app, name="cache")
app.add_typer(launch_app, name="launch")


@app.command("inspect")
def _inspect(  # pyright: ignore[reportUnusedFunction]
    directory: Annotated[
        Path,
        typer.Argument(parser=folder, metavar="DIR", help="The folder that holds the checkpoint."),
    ],
) -> None:
    """Show what a checkpoint holds, what of it stays in memory, and whether this machine fits."""
    from mlx_engine.cli.inspect import inspect

    inspect(directory)
