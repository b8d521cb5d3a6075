"""Engram's host side: which table rows a token needs, and reading them ahead.

Row ids depend on token ids alone, so a whole chunk's rows are read while the layers before them
compute. Owns the n-gram hash and the read-ahead over all Engram layers; the canonical token map
is token_map's part, one table's file and hot rows are engram_table's, the arithmetic with the
rows is the model's. Section numbers refer to docs/model.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from math import isqrt
from types import TracebackType
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from mlx_engine.config import EngramConfig
from mlx_engine.devices import ONE, Devices
from mlx_engine.engram_table import EngramStats, EngramTable, TableLocation
from mlx_engine.errors import BadRequest, ModelFileError
from mlx_engine.token_ids import TokenIds

# Codes [T, columns, head_dim] and scales [T, columns, head_dim/32].
Rows: TypeAlias = tuple[NDArray[np.uint8], NDArray[np.uint8]]

# Sets the random seed of a layer's multipliers (section 4.2).
_SEED_STEP = 10007

# Prefetches that run side by side; with one, a decode step would wait for a whole prompt chunk.
_PREFETCHES = 4


def primes_from(start: int, count: int) -> list[int]:
    """Return the first `count` primes that are not below `start`."""
    primes: list[int] = []
    low, span = max(start, 2), 32 * count
    while len(primes) < count:
        is_prime = np.ones(span, np.bool_)  # of low .. low + span - 1
        for divisor in _primes_to(isqrt(low + span)):
            first = max(divisor * divisor, -(-low // divisor) * divisor)
            is_prime[first - low :: divisor] = False
        primes += (np.flatnonzero(is_prime) + low).tolist()
        low += span
    return primes[:count]


def _primes_to(limit: int) -> list[int]:
    is_prime = np.ones(limit + 1, np.bool_)
    is_prime[:2] = False
    for divisor in range(2, isqrt(limit) + 1):
        if is_prime[divisor]:
            is_prime[divisor * divisor :: divisor] = False
    return np.flatnonzero(is_prime).tolist()


def _multipliers(layer: int, count: int, compressed_vocab_size: int) -> NDArray[np.int64]:
    """Return a layer's odd multipliers, small enough that their products stay within int63.

    Integers throughout: as doubles they would lose bits when the vocabulary is small.
    """
    bound = max(1, (2**63 - 1) // compressed_vocab_size // 2)
    draws = np.random.default_rng(_SEED_STEP * layer)
    return draws.integers(0, bound, size=count, dtype=np.int64) * 2 + 1


class EngramHash:
    """The table rows of every token, for all Engram layers (sections 4.2 and 4.3).

    `token_map` is int32 [token ids]. Raises ModelFileError when a layer's primes do not sum to its
    `num_embeddings`, or the map lacks the pad or image id. Attributes: `primes` int64
    [L, max_ngram_size - 1, n_heads], `offsets` the same shape, `multipliers` int64
    [L, max_ngram_size].
    """

    def __init__(
        self, token_map: NDArray[np.int32], config: EngramConfig, image_token_id: int
    ) -> None:
        if max(config.pad_token_id, image_token_id) >= token_map.size:
            raise ModelFileError(
                f"the tokenizer has {token_map.size} ids, but the configuration names the pad id "
                f"{config.pad_token_id} and the image id {image_token_id}: "
                "fetch both from the same checkpoint"
            )
        assert int(token_map.max()) < config.compressed_vocab_size, "products could pass int63"
        self.layer_ids = config.layer_ids
        self.num_embeddings = config.num_embeddings
        self.columns = config.columns
        self.history_tokens = config.max_ngram_size - 1
        self._n_heads = config.n_heads
        self._image_token_id = image_token_id
        self._canonical = token_map.astype(np.int64)
        self._pad = int(self._canonical[config.pad_token_id])

        # The vendor's search restarts for every layer and n-gram size but skips used primes,
        # so all the primes are one ascending sequence.
        L = len(self.layer_ids)
        primes = np.array(primes_from(config.vocab_size, L * self.columns), np.int64)
        by_layer = primes.reshape(L, self.columns)
        sums = tuple(by_layer.sum(1).tolist())
        if sums != self.num_embeddings:
            raise ModelFileError(
                f"engram_num_embeddings is {list(self.num_embeddings)}, but the primes from "
                f"engram_vocab_size {config.vocab_size} sum to {list(sums)}: "
                "config.json is damaged or of another model"
            )
        shape = (L, self.history_tokens, config.n_heads)
        self.primes = primes.reshape(shape)
        self.offsets = (by_layer.cumsum(1) - by_layer).reshape(shape)
        self.multipliers = np.stack(
            [
                _multipliers(layer, config.max_ngram_size, config.compressed_vocab_size)
                for layer in config.layer_ids
            ]
        )

    def rows(self, token_ids: NDArray[np.int64], history: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the rows of new tokens: int64 [L, T, columns], columns by n-gram size, then head.

        `token_ids` [T] follow `history`, the raw ids before them; its last `history_tokens`
        count, fewer mean that the sequence starts there. Raises BadRequest for an id that the
        token map does not have.
        """
        T, n = token_ids.size, self.history_tokens
        past = history[-n:]
        # Before its start a sequence reads as an image does: it blocks this and older shifts.
        start = np.full(n - past.size, self._image_token_id, np.int64)
        ids = np.concatenate([start, past, token_ids])
        if ids.size and (ids.min() < 0 or ids.max() >= self._canonical.size):
            raise BadRequest(
                f"token ids must be 0 to {self._canonical.size - 1}, got {ids.min()} to {ids.max()}"
            )
        is_image = ids == self._image_token_id
        canonical = np.where(is_image, self._pad, self._canonical[ids])

        rows = np.empty((len(self.layer_ids), T, self.columns), np.int64)
        blocked = is_image[n:].copy()
        mixed = canonical[n:] * self.multipliers[:, :1]  # [L, T]
        for shift in range(1, n + 1):
            then = slice(n - shift, n - shift + T)
            blocked |= is_image[then]
            mixed ^= (
                np.where(blocked, self._pad, canonical[then])
                * self.multipliers[:, shift : shift + 1]
            )
            heads = slice((shift - 1) * self._n_heads, shift * self._n_heads)
            primes, offsets = self.primes[:, None, shift - 1], self.offsets[:, None, shift - 1]
            rows[:, :, heads] = mixed[:, :, None] % primes + offsets
        return rows


