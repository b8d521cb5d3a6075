"""The bytes of the cache's files, and the keys that tie them to tokens.

A segment holds the rows of at most BLOCK_TOKENS tokens and their ids, a tail what rows do not hold,
an anchor names the segments that lead to a tail. The key of a position is a SHA-256 chained over
the blocks of ids before it, from a root that stands for the format, the weights and the parts. The
digests of contents are XXH3: against accident, not against attack. Nothing here touches a file.
"""

import hashlib
import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import xxhash
from numpy.typing import NDArray

from mlx_engine.diskcache import names
from mlx_engine.diskcache.files import Buffer
from mlx_engine.diskcache.names import Object
from mlx_engine.errors import CacheCorrupt

TokenIds: TypeAlias = NDArray[np.uint32]

FORMAT_VERSION = 1
BLOCK_TOKENS = 2048
KEY_BYTES = 32
TOKEN_BYTES = 4

_MAGIC = b"ds41-kv\0"
_FIXED = struct.Struct("<8sHHII32s32s")
_SECTION = struct.Struct("<Q16s")
_SEGMENT = struct.Struct("<QQ32s")
_TAIL = struct.Struct("<Q")
_ANCHOR = struct.Struct("<QQdd32s")
_USE = struct.Struct("<32s32sHHI")
_RECORD = struct.Struct("<d")
_HIT = struct.Struct("<32sdd")
_DIGEST_BYTES = 16


class OtherVersion(CacheCorrupt):
    """A file says that it is of another version of the formats."""


