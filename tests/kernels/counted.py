"""What the emulator counted, beside what a kernel's formula says."""

from typing import TypeAlias

import pytest

from mlx_engine.ops.traffic import Traffic
from tests.msl.emulator import Report

# Of a test's kernels, in order: what the emulator counted. None on a GPU, which counts nothing.
Launches: TypeAlias = list[Report] | None


def counted(report: Report) -> Traffic:
    """Bytes of arrays that a launch moved; shapes are arguments and no arrays."""
    arrays = [traffic for name, traffic in report.traffic.items() if not name.endswith("_shape")]
    return Traffic(
        sum(traffic.loaded_unique + traffic.stored_unique for traffic in arrays),
        sum(traffic.loaded + traffic.stored for traffic in arrays),
    )


def check_traffic(launches: Launches, *planned: Traffic, rel: float = 0.0) -> None:
    """There were launches, and each moved the bytes of its formula, but for `rel` of them."""
    if launches is None:
        return
    assert len(launches) == len(planned) > 0
    for report, formula in zip(launches, planned, strict=True):
        found = counted(report)
        for name in ("unique_bytes", "total_bytes"):
            wanted = pytest.approx(getattr(formula, name), rel=rel, abs=0)
            assert getattr(found, name) == wanted, f"{report.kernel}: {name}"
