"""Sums, gathers and shares: what several devices exchange, hold and read."""

import json
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from mlx_engine import memory
from mlx_engine.config_file import parse_config
from mlx_engine.devices import ONE, Devices, fitting_counts, require_fitting
from mlx_engine.errors import BadRequest, DeviceError
from mlx_engine.memory import MachineMemory
from tests.devices.rank import CONFIG, Arrays, own_array
from tests.reference.random_tensors import DATA
from tests.unit.arrays import host

RELEASED = parse_config(json.loads((DATA / "released_config.json").read_text()))
SMALL = parse_config(CONFIG)


def _parts(ranks: list[Arrays], tokens: int) -> list[mx.array]:
    return [own_array(rank, tokens) for rank in range(len(ranks))]


@pytest.mark.parametrize("after", ["", " after"], ids=["plain", "after another"])
@pytest.mark.parametrize("tokens", [1, 8])
def test_few_tokens_are_added_in_the_order_of_the_ranks(
    ranks: list[Arrays], tokens: int, after: str
) -> None:
    first, *rest = (part.astype(mx.float32) for part in _parts(ranks, tokens))
    for part in rest:
        first = first + part
    expected = host(first.astype(mx.bfloat16))
    np.testing.assert_array_equal(ranks[0][f"sum of {tokens}{after}"], expected)


@pytest.mark.parametrize("after", ["", " after"], ids=["plain", "after another"])
@pytest.mark.parametrize("tokens", [9, 40])
def test_the_sum_of_many_tokens_is_rounded_once(
    ranks: list[Arrays], tokens: int, after: str
) -> None:
    exact = np.sum([host(part).astype(np.float64) for part in _parts(ranks, tokens)], axis=0)
    error = np.abs(ranks[0][f"sum of {tokens}{after}"] - exact)
    # Half of the last of 8 digits, and the little by which f32 misses a midpoint.
    assert np.all(error <= np.abs(exact) * (2.0**-8 + 2.0**-20))


def test_gathered_parts_lie_side_by_side(ranks: list[Arrays]) -> None:
    for tokens in (1, 40):
        expected = np.concatenate([host(part) for part in _parts(ranks, tokens)], axis=1)
        np.testing.assert_array_equal(ranks[0][f"gather of {tokens}"], expected)


def test_what_the_first_has_arrives_bit_for_bit(ranks: list[Arrays]) -> None:
    np.testing.assert_array_equal(ranks[-1]["from_first"], host(own_array(0, 3)))
    np.testing.assert_array_equal(ranks[-1]["from_first bits"], [0x80000000, 0x7FC00001])


def test_every_rank_reads_and_holds_its_share(ranks: list[Arrays]) -> None:
    count = len(ranks)
    for rank in ranks:
        assert rank["own held"] == memory.resident_bytes(SMALL, count)
        assert rank["own read"] == memory.read_bytes(SMALL, count)
    whole = memory.resident_bytes(SMALL)
    # All but 30% of this small model is shared out.
    assert memory.resident_bytes(SMALL, count) < whole * (0.3 + 0.7 / count)


def test_every_engram_row_is_read_by_one_rank(ranks: list[Arrays]) -> None:
    engram = SMALL.engram
    assert engram is not None
    rows = [int(rank["own rows"]) for rank in ranks]
    assert rows == [len(engram.layer_ids) * engram.columns // len(ranks)] * len(ranks)


def test_a_step_exchanges_twice_a_layer_and_for_engram_embed_and_head(ranks: list[Arrays]) -> None:
    engram = SMALL.engram
    assert engram is not None
    for rank in ranks:
        assert rank["own exchanges"] == 2 * SMALL.num_hidden_layers + len(engram.layer_ids) + 2


def test_one_device_exchanges_nothing() -> None:
    x = own_array(0, 3)
    assert ONE.sum(x) is ONE.sum(x, after=x) is ONE.gather(x) is ONE.from_first(x) is x


def test_shares_are_equal_and_cover_all() -> None:
    shares = [Devices(rank, 4).share(12) for rank in range(4)]
    assert [n for own in shares for n in range(12)[own]] == list(range(12))
    with pytest.raises(AssertionError, match="13 do not split into 4"):
        Devices(0, 4).share(13)


def test_the_counts_that_fit() -> None:
    assert fitting_counts(RELEASED) == [1, 2, 4, 8]
    require_fitting(RELEASED, 8)
    with pytest.raises(BadRequest, match=r"3 devices .*64 attention heads.*: use 1, 2, 4, 8$"):
        require_fitting(RELEASED, 3)
    no_engram = replace(SMALL, engram=None)
    assert fitting_counts(no_engram) == [1, 2, 4]


def test_what_a_device_holds_and_reads_of_the_released_model() -> None:
    specs = list(memory.resident_specs(RELEASED))
    whole = sum(spec.n_bytes for spec in specs)
    # Router, mHC, wq_a, wkv, compressors and indexers: all of them on every device.
    alike = sum(spec.n_bytes for spec in specs if spec.axis is None)
    assert 0.002 * whole < alike < 0.004 * whole
    for count in (1, 2, 4, 8):
        held = sum(spec.held_bytes(count) for spec in specs)
        assert held == alike + (whole - alike) // count
        # Of embed, w2, wo_b and Engram's wkv every row is read, to keep a piece of it.
        by_column = sum(spec.n_bytes for spec in specs if spec.axis == 1)
        read = sum(spec.read_bytes(count) for spec in specs)
        assert read == held + by_column - by_column // count
    assert 0.32 * whole < by_column < 0.34 * whole


def test_what_a_device_needs_of_memory() -> None:
    one, half = (memory.needs(SMALL, 512, devices=count) for count in (1, 2))
    assert half.weights_bytes == memory.resident_bytes(SMALL, 2) < one.weights_bytes
    assert half.kept_bytes < one.kept_bytes
    assert half.activation_bytes < one.activation_bytes
    assert half.state_bytes == one.state_bytes
    machine = MachineMemory("CUDA", 2 * half.total_bytes, half.total_bytes)
    assert memory.require_memory(SMALL, 512, machine, devices=2) == half
    with pytest.raises(DeviceError, match="the model needs"):
        memory.require_memory(SMALL, 512, machine)
