"""Downloads against a stand-in for the hub on 127.0.0.1: whole, stopped, refused, broken."""

import errno
import fcntl
import json
import shutil
from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import huggingface_hub
import pytest
from huggingface_hub import constants
from typer.testing import CliRunner

from mlx_engine.checkpoint import find_problems
from mlx_engine.cli import download as download_cli
from mlx_engine.cli.main import app
from mlx_engine.config_file import load_config
from mlx_engine.download import MARGIN_BYTES, DownloadProgress, download
from mlx_engine.errors import BadRequest, DeviceError, EngineError
from mlx_engine.shards import list_tensors
from mlx_engine.tiny import write_tiny_checkpoint
from tests.hub import COMMIT, REPO, Hub, serve

FILES = {
    "config.json": json.dumps({"model_type": "deepseek_v41"}).encode(),
    "encoding/encoding.py": b"print('encode')\n" * 100,
    "model-00001-of-00002.safetensors": bytes(range(256)) * 200,
    "model-00002-of-00002.safetensors": bytes(reversed(range(256))) * 300,
}
LAST = "model-00002-of-00002.safetensors"
TOTAL_BYTES = sum(map(len, FILES.values()))


@pytest.fixture(autouse=True, scope="module")
def _only_loopback() -> Generator[None]:  # pyright: ignore[reportUnusedFunction]
    """Keep huggingface_hub from the network, a proxy, the user's token and Xet's native code."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_IMPLICIT_TOKEN", True)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 4096)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        huggingface_hub.close_session()
        yield
        huggingface_hub.close_session()


@pytest.fixture
def hub() -> Generator[Hub]:
    with serve(FILES) as hub:
        yield hub


def fetch(
    hub: Hub, directory: Path, report: Callable[[DownloadProgress], None] = lambda _: None
) -> None:
    download(directory, repo=REPO, revision=COMMIT, endpoint=hub.endpoint, report=report)


def found_files(directory: Path) -> dict[str, bytes]:
    paths = [path for path in directory.rglob("*") if path.is_file()]
    names = {path.relative_to(directory).as_posix(): path.read_bytes() for path in paths}
    return {name: data for name, data in names.items() if not name.startswith(".cache/")}


def partial_files(directory: Path) -> list[Path]:
    return list(directory.rglob("*.incomplete"))


def stop_within(name: str, after_bytes: int) -> Callable[[DownloadProgress], None]:
    """Press Ctrl-C when so much of the file has arrived."""
    started_at: dict[str, int] = {}

    def report(progress: DownloadProgress) -> None:
        start = started_at.setdefault(progress.file, progress.done_bytes)
        if progress.file == name and progress.done_bytes - start >= after_bytes:
            raise KeyboardInterrupt

    return report


def test_a_whole_checkpoint_arrives_and_opens(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    write_tiny_checkpoint(source)
    with serve(found_files(source)) as hub:
        reports: list[DownloadProgress] = []
        fetch(hub, target, reports.append)
        assert found_files(target) == found_files(source)
        assert find_problems(load_config(target), list_tensors(target)) == []

        done = [report.done_bytes for report in reports]
        assert done[0] == 0 and done == sorted(done)
        assert done[-1] == reports[-1].total_bytes == sum(map(len, hub.files.values()))
        assert {report.file for report in reports} == set(hub.files)

        hub.fetched.clear()
        fetch(hub, target)
        assert hub.fetched == []


def test_a_stopped_download_keeps_what_is_finished(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        fetch(hub, tmp_path, stop_within(LAST, 8192))
    assert found_files(tmp_path) == {n: data for n, data in FILES.items() if n != LAST}
    assert partial_files(tmp_path) == []

    hub.fetched.clear()
    fetch(hub, tmp_path)
    assert found_files(tmp_path) == FILES
    assert hub.fetched == [(LAST, None)]


def test_a_broken_connection_goes_on_at_the_byte(hub: Hub, tmp_path: Path) -> None:
    hub.break_after[LAST] = 10_000
    fetch(hub, tmp_path)
    assert found_files(tmp_path) == FILES
    resumed = [wanted for name, wanted in hub.fetched if name == LAST]
    # What came in whole pieces of 4,096 bytes is kept.
    assert resumed == [None, "bytes=8192-"]


def test_what_a_killed_download_left_is_removed(hub: Hub, tmp_path: Path) -> None:
    left = tmp_path / ".cache/huggingface/download/abc.def.0123.incomplete"
    left.parent.mkdir(parents=True)
    left.write_bytes(bytes(1000))
    fetch(hub, tmp_path)
    assert partial_files(tmp_path) == []
    assert found_files(tmp_path) == FILES


def test_a_file_cut_short_is_fetched_again(hub: Hub, tmp_path: Path) -> None:
    fetch(hub, tmp_path)
    shard = tmp_path / LAST
    shard.write_bytes(shard.read_bytes()[:-1])
    hub.fetched.clear()
    fetch(hub, tmp_path)
    assert hub.fetched == [(LAST, None)]
    assert found_files(tmp_path) == FILES


def disk_with(monkeypatch: pytest.MonkeyPatch, free_bytes: int) -> None:
    usage = shutil.disk_usage("/")._replace(free=free_bytes)

    def disk_usage(_: Path) -> object:
        return usage

    monkeypatch.setattr(shutil, "disk_usage", disk_usage)


def test_no_room_is_refused_before_anything_is_fetched(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "new"
    disk_with(monkeypatch, TOTAL_BYTES + MARGIN_BYTES - 1)
    with pytest.raises(DeviceError, match=r"needs 1\.1 GB more .* has 1\.1 GB free; free 0\.0 GB"):
        fetch(hub, target)
    assert hub.fetched == []
    assert not target.exists()


def test_room_is_asked_only_for_what_is_missing(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(KeyboardInterrupt):
        fetch(hub, tmp_path, stop_within(LAST, 1))
    left = tmp_path / ".cache/huggingface/download/abc.def.0123.incomplete"
    left.write_bytes(bytes(1000))
    disk_with(monkeypatch, len(FILES[LAST]) + MARGIN_BYTES - 1000)
    fetch(hub, tmp_path)
    assert found_files(tmp_path) == FILES


@pytest.mark.parametrize(
    ("refusal", "kind", "says"),
    [
        ((404, "RepoNotFound"), BadRequest, rf"has no {REPO} at {COMMIT}, or it needs a login"),
        ((404, "RevisionNotFound"), BadRequest, rf"has no {REPO} at {COMMIT}; check the revision"),
        ((403, "GatedRepo"), BadRequest, "asks for its terms to be accepted"),
        ((503, ""), DeviceError, r"it answers 503"),
    ],
)
def test_a_refusal_is_one_sentence(
    hub: Hub, tmp_path: Path, refusal: tuple[int, str], kind: type[EngineError], says: str
) -> None:
    hub.refusal = refusal
    with pytest.raises(EngineError, match=says) as raised:
        fetch(hub, tmp_path)
    assert type(raised.value) is kind
    assert "\n" not in str(raised.value)
    assert hub.endpoint in str(raised.value)


def test_a_hub_out_of_reach_is_one_sentence(hub: Hub, tmp_path: Path) -> None:
    with serve({}) as gone:
        pass
    says = "cannot fetch .* check the network and run .*: finished files are kept, an unfinished"
    with pytest.raises(DeviceError, match=says) as raised:
        fetch(gone, tmp_path)
    assert "\n" not in str(raised.value)


def test_a_name_that_is_no_repository_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="is no repository name"):
        download(tmp_path, repo="a/b/c")


def test_a_file_that_vanished_is_one_sentence(hub: Hub, tmp_path: Path) -> None:
    def vanish(progress: DownloadProgress) -> None:
        hub.files = {}

    with pytest.raises(DeviceError, match=r"cannot fetch config\.json .*it answers 404"):
        fetch(hub, tmp_path, vanish)


def test_a_disk_that_fills_up_is_told_with_the_way_out(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_until_full(url: str, temp_file: Any, **_: object) -> NoReturn:
        temp_file.write(b"some")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr("huggingface_hub.file_download.http_get", write_until_full)
        with pytest.raises(DeviceError, match=r"disk of .* is full .* run the same command again"):
            fetch(hub, tmp_path)
    assert partial_files(tmp_path) == []
    fetch(hub, tmp_path)
    assert found_files(tmp_path) == FILES


def test_a_full_disk_is_seen_in_what_native_code_says(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> NoReturn:
        raise RuntimeError("Data processing error: No space left on device (os error 28)")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    with pytest.raises(DeviceError, match="is full"):
        fetch(hub, tmp_path)


def test_another_models_folder_is_left_alone(hub: Hub, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "llama"}')
    with pytest.raises(BadRequest, match=r"holds another model \(llama\)"):
        fetch(hub, tmp_path)
    assert found_files(tmp_path) == {"config.json": b'{"model_type": "llama"}'}
    with pytest.raises(BadRequest, match="is a file"):
        fetch(hub, config)


def test_a_folder_that_cannot_be_made_is_one_sentence(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DeviceError, match=r"cannot write to .*: Not a directory"):
        fetch(hub, tmp_path / "file" / "below")


def test_a_second_download_into_a_folder_is_refused(hub: Hub, tmp_path: Path) -> None:
    lock = tmp_path / ".cache/huggingface/ds41.lock"
    lock.parent.mkdir(parents=True)
    with lock.open("w") as first:
        fcntl.flock(first, fcntl.LOCK_EX)
        with pytest.raises(BadRequest, match=r"another download into .* is under way"):
            fetch(hub, tmp_path)
    fetch(hub, tmp_path)
    assert found_files(tmp_path) == FILES


def test_the_help_says_what_a_stop_costs() -> None:
    said = " ".join(CliRunner().invoke(app, ["download", "--help"]).output.split())
    assert "an unfinished one starts from its beginning" in said
    assert "7 GB" in said and "101 GB" in said


def test_the_command_reports_and_says_how_to_go_on(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["download", str(tmp_path), "--repo", REPO, "--revision", COMMIT]

    def stop(*args: Any, **options: Any) -> None:
        options["report"] = stop_within(LAST, 1)
        download(*args, endpoint=hub.endpoint, **options)

    monkeypatch.setattr(download_cli, "download", stop)
    stopped = CliRunner().invoke(app, command)
    assert stopped.exit_code == 130
    for part in (str(tmp_path), "run the same command", "unfinished one starts from its beginning"):
        assert part in stopped.stderr

    monkeypatch.setattr(download_cli, "download", partial(download, endpoint=hub.endpoint))
    hub.refusal = (404, "RepoNotFound")
    refused = CliRunner().invoke(app, command)
    assert refused.exit_code == 2
    assert refused.stderr.startswith(f"ds41: {hub.endpoint} has no {REPO}")
    assert len(refused.stderr.splitlines()) == 1

    hub.refusal = None
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0
    assert [f"{n}/4" for n in range(1, 5)] == [
        line.split()[0] for line in done.stderr.split("\n")[:4]
    ]
    assert f"ds41 run --model {tmp_path}" in done.stderr.replace("\n", " ")
    assert found_files(tmp_path) == FILES
