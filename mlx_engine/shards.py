"""The safetensors files of a checkpoint directory: which tensor lies where.

Reads the index and the shards' headers, never the data: the loader and the Engram reader want file
offsets. Every header is checked against its file's size and against the index. Which tensors a
model needs is checkpoint's part.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, cast

from mlx_engine.errors import ModelFileError
from mlx_engine.inventory import DTYPE_BYTES
from mlx_engine.json_file import read_json, require_file

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

# The format's own limit; a released shard's header has a few hundred kilobytes.
MAX_HEADER_BYTES = 100_000_000
MAX_EXAMPLES = 10


@dataclass(frozen=True)
class TensorLocation:
    """Where a tensor's data is: `n_bytes` from `offset` in the file `path`.

    `dtype` is the safetensors name.
    """

    path: Path
    offset: int
    n_bytes: int
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Listing:
    """The tensors of a directory, and all that is wrong with its files, a sentence each.

    `unreadable` names the tensors that the index places in files whose header cannot be used.
    """

    locations: Mapping[str, TensorLocation]
    problems: tuple[str, ...]
    unreadable: frozenset[str]


def list_tensors(directory: Path) -> Listing:
    """List the tensors of the shards that the index names, or of a lone `model.safetensors`.

    Raises ModelFileError when the directory or its index cannot be read.
    """
    if not directory.is_dir():
        raise ModelFileError(
            f"{directory} is no directory; give the folder that holds the checkpoint"
        )
    index_path = directory / INDEX_NAME
    if not index_path.exists():
        if not (directory / SINGLE_NAME).exists():
            raise ModelFileError(
                f"{directory} has neither {INDEX_NAME} nor {SINGLE_NAME}; "
                "give the folder that holds the checkpoint, or fetch it again"
            )
        return Listing(read_header(directory / SINGLE_NAME), (), frozenset())
    names_of: dict[str, list[str]] = defaultdict(list)
    for name, shard in _read_index(index_path).items():
        names_of[shard].append(name)
    locations: dict[str, TensorLocation] = {}
    problems: list[str] = []
    unreadable: set[str] = set()
    for shard, names in sorted(names_of.items()):
        try:
            found = read_header(directory / shard)
        except ModelFileError as error:
            problems.append(str(error))
            unreadable.update(names)
            continue
        absent, unlisted = sorted(set(names) - set(found)), sorted(set(found) - set(names))
        if absent:
            problems.append(
                f"{directory / shard} lacks what the index places in it: {some(absent)}"
            )
            unreadable.update(absent)
        if unlisted:
            problems.append(
                f"{directory / shard} holds what the index does not place in it: {some(unlisted)}"
            )
        locations |= {name: found[name] for name in names if name in found}
    return Listing(locations, tuple(problems), frozenset(unreadable))


def read_header(path: Path) -> dict[str, TensorLocation]:
    """Parse a safetensors header: u64 length, JSON, then data that the tensors fill completely.

    Raises ModelFileError for a file that is missing, truncated or not in that format.
    """
    try:
        require_file(path)
        with path.open("rb") as file:
            file_bytes = path.stat().st_size
            header_bytes = int.from_bytes(file.read(8), "little")
            if file_bytes < 8:
                raise ModelFileError(
                    f"{path} is truncated after {file_bytes} bytes; fetch it again"
                )
            if header_bytes > MAX_HEADER_BYTES:
                raise ModelFileError(
                    f"{path} is no safetensors file: it announces a header of {header_bytes:,} "
                    f"bytes, the limit is {MAX_HEADER_BYTES:,}; fetch it again"
                )
            if 8 + header_bytes > file_bytes:
                raise ModelFileError(
                    f"{path} is truncated within its header: it has {file_bytes:,} bytes of at "
                    f"least {8 + header_bytes:,}; fetch it again"
                )
            text = file.read(header_bytes)
    except FileNotFoundError:
        raise ModelFileError(f"{path} is missing; fetch it again") from None
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read: {error.strerror}") from None
    try:
        header = json.loads(text)
    except (ValueError, RecursionError):
        raise ModelFileError(f"{path} has a header that is not JSON; fetch it again") from None
    if not isinstance(header, dict):
        raise ModelFileError(f"{path} has a header that is no JSON object; fetch it again")
    entries = cast("dict[str, Any]", header)
    entries.pop("__metadata__", None)
    start = 8 + header_bytes
    locations = {name: _location(path, start, name, entry) for name, entry in entries.items()}
    _check_coverage(path, start, file_bytes, locations)
    return locations


def some(items: Iterable[str]) -> str:
    """The first few items of a list and how many more there are."""
    listed = list(items)
    more = len(listed) - MAX_EXAMPLES
    return ", ".join(listed[:MAX_EXAMPLES]) + (f" and {more:,} more" if more > 0 else "")


def _read_index(path: Path) -> dict[str, str]:
    try:
        index = read_json(path)
    except FileNotFoundError:
        raise ModelFileError(f"{path} is missing; fetch it again") from None
    found = cast("dict[str, Any]", index).get("weight_map") if isinstance(index, dict) else None
    if not isinstance(found, dict) or not found:
        raise ModelFileError(f"{path} has no weight_map of tensors to shards; fetch it again")
    weight_map = cast("dict[str, Any]", found)
    for name, shard in weight_map.items():
        # A shard is a file beside the index: a name that leads elsewhere is not followed.
        is_plain = isinstance(shard, str) and shard.isprintable() and Path(shard).name == shard
        if not is_plain:
            raise ModelFileError(
                f"{path} places {name} in {shard!r}, which is no file name; fetch it again"
            )
    return cast("dict[str, str]", weight_map)


def _location(path: Path, start: int, name: str, entry: Any) -> TensorLocation:
    """One entry of a header, checked in itself: types, order of offsets, bytes for the shape."""
    fields = cast("dict[str, Any]", entry if isinstance(entry, dict) else {})
    dtype = fields.get("dtype")
    shape, offsets = _sizes(fields.get("shape")), _sizes(fields.get("data_offsets"))
    if not isinstance(dtype, str) or shape is None or offsets is None:
        raise ModelFileError(f"{path} has a malformed header entry for {name}; fetch it again")
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ModelFileError(
            f"{path} has data offsets {offsets} for {name}, not a start and an end; fetch it again"
        )
    n_bytes = offsets[1] - offsets[0]
    # A dtype that the release does not have is the checkpoint's check to refuse.
    if dtype in DTYPE_BYTES and n_bytes != prod(shape) * DTYPE_BYTES[dtype]:
        raise ModelFileError(
            f"{path} has {n_bytes:,} bytes for {name}, but {dtype} {shape} takes "
            f"{prod(shape) * DTYPE_BYTES[dtype]:,}; fetch it again"
        )
    return TensorLocation(path, start + offsets[0], n_bytes, dtype, tuple(shape))


def _sizes(value: Any) -> list[int] | None:
    """The value if it is a list of integers from 0 up."""
    if not isinstance(value, list):
        return None
    items = cast("list[Any]", value)
    is_sizes = all(type(item) is int and item >= 0 for item in items)
    return items if is_sizes else None


def _check_coverage(
    path: Path, start: int, file_bytes: int, locations: Mapping[str, TensorLocation]
) -> None:
    """Refuse a file whose tensors overlap, leave a hole, or end elsewhere than the file."""
    reached, before = start, "the header"
    for name, at in sorted(locations.items(), key=lambda item: (item[1].offset, item[1].n_bytes)):
        if at.offset + at.n_bytes > file_bytes:
            raise ModelFileError(
                f"{path} is truncated: {name} ends at byte {at.offset + at.n_bytes:,}, "
                f"the file at {file_bytes:,}; fetch it again"
            )
        if at.offset != reached:
            fault = "overlaps" if at.offset < reached else "leaves a hole after"
            raise ModelFileError(f"{path} is damaged: {name} {fault} {before}; fetch it again")
        reached, before = at.offset + at.n_bytes, name
    if reached != file_bytes:
        raise ModelFileError(
            f"{path} is damaged: {file_bytes - reached:,} bytes after its last tensor belong to "
            "none; fetch it again"
        )
