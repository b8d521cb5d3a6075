"""What one decode step of the released model launches on a Mac, and the bytes that this moves.

Counted from shapes alone, on any machine: kernels are recorded, nothing is computed, so the times
are what the bytes would take at a Mac's published bandwidth, an estimate and no measurement.
"""

import json
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass

from bench.report import Report
from bench.setting import ROOT
from mlx_engine.config import ModelConfig
from mlx_engine.config_file import parse_config
from mlx_engine.ops.traffic import NOTHING, Traffic, added
from mlx_engine.sampling import Sampling
from tests.kernels.step import decode_step
from tests.kernels.trace import Launch
from tests.kernels.traffic import floor_bytes, state_read_bytes, traffic

# After these the step closes a group of every source of compressed rows.
CONTEXTS = (8_191, 131_071)
SAMPLINGS = {"greedy": Sampling(temperature=0), "top-p": Sampling(top_p=0.95, seed=0)}
# GB/s of an M3 Ultra and an M4 Max.
BANDWIDTHS = (819, 546)


@dataclass
class _Operation:
    launches: int = 0
    in_layers: int = 0
    moved: Traffic = NOTHING


def main() -> int:
    """Run the bench and return its exit code."""
    report = Report("launches", __doc__)
    config = parse_config(json.loads((ROOT / "tests/data/released_config.json").read_text()))
    report.facts({"model": {"layers": config.num_hidden_layers, "context": max(CONTEXTS) + 1}})
    per_layer: list[float] = []
    per_token: list[int] = []
    ratios: list[float] = []
    for tokens in CONTEXTS:
        for name, sampling in SAMPLINGS.items():
            launches = decode_step(config, tokens, sampling)
            operations = _operations(config, launches)
            every = _total(operations)
            least = floor_bytes(config) + state_read_bytes(config, tokens + 1)
            per_layer.append(every.in_layers / config.num_hidden_layers)
            per_token.append(every.launches)
            ratios.append(every.moved.unique_bytes / least)
            report.results[f"{tokens + 1} tokens, {name}"] = {
                op_name: {
                    "launches": op.launches,
                    "bytes": op.moved.unique_bytes,
                    "total_bytes": op.moved.total_bytes,
                }
                for op_name, op in operations.items()
            }
            report.line()
            report.line(f"{tokens + 1:,} tokens, {name}")
            _print(report, operations, least)
            by_layer = Counter(launch.source for launch in launches)
            counts = (str(by_layer[layer]) for layer in range(config.num_hidden_layers))
            report.line(f"launches of each layer: {' '.join(counts)}")
    report.results |= {
        "launches_per_layer": max(per_layer),
        "launches_per_token": max(per_token),
        "bytes_ratio": max(ratios),
        "floor_bytes": floor_bytes(config),
    }
    report.check("launches a layer, on average", max(per_layer), most=15)
    report.check("launches a token", max(per_token), most=640)
    report.check("bytes moved, times those that must", max(ratios), most=1.05)
    return report.finish()


def _operations(config: ModelConfig, launches: list[Launch]) -> dict[str, _Operation]:
    """What each kernel and each operation of MLX adds up to, the most bytes first."""
    found: defaultdict[str, _Operation] = defaultdict(_Operation)
    for launch in launches:
        operation = found[launch.name if launch.kernel else f"MLX {launch.name}"]
        operation.launches += 1
        operation.in_layers += 0 <= launch.source < config.num_hidden_layers
        operation.moved += traffic(launch)
    return dict(sorted(found.items(), key=lambda item: -item[1].moved.unique_bytes))


def _print(report: Report, operations: dict[str, _Operation], least: int) -> None:
    every = _total(operations)
    # How often threads load what must be read is a kernel's choice.
    _, _, must, _, *times = _figures(_Operation(moved=Traffic(least)))
    report.table(
        (
            *("", "launches", "in layers", "MB", "loaded and stored, MB"),
            *(f"us at {gb_s} GB/s" for gb_s in BANDWIDTHS),
        ),
        [
            *((name, *_figures(op)) for name, op in {**operations, "all": every}.items()),
            ("all that must be read", "", "", must, "", *times),
        ],
    )
    report.line("loaded and stored: by all threads, a byte for each, which may come from a cache")


def _figures(op: _Operation) -> tuple[float, ...]:
    """An operation's launches, MB of both kinds, and microseconds."""
    return (
        *(op.launches, op.in_layers),
        *(n / 1e6 for n in (op.moved.unique_bytes, op.moved.total_bytes)),
        *(op.moved.unique_bytes / gb_s / 1e3 for gb_s in BANDWIDTHS),
    )


def _total(operations: dict[str, _Operation]) -> _Operation:
    found = operations.values()
    return _Operation(
        sum(op.launches for op in found),
        sum(op.in_layers for op in found),
        added(*(op.moved for op in found)),
    )


if __name__ == "__main__":
    sys.exit(main())
