"""Where the time of a step or a chunk goes on an NVIDIA GPU, by kernel, and what bytes allow.

Times are those of CUPTI, which PyTorch's profiler reads; without PyTorch there is no table.
"""

import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx

from mlx_engine.cuda.kernels import CudaKernels

_WAITING = "no kernel runs"


@dataclass
class Counting:
    """A factory of kernels that notes what each must move: its inputs and outputs.

    Of weights of `experts` only those of `chosen` are read.
    """

    experts: int
    chosen: int
    n_bytes: dict[str, int] = field(default_factory=lambda: defaultdict[str, int](int))

    def __call__(self, **arguments: Any) -> Callable[..., list[mx.array]]:
        return self._noting(CudaKernels()(**arguments), arguments["name"])

    def native(self, **arguments: Any) -> Callable[..., list[mx.array]]:
        """A kernel written for CUDA."""
        return self._noting(CudaKernels().native(**arguments), arguments["name"])

    def _noting(
        self, kernel: Callable[..., list[mx.array]], name: str
    ) -> Callable[..., list[mx.array]]:
        def run(**call: Any) -> list[mx.array]:
            outputs = kernel(**call)
            arrays = [x for x in (*call["inputs"], *outputs) if isinstance(x, mx.array)]
            self.n_bytes[name] += sum(self._moved(x) for x in arrays)
            return outputs

        return run

    def _moved(self, x: mx.array) -> int:
        is_stacked = x.ndim == 3 and x.shape[0] == self.experts
        return x.nbytes * self.chosen // self.experts if is_stacked else x.nbytes

    __hash__ = object.__hash__


def kernel_times(run: Callable[[], Any], times: int) -> dict[str, dict[str, float]] | None:
    """By kernel, launches and ms of one of the `times` that `run` repeats; None without PyTorch.

    Kernels may run side by side, so that their sum is no less than the time in which any runs.
    """
    if find_spec("torch") is None:
        return None
    import_module("torch").cuda.init()
    profiler: Any = import_module("torch.profiler")
    with profiler.profile(activities=[profiler.ProfilerActivity.CUDA]) as profile:
        run()
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    table: dict[str, dict[str, float]] = {}
    ends, waiting = 0.0, 0.0
    kernels = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    for event in sorted(kernels, key=lambda e: float(e["ts"])):
        row = table.setdefault(_short(event["name"]), {"launches": 0, "ms": 0})
        row["launches"] += 1 / times
        row["ms"] += event["dur"] / 1e3 / times
        waiting += max(event["ts"] - ends, 0) / 1e3 / times if ends else 0
        ends = max(ends, event["ts"] + event["dur"])
    table[_WAITING] = {"launches": 0, "ms": waiting}
    return dict(sorted(table.items(), key=lambda item: -item[1]["ms"]))


def with_bytes(
    table: dict[str, dict[str, float]], n_bytes: dict[str, int], copy_GBps: float
) -> dict[str, dict[str, float]]:
    """The table with MB, GB/s and the ms above what a copy of as many bytes takes."""
    for name, row in table.items():
        moved = n_bytes.get(name, 0)
        row["excess_ms"] = row["ms"] - moved / copy_GBps / 1e6
        if moved:
            row["MB"], row["GBps"] = moved / 1e6, moved / row["ms"] / 1e6
    return table


def printed(title: str, table: dict[str, dict[str, float]]) -> None:
    """Print the rows that count, and the three with the most to gain."""
    print(f"{title:34s} launches       ms       MB     GB/s  above bytes")
    for name, row in list(table.items())[:24]:
        moved = f"{row['MB']:8.1f} {row['GBps']:8.0f}" if "MB" in row else " " * 17
        excess = f"{row['excess_ms']:8.3f}" if "excess_ms" in row else ""
        print(f"{name:34s} {row['launches']:8.1f} {row['ms']:8.3f} {moved} {excess}")
    worst = sorted(table, key=lambda name: -table[name].get("excess_ms", table[name]["ms"]))[:3]
    print(f"next: {', '.join(worst)}", flush=True)


def _short(name: str) -> str:
    """An MLX kernel's own name, without its types."""
    return name.removeprefix("void ").split("<")[0].split("(")[0].split("::")[-1][:34]
