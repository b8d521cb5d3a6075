"""What the emulator counted, beside what a kernel's formula says."""

from collections.abc import Sequence

import pytest

from mlx_engine.ops.traffic import Traffic
from tests.msl.emulator import Report


def moved(report: Report) -> Traffic:
    """Bytes of arrays that a launch moved; shapes are arguments and no arrays."""
    arrays = [traffic for name, traffic in report.traffic.items() if not name.endswith("_shape")]
    return Traffic(
        sum(traffic.loaded_unique + traffic.stored_unique for traffic in arrays),
        sum(traffic.loaded + traffic.stored for traffic in arrays),
    )


def check_traffic(reports: Sequence[Report], *planned: Traffic, rel: float = 0.0) -> None:
    """Each launch moved the bytes of its formula, but for `rel` of them; a GPU counts none."""
    if not reports:
        return
    assert len(reports) == len(planned)
    for report, formula in zip(reports, planned, strict=True):
        found = moved(report)
        for name in ("unique_bytes", "total_bytes"):
            wanted = pytest.approx(getattr(formula, name), rel=rel, abs=0)
            assert getattr(found, name) == wanted, f"{report.kernel}: {name}"
