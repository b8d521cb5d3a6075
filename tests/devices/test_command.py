"""`ds41` over 2 and 4 devices says what it says over one: answers, turns, restored states."""

import json
import re
import shutil
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from mlx_engine.saving import LEAST_TOKENS
from tests.devices.command import GREEDY, ds41, environment, json_of, write_model

# So long that a state of it is worth keeping on disk; then one that goes on, and one that parts.
PROMPT = " ".join(["one two three four"] * 8)
TURNS = f"{PROMPT}\nand five\n/new\n{PROMPT}\n"
ANSWER = (*GREEDY, "--max-tokens", "4")


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("devices")
    return environment(write_model(folder / "model"), folder / "cache")


@pytest.fixture(scope="module")
def kv(env: dict[str, str]) -> Path:
    """A disk cache with what one device has computed of a prompt."""
    folder = Path(env["DS41_CACHE_DIR"]) / "kv"
    json_of(ds41(env, "run", PROMPT, "--json", *ANSWER, "--kv-disk-dir", str(folder)))
    return folder


def answers(env: dict[str, str], folder: Path | str, *options: str) -> tuple[str, list[int]]:
    """What is answered to turns, and how many tokens of each prompt were there."""
    chat = ds41(env, "chat", *ANSWER, "--kv-disk-dir", str(folder), *options, text=TURNS)
    assert chat.returncode == 0, chat.stderr
    lines = [line for line in chat.stderr.splitlines() if line.startswith("prompt ")]
    assert len(lines) == 3
    cached = [re.search(r"\((\d+) cached\)", line) for line in lines]
    return chat.stdout, [int(each[1]) if each else 0 for each in cached]


@pytest.mark.parametrize("count", ["2", "4"])
def test_turns_are_answered_as_by_one_device(
    count: str, env: dict[str, str], kv: Path, tmp_path: Path
) -> None:
    alone, known = answers(env, "none")
    # The second turn goes on, and the third goes back to the end of its prompt.
    assert known[0] == 0 < known[2] < known[1]
    folder = shutil.copytree(kv, tmp_path / "kv")
    several, restored = answers(env, folder, "--devices", count)
    assert several == alone and len(set(alone.splitlines())) > 1
    assert restored[0] >= LEAST_TOKENS and restored[1:] == known[1:]
    # What several have left there, one device takes up.
    again, taken_up = answers(env, folder)
    assert again == alone and taken_up[0] >= restored[0]


def test_tokens_are_drawn_the_same(env: dict[str, str]) -> None:
    options = ("--json", "--dtype", "float32", "--effort", "off", "--max-tokens", "6")
    drawn = [
        json_of(ds41(env, "run", "Hi", *options, "--seed", "5", "--top-p", "0.9", *more))["text"]
        for more in ((), ("--devices", "2"))
    ]
    assert drawn[0] == drawn[1]


def test_the_bench_measures_several(env: dict[str, str]) -> None:
    options = ("--contexts", "20", "--tokens", "1", "--devices", "2")
    result = ds41(env, "bench", "model", *options)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout.splitlines()[-1])["devices"] == 2


def host_file(folder: Path, hosts: Sequence[Mapping[str, object]], port: int) -> str:
    path = folder / "hosts.json"
    path.write_text(json.dumps({"hosts": hosts, "port": port}))
    return str(path)


