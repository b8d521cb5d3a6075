"""The file-system seam under test: calls recorded, and what a power cut may leave of them.

The model of a disk: bytes are safe once their file is synced, names once their folder is. Of a
file's other bytes nothing may be there, a half, or zeros; of the other changes to names any may be
there or not, but those to one name in their order, and a name that a rename takes away stays until
the new one is there. Paths are relative to the folder that is recorded.
"""

import inspect
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from threading import Lock
from typing import Any, Literal, TypeAlias

from mlx_engine.diskcache.files import Files

CALLS = frozenset(name for name in vars(Files) if not name.startswith("_")) - {"user"}
CHANGES = frozenset(
    "make_folder remove_folder create write sync sync_folder"
    " rename unlink open_lock overwrite".split()
)
SYNCS = frozenset(("sync", "sync_folder"))

Tree: TypeAlias = dict[Path, bytes | None]
"""Files by path, None for a folder."""
Loss = Literal["kept", "lost", "half", "zeros"]

_LOSSES: tuple[Loss, ...] = ("lost", "half", "zeros")
_FOLDER = -1


class SeamFiles(Files):
    """Hands every call to `around`."""

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name not in CALLS:
            return found

        def seam(*args: Any) -> Any:
            return self.around(name, found, *args)

        return seam

    def around(self, name: str, call: Callable[..., Any], *args: Any) -> Any:
        """Make the call; `args` are its arguments. Any thread may come."""
        return call(*args)


class HastyFiles(Files):
    """Waits for no disk: for checks that only look at what is there."""

    def sync(self, handle: int) -> None:
        pass

    def sync_folder(self, folder: Path) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Call:
    """A call that changed the disk. `file` numbers the files: those found first, then as made.

    `site` names the lines of the cache that led to it.
    """

    name: str
    path: Path = Path()
    target: Path = Path()
    file: int = _FOLDER
    data: bytes = b""
    site: str = ""


@dataclass(frozen=True, slots=True)
class Mark:
    """Something that the program promised between two calls."""

    promise: Any


class RecordingFiles(SeamFiles):
    """Keeps what changes a folder in `log`, in its order, and waits for no disk.

    `watch` is called after every change.
    """

    def __init__(self, base: Path, watch: Callable[[], None] = lambda: None) -> None:
        self.start = read_tree(base)
        self.log: list[Call | Mark] = []
        self._base = base
        self._watch = watch
        self._lock = Lock()
        self._file_of_path = number_files(self.start)
        self._file_of_handle: dict[int, int] = {}
        self._n_files = len(self._file_of_path)

    def mark(self, promise: Any) -> None:
        """Note what holds after the calls so far."""
        with self._lock:
            self.log.append(Mark(promise))

    def around(self, name: str, call: Callable[..., Any], *args: Any) -> Any:
        if name not in CHANGES:
            return call(*args)
        with self._lock:
            result = None if name in SYNCS else call(*args)
            self._record(name, result, *args)
            self._watch()
        return result

    def _record(self, name: str, result: Any, first: Any, *rest: Any) -> None:
        file, path = _FOLDER, Path()
        if isinstance(first, Path):
            path = first.relative_to(self._base)
        else:
            file = self._file_of_handle[first]
        match name:
            case "create" | "open_lock":
                is_new = path not in self._file_of_path
                if is_new:
                    self._file_of_path[path] = self._n_files
                    self._n_files += 1
                file = self._file_of_handle[result] = self._file_of_path[path]
                if is_new:
                    self.log.append(Call("create", path, file=file))
            case "write":
                data = b"".join(bytes(memoryview(each).cast("B")) for each in rest[0])
                self.log.append(Call(name, file=file, data=data))
            case "overwrite":
                self.log.append(Call(name, file=file, data=bytes(rest[0])))
            case "rename":
                target = rest[0].relative_to(self._base)
                file = self._file_of_path[target] = self._file_of_path.pop(path)
                self.log.append(Call(name, path, target, file))
            case "unlink":
                del self._file_of_path[path]
                self.log.append(Call(name, path))
            case _:
                self.log.append(Call(name, path, file=file, site=_site()))


def _site() -> str:
    """The lines that led to a call, up to the innermost one above the cache's store."""
    lines: list[str] = []
    frame = inspect.currentframe()
    while frame is not None:
        module = frame.f_globals["__name__"]
        if module.startswith("mlx_engine.diskcache."):
            lines.append(f"{module.rpartition('.')[2]}:{frame.f_lineno}")
            if not module.endswith((".files", ".store")):
                break
        frame = frame.f_back
    return " < ".join(lines)


