"""`ds41` from the outside: exit codes, help, real streams, and one line for whatever is wrong."""

import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from typer.testing import CliRunner, Result

import mlx_engine
from mlx_engine.cli.main import app
from mlx_engine.errors import (
    BadRequest,
    CacheCorrupt,
    ContextTooLong,
    DeviceError,
    EngineError,
    ModelFileError,
)
from tests.fake_engine import FakeEngine, FakeModel

ROOT = Path(__file__).resolve().parents[2]
SAID = "why\n</think>\nso\U0001f600"


@pytest.fixture(autouse=True)
def no_checkpoint(model: FakeModel) -> None:
    """No test here opens a checkpoint."""


def ds41(*args: str, stdin: str | bytes | None = None) -> Result:
    return CliRunner().invoke(app, args, input=stdin)


def assert_one_line(result: Result, sentence: str) -> None:
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("ds41: ")
    assert sentence in line
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["run", ""], "the prompt is empty"),
        (["run", " \n"], "the prompt is empty"),
        (["run"], "the prompt is empty"),
        (["run", "-"], "the prompt is empty"),
        (["run", "Hi", "--temperature", "-1"], "temperature is -1.0, it must be"),
        (["run", "Hi", "--temperature", "nan"], "temperature is nan, it must be"),
        (["run", "Hi", "--temperature", "warm"], "'--temperature'"),
        (["run", "Hi", "--top-p", "0"], "top_p is 0.0, it must be"),
        (["run", "Hi", "--top-p", "1.1"], "top_p is 1.1, it must be"),
        (["run", "Hi", "--min-p", "2"], "min_p is 2.0, it must be"),
        (["run", "Hi", "--seed", "-1"], "seed is -1, it must be"),
        (["run", "Hi", "--seed", str(2**63)], f"seed is {2**63}, it must be"),
        (["run", "Hi", "--seed", "1.5"], "'--seed'"),
        (["run", "Hi", "--max-tokens", "0"], "max_tokens is 0, it must be"),
        (["run", "Hi", "--stop", ""], "a stop string is empty"),
        (["run", "Hi", "--effort", "ultra"], "'--effort'"),
        (["run", "Hi", "--dtype", "float16"], "'--dtype'"),
        (["run", "Hi", "--prefill", "long"], "'--prefill'"),
        (["run", "Hi", "--raw", "--system", "x"], "leave out system"),
        (["run", "Hi", "there"], "there"),
        (["run", "Hi", "--model="], "it is empty, name a folder"),
        (["chat", "--model="], "it is empty, name a folder"),
        (["serve", "--model", ""], "it is empty, name a folder"),
        (["doctor", "--model="], "it is empty, name a folder"),
        (["inspect", ""], "'DIR': it is empty, name a folder"),
        (["download", ""], "'DIR': it is empty, name a folder"),
        (["run", "Hi", "--color"], "No such option: --color"),
        (["run", "\udcff"], "not valid Unicode"),
        (["--nothing"], "No such option: --nothing"),
        (["rum"], "No such command 'rum'. Did you mean 'run'?"),
    ],
)
def test_a_bad_value_is_one_line_before_anything_is_loaded(
    model: FakeModel, args: list[str], sentence: str
):
    assert_one_line(ds41(*args), sentence)
    assert model.opened == []


def test_bytes_that_are_no_text(model: FakeModel):
    assert_one_line(ds41("run", stdin=b"ab\xff"), "not UTF-8 text at byte 2")
    assert model.opened == []


@pytest.mark.parametrize(
    "error", [BadRequest, CacheCorrupt, ContextTooLong, DeviceError, EngineError, ModelFileError]
)
def test_a_failure_of_the_engine_is_one_line(
    monkeypatch: pytest.MonkeyPatch, error: type[EngineError]
):
    def fail(*args: Any, **options: Any) -> FakeEngine:
        raise error("it broke here: do that")

    for step in ("load", "check", "open"):
        monkeypatch.setattr(FakeModel, step, fail)
        monkeypatch.setattr("mlx_engine.loading.open_model", FakeModel(FakeEngine()).open)
        assert_one_line(ds41("run", "Hi"), "it broke here: do that")


def test_a_mistake_in_the_program_is_not_hidden(monkeypatch: pytest.MonkeyPatch):
    def fail(*args: Any, **options: Any) -> FakeEngine:
        raise ZeroDivisionError

    monkeypatch.setattr(FakeModel, "load", fail)
    assert isinstance(ds41("run", "Hi").exception, ZeroDivisionError)


def test_version_and_help():
    assert ds41("--version").output == f"ds41 {mlx_engine.__version__}\n"
    for args in ([], ["--help"], ["-h"]):
        result = ds41(*args)
        assert result.exit_code == 0
        assert all(command in result.stdout for command in ("run", "inspect", "download", "bench"))
    for option in ("--effort", "--max-tokens", "--stop", "--ctx", "--json", "DS41_MODEL"):
        assert option in ds41("run", "--help").stdout


