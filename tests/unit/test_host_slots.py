"""Slots that the host writes and a graph reads: nothing is overwritten that is still to be read."""

import threading

import mlx.core as mx
import numpy as np
import pytest

from mlx_engine.cuda.host_slots import host_slots


def test_slots_lie_apart_and_show_what_is_written() -> None:
    slots = host_slots(52, 3)
    parts = [[np.full((2, 9), 10 * n, np.uint8), np.full(20, 10 * n + 1, np.uint8)] for n in (1, 2)]
    for slot, each in zip(slots, parts, strict=False):
        slot.write(each)
    for n, slot in zip((1, 2), slots, strict=False):
        # The second part begins where 16 bytes may be loaded.
        assert slot.array[:18].tolist() == [10 * n] * 18
        assert slot.array[32:52].tolist() == [10 * n + 1] * 20
    assert slots[2].array.tolist() == [0] * slots[2].array.size


def test_a_slot_larger_than_a_block_of_pages() -> None:
    slots = host_slots(3 << 20, 2)
    for n, slot in enumerate(slots):
        slot.write([np.full(3 << 20, n + 1, np.uint8)])
    assert [slot.array.max().item() for slot in slots] == [1, 2]
    assert [slot.array.min().item() for slot in slots] == [1, 2]


def test_a_write_waits_for_what_reads_the_last_one() -> None:
    (slot,) = host_slots(16, 1)
    slot.write([np.full(16, 1, np.uint8)])
    slot.reader = reader = slot.array + 1  # not computed before the write
    slot.write([np.full(16, 5, np.uint8)])
    assert reader.tolist() == [2] * 16
    assert slot.array.tolist() == [5] * 16


def test_a_reader_that_cannot_be_computed_fails_a_single_write() -> None:
    (slot,) = host_slots(16, 1)

    def read() -> None:
        # Only a thread that made a node can compute it, and this one has ended by then.
        slot.reader = mx.add(slot.array, 1)

    thread = threading.Thread(target=read)
    thread.start()
    thread.join()
    with pytest.raises(RuntimeError, match="thread"):
        slot.write([np.full(16, 5, np.uint8)])
    slot.write([np.full(16, 6, np.uint8)])
    assert slot.array.tolist() == [6] * 16
