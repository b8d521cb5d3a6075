"""One model over two devices beside one device: decode and prefill a layer, exchanges, memory.

    python -m bench.devices [--layers 16] [--out FILE]       two NVIDIA GPUs of a host
    python -m bench.devices --small                          a dry run over a ring on a CPU

One GPU runs as many layers as it holds, two run twice as many. Exchanges are timed alone in several
settings of NCCL and MLX, of which the quickest runs the model too. The last line is JSON.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

COUNT = 2
# Of a part; on a CPU, which is for trying the bench, ten times as long.
TIMEOUT_S = 90
SETTINGS: dict[str, dict[str, str]] = {
    "default": {},
    "LL": {"NCCL_PROTO": "LL"},
    "no graphs": {"MLX_USE_CUDA_GRAPHS": "0"},
    "no graphs, LL": {"MLX_USE_CUDA_GRAPHS": "0", "NCCL_PROTO": "LL"},
}


def main() -> int:
    """Run the parts, each in processes of its own, and print what they found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=16, help="of one device")
    parser.add_argument("--small", action="store_true", help="small widths over a ring, on a CPU")
    parser.add_argument("--parts", default="exchange,experts,one,two")
    parser.add_argument("--commit", default="")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    parts, bench = given.parts.split(","), _Bench(given.layers, is_small=given.small)
    found: dict[str, Any] = {"machine": _machine(given.commit), "layers": given.layers}
    best = "default"
    if "exchange" in parts:
        settings = ["default"] if given.small else [*SETTINGS]
        found["exchange"] = {name: bench.run("exchange", COUNT, name) for name in settings}
        found["exchange"] = {name: made for name, made in found["exchange"].items() if made}
        if found["exchange"]:
            best = min(found["exchange"], key=lambda name: _sum_us(found["exchange"][name]))
            found["quickest"] = best
    if "experts" in parts:
        found["experts"] = bench.run("experts", 1)
    if "one" in parts:
        found["one"] = bench.run("model", 1)
    if "two" in parts:
        found["two"] = bench.run("model", COUNT, best)
        if best != "default":
            found["two, default"] = bench.run("model", COUNT)
    _print(found)
    if given.out is not None:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found))
    return 0 if all(found.get(part, True) for part in ("exchange", "one", "two")) else 1


class _Bench:
    """Runs a part in ranks, and tells rank 0's figures with how the others' compare."""

    def __init__(self, layers: int, *, is_small: bool) -> None:
        self._layers, self._is_small = layers, is_small

    def run(self, part: str, count: int, setting: str = "default") -> dict[str, Any] | None:
        """None where it failed, whose output is shown."""
        started = time.perf_counter()
        with TemporaryDirectory() as name, ExitStack() as stack:
            folder = Path(name)
            shared = self._environment(count, folder)
            logs = [folder / f"{rank}.log" for rank in range(count)]
            ranks: list[subprocess.Popen[bytes]] = []
            for rank, log in enumerate(logs):
                own = {"MLX_RANK": str(rank), "CUDA_VISIBLE_DEVICES": str(rank)}
                process = subprocess.Popen(
                    self._command(part, count, folder),
                    env={**os.environ, **shared, **own, **SETTINGS[setting]},
                    stdout=stack.enter_context(log.open("wb")),
                    stderr=subprocess.STDOUT,
                )
                stack.callback(process.wait)
                stack.callback(process.kill)
                ranks.append(process)
            codes = _wait(ranks, TIMEOUT_S * (10 if self._is_small else 1))
            took = f"{part} x {count}, {setting}: {time.perf_counter() - started:.1f} s"
            if any(codes):
                texts = [log.read_text(errors="replace")[-3000:] for log in logs]
                print(f"{took} FAILED {codes}\n" + "\n".join(texts), flush=True)
                return None
            print(took, flush=True)
            made = [json.loads((folder / f"out.{r}.json").read_text()) for r in range(count)]
        if part == "exchange":
            for tokens, ways in made[0].items():
                ways["same bits"] = all(each[tokens]["same bits"] for each in made)
        if part == "model":
            made[0]["same state"] = all(each["state"] == made[0]["state"] for each in made)
            made[0]["weights_GB of each"] = [each["weights_GB"] for each in made]
        return made[0]

    def _command(self, part: str, count: int, folder: Path) -> list[str]:
        command = [sys.executable, "-m", "bench.device_rank", part, str(folder / "out.json")]
        command += ["--layers", str(self._layers * count)]
        if count > 1:
            command += ["--backend", "ring" if self._is_small else "nccl"]
        return command + ["--small"] * self._is_small

    def _environment(self, count: int, folder: Path) -> Mapping[str, str]:
        ports = _free_ports(count)
        hosts = folder / "hosts.json"
        hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in ports]))
        return {
            "MLX_HOSTFILE": str(hosts),
            "MLX_WORLD_SIZE": str(count),
            "NCCL_HOST_IP": "127.0.0.1",
            "NCCL_PORT": str(ports[0]),
        }


