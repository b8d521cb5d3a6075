"""How far steps with kernels on a GPU are from the reference path, layer by layer.

The reference is the model in MLX's operations in f32, on the same cached rows. With random weights
an expert is often chosen by a hair, and one other choice changes all that follows. So every step is
made twice: free, and with the experts and rows of the reference, where only roundings are left.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast
from unittest.mock import patch

import mlx.core as mx

import mlx_engine.model
from mlx_engine.chunk import Chunk
from mlx_engine.decoder import Decoder
from mlx_engine.engram import EngramRows
from mlx_engine.model import Model
from mlx_engine.ops import launch
from mlx_engine.ops.launch import KernelFactory
from mlx_engine.ops.router import Routing
from mlx_engine.state import SessionState

# Puts an expert above all others; what is left of a score's bits does not matter to the choice.
_FORCED = 1024.0


@dataclass
class Choices:
    """In the order of the layers: the experts of each, and rows and blocks of those that choose."""

    experts: list[mx.array] = field(default_factory=list[mx.array])
    rows: list[tuple[mx.array, mx.array | None]] = field(
        default_factory=list[tuple[mx.array, mx.array | None]]
    )


@dataclass
class Step:
    """The streams that each layer wrote, and what was chosen on the way."""

    streams: list[mx.array]
    choices: Choices


def accuracy(
    model: Model, state: SessionState, token_id: int, rows: EngramRows, kernels: KernelFactory
) -> dict[str, Any]:
    """Relative errors of a step's streams after every layer; the state stays as it is.

    `free` and `forced` are the kernels', `mlx_forced` those of MLX's operations in the model's own
    type, which rounds as often. The others count choices that the reference did not make.
    """

    def step(of: Model, factory: KernelFactory | None, forced: Choices | None = None) -> Step:
        return _step(of, state, token_id, rows, factory, forced)

    wide = step(Model(model.config, model.weights, mx.float32), None)
    free, forced = step(model, kernels), step(model, kernels, wide.choices)
    plain = step(model, None, wide.choices)
    layers = [
        {
            "free": distance(free.streams[layer], streams),
            "forced": distance(forced.streams[layer], streams),
            "mlx_forced": distance(plain.streams[layer], streams),
            "other_experts": _others(free.choices.experts[layer], wide.choices.experts[layer]),
        }
        for layer, streams in enumerate(wide.streams)
    ]
    return {
        "graph_against_model": _graph_error(model, state, token_id, rows, kernels),
        "last_hidden_state": layers[-1],
        "layers": layers,
        "other_rows": [
            _others(ours, theirs)
            for (ours, _), (theirs, _) in zip(free.choices.rows, wide.choices.rows, strict=True)
        ],
    }


def distance(a: mx.array, b: mx.array) -> float:
    """The norm of the difference over that of b."""
    a, b = a.astype(mx.float32), b.astype(mx.float32)
    return cast(float, (mx.linalg.norm(a - b) / mx.linalg.norm(b)).item())


def _others(ours: mx.array, theirs: mx.array) -> int:
    """How many of ours are not among theirs."""
    a, b = (set(cast(list[int], ids.reshape(-1).tolist())) for ids in (ours, theirs))
    return len(a - b)


def _graph_error(
    model: Model, state: SessionState, token_id: int, rows: EngramRows, kernels: KernelFactory
) -> float:
    """Of a compiled step's logits from those of the model, both with kernels."""
    graph, place = Decoder(model), state.checkpoint()
    with launch.using(kernels):
        # The second step of a form is the first that is compiled.
        found = [graph.step(token_id, state.fork(place), rows) for _ in range(2)]
        own = state.fork(place)
        plain = model.head(*model.decode(model.encode([token_id], own, rows), own))[0]
        return max(distance(logits, plain) for logits in found)


def _step(
    model: Model,
    state: SessionState,
    token_id: int,
    rows: EngramRows,
    factory: KernelFactory | None,
    forced: Choices | None,
) -> Step:
    config, own = model.config, state.fork(state.checkpoint())
    chunk = Chunk.of(config, own.position + 1, 1)
    ids = mx.full((1, config.hc_mult), token_id, mx.int32)
    streams: list[mx.array] = []
    with launch.using(factory), _choosing(forced) as choices:
        entered = model.enter(0, *model.embedded(ids), chunk, rows)
        for layer in range(config.num_hidden_layers):
            model.publish(layer, entered.x, chunk, own)
            output = model.block(layer, entered, 1, chunk, own)
            streams.append(output.written())
            if layer + 1 < config.num_hidden_layers:
                entered = model.between(output, layer + 1, chunk, rows)
        mx.eval(streams)
    return Step(streams, choices)


@contextmanager
def _choosing(forced: Choices | None) -> Generator[Choices]:
    """Note what the model chooses, or have it choose what another run did."""
    made = Choices()
    route: Callable[..., Any] = mlx_engine.model.mhc_route
    choose: Callable[..., tuple[mx.array, mx.array | None]] = mlx_engine.model.choose_rows

    def routed(*args: Any) -> Any:
        *found, routing = route(*args)
        if forced is not None:
            ids = forced.experts[len(made.experts)]
            bias = mx.zeros_like(routing.router.bias)
            bias[ids] = _FORCED
            routing = Routing(routing.scores, replace(routing.router, bias=bias))
        made.experts.append(routing.chosen()[0][0])
        return *found, routing

    def chosen(*args: Any, **options: Any) -> tuple[mx.array, mx.array | None]:
        rows, blocks = choose(*args, **options)
        if forced is not None:
            rows, blocks = forced.rows[len(made.rows)]
        made.rows.append((rows, blocks))
        return rows, blocks

    with (
        patch.object(mlx_engine.model, "mhc_route", routed),
        patch.object(mlx_engine.model, "choose_rows", chosen),
    ):
        yield made
