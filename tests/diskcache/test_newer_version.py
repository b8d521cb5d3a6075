"""What a newer ds41 stored is counted and otherwise left alone by this one's commands."""

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from mlx_engine.cli.main import app
from mlx_engine.diskcache import check, layout
from tests.diskcache.content import FLUSH_S, folder_bytes, opened, restored, tokens
from tests.diskcache.recording import HastyFiles, read_tree
from tests.diskcache.support import damage_file, names_of, saved, warnings

pytestmark = pytest.mark.usefixtures("no_surprises")

FILES = HastyFiles()
IDS = tokens(1, 5000)


@pytest.fixture
def newer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a newer version's model, beside one of ours."""
    folder = tmp_path / "kv"
    with opened(folder) as cache:
        saved(cache, tokens(2, 2000), 2000)
    before = set(folder.glob("kv-*"))
    with monkeypatch.context() as patch:
        patch.setattr(layout, "FORMAT_VERSION", layout.FORMAT_VERSION + 1)
        with opened(folder) as cache:
            saved(cache, IDS, 2000, 5000)
            cache.record_put(bytes(32), IDS[:10])
            assert cache.flush(FLUSH_S)
    (found,) = set(folder.glob("kv-*")) - before
    return found


def test_commands_leave_a_newer_version_alone(
    newer: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = newer.parent
    before = read_tree(newer)
    assert [entry.position for entry in check.list_anchors(folder, files=FILES)] == [2000]
    stats = check.stats(folder, files=FILES)
    assert [(m.is_other_version, m.model == newer.name) for m in stats.models] in (
        [(False, False), (True, True)],
        [(True, True), (False, False)],
    )
    assert sum(m.n_bytes for m in stats.models if m.is_other_version) == folder_bytes(newer)
    assert stats.left_over_bytes == stats.damaged_bytes == 0
    found = check.verify(folder, put_aside=True, files=FILES)
    assert found.faults == ()
    assert found.unknown_files == len(before)
    assert check.prune(folder, files=FILES).names == ()
    removed = check.prune(folder, 0, files=FILES)
    assert removed.names
    assert read_tree(newer) == before
    assert removed.left_bytes == folder_bytes(folder)
    assert warnings(caplog) == []


def test_the_command_line_says_what_it_cannot_know(newer: Path) -> None:
    def ds41(*args: str) -> Result:
        return CliRunner().invoke(app, ["cache", *args, "--kv-disk-dir", str(newer.parent)])

    said = [line for line in ds41("stats").stdout.splitlines() if "another version" in line]
    assert len(said) == 1
    assert f"{folder_bytes(newer):,}" in said[0]
    verified = ds41("verify")
    assert verified.exit_code == 0
    n_files = sum(path.is_file() for path in newer.iterdir())
    assert f"{n_files} files of another version of ds41 cannot be checked" in verified.stdout


def test_half_written_files_of_a_newer_version_stay(newer: Path) -> None:
    for path in names_of(newer, ".anchor"):
        path.unlink()
    before = read_tree(newer)
    check.prune(newer.parent, files=FILES)
    check.verify(newer.parent, put_aside=True, files=FILES)
    assert read_tree(newer) == before


def test_purge_and_eviction_remove_a_newer_version(newer: Path) -> None:
    folder = newer.parent
    used = folder_bytes(folder)
    with opened(folder, space_bytes=used + 1000) as cache:
        saved(cache, tokens(3, 2000), 2000)
        assert restored(cache, tokens(3, 2000)) == 2000
        assert restored(cache, tokens(2, 2000)) == 2000
    assert names_of(newer, ".anchor") == []
    check.purge(folder, files=FILES)
    assert not newer.exists()


def test_a_damaged_version_among_ours_is_a_fault(newer: Path) -> None:
    (ours,) = set(newer.parent.glob("kv-*")) - {newer}
    damage_file(names_of(ours, ".anchor")[0], "other version")
    (fault,) = check.verify(newer.parent, files=FILES).faults
    assert fault.name.endswith(".anchor")
    assert "format version" in fault.reason
