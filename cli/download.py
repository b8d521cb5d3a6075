"""`ds41 download`: fetches the checkpoint into a folder, with a bar, and goes on after a stop."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from mlx_engine.cli.options import folder
from mlx_engine.download import AGAIN, REPO, REVISION, DownloadProgress, download


def download_command(
    directory: Annotated[
        Path | None,
        typer.Argument(
            parser=folder,
            metavar="DIR",
            help="The folder to fetch into; by default one named after the model, here. "
            "It needs 511 GB for the released checkpoint.",
            show_default=f"./{Path(REPO).name}",
        ),
    ] = None,
    repo: Annotated[str, typer.Option(help="The repository on the hub.")] = REPO,
    revision: Annotated[
        str, typer.Option(help="The commit, tag or branch; by default the commit ds41 is made for.")
    ] = REVISION,
) -> None:
    """Fetch the checkpoint from the Hugging Face hub.

    Ctrl-C stops it and the same command goes on: finished files are kept, an
    unfinished one starts from its beginning. So a stop can cost about 7 GB,
    and 101 GB in the two of the 48 shards that hold an Engram table.

    HF_ENDPOINT names another hub, HF_TOKEN or `hf auth login` log in.
    """
    target = directory or Path(Path(repo).name)
    try:
        with _shown() as report:
            download(target, repo=repo, revision=revision, report=report)
    except KeyboardInterrupt:
        typer.echo(f"Stopped. To complete {target}, {AGAIN}.", err=True)
        raise typer.Exit(130) from None
    typer.echo(f"Complete: {target}. Run it with: ds41 run --model {target}", err=True)


@contextmanager
def _shown() -> Generator[Callable[[DownloadProgress], None]]:
    """A way to show progress on standard error: a bar on a terminal, else a line a file."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    console = Console(stderr=True)
    if not console.is_terminal:
        started = 0

        def line(progress: DownloadProgress) -> None:
            nonlocal started
            if progress.file_number != started:
                started = progress.file_number
                done, total = progress.done_bytes / 1e9, progress.total_bytes / 1e9
                typer.echo(
                    f"{started}/{progress.n_files} {progress.file} "
                    f"({done:.1f} of {total:.1f} GB are there)",
                    err=True,
                )

        yield line
        return

    columns = (
        TextColumn("{task.fields[place]}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("asking the hub", total=None, place="")

        def update(progress: DownloadProgress) -> None:
            bar.update(
                task,
                description=progress.file,
                completed=progress.done_bytes,
                total=progress.total_bytes,
                place=f"{progress.file_number}/{progress.n_files}",
            )

        yield update