@dataclass(frozen=True, slots=True)
class Part:
    """One growing array of the model's state: a row of `row_bytes` for every `ratio` tokens."""

    ratio: int
    row_bytes: int

    def n_bytes(self, first: int, last: int) -> int:
        """Bytes of the rows that the tokens [first, last) complete."""
        return (last // self.ratio - first // self.ratio) * self.row_bytes


Parts: TypeAlias = tuple[Part, ...]


def step_tokens(parts: Parts) -> int:
    """Anchors and segments end at multiples of this many tokens, where no group is half full."""
    return math.lcm(*(part.ratio for part in parts))


class SegmentId(NamedTuple):
    """A segment by the key of the position that it ends at, and how many tokens it holds."""

    key: bytes
    tokens: int

    @property
    def name(self) -> str:
        return names.segment_name(self.key, self.tokens)


class Use(NamedTuple):
    """The first tokens of a segment as a step of a path: up to position `end`, whose key is `key`.

    `segment_bytes` is the size of the segment's file.
    """

    key: bytes
    end: int
    segment: SegmentId
    tokens: int
    segment_bytes: int

    @property
    def first(self) -> int:
        return self.end - self.tokens


@dataclass(frozen=True, slots=True)
class AnchorFile:
    """What an anchor's file says: the parent it stands on and the steps from there to itself.

    The parent's key is empty for an anchor that stands on nothing. `token_s` is how many seconds a
    prefill took for each token before it.
    """

    key: bytes
    position: int
    parent_key: bytes
    parent_position: int
    created_s: float
    token_s: float
    uses: tuple[Use, ...]


@dataclass(frozen=True, slots=True)
class Header:
    """A file's own account of itself."""

    root: bytes
    key: bytes
    meta: bytes
    lengths: tuple[int, ...]
    digests: tuple[bytes, ...]
    n_bytes: int

    @property
    def file_bytes(self) -> int:
        return self.n_bytes + sum(self.lengths)


def root_key(fingerprint: bytes, parts: Parts, salt: bytes = b"") -> bytes:
    """The key of position 0: other formats, weights, parts or salts have nothing in common."""
    shape = struct.pack(f"<HII{2 * len(parts)}I", FORMAT_VERSION, BLOCK_TOKENS, len(parts),
                        *(n for part in parts for n in (part.ratio, part.row_bytes)))  # fmt: skip
    key = hashlib.sha256(_MAGIC + shape + fingerprint).digest()
    return hashlib.sha256(key + salt).digest() if salt else key


class PrefixKeys:
    """The keys of ascending positions inside one block, whose start has the key `block_key`."""

    def __init__(self, block_key: bytes) -> None:
        self._hash = hashlib.sha256(block_key)

    def after(self, ids: TokenIds) -> bytes:
        """The key of the position behind these ids, which follow those given before."""
        self._hash.update(ids.data)
        return self._hash.digest()


def pieces(first: int, last: int) -> Iterator[tuple[int, int]]:
    """[first, last) cut at the edges of blocks."""
    while first < last:
        end = min(last, (first // BLOCK_TOKENS + 1) * BLOCK_TOKENS)
        yield first, end
        first = end


def as_token_ids(token_ids: Any) -> TokenIds:
    """Ids as one contiguous little-endian array."""
    return np.ascontiguousarray(token_ids, dtype="<u4")


def segment_file_bytes(parts: Parts, first: int, last: int) -> int:
    """The size of a segment's file."""
    rows = sum(part.n_bytes(first, last) for part in parts)
    return segment_header_bytes(parts) + (last - first) * TOKEN_BYTES + rows


def segment_header_bytes(parts: Parts) -> int:
    """Where the ids of a segment start."""
    return _header_bytes(_SEGMENT.size, 1 + len(parts))


TAIL_HEADER_BYTES = _FIXED.size + _TAIL.size + _SECTION.size + _DIGEST_BYTES


def anchor_file_bytes(uses: int) -> int:
    """The size of an anchor's file."""
    return _header_bytes(_ANCHOR.size, 1) + uses * _USE.size


def anchor_bytes(parts: Parts, tokens: int, tail_bytes: int) -> int:
    """All files of an anchor at `tokens` that shares nothing."""
    return most_bytes(parts, 0, tokens, tokens) + TAIL_HEADER_BYTES + tail_bytes


def most_bytes(parts: Parts, first: int, last: int, least_tokens: int) -> int:
    """What the tokens [first, last) take at most, but for tails.

    An anchor at every `least_tokens` has a file, and cuts a segment in two.
    """
    anchors = -(-(last - first) // least_tokens)
    segments = sum(1 for _ in pieces(first, last)) + anchors - 1
    rows = sum(part.n_bytes(first, last) for part in parts)
    heads = segments * (segment_header_bytes(parts) + _USE.size) + anchors * anchor_file_bytes(0)
    return rows + (last - first) * TOKEN_BYTES + heads


def encode_segment(
    root: bytes,
    segment: SegmentId,
    first: int,
    first_key: bytes,
    ids: TokenIds,
    rows: Sequence[Buffer],
) -> list[Buffer]:
    """A segment's file, its header first; `first_key` is the key of position `first`."""
    meta = _SEGMENT.pack(first, first + len(ids), first_key)
    return _encode(Object.SEGMENT, root, segment.key, meta, [ids.data, *rows])


def decode_segment(header: Header) -> tuple[int, int, bytes]:
    """First and last token of a segment, and the key of the first."""
    return _SEGMENT.unpack(header.meta)


def encode_tail(root: bytes, key: bytes, position: int, tail: Buffer) -> list[Buffer]:
    """A tail's file."""
    return _encode(Object.TAIL, root, key, _TAIL.pack(position), [tail])


def decode_tail(header: Header) -> int:
    """The position that a tail belongs to."""
    return _TAIL.unpack(header.meta)[0]


def encode_anchor(root: bytes, anchor: AnchorFile) -> list[Buffer]:
    """An anchor's file."""
    parent_key = anchor.parent_key or bytes(KEY_BYTES)
    meta = _ANCHOR.pack(
        anchor.position, anchor.parent_position, anchor.created_s, anchor.token_s, parent_key
    )
    uses = b"".join(
        _USE.pack(use.key, use.segment.key, use.tokens, use.segment.tokens, use.segment_bytes)
        for use in anchor.uses
    )
    return _encode(Object.ANCHOR, root, anchor.key, meta, [uses])


def decode_anchor(data: Buffer, key: bytes, root: bytes | None = None) -> AnchorFile:
    """Read an anchor's file whole; CacheCorrupt if it is not what it should be."""
    header, (section,) = decode_whole(data, Object.ANCHOR, key, root)
    position, parent_position, created_s, token_s, parent_key = _ANCHOR.unpack(header.meta)
    uses: list[Use] = []
    end = parent_position
    for use_key, segment_key, tokens, segment_tokens, segment_bytes in _USE.iter_unpack(section):
        end += tokens
        segment = SegmentId(segment_key, segment_tokens)
        uses.append(Use(use_key, end, segment, tokens, segment_bytes))
    last_key = uses[-1].key if uses else b""
    are_sane = math.isfinite(created_s) and 0 <= token_s < math.inf
    if end != position or last_key != key or not are_sane:
        raise CacheCorrupt("its steps do not lead to its position")
    if not parent_position:
        parent_key = b""
    return AnchorFile(key, position, parent_key, parent_position, created_s, token_s, tuple(uses))


def encode_record(root: bytes, key: bytes, created_s: float, ids: TokenIds) -> list[Buffer]:
    """The file of one turn's exact tokens."""
    return _encode(Object.RECORD, root, key, _RECORD.pack(created_s), [ids.data])


def decode_record(data: Buffer, key: bytes, root: bytes) -> tuple[float, TokenIds]:
    """When a turn was recorded, and its tokens; CacheCorrupt."""
    header, (section,) = decode_whole(data, Object.RECORD, key, root)
    (created_s,) = _RECORD.unpack(header.meta)
    return created_s, np.frombuffer(section, dtype="<u4")


def encode_hits(root: bytes, hits: Sequence[tuple[bytes, float, float]]) -> list[Buffer]:
    """The file of how often anchors were of use: (key, decayed hits, when that was counted)."""
    return _encode(Object.HITS, root, root, b"", [b"".join(_HIT.pack(*hit) for hit in hits)])


def decode_hits(data: Buffer, root: bytes | None = None) -> list[tuple[bytes, float, float]]:
    """Read the file of hits; CacheCorrupt."""
    _, (section,) = decode_whole(data, Object.HITS, root, root)
    if len(section) % _HIT.size:
        raise CacheCorrupt("its table ends in the middle of an entry")
    return list(_HIT.iter_unpack(section))


def decode_whole(
    data: Buffer, kind: Object, key: bytes | None = None, root: bytes | None = None
) -> tuple[Header, list[memoryview]]:
    """Header and sections of a whole file, every digest compared; CacheCorrupt."""
    header = decode_header(data, kind, key, root)
    if len(data) != header.file_bytes:
        raise CacheCorrupt(f"it holds {len(data)} bytes and should hold {header.file_bytes}")
    sections: list[memoryview] = []
    start = header.n_bytes
    for length, digest in zip(header.lengths, header.digests, strict=True):
        sections.append(memoryview(data)[start : start + length])
        start += length
        check_digest(sections[-1], digest)
    return header, sections


def decode_header(
    data: Buffer, kind: Object, key: bytes | None = None, root: bytes | None = None
) -> Header:
    """The header at a file's start, checked; a key or root of None may be any. CacheCorrupt."""
    if len(data) < _FIXED.size:
        raise CacheCorrupt("it ends within its header")
    magic, version, found_kind, meta_bytes, sections, found_root, found_key = _FIXED.unpack_from(
        data
    )
    if magic != _MAGIC:
        raise CacheCorrupt("it is not a file of this cache")
    if version != FORMAT_VERSION:
        raise OtherVersion(f"it has format version {version}, which is not {FORMAT_VERSION}")
    end = _header_bytes(meta_bytes, sections)
    if len(data) < end:
        raise CacheCorrupt("it ends within its header")
    check_digest(memoryview(data)[: end - _DIGEST_BYTES], bytes(data[end - _DIGEST_BYTES : end]))
    if found_kind != kind or (key or found_key) != found_key or (root or found_root) != found_root:
        raise CacheCorrupt("it is a file of this cache under the wrong name")
    meta_end = _FIXED.size + meta_bytes
    table = list(_SECTION.iter_unpack(data[meta_end : end - _DIGEST_BYTES]))
    lengths, digests = zip(*table, strict=True)
    return Header(found_root, found_key, bytes(data[_FIXED.size : meta_end]), lengths, digests, end)


def check_digest(content: Buffer, digest: bytes) -> None:
    """CacheCorrupt unless the content has this digest."""
    if xxhash.xxh3_128_digest(content) != digest:
        raise CacheCorrupt("its content does not match its digest")


def _encode(
    kind: Object, root: bytes, key: bytes, meta: bytes, sections: Sequence[Buffer]
) -> list[Buffer]:
    header = _FIXED.pack(_MAGIC, FORMAT_VERSION, kind, len(meta), len(sections), root, key) + meta
    for section in sections:
        header += _SECTION.pack(memoryview(section).nbytes, xxhash.xxh3_128_digest(section))
    return [header + xxhash.xxh3_128_digest(header), *sections]


def _header_bytes(meta_bytes: int, sections: int) -> int:
    return _FIXED.size + meta_bytes + sections * _SECTION.size + _DIGEST_BYTES
