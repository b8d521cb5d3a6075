"""Tests of the reference itself: Engram, RoPE, structural properties of the forward pass."""

import json
import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.reference import engram, formats
from tests.reference.forward import Reference, Trace, sinkhorn
from tests.reference.random_tensors import DATA, TINY_CONFIG, random_tensors
from tests.reference.rope import rope, rope_frequencies, yarn_bounds
from tests.reference.selection import top_k

RELEASED_CONFIG: dict[str, Any] = json.loads((DATA / "released_config.json").read_text())
TINY = TINY_CONFIG["text_config"]
IMAGE_ID: int = TINY_CONFIG["image_token_id"]
TOKEN_MAP = np.arange(256) % 64
T = 61


def tiny(**changes: Any) -> dict[str, Any]:
    return {**TINY_CONFIG, "text_config": {**TINY, **changes}}


def text_ids(seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, IMAGE_ID, T).tolist()


def run(ids: list[int], config: dict[str, Any] = TINY_CONFIG, **options: Any) -> Trace:
    return Reference(config, random_tensors(config, seed=0), TOKEN_MAP, **options).forward(ids)


@pytest.fixture(scope="module")
def trace() -> Trace:
    return run(text_ids())


# Engram


def released_primes() -> dict[int, NDArray[np.int64]]:
    return engram.primes([1, 14], base=16_000_000, max_ngram=4, heads=8)


def test_engram_primes_of_the_release() -> None:
    primes = released_primes()
    assert primes[1][0, 0] == 16000057 and primes[1][2, 7] == 16000463
    assert primes[14][0, 0] == 16000477 and primes[14][2, 7] == 16000889
    text = RELEASED_CONFIG["text_config"]
    assert [int(p.sum()) for p in primes.values()] == text["engram_num_embeddings"]
    tiny_primes = engram.primes([1, 4], TINY["engram_vocab_size"], max_ngram=4, heads=2)
    assert [int(p.sum()) for p in tiny_primes.values()] == TINY["engram_num_embeddings"]


def test_engram_multipliers_of_the_release() -> None:
    assert engram.multipliers(1, 99092, 4).tolist() == [
        76632096046245,
        4839876093313,
        35959672319349,
        73987337458391,
    ]
    assert engram.multipliers(14, 99092, 4).tolist() == [
        67716810739261,
        51510806800915,
        30921347202721,
        82619226485591,
    ]


@pytest.mark.parametrize(
    ("layer", "ngram", "expected"),
    [
        (1, (10, 2, 2, 2), (9400104, 24924096, 128026094, 382122658)),
        (1, (40, 30, 20, 10), (1326936, 22120929, 142088989, 378628807)),
        (14, (10, 2, 2, 2), (11315085, 19412660, 135395884, 379075217)),
        (14, (40, 30, 20, 10), (5403109, 26519290, 136663117, 378588994)),
    ],
)
def test_engram_hash_vectors(layer: int, ngram: tuple[int, ...], expected: tuple[int, ...]) -> None:
    rows = engram.hash_rows(
        np.array([ngram]), engram.multipliers(layer, 99092, 4), released_primes()[layer]
    )
    assert rows.shape == (1, 24)
    assert tuple(rows[0, [0, 1, 8, 23]].tolist()) == expected


def test_ngrams_stop_at_the_start_and_at_image_tokens() -> None:
    ids = np.array([10, 11, 12, 13, 14, 15])
    image = np.array([False, False, True, False, False, False])
    ngrams = engram.canonical_ngrams(ids, image, np.arange(20) + 100, pad_id=2, max_ngram=3)
    assert ngrams.tolist() == [
        [110, 102, 102],
        [111, 110, 102],
        [102, 102, 102],
        [113, 102, 102],
        [114, 113, 102],
        [115, 114, 113],
    ]


# Rotary embedding and mHC


def test_yarn_bounds_of_the_release() -> None:
    text = RELEASED_CONFIG["text_config"]
    scaling, theta = text["rope_scaling"], text["compress_rope_theta"]
    assert yarn_bounds(64, theta, scaling) == (15, 25)
    plain, scaled = rope_frequencies(64, theta, None), rope_frequencies(64, theta, scaling)
    np.testing.assert_array_equal(scaled[:16], plain[:16])
    np.testing.assert_allclose(scaled[25:], plain[25:] / 16, rtol=1e-15)
    assert np.all((scaled[16:25] < plain[16:25]) & (scaled[16:25] > plain[16:25] / 16))


