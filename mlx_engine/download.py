"""Fetches a checkpoint from the hub into a folder, file by file, and can go on after a stop.

Owns what huggingface_hub leaves to its caller: is there room, what is already there, one sentence
for each failure. Finished files are kept; the one under way when a download stops starts again.
Needs no MLX, and imports huggingface_hub only when it fetches.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from mlx_engine.config_file import MODEL_TYPE
from mlx_engine.errors import BadRequest, DeviceError, EngineError

REPO = "deepseek-ai/DeepSeek-V4.1-Flash"
REVISION = "dba1be0a40aa45a94ad051997016db3960a90277"

# huggingface_hub goes on within a file only as long as its process lives.
AGAIN = (
    "run the same command again: finished files are kept, an unfinished one starts from its "
    "beginning"
)

# Room beyond the files themselves: the folder's entries, and what else the machine writes.
MARGIN_BYTES = 1 << 30

_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT)
_DISK_ERRNOS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EIO)


@dataclass(frozen=True)
class DownloadProgress:
    """How far the whole download is; `file` is the one under way, number `file_number`."""

    file: str
    file_number: int
    n_files: int
    done_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class _RemoteFile:
    name: str
    n_bytes: int


def download(
    directory: Path,
    *,
    repo: str = REPO,
    revision: str = REVISION,
    endpoint: str | None = None,
    report: Callable[[DownloadProgress], None] = lambda _: None,
) -> None:
    """Fetch every file of `repo` at `revision` into `directory`.

    `endpoint` is the hub's address (default: huggingface_hub's own, which HF_ENDPOINT overrides);
    `report` is called for every piece that arrives. Files that are there already are not fetched
    again. Raises BadRequest when the repository, the revision or the directory cannot be meant,
    DeviceError when the disk is too small or cannot be written or the hub cannot be reached.
    """
    from huggingface_hub import (
        HfApi,
        constants,
        hf_hub_download,  # pyright: ignore[reportUnknownVariableType] (tqdm has no types)
    )

    hub = endpoint or constants.ENDPOINT
    _refuse_foreign(directory)
    try:
        info = HfApi(endpoint=endpoint).model_info(repo, revision=revision, files_metadata=True)
    except Exception as error:  # httpx, the hub's own and the OS's: they share no narrower base
        raise _explain(error, f"{repo} at {revision}", hub, directory) from error
    # Small files first: a configuration that is wrong shows before the shards are there.
    files = sorted(
        (_RemoteFile(sibling.rfilename, sibling.size or 0) for sibling in info.siblings or []),
        key=lambda file: (file.n_bytes, file.name),
    )
    _check_room(directory, files)

    total_bytes = sum(file.n_bytes for file in files)
    done_bytes = 0
    with _only_download(directory):
        for number, file in enumerate(files, start=1):
            start = DownloadProgress(file.name, number, len(files), done_bytes, total_bytes)
            done_bytes += file.n_bytes
            found_bytes = _size(directory / file.name)
            report(start)
            try:
                # One file at a time, in this thread: Ctrl-C ends it at once and costs one file.
                # The hub's Xet storage reads a file over many connections all the same.
                hf_hub_download(
                    repo,
                    file.name,
                    revision=info.sha,
                    local_dir=directory,
                    endpoint=endpoint,
                    # Its own check trusts a note beside the file and would keep half of one.
                    force_download=found_bytes is not None and found_bytes != file.n_bytes,
                    tqdm_class=cast(Any, _bar(start, done_bytes, report)),
                )
            except Exception as error:  # as above, and what Xet's native code raises
                raise _explain(error, f"{file.name} of {repo}", hub, directory) from error
            report(replace(start, done_bytes=done_bytes))


def _refuse_foreign(directory: Path) -> None:
    """Refuse a file, and the folder of another model, whose files would be overwritten."""
    try:
        if directory.exists() and not directory.is_dir():
            raise BadRequest(f"{directory} is a file; give a folder for the checkpoint")
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return
    except OSError as error:
        raise _unwritable(directory, error) from error
    except ValueError:
        config = {}
    kind = cast("dict[str, Any]", config).get("model_type") if isinstance(config, dict) else None
    if kind not in (None, MODEL_TYPE):
        raise BadRequest(f"{directory} holds another model ({kind}); give a new folder")


def _check_room(directory: Path, files: list[_RemoteFile]) -> None:
    missing_bytes = sum(
        max(0, file.n_bytes - (_size(directory / file.name) or 0)) for file in files
    )
    if missing_bytes == 0:
        return
    # What a killed download left behind is removed before the first file is fetched.
    usable_bytes = _free_bytes(directory) + sum(_size(part) or 0 for part in _parts(directory))
    needed_bytes = missing_bytes + MARGIN_BYTES
    if usable_bytes < needed_bytes:
        raise DeviceError(
            f"{directory} needs {_gb(needed_bytes)} more for the checkpoint, and its disk has "
            f"{_gb(usable_bytes)} free; free {_gb(needed_bytes - usable_bytes)} or give a folder "
            "on another disk"
        )


@contextmanager
def _only_download(directory: Path) -> Generator[None]:
    """Make the folder, keep other downloads out of it, and drop what a killed one left."""
    state = directory / ".cache" / "huggingface"
    try:
        state.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(state / "ds41.lock", os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise _unwritable(directory, error) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BadRequest(
                f"another download into {directory} is under way; wait for it or stop it"
            ) from None
        except OSError:
            pass  # a network drive without locks
        for part in _parts(directory):
            part.unlink(missing_ok=True)
        yield
    finally:
        os.close(descriptor)


def _parts(directory: Path) -> Iterator[Path]:
    """The unfinished files in the folder; huggingface_hub never goes on with one."""
    return (directory / ".cache" / "huggingface" / "download").rglob("*.incomplete")


def _bar(
    start: DownloadProgress, end_bytes: int, report: Callable[[DownloadProgress], None]
) -> type:
    """A progress bar class as huggingface_hub wants one, which only counts one file's bytes."""

    class Bar:
        def __init__(self, *_args: object, initial: int = 0, **_kwargs: object) -> None:
            self.n = initial
            self.total = 0

        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *_error: object) -> None:
            pass

        def update(self, n: float | None = 1) -> None:
            self.n += int(n or 0)
            report(replace(start, done_bytes=min(start.done_bytes + self.n, end_bytes)))

        def ignore(self, *_args: object, **_kwargs: object) -> None:
            pass

        # Xet counts what arrives and what is on disk: the second is the progress.
        update_transfer = set_postfix_str = set_transfer_postfix_str = refresh = close = ignore

    return Bar


