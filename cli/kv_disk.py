"""The disk cache as commands name it: its folder, its space, and opening it for a model.

What is stored and when it goes is diskcache's part.
"""

import re
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING

from mlx_engine.cli.terminal import say
from mlx_engine.errors import BadRequest, CacheUnusable
from mlx_engine.folders import cache_directory, expanded

if TYPE_CHECKING:
    from mlx_engine.diskcache.cache import DiskCache
    from mlx_engine.loading import Dtype, OpenModel

SPACE = "64GB"

_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?(?:([KMGT])(i?))?B?", re.ASCII | re.IGNORECASE)


def parse_bytes(text: str) -> int:
    """Read a size as people write it: 64GB, 500 MB, 1.5TiB, or bytes; BadRequest otherwise."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise BadRequest(f"the size {text!r} cannot be read: write it as in 64GB or 500MB")
    number, letter, is_binary = match.groups()
    power = "BKMGT".index(letter.upper()) if letter else 0
    n_bytes = int(Decimal(number) * (1024 if is_binary else 1000) ** power)
    if n_bytes < 1:
        raise BadRequest(f"the size {text!r} is nothing: give at least a byte")
    return n_bytes


def kv_directory(named: str | None) -> Path | None:
    """The folder that --kv-disk-dir names: None for "none", the user's own where it is not given.

    A folder of the name none is ./none. Raises BadRequest for no name at all.
    """
    if named is None:
        return cache_directory() / "kv"
    if not named:
        raise BadRequest("--kv-disk-dir is empty: name a folder, or none")
    return None if named == "none" else expanded(Path(named))


def check_named(named: str | None, space_bytes: int) -> None:
    """Make the folder that --kv-disk-dir names. Raises CacheUnusable where it cannot be a cache's.

    One that nobody has named need not be usable: the work goes on without.
    """
    directory = None if named is None else kv_directory(named)
    if directory is None:
        return
    from mlx_engine.diskcache.files import Files
    from mlx_engine.diskcache.store import Store

    Store.open(directory, Files(), space_bytes, None).close()


@contextmanager
def kv_disk(
    opened: "OpenModel",
    dtype: "Dtype",
    directory: Path | None,
    space_bytes: int,
    signals: Sequence[int] = (),
) -> "Generator[DiskCache | None]":
    """Open the folder for a model, and write what is queued at the end.

    The end waits a minute at most, and only while the disk goes on; once `signals` holds one, for a
    few seconds, and with the second one not at all. Gives None without a folder, and where it
    cannot be used; the latter is said, and never ends the work. Raises ModelFileError for a
    checkpoint that cannot be read.
    """
    cache = None if directory is None else _open(opened, dtype, directory, space_bytes)
    try:
        yield cache
    finally:
        if cache is not None:
            drain(cache, signals)


def drain(cache: "DiskCache", signals: Sequence[int]) -> None:
    """Close a cache; how long that may take is for `signals` to say, which can grow meanwhile."""
    from mlx_engine.diskcache.cache import CLOSE_S

    cache.drain(lambda: bool(signals))
    cache.close(CLOSE_S if len(signals) < 2 else 0.0)


def _open(
    opened: "OpenModel", dtype: "Dtype", directory: Path, space_bytes: int
) -> "DiskCache | None":
    from mlx_engine.diskcache.cache import DiskCache
    from mlx_engine.fingerprint import fingerprint
    from mlx_engine.saving import LEAST_TOKENS
    from mlx_engine.state_transfer import parts, tail_bytes

    try:
        cache = DiskCache.open(
            directory,
            fingerprint=fingerprint(opened.checkpoint, dtype, cache_directory()),
            parts=parts(opened.config),
            space_bytes=space_bytes,
            least_tokens=LEAST_TOKENS,
            tail_bytes=tail_bytes(opened.config),
        )
    except CacheUnusable as error:
        say(f"the disk cache is off: {error}")
        return None
    notice = cache.stats().notice
    if notice is not None:
        say(notice)
    return cache