def test_rope_turns_the_last_channels_by_the_relative_position() -> None:
    rng = np.random.default_rng(0)
    frequencies = rope_frequencies(16, 10000, None)
    q, k = rng.standard_normal((2, 1, 24))

    def product(p: int, s: int) -> float:
        return float(
            (rope(q, np.array([p]), frequencies) * rope(k, np.array([s]), frequencies)).sum()
        )

    assert product(9, 4) == pytest.approx(product(25, 20), abs=1e-5)
    assert abs(product(9, 4) - product(9, 5)) > 1e-2
    positions = np.array([77])
    turned = rope(q, positions, frequencies)
    np.testing.assert_array_equal(turned[:, :8], q[:, :8])
    np.testing.assert_allclose(rope(turned, positions, frequencies, inverse=True), q, atol=1e-12)


def test_sinkhorn_makes_rows_and_columns_sum_to_one() -> None:
    c = sinkhorn(np.random.default_rng(0).standard_normal((5, 4, 4)), iters=20, eps=1e-6)
    np.testing.assert_allclose(c.sum(axis=-1), 1, atol=1e-4)
    np.testing.assert_allclose(c.sum(axis=-2), 1, atol=1e-5)


# Selection


def test_top_k_gives_ties_to_the_lowest_index_and_refuses_minus_infinity() -> None:
    inf = math.inf
    scores = np.array([[1.0, 2, 1, 3, 1], [-inf, 5, -inf, -inf, -inf], [0, 0, 0, 0, -1]])
    chosen, margin = top_k(scores, 3)
    expected = [[1, 1, 0, 1, 0], [0, 1, 0, 0, 0], [1, 1, 1, 0, 0]]
    np.testing.assert_array_equal(chosen, np.array(expected, np.bool_))
    assert margin == inf
    assert top_k(np.array([[4.0, 1, 3]]), 2)[1] == 0.5


# Forward pass


def assert_prefix(short: Trace, long: Trace) -> None:
    n = len(short.logits)
    np.testing.assert_allclose(short.logits, long.logits[:n], rtol=0, atol=1e-9)
    for layer, experts in short.experts.items():
        np.testing.assert_array_equal(experts, long.experts[layer][:n])
    for layer, chosen in short.chosen.items():
        np.testing.assert_array_equal(chosen, long.chosen[layer][:n, : chosen.shape[1]])
        assert not long.chosen[layer][:n, chosen.shape[1] :].any()


@pytest.mark.parametrize("n", [1, 2, 7, 24, 45])
def test_the_logits_of_a_prefix_are_a_prefix_of_the_logits(trace: Trace, n: int) -> None:
    assert_prefix(run(text_ids()[:n]), trace)


def test_the_window_is_as_long_as_configured() -> None:
    config = tiny(
        num_hidden_layers=1,
        compress_ratios=[0, 0, 0],
        engram_layer_ids=[],
        engram_num_embeddings=[],
        kv_source_layer_ids=[],
        index_source_layer_ids=[],
        candidate_source_layer_id=None,
    )
    ids = text_ids()
    before = run(ids, config).logits
    at = 20
    ids[at] = (ids[at] + 1) % IMAGE_ID
    changed = np.flatnonzero(np.abs(run(ids, config).logits - before).max(axis=-1) > 1e-9)
    assert changed.tolist() == list(range(at, at + TINY["sliding_window"]))


def test_top_k_prunes_the_visible_rows(trace: Trace) -> None:
    for layer in (1, 3, 4):
        visible = (np.arange(T) + 1) // TINY["compress_ratios"][layer]
        rows, chosen = trace.rows[layer], trace.chosen[layer]
        np.testing.assert_array_equal(chosen.sum(axis=-1), np.minimum(visible, TINY["index_topk"]))
        assert np.all(rows < visible[:, None])
        for t in range(T):
            found = np.flatnonzero(chosen[t])
            assert rows[t].tolist() == found.tolist() + [-1] * (rows.shape[1] - len(found))
        pruned = visible > TINY["index_topk"]
        newest = visible[pruned] - 1
        # The choice follows the scores: it is neither the newest nor the oldest rows.
        assert 0 < chosen[pruned][np.arange(len(newest)), newest].mean() < 1
        assert np.unique(rows[pruned], axis=0).shape[0] > pruned.sum() / 2


