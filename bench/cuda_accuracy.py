"""How far kernels on a GPU are from MLX's operations, and graphs of a step from the model.

With random weights an expert is often chosen by a hair, and one other choice changes all that
follows. So every layer is compared on the same input.
"""

import statistics
from typing import cast

import mlx.core as mx

from mlx_engine.chunk import Chunk
from mlx_engine.decoder import Decoder
from mlx_engine.engram import EngramRows
from mlx_engine.model import Boundary, Model
from mlx_engine.ops import launch
from mlx_engine.state import SessionState

# Above this a layer has chosen another expert or row.
_ANOTHER_CHOICE = 0.04


def accuracy(
    model: Model, state: SessionState, token_id: int, rows: EngramRows
) -> dict[str, float]:
    """Relative errors of a step after a state, which stays as it is."""
    graph, place = Decoder(model), state.checkpoint()
    # The second step of a form is the first that is compiled.
    found = [graph.step(token_id, state.fork(place), rows) for _ in range(2)]
    own = state.fork(place)
    plain = model.head(*model.decode(model.encode([token_id], own, rows), own))[0]
    errors = _layer_errors(model, state, token_id, rows)
    return {
        "graph_against_model": max(distance(logits, plain) for logits in found),
        "layer_median": statistics.median(errors),
        "layer_worst": max(errors),
        "layers_with_another_choice": sum(error > _ANOTHER_CHOICE for error in errors),
    }


def _layer_errors(
    model: Model, state: SessionState, token_id: int, rows: EngramRows
) -> list[float]:
    config, place = model.config, state.checkpoint()
    ours, theirs = state.fork(place), state.fork(place)
    chunk, their_chunk = (Chunk.of(config, place.position + 1, 1) for _ in range(2))
    ids = mx.full((1, config.hc_mult), token_id, mx.int32)
    entered = model.enter(0, *model.embedded(ids), chunk, rows)
    errors: list[float] = []
    for layer in range(config.num_hidden_layers):
        model.publish(layer, entered.x, chunk, ours)
        output = model.block(layer, entered, 1, chunk, ours)
        mx.eval(output.written())
        with launch.using(None):
            same = Boundary(entered.streams, entered.x, entered.mixing)
            model.publish(layer, same.x, their_chunk, theirs)
            wanted = model.block(layer, same, 1, their_chunk, theirs).written()
            errors.append(distance(output.written(), wanted))
        if layer + 1 < config.num_hidden_layers:
            entered = model.between(output, layer + 1, chunk, rows)
    return errors


def distance(a: mx.array, b: mx.array) -> float:
    """The norm of the difference over that of b."""
    a, b = a.astype(mx.float32), b.astype(mx.float32)
    return cast(float, (mx.linalg.norm(a - b) / mx.linalg.norm(b)).item())
