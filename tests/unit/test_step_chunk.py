"""What a table has of a position is what the model computes for a chunk of that one token."""

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlx_engine import step_chunk
from mlx_engine.chunk import Chunk
from mlx_engine.config_file import parse_config
from mlx_engine.layer_plan import layer_plan
from mlx_engine.ops.rope import Rotation
from mlx_engine.step_chunk import Places, StepChunk

CONFIG = parse_config(
    json.loads((Path(__file__).parents[1] / "data/released_config.json").read_text())
)


def same(found: Rotation, right: Rotation) -> bool:
    return (
        mx.array_equal(found.cos, right.cos).item() and mx.array_equal(found.sin, right.sin).item()
    )  # pyright: ignore[reportReturnType]


def test_a_places_chunk_is_the_models() -> None:
    places = Places(CONFIG)
    # At both ends of a table, in the middle, and as far as a context reaches.
    for position in (0, 127, 128, 129, 5000, 131_071, 1_048_575):
        found = StepChunk(CONFIG, position + 1, places.at(position))
        right = Chunk.of(CONFIG, position + 1, 1)
        assert same(found.plain, right.plain)
        assert same(found.compressed, right.compressed)
        for ratio in (1, 2):
            group = position // ratio
            assert same(found.at_groups(group, 1, ratio), right.at_groups(group, 1, ratio))
            assert found.ends[ratio].tolist() == [group]
        assert found.slot.item() == position % CONFIG.sliding_window
        for plan in layer_plan(CONFIG):
            if plan.ratio:
                assert found.visible(plan, 1).tolist() == right.visible(plan, 1).tolist()


def test_rows_of_a_table_begin_where_four_words_may_be_loaded() -> None:
    assert Places(CONFIG).at(3).size % 4 == 0


def test_a_table_is_made_once_and_only_some_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    words = step_chunk._words  # pyright: ignore[reportPrivateUsage]

    def noting(config: object, positions: np.ndarray) -> np.ndarray:
        made.append(int(positions[0]))
        return words(CONFIG, positions)

    monkeypatch.setattr(step_chunk, "_words", noting)
    places = Places(CONFIG)
    for position in (0, 1, 127, 128, 255, 0):
        places.at(position)
    assert made == [0, 128]
    for table in range(2, 10):
        places.at(128 * table)
    places.at(128 * 9)
    assert made == [0, *range(128, 1281, 128)][: len(made)] and len(made) == 10
    places.at(0)
    assert made[-1] == 0
