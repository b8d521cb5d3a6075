"""Engram: hashed n-gram rows added to the residual streams (spec 4).

Owns the primes, multipliers, hash, row look-up and gate; the token map is given from outside.
"""

from collections.abc import Sequence
from itertools import count

import numpy as np
from numpy.typing import NDArray

from tests.reference.formats import Codes, Float, e4m3, e8m0

Ints = NDArray[np.int64]


def _is_prime(n: int) -> bool:
    return n > 1 and all(n % d for d in range(2, int(n**0.5) + 1))


def primes(layer_ids: Sequence[int], base: int, max_ngram: int, heads: int) -> dict[int, Ints]:
    """Layer -> table sizes [max_ngram - 1, heads]: ascending primes from `base`, each used once."""
    ascending = (n for n in count(base) if _is_prime(n))
    orders = max_ngram - 1
    return {
        layer: np.array([[next(ascending) for _ in range(heads)] for _ in range(orders)])
        for layer in layer_ids
    }


def multipliers(layer: int, compressed_vocab_size: int, max_ngram: int) -> Ints:
    """The layer's odd multipliers [max_ngram], one for each n-gram shift."""
    bound = max(1, (2**63 - 1) // compressed_vocab_size // 2)
    draws = np.random.default_rng(10007 * layer).integers(0, bound, size=max_ngram, dtype=np.int64)
    return draws * 2 + 1


def canonical_ngrams(
    token_ids: Ints, image: NDArray[np.bool_], token_map: Ints, pad_id: int, max_ngram: int
) -> Ints:
    """Canonical ids [T, max_ngram] of each token and the ones before it, newest first.

    From the first shift that leaves the sequence or meets an image token on, all are the pad id.
    """
    ngrams = np.full((len(token_ids), max_ngram), token_map[pad_id])
    for p in range(len(token_ids)):
        for shift in range(max_ngram):
            if p - shift < 0 or image[p - shift]:
                break
            ngrams[p, shift] = token_map[token_ids[p - shift]]
    return ngrams


def hash_rows(ngrams: Ints, layer_multipliers: Ints, layer_primes: Ints) -> Ints:
    """Table rows [T, orders * heads] of canonical n-grams [T, max_ngram], columns (n, head)."""
    sizes = layer_primes.reshape(-1)
    offsets = (np.cumsum(sizes) - sizes).reshape(layer_primes.shape)
    accumulated = ngrams[:, 0] * layer_multipliers[0]
    columns: list[Ints] = []
    for order in range(1, ngrams.shape[1]):
        accumulated = accumulated ^ (ngrams[:, order] * layer_multipliers[order])
        columns.append(accumulated[:, None] % layer_primes[order - 1] + offsets[order - 1])
    return np.concatenate(columns, axis=1)


def look_up(codes: Codes, scales: Codes, rows: Ints) -> Float:
    """Dequantised rows [T, columns] -> [T, columns * head_dim]; a scale for each 32 channels."""
    values = e4m3(codes[rows]) * e8m0(scales[rows]).repeat(32, axis=-1)
    return values.reshape(len(rows), -1)


def add_gated(streams: Float, kv: Float, q_weight: Float, k_weight: Float) -> Float:
    """Streams [T, hc, D] plus the gated value; kv [T, (hc + 1) * D] is hc keys, then the value."""
    T, hc, D = streams.shape
    keys, value = kv[:, : hc * D].reshape(T, hc, D), kv[:, None, hc * D :]
    r = 1 / np.sqrt((streams**2).mean(-1) + 1e-20) / np.sqrt((keys**2).mean(-1) + 1e-20)
    d = (streams * (q_weight * k_weight) * keys).sum(-1) * r * D**-0.5
    gate = 1 / (1 + np.exp(-np.copysign(np.sqrt(np.maximum(np.abs(d), 1e-6)), d)))
    return streams + gate[..., None] * value