@pytest.mark.parametrize("args", [["--version"], ["--help"], ["run", "--help"]])
def test_help_does_not_wait_for_mlx(args: list[str]):
    code = (
        "import atexit, sys\n"
        "atexit.register(lambda: print('imported:', 'mlx.core' in sys.modules))\n"
        f"from mlx_engine.cli.main import app; app({args})"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert out.returncode == 0
    assert out.stdout.splitlines()[-1] == "imported: False"


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere MLX brings its library")
@pytest.mark.parametrize("command", [["run", "Hi"], ["inspect", "."]], ids=lambda c: c[0])
def test_without_a_back_end_the_extras_are_named(tmp_path: Path, command: list[str]):
    # As pip leaves it without an extra: the compiled module, and no libmlx.so beside it.
    (tmp_path / "mlx").mkdir()
    shutil.copy(str(mx.__file__), tmp_path / "mlx")
    (tmp_path / "mlx" / "__init__.py").touch()
    out = subprocess.run(
        [sys.executable, "-c", "from mlx_engine.cli.main import app; app()", *command],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (out.returncode, out.stdout) == (2, "")
    (line,) = out.stderr.splitlines()
    assert line.startswith("ds41: MLX cannot start (libmlx.so: ")
    assert "extras cpu, cuda12 and cuda13" in line


def test_another_missing_module_is_not_hidden(monkeypatch: pytest.MonkeyPatch):
    def fail(*args: Any, **options: Any) -> FakeEngine:
        raise ImportError("no such thing", name="core", path="/elsewhere/core.so")

    monkeypatch.setattr(FakeModel, "load", fail)
    assert isinstance(ds41("run", "Hi").exception, ImportError)


# A program of its own, for what needs real streams: a load that reports, a prompt in two chunks.
PROGRAM = """
import mlx_engine.loading
from mlx_engine.cli.main import app
from tests.fake_engine import FakeEngine, FakeModel

mlx_engine.loading.open_model = FakeModel(FakeEngine({said!r}, chunk_tokens=50)).open
app()
"""


def start(said: str, *args: str, **streams: Any) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-W", "error", "-c", PROGRAM.format(said=said), *args]
    return subprocess.Popen[bytes](command, cwd=ROOT, **streams)


def test_a_closed_pipe_ends_quietly():
    with start(
        "</think>" + "so " * 20_000, "run", "Hi", stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as program:
        assert program.stdout and program.stderr
        assert program.stdout.read(2) == b"so"
        program.stdout.close()
        (line,) = program.stderr.read().splitlines()
        assert line.startswith(b"ds41: no GPU kernels")
        assert program.wait(60) == 1


def test_a_warning_is_a_line_of_its_own():
    with start(
        "why</think>so<｜User｜>", "run", "Hi", stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as program:
        answer, rest = program.communicate(timeout=60)
    assert answer == b"so\n"
    (line,) = [line for line in rest.decode().splitlines() if "<｜User｜>" in line]
    assert line.startswith("ds41: the model wrote <｜User｜>")


def test_bars_and_dim_text_on_a_terminal_only():
    leader, follower = pty.openpty()
    with start(SAID, "run", "Hi", stdout=subprocess.PIPE, stderr=follower) as program:
        os.close(follower)
        shown = b""
        while piece := _read_terminal(leader):
            shown += piece
        assert program.stdout
        assert program.stdout.read().decode() == "so\U0001f600\n"
        assert program.wait(60) == 0
    os.close(leader)
    for part in (b"load", b"1.0/2.0 GiB", b"prefill", b"\x1b[2mw", b"prompt 98 tokens"):
        assert part in shown

    with start(SAID, "run", "Hi", stdout=subprocess.PIPE, stderr=subprocess.PIPE) as program:
        _, plain = program.communicate(timeout=60)
    _, _, rest = plain.partition(b"\n")
    assert rest.startswith(b"why\n\nds41: prompt 98 tokens")


def _read_terminal(leader: int) -> bytes:
    try:
        return os.read(leader, 4096)
    except OSError:  # Linux reports the closed other end in this way
        return b""


# What a command may end with, and a thread that would abort the interpreter's own end.
ENDING = """
import sys, threading
import mlx.core as mx
from mlx_engine.cli import main, start

def compute():
    while True:
        mx.eval(mx.ones((256, 256)) @ mx.ones((256, 256)))
        is_at_work.set()

def app():
    sys.stdout.write("said")
    is_at_work.wait(60)
    {end}

is_at_work = threading.Event()
threading.Thread(target=compute, daemon=True).start()
main.app = app
start.main()
"""


@pytest.mark.parametrize(
    ("end", "code", "said"),
    [
        ("return", 0, ""),
        ("sys.exit()", 0, ""),
        ("sys.exit(7)", 7, ""),
        ("sys.exit('it broke')", 1, "it broke\n"),
        ("raise KeyboardInterrupt", 130, ""),
        ("raise ZeroDivisionError", 1, "ZeroDivisionError\n"),
    ],
)
def test_the_process_ends_with_its_code_whatever_is_at_work_in_it(
    end: str, code: int, said: str
) -> None:
    command = [sys.executable, "-c", ENDING.format(end=end)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (run.returncode, run.stdout) == (code, "said")
    assert run.stderr.endswith(said) and ("Traceback" in run.stderr) == ("Zero" in end)
    assert said or not run.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_an_output_that_cannot_be_written_is_no_success() -> None:
    command = [sys.executable, "-c", ENDING.format(end="return")]
    with open("/dev/full", "w") as full:
        assert subprocess.run(command, cwd=ROOT, stdout=full, timeout=120).returncode == 1


def test_no_output_at_all_is_none_to_be_written() -> None:
    command = [sys.executable, "-c", "from mlx_engine.cli.start import main; main()", "--version"]
    run = subprocess.run(["sh", "-c", 'exec "$@" >&- 2>&-', "sh", *command], cwd=ROOT, timeout=60)
    assert run.returncode == 0


def test_a_ctrl_c_while_an_extension_is_imported_ends_quietly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*args: Any, **options: Any) -> FakeEngine:
        raise ImportError("an extension was not initialised") from KeyboardInterrupt()

    monkeypatch.setattr(FakeModel, "load", fail)
    result = ds41("run", "Hi")
    assert (result.exit_code, result.stdout, result.stderr) == (130, "", "")
