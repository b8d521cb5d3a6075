"""The launches of one decode step at the released configuration, and the bytes that they move.

First what counts is counted right, then the step is held to its limits.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_engine.config import ModelConfig
from mlx_engine.config_file import parse_config
from mlx_engine.model import Model
from mlx_engine.ops import launch
from mlx_engine.ops.traffic import Traffic
from mlx_engine.sampling import Sampler, Sampling
from mlx_engine.session import Session
from tests.engine.support import tiny_config
from tests.kernels.counted import counted
from tests.kernels.step import decode_step, engram_of_zeros, lay_out_weights
from tests.kernels.trace import Array, Launch, trace
from tests.kernels.traffic import floor_bytes, given_bytes, state_read_bytes, traffic
from tests.msl import emulator
from tests.msl.conftest import require_emulator
from tests.msl.emulator import EmulatedKernel
from tests.reference.random_tensors import TINY_CONFIG

DATA = Path(__file__).parents[1] / "data"

# Of the released configuration: on average over the layers, and of a token.
MOST_PER_LAYER = 15
MOST_PER_TOKEN = 640
MOST_TIMES_FLOOR = 1.05
# What a step leaves to MLX: its Metal backend has one launch for each.
LAUNCHED_ONCE = {"Gather", "ArgReduce", "SliceUpdate"}
# Before the token that closes a group of every source; the longer needs two-level selections.
CONTEXTS = (8_191, 131_071)
SAMPLINGS = {"greedy": Sampling(temperature=0), "top-p": Sampling(top_p=0.95, seed=0)}

KERNEL = launch.Kernel("linear", "twice", ("x",), ("out",), "")


def twice(x: mx.array) -> mx.array:
    (out,) = KERNEL([x], grid=(1, 1, 1), threadgroup=(1, 1, 1), shapes=[x.shape], dtypes=[x.dtype])
    return out


def put(x: mx.array, rows: mx.array) -> mx.array:
    x[2 : 2 + rows.shape[0]] = rows
    return x


def launches(
    function: Callable[..., mx.array | list[mx.array]], *shapes: tuple[int, ...]
) -> list[Launch]:
    arguments = {f"x{i}": mx.zeros(shape) for i, shape in enumerate(shapes)}

    def named(**given: mx.array) -> list[mx.array]:
        out = function(*(given[name] for name in arguments))
        return out if isinstance(out, list) else [out]

    return trace(named, arguments, lambda name: int(name[1:]))


# What the function of x [4, 6] launches.
LAUNCHED: list[tuple[Callable[[mx.array], mx.array | list[mx.array]], list[str]]] = [
    (lambda x: x.reshape(8, 3).T[2:, 1:][:, None], []),
    (lambda x: mx.split(mx.broadcast_to(x, (5, 4, 6)), 2, axis=1), []),
    (lambda x: x.reshape(2, 12)[:, 4:8].reshape(2, 2, 2), []),
    (lambda x: x.view(mx.uint8)[:, 8:].view(mx.uint32), ["copy"]),
    (lambda x: x[:1].reshape(-1), []),
    (lambda x: x[0], ["Gather"]),
    (lambda x: x.T.reshape(-1), ["copy"]),
    (lambda x: x[:, 1:].view(mx.uint16), []),
    (lambda x: x.T.view(mx.uint8), ["copy"]),
    (lambda x: mx.contiguous(x.T), ["contiguous"]),
    (lambda x: twice(mx.contiguous(x[1:])), ["contiguous", "twice"]),
    (lambda x: mx.concatenate([x, x[:1], x[:0]]), ["copy", "Concatenate"]),
    (lambda x: mx.pad(x, [(0, 1), (0, 0)]), ["copy", "Pad"]),
    (lambda x: x.T + 1, ["Add"]),
    (lambda x: x.astype(mx.float32), []),
    (lambda x: x.astype(mx.bfloat16), ["AsType"]),
    (lambda x: mx.array([1.0, 2.0]) + mx.array(3.0), ["Add"]),
    (lambda x: mx.array([1.0, 2.0])[:, None], []),
    (lambda x: [x.sum(), x * 2][0], ["Reduce"]),
    (twice, ["twice"]),
    (lambda x: twice(x[1:]), ["twice"]),
    (lambda x: twice(x[:, 1:]), ["copy", "twice"]),
    (lambda x: twice(twice(x.T)), ["copy", "twice", "twice"]),
    (lambda x: twice(mx.broadcast_to(x[:1], x.shape)), ["copy", "twice"]),
    (lambda x: mx.fast.rms_norm(x, x[:1].reshape(-1), 1e-5), ["rms_norm"]),
    (
        lambda x: mx.slice_update(x, x[:1] + 1, mx.array([2]), [0]),
        ["Add", "place", "DynamicSliceUpdate"],
    ),
    (lambda x: put(x, x[:1] + 1), ["Add", "SliceUpdate"]),
]


@pytest.mark.parametrize(("function", "expected"), LAUNCHED)
def test_a_launch_is_what_makes_an_array(
    function: Callable[[mx.array], mx.array | list[mx.array]], expected: list[str]
) -> None:
    assert [found.name for found in launches(function, (4, 6))] == expected


def test_a_quantised_operation_is_one_launch() -> None:
    def product(x: mx.array, w: mx.array, scales: mx.array) -> list[mx.array]:
        codes, bytes_ = w.view(mx.uint32), scales.view(mx.uint8)
        packed: dict[str, Any] = {"group_size": 32, "bits": 8, "mode": "mxfp8"}
        return [
            mx.quantized_matmul(x, codes, bytes_, transpose=True, **packed),
            mx.dequantize(codes, bytes_, dtype=mx.bfloat16, **packed),
        ]

    found = launches(product, (1, 128), (8, 32), (8, 1))
    assert Counter(launch.name for launch in found) == {"QuantizedMatmul": 1, "dequantize": 1}
    assert next(f for f in found if f.name == "dequantize").outputs[0].shape == (8, 128)


def test_a_launch_knows_its_arrays_and_on_what_it_depends() -> None:
    """Broadcast bytes are there once; an embedding and a slice update touch their rows only."""

    def several(x: mx.array, y: mx.array, table: mx.array) -> list[mx.array]:
        total = twice(mx.broadcast_to(x, (8, 6)) + y)
        return [
            total,
            table[mx.array([3])],
            mx.slice_update(table, y[:2], mx.array([2]), [0]),
        ]

    found = launches(several, (6,), (8, 6), (1000, 6))
    add, kernel, gather, _, update = found
    assert [f.source for f in found] == [1, 1, 2, 2, 2]
    assert add.inputs[0] == Array((8, 6), mx.float32, 6 * 4)
    assert traffic(add).unique_bytes == (6 + 48 + 48) * 4
    assert (kernel.kernel is not None, add.kernel) == (True, None)
    assert given_bytes(kernel) == 2 * 48 * 4
    assert traffic(gather).unique_bytes == 2 * 6 * 4 + 4
    assert traffic(update).unique_bytes == 2 * 12 * 4 + 4


@cache
def released() -> ModelConfig:
    return parse_config(json.loads((DATA / "released_config.json").read_text()))


@cache
def step(context_tokens: int, sampling: str) -> list[Launch]:
    return decode_step(released(), context_tokens, SAMPLINGS[sampling])


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("context_tokens", CONTEXTS)
def test_a_step_has_few_launches(context_tokens: int, sampling: str) -> None:
    found = step(context_tokens, sampling)
    layers = released().num_hidden_layers
    by_layer = Counter(f.source for f in found)
    print({layer: by_layer[layer] for layer in range(-1, layers + 1)})
    print(Counter(f.name for f in found).most_common())
    assert sum(by_layer[layer] for layer in range(layers)) / layers <= MOST_PER_LAYER
    assert len(found) <= MOST_PER_TOKEN
    assert {f.name for f in found if f.kernel is None} <= LAUNCHED_ONCE


@pytest.mark.parametrize("context_tokens", CONTEXTS)
def test_a_compiled_step_copies_nothing(context_tokens: int) -> None:
    found = decode_step(released(), context_tokens, SAMPLINGS["greedy"], by_decoder=True)
    of_mlx = Counter(f.name for f in found if f.kernel is None)
    print(len(found), of_mlx)
    # The embedding, three parts of every source's row, the choice of the token.
    appended = 3 * len(released().kv_source_layer_ids)
    assert of_mlx == {"Gather": 1, "ScatterAxis": appended, "ArgReduce": 1}


@pytest.mark.parametrize("context_tokens", CONTEXTS)
def test_a_step_moves_little_more_than_it_must(context_tokens: int) -> None:
    least = floor_bytes(released()) + state_read_bytes(released(), context_tokens + 1)
    moved = sum(traffic(f).unique_bytes for f in step(context_tokens, "greedy"))
    print(moved / least)
    # What is below the floor was not read.
    assert 1 <= moved / least <= MOST_TIMES_FLOOR


def test_the_floor_is_the_published_one() -> None:
    assert floor_bytes(released()) == pytest.approx(13.04e9, rel=1e-3)


@pytest.mark.parametrize("context_tokens", CONTEXTS)
def test_formulas_are_at_most_what_kernels_are_given(context_tokens: int) -> None:
    """A kernel that reads all it is given moves just that, one that gathers moves less."""
    gathering = ("moe_", "attend_", "merge_", "index_scores_of_blocks", "best_")
    planned, given = Counter[str](), Counter[str]()
    for found in step(context_tokens, "greedy"):
        if found.kernel is not None:
            family = found.name.split("_")[0]
            is_gathering = found.name.startswith(gathering)
            planned[f"{family} {is_gathering}"] += traffic(found).unique_bytes
            given[f"{family} {is_gathering}"] += given_bytes(found)
    for family, n_bytes in planned.items():
        if family.endswith("False"):
            assert n_bytes == pytest.approx(given[family], rel=0.01), family
    for families in (("moe True",), ("attend True", "merge True")):
        assert sum(planned[f] for f in families) < sum(given[f] for f in families)


def test_a_trace_takes_no_memory() -> None:
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    decode_step(released(), CONTEXTS[0], SAMPLINGS["greedy"])
    assert mx.get_peak_memory() - before < 32 << 20


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("tokens", [21, 141])
def test_the_bytes_of_a_traced_step_are_those_of_a_real_one(tokens: int, sampling: str) -> None:
    """By kernel, unique and total: what the emulator counts in a step after MLX's prefill.

    The step closes a group of every source, and the newest block is whole.
    """
    require_emulator()
    config = parse_config(tiny_config(index_head_dim=64, sliding_window=20))
    weights = lay_out_weights(config, lambda _, shape, dtype: mx.zeros(shape, dtype))
    session = Session(Model(config, weights, mx.bfloat16), engram_of_zeros(config))
    mx.eval(session.sync([0] * tokens))
    with launch.using(EmulatedKernel), emulator.recording() as reports:
        Sampler(SAMPLINGS[sampling])(session.step(0))
    real, traced = (defaultdict[str, Traffic](Traffic) for _ in range(2))
    for report in reports:
        real[report.kernel] += counted(report)
    for found in decode_step(config, tokens, SAMPLINGS[sampling]):
        if found.kernel is not None:
            traced[found.name] += traffic(found)
    # In which blocks the chosen rows lie is in the scores: at most one in each.
    in_blocks = real.pop("best_rows_of_blocks"), traced.pop("best_rows_of_blocks")
    assert 0 < in_blocks[0].unique_bytes <= in_blocks[1].unique_bytes
    assert in_blocks[0].total_bytes == in_blocks[1].total_bytes
    assert real == traced


@pytest.mark.parametrize("tokens", [20, 21])
def test_a_traced_step_launches_the_kernels_of_a_real_one(tokens: int) -> None:
    """A session over weights that are zero gets to the same place token by token."""
    config = parse_config(TINY_CONFIG)
    weights = lay_out_weights(config, lambda _, shape, dtype: mx.zeros(shape, dtype))
    session = Session(Model(config, weights, mx.bfloat16), engram_of_zeros(config))
    names: list[str] = []

    def record(*, name: str, **_: Any) -> Callable[..., list[mx.array]]:
        def run(*, output_shapes: Any, output_dtypes: Any, **_: Any) -> list[mx.array]:
            names.append(name)
            pairs = zip(output_shapes, output_dtypes, strict=True)
            return [mx.zeros(shape, dtype) for shape, dtype in pairs]

        return run

    mx.eval(session.sync([0] * tokens))
    with launch.using(record):
        Sampler(SAMPLINGS["top-p"])(session.step(0))
    traced = decode_step(config, tokens, SAMPLINGS["top-p"])
    assert names
    assert Counter(names) == Counter(f.name for f in traced if f.kernel is not None)
