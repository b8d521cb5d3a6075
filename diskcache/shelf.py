"""One folder of the store with the index that its files make.

Owns how names and anchors' files become an index, and what must go from the disk when something
goes from the index. The index is guarded by `lock`, which is never held during a file-system call.
"""

import contextlib
import gc
import logging
import math
import threading
from collections.abc import Generator, Iterable
from dataclasses import dataclass

from mlx_engine.diskcache import names
from mlx_engine.diskcache.files import Buffer, is_absent
from mlx_engine.diskcache.index import Anchor, Index, Segment
from mlx_engine.diskcache.layout import (
    TAIL_HEADER_BYTES,
    AnchorFile,
    OtherVersion,
    SegmentId,
    decode_anchor,
    decode_header,
    decode_hits,
    encode_hits,
)
from mlx_engine.diskcache.names import Object
from mlx_engine.diskcache.policy import Plan, PolicyClock, Ranking, hits_at, weight_at, with_hit
from mlx_engine.diskcache.store import News, Store
from mlx_engine.errors import CacheCorrupt

# How many files, and how much of each, tell of which version a folder is.
_PROBES = 32
_PROBE_BYTES = 64 * 1024

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Fault:
    """A file that is not what it should be."""

    name: str
    reason: str


class Shelf:
    """The anchors of one root key, on disk and in memory; a root of None may be any."""

    def __init__(self, store: Store, folder: str, root: bytes | None, clock: PolicyClock) -> None:
        self.store = store
        self.folder = folder
        self.root = root
        self.lock = threading.RLock()
        self.index = Index(root or b"")
        self.ranking = Ranking(self.index)
        # Files of ours that nothing uses, to be removed, and damaged ones, to be put aside.
        self.left_over: set[str] = set()
        self.faults: dict[str, Fault] = {}
        # Files that seem to be of no use, but while an anchor cannot be read, or was put aside,
        # nobody can be sure: they go when room is needed.
        self.unsure: set[str] = set()
        # Anchors' files that could not be read for now.
        self.unread: set[str] = set()
        # Whether all this is of another version of the formats: then it is only counted.
        self.is_opaque = False
        self._clock = clock
        self._hits_are_new = False

    @property
    def sizes(self) -> dict[str, int]:
        """The folder's files and their bytes."""
        return self.store.sizes.get(self.folder, {})

    def load(self) -> None:
        """Make the index from the folder's files."""
        if self.root is None and self._is_of_another_version():
            self.is_opaque = True
            return
        with _no_collections():
            self.refresh(News(list(self.sizes), []))
        now_s = self._clock.now()
        table: list[tuple[bytes, float, float]] = []
        if names.HITS_NAME in self.sizes:
            try:
                table = decode_hits(self.store.read(self.folder, names.HITS_NAME), self.root)
            except CacheCorrupt as error:
                self.report(Fault(names.HITS_NAME, str(error)))
            except OSError as error:
                _log.warning("The disk cache's uses cannot be read: %s.", error.strerror)
        with self.lock:
            # A time in the future is written anew as now, or it would stay new until then.
            self._hits_are_new = any(
                anchor.created_s > now_s for anchor in self.index.anchors.values()
            ) or any(counted_s > now_s for _, _, counted_s in table)
            for key, hits, counted_s in table:
                anchor = self.index.anchors.get(key)
                if anchor is not None and math.isfinite(hits) and math.isfinite(counted_s):
                    anchor.weight = weight_at(hits, counted_s, now_s)
            self.ranking = Ranking(self.index)

    def refresh(self, news: News) -> None:
        """Follow what other processes did to the folder, at the cost of what they did."""
        sizes = self.sizes
        with self.lock:
            # What seemed to be of no use may be of use with what is new.
            unsure = [n for n in self.left_over | self.unsure | self.unread if n in sizes]
        added = [name for name in {*news.added, *unsure} if name not in self.faults]
        files = self._read_anchors(added)
        is_sure = not self.unread and not self._are_anchors_aside()
        with self.lock:
            for name in news.gone:
                self._forget_file(name)
            used: set[str] = set()
            touched = {file.key for file in files if self._take_up(file, used)}
            touched.update(names.object_key(name) for name in added if names.is_tail(name))
            for key in touched:
                self._find_tail(key, used)
            if len(touched) > len(self.index.anchors) // 4:
                self.ranking = Ranking(self.index)
            else:
                for key in touched & self.index.anchors.keys():
                    self.ranking.changed(self.index.anchors[key])
            self.left_over.difference_update(news.gone, added)
            self.unsure.difference_update(news.gone, added)
            for name in added:
                if name not in used and name not in self.unread and self._is_left_over(name):
                    is_clear = is_sure or names.kind_of_ours(name) is None
                    (self.left_over if is_clear else self.unsure).add(name)

    def is_readable_again(self) -> bool:
        """Whether any of `unread` can be read by now, or has gone, so that a refresh is of use."""
        for name in self.unread:
            try:
                self.store.read(self.folder, name)
            except OSError as error:
                if not is_absent(error):
                    continue
            return True
        return False

    def hit(self, anchor: Anchor) -> None:
        """Count one use of an anchor."""
        with self.lock:
            anchor.weight = with_hit(anchor.weight, self._clock.now())
            self.ranking.changed(anchor)
            self._hits_are_new = True

    def hits_file(self) -> list[Buffer] | None:
        """The file of hits as it should be, None if it is so already."""
        with self.lock:
            if not self._hits_are_new or self.root is None:
                return None
            self._hits_are_new = False
            now_s = self._clock.now()
            anchors = self.index.anchors.values()
            table = [(anchor.key, hits_at(anchor.weight, now_s), now_s) for anchor in anchors]
        return encode_hits(self.root, table)

    def report(self, *faults: Fault) -> bool:
        """Remember damaged files, with one line in the log for all; False if they were known."""
        new = [fault for fault in faults if fault.name not in self.faults]
        if not new:
            return False
        self.faults.update((fault.name, fault) for fault in new)
        others = f" and {len(new) - 1} more" if len(new) > 1 else ""
        first = new[0]
        _log.warning(
            "%s%s of the disk cache is not used again: %s.", first.name, others, first.reason
        )
        return True

    def lose_segment(self, segment: SegmentId) -> None:
        """Forget every anchor that needs a segment."""
        with self.lock:
            known = self.index.segments.get(segment)
            if known is not None:
                self._forget(known.owners)

    def lose_tail(self, key: bytes) -> None:
        """Forget an anchor's tail."""
        with self.lock:
            anchor = self.index.anchors.get(key)
            if anchor is not None:
                anchor.tail_bytes = 0
                self.ranking.changed(anchor)

    def detach(self, plan: Plan) -> list[str]:
        """Take what is planned out of the index; its files, in the order in which they may go."""
        with self.lock:
            gone = [name for anchor in plan.anchors for name in self._remove(anchor)]
            for anchor in plan.thinned:
                anchor.tail_bytes = 0
                gone.append(names.tail_name(anchor.key))
        return gone

    def delete(self, gone: Iterable[str]) -> None:
        """Remove files from the folder; one that stays for an error is tried again later."""
        for name in gone:
            try:
                self.store.remove(self.folder, name)
                self.left_over.discard(name)
                self.unsure.discard(name)
            except OSError as error:
                self.left_over.add(name)
                _log.warning("Cannot remove %s of the disk cache: %s.", name, error.strerror)

    def sweep(self) -> int:
        """Put damaged files aside and remove what nothing uses; how many damaged ones there were.

        The folder must be synced afterwards.
        """
        aside = list(self.faults.values())
        for fault in aside:
            try:
                self.store.put_aside(self.folder, fault.name)
            except OSError as error:
                if not is_absent(error):
                    self.left_over.add(fault.name)
            del self.faults[fault.name]
        self.delete(list(self.left_over))
        return len(aside)

    def _is_of_another_version(self) -> bool:
        """Whether the files say so, and none is of this version."""
        found = False
        for name in sorted(self.sizes, key=lambda name: names.object_kind(name) is None)[:_PROBES]:
            kind = names.object_kind(name)
            if kind is None:
                continue
            try:
                data = self.store.read(self.folder, name, _PROBE_BYTES)
                decode_header(data, kind)
                return False
            except OtherVersion:
                found = True
            except (OSError, CacheCorrupt):
                continue
        return found

    def _are_anchors_aside(self) -> bool:
        anchors = [name for name in self.faults if names.object_kind(name) is Object.ANCHOR]
        return bool(anchors) or any(names.is_damaged_anchor(name) for name in self.sizes)

    def _read_anchors(self, added: list[str]) -> list[AnchorFile]:
        """The anchors' files among new names, ascending; `unread` has those that fail for now."""
        files: list[AnchorFile] = []
        faults: list[Fault] = []
        self.unread.clear()
        for name in filter(names.is_anchor, added):
            try:
                data = self.store.read(self.folder, name)
                files.append(decode_anchor(data, names.object_key(name), self.root))
            except CacheCorrupt as error:
                faults.append(Fault(name, str(error)))
            except OSError as error:
                if not is_absent(error):
                    # What it stands on must not be taken for left over.
                    self.unread.add(name)
                    _log.info("%s of the disk cache cannot be read: %s.", name, error.strerror)
        self.report(*faults)
        return sorted(files, key=lambda file: file.position)

    def _take_up(self, file: AnchorFile, used: set[str]) -> bool:
        """Add an anchor to the index if all that it stands on is there; `used` gets its files."""
        if file.key in self.index.anchors:
            return False
        sizes, is_complete = self.sizes, True
        found = [names.anchor_name(file.key)]
        for use in file.uses:
            name = use.segment.name
            size = sizes.get(name)
            if size is not None and size != use.segment_bytes:
                reason = f"it holds {size} bytes and should hold {use.segment_bytes}"
                self.report(Fault(name, reason))
            is_complete = is_complete and size == use.segment_bytes
            found.append(name)
        if not is_complete or (file.parent_key and file.parent_key not in self.index.anchors):
            return False
        self.index.add(file, 0, weight_at(1.0, file.created_s, self._clock.now()))
        used.update(found)
        return True

    def _find_tail(self, key: bytes, used: set[str]) -> None:
        anchor = self.index.anchors.get(key)
        name = names.tail_name(key)
        n_bytes = self.sizes.get(name)
        if anchor is None or n_bytes is None or name in self.faults:
            return
        if n_bytes < TAIL_HEADER_BYTES:
            self.report(Fault(name, "it ends within its header"))
            return
        anchor.tail_bytes = n_bytes
        used.add(name)

    def _forget_file(self, name: str) -> None:
        match names.kind_of_ours(name):
            case Object.ANCHOR:
                anchor = self.index.anchors.get(names.object_key(name))
                self._forget([anchor] if anchor else [])
            case Object.SEGMENT:
                self.lose_segment(SegmentId(names.object_key(name), names.segment_tokens(name)))
            case Object.TAIL:
                self.lose_tail(names.object_key(name))
            case _:
                pass

    def _is_left_over(self, name: str) -> bool:
        match names.kind_of_ours(name):
            case Object.ANCHOR | Object.TAIL:
                return names.object_key(name) not in self.index.anchors
            case Object.SEGMENT:
                segment = SegmentId(names.object_key(name), names.segment_tokens(name))
                return segment not in self.index.segments
            case None:
                return not names.is_damaged(name)
            case _:
                return False

    def _forget(self, anchors: list[Anchor]) -> None:
        for anchor in self.index.standing_on(list(anchors)):
            self.left_over.update(name for name in self._remove(anchor) if name not in self.faults)

    def _remove(self, anchor: Anchor) -> list[str]:
        segments = [self.index.segments[use.segment] for use in anchor.uses]
        parent = anchor.parent
        freed = self.index.remove(anchor)
        if parent is not None:
            self.ranking.changed(parent)
        for owner in _last_owners(segments):
            self.ranking.changed(owner)
        gone = [names.anchor_name(anchor.key), names.tail_name(anchor.key)]
        return gone + [segment.id.name for segment in freed]


@contextlib.contextmanager
def _no_collections() -> Generator[None]:
    """Let nobody look for garbage: an index that grows has none, and the looks cost a third."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _last_owners(segments: list[Segment]) -> list[Anchor]:
    """Those that alone own one of the segments now, and so are worth less by the byte."""
    owners: list[Anchor] = []
    for segment in segments:
        if segment.owners and all(owner is segment.owners[0] for owner in segment.owners):
            owners.append(segment.owners[0])
    return owners
