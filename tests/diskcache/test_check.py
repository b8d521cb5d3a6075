"""What `ds41 cache` builds on: it sees all there is, and removes what it says and nothing else."""

from pathlib import Path

import pytest

from mlx_engine.diskcache import check, names
from mlx_engine.errors import CacheUnusable
from tests.diskcache.content import FLUSH_S, begin, folder_bytes, opened, restored, tail, tokens
from tests.diskcache.recording import HastyFiles
from tests.diskcache.support import names_of, saved

IDS = tokens(1, 6000)
FORK = tokens(2, 2000, after=IDS[:3000])
FOREIGN = ("notes.txt", "photos/a.jpg")
FILES = HastyFiles()


def filled(folder: Path) -> Path:
    """A folder with two models, records, hits, a foreign file and folder."""
    with opened(folder):
        pass
    (folder / "photos").mkdir()
    for name in FOREIGN:
        (folder / name).write_bytes(bytes(500))
    now = [1e9]
    with opened(folder, clock=lambda: now[0]) as cache:
        for ids, position in ((IDS, 2000), (IDS, 6000), (FORK, 5000)):
            now[0] += 1
            started = begin(cache, ids, position)
            assert started is not None
            started.finish(tail(ids, position), 10.0)
            assert cache.flush(FLUSH_S)
        cache.record_put(bytes(32), IDS[:10])
        assert restored(cache, IDS) == 6000
    with opened(folder, clock=lambda: now[0], fingerprint=b"other") as cache:
        started = begin(cache, IDS, 1000)
        assert started is not None
        started.finish(tail(IDS, 1000), 10.0)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def remove_foreign(folder: Path) -> None:
    for name in FOREIGN:
        (folder / name).unlink()
    (folder / "photos").rmdir()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return filled(tmp_path / "kv")


def test_anchors_are_listed(folder: Path) -> None:
    entries = check.list_anchors(folder, files=FILES, clock=lambda: 1e9 + 3)
    by_model = {entry.model for entry in entries}
    assert len(by_model) == 2
    found = sorted((entry.position, entry.parent_position) for entry in entries)
    assert found == [(1000, 0), (2000, 0), (5000, 2000), (6000, 2000)]
    assert all(entry.has_tail and entry.own_bytes > 400 for entry in entries)
    hits = {entry.position: entry.hits for entry in entries}
    assert hits[6000] > 1.9
    assert 0.9 < hits[5000] <= 1.0 + 1e-6


def test_stats_account_for_every_byte(folder: Path) -> None:
    stats = check.stats(folder, files=FILES)
    assert stats.total_bytes == folder_bytes(folder)
    fixed = len(names.MARKER) + (folder / names.LOCK_NAME).stat().st_size
    models_bytes = sum(model.n_bytes for model in stats.models)
    assert models_bytes + stats.foreign_bytes + fixed == stats.total_bytes
    assert sorted(model.anchors for model in stats.models) == [1, 3]
    assert stats.foreign_names == ("notes.txt", "photos")
    assert stats.foreign_bytes == 1000
    assert stats.damaged_bytes == stats.left_over_bytes == 0


def test_reading_changes_nothing(folder: Path) -> None:
    before = contents(folder)
    check.list_anchors(folder)
    check.stats(folder)
    assert check.verify(folder).faults == ()
    for to_bytes in (None, 0, 10**9):
        check.prune(folder, to_bytes, dry_run=True)
    check.purge(folder, dry_run=True)
    assert contents(folder) == before


@pytest.mark.parametrize("put_aside", [False, True])
@pytest.mark.parametrize("kind", [".segment", ".tail", ".anchor", ".record", "hits.table"])
def test_verify_finds_what_is_damaged(folder: Path, kind: str, put_aside: bool) -> None:
    victim = names_of(folder, kind)[0]
    data = bytearray(victim.read_bytes())
    data[-1] ^= 1
    victim.write_bytes(data)
    found = check.verify(folder, put_aside=put_aside, files=FILES)
    assert [fault.name for fault in found.faults] == [str(victim.relative_to(folder))]
    assert "digest" in found.faults[0].reason
    assert victim.exists() is not put_aside
    if put_aside:
        aside = victim.with_name(names.damaged_name(victim.name))
        assert aside.read_bytes() == data
        assert check.verify(folder, files=FILES).faults == ()
        assert check.stats(folder, files=FILES).damaged_bytes == len(data)
        gone = check.prune(folder, files=FILES)
        assert str(aside.relative_to(folder)) in gone.names
        assert not aside.exists()


def test_verify_counts_what_it_read(folder: Path) -> None:
    found = check.verify(folder, files=FILES)
    objects = [path for path in folder.glob("kv-*/*")]
    assert found.files == len(objects)
    assert found.n_bytes == sum(path.stat().st_size for path in objects)


def test_prune_removes_what_is_of_no_use(folder: Path) -> None:
    ours = names_of(folder, ".tail")[0].parent
    useless = [
        ours / names.partial_name(0),
        ours / names.tail_name(bytes(32)),
        ours / f"{'a' * 64}-0800.segment",
        ours / names.damaged_name(names.tail_name(bytes(32))),
    ]
    for path in useless:
        path.write_bytes(bytes(10))
    (ours / "foreign").write_bytes(bytes(10))
    before = set(contents(folder))
    planned = check.prune(folder, dry_run=True, files=FILES)
    gone = check.prune(folder, files=FILES)
    assert planned == gone
    assert set(gone.names) == {str(path.relative_to(folder)) for path in useless}
    assert gone.n_bytes == 40
    assert before - set(contents(folder)) == set(gone.names)
    assert gone.left_bytes == folder_bytes(folder)


