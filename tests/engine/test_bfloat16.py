"""The default dtype through the whole engine: which parts are bf16, which f32, and the logits.

Exact comparisons are made in float32. Here the types are what is checked; the logits only show that
nothing is grossly wrong, since a single product accumulated in bf16 would not show in them.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray

import mlx_engine.model
from mlx_engine import load
from mlx_engine.loading import Dtype
from mlx_engine.ops.mhc import Mixing
from mlx_engine.ops.router import Routing
from tests.engine.timelines import next_token

Part = mx.array | Mixing | Routing | None
Result = Part | tuple[Part, ...]

PROMPT = [3 + i * 7 % 200 for i in range(60)]

# What the model calls between its sublayers, what must keep more digits, and what gives both.
ACTIVATIONS = (
    "attention_front",
    "engram_gate",
    "fp8_linear",
    "fp8_linear_pair",
    "grouped_output",
    "mhc_collapse_norm",
    "mhc_expand",
    "moe",
    "pooled_rows",
    "sparse_attention",
)
WIDE = ("head_logits", "linear_f32", "linear_f32_pair")
BOTH = ("index_queries", "mhc_enter", "mhc_project", "mhc_route")


def arrays(result: Result) -> list[mx.array]:
    if result is None:
        return []
    if isinstance(result, mx.array):
        return [result]
    if isinstance(result, Mixing):
        return [result.pre, result.post, result.comb]
    if isinstance(result, Routing):
        return [result.scores, *result.chosen()]
    return [array for part in result for array in arrays(part)]


@contextmanager
def _watched() -> Generator[dict[str, set[mx.Dtype]]]:
    """Collect the floating types that the model gets from each operation."""
    seen: dict[str, set[mx.Dtype]] = {}

    def watching(name: str, operation: Callable[..., Result]) -> Callable[..., Result]:
        def watched(*args: Any, **options: Any) -> Result:
            result = operation(*args, **options)
            for array in arrays(result):
                if mx.issubdtype(array.dtype, mx.floating):
                    seen.setdefault(name, set()).add(array.dtype)
            return result

        return watched

    with pytest.MonkeyPatch.context() as patch:
        for name in (*ACTIVATIONS, *WIDE, *BOTH):
            operation = getattr(mlx_engine.model, name)
            patch.setattr(mlx_engine.model, name, watching(name, operation))
        yield seen


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_activations_have_the_chosen_type_and_the_rest_is_f32(
    checkpoint: Path, dtype: Dtype
) -> None:
    chosen = {"bfloat16": mx.bfloat16, "float32": mx.float32}[dtype]
    with load(checkpoint, dtype) as engine, _watched() as seen:
        steps = engine.generate(PROMPT, max_tokens=2, temperature=0, ignore_eos=True)
        next_token(steps)
        prefill = dict(seen)
        seen.clear()
        next_token(steps)
    expected = {name: {chosen} for name in ACTIVATIONS} | {name: {mx.float32} for name in WIDE}
    expected |= {name: {chosen, mx.float32} for name in BOTH}
    assert prefill == expected
    assert seen == expected


def test_bfloat16_is_the_default(checkpoint: Path) -> None:
    with load(checkpoint) as engine, _watched() as seen:
        engine.logits([5])
    assert seen["mhc_expand"] == {mx.bfloat16}


def test_logits_follow_those_of_float32(checkpoint: Path) -> None:
    """The correlation of the middle token is above 0.99.

    Rounding to 8 bits moves a value by 0.1% of itself (2**-9 / sqrt(3)). Some 12 roundings in each
    of 20 sublayers add up to 1.7% of the logits if nothing amplifies them, and the layers do: the
    weights of three seeds gave 2.5 to 4.5%. 0.99 stands for 14%. The middle token is taken because
    where a close call picks another expert, that token's logits may be anything.
    """
    logits: dict[Dtype, NDArray[np.float32]] = {}
    for dtype in ("bfloat16", "float32"):
        with load(checkpoint, dtype) as engine:
            logits[dtype] = engine.logits(PROMPT)
            assert logits[dtype].dtype == np.float32
    narrow, wide = (x - x.mean(axis=1, keepdims=True) for x in logits.values())
    norms = np.linalg.norm(narrow, axis=1) * np.linalg.norm(wide, axis=1)
    correlation = (narrow * wide).sum(axis=1) / norms
    assert np.median(correlation) > 0.99
    assert not np.array_equal(narrow, wide)
