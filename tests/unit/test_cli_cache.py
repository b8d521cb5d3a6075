"""`ds41 cache` over a folder with anchors of two models, and sizes as people write them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from mlx_engine.cli.kv_disk import kv_directory, parse_bytes
from mlx_engine.cli.main import app
from mlx_engine.errors import BadRequest
from tests.diskcache import content


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two anchors of one model and one of another, where the commands look by default."""
    monkeypatch.setenv("DS41_CACHE_DIR", str(tmp_path))
    folder = tmp_path / "kv"
    ids = content.tokens(1, 3000)
    with content.opened(folder) as cache:
        assert content.save(cache, ids, 1000) and content.save(cache, ids, 3000)
        assert cache.flush(content.FLUSH_S)
    with content.opened(folder, fingerprint=b"others") as cache:
        assert content.save(cache, ids, 500)
        assert cache.flush(content.FLUSH_S)
    return folder


def ds41(*args: str) -> Result:
    return CliRunner().invoke(app, ["cache", *args])


def lines(result: Result) -> list[list[str]]:
    """The cells of each line; two or more spaces are between them."""
    assert result.exit_code == 0, result.output
    cells = [line.split("  ") for line in result.stdout.splitlines()]
    return [[cell.strip() for cell in line if cell.strip()] for line in cells]


def files(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.is_file()}


def test_ls_shows_what_can_be_resumed(folder: Path):
    head, *rows = lines(ds41("ls"))
    assert head == ["model", "tokens", "of them new", "bytes", "uses", "stored"]
    by_model: dict[str, list[list[str]]] = {}
    for model, *cells in rows:
        assert model.startswith("kv-")
        by_model.setdefault(model, []).append(cells[:2])
    assert sorted(by_model.values(), key=len) == [
        [["500", "500"]],
        [["1,000", "1,000"], ["3,000", "2,000"]],
    ]
    assert sum(int(row[3].replace(",", "")) for row in rows) <= content.folder_bytes(folder)


def test_ls_of_another_folder(folder: Path, tmp_path: Path):
    other = tmp_path / "other"
    folder.rename(other)
    assert len(lines(ds41("ls", "--kv-disk-dir", str(other)))) == 4


@pytest.mark.parametrize("command", ["ls", "stats", "verify", "prune", "purge"])
def test_where_nothing_is_stored_yet(folder: Path, command: str):
    assert ds41("purge").exit_code == 0
    for _ in range(2):
        result = ds41(command)
        assert result.exit_code == 0
        assert result.stdout == f"nothing is stored yet in {folder}\n"
        if folder.exists():
            folder.rmdir()
    named = ds41(command, "--kv-disk-dir", str(folder))
    assert named.exit_code == 2 and "is not there" in named.stderr
    folder.write_text("a file")
    result = ds41(command)
    assert result.exit_code == 2 and "cannot be read" in result.stderr


def test_a_time_that_is_none_is_no_crash(folder: Path):
    ids = content.tokens(2, 100)
    with content.opened(folder, clock=lambda: 1e17) as cache:
        assert content.save(cache, ids, 100)
        assert cache.flush(content.FLUSH_S)
    assert "?" in [row[-1] for row in lines(ds41("ls"))]


def test_stats_count_every_byte(folder: Path):
    for i in range(12):
        (folder / f"film{i:02}.mov").write_bytes(bytes(100))
    path, _, *rows = lines(ds41("stats"))
    assert path == [str(folder)]
    found = {row[0]: row[1:] for row in rows}
    models = [row for name, row in found.items() if name.startswith("kv-")]
    assert sorted(row[:2] for row in models) == [["1", "500"], ["2", "3,000"]]
    assert found["total"] == [f"{content.folder_bytes(folder):,}"]
    n_bytes, named = found["not ours"]
    assert n_bytes == "1,200"
    assert named.startswith("film00.mov, film01.mov") and named.endswith("film09.mov and 2 more")
    model_bytes = sum(int(row[2].replace(",", "")) for row in models)
    top_bytes = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
    assert model_bytes + top_bytes == content.folder_bytes(folder)


def test_verify_names_what_is_damaged(folder: Path):
    result = ds41("verify")
    assert result.exit_code == 0
    assert result.stdout.splitlines()[-1].endswith(" 0 damaged")
    segment = min(folder.rglob("*.segment"))
    data = bytearray(segment.read_bytes())
    data[-1] ^= 1
    segment.write_bytes(data)
    for args in ((), ("--put-aside",)):
        result = ds41("verify", *args)
        assert result.exit_code == 1
        first, last = result.stdout.splitlines()
        assert first.startswith(f"{segment.relative_to(folder)}: ")
        assert last.endswith(" 1 damaged")
        assert segment.exists() == (not args)
    assert ds41("verify").exit_code == 0


