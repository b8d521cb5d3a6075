"""Engram's hash against the released numbers and a slow reference, and the read-ahead."""

import threading
from concurrent.futures import CancelledError
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from mlx_engine import engram_table
from mlx_engine.config import EngramConfig
from mlx_engine.engram import EngramHash, EngramReader, primes_from
from mlx_engine.engram_table import TableLocation
from mlx_engine.errors import BadRequest, ModelFileError

# Its token map is the identity, so token ids are canonical ids; the image id is out of the way.
RELEASED = EngramConfig(
    layer_ids=(1, 14),
    num_embeddings=(384_006_168, 384_016_682),
    vocab_size=16_000_000,
    n_heads=8,
    head_dim=256,
    max_ngram_size=4,
    compressed_vocab_size=99_092,
    pad_token_id=2,
)
RELEASED_IMAGE = 99_091
TINY = EngramConfig(
    layer_ids=(1, 4),
    num_embeddings=(630, 834),
    vocab_size=97,
    n_heads=2,
    head_dim=32,
    max_ngram_size=4,
    compressed_vocab_size=64,
    pad_token_id=2,
)
TINY_IMAGE = 255
TINY_MAP = (np.arange(256) % 64).astype(np.int32)
NOTHING = np.zeros(0, np.int64)


def released() -> EngramHash:
    return EngramHash(np.arange(99_092, dtype=np.int32), RELEASED, RELEASED_IMAGE)


def tiny() -> EngramHash:
    return EngramHash(TINY_MAP, TINY, TINY_IMAGE)


def int64(ids: list[int]) -> NDArray[np.int64]:
    return np.array(ids, np.int64)


