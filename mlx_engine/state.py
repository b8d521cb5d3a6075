"""SessionState: everything that the model remembers of one sequence (docs/model.md, section 7).

Rows are packed and storage is logical: a window is a ring of fixed size, compressed rows and index
keys grow by doubling and are written in place. In place holds only while nobody else keeps a
reference to a buffer across an update, so nothing here hands out a buffer that grows, only what a
step reads from it. A checkpoint refers to the small rest, which an update then copies once.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import mlx.core as mx

from mlx_engine.config import ModelConfig
from mlx_engine.formats import CacheFormats, RowFormat
from mlx_engine.memory import FIRST_ROWS, SPARE_ROWS
from mlx_engine.ops.attention import WindowRows
from mlx_engine.ops.front import Ring


@dataclass(frozen=True)
class SavedWindow:
    """A window at some time: rows [capacity, words], where the newest ends, how many count."""

    rows: mx.array
    end: int
    count: int


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

    def save(self) -> SavedWindow:
        """The window as it is, to return to."""
        return SavedWindow(self.rows, self.end, self.count)

    def restore(self, saved: SavedWindow) -> None:
        """Return to what it was."""
        self.rows, self.end, self.count = saved.rows, saved.end, saved.count

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
        self.reserve(needed)
        # A place that is known takes one launch, one in an array another to compute it.
        self.buffer[self.length : needed] = new
        self.length = needed

    def reserve(self, needed: int) -> None:
        """Make room for so many rows in all."""
        capacity = self.buffer.shape[0]
        if needed > capacity:
            growth = max(FIRST_ROWS, min(capacity, SPARE_ROWS), needed - capacity)
            self.buffer = mx.pad(self.buffer, [(0, growth), (0, 0)])

    def truncate(self, length: int) -> None:
        """Drop the rows from `length` on; a buffer that then has too much to spare is copied.

        Above twice what a copy has to spare, so that rows that come and go seldom cost one.
        """
        self.length = length
        if self.buffer.shape[0] - length > 2 * SPARE_ROWS:
            self.buffer = self.copy(length).buffer
            mx.eval(self.buffer)

    def copy(self, length: int) -> "GrowingRows":
        """The first `length` rows in a buffer of their own, with room for more."""
        copy = GrowingRows(self.buffer.shape[1], self.buffer.dtype)
        copy.length = length
        spare = max(FIRST_ROWS, min(length, SPARE_ROWS))
        copy.buffer = mx.pad(self.buffer[:length], [(0, spare), (0, 0)])
        return copy

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

    def truncate(self, length: int) -> None:
        """Drop the keys from `length` on."""
        self.codes.truncate(length)
        self.scales.truncate(length)


class PendingGroup:
    """The raw rows of a group of R tokens that is not full yet: f32 [n, head_dim] each."""

    def __init__(self, head_dim: int) -> None:
        self.kv = mx.zeros((0, head_dim))
        self.gate = mx.zeros((0, head_dim))


@dataclass(frozen=True)
class Checkpoint:
    """What the rows below `position` leave out: the windows of all layers and the pending groups.

    pending: kv and gate, f32 [position % ratio, head_dim] each, by source.
    """

    position: int
    windows: tuple[SavedWindow, ...]
    pending: dict[int, tuple[mx.array, mx.array]]

    @property
    def n_bytes(self) -> int:
        """Bytes that it may be alone in keeping."""
        pending = [array for arrays in self.pending.values() for array in arrays]
        return sum(array.nbytes for array in [*(saved.rows for saved in self.windows), *pending])

    def even(self) -> "Checkpoint":
        """This one, or from an odd position the one a token before, exactly.

        A ring holds one row more than the next query sees, so the newest can go. A pending group
        can lose its newest row, one that the last token closed cannot: no even ratio has that.
        """
        if self.position % 2 == 0 or any(not kv.shape[0] for kv, _ in self.pending.values()):
            return self
        windows = tuple(replace(w, end=w.end - 1, count=w.count - 1) for w in self.windows)
        pending = {source: (kv[:-1], gate[:-1]) for source, (kv, gate) in self.pending.items()}
        mx.eval(list(pending.values()))
        return Checkpoint(self.position - 1, windows, pending)


class SessionState:
    """One sequence's windows, compressed rows, index keys and pending groups.

    `position` counts the tokens below the last source of compressed rows. The layers above it may
    lag behind during a prefill and have caught up whenever a call of Model returns logits.
    """

    def __init__(self, config: ModelConfig, formats: CacheFormats | None = None) -> None:
        self.config = config
        self.formats = formats or CacheFormats()
        self.position = 0
        window_words = self.formats.window.words(config.head_dim)
        compressed_words = self.formats.compressed.words(config.head_dim)
        sources = config.kv_source_layer_ids
        self.ratios = {source: config.compress_ratios[source] for source in sources}
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

    def checkpoint(self) -> Checkpoint:
        """A place to return to. It copies nothing: the next update of a window copies that once."""
        return Checkpoint(
            self.position,
            tuple(window.save() for window in self.windows),
            {source: (group.kv, group.gate) for source, group in self.pending.items()},
        )

    def rewind(self, checkpoint: Checkpoint) -> None:
        """Return to a checkpoint of this sequence, whatever a broken-off chunk left behind."""
        for source, rows in self.compressed.items():
            length = checkpoint.position // self.ratios[source]
            rows.truncate(length)
            self.index_keys[source].truncate(length)
        self._restore(checkpoint)

    def fork(self, checkpoint: Checkpoint) -> "SessionState":
        """A state of its own at a checkpoint of this sequence; copies the rows below it once."""
        other = SessionState(self.config, self.formats)
        for source, rows in self.compressed.items():
            length = checkpoint.position // self.ratios[source]
            keys, other_keys = self.index_keys[source], other.index_keys[source]
            other.compressed[source] = rows.copy(length)
            other_keys.codes = keys.codes.copy(length)
            other_keys.scales = keys.scales.copy(length)
        other._restore(checkpoint)
        mx.eval(list(other.arrays()))
        return other

    def _restore(self, checkpoint: Checkpoint) -> None:
        self.position = checkpoint.position
        for window, saved in zip(self.windows, checkpoint.windows, strict=True):
            window.restore(saved)
        for source, (kv, gate) in checkpoint.pending.items():
            self.pending[source].kv, self.pending[source].gate = kv, gate

    @property
    def n_bytes(self) -> int:
        """Bytes held in memory, spare capacity included."""
        return sum(array.nbytes for array in self.arrays())