def free_ports() -> int:
    """The first of two ports that are free, most likely."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1]) // 2 * 2 % 60000 + 2048


LOCAL = {"ssh": "127.0.0.1", "ips": ["127.0.0.1"]}


def test_a_host_is_reached_by_ssh(env: dict[str, str], tmp_path: Path) -> None:
    ssh = tmp_path / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text(
        "#!/bin/sh\n"
        f'echo "$@" > {tmp_path}/asked\n'
        'while [ "$1" = -o ]; do shift 2; done\n'
        'test "$1" = -- && exec sh -c "$3"\n'
    )
    ssh.chmod(0o755)
    hosts = [LOCAL, {"ssh": "mac2.local", "ips": ["127.0.0.1"]}]
    path = f"{ssh.parent}:{env['PATH']}"
    file = host_file(tmp_path, hosts, free_ports())
    command = ("run", "Hi", "--json", *ANSWER)
    there = json_of(ds41(env | {"PATH": path}, *command, "--hosts", file))
    assert there["text"] == json_of(ds41(env, *command))["text"]
    asked = (tmp_path / "asked").read_text()
    assert "BatchMode=yes" in asked and "mac2.local" in asked


def refused(env: dict[str, str], *args: str) -> str:
    """The one sentence with which a run is refused at its start."""
    result = ds41(env, "run", "Hi", *args)
    assert (result.returncode, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    return line


def test_a_port_in_use(env: dict[str, str], tmp_path: Path) -> None:
    port = free_ports()
    for taken in (port, port + 1):
        with socket.create_server(("127.0.0.1", taken)):
            line = refused(env, "--hosts", host_file(tmp_path, [LOCAL, LOCAL], port))
            assert f"port {taken} cannot be opened" in line and "in use" in line


def test_a_peer_that_cannot_be_reached(env: dict[str, str], tmp_path: Path) -> None:
    # Nobody is at this address of documentation's; the rank there does not listen to begin with.
    hosts = [LOCAL, {"ssh": "127.0.0.1", "ips": ["203.0.113.1"]}]
    line = refused(env, "--hosts", host_file(tmp_path, hosts, free_ports()))
    assert "rank 1 on 127.0.0.1" in line and "203.0.113.1 port" in line


def test_a_missing_ssh(env: dict[str, str], tmp_path: Path) -> None:
    file = host_file(tmp_path, [LOCAL, {"ssh": "mac2.local", "ips": ["127.0.0.1"]}], free_ports())
    line = refused(env | {"PATH": str(tmp_path)}, "--hosts", file)
    assert "ssh cannot be started for rank 1 on mac2.local" in line


def test_a_host_where_nothing_is_installed(env: dict[str, str], tmp_path: Path) -> None:
    other = {**LOCAL, "python": str(tmp_path / "python")}
    line = refused(env, "--hosts", host_file(tmp_path, [LOCAL, other], free_ports()))
    assert f"{tmp_path / 'python'} cannot be started for rank 1" in line


def test_a_back_end_that_is_not_there(env: dict[str, str], tmp_path: Path) -> None:
    path = Path(host_file(tmp_path, [LOCAL, LOCAL], free_ports()))
    path.write_text(json.dumps({**json.loads(path.read_text()), "backend": "nccl"}))
    assert "MLX cannot join devices by nccl here" in refused(env, "--hosts", str(path))


def test_different_checkpoints(env: dict[str, str], tmp_path: Path) -> None:
    other = write_model(tmp_path / "other", seed=1)
    file = host_file(tmp_path, [LOCAL, {**LOCAL, "model": str(other)}], free_ports())
    assert "rank 1 on 127.0.0.1 has another checkpoint" in refused(env, "--hosts", file)
    config = other / "config.json"
    config.write_text(config.read_text() + "\n")
    assert "another config.json of the checkpoint" in refused(env, "--hosts", file)


def test_a_count_that_does_not_divide(env: dict[str, str]) -> None:
    line = refused(env, "--devices", "3")
    assert "3 devices cannot share this model" in line and "use 1, 2, 4" in line


NO_HOST_FILES = (
    '[{"ips": []}]',
    '["127.0.0.1", "mac2.local"]',
    '[{"ssh": "127.0.0.1", "ips": "10.0.0.1"}]',
    '{"hosts": [], "port": 70000}',
)


def test_a_host_file_that_is_none(env: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "hosts.json"
    assert "cannot be read" in refused(env, "--hosts", str(path))
    for text in NO_HOST_FILES:
        path.write_text(text)
        assert "is none" in refused(env, "--hosts", str(path)), text
    file = host_file(tmp_path, [{"ssh": "mac2.local", "ips": ["10.0.0.2"]}], free_ports())
    assert "must begin with this machine" in refused(env, "--hosts", file)
    assert "one or the other" in refused(env, "--hosts", file, "--devices", "2")