def rows_reference(
    config: EngramConfig, token_map: list[int], ids: list[int]
) -> list[list[list[int]]]:
    """Section 4.2 and 4.3 in plain Python: rows [layer][position][column] of a whole sequence."""
    used: set[int] = set()
    rows: list[list[list[int]]] = []
    for layer in config.layer_ids:
        primes: list[list[int]] = []
        for _ in range(config.max_ngram_size - 1):
            candidate = config.vocab_size - 1
            heads: list[int] = []
            while len(heads) < config.n_heads:
                candidate += 1
                if candidate not in used and all(candidate % d for d in range(2, candidate)):
                    heads.append(candidate)
                    used.add(candidate)
            primes.append(heads)
        bound = max(1, (2**63 - 1) // config.compressed_vocab_size // 2)
        size = config.max_ngram_size
        draws = np.random.default_rng(10007 * layer).integers(0, bound, size=size, dtype=np.int64)
        multipliers = [2 * int(draw) + 1 for draw in draws]
        layer_rows: list[list[int]] = []
        for p in range(len(ids)):
            blocked = False
            canonical: list[int] = []
            for shift in range(size):
                blocked = blocked or p < shift or ids[p - shift] == TINY_IMAGE
                token = config.pad_token_id if blocked else ids[p - shift]
                canonical.append(token_map[token])
            mixed, offset = canonical[0] * multipliers[0], 0
            columns: list[int] = []
            for n in range(2, size + 1):
                product = canonical[n - 1] * multipliers[n - 1]
                assert product < 2**63
                mixed ^= product
                for prime in primes[n - 2]:
                    columns.append(mixed % prime + offset)
                    offset += prime
            layer_rows.append(columns)
        rows.append(layer_rows)
    return rows


def test_released_primes_and_multipliers():
    hashes = released()
    # fmt: off
    assert hashes.primes.tolist() == [
        [
            [16000057, 16000079, 16000081, 16000097, 16000121, 16000129, 16000133, 16000183],
            [16000189, 16000207, 16000211, 16000253, 16000277, 16000289, 16000307, 16000321],
            [16000339, 16000381, 16000393, 16000399, 16000403, 16000409, 16000447, 16000463],
        ],
        [
            [16000477, 16000487, 16000499, 16000507, 16000511, 16000573, 16000609, 16000627],
            [16000667, 16000669, 16000693, 16000697, 16000711, 16000729, 16000759, 16000769],
            [16000781, 16000799, 16000813, 16000819, 16000841, 16000877, 16000879, 16000889],
        ],
    ]
    # fmt: on
    assert hashes.multipliers.dtype == np.int64
    assert hashes.multipliers.tolist() == [
        [76632096046245, 4839876093313, 35959672319349, 73987337458391],
        [67716810739261, 51510806800915, 30921347202721, 82619226485591],
    ]
    assert (hashes.columns, hashes.history_tokens) == (24, 3)


@pytest.mark.parametrize(
    ("history", "token", "expected"),
    [
        ([], 10, [[9400104, 24924096, 128026094, 382122658]]),
        ([2, 2, 2], 10, [[9400104, 24924096, 128026094, 382122658]]),
        ([], 10, [[], [11315085, 19412660, 135395884, 379075217]]),
        ([7, 10, 20, 30], 40, [[1326936, 22120929, 142088989, 378628807]]),
        ([10, 20, 30], 40, [[], [5403109, 26519290, 136663117, 378588994]]),
    ],
)
def test_released_rows(history: list[int], token: int, expected: list[list[int]]):
    rows = released().rows(int64([token]), int64(history))
    assert rows.shape == (2, 1, 24)
    assert rows[len(expected) - 1, 0, [0, 1, 8, 23]].tolist() == expected[-1]


def test_rows_stay_in_their_column_of_the_table():
    hashes = released()
    ids = np.random.default_rng(0).integers(0, 99_092, size=2_000)
    rows = hashes.rows(ids, NOTHING)
    low = hashes.offsets.reshape(2, 1, 24)
    high = low + hashes.primes.reshape(2, 1, 24)
    assert ((low <= rows) & (rows < high)).all()
    assert high[:, 0, -1].tolist() == list(RELEASED.num_embeddings)


@given(start=st.integers(0, 3_000), count=st.integers(1, 60))
def test_primes_are_all_primes_from_the_start(start: int, count: int):
    primes = primes_from(start, count)
    assert len(primes) == count
    wanted = [
        n
        for n in range(max(start, 2), primes[-1] + 1)
        if all(n % d for d in range(2, int(n**0.5) + 1))
    ]
    assert primes == wanted


IDS = st.lists(st.sampled_from([0, 1, 2, 63, 64, 130, 254, 255]) | st.integers(0, 255), max_size=24)


@given(ids=IDS)
def test_agrees_with_the_slow_hash(ids: list[int]):
    rows = tiny().rows(int64(ids), NOTHING)
    assert rows.dtype == np.int64
    assert rows.tolist() == rows_reference(TINY, TINY_MAP.tolist(), ids)


@given(ids=IDS, cuts=st.lists(st.integers(0, 24), max_size=6), surplus=st.integers(0, 5))
def test_any_split_equals_one_piece(ids: list[int], cuts: list[int], surplus: int):
    hashes = tiny()
    whole = hashes.rows(int64(ids), NOTHING)
    edges = sorted({0, len(ids), *(cut for cut in cuts if cut <= len(ids))})
    kept = hashes.history_tokens + surplus
    pieces = [
        hashes.rows(int64(ids[a:b]), int64(ids[max(0, a - kept) : a])) for a, b in pairwise(edges)
    ]
    assert np.concatenate([whole[:, :0], *pieces], axis=1).tolist() == whole.tolist()


def test_an_image_hides_what_is_before_it():
    hashes = tiny()
    after = hashes.rows(int64([9, 10, 11, 12]), int64([7, 8, TINY_IMAGE]))
    fresh = hashes.rows(int64([9, 10, 11, 12]), NOTHING)
    assert after.tolist() == fresh.tolist()
    assert fresh.tolist() != hashes.rows(int64([9, 10, 11, 12]), int64([7, 8])).tolist()


@pytest.mark.parametrize("bad", [-1, 256])
def test_id_outside_the_vocabulary(bad: int):
    with pytest.raises(BadRequest, match=rf"0 to 255, got .*{bad}"):
        tiny().rows(int64([3, bad]), NOTHING)
    with pytest.raises(BadRequest):
        tiny().rows(int64([3]), int64([bad]))


def test_primes_that_do_not_sum_to_the_table():
    config = replace(TINY, num_embeddings=(630, 835))
    with pytest.raises(ModelFileError, match=r"\[630, 835\].*\[630, 834\]"):
        EngramHash(TINY_MAP, config, TINY_IMAGE)


def test_map_without_the_image_id():
    with pytest.raises(ModelFileError, match=r"200 ids.*255"):
        EngramHash(TINY_MAP[:200], TINY, TINY_IMAGE)


# The read-ahead, on two small tables in one file.

HEAD_DIM = 32


class Tables:
    """Two tables with random rows, and the rows that a hash should get from them."""

    def __init__(self, path: Path) -> None:
        rng = np.random.default_rng(1)
        # Of the e4m3 codes below 127 each is a number.
        self.codes = [rng.integers(0, 127, (n, HEAD_DIM), np.uint8) for n in (630, 834)]
        self.scales = [rng.integers(0, 255, (n, 1), np.uint8) for n in (630, 834)]
        self.locations: list[TableLocation] = []
        with path.open("wb") as file:
            for codes, scales in zip(self.codes, self.scales, strict=True):
                weight_offset = file.tell()
                file.write(codes.tobytes())
                self.locations.append(
                    TableLocation(path, weight_offset, file.tell(), len(codes), HEAD_DIM)
                )
                file.write(scales.tobytes())


@pytest.fixture
def tables(tmp_path: Path) -> Tables:
    return Tables(tmp_path / "shard")


class GatedPread:
    """Stands for `os.pread`: reads at or after `closed_from` wait until `open` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.closed_from = 0
        self.open = threading.Event()
        self._pread = engram_table.os.pread
        monkeypatch.setattr(engram_table.os, "pread", self)

    def __call__(self, fd: int, n_bytes: int, offset: int) -> bytes:
        if offset >= self.closed_from:
            assert self.open.wait(30)
        return self._pread(fd, n_bytes, offset)


@pytest.mark.parametrize("cache_bytes", [0, 10_000, 1_000_000])
def test_chunks_read_ahead_are_the_rows_of_the_hash(tables: Tables, cache_bytes: int):
    hashes = tiny()
    ids = np.random.default_rng(2).integers(0, 256, size=300)
    with EngramReader(hashes, tables.locations, cache_bytes=cache_bytes) as reader:
        handles = [
            reader.prefetch(ids[a : a + 100], ids[max(0, a - 3) : a]) for a in range(0, 300, 100)
        ]
        for i, layer in enumerate(hashes.layer_ids):
            rows = hashes.rows(ids, NOTHING)[i]
            results = [handle.result(layer) for handle in handles]
            codes, scales = (np.concatenate(arrays) for arrays in zip(*results, strict=True))
            assert codes.shape == (300, hashes.columns, HEAD_DIM)
            assert scales.shape == (300, hashes.columns, 1)
            assert (codes == tables.codes[i][rows]).all()
            assert (scales == tables.scales[i][rows]).all()
        assert reader.stats().rows_requested == 2 * 300 * hashes.columns


def test_prefetch_does_not_wait_and_a_layer_needs_only_its_own_reads(
    tables: Tables, monkeypatch: pytest.MonkeyPatch
):
    gate = GatedPread(monkeypatch)
    gate.closed_from = tables.locations[1].weight_offset
    with EngramReader(tiny(), tables.locations, cache_bytes=0, n_readers=2) as reader:
        handle = reader.prefetch(np.arange(50), NOTHING)
        codes, _ = handle.result(1)  # while every read of layer 4's table waits
        assert not gate.open.is_set()
        assert codes.shape == (50, 6, HEAD_DIM)
        gate.open.set()
        assert handle.result(4)[0].shape == (50, 6, HEAD_DIM)


def test_the_lower_layer_has_the_readers_first(tables: Tables, monkeypatch: pytest.MonkeyPatch):
    upper_from = tables.locations[1].weight_offset
    is_upper_read = threading.Event()
    overtaken: list[bool] = []
    pread = engram_table.os.pread

    def slow_below(fd: int, n_bytes: int, offset: int) -> bytes:
        if offset >= upper_from:
            is_upper_read.set()
        else:
            overtaken.append(is_upper_read.wait(0.03))
        return pread(fd, n_bytes, offset)

    monkeypatch.setattr(engram_table.os, "pread", slow_below)
    with EngramReader(tiny(), tables.locations, cache_bytes=0) as reader:
        reader.prefetch(int64([5]), NOTHING).result(4)
    assert overtaken == [False] * 12  # 6 rows: codes and scales


def test_a_held_up_prefetch_does_not_hold_up_the_next(
    tables: Tables, monkeypatch: pytest.MonkeyPatch
):
    hashes = tiny()
    first, second = int64([5]), int64([100])
    rows = [hashes.rows(ids, NOTHING)[0, 0] for ids in (first, second)]
    assert rows[0].max() > rows[1].max()
    gate = GatedPread(monkeypatch)
    # Of layer 1's reads only the first token's highest row and the scales wait.
    table = tables.locations[0]
    split = TableLocation(table.path, table.weight_offset, 0, table.n_rows, HEAD_DIM)
    gate.closed_from = table.weight_offset + int(rows[0].max()) * HEAD_DIM
    with EngramReader(hashes, [split, tables.locations[1]], cache_bytes=0) as reader:
        held_up = reader.prefetch(first, NOTHING)
        codes, _ = reader.prefetch(second, NOTHING).result(1)
        assert (codes[0] == tables.codes[0][rows[1]]).all()
        gate.open.set()
        codes, _ = held_up.result(1)
        assert (codes[0] == tables.codes[0][rows[0]]).all()


def test_failed_read_reaches_the_caller(tables: Tables):
    with EngramReader(tiny(), tables.locations, cache_bytes=0) as reader:
        tables.locations[0].path.write_bytes(b"")
        handle = reader.prefetch(int64([1, 2]), NOTHING)
        for layer in (1, 4):
            with pytest.raises(ModelFileError, match="fetch the shard again"):
                handle.result(layer)


def test_close_ends_what_waits(tables: Tables, monkeypatch: pytest.MonkeyPatch):
    gate = GatedPread(monkeypatch)
    reader = EngramReader(tiny(), tables.locations, cache_bytes=0, n_readers=2)
    handles = [reader.prefetch(np.arange(200), NOTHING) for _ in range(8)]
    closing = threading.Thread(target=reader.close)
    closing.start()
    with pytest.raises(RuntimeError, match="shutdown"):
        while True:
            handles.append(reader.prefetch(int64([1]), NOTHING))
    gate.open.set()
    closing.join(30)
    assert not closing.is_alive()
    # The first handles were being read; those that waited for their turn are cancelled.
    for handle in handles[4:]:
        with pytest.raises(CancelledError):
            handle.result(4)


def test_table_of_another_size(tables: Tables):
    short = TableLocation(tables.locations[0].path, 0, 0, 629, HEAD_DIM)
    with pytest.raises(ModelFileError, match=r"layer 1's.*629 rows.*says 630"):
        EngramReader(tiny(), [short, tables.locations[1]], cache_bytes=0)