def _explain(error: Exception, what: str, hub: str, directory: Path) -> EngineError:
    """One sentence for whatever stopped the download of `what`."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    # What says that the hub could not be asked has the failure of the network as its cause.
    told = error.__cause__ if isinstance(error, LocalEntryNotFoundError) else error
    reason = (str(told or error).strip() or type(error).__name__).splitlines()[0]
    code = error.errno if isinstance(error, OSError) else None
    # Xet's native code has the errno in its text only.
    if code in _FULL_ERRNOS or "No space left on device" in str(error):
        return DeviceError(
            f"the disk of {directory} is full ({_gb(_free_bytes(directory))} free) at {what}; "
            f"free some and {AGAIN}"
        )
    advice = "check the network"
    if code in _DISK_ERRNOS:
        return _unwritable(directory, cast(OSError, error))
    match error:
        case HFValidationError():
            return BadRequest(f"{what} is no repository name: {reason}")
        case GatedRepoError():
            return BadRequest(
                f"{what} asks for its terms to be accepted: do so on {hub}, then `hf auth login`"
            )
        case RevisionNotFoundError():
            return BadRequest(f"{hub} has no {what}; check the revision")
        case RepositoryNotFoundError():
            return BadRequest(f"{hub} has no {what}, or it needs a login; check the name")
        case HfHubHTTPError():
            reason, advice = f"it answers {error.response.status_code}", "wait a while"
        case _:
            pass
    return DeviceError(f"cannot fetch {what} from {hub} ({reason}); {advice} and {AGAIN}")


def _unwritable(directory: Path, error: OSError) -> DeviceError:
    return DeviceError(
        f"cannot write to {directory}: {error.strerror}; give another folder or change its rights"
    )


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def _free_bytes(directory: Path) -> int:
    """Free space on the disk that holds the folder, or will hold it."""
    existing = next(p for p in (directory, *directory.absolute().parents) if p.exists())
    return shutil.disk_usage(existing).free


def _gb(n_bytes: int) -> str:
    return f"{n_bytes / 1e9:,.1f} GB"