def _wait(ranks: list[subprocess.Popen[bytes]], timeout_s: float) -> list[int | None]:
    """The exit codes, -1 for none in time; once one fails the others have two seconds more."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end and any(rank.poll() is None for rank in ranks):
        if any(rank.poll() for rank in ranks):
            end = min(end, time.monotonic() + 2)
        time.sleep(0.05)
    return [rank.poll() if rank.poll() is not None else -1 for rank in ranks]


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _sum_us(made: dict[str, Any]) -> float:
    """us of a token's sum in a chain: what a decode step has most of."""
    return made["1 tokens"]["Devices.sum"]["compiled"]


def _machine(commit: str) -> dict[str, Any]:
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    links = ["nvidia-smi", "topo", "-m"]
    return {
        "gpus": _output(query).splitlines(),
        "links": [line for line in _output(links).splitlines() if line.startswith("GPU")],
        "mlx": version("mlx"),
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit,
        "cores": os.cpu_count(),
    }


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _print(found: dict[str, Any]) -> None:
    exchanges: dict[str, Any] = found.get("exchange", {})
    for setting, made in exchanges.items():
        for tokens, ways in made.items():
            print(f"\n{setting}, {tokens}, us:  (the same bits on all: {ways['same bits']})")
            for way, forms in ways.items():
                if way != "same bits":
                    cells = [f"{form} {us:.1f}" for form, us in forms.items()]
                    print(f"  {way:14s}", ", ".join(cells))
    experts: dict[str, dict[str, float]] = found.get("experts") or {}
    for name, times in experts.items():
        print(f"experts {name}:", ", ".join(f"{key} {ms:.3f} ms" for key, ms in times.items()))
    for name in ("one", "two", "two, default"):
        made = found.get(name)
        if made is None:
            continue
        print(f"\n{name}: {made['layers']} layers, {made['weights_GB of each']} GB of weights")
        for label, part in {"": made, " without exchanges": made.get("without exchanges")}.items():
            if part:
                step, chunk = part["step_ms_per_layer"], part["prefill_ms_per_layer"]
                print(
                    f"  a layer{label}: step {step:.4f} ms, {part['prefill_tokens']} tokens "
                    f"{chunk:.3f} ms; a step {part['step_ms']:.2f} ms"
                )
    if found.get("one") and found.get("two"):
        one, two = found["one"], found["two"]
        found["step_ratio"] = one["step_ms_per_layer"] / two["step_ms_per_layer"]
        found["prefill_ratio"] = one["prefill_ms_per_layer"] / two["prefill_ms_per_layer"]
        mean = statistics.fmean((found["step_ratio"], found["prefill_ratio"]))
        print(
            f"\ntwo devices a layer: {found['step_ratio']:.2f} times one's rate in decode, "
            f"{found['prefill_ratio']:.2f} in prefill, {mean:.2f} in the mean"
        )


if __name__ == "__main__":
    sys.exit(main())
