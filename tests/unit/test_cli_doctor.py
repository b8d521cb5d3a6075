"""`ds41 doctor`: what is said of machines that are well, and of each thing that can be wrong."""

import json
import os
import socket
import subprocess
import sys
import threading
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import pytest
from typer.testing import CliRunner

from mlx_engine.cli.doctor import Checks, Finding
from mlx_engine.cli.machine import Machine, System
from mlx_engine.cli.main import app
from mlx_engine.config_file import load_config, released_config
from mlx_engine.memory import MachineMemory, needs
from mlx_engine.ops.launch import FastPaths
from mlx_engine.server.security import Access
from mlx_engine.tiny import tiny_checkpoint
from tests.scripted_engine import ScriptedEngine
from tests.server.support import on_port, serving, until

GB = 10**9
MAC = System("Darwin", "15.1", "arm64", (3, 12, 4))
LINUX = System("Linux", "2.36", "x86_64", (3, 11, 7))
STUDIO = MachineMemory("Metal", 512 * GB, 384 * GB)
PLAIN = MachineMemory("CPU", 24 * GB, 20 * GB)
CLAUDE = "/usr/local/bin/claude"


@dataclass
class FakeMachine(Machine):
    """A machine of which everything is told; by default a Mac on which all is well."""

    of_system: System = MAC
    of_memory: MachineMemory = STUDIO
    mlx_error: ImportError | None = None
    off: tuple[str, ...] = ()
    free_bytes: int = 900 * GB
    claude: str | None = CLAUDE
    said: dict[str, str] = field(
        default_factory=lambda: {"sysctl": "0", CLAUDE: "2.1.332 (Claude Code)"}
    )

    def system(self) -> System:
        return self.of_system

    def mlx_version(self) -> str:
        if self.mlx_error is not None:
            raise self.mlx_error
        return "0.32.4"

    def memory(self) -> MachineMemory:
        assert self.mlx_error is None
        return self.of_memory

    def kernels(self) -> tuple[FastPaths, list[str]]:
        assert self.of_memory.kind != "CPU"
        on = tuple(sorted({"attention", "mhc"} - set(self.off)))
        return FastPaths(on, self.off), [f"the {family} kernels are off" for family in self.off]

    def space(self, folder: Path) -> tuple[int, int]:
        return self.free_bytes, 1000 * GB

    def program(self, name: str) -> str | None:
        return self.claude

    def output(self, *command: str) -> str | None:
        return self.said.get(command[0])


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("cache"))


def findings(machine: Machine, directory: Path | None, **options: Any) -> dict[str, Finding]:
    # Port 0 is free on any machine.
    checks = Checks(machine, directory, None, 0, Path(gettempdir(), "nowhere", "kv"))
    return {finding.what: finding for finding in replace(checks, **options).run()}


def test_a_mac_on_which_all_is_well(tiny: Path) -> None:
    found = findings(FakeMachine(), tiny)
    assert {finding.level for finding in found.values()} == {"ok"}
    assert not any(finding.todo for finding in found.values())
    assert list(found) == [
        *("system", "Python", "MLX", "model", "memory", "wired limit", "kernels"),
        *("disk cache", "port", "Claude Code"),
    ]


def test_without_a_model_the_release_is_compared() -> None:
    roomy = findings(FakeMachine(), None)
    assert roomy["model"].level == "not checked" and roomy["memory"].level == "ok"
    limit = released_config().max_position_embeddings
    assert f"{limit:,} tokens" in roomy["memory"].seen and roomy["disk"].level == "ok"
    tight = findings(FakeMachine(of_memory=MachineMemory("Metal", 512 * GB, 310 * GB)), None)
    # Nobody has said that the release is to run there.
    assert tight["memory"].level == "warning" and "--ctx" in tight["memory"].todo
    full = findings(FakeMachine(free_bytes=400 * GB), None)
    assert full["disk"].level == "warning" and "511 GB" in full["disk"].seen


