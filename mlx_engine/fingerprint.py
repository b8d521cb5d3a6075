"""The fingerprint of a checkpoint and of what is computed with it.

Two runs with the same fingerprint may use each other's session states. Owns what counts for that,
and the memo that spares reading the shards at every start; where states are kept is diskcache's
part. The 510 GB of the release cannot be read at a start, so shards are sampled, and small tensors
read whole, since an edited router bias or norm hides between samples: a change of other bytes that
lie in no sample is not noticed, as long as the file keeps its size.
"""

import hashlib
import json
import logging
import os
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from pathlib import Path
from typing import Any, TypeAlias, cast

from mlx_engine.cache_file import read_sealed, write_sealed
from mlx_engine.checkpoint import Checkpoint
from mlx_engine.errors import CacheCorrupt, ModelFileError

Pieces: TypeAlias = list[tuple[int, int]]

log = logging.getLogger(__name__)

# Raise it when the same weights and tokens come to give other states than by rounding.
NUMERICS_VERSION = 1
# Raise it when the bytes of a stored state come to mean something else.
STATE_FORMATS_VERSION = 1

# The first, the last, and 64 spread evenly between them.
PIECE_BYTES = 64 * 1024
N_PIECES = 66

# A tensor below this is read whole.
SMALL_BYTES = 64 * 1024
# Small tensors that lie no further apart are read at once, and what is between them too.
_GAP_BYTES = 4096

# Part of the memo's digest: raise it when a shard's digest is made in another way.
_MEMO_VERSION = b"ds41 shard digests 2"
# A file may change again within the clock tick of its last change, and its times not tell.
_SETTLED_NS = 2 * 10**9
_READERS = 8


def fingerprint(checkpoint: Checkpoint, dtype: str, cache_dir: Path | None) -> bytes:
    """Return 32 bytes that differ where states of two runs cannot stand for each other.

    They cover config.json, tokenizer.json, the dtype of the activations, the versions of numerics
    and formats, and of every shard its name, size, header, samples and small tensors. A shard's
    part is kept in `cache_dir` (None for nowhere) under the file's inode, size and times of change,
    so that a file with restored times is read again, and one that is only renamed too. Raises
    ModelFileError for a file that cannot be read.
    """
    parts = [
        f"numerics {NUMERICS_VERSION}, formats {STATE_FORMATS_VERSION}, {dtype}".encode(),
        _read(checkpoint.directory / "config.json"),
        _read(checkpoint.directory / "tokenizer.json"),
    ]
    small: dict[Path, list[tuple[int, int]]] = {}
    for at in checkpoint.locations.values():
        ranges = small.setdefault(at.path, [])
        if at.n_bytes < SMALL_BYTES:
            ranges.append((at.offset, at.n_bytes))
    paths = sorted(small)
    pieces = [_merged(small[path]) for path in paths]
    digests = _shard_digests(checkpoint.directory, paths, pieces, cache_dir)
    for path, digest in zip(paths, digests, strict=True):
        parts += [path.name.encode(), digest]
    whole = hashlib.sha256()
    for part in parts:
        whole.update(len(part).to_bytes(8, "little") + part)
    return whole.digest()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> ModelFileError:
    return ModelFileError(f"{path} cannot be read: {error.strerror}; check the disk")


def _merged(ranges: list[tuple[int, int]]) -> Pieces:
    """Offsets and lengths that cover those given, ascending, near ones as one."""
    merged: Pieces = []
    for offset, n_bytes in sorted(ranges):
        if merged and offset <= sum(merged[-1]) + _GAP_BYTES:
            start, before = merged[-1]
            merged[-1] = start, max(before, offset + n_bytes - start)
        else:
            merged.append((offset, n_bytes))
    return merged


def _shard_digests(
    directory: Path, paths: list[Path], pieces: list[Pieces], cache_dir: Path | None
) -> list[bytes]:
    memo_path = _memo_path(directory, cache_dir) if cache_dir else None
    memo = _read_memo(memo_path) if memo_path else {}
    now_ns = time.time_ns()
    with ThreadPoolExecutor(_READERS, thread_name_prefix="ds41-fingerprint") as pool:
        found = list(pool.map(_shard_digest, paths, pieces, repeat(memo)))
    settled = {
        _stamp(stat): digest.hex()
        for stat, digest in found
        if max(stat.st_ctime_ns, stat.st_mtime_ns) < now_ns - _SETTLED_NS
    }
    if memo_path and settled != memo:
        _write_memo(memo_path, settled)
    return [digest for _, digest in found]


def _shard_digest(
    path: Path, pieces: Pieces, memo: Mapping[str, str]
) -> tuple[os.stat_result, bytes]:
    """The digest of a shard's header, samples and `pieces`, and the file that it was of."""
    try:
        with path.open("rb", buffering=0) as file:
            stat = os.fstat(file.fileno())
            known = memo.get(_stamp(stat))
            if known is not None:
                return stat, bytes.fromhex(known)
            digest = hashlib.sha256(stat.st_size.to_bytes(8, "little"))
            for offset, n_bytes in (*_samples(file.fileno(), stat.st_size), *pieces):
                piece = os.pread(file.fileno(), n_bytes, offset)
                if len(piece) != n_bytes:
                    raise ModelFileError(f"{path} became shorter while it was read; fetch it again")
                digest.update(piece)
    except OSError as error:
        raise _unreadable(path, error) from error
    return stat, digest.digest()


def _samples(file: int, file_bytes: int) -> Iterator[tuple[int, int]]:
    """Offset and length of the header, then of the pieces of what follows it."""
    start = min(8 + int.from_bytes(os.pread(file, 8, 0), "little"), file_bytes)
    yield 0, start
    n_bytes = file_bytes - start
    if n_bytes <= N_PIECES * PIECE_BYTES:
        yield start, n_bytes
        return
    for i in range(N_PIECES):
        yield start + (n_bytes - PIECE_BYTES) * i // (N_PIECES - 1), PIECE_BYTES


def _stamp(stat: os.stat_result) -> str:
    # The time of the last status change is the one that nobody can set.
    return f"{stat.st_ino} {stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns}"


def _memo_path(directory: Path, cache_dir: Path) -> Path:
    name = hashlib.sha256(os.fsencode(directory.resolve())).hexdigest()[:16]
    return cache_dir / f"shard_digests-{name}.bin"


def _read_memo(path: Path) -> dict[str, str]:
    """The digests in a memo; none where it is absent, damaged or of another version."""
    try:
        return cast("dict[str, Any]", json.loads(read_sealed(path, _MEMO_VERSION)))
    except (OSError, CacheCorrupt):
        return {}


def _write_memo(path: Path, digests: Mapping[str, str]) -> None:
    try:
        write_sealed(path, _MEMO_VERSION, json.dumps(digests).encode())
    except OSError as error:
        log.warning("the digests of the shards are not kept, %s: %s", path, error.strerror)
