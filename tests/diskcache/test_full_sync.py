"""macOS: a file's bytes and a folder's names are only safe after its own full sync."""

import fcntl
import os
from pathlib import Path

import pytest

from mlx_engine.diskcache.files import Files, opened

F_FULLFSYNC = 51


def test_files_and_folders_are_synced_in_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []

    def full(handle: int, command: int) -> int:
        assert command == F_FULLFSYNC
        synced.append(os.readlink(f"/proc/self/fd/{handle}") if os.path.isdir("/proc") else "?")
        return 0

    monkeypatch.setattr(fcntl, "F_FULLFSYNC", F_FULLFSYNC, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", full)
    files = Files()
    with opened(files, files.create(tmp_path / "a")) as handle:
        files.sync(handle)
    files.sync_folder(tmp_path)
    assert synced in ([str(tmp_path / "a"), str(tmp_path)], ["?", "?"])
