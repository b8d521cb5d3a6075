"""What each rank is given to join the others, and what rank 0 makes of what it says."""

import json
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from mlx_engine.errors import BadRequest
from mlx_engine.hosts import Host, Hosts, read_hosts
from mlx_engine.ranks import Rank

HERE, NAMED, THERE = Host("127.0.0.1", "10.0.0.1"), Host("localhost", "10.0.0.1"), Host("b", "c")


def gpus(*hosts: Host) -> list[str | None]:
    """Which GPUs the ranks see, of which rank 0 has chosen before."""
    ranks = Hosts(hosts, "nccl", tuple(range(5000, 5000 + len(hosts))))
    each = [ranks.environment(rank).variables for rank in range(len(hosts))]
    return [variables.get("CUDA_VISIBLE_DEVICES") for variables in each]


def test_each_rank_sees_the_next_gpu_of_its_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpus(HERE, NAMED, THERE, THERE) == [None, "1", "0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,3")
    # What this machine's user has left to us says nothing of another machine.
    assert gpus(HERE, HERE, THERE, THERE) == [None, "3", "0", "1"]


@pytest.mark.parametrize("visible", ["", "3"])
def test_no_rank_takes_a_gpu_that_was_not_given(
    visible: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(BadRequest, match="rank 1 has no GPU: CUDA_VISIBLE_DEVICES names"):
        gpus(HERE, HERE)


@pytest.fixture
def rank() -> Generator[Rank]:
    rank = Rank(1, HERE)
    yield rank
    rank.process.kill()
    rank.process.communicate()


@pytest.mark.parametrize("line", [b"2026\n", b"true\n", b"[1]\n", b'"hi"\n', b"{}\n", b"Hi\n"])
def test_a_greeting_of_a_login_is_passed_over(line: bytes, rank: Rank) -> None:
    rank.hear(line)
    assert (rank.done, rank.answers) == (0, {})
    rank.hear(json.dumps({"kind": "listen", "done": 2, "progress": 0}).encode())
    assert rank.done == 2 and "listen" in rank.answers


TEXTS: list[Any] = [5, "", "a\0", []]
IPS: list[Any] = ["10.0.0.1", [None], [5], [""]]
PORTS: list[Any] = [True, 0, 65535, "1", 1.5]
VARIABLES: list[Any] = [["=x"], ["A"], ["A=\0"], [5], 5]
OF_HOST: list[dict[str, Any]] = [
    {"ssh": None},
    {"ssh": "\ud800"},
    *({"ips": ips} for ips in IPS),
    *({key: text} for key in ("ssh", "python", "model") for text in TEXTS),
]
OF_FILE: list[dict[str, Any]] = [
    *({"port": port} for port in PORTS),
    *({"envs": variables} for variables in VARIABLES),
]


@pytest.mark.parametrize(
    ("of_host", "of_file"), [*((each, {}) for each in OF_HOST), *(({}, each) for each in OF_FILE)]
)
def test_a_host_file_of_other_kinds(
    of_host: dict[str, Any], of_file: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "hosts.json"
    hosts = [{"ssh": "127.0.0.1"}, {"ssh": "b"} | of_host]
    path.write_text(json.dumps({"hosts": hosts} | of_file))
    with pytest.raises(BadRequest, match="is none"):
        read_hosts(path, "ring")


def test_a_host_file_that_nests_for_ever(tmp_path: Path) -> None:
    path = tmp_path / "hosts.json"
    path.write_text("[" * 100_000)
    with pytest.raises(BadRequest, match="is none"):
        read_hosts(path, "ring")