@pytest.mark.parametrize(
    ("machine", "what", "level", "todo"),
    [
        (FakeMachine(replace(MAC, version="13.6")), "system", "problem", "macOS 14"),
        (FakeMachine(replace(MAC, processor="x86_64")), "system", "problem", "arm64"),
        (FakeMachine(replace(LINUX, version="2.31")), "system", "problem", "glibc 2.35"),
        (FakeMachine(replace(LINUX, version="")), "system", "problem", "glibc 2.35"),
        (FakeMachine(System("Windows", "", "AMD64", (3, 12, 0))), "system", "problem", "Linux"),
        (FakeMachine(replace(MAC, python=(3, 10, 1))), "Python", "problem", "3.11"),
        (FakeMachine(replace(MAC, python=(3, 14, 0))), "Python", "problem", "3.13"),
        (FakeMachine(MAC, PLAIN), "MLX", "problem", "Metal"),
        (FakeMachine(LINUX, PLAIN), "MLX", "warning", "cuda12"),
        (FakeMachine(off=("mhc",)), "kernels", "warning", "report"),
        (FakeMachine(free_bytes=9 * GB), "disk cache", "warning", "free some space"),
        (FakeMachine(claude=None), "Claude Code", "warning", "npm install"),
        (FakeMachine(said={CLAUDE: "2.1.99 (Claude Code)"}), "Claude Code", "warning", "2.1.112"),
        (FakeMachine(said={}), "Claude Code", "warning", "install it again"),
    ],
)
def test_what_is_wrong_is_found_and_only_that(
    tiny: Path, machine: FakeMachine, what: str, level: str, todo: str
) -> None:
    found = findings(machine, tiny)
    assert found[what].level == level and todo in found[what].todo
    others = [f for f in found.values() if f.what != what]
    assert {f.level for f in others} <= {"ok", "not checked"}
    assert all(f.seen and not f.todo for f in others)


def test_the_kernels_that_are_off_are_named_with_the_reason(tiny: Path) -> None:
    found = findings(FakeMachine(off=("mhc",)), tiny)["kernels"]
    assert found.seen == "off: mhc; on: attention (the mhc kernels are off)"


