"""The bytes of every kind of file: as they are written, and refused when a single one is wrong."""

import dataclasses
import hashlib
from collections.abc import Callable

import numpy as np
import pytest

from mlx_engine.diskcache import layout, names
from mlx_engine.diskcache.files import Buffer
from mlx_engine.diskcache.layout import (
    BLOCK_TOKENS,
    AnchorFile,
    Part,
    PrefixKeys,
    SegmentId,
    Use,
    as_token_ids,
)
from mlx_engine.diskcache.names import Object
from mlx_engine.errors import CacheCorrupt

PARTS = (Part(2, 8), Part(1, 3))
ROOT = layout.root_key(b"weights", PARTS)
KEY = bytes(range(32))
IDS = as_token_ids([5, 0, 129_279, 7])
USES = (
    Use(bytes(32), 10, SegmentId(b"\1" * 32, 2048), 6, 9000),
    Use(KEY, 14, SegmentId(KEY, 4), 4, 300),
)
ANCHOR = AnchorFile(KEY, 14, b"\2" * 32, 4, 1_700_000_000.5, 0.25, USES)
ROWS: list[Buffer] = [bytes(range(16)), bytes(range(100, 112))]
SEGMENT = SegmentId(KEY, 4)


def joined(buffers: list[Buffer]) -> bytes:
    return b"".join(bytes(memoryview(buffer).cast("B")) for buffer in buffers)


FILES: dict[str, tuple[bytes, Callable[[bytes], object]]] = {
    "segment": (
        joined(layout.encode_segment(ROOT, SEGMENT, 10, b"\3" * 32, IDS, ROWS)),
        lambda data: layout.decode_whole(data, Object.SEGMENT, KEY, ROOT),
    ),
    "tail": (
        joined(layout.encode_tail(ROOT, KEY, 14, b"what rows leave out")),
        lambda data: layout.decode_whole(data, Object.TAIL, KEY, ROOT),
    ),
    "anchor": (
        joined(layout.encode_anchor(ROOT, ANCHOR)),
        lambda data: layout.decode_anchor(data, KEY, ROOT),
    ),
    "record": (
        joined(layout.encode_record(ROOT, KEY, 1.5, IDS)),
        lambda data: layout.decode_record(data, KEY, ROOT),
    ),
    "hits": (
        joined(layout.encode_hits(ROOT, [(KEY, 2.5, 1e9)])),
        lambda data: layout.decode_hits(data, ROOT),
    ),
}
# Another format needs another FORMAT_VERSION, and a line here.
GOLDEN = {
    1: {
        "segment": "9fd6566ea51e57ab75b77c6f7cf1e4f0",
        "tail": "796c6bcba060ad48060d22743cf1cb8d",
        "anchor": "23f4bc1520511529b740d7892cb28a1e",
        "record": "c43042f5db7c8432e8e78e9d6301bd13",
        "hits": "6bdc35ff33195ecf8f74cc749d29a51e",
    }
}


@pytest.mark.parametrize("kind", FILES)
def test_a_version_has_one_form(kind: str) -> None:
    digest = hashlib.sha256(FILES[kind][0]).hexdigest()[:32]
    assert digest == GOLDEN[layout.FORMAT_VERSION][kind]


def test_what_is_encoded_is_decoded() -> None:
    header, (ids, *rows) = layout.decode_whole(FILES["segment"][0], Object.SEGMENT, KEY, ROOT)
    assert layout.decode_segment(header) == (10, 14, b"\3" * 32)
    assert np.array_equal(np.frombuffer(ids, "<u4"), IDS)
    assert [bytes(row) for row in rows] == ROWS
    header, (tail,) = layout.decode_whole(FILES["tail"][0], Object.TAIL, KEY, ROOT)
    assert (layout.decode_tail(header), bytes(tail)) == (14, b"what rows leave out")
    assert layout.decode_anchor(FILES["anchor"][0], KEY, ROOT) == ANCHOR
    created_s, recorded = layout.decode_record(FILES["record"][0], KEY, ROOT)
    assert created_s == 1.5
    assert np.array_equal(recorded, IDS)
    assert layout.decode_hits(FILES["hits"][0], ROOT) == [(KEY, 2.5, 1e9)]


def test_the_sizes_are_known_before() -> None:
    assert len(FILES["segment"][0]) == layout.segment_file_bytes(PARTS, 10, 14)
    assert len(FILES["anchor"][0]) == layout.anchor_file_bytes(len(USES))


