"""SessionState: everything that the model remembers of one sequence (docs/model.md, section 7).

Rows are packed and storage is logical: a window is a ring of fixed size, compressed rows and index
keys grow by doubling and are written in place. In place holds only while nobody else keeps a
reference to a buffer across an update, so nothing here hands out a buffer itself, only what a
step reads from it.
"""

from collections.abc import Iterator

import mlx.core as mx

from mlx_engine.config import ModelConfig
from mlx_engine.formats import CacheFormats, RowFormat
from mlx_engine.memory import SPARE_ROWS
from mlx_engine.ops.attention import WindowRows
from mlx_engine.ops.front import Ring

_FIRST_ROWS = 256


class Window:
    """The newest `capacity` packed rows of one layer, a ring with slot = position mod capacity."""

    def __init__(self, capacity: int, words: int) -> None:
        self.rows: mx.array = mx.zeros((capacity, words), dtype=mx.uint32)
        self.end = 0
        self.count = 0

    def extend(self, new: mx.array, first_position: int) -> WindowRows:
        """Append rows [N, words] from `first_position` on; return what their queries can see.

        A gap before them drops the older rows: the caller leaves one only where no later query
        reaches back over it.
        """
        N, capacity = new.shape[0], self.rows.shape[0]
        if first_position != self.end:
            self.count = 0
        if (ring := self.ring(first_position, N)) is not None:
            slot = mx.array([ring.slot])
            return self.turn(mx.slice_update(self.rows, new, slot, axes=[0]), first_position)
        kept = min(self.count, capacity - 1)
        ordered = mx.concatenate([self._ordered(kept), new], axis=0)
        self.end = first_position + N
        self.count = min(kept + N, capacity)
        newest = ordered[-self.count :]
        if self.count < capacity:
            newest = mx.pad(newest, [(capacity - self.count, 0), (0, 0)])
        # `newest` ends at position end - 1; turn it so that each row sits at its own slot.
        self.rows = mx.roll(newest, self.end % capacity, 0)
        return WindowRows(ordered, first_position - kept)

    def ring(self, first_position: int, N: int) -> Ring | None:
        """Where a single next row goes once the window is full, else None."""
        is_next = first_position == self.end and self.count >= self.rows.shape[0] - 1
        if N != 1 or not is_next:
            return None
        return Ring(self.rows, first_position % self.rows.shape[0])

    def turn(self, rows: mx.array, position: int) -> WindowRows:
        """Take the ring's rows with that of the next position in its slot."""
        self.rows, self.end, self.count = rows, position + 1, rows.shape[0]
        return WindowRows(rows, None)

    def _ordered(self, count: int) -> mx.array:
        """The newest `count` rows by ascending position: [count, words]."""
        turned = mx.roll(self.rows, -(self.end % self.rows.shape[0]), 0)
        return turned[turned.shape[0] - count :]


class GrowingRows:
    """Rows of one width, appended in place."""

    def __init__(self, width: int, dtype: mx.Dtype = mx.uint32) -> None:
        self.buffer: mx.array = mx.zeros((0, width), dtype=dtype)
        self.length = 0

    def append(self, new: mx.array) -> None:
        """Add rows [G, width] at the end."""
        needed = self.length + new.shape[0]
        capacity = self.buffer.shape[0]
        if needed > capacity:
            growth = max(_FIRST_ROWS, min(capacity, SPARE_ROWS), needed - capacity)
            self.buffer = mx.pad(self.buffer, [(0, growth), (0, 0)])
        # A place that is known takes one launch, one in an array another to compute it.
        self.buffer[self.length : needed] = new
        self.length = needed

    def view(self) -> mx.array:
        """The rows so far [length, width]; let it go before the next append."""
        return self.buffer[: self.length]


class GrowingKeys:
    """Index keys of a compressed layer, codes and scales apart.

    Every scan reads all of them, in place only if each lies together as MLX's products want it.
    """

    def __init__(self, fmt: RowFormat, width: int) -> None:
        codes, scales = fmt.encode(mx.zeros((0, width)))
        self.codes = GrowingRows(codes.shape[-1], codes.dtype)
        self.scales = GrowingRows(scales.shape[-1], scales.dtype)

    @property
    def length(self) -> int:
        return self.codes.length

    def append(self, codes: mx.array, scales: mx.array) -> None:
        """Add keys [G, ..] at the end."""
        self.codes.append(codes)
        self.scales.append(scales)


class PendingGroup:
    """The raw rows of a group of R tokens that is not full yet: f32 [n, head_dim] each."""

    def __init__(self, head_dim: int) -> None:
        self.kv = mx.zeros((0, head_dim))
        self.gate = mx.zeros((0, head_dim))


class SessionState:
    """One sequence's windows, compressed rows, index keys and pending groups.

    `position` counts the tokens below the last source of compressed rows. The layers above it may
    lag behind during a prefill and have caught up whenever a call of Model returns logits.
    """

    def __init__(self, config: ModelConfig, formats: CacheFormats | None = None) -> None:
        self.formats = formats or CacheFormats()
        self.position = 0
        window_words = self.formats.window.words(config.head_dim)
        compressed_words = self.formats.compressed.words(config.head_dim)
        sources = config.kv_source_layer_ids
        self.windows = [
            Window(config.sliding_window, window_words) for _ in range(config.num_hidden_layers)
        ]
        self.compressed = {source: GrowingRows(compressed_words) for source in sources}
        self.index_keys = {
            source: GrowingKeys(self.formats.index, config.index_head_dim) for source in sources
        }
        self.pending = {
            source: PendingGroup(config.head_dim)
            for source in sources
            if config.compress_ratios[source] > 1
        }
        # What waits for the thread that made it cannot be computed by another.
        mx.eval(list(self.arrays()))

    def arrays(self) -> Iterator[mx.array]:
        """Every array of the state: what a step must have computed before the next one starts."""
        for window in self.windows:
            yield window.rows
        for rows in self.compressed.values():
            yield rows.buffer
        for keys in self.index_keys.values():
            yield keys.codes.buffer
            yield keys.scales.buffer
        for group in self.pending.values():
            yield group.kv
            yield group.gate

    @property
    def n_bytes(self) -> int:
        """Bytes held in memory, spare capacity included."""
        return sum(array.nbytes for array in self.arrays())