class EngramRows:
    """The rows of one chunk, being read. Drop it when the chunk is done: it holds the rows.

    As released they take 24 * 264 bytes a token and layer, 13 MB for 1,024 tokens.
    """

    def __init__(self, reads: dict[int, Future[Rows]]) -> None:
        self._reads = reads

    def result(self, layer: int) -> Rows:
        """Wait for a layer's rows: codes [T, columns, head_dim], scales [T, columns, head_dim/32].

        The columns are this device's. Raises ModelFileError when the table could not be read.
        """
        return self._reads[layer].result()


class EngramReader:
    """The Engram tables of all layers and their read-ahead.

    `locations` are in the order of the hash's layers, `cache_bytes` bounds the hot rows of all
    tables together, `n_readers` is how many reads are in flight at once: an SSD answers one no
    sooner than many. One of several devices reads its share of the columns alone. Raises
    ModelFileError when a table is not the configuration's.
    """

    def __init__(
        self,
        engram_hash: EngramHash,
        locations: Sequence[TableLocation],
        *,
        cache_bytes: int,
        n_readers: int = 32,
        devices: Devices = ONE,
    ) -> None:
        for layer, expected, location in zip(
            engram_hash.layer_ids, engram_hash.num_embeddings, locations, strict=True
        ):
            if location.n_rows != expected:
                raise ModelFileError(
                    f"layer {layer}'s Engram table in {location.path} has {location.n_rows} rows, "
                    f"the configuration says {expected}: fetch both from the same checkpoint"
                )
        self.hash = engram_hash
        self._columns = devices.share(engram_hash.columns)
        self._readers = ThreadPoolExecutor(n_readers, "engram-read")
        self._prefetches = ThreadPoolExecutor(_PREFETCHES, "engram-prefetch")
        self._tables: dict[int, EngramTable] = {}
        try:
            for layer, location in zip(engram_hash.layer_ids, locations, strict=True):
                self._tables[layer] = EngramTable(
                    location, self._readers, n_readers, cache_bytes // len(locations)
                )
        except BaseException:
            self.close()
            raise

    def prefetch(self, token_ids: NDArray[np.int64], history: NDArray[np.int64]) -> EngramRows:
        """Start to read the rows of new tokens [T] that follow `history`; return at once.

        One chunk at a time: ask for the next chunk's while this one computes, not for a prompt.
        Raises BadRequest for an id outside the vocabulary.
        """
        reads: dict[int, Future[Rows]] = {}
        before: Future[Rows] | None = None
        for layer, rows in zip(
            self.hash.layer_ids, self.hash.rows(token_ids, history), strict=True
        ):
            own = rows[:, self._columns]
            before = self._prefetches.submit(self._read, layer, own, before)
            reads[layer] = before
        return EngramRows(reads)

    def _read(
        self,
        layer: int,
        rows: NDArray[np.int64],
        before: Future[Rows] | None,
    ) -> Rows:
        # The lower layer's rows are needed first, so they get all the readers. It was submitted
        # before, so it runs already and this wait cannot deadlock.
        if before is not None:
            before.result()
        return self._tables[layer].read(rows)

    def stats(self) -> EngramStats:
        """Return the counts of all tables since the start."""
        return sum((table.stats() for table in self._tables.values()), EngramStats())

    def close(self) -> None:
        """Stop reading and close the files; what is still being read ends in an error."""
        self._prefetches.shutdown(wait=False, cancel_futures=True)
        self._readers.shutdown(cancel_futures=True)
        self._prefetches.shutdown()
        for table in self._tables.values():
            table.close()

    def __enter__(self) -> EngramReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def read_ahead(
    engram: EngramReader | None, token_ids: TokenIds, first: int, last: int
) -> EngramRows | None:
    """Start to read the Engram rows of the tokens from `first` up to `last`."""
    if engram is None or first == last:
        return None
    past = token_ids[max(first - engram.hash.history_tokens, 0) : first]
    return engram.prefetch(token_ids[first:last].astype(np.int64), past.astype(np.int64))
