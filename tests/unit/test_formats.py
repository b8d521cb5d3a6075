"""The cache's row formats against the reference's exact arithmetic: codes, roundings, layout."""

import json
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from mlx_engine.config_file import parse_config
from mlx_engine.formats import COMPRESSED, INDEX, WINDOW, PackedFormat
from mlx_engine.state import SessionState
from tests.reference import formats as reference

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

FORMATS = {"window": WINDOW, "compressed": COMPRESSED, "index": INDEX}
ROUNDINGS: dict[str, Callable[[reference.Float], reference.Rounded]] = {
    "window": reference.round_window,
    "compressed": reference.round_compressed,
    "index": reference.round_index,
}
MAGNITUDES = {
    "window": reference.E4M3_MAGNITUDES,
    "compressed": reference.E2M1_MAGNITUDES,
    "index": reference.E2M1_MAGNITUDES,
}
kinds = pytest.mark.parametrize("kind", FORMATS)
released = parse_config(
    json.loads((Path(__file__).parents[1] / "data" / "released_config.json").read_text())
)


def packed_bytes(fmt: PackedFormat, x: Floats) -> Bytes:
    """The rows' bytes [.., 4 * words]."""
    return np.array(fmt.pack(mx.array(x)).view(mx.uint8), np.uint8)


def unpacked(fmt: PackedFormat, rows: Bytes, width: int) -> Floats:
    """The values of rows given as bytes."""
    return np.array(fmt.unpack(mx.array(rows).view(mx.uint32), width), np.float32)


def round_trip(fmt: PackedFormat, x: Floats) -> Floats:
    return np.array(fmt.unpack(fmt.pack(mx.array(x)), x.shape[-1]), np.float32)


def assert_exact(kind: str, x: Floats) -> None:
    """Packed and unpacked, x is what the reference makes of it; a zero's sign is free."""
    expected = ROUNDINGS[kind](x.astype(np.float64)).values
    np.testing.assert_array_equal(round_trip(FORMATS[kind], x), expected)


def with_neighbours(values: NDArray[np.float64]) -> Floats:
    """Values that f32 holds, with the f32 just below and just above each."""
    exact = values.astype(np.float32)
    assert np.array_equal(exact, values)
    below, above = (np.nextafter(exact, np.float32(to)) for to in (-np.inf, np.inf))
    return np.concatenate([below, exact, above])