@pytest.mark.parametrize("share", [0.8, 0.4, 0.1, 0.0])
def test_prune_reaches_its_aim_and_keeps_the_rest_usable(folder: Path, share: float) -> None:
    to_bytes = int(folder_bytes(folder) * share)
    planned = check.prune(folder, to_bytes, dry_run=True, files=FILES, clock=lambda: 1e9 + 9)
    gone = check.prune(folder, to_bytes, files=FILES, clock=lambda: 1e9 + 9)
    assert planned == gone
    assert gone.left_bytes == folder_bytes(folder)
    floor = 1000 + len(names.MARKER) + 8
    assert gone.left_bytes <= max(to_bytes, floor)
    assert (folder / FOREIGN[0]).exists() and (folder / FOREIGN[1]).exists()
    assert check.verify(folder, files=FILES).faults == ()
    stats = check.stats(folder, files=FILES)
    assert stats.left_over_bytes == 0
    with opened(folder) as cache:
        for ids in (IDS, FORK):
            assert restored(cache, ids) == cache.lookup(ids)


def test_prune_stops_when_it_is_enough(folder: Path) -> None:
    total = folder_bytes(folder)
    gone = check.prune(folder, total - 1, files=FILES, clock=lambda: 1e9 + 9)
    anchors = [name for name in gone.names if name.endswith(".anchor")]
    assert len(anchors) == 1
    assert check.prune(folder, total, files=FILES).names == ()


def test_purge_leaves_what_is_not_ours(folder: Path) -> None:
    kept = names_of(folder, ".tail")[0].with_name("foreign")
    kept.write_bytes(bytes(10))
    planned = check.purge(folder, dry_run=True, files=FILES)
    gone = check.purge(folder, files=FILES)
    assert planned.names == gone.names
    left = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    # Without them the next run would take the folder for somebody else's.
    ours = {names.MARKER_NAME, names.LOCK_NAME, names.NO_INDEX_NAME}
    assert left == {*FOREIGN, *ours, str(kept.relative_to(folder))}
    assert [path.name for path in folder.glob("kv-*")] == [kept.parent.name]
    assert gone.left_bytes == folder_bytes(folder)


def test_purge_leaves_nothing_of_ours(folder: Path) -> None:
    remove_foreign(folder)
    (folder / names.partial_name(0)).write_bytes(b"half")
    before = folder_bytes(folder)
    planned = check.purge(folder, dry_run=True, files=FILES)
    gone = check.purge(folder, files=FILES)
    assert planned.names == gone.names
    assert (gone.n_bytes, gone.left_bytes) == (before, 0)
    assert list(folder.iterdir()) == [] and check.is_empty(folder)


def test_purge_keeps_the_lock_until_the_folders_are_gone(folder: Path) -> None:
    remove_foreign(folder)
    is_locked: list[bool] = []

    class Watching(HastyFiles):
        def remove_folder(self, path: Path) -> None:
            is_locked.append((path.parent / names.LOCK_NAME).exists())
            super().remove_folder(path)

    check.purge(folder, files=Watching())
    assert is_locked == [True, True]


def test_a_folder_whose_marker_was_emptied_can_be_looked_at_and_cleared(folder: Path) -> None:
    (folder / names.MARKER_NAME).write_bytes(b"")
    with pytest.raises(CacheUnusable, match="marker"):
        check.purge(folder, files=FILES)
    remove_foreign(folder)
    assert len(check.list_anchors(folder, files=FILES)) == 4
    assert check.verify(folder, files=FILES).faults == ()
    check.purge(folder, files=FILES)
    assert check.is_empty(folder)


@pytest.mark.parametrize("is_shared", [True, False])
def test_a_running_cache_notices(
    folder: Path, is_shared: bool, caplog: pytest.LogCaptureFixture
) -> None:
    if not is_shared:
        remove_foreign(folder)
    with opened(folder) as cache:
        assert cache.lookup(IDS) == 6000
        check.purge(folder, files=FILES)
        assert restored(cache, IDS) == 0
        for _ in range(2):
            started = begin(cache, FORK, 5000)
            if started is not None:
                started.finish(tail(FORK, 5000), 1.0)
            assert cache.flush(FLUSH_S)
        assert cache.stats().damaged == 0
        # Where its marker went it stores nothing more, and says so once.
        assert restored(cache, FORK) == (5000 if is_shared else 0)
        assert caplog.text.count("no disk cache any more") == (0 if is_shared else 1)
        assert not is_shared or cache.stats().total_bytes == folder_bytes(folder)
    with opened(folder) as cache:
        saved(cache, FORK, 5000)
        assert restored(cache, FORK) == 5000


@pytest.mark.parametrize("function", [check.list_anchors, check.stats, check.verify])
def test_only_our_folder_is_looked_at(tmp_path: Path, function: object) -> None:
    assert callable(function)
    for folder, message in ((tmp_path / "none", "not there"), (tmp_path, "marker")):
        with pytest.raises(CacheUnusable, match=message):
            function(folder)


def test_nothing_is_removed_without_our_marker(folder: Path) -> None:
    (folder / names.MARKER_NAME).write_text("another's")
    before = contents(folder)
    for remove in (check.purge, lambda where: check.prune(where, 0)):  # pyright: ignore
        with pytest.raises(CacheUnusable, match="marker"):
            remove(folder)
    assert contents(folder) == before
