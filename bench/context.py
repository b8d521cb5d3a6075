"""What a longer context costs on the CPU: a decode step, by operation too, a prefill, and memory.

All but the index scan and its top-k should take the same at any context, a short prefill should
spare most of the upper half of the layers, and the state should grow by the formula alone.
"""

import dataclasses
import functools
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, cast
from unittest.mock import patch

import mlx.core as mx
import numpy as np

import mlx_engine.model
from bench.report import Report, paired_s, speedup
from bench.setting import CHUNK_TOKENS, SmallModel, small_model
from mlx_engine.config import ModelConfig
from mlx_engine.model import Model
from mlx_engine.ops import indexer
from mlx_engine.session import Prefill, Session
from tests.unrounded import UNROUNDED

SHORT_TOKENS, LONG_TOKENS = 2048, 8192
PREFILLS = 2
STEPS = 40
# Long enough that the short prefill leaves something out.
CHECK_TOKENS = 1500
REST = "the rest"


def main() -> int:
    """Run the bench and return its exit code."""
    mx.set_default_device(mx.cpu)
    report = Report("context", __doc__)
    with small_model() as small:
        report.facts(small.sizes())
        _check_prefills_agree(report, small)
        model = Model(small.config, small.weights, mx.float32)
        mx.reset_peak_memory()
        long = _measure_prefill(report, small, model)
        short = _prefilled(small, model, SHORT_TOKENS)
        _measure_memory(report, small, short, long)
        _measure_steps(report, short, long)
        _measure_operations(report, short, long)
    return report.finish()


def _prefilled(small: SmallModel, model: Model, tokens: int, prefill: Prefill = "short") -> Session:
    session = Session(model, None, prefill=prefill, chunk_tokens=CHUNK_TOKENS)
    mx.eval(session.sync(small.prompt(tokens)))
    return session


def _check_prefills_agree(report: Report, small: SmallModel) -> None:
    """Short and full give the same logits; without cache roundings, so that only noise differs."""
    model = Model(small.config, small.weights, mx.float32)
    kinds: tuple[Prefill, ...] = ("short", "full")
    short, full = (
        Session(model, None, prefill=kind, chunk_tokens=512, formats=UNROUNDED).sync(
            small.prompt(CHECK_TOKENS)
        )
        for kind in kinds
    )
    worst = np.abs(np.array(short, np.float32) - np.array(full, np.float32)).max()
    report.check("difference of short and full prefill, logits", float(worst), most=1e-3)


def _measure_prefill(report: Report, small: SmallModel, model: Model) -> Session:
    sessions: list[Session] = []
    short_s, full_s = paired_s(
        lambda: sessions.append(_prefilled(small, model, LONG_TOKENS)),
        lambda: _prefilled(small, model, LONG_TOKENS, "full"),
        PREFILLS,
    )
    rows = [
        [f"{kind} prefill", LONG_TOKENS, CHUNK_TOKENS, LONG_TOKENS / statistics.median(times)]
        for kind, times in (("short", short_s), ("full", full_s))
    ]
    report.table(("", "prompt", "chunk", "tokens/s"), rows)
    report.results["prefill_s"] = {"short": short_s, "full": full_s}
    report.check("short prefill, times as fast as full", speedup(full_s, short_s), least=1.6)
    return sessions[-1]


def _measure_memory(report: Report, small: SmallModel, short: Session, long: Session) -> None:
    config = small.config
    grown = (long.state_bytes - short.state_bytes) / (LONG_TOKENS - SHORT_TOKENS)
    formula = _row_bytes_per_token(config)
    found: dict[str, float] = {
        "peak_bytes_of_prefills": mx.get_peak_memory(),
        "state_bytes": long.state_bytes,
        "state_bytes_per_token": grown,
        "formula_bytes_per_token": formula,
    }
    for session, tokens in ((short, SHORT_TOKENS), (long, LONG_TOKENS)):
        for _ in range(2):  # a full buffer grows now
            mx.eval(session.step(0))
        active = mx.get_active_memory()
        mx.reset_peak_memory()
        mx.eval(session.step(0))
        found[f"step_bytes_beyond_live_at_{tokens}"] = mx.get_peak_memory() - active
    report.table(("memory", "bytes"), [[name, value] for name, value in found.items()])
    report.results["memory"] = found
    report.check("state bytes a token, times the formula", grown / formula, least=0.99, most=1.01)


