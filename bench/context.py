"""What a longer context costs on the CPU: a decode step, by operation too, a prefill, and memory.

All but the index scan and its top-k should take the same at any context, a short prefill should
spare most of the upper half of the layers, and the state should grow by the formula alone.
"""

import dataclasses
import functools
import statistics
import sys
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
OPERATION_RUNS = 30
# Long enough that the short prefill leaves something out.
CHECK_TOKENS = 1500


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
    """A whole step at both contexts, then every operation in it by itself."""
    steps = paired_s(lambda: mx.eval(short.step(0)), lambda: mx.eval(long.step(0)), STEPS)
    step_ms = [statistics.median(times) * 1e3 for times in steps]
    operations = _operation_ms(short, long)
    names = [name for name, op in _operations() if op.__module__ == indexer.__name__]
    rest_ms = [
        whole - sum(operations[name][i] for name in names) for i, whole in enumerate(step_ms)
    ]
    measured = {"a step": step_ms, "a step less the index": rest_ms}
    measured |= dict(sorted(operations.items(), key=lambda item: -item[1][0]))
    rows = [
        [name, *both, both[1] / both[0], "may grow" if name in names else ""]
        for name, both in measured.items()
    ]
    report.table(("", f"ms at {SHORT_TOKENS:,}", f"ms at {LONG_TOKENS:,}", "times", ""), rows)
    report.results["step_s"] = {"short": steps[0], "long": steps[1]}
    report.results["operations_ms"] = operations
    report.check("longer context, times the step", speedup(steps[1], steps[0]), most=1.5)
    report.check("the step less the index, times", rest_ms[1] / rest_ms[0], most=1.1)
    worst = max((both[1] / both[0], name) for name, both in operations.items() if name not in names)
    report.check(f"any operation but the index ({worst[1]}), times", worst[0], most=1.1)


def _operation_ms(short: Session, long: Session) -> dict[str, list[float]]:
    """Milliseconds that the calls of each operation in one step take, at both contexts.

    Each call is made again by itself, in turn with its twin. The least of many counts: whatever
    else the machine does only adds to so short a time.
    """
    total_ms: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for (name, call), (twin, other) in zip(_recorded(short), _recorded(long), strict=True):
        assert name == twin
        for i, seconds in enumerate(paired_s(call, other, OPERATION_RUNS)):
            total_ms[name][i] += min(seconds) * 1e3
    return dict(total_ms)


def _recorded(session: Session) -> list[tuple[str, Callable[[], None]]]:
    """Run one step; return its calls of operations, each ready to be made again."""
    calls: list[tuple[str, Callable[[], None]]] = []

    def recorded(name: str, op: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(op)
        def call(*args: Any, **options: Any) -> Any:
            mx.eval(list(_arrays((args, options))))
            calls.append((name, lambda: mx.eval(list(_arrays(op(*args, **options))))))
            return op(*args, **options)

        return call

    with ExitStack() as stack:
        for name, op in _operations():
            stack.enter_context(patch.object(mlx_engine.model, name, recorded(name, op)))
        mx.eval(session.step(0))
    return calls


def _operations() -> list[tuple[str, Callable[..., Any]]]:
    """The functions of mlx_engine.ops that the model calls."""
    return [
        (name, value)
        for name, value in vars(mlx_engine.model).items()
        if str(getattr(value, "__module__", "")).startswith("mlx_engine.ops.")
        and not isinstance(value, type)
    ]


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