def in_blocks(values: Floats, largest: float, group: int) -> Floats:
    """Lay values out in blocks that start with the largest code, which fixes the scale at one."""
    filled = np.resize(values, (-(-len(values) // (group - 1)), group - 1))
    blocks = np.pad(filled, [(0, 0), (1, 0)], constant_values=np.float32(largest))
    return np.resize(blocks, (len(blocks) + len(blocks) % 2, group)).reshape(-1, 32)


# Codes


def test_every_e4m3_code_at_every_scale() -> None:
    # From the scale of the floor of amax to the last at which f32 holds all values.
    scales = np.arange(127 - 22, 247)
    codes = np.array([c for c in range(256) if c & 127 != 127], np.uint8)
    block = in_blocks(reference.e4m3(codes).astype(np.float32), 448, 32)
    x = block * np.ldexp(np.float32(1), scales - 127)[:, None, None]
    rows = packed_bytes(WINDOW, x)
    np.testing.assert_array_equal(rows[..., 32], scales[:, None].repeat(len(block), axis=1))
    of_codes = rows[..., 1:32].reshape(len(scales), -1)[:, : len(codes)]
    np.testing.assert_array_equal(of_codes, np.tile(codes, (len(scales), 1)))
    np.testing.assert_array_equal(unpacked(WINDOW, rows, 32), x)


# The codes of E2M1 in a row; the sign of zero is not kept.
NIBBLES = np.resize([0, 1, 2, 3, 4, 5, 6, 7, 0, 9, 10, 11, 12, 13, 14, 15], 32)


def test_every_e2m1_code_at_every_e8m0_scale() -> None:
    # From the scale of the floor of amax to the last at which f32 holds all values.
    scales = np.arange(1, 253)
    x = np.resize(reference.E2M1, 32) * np.ldexp(1.0, scales - 127)[:, None]
    rows = packed_bytes(INDEX, x.astype(np.float32))
    np.testing.assert_array_equal(rows[:, 16], scales)
    low_first = NIBBLES[0::2] | NIBBLES[1::2] << 4
    np.testing.assert_array_equal(rows[:, :16], np.tile(low_first, (len(scales), 1)))
    np.testing.assert_array_equal(unpacked(INDEX, rows, 32), x)


def test_every_e2m1_code_at_every_e4m3_scale() -> None:
    scales = np.arange(1, 127)
    x = np.resize(reference.E2M1, 32) * reference.E4M3[scales][:, None]
    rows = packed_bytes(COMPRESSED, x.astype(np.float32))
    np.testing.assert_array_equal(rows[:, 16:18], np.stack([scales, scales], axis=1))
    low_first = NIBBLES[0::2] | NIBBLES[1::2] << 4
    np.testing.assert_array_equal(rows[:, :16], np.tile(low_first, (len(scales), 1)))
    np.testing.assert_array_equal(unpacked(COMPRESSED, rows, 32), x)


@kinds
def test_negative_codes_of_zero_are_zero(kind: str) -> None:
    fmt = FORMATS[kind]
    tiny = np.full((1, 32), -1e-30, np.float32)
    tiny[0, 0] = 1
    assert np.array_equal(round_trip(fmt, tiny)[0, 1:], np.zeros(31))
    assert np.array_equal(round_trip(fmt, np.full((1, 32), -0.0, np.float32)), np.zeros((1, 32)))


# Roundings


@kinds
@pytest.mark.parametrize("exponent", [-5, 0, 1, 4])
def test_every_midpoint_and_its_neighbours(kind: str, exponent: int) -> None:
    magnitudes = MAGNITUDES[kind]
    midpoints = with_neighbours((magnitudes[:-1] + magnitudes[1:]) / 2)
    signed = np.concatenate([midpoints, -midpoints, [-0.0]]).astype(np.float32)
    x = in_blocks(signed, magnitudes[-1], FORMATS[kind].group)
    assert_exact(kind, x * np.float32(2.0) ** exponent)


def test_every_e2m1_midpoint_at_every_normal_e4m3_scale() -> None:
    magnitudes = reference.E2M1_MAGNITUDES
    midpoints = (magnitudes[:-1] + magnitudes[1:]) / 2
    blocks: list[Floats] = []
    for scale in reference.E4M3_MAGNITUDES[8:]:
        values = with_neighbours(scale * midpoints)
        blocks.append(in_blocks(np.concatenate([values, -values]), 6 * scale, 16))
    assert_exact("compressed", np.concatenate(blocks))


def blocks_with(amax: Floats) -> Floats:
    """Rows of one 32-block each, or two 16-blocks, whose largest magnitudes are `amax`."""
    shares = np.random.default_rng(0).uniform(-1, 1, (len(amax), 32)).astype(np.float32)
    x = shares * amax[:, None]
    x[:, 5], x[:, 20] = amax, -amax
    return x


@pytest.mark.parametrize(("kind", "offset"), [("window", 32), ("index", 16)])
def test_the_scale_steps_just_above_its_powers_of_two(kind: str, offset: int) -> None:
    exponents = np.arange(-13, 110)
    amax = with_neighbours(MAGNITUDES[kind][-1] * 2.0**exponents)
    scales = packed_bytes(FORMATS[kind], blocks_with(amax))[:, offset]
    below, exact, above = scales.reshape(3, -1)
    np.testing.assert_array_equal(exact, exponents + 127)
    np.testing.assert_array_equal(below, exact)
    np.testing.assert_array_equal(above, exact + 1)
    assert_exact(kind, blocks_with(amax))


def test_the_e4m3_scale_at_its_own_midpoints() -> None:
    magnitudes = reference.E4M3_MAGNITUDES[1:]
    midpoints = 6 * (magnitudes[:-1] + magnitudes[1:]) / 2
    below, at_or_above = np.split(with_neighbours(midpoints), [len(midpoints)])
    assert_exact("compressed", blocks_with(at_or_above))
    # amax is multiplied by the f32 nearest to 1/6, as the ports do it: just below a midpoint the
    # product can be the midpoint itself, which then goes to the even code.
    product = (below * np.float32(1 / 6)).astype(np.float64)
    assert np.any(product == midpoints / 6)
    distance = np.abs(magnitudes - product[:, None])
    is_nearest = distance == distance.min(axis=1, keepdims=True)
    is_even = np.arange(1, 127) % 2 == 0
    scale = np.argmax(is_nearest * (1 + is_even), axis=1) + 1
    packed = packed_bytes(COMPRESSED, blocks_with(below))[:, 16:18]
    np.testing.assert_array_equal(packed, np.stack([scale, scale], axis=1))


FLOORS = [
    ("window", 1e-4, 127 - 22),
    ("index", 6 * 2.0**-126, 1),
    ("compressed", 6 * 2.0**-9, 1),
]


@pytest.mark.parametrize(("kind", "floor", "scale"), FLOORS)
def test_a_small_block_has_the_scale_of_the_floor(kind: str, floor: float, scale: int) -> None:
    amax = np.array([0, floor / 1000, floor / 2, np.float32(floor)], np.float32)
    x = blocks_with(amax)
    offset = 32 if kind == "window" else 16
    assert packed_bytes(FORMATS[kind], x)[:, offset].tolist() == [scale] * 4
    assert_exact(kind, x)


def test_a_block_beyond_the_largest_e4m3_scale_is_clipped() -> None:
    x = blocks_with(np.array([6 * 448, 6 * 480, 1e6], np.float32))
    assert np.abs(round_trip(COMPRESSED, x)).max(axis=1).tolist() == [6 * 448] * 3
    assert_exact("compressed", x)
    # Rounded down, a scale can leave its own largest value out of reach.
    assert_exact("compressed", blocks_with(np.array([6 * 1.0624], np.float32)))


def is_decided_by_the_product(blocks: Floats) -> NDArray[np.bool_]:
    """Whether the f32 of amax / 6 lies on a midpoint of e4m3 that amax / 6 itself does not."""
    amax = np.abs(blocks).max(axis=-1)
    magnitudes = reference.E4M3_MAGNITUDES
    midpoints = (magnitudes[:-1] + magnitudes[1:]) / 2
    product = amax * np.float32(1 / 6)
    return np.isin(product, midpoints) & (product.astype(np.float64) * 6 != amax)


finite = st.floats(-(2.0**100), 2.0**100, width=32)


@kinds
@settings(max_examples=150, deadline=None)
@given(st.lists(finite, min_size=32, max_size=32), st.integers(-20, 20))
def test_any_block_agrees_with_the_reference(kind: str, values: list[float], shift: int) -> None:
    x = np.array(values, np.float32).reshape(1, 32) * np.float32(2.0) ** shift
    if kind == "compressed":
        assume(not is_decided_by_the_product(x.reshape(2, 16)).any())
    assert_exact(kind, x)


@kinds
def test_random_rows_agree_with_the_reference(kind: str) -> None:
    rng = np.random.default_rng(1)
    x = rng.standard_normal((500, 160)) * 2.0 ** rng.integers(-12, 12, (500, 1))
    x = x.astype(np.float32)
    assert kind != "compressed" or not is_decided_by_the_product(x.reshape(-1, 16)).any()
    assert_exact(kind, x)


# Rows


@kinds
@settings(max_examples=60, deadline=None)
@given(st.lists(finite, min_size=64, max_size=64))
def test_packing_rounded_values_loses_nothing(kind: str, values: list[float]) -> None:
    fmt, x = FORMATS[kind], np.array(values, np.float32).reshape(1, 64)
    if kind == "compressed":
        # Here alone the second rounding has a smaller scale: 4 at 2^-8 would be 8 at 2^-9.
        amax = np.abs(x.reshape(-1, 16)).max(axis=1)
        x.reshape(-1, 16)[(amax >= 9 * 2.0**-9) & (amax <= 10 * 2.0**-9)] = 0
    once = round_trip(fmt, x)
    np.testing.assert_array_equal(round_trip(fmt, once), once)


@kinds
@pytest.mark.parametrize("width", [32, 64, 96, 160, 512])
def test_a_row_is_codes_then_scales_then_zeros(kind: str, width: int) -> None:
    fmt = FORMATS[kind]
    x = np.random.default_rng(width).standard_normal((3, 2, width)).astype(np.float32)
    rows = packed_bytes(fmt, x)
    code_bytes, scale_bytes = width * fmt.bits // 8, width // fmt.group
    assert rows.shape == (3, 2, 4 * fmt.words(width))
    assert 0 <= rows.shape[-1] - code_bytes - scale_bytes < 4
    codes, scales, padding = np.split(rows, [code_bytes, code_bytes + scale_bytes], axis=-1)
    assert not padding.any()
    decode, scale_of = (reference.e4m3 if fmt.bits == 8 else reference.e2m1), reference.e8m0
    if kind == "compressed":
        scale_of = reference.e4m3
    values = decode(codes) * scale_of(scales).repeat(fmt.group, axis=-1)
    np.testing.assert_array_equal(values, ROUNDINGS[kind](x.astype(np.float64)).values)
    np.testing.assert_array_equal(unpacked(fmt, rows, width), values)


GOLDEN = {
    # 448 and -0.5 at scale 1; then 3.5 = 448 / 128 at scale 2^-7, and 1 / 64 of that.
    "window": (
        {0: 448, 1: -0.5, 31: 1, 32: 3.5, 33: 3.5 / 64},
        [(0, "7eb0"), (31, "38"), (32, "7e4e"), (64, "7f780000")],
    ),
    # Two codes a byte: 6 with -0.5, and 1.5 with 4; then 12 with -3 at scale 2.
    "index": (
        {0: 6, 1: -0.5, 2: 1.5, 3: 4, 32: 12, 33: -3},
        [(0, "9763"), (16, "b7"), (32, "7f800000")],
    ),
    # The scales 1, 1.125, the smallest and the largest.
    "compressed": (
        {0: 6, 1: -0.5, 16: 6.75, 17: -1.125, 32: 2.0**-9, 48: 6 * 448, 49: -448},
        [(0, "97"), (8, "a7"), (16, "02"), (24, "a7"), (32, "3839017e")],
    ),
}


@kinds
def test_golden_bytes(kind: str) -> None:
    values, parts = GOLDEN[kind]
    x = np.zeros((1, 64), np.float32)
    for at, value in values.items():
        x[0, at] = value
    expected = bytearray(4 * FORMATS[kind].words(64))
    for at, text in parts:
        expected[at : at + len(text) // 2] = bytes.fromhex(text)
    assert packed_bytes(FORMATS[kind], x).tobytes().hex() == expected.hex()


@kinds
@pytest.mark.parametrize(("M", "S"), [(1, 1), (3, 7), (33, 65)])
def test_product_is_the_product_of_the_unpacked_rows(kind: str, M: int, S: int) -> None:
    fmt, width = FORMATS[kind], 96
    rng = np.random.default_rng(M)
    x = rng.integers(-8, 9, (M, width)).astype(np.float32)
    codes, scales = fmt.encode(mx.array(rng.integers(-6, 7, (S, width)).astype(np.float32)))
    # Small integers with few bits: every sum is exact in any order.
    expected = x.astype(np.float64) @ np.array(fmt.decode(codes, scales)).astype(np.float64).T
    found = np.array(fmt.product(mx.array(x), codes, scales), np.float32)
    np.testing.assert_array_equal(found, expected)


def test_row_sizes_of_the_release() -> None:
    state = SessionState(released)
    assert {window.rows.shape[1] * 4 for window in state.windows} == {528}
    assert {rows.buffer.shape[1] * 4 for rows in state.compressed.values()} == {288}
    for keys in state.index_keys.values():
        assert keys.codes.buffer.shape[1] * 4 + keys.scales.buffer.shape[1] == 68
    assert sum(window.rows.nbytes for window in state.windows) == 2_703_360
    per_token = sum(
        (288 + 68) / released.compress_ratios[source] for source in released.kv_source_layer_ids
    )
    assert per_token == 890
