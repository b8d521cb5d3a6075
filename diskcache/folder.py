"""Which folder may become a cache's: one of the user's own, made if it is not there.

What lies in it is the store's part.
"""

import contextlib
from collections.abc import Collection, Mapping
from pathlib import Path

from mlx_engine.diskcache import names
from mlx_engine.diskcache.files import Files, Kind, Status, is_absent
from mlx_engine.errors import CacheUnusable


def make_folders(directory: Path, files: Files) -> None:
    """Make a folder and those above it that are missing, for its owner alone. OSError."""
    missing: list[Path] = []
    for folder in (directory, *directory.parents):
        try:
            files.status(folder)
            break
        except FileNotFoundError:
            missing.append(folder)
    for folder in reversed(missing):
        with contextlib.suppress(FileExistsError):
            files.make_folder(folder)
    for folder in missing[1:]:
        files.sync_folder(folder.parent)


def check_owner(directory: Path, files: Files) -> Status:
    """What lstat says of a folder; CacheUnusable if it is no folder, or another user's."""
    status = files.status(directory)
    if status.kind is not Kind.FOLDER:
        raise CacheUnusable(
            f"{directory} is a {status.kind.value} and not a folder: "
            "name another with --kv-disk-dir."
        )
    if status.owner != files.user():
        raise CacheUnusable(
            f"{directory} belongs to another user: name another folder with --kv-disk-dir."
        )
    return status


def check_unmarked(directory: Path, ours: Mapping[str, int], foreign: Collection[str]) -> None:
    """CacheUnusable if a folder without our marker holds anything that cannot be ours.

    `ours` are the names in it that can be, with their bytes, `foreign` the paths below it that
    cannot. A marker that a power cut has emptied can be ours.
    """
    if ours.get(names.MARKER_NAME) or names.MARKER_NAME in foreign:
        raise CacheUnusable(
            f"{directory} is marked as another program's cache: name another with --kv-disk-dir."
        )
    if foreign:
        raise CacheUnusable(
            f"{directory} holds files that are not a cache's ({min(foreign)}): "
            "name an empty or a new folder with --kv-disk-dir."
        )


def marker_of(directory: Path, files: Files) -> bytes | None:
    """What a folder's marker holds, None where there is none."""
    try:
        return files.contents(directory / names.MARKER_NAME, 2**63)
    except OSError as error:
        if is_absent(error):
            return None
        raise


def is_emptied(ours: Mapping[str, int], foreign: Collection[str]) -> bool:
    """Whether a folder is a cache's whose marker a power cut has emptied."""
    return ours.get(names.MARKER_NAME) == 0 and not foreign


def hide(directory: Path, files: Files) -> None:
    """Keep a folder out of a Mac's search index and backups, if that can be."""
    with contextlib.suppress(OSError):
        files.close(files.create(directory / names.NO_INDEX_NAME))
    with contextlib.suppress(OSError):
        files.leave_out_of_backups(directory)