def test_prune_removes_what_is_of_no_use(folder: Path):
    (model, *_) = folder.glob("kv-*")
    left_over = model / "7.partial"
    left_over.write_bytes(bytes(123))
    ours = files(folder)
    dry = ds41("prune", "--dry-run")
    name, summary = dry.stdout.splitlines()
    assert name == str(left_over.relative_to(folder))
    n_bytes = content.folder_bytes(folder) - 123
    assert summary == f"would remove 1 file of 123 bytes, {n_bytes:,} bytes stay"
    assert files(folder) == ours
    assert ds41("prune").stdout == f"removed 1 file of 123 bytes, {n_bytes:,} bytes stay\n"
    assert files(folder) == ours - {left_over}
    assert "removed 0 files of 0 bytes" in ds41("prune").stdout


def test_prune_to_a_size(folder: Path):
    film = folder / "film.mov"
    film.write_bytes(bytes(100))
    before = content.folder_bytes(folder)
    assert "removed 0 files" in ds41("prune", "--to", "1GB").stdout
    assert ds41("prune", "--to", f"{before - 1}").exit_code == 0
    assert 0 < content.folder_bytes(folder) < before
    assert len(lines(ds41("ls"))) == 3
    ds41("prune", "--to", "1B")
    assert not list(folder.rglob("*.segment"))
    assert film.stat().st_size == 100


def test_purge_leaves_what_is_not_ours(folder: Path):
    (model, *_) = folder.glob("kv-*")
    foreign = {folder / "film.mov", model / "notes.txt"}
    for path in foreign:
        path.write_bytes(bytes(10))
    before = files(folder)
    dry = ds41("purge", "--dry-run")
    assert files(folder) == before
    named = {folder / line for line in dry.stdout.splitlines()[:-1]}
    result = ds41("purge")
    assert result.exit_code == 0
    assert foreign <= files(folder)
    assert before - files(folder) == named
    assert len(named) > 6
    assert f"removed {len(named)} files of " in result.stdout
    assert len(lines(ds41("ls"))) == 1


@pytest.mark.parametrize("command", ["ls", "stats", "verify", "prune", "purge"])
def test_a_folder_that_is_no_cache_is_left_alone(
    tmp_path: Path, command: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("DS41_CACHE_DIR", str(tmp_path))
    other = tmp_path / "documents"
    other.mkdir(mode=0o700)
    (other / "7.partial").write_bytes(b"mine")
    for named, sentence in ((str(other), "not a cache of ds41"), ("none", "none is no folder")):
        result = ds41(command, "--kv-disk-dir", named)
        assert (result.exit_code, result.stdout) == (2, "")
        (line,) = result.stderr.splitlines()
        assert line.startswith("ds41: ") and sentence in line
    assert (other / "7.partial").read_bytes() == b"mine"


def test_help_says_what_lies_there_and_who_can_read_it():
    for args in ((), ("--help",)):
        result = ds41(*args)
        assert result.exit_code == 0
        said = " ".join(result.stdout.split())
        assert "turned back into the text of prompts" in said and "only their owner" in said
        for command in ("ls", "stats", "verify", "prune", "purge"):
            assert command in said


def test_no_model_is_needed(folder: Path):
    """The command is of use where MLX cannot start."""
    program = "import sys; sys.modules['mlx.core'] = None; " + (
        "from mlx_engine.cli.main import app; app(['cache', 'stats'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=os.environ
    )
    assert done.returncode == 0, done.stderr
    assert str(folder) in done.stdout


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [
        ("64GB", 64 * 10**9),
        ("500MB", 500 * 10**6),
        ("500 mb", 500 * 10**6),
        ("1.5TiB", 3 * 2**39),
        ("2K", 2000),
        ("1KiB", 1024),
        ("12", 12),
        (" 12B ", 12),
        ("0.5G", 5 * 10**8),
    ],
)
def test_sizes(text: str, n_bytes: int):
    assert parse_bytes(text) == n_bytes


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "1e9", "64GBs", "64 G B", "1,5GB", "0", "0.1B"])
def test_what_is_no_size_is_refused(text: str):
    with pytest.raises(BadRequest, match="the size"):
        parse_bytes(text)


@given(st.integers(1, 2**62))
def test_a_number_of_bytes_is_exact(n_bytes: int):
    assert parse_bytes(str(n_bytes)) == n_bytes


def test_the_folder_that_an_option_names(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DS41_CACHE_DIR", "/c")
    assert kv_directory(None) == Path("/c/kv")
    assert kv_directory("none") is None
    with pytest.raises(BadRequest, match="name a folder"):
        kv_directory("")
    assert kv_directory("./none") == Path("none")
    assert kv_directory("~/x") == Path.home() / "x"
