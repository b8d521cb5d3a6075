"""What the disk cache takes from decoding: steps of the small model with it and without, in pairs.

Both sides have read the same prompt. On the one side a piece goes to the cache before each step, as
it does in sessions for as long as something waits: in turn the rows of 2,048 tokens and a tail, for
an anchor of its own each time, which is on its way to the disk while the steps run. Apart from it,
what one step exports at most, at the released sizes and with random content.
"""

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np

from bench.report import Report
from bench.setting import ROOT, SmallModel, small_model
from mlx_engine.config_file import parse_config
from mlx_engine.diskcache.cache import DiskCache, Part, Save
from mlx_engine.model import Model
from mlx_engine.session import Session
from mlx_engine.state import Checkpoint, SessionState
from mlx_engine.state_transfer import export_rows, export_tail, parts

PAIRS = 10
STEPS = 200
PROMPT_TOKENS = 2048
# More than a window and a block.
EXPORT_TOKENS = 4096
EXPORTS = 50


def main() -> int:
    """Run the bench and return its exit code."""
    mx.set_default_device(mx.cpu)
    report = Report("saving", __doc__)
    with small_model() as small, tempfile.TemporaryDirectory() as folder:
        report.facts(small.sizes())
        _measure_decode(report, small, Path(folder) / "cache")
    _measure_exports(report)
    return report.finish()


def _measure_decode(report: Report, small: SmallModel, folder: Path) -> None:
    model = Model(small.config, small.weights, mx.float32)
    shape = tuple(Part(each.ratio, each.row_bytes) for each in parts(small.config))
    cache = DiskCache.open(folder, fingerprint=b"bench", parts=shape, free_floor_bytes=0)
    rng = np.random.default_rng(1)

    def random_ids(count: int) -> list[int]:
        return rng.integers(0, small.config.image_token_id, count).tolist()

    prompt = random_ids(PROMPT_TOKENS + 1)
    session = Session(model, None)
    seconds: list[list[float]] = []
    for pair in range(PAIRS + 1):
        others = [random_ids(PROMPT_TOKENS) for _ in range(STEPS // 2)]
        taken_s = [0.0, 0.0]
        for i in (0, 1) if pair % 2 else (1, 0):
            # Back to where the prompt ends, but for its last token.
            logits = session.sync(prompt)
            pieces = None if i else _pieces(cache, others, session)
            start = time.perf_counter()
            _decode(session, logits, pieces)
            taken_s[i] = time.perf_counter() - start
            # What is left to write would slow the other side down.
            assert cache.flush(60)
        if pair:  # the first one warms up
            seconds.append(taken_s)
    ratios = [with_s / without_s for with_s, without_s in seconds]
    report.table(
        [f"{STEPS} steps", "with s", "without s", "ratio"],
        [[f"pair {i + 1}", *pair, pair[0] / pair[1]] for i, pair in enumerate(seconds)],
    )
    stats = cache.stats()
    cache.close()
    report.results["decode"] = {"seconds": seconds, "saved_bytes": stats.saved_bytes}
    report.check("anchors saved", stats.saved, least=(PAIRS + 1) * STEPS // 2)
    report.check("anchors dropped", stats.dropped, most=0)
    report.check("steps with the cache, median of ratios", statistics.median(ratios), most=1.05)


def _decode(
    session: Session, logits: mx.array, pieces: Iterator[Callable[[], None]] | None
) -> None:
    """Decode greedily, on the one side with a piece before each step."""
    token_id = cast(int, mx.argmax(logits).item())
    for _ in range(STEPS):
        if pieces is not None:
            next(pieces)()
        token_id = cast(int, mx.argmax(session.step(token_id)).item())


def _pieces(
    cache: DiskCache, prompts: list[list[int]], session: Session
) -> Iterator[Callable[[], None]]:
    """What hands over the rows and then the tail of an anchor for each prompt."""
    state, checkpoint = session.state, session.checkpoints[-1]
    for ids in prompts:
        save = cache.begin(ids, PROMPT_TOKENS)
        assert save is not None and save.ranges == [(0, PROMPT_TOKENS)]
        yield partial(_save_rows, save, state)
        yield partial(_save_tail, save, checkpoint)


def _save_rows(save: Save, state: SessionState) -> None:
    save.rows(0, PROMPT_TOKENS, export_rows(state, 0, PROMPT_TOKENS))


def _save_tail(save: Save, checkpoint: Checkpoint) -> None:
    save.finish(export_tail(checkpoint), 1.0)


def _measure_exports(report: Report) -> None:
    raw: dict[str, Any] = json.loads((ROOT / "tests/data/released_config.json").read_text())
    state = SessionState(parse_config(raw))
    rng = np.random.default_rng(2)

    def noise(like: mx.array, rows: int) -> mx.array:
        shape = (rows, like.shape[1])
        values = rng.integers(0, 256, (rows, like.shape[1] * like.itemsize), np.uint8)
        return mx.array(values.view(np.uint32 if like.itemsize == 4 else np.uint8).reshape(shape))

    for source, rows in state.compressed.items():
        keys, count = state.index_keys[source], EXPORT_TOKENS // state.ratios[source]
        rows.append(noise(rows.buffer, count))
        keys.append(noise(keys.codes.buffer, count), noise(keys.scales.buffer, count))
    for window in state.windows:
        window.extend(noise(window.rows, window.rows.shape[0]), 0)
    state.position = EXPORT_TOKENS
    mx.eval(list(state.arrays()))
    checkpoint = state.checkpoint()
    block = EXPORT_TOKENS // 2
    exports: dict[str, Callable[[], int]] = {
        f"rows of {block} tokens": lambda: sum(
            part.nbytes for part in export_rows(state, block, 2 * block)
        ),
        "tail": lambda: len(export_tail(checkpoint)),
    }
    table: list[list[Any]] = []
    for what, export in exports.items():
        taken_ms: list[float] = []
        n_bytes = 0
        for _ in range(EXPORTS):
            start = time.perf_counter()
            n_bytes = export()
            taken_ms.append((time.perf_counter() - start) * 1e3)
        median_ms = statistics.median(taken_ms)
        table.append([what, n_bytes, median_ms, min(taken_ms), max(taken_ms)])
        report.results[what] = {"ms": taken_ms, "bytes": n_bytes}
    report.table(["export", "bytes", "median ms", "least ms", "most ms"], table)
    for what, _, median_ms, *_ in table:
        report.check(f"ms to export {what}", median_ms, most=1.5)


if __name__ == "__main__":
    sys.exit(main())
