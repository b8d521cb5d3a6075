"""`ds41 cache`: looks at the disk cache's folder, checks it and clears it, without a model.

What is ours in a folder, and what goes first, is diskcache's part.
"""

from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mlx_engine.cli.kv_disk import kv_directory, parse_bytes
from mlx_engine.cli.table import table
from mlx_engine.errors import BadRequest

if TYPE_CHECKING:
    from mlx_engine.diskcache.check import AnchorEntry, FolderStats, Removed

# A model is shown by this much of its folder's name.
_MODEL_CHARACTERS = len("kv-") + 8

cache_app = typer.Typer()

Folder = Annotated[
    str | None,
    typer.Option(
        "--kv-disk-dir", metavar="DIR", help="The folder.", show_default="kv in the cache folder"
    ),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Say what would be removed, and remove nothing.")
]


@cache_app.callback(invoke_without_command=True)
def _cache(context: typer.Context) -> None:  # pyright: ignore[reportUnusedFunction]
    """Look at the disk cache, check it, and clear it.

    The cache keeps what reading prompts has computed, so that a prompt that
    begins like an earlier one starts at once. Its files hold token ids, which
    can be turned back into the text of prompts and answers; only their owner
    can read them. Files in the folder that ds41 did not write are counted and
    never touched.
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@cache_app.command("ls")
def list_command(kv_disk_dir: Folder = None) -> None:
    """List the prompts' positions that can be resumed, by model, with the bytes each needs."""
    from mlx_engine.diskcache.check import list_anchors

    _print(_anchors(list_anchors(_directory(kv_disk_dir))))


@cache_app.command("stats")
def stats_command(kv_disk_dir: Folder = None) -> None:
    """Count what is in the folder: by model, of no use, and not ours."""
    from mlx_engine.diskcache.check import stats

    _print(_stats(stats(_directory(kv_disk_dir))))


@cache_app.command("verify")
def verify_command(
    kv_disk_dir: Folder = None,
    put_aside: Annotated[
        bool,
        typer.Option("--put-aside", help="Rename damaged files, so that no run reads them again."),
    ] = False,
) -> None:
    """Read every file of the cache and compare its digests; the exit code is 1 for damage."""
    from mlx_engine.diskcache.check import verify

    found = verify(_directory(kv_disk_dir), put_aside=put_aside)
    _print(f"{fault.name}: {fault.reason}" for fault in found.faults)
    _print([f"{_files(found.files)}, {found.n_bytes:,} bytes, {len(found.faults)} damaged"])
    if found.unknown_files:
        _print([f"{_files(found.unknown_files)} of another version of ds41 cannot be checked"])
    if found.faults:
        raise typer.Exit(1)


@cache_app.command("prune")
def prune_command(
    kv_disk_dir: Folder = None,
    to: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Remove what is worth least too, until all of the folder takes this much.",
        ),
    ] = None,
    dry_run: DryRun = False,
) -> None:
    """Remove files of no use: half-written ones, and those that were put aside."""
    from mlx_engine.diskcache.check import prune

    to_bytes = None if to is None else parse_bytes(to)
    _print(_removed(prune(_directory(kv_disk_dir), to_bytes, dry_run=dry_run), dry_run))


@cache_app.command("purge")
def purge_command(kv_disk_dir: Folder = None, dry_run: DryRun = False) -> None:
    """Remove everything that ds41 wrote into the folder, for all models.

    A server that is running stores nothing more in it until it is started
    again. Where files of others lie in the folder, its marker and its lock
    stay, so that it can go on being used; a server then goes on too.
    """
    from mlx_engine.diskcache.check import purge

    _print(_removed(purge(_directory(kv_disk_dir), dry_run=dry_run), dry_run))


def _directory(named: str | None) -> Path:
    """The folder to work on; says so, and ends the command, where nothing is in it."""
    from mlx_engine.diskcache.check import is_empty

    directory = kv_directory(named)
    if directory is None:
        raise BadRequest("none is no folder: name the one to work on, or leave --kv-disk-dir out")
    if named is not None and not directory.exists():
        raise BadRequest(f"{directory} is not there: name a folder that is")
    if is_empty(directory):
        typer.echo(f"nothing is stored yet in {directory}")
        raise typer.Exit
    return directory


def _print(lines: Iterator[str] | Sequence[str]) -> None:
    for line in lines:
        typer.echo(line)


def _anchors(anchors: Sequence["AnchorEntry"]) -> Iterator[str]:
    rows = [("model", "tokens", "of them new", "bytes", "uses", "stored")]
    rows += [
        (
            anchor.model[:_MODEL_CHARACTERS],
            f"{anchor.position:,}",
            f"{anchor.position - anchor.parent_position:,}",
            f"{anchor.own_bytes:,}",
            f"{anchor.hits:.1f}",
            _time(anchor.created_s) + ("" if anchor.has_tail else ", kept for those above it"),
        )
        for anchor in anchors
    ]
    return table(rows)


def _stats(stats: "FolderStats") -> Iterator[str]:
    yield str(stats.directory)
    rows = [("", "positions", "tokens", "bytes", "")]
    rows += [
        (
            m.model[:_MODEL_CHARACTERS],
            f"{m.anchors:,}",
            f"{m.tokens:,}",
            f"{m.n_bytes:,}",
            "of another version of ds41" if m.is_other_version else "",
        )
        for m in stats.models
    ]
    foreign = ", ".join(stats.foreign_names[:10])
    if len(stats.foreign_names) > 10:
        foreign += f" and {len(stats.foreign_names) - 10:,} more"
    rows += [
        ("damaged, put aside", "", "", f"{stats.damaged_bytes:,}", "in the models' bytes"),
        ("left over", "", "", f"{stats.left_over_bytes:,}", "in the models' bytes"),
        ("not ours", "", "", f"{stats.foreign_bytes:,}", foreign),
        ("total", "", "", f"{stats.total_bytes:,}", ""),
    ]
    yield from table(rows)


def _removed(removed: "Removed", is_dry_run: bool) -> Iterator[str]:
    if is_dry_run:
        yield from removed.names
    verb = "would remove" if is_dry_run else "removed"
    yield (
        f"{verb} {_files(len(removed.names))} of {removed.n_bytes:,} bytes, "
        f"{removed.left_bytes:,} bytes stay"
    )


def _files(n: int) -> str:
    return f"{n:,} file{'' if n == 1 else 's'}"


def _time(seconds: float) -> str:
    try:
        return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M")
    except (OverflowError, ValueError, OSError):  # of a clock that was far off
        return "?"