def _row_bytes_per_token(config: ModelConfig) -> float:
    """Compressed rows and index keys of every source by docs/model.md, section 7.

    Codes of four bits, a scale byte per 16 values of a row and per 32 of a key.
    """
    row = config.head_dim // 2 + config.head_dim // 16
    key = config.index_head_dim // 2 + config.index_head_dim // 32
    return sum((row + key) / config.compress_ratios[s] for s in config.kv_source_layer_ids)


def _measure_steps(report: Report, short: Session, long: Session) -> None:
    short_s, long_s = paired_s(lambda: mx.eval(short.step(0)), lambda: mx.eval(long.step(0)), STEPS)
    rows = [
        [f"decode step at {tokens:,}", statistics.median(times) * 1e3]
        for tokens, times in ((SHORT_TOKENS, short_s), (LONG_TOKENS, long_s))
    ]
    report.table(("", "ms"), rows)
    report.results["step_s"] = {"short": short_s, "long": long_s}
    report.check("longer context, times the step", speedup(long_s, short_s), most=1.5)


def _measure_operations(report: Report, short: Session, long: Session) -> None:
    """Every operation of a step by itself, at both contexts in turn."""
    times: dict[str, tuple[list[float], list[float]]] = {}
    for _ in range(STEPS):
        for i, session in enumerate((short, long)):
            for name, seconds in _step_by_operation(session).items():
                times.setdefault(name, ([], []))[i].append(seconds)
    grows = {name for name, op in _operations() if op.__module__ == indexer.__name__}
    rows: list[list[Any]] = []
    ratios: dict[str, float] = {}
    for name, parts in times.items():
        # The least of many: whatever else the machine does only adds to so short a time.
        at_short, at_long = (min(part) * 1e3 for part in parts)
        ratios[name] = at_long / at_short
        rows.append([name, at_short, at_long, ratios[name], "may grow" if name in grows else ""])
    rows.sort(key=lambda row: -row[2])
    report.table(
        ("operation", f"ms at {SHORT_TOKENS:,}", f"ms at {LONG_TOKENS:,}", "times", ""), rows
    )
    report.results["operations_ms"] = {row[0]: {"short": row[1], "long": row[2]} for row in rows}
    worst = max((ratio, name) for name, ratio in ratios.items() if name not in grows)
    report.check(f"all but the index, worst {worst[1]}, times the step", worst[0], most=1.1)


def _step_by_operation(session: Session) -> dict[str, float]:
    seconds: defaultdict[str, float] = defaultdict(float)
    with ExitStack() as stack:
        for name, op in _operations():
            stack.enter_context(patch.object(mlx_engine.model, name, _timed(op, name, seconds)))
        start = time.perf_counter()
        mx.eval(session.step(0), *session.state.arrays())
        whole = time.perf_counter() - start
    seconds[REST] = whole - sum(seconds.values())
    return seconds


def _operations() -> Iterator[tuple[str, Callable[..., Any]]]:
    """The functions of mlx_engine.ops that the model calls."""
    for name, value in vars(mlx_engine.model).items():
        module = str(getattr(value, "__module__", ""))
        if module.startswith("mlx_engine.ops.") and not isinstance(value, type):
            yield name, value


def _timed(
    op: Callable[..., Any], name: str, seconds: defaultdict[str, float]
) -> Callable[..., Any]:
    @functools.wraps(op)
    def timed(*args: Any, **options: Any) -> Any:
        # Inputs are waited for first, so that an operation pays for nothing before it.
        mx.eval(list(_arrays((args, options))))
        start = time.perf_counter()
        result = op(*args, **options)
        mx.eval(list(_arrays(result)))
        seconds[name] += time.perf_counter() - start
        return result

    return timed


def _arrays(value: Any) -> Iterator[mx.array]:
    """Every array in nested tuples, dicts and dataclasses."""
    if isinstance(value, mx.array):
        yield value
        return
    if dataclasses.is_dataclass(value):
        value = vars(value)
    if isinstance(value, dict):
        value = tuple(cast("dict[str, Any]", value).values())
    if isinstance(value, list | tuple):
        for part in cast("tuple[Any, ...]", value):
            yield from _arrays(part)


if __name__ == "__main__":
    sys.exit(main())