@dataclass(slots=True)
class _Contents:
    """A file's safe bytes, and what was written since: (offset, bytes)."""

    safe: bytes = b""
    writes: list[tuple[int, bytes]] = field(default_factory=list[tuple[int, bytes]])
    n_bytes: int = 0

    def after(self, loss: Loss) -> bytes:
        """The bytes that a power cut leaves."""
        if loss == "lost":
            return self.safe
        data = bytearray(self.safe)
        left = sum(len(new) for _, new in self.writes)
        left = left // 2 if loss == "half" else left
        for offset, new in self.writes:
            new = new[:left]
            left -= len(new)
            data.extend(bytes(max(0, offset + len(new) - len(data))))
            data[offset : offset + len(new)] = bytes(len(new)) if loss == "zeros" else new
        return bytes(data)


@dataclass(frozen=True, slots=True, eq=False)
class _Change:
    """A name that gets another file, or none; not before what it `needs`."""

    path: Path
    file: int | None
    needs: "_Change | None" = None


class Disk:
    """What is safe of a folder and what is not, while calls are made."""

    def __init__(self, start: Tree) -> None:
        self._safe_names = number_files(start)
        self._contents = {
            file: _Contents(start[path] or b"", n_bytes=len(start[path] or b""))
            for path, file in self._safe_names.items()
        }
        self._safe_names |= {path: _FOLDER for path, data in start.items() if data is None}
        self._changes: list[_Change] = []

    def apply(self, call: Call) -> None:
        """Take in one more call."""
        match call.name:
            case "make_folder":
                self._changes.append(_Change(call.path, _FOLDER))
            case "create":
                self._contents[call.file] = _Contents()
                self._changes.append(_Change(call.path, call.file))
            case "write" | "overwrite":
                contents = self._contents[call.file]
                offset = contents.n_bytes if call.name == "write" else 0
                contents.writes.append((offset, call.data))
                contents.n_bytes = max(contents.n_bytes, offset + len(call.data))
            case "sync":
                contents = self._contents[call.file]
                contents.safe, contents.writes = contents.after("kept"), []
            case "rename":
                there = _Change(call.target, call.file)
                self._changes += [there, _Change(call.path, None, needs=there)]
            case "unlink" | "remove_folder":
                self._changes.append(_Change(call.path, None))
            case _:
                assert call.name == "sync_folder"
                inside = [each for each in self._changes if each.path.parent == call.path]
                self._safe_names = _changed(self._safe_names, inside)
                self._changes = [each for each in self._changes if each not in inside]

    def power_cuts(self, rng: random.Random, n_random: int = 3) -> Iterator[Tree]:
        """What a power cut now may leave: a bounded choice, the one with nothing lost first."""
        dirty = [file for file, each in self._contents.items() if each.writes]
        every = range(len(self._changes))
        all_kept: dict[int, Loss] = dict.fromkeys(dirty, "kept")
        yield self._tree(every, all_kept)
        for loss in _LOSSES:
            yield self._tree(every, dict.fromkeys(dirty, loss))
            yield self._tree([], dict.fromkeys(dirty, loss))
        # One thing lost, or one alone kept.
        for i in every:
            yield self._tree([j for j in every if j != i], all_kept)
            yield self._tree([i], dict.fromkeys(dirty, "lost"))
        for file, loss in product(dirty, _LOSSES):
            yield self._tree(every, {**all_kept, file: loss})
        for _ in range(n_random):
            kept = [i for i in every if rng.random() < 0.5]
            yield self._tree(kept, {file: rng.choice([*_LOSSES, "kept"]) for file in dirty})

    def _tree(self, kept: Sequence[int], losses: dict[int, Loss]) -> Tree:
        there: list[_Change] = []
        for i in kept:
            change = self._changes[i]
            if change.needs is None or change.needs in there:
                there.append(change)
        tree: Tree = {}
        for path, file in sorted(_changed(self._safe_names, there).items()):
            # What lies in a folder without a name is out of reach.
            if path.parent == Path() or path.parent in tree:
                is_folder = file == _FOLDER
                tree[path] = (
                    None if is_folder else self._contents[file].after(losses.get(file, "kept"))
                )
        return tree


def number_files(tree: Tree) -> dict[Path, int]:
    """The numbers of the files that are there from the start."""
    paths = sorted(path for path, data in tree.items() if data is not None)
    return {path: i for i, path in enumerate(paths)}


def read_tree(base: Path) -> Tree:
    """All that lies in a folder."""
    return {
        path.relative_to(base): None if path.is_dir() else path.read_bytes()
        for path in sorted(base.rglob("*"))
    }


def write_tree(tree: Tree, base: Path) -> None:
    """Fill an empty folder as its owner would have."""
    for path, data in sorted(tree.items()):
        if data is None:
            (base / path).mkdir(0o700)
        else:
            (base / path).write_bytes(data)
            (base / path).chmod(0o600)


def _changed(names: dict[Path, int], changes: Sequence[_Change]) -> dict[Path, int]:
    """Names after some changes."""
    names = dict(names)
    for change in changes:
        if change.file is None:
            names.pop(change.path, None)
        else:
            names[change.path] = change.file
    return names
