"""What a 40-request agent conversation computes, over a disk cache and a restart, on the CPU.

25,000 tokens of system and tools, tool results, side requests, exact retries, an edit of an earlier
turn: tests/conversation.py has the script. New are the tokens past the longest prefix that any
earlier prompt and its answer had; a token counts as computed when any layer computes it.
"""

import dataclasses
import sys
import tempfile
from pathlib import Path

import mlx.core as mx

from bench.report import Report
from bench.setting import small_model
from mlx_engine.model import Model
from tests.conversation import Cost, Sizes, converse

SIZES = Sizes(head=25_000, question=100, result=800, answer=32, side=100)
BUDGET_BYTES = 1 << 30


def main() -> int:
    """Run the bench and return its exit code."""
    mx.set_default_device(mx.cpu)
    report = Report("conversation", __doc__)
    with small_model() as small, tempfile.TemporaryDirectory() as folder:
        report.facts({**small.sizes(), "tokens": dataclasses.asdict(SIZES)})
        outcome = converse(
            Model(small.config, small.weights, mx.float32),
            None,
            Path(folder) / "cache",
            SIZES,
            budget_bytes=BUDGET_BYTES,
            on_cost=lambda cost: print(f"request {cost.number}: {cost.seconds:.1f} s", flush=True),
        )
    header = [field.name for field in dataclasses.fields(Cost)]
    rows = [list(dataclasses.astuple(cost)) for cost in outcome.costs]
    report.table(["request", *header[2:]], [[f"{n} {kind}", *rest] for n, kind, *rest in rows])
    report.results["costs"] = [dataclasses.asdict(cost) for cost in outcome.costs]
    report.results["new"], report.results["computed"] = outcome.new, outcome.computed
    dropped = sum(cache.dropped + cache.refused + cache.evicted for cache in outcome.caches)
    report.check("computed tokens, times the new ones", outcome.computed / outcome.new, most=1.05)
    report.check("tokens of an exact retry", max(outcome.retries()), most=2)
    report.check("anchors dropped", dropped, most=0)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