def test_too_little_memory_for_a_model_that_is_named(tiny: Path) -> None:
    config = load_config(tiny)
    needed_mb = -(-needs(config, config.max_position_embeddings).total_bytes // 2**20)
    small = MachineMemory("Metal", 2 * needed_mb * 2**20, 2**20)
    found = findings(FakeMachine(of_memory=small, said={"sysctl": "1"}), tiny)
    assert found["memory"].level == "problem"
    assert f"sudo sysctl iogpu.wired_limit_mb={needed_mb}" in found["memory"].todo
    assert "1 MB" in found["wired limit"].seen


@pytest.mark.parametrize("context_tokens", [-1, 0, 131_073])
def test_a_context_that_cannot_be_is_a_problem_among_others(
    tiny: Path, context_tokens: int
) -> None:
    found = findings(FakeMachine(), tiny, context_tokens=context_tokens)
    assert found["memory"].level == "problem" and "--ctx" in found["memory"].todo
    assert found["memory"].seen.endswith("the model takes 1 to 131,072")
    assert found["wired limit"].level == "ok" and found["Claude Code"].level == "ok"


def test_what_cannot_be_seen_is_said_to_be_so(tiny: Path) -> None:
    found = findings(FakeMachine(LINUX, PLAIN), tiny)
    assert [f.what for f in found.values() if f.level == "not checked"] == [
        "wired limit",
        "kernels",
    ]


def test_without_mlx_the_rest_is_checked(tiny: Path) -> None:
    machine = FakeMachine(LINUX, mlx_error=ImportError("libmlx.so: no such file"))
    found = findings(machine, tiny)
    assert found["MLX"].level == "problem" and "libmlx.so" in found["MLX"].seen
    assert "cpu, cuda12 and cuda13" in found["MLX"].todo
    unchecked = [found[what].level for what in ("model", "memory", "kernels")]
    assert unchecked == ["not checked"] * 3
    assert found["disk cache"].level == found["port"].level == "ok"


def test_a_folder_that_the_disk_cache_refuses(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(folder: Path) -> Finding:
        return findings(FakeMachine(), tiny, kv_directory=folder)["disk cache"]

    def forbidden(path: Path, mode: int) -> bool:
        return False

    new = tmp_path / "new" / "folder"
    assert found(new).level == "ok" and not new.parent.exists()
    file = tmp_path / "notes.txt"
    file.write_text("mine")
    for folder, reason in ((file, "Not a directory"), (tmp_path, "lacks its marker")):
        refused = found(folder)
        assert refused.level == "problem" and reason in refused.seen
        assert "--kv-disk-dir" in refused.todo
    assert file.read_text() == "mine" and [*tmp_path.iterdir()] == [file]
    # As for one who may not write there, which nobody can forbid to root.
    monkeypatch.setattr("os.access", forbidden)
    assert found(new).seen == f"{tmp_path} cannot be written to"


def test_a_model_that_lacks_a_file_or_is_none(tmp_path: Path) -> None:
    directory = tiny_checkpoint(tmp_path)
    shard = sorted(directory.glob("*.safetensors"))[0]
    shard.unlink()
    found = findings(FakeMachine(), directory)["model"]
    assert found.level == "problem" and shard.name in found.seen
    assert f"ds41 download {directory}" in found.todo
    absent = findings(FakeMachine(), tmp_path / "absent")
    assert absent["model"].level == "problem" and absent["memory"].level == "not checked"


def test_whose_the_port_is(tiny: Path) -> None:
    key = Access(api_key="which doctor does not have")
    with serving(ScriptedEngine(), access=key) as server, on_port(server.app) as address:
        until(lambda: server.worker.state == "ready")
        ours = findings(FakeMachine(), tiny, port=int(address.rpartition(":")[2]))["port"]
    assert ours.level == "ok" and ours.seen.endswith("has a ds41 serve, which is ready")
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def greet() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b"SSH-2.0-other\r\n")

        thread = threading.Thread(target=greet)
        thread.start()
        other = findings(FakeMachine(), tiny, port=listener.getsockname()[1])["port"]
        thread.join()
    assert other.level == "warning" and "--port" in other.todo


@pytest.mark.parametrize(("machine", "code"), [(FakeMachine(), 0), (FakeMachine(MAC, PLAIN), 1)])
def test_the_command_says_it_and_its_exit_code(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, machine: FakeMachine, code: int
) -> None:
    monkeypatch.setattr("mlx_engine.cli.doctor.Machine", lambda: machine)
    monkeypatch.setenv("DS41_MODEL", str(tiny))
    args = ["doctor", "--kv-disk-dir", "none"]
    plain = CliRunner().invoke(app, args)
    record = json.loads(CliRunner().invoke(app, [*args, "--json"]).stdout)
    assert plain.exit_code == code == record["problems"]
    assert plain.stdout.splitlines()[-1] == ("1 problem" if code else "nothing to do")
    for finding in record["findings"]:
        assert set(finding) == {"what", "level", "seen", "todo"}
        assert finding["seen"] in plain.stdout and finding["todo"] in plain.stdout


def test_this_machine_is_checked_without_a_traceback(tiny: Path, tmp_path: Path) -> None:
    code = "from mlx_engine.cli.main import app; app()"
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, "doctor", "--json", "--model", str(tiny)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "DS41_CACHE_DIR": str(tmp_path), "PATH": str(tmp_path)},
    )
    assert run.returncode == 0 and run.stderr == "", run.stderr
    found = {finding["what"]: finding for finding in json.loads(run.stdout)["findings"]}
    assert found["model"]["level"] == "ok" and "not on the PATH" in found["Claude Code"]["seen"]
    assert not [*tmp_path.iterdir()]