def test_candidates_restrict_later_layers_and_not_their_source(trace: Trace) -> None:
    size, kept = TINY["candidate_block_size"], TINY["candidate_topk_blocks"]
    candidates = trace.candidates[4]
    visible = np.tri(T, dtype=np.bool_)
    assert not np.any(candidates & ~visible)
    for t in range(T):
        blocks = set((np.flatnonzero(candidates[t]) // size).tolist())
        assert len(blocks) == min(kept, t // size + 1)
        assert t // size in blocks
        expected = [j for b in sorted(blocks) for j in range(b * size, (b + 1) * size) if j <= t]
        assert np.flatnonzero(candidates[t]).tolist() == expected
    assert not np.any(trace.chosen[6] & ~candidates)
    assert np.any(trace.chosen[4] & ~candidates)

    unrestricted = run(text_ids(), tiny(candidate_topk_blocks=T))
    np.testing.assert_array_equal(unrestricted.rows[4], trace.rows[4])
    assert np.any(unrestricted.rows[6] != trace.rows[6])


def test_rows_outside_too_few_candidates_are_never_attended() -> None:
    trace = run(text_ids(), tiny(candidate_topk_blocks=1))
    size = TINY["candidate_block_size"]
    assert np.all(trace.chosen[6].sum(axis=-1) == np.arange(T) % size + 1)
    assert not np.any(trace.chosen[6] & ~trace.candidates[4])
    assert np.all(trace.chosen[4].sum(axis=-1) == np.minimum(np.arange(T) + 1, TINY["index_topk"]))


def test_cached_values_are_rounded_unless_told_otherwise(trace: Trace) -> None:
    def on_grid(stored: dict[int, formats.Float], kind: str) -> list[bool]:
        rounding = getattr(formats, f"round_{kind}")
        return [bool(np.array_equal(rounding(x).values, x)) for x in stored.values()]

    raw = run(text_ids(), round_cache=False)
    for stored, unrounded, kind in (
        (trace.windows, raw.windows, "window"),
        (trace.compressed, raw.compressed, "compressed"),
        (trace.index_keys, raw.index_keys, "index"),
    ):
        assert all(on_grid(stored, kind))
        assert not any(on_grid(unrounded, kind))
    assert set(trace.margins) - set(raw.margins) == {
        "window",
        "compressed",
        "index_keys",
        "index_queries",
    }
    assert 0 < min(trace.margins.values()) < max(trace.margins.values()) < 0.1


def test_engram_acts_from_its_first_layer_on(trace: Trace) -> None:
    off = Reference(TINY_CONFIG, random_tensors(TINY_CONFIG, 0, engram_rows=False), None)
    without = off.forward(text_ids())
    np.testing.assert_array_equal(without.streams[0], trace.streams[0])
    assert np.abs(without.streams[1] - trace.streams[1]).max() > 0.1
    assert np.abs(without.logits - trace.logits).max() > 0.1


def test_image_tokens_route_with_their_own_bias_and_skip_engram() -> None:
    config, ids = tiny(), text_ids()
    at = [5, 6, 7]
    for p in at:
        ids[p] = IMAGE_ID
    tensors = random_tensors(config, 0)
    for layer in range(TINY["num_hidden_layers"]):
        tensors[f"layers.{layer}.ffn.gate.bias_vl"] = np.array([9] * 2 + [0] * 6, np.float32)
    seen = Reference(config, tensors, TOKEN_MAP).forward(ids)
    assert np.all(seen.experts[0][at] == [0, 1])
    as_text = Reference(config, tensors, TOKEN_MAP).forward(ids, image_positions=[])
    assert np.any(as_text.experts[0][at] != [0, 1])
    without = Reference(config, tensors, None).forward(ids)
    np.testing.assert_array_equal(seen.streams[1][at], without.streams[1][at])
    # Positions count, not ids: the same routing from a text id at the same places.
    other = Reference(config, tensors, TOKEN_MAP).forward(text_ids(), image_positions=at)
    assert np.all(other.experts[0][at] == [0, 1])


@pytest.mark.parametrize("layers", [8, 16])
def test_random_checkpoints_keep_activations_near_one(layers: int) -> None:
    longer = tiny(
        num_hidden_layers=layers,
        compress_ratios=[0] + [2] * (layers // 2 - 1) + [1] * (layers // 2) + [0, 0],
        kv_source_layer_ids=[1, layers // 2],
        index_source_layer_ids=[1, layers // 2, layers // 2 + 2],
        candidate_source_layer_id=layers // 2,
    )
    trace = run(text_ids(), longer)
    assert 2 < trace.logits.std() < 4
    for streams in trace.streams.values():
        assert 0.5 < np.sqrt((streams**2).mean()) < 10
    for experts in trace.experts.values():
        share = np.bincount(experts.reshape(-1), minlength=8) / experts.size
        assert share.max() < 0.45 and np.count_nonzero(share) >= 6
