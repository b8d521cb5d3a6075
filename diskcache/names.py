"""The names in the cache's folder: which are ours, and what each of ours stands for.

Every name of ours has a strict pattern; whatever does not match one is foreign and stays.
"""

import re
from enum import IntEnum

_KEY_BYTES = 32

MARKER_NAME = "CACHEDIR.TAG"
# The first line makes backup programs leave the folder out (https://bford.info/cachedir/).
MARKER_START = b"Signature: 8a477f597d28d172789f06886806bc55\n# The key-value cache of ds41."
MARKER = MARKER_START + (
    b" Its files hold token ids, which can be turned back into\n"
    b"# the text of prompts and answers. `ds41 cache purge` deletes them.\n"
)
LOCK_NAME = "ds41-kv.lock"
# Keeps the folder out of Spotlight's index on a Mac.
NO_INDEX_NAME = ".metadata_never_index"
HITS_NAME = "hits.table"
_FOLDER_NAME = re.compile(r"kv-[0-9a-f]{32}")
_OBJECT_NAME = re.compile(
    r"(?P<key>[0-9a-f]{64})(?:-(?P<tokens>[0-9a-f]{4})\.segment|\.(?P<kind>tail|anchor|record))"
)
_TAIL_ENDING, _ANCHOR_ENDING = ".tail", ".anchor"
_PARTIAL_NAME = re.compile(r"[0-9]+\.partial")
_DAMAGED_ANCHOR = f"{_ANCHOR_ENDING}.damaged"
_DAMAGED_NAME = re.compile(rf"(?:{_OBJECT_NAME.pattern}|hits\.table)\.damaged")


class Object(IntEnum):
    """The kinds of file, as their headers number them."""

    SEGMENT = 1
    TAIL = 2
    ANCHOR = 3
    RECORD = 4
    HITS = 5


_KINDS_BY_ENDING = {
    "segment": Object.SEGMENT,
    "tail": Object.TAIL,
    "anchor": Object.ANCHOR,
    "record": Object.RECORD,
    "table": Object.HITS,
}
_KINDS = {
    None: Object.SEGMENT,
    "tail": Object.TAIL,
    "anchor": Object.ANCHOR,
    "record": Object.RECORD,
}


def segment_name(key: bytes, tokens: int) -> str:
    return f"{key.hex()}-{tokens:04x}.segment"


def tail_name(key: bytes) -> str:
    return f"{key.hex()}{_TAIL_ENDING}"


def anchor_name(key: bytes) -> str:
    return f"{key.hex()}{_ANCHOR_ENDING}"


def record_name(key: bytes) -> str:
    return f"{key.hex()}.record"


def partial_name(number: int) -> str:
    """The name of a file that is being written; who holds the lock is the only one to write."""
    return f"{number}.partial"


def damaged_name(name: str) -> str:
    """The name of an object that was put aside."""
    return f"{name}.damaged"


def folder_name(root: bytes) -> str:
    """The folder of everything that hangs on one root key."""
    return f"kv-{root.hex()[:32]}"


def is_folder_name(name: str) -> bool:
    """Whether a folder in the cache's folder can be ours."""
    return _FOLDER_NAME.fullmatch(name) is not None


def object_kind(name: str) -> Object | None:
    """The kind of object that a name of ours is for, None for any other name."""
    if name == HITS_NAME:
        return Object.HITS
    match = _OBJECT_NAME.fullmatch(name)
    if match is None:
        return None
    return _KINDS[match["kind"]]


def kind_of_ours(name: str) -> Object | None:
    """`object_kind` of a name that is known to be ours, at less cost."""
    return _KINDS_BY_ENDING.get(name[name.rindex(".") + 1 :])


def object_key(name: str) -> bytes:
    """The key in the name of a segment, tail, anchor or record."""
    return bytes.fromhex(name[: 2 * _KEY_BYTES])


def segment_tokens(name: str) -> int:
    """The number of tokens in the name of a segment."""
    return int(name[2 * _KEY_BYTES + 1 :].partition(".")[0], 16)


def is_anchor(name: str) -> bool:
    """Whether a name of ours is that of an anchor in use."""
    return name.endswith(_ANCHOR_ENDING)


def is_tail(name: str) -> bool:
    """Whether a name of ours is that of a tail in use."""
    return name.endswith(_TAIL_ENDING)


def is_left_over(name: str) -> bool:
    """Whether a name is ours and of no more use: half written, or put aside."""
    return any(pattern.fullmatch(name) for pattern in (_PARTIAL_NAME, _DAMAGED_NAME))


def is_damaged(name: str) -> bool:
    """Whether a name is that of an object that was put aside."""
    return _DAMAGED_NAME.fullmatch(name) is not None


def is_damaged_anchor(name: str) -> bool:
    """Whether a name of ours is that of an anchor that was put aside."""
    return name.endswith(_DAMAGED_ANCHOR)


def is_name(name: str) -> bool:
    """Whether a file in a folder of ours is ours."""
    return object_kind(name) is not None or is_left_over(name)


def is_top_name(name: str) -> bool:
    """Whether a file beside our folders is ours."""
    return (
        name in (MARKER_NAME, LOCK_NAME, NO_INDEX_NAME) or _PARTIAL_NAME.fullmatch(name) is not None
    )


def is_immutable(name: str) -> bool:
    """Whether what lies under a name never changes its size."""
    return object_kind(name) in (Object.SEGMENT, Object.TAIL, Object.ANCHOR)
