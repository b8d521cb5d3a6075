"""The exact tokens of earlier turns, each a small file under a key of the caller's.

Owns their number and bytes: the oldest give way. What a key stands for is the caller's.
"""

from mlx_engine.diskcache import layout, names
from mlx_engine.diskcache.commit import Committer
from mlx_engine.diskcache.layout import TokenIds
from mlx_engine.diskcache.names import Object
from mlx_engine.diskcache.shelf import Fault, Shelf
from mlx_engine.errors import CacheCorrupt

MOST_RECORDS = 4096
# Of the folder's space, so that a small one is not full of records.
MOST_SHARE = 1 / 64
MOST_BYTES = 32 * 10**6


class Records:
    """The records of one shelf."""

    def __init__(self, shelf: Shelf, root: bytes, committer: Committer) -> None:
        self._shelf = shelf
        self._root = root
        self._committer = committer
        self._most_bytes = min(MOST_BYTES, int(shelf.store.space_bytes * MOST_SHARE))
        # Name -> when it was put; filled when it is first needed.
        self._times: dict[str, float] | None = None

    def put(self, key: bytes, ids: TokenIds, put_s: float, deadline_s: float) -> None:
        """Write a record, then remove the oldest ones that are too many; no room is a drop."""
        file = layout.encode_record(self._root, key, put_s, ids)
        name = names.record_name(key)
        with self._committer.transaction(deadline_s):
            times = self._known_times()
            room = self._most_bytes - sum(memoryview(buffer).nbytes for buffer in file)
            if room < 0 or not self._committer.write(name, file):
                self._committer.written.dropped += 1
                return
            times[name] = put_s
            sizes = {n: s for n, s in self._shelf.sizes.items() if n in times and n != name}
            held, many = sum(sizes.values()), len(sizes) + 1
            gone: list[str] = []
            for old in sorted(sizes, key=lambda n: times[n]):
                if held <= room and many <= MOST_RECORDS:
                    break
                gone.append(old)
                held -= sizes[old]
                many -= 1
            if gone:
                self._committer.remove(gone)
                for old in gone:
                    del times[old]

    def read(self) -> list[tuple[bytes, TokenIds]]:
        """All records, oldest first; a damaged one is left out and put aside."""
        found = sorted(self._read_all(), key=lambda record: record[0])
        return [(key, ids) for _, key, ids in found]

    def _known_times(self) -> dict[str, float]:
        there = [n for n in self._shelf.sizes if names.object_kind(n) is Object.RECORD]
        if self._times is None or any(name not in self._times for name in there):
            self._times = {names.record_name(key): put_s for put_s, key, _ in self._read_all()}
        return self._times

    def _read_all(self) -> list[tuple[float, bytes, TokenIds]]:
        records: list[tuple[float, bytes, TokenIds]] = []
        for name in list(self._shelf.sizes):
            if names.object_kind(name) is not Object.RECORD:
                continue
            key = names.object_key(name)
            try:
                data = self._shelf.store.read(self._shelf.folder, name)
                put_s, ids = layout.decode_record(data, key, self._root)
            except CacheCorrupt as error:
                self._shelf.report(Fault(name, str(error)))
            except OSError:
                continue
            else:
                records.append((put_s, key, ids))
        return records
