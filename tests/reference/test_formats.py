"""Tests of the reference's formats and roundings against independent definitions."""

from fractions import Fraction

import numpy as np
import pytest

from tests.reference import formats


def test_code_values_are_the_ascending_floats_of_each_format() -> None:
    e4m3 = sorted({m * 2.0**e for m in range(16) for e in range(-9, 6)} - {15 * 2.0**5})
    e2m1 = sorted({m * 2.0**e for m in range(4) for e in range(-1, 2)})
    codes = np.arange(256, dtype=np.uint8)
    nan = [float("nan")]
    np.testing.assert_array_equal(formats.e4m3(codes), e4m3 + nan + [-v for v in e4m3] + nan)
    both = np.array(e2m1 + [-v for v in e2m1])
    expected = np.stack([both[codes % 16], both[codes // 16]], axis=-1)
    np.testing.assert_array_equal(formats.e2m1(codes[:, None]), expected)
    powers = [float(Fraction(2) ** (c - 127)) for c in range(255)] + nan
    np.testing.assert_array_equal(formats.e8m0(codes), powers)


def test_bf16_rounds_to_nearest_even() -> None:
    values = np.array([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -3.0, 0.0])
    rounded = formats.bf16_round(values)
    assert rounded.tolist() == [1.0, 1 + 2**-6, 1 + 2**-7, -3.0, 0.0]
    bits = (rounded.view(np.uint32) >> 16).astype(np.uint16)
    np.testing.assert_array_equal(formats.bf16_decode(bits), rounded)


def nearest(x: Fraction, scale: Fraction, magnitudes: list[float]) -> Fraction:
    """The rounded magnitude by exhaustive search, ties to the even code."""
    grid = [scale * Fraction(m) for m in magnitudes]
    code = min(range(len(grid)), key=lambda code: (abs(abs(x) - grid[code]), code % 2))
    return grid[code] if x >= 0 else -grid[code]


def power_of_two_scale(amax: Fraction, largest: float) -> Fraction:
    e = -140
    while Fraction(2) ** e * Fraction(largest) < amax:
        e += 1
    return Fraction(2) ** e


@pytest.mark.parametrize("kind", ["window", "index", "compressed"])
def test_cache_roundings_agree_with_rational_arithmetic(kind: str) -> None:
    size = 16 if kind == "compressed" else 32
    magnitudes = (formats.E4M3[:127] if kind == "window" else formats.E2M1[:8]).tolist()
    rng = np.random.default_rng(3)
    blocks = rng.standard_normal((12, size)) * 2.0 ** rng.integers(-12, 6, (12, 1))
    blocks[0] = 0
    blocks[1, 1:] = 0
    # At, just below and just above a change of the scale; then values that lie on midpoints.
    for row, amax in enumerate((magnitudes[-1], *np.nextafter(magnitudes[-1], (0, 1e9)))):
        blocks[2 + row] = rng.standard_normal(size)
        blocks[2 + row, 3] = -amax
    midpoints = (np.array(magnitudes[:-1]) + magnitudes[1:]) / 2
    blocks[5] = rng.choice([-1, 1], size) * rng.choice(midpoints, size)
    blocks[5, 0] = magnitudes[-1]
    blocks[6] *= 1e-6
    # Amax that lies on a midpoint of the e4m3 scales.
    blocks[7] = np.clip(blocks[7], -1, 1)
    blocks[7, 0] = 6 * (1 + 1 / 16)

    rounding = getattr(formats, f"round_{kind}")
    values = rounding(blocks.reshape(3, 4 * size)).values.reshape(blocks.shape)
    for block, result in zip(blocks, values, strict=True):
        exact = [Fraction(v) for v in block.tolist()]
        amax = max(map(abs, exact))
        if kind == "window":
            scale = power_of_two_scale(max(amax, Fraction(1e-4)), 448)
        elif kind == "index":
            scale = power_of_two_scale(max(amax, 6 * Fraction(2) ** -126), 6)
        else:
            bounded = min(max(amax / 6, Fraction(2) ** -9), Fraction(448))
            scale = nearest(bounded, Fraction(1), formats.E4M3[:127].tolist())
        expected = [nearest(x, scale, magnitudes) for x in exact]
        assert [Fraction(v) for v in result.tolist()] == expected


def test_rounding_margin_is_the_distance_that_changes_a_code() -> None:
    row = np.full((1, 32), 6.0)
    row[0, 5] = 3.5 + 6 * 1e-3
    row[0, 0] = 5.9
    values, margin = formats.round_index(row)
    # 6 is the limit of the scale 1: the scale itself is as close as can be.
    assert margin == 0
    row[0, row[0] == 6] = 5.9
    values, margin = formats.round_index(row)
    assert margin == pytest.approx(6e-3 / 5.9)
    row[0, 5] -= 1.001 * margin * 5.9
    assert values[0, 5] == 4 and formats.round_index(row).values[0, 5] == 3
