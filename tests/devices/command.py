"""The command `ds41` over several devices, and what becomes of its processes."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mlx_engine.engram import primes_from
from mlx_engine.tiny import tiny_config, write_tiny_checkpoint

DS41 = (sys.executable, "-P", "-c", "from mlx_engine.cli.start import main; main()")
GREEDY = ("--effort", "off", "--temperature", "0", "--dtype", "float32")


def write_model(folder: Path, seed: int = 0) -> Path:
    """A checkpoint that four devices can share."""
    config = tiny_config()
    text: dict[str, Any] = config["text_config"]
    layers, columns = (1, 3), 3 * 4
    primes = primes_from(text["engram_vocab_size"], len(layers) * columns)
    # Few layers: on two cores an exchange of four ranks takes up to 0.3 s.
    text |= {
        "num_hidden_layers": 6,
        "compress_ratios": [0, 2, 2, 1, 1, 1],
        "kv_source_layer_ids": [1, 3],
        "index_source_layer_ids": [1, 3, 5],
        "candidate_source_layer_id": 3,
        "num_nextn_predict_layers": 0,
        "num_attention_heads": 8,
        "o_groups": 4,
        "moe_intermediate_size": 128,
        "sliding_window": 16,
        "index_topk": 16,
        "candidate_topk_blocks": 4,
        "engram_layer_ids": list(layers),
        "engram_n_heads": 4,
        "engram_num_embeddings": np.array(primes).reshape(len(layers), columns).sum(1).tolist(),
    }
    write_tiny_checkpoint(folder, seed=seed, config=config)
    return folder


def environment(model: Path, cache: Path, **more: str) -> dict[str, str]:
    """Commands take this model, and keep what they keep in this folder."""
    return os.environ | {"DS41_MODEL": str(model), "DS41_CACHE_DIR": str(cache)} | more


def ds41(
    env: dict[str, str], *args: str, text: str = "", timeout_s: float = 120
) -> subprocess.CompletedProcess[str]:
    """The command, to its end."""
    return subprocess.run(
        [*DS41, *args], input=text, capture_output=True, text=True, env=env, timeout=timeout_s
    )


def json_of(result: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


class Run:
    """The command, under way; what it writes to either output goes to one file."""

    def __init__(self, env: dict[str, str], log: Path, *args: str) -> None:
        self._log = log
        with log.open("wb") as file:
            self.program = subprocess.Popen(
                [*DS41, *args], stdout=file, stderr=subprocess.STDOUT, env=env
            )

    @property
    def pid(self) -> int:
        return self.program.pid

    @property
    def output(self) -> str:
        return self._log.read_text(errors="replace")

    @property
    def has_loaded(self) -> bool:
        return "\n" in self.output

    @property
    def has_answered(self) -> bool:
        return self.output.partition("\n")[2] != ""

    def followers(self) -> list[int]:
        """The processes of its other ranks, in their order."""
        listing = subprocess.run(
            ["ps", "-A", "-o", "pid=,ppid=,args="], capture_output=True, text=True, check=True
        )
        fields = [line.split(maxsplit=2) for line in listing.stdout.splitlines()]
        return sorted(
            int(pid)
            for pid, parent, args in (each for each in fields if len(each) == 3)
            if int(parent) == self.pid and "mlx_engine.follow" in args
        )

    def end(self, others: Sequence[int], within_s: float) -> int:
        """The exit code, once this process and all others have ended in time."""
        try:
            code = self.program.wait(within_s)
            assert are_gone(others, within_s)
            return code
        finally:
            for pid in (self.pid, *others):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.program.wait()


def are_gone(pids: Sequence[int], within_s: float) -> bool:
    """Whether all of these processes end in time."""
    return eventually(lambda: not any(map(_is_alive, pids)), within_s)


def eventually(holds: Callable[[], bool], within_s: float) -> bool:
    deadline_s = time.monotonic() + within_s
    while not holds():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.05)
    return True


def _is_alive(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        listing = subprocess.run(
            ["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True
        )
        # One that nobody has asked for its exit code is no process any more.
        return listing.stdout.strip()[:1] not in ("", "Z")
    return False