@pytest.mark.parametrize("kind", FILES)
def test_no_changed_byte_passes(kind: str) -> None:
    data, decode = FILES[kind]
    decode(data)
    for at in range(len(data)):
        for mask in (0x01, 0x80):
            with pytest.raises(CacheCorrupt):
                decode(data[:at] + bytes([data[at] ^ mask]) + data[at + 1 :])


@pytest.mark.parametrize("kind", FILES)
def test_no_other_length_passes(kind: str) -> None:
    data, decode = FILES[kind]
    for length in range(len(data)):
        with pytest.raises(CacheCorrupt):
            decode(data[:length])
    with pytest.raises(CacheCorrupt):
        decode(data + b"\0")


@pytest.mark.parametrize("kind", FILES)
def test_another_version_is_named(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data, decode = FILES[kind]
    monkeypatch.setattr(layout, "FORMAT_VERSION", 0)
    with pytest.raises(CacheCorrupt, match="format version 1"):
        decode(data)


def test_a_file_under_another_name_is_refused() -> None:
    data = FILES["tail"][0]
    for kind, key, root in (
        (Object.ANCHOR, KEY, ROOT),
        (Object.TAIL, bytes(32), ROOT),
        (Object.TAIL, KEY, KEY),
    ):
        with pytest.raises(CacheCorrupt, match="wrong name"):
            layout.decode_header(data, kind, key, root)


@pytest.mark.parametrize(
    "change",
    [
        {"position": 16},
        {"uses": USES[:1]},
        {"uses": ()},
        {"created_s": float("nan")},
        {"token_s": -1.0},
        {"token_s": float("inf")},
    ],
)
def test_an_anchor_that_makes_no_sense_is_refused(change: dict[str, object]) -> None:
    data = joined(layout.encode_anchor(ROOT, dataclasses.replace(ANCHOR, **change)))
    with pytest.raises(CacheCorrupt):
        layout.decode_anchor(data, KEY, ROOT)


def test_a_root_stands_for_weights_and_parts() -> None:
    others = [
        layout.root_key(b"other", PARTS),
        layout.root_key(b"weights", PARTS[:1]),
        layout.root_key(b"weights", (Part(1, 8), Part(2, 3))),
    ]
    assert len({ROOT, *others}) == 4
    assert len({names.folder_name(root) for root in (ROOT, *others)}) == 4


def test_a_key_depends_on_every_token_and_on_no_cut() -> None:
    ids = as_token_ids(np.arange(100))
    whole = PrefixKeys(ROOT).after(ids)
    for cut in (1, 50, 99):
        keys = PrefixKeys(ROOT)
        keys.after(ids[:cut])
        assert keys.after(ids[cut:]) == whole
    changed = ids.copy()
    changed[37] += 1
    assert PrefixKeys(ROOT).after(changed) != whole
    assert PrefixKeys(ROOT).after(ids[:-1]) != whole
    assert PrefixKeys(KEY).after(ids) != whole


def test_pieces_end_at_the_edges_of_blocks() -> None:
    assert list(layout.pieces(0, 0)) == []
    assert list(layout.pieces(6, 10)) == [(6, 10)]
    edges = list(layout.pieces(2046, 2 * BLOCK_TOKENS + 2))
    assert edges == [(2046, 2048), (2048, 4096), (4096, 4098)]


def test_only_our_names_are_ours() -> None:
    key = "0123456789abcdef" * 4
    objects = {
        f"{key}-0800.segment": Object.SEGMENT,
        f"{key}.tail": Object.TAIL,
        f"{key}.anchor": Object.ANCHOR,
        f"{key}.record": Object.RECORD,
        "hits.table": Object.HITS,
    }
    for name, kind in objects.items():
        assert names.object_kind(name) is kind
        assert names.is_name(name)
        aside = names.damaged_name(name)
        assert names.is_damaged(aside)
        assert names.object_kind(aside) is None
    assert names.is_left_over(names.partial_name(12))
    foreign = (
        f"{key}.tails",
        f"{key.upper()}.tail",
        f"{key[1:]}.tail",
        f" {key}.tail",
        f"{key}.tail\n",
        f"{key}-800.segment",
        f"{key}.segment",
        "notes.damaged",
        "x.partial",
        ".DS_Store",
        "CACHEDIR.TAG",
        "hits.table~",
    )
    for name in foreign:
        assert not names.is_name(name), name
    assert names.is_folder_name(names.folder_name(ROOT))
    for name in ("kv-", f"kv-{key}", "kv-" + "G" * 32, "models"):
        assert not names.is_folder_name(name)
