"""Ranks over MLX's ring on this machine: one process each, the environment that MLX documents."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 240


def run_ranks(count: int, module: str, arguments: Sequence[str], folder: Path) -> None:
    """Run `python -m module` with these arguments in `count` ranks; all of them must succeed."""
    hosts = folder / "hosts.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in _free_ports(count)]))
    logs = [folder / f"rank-{rank}.log" for rank in range(count)]
    with ExitStack() as stack:
        ranks: list[subprocess.Popen[bytes]] = []
        for rank, log in enumerate(logs):
            process = subprocess.Popen(
                [sys.executable, "-W", "error", "-m", module, *arguments],
                cwd=ROOT,
                env={**os.environ, "MLX_RANK": str(rank), "MLX_HOSTFILE": str(hosts)},
                stdout=stack.enter_context(log.open("wb")),
                stderr=subprocess.STDOUT,
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            ranks.append(process)
        codes = [process.wait(TIMEOUT_S) for process in ranks]
    assert codes == [0] * count, "\n".join(log.read_text(errors="replace") for log in logs)


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
