"""Packs conversations into sequences of equal length, in processes of their own."""

import multiprocessing as mp
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.demo_model.chat import Encoder, FormatTexts
from bench.demo_model.lookups import KINDS_OF_LOOKS, NOWHERE
from bench.demo_model.tasks import chat_of

PAD_ID = 2
# Batches that must be known before one is seen again.
SEEN_AGAIN = 32
# Documents of a sequence that came out too long for its rest, until it stays empty.
_MISSES = 4
# The document number of what follows the last document.
NO_DOCUMENT = 65535


@dataclass(frozen=True)
class Packed:
    """ids uint16, documents uint16 and weights f32, each [B, T]: a token's weight as a target;
    looks uint16 [KINDS_OF_LOOKS, B, T]: the places in its sequence that a token looks at, or
    NOWHERE.
    """

    ids: NDArray[np.uint16]
    documents: NDArray[np.uint16]
    weights: NDArray[np.float32]
    looks: NDArray[np.uint16]


def pack(
    rng: Random, encoder: Encoder, texts: FormatTexts, B: int, T: int, lookups: float
) -> Packed:
    """Fill B sequences of T tokens; a document begins at an even position and is cut at the end.

    Half of the documents may be as long as the sequence, of the others most are short.
    """
    ids = np.full((B, T), PAD_ID, np.uint16)
    documents = np.full((B, T), NO_DOCUMENT, np.uint16)
    weights = np.zeros((B, T), np.float32)
    looks = np.full((KINDS_OF_LOOKS, B, T), NOWHERE, np.uint16)
    for row in range(B):
        at = number = misses = 0
        while at < T - 64 and misses < _MISSES:
            room = T - at
            most = rng.choice((1500, 1500, 5000))
            tokens = room if rng.random() < 0.5 else min(room, rng.randint(150, most))
            new, weight, look = encoder.document(chat_of(rng, tokens, lookups), texts)
            new, weight, look = new[:room], weight[:room], look[:, :room]
            if not (weight == 1).any():  # cut off before its first answer, it would teach nothing
                misses += 1
                continue
            ids[row, at : at + new.size] = new
            weights[row, at : at + new.size] = weight
            looks[:, row, at : at + new.size] = np.where(look == NOWHERE, NOWHERE, look + at)
            documents[row, at : at + new.size] = number
            number += 1
            at += new.size + new.size % 2
    return Packed(ids, documents, weights, looks)


class Feed:
    """Batches of `tokens` tokens from worker processes, each from a seed of its own.

    `lengths` of sequences are drawn from; setting them, and the share of conversations that only
    look names up, changes what is made from then on.
    """

    def __init__(self, prepared: Path, tokens: int, workers: int, seed: int) -> None:
        context = mp.get_context("spawn")
        self._lengths = context.Array("i", [0] * 8)
        self._lookups = context.Value("d", 0.0)
        self._queue: Any = context.Queue(maxsize=2 * workers)
        self._last: deque[Packed] = deque(maxlen=8 * SEEN_AGAIN)
        self._rng = Random(seed)
        self._workers = [
            context.Process(
                target=_work,
                args=(
                    prepared,
                    tokens,
                    seed + i,
                    workers,
                    self._lengths,
                    self._lookups,
                    self._queue,
                ),
                daemon=True,
            )
            for i in range(workers)
        ]

    def set_phase(self, lengths: list[int], lookups: float) -> None:
        """Draw from these lengths, evenly, and so many lookups."""
        with self._lengths.get_lock():
            self._lengths[:] = [*lengths, *[0] * (8 - len(lengths))]
        self._lookups.value = lookups

    def start(self) -> None:
        for worker in self._workers:
            worker.start()

    def take(self, lengths: list[int], lookups: float) -> tuple[Packed, bool]:
        """A batch, and whether it is new: one of the last is seen again rather than waited for."""
        self.set_phase(lengths, lookups)
        if self._queue.empty():
            known = [packed for packed in self._last if packed.ids.shape[1] in lengths]
            if len(known) >= SEEN_AGAIN:
                return self._rng.choice(known), False
        packed = Packed(*self._queue.get(timeout=120))
        self._last.append(packed)
        return packed, True

    def waiting(self) -> int:
        """Batches that are ready."""
        return self._queue.qsize()

    def stop(self) -> None:
        for worker in self._workers:
            worker.terminate()


def load_prepared(prepared: Path) -> tuple[Encoder, FormatTexts]:
    """The encoder and the texts that `prepare` wrote."""
    import json

    texts = FormatTexts(**json.loads((prepared / "texts.json").read_text()))
    return Encoder((prepared / "tokenizer.json").read_text()), texts


def _work(
    prepared: Path, tokens: int, seed: int, stride: int, lengths: Any, lookups: Any, queue: Any
) -> None:
    encoder, texts = load_prepared(prepared)
    while True:
        rng = Random(seed)
        T = rng.choice([length for length in lengths[:] if length])
        packed = pack(rng, encoder, texts, tokens // T, T, lookups.value)
        queue.put((packed.ids, packed.documents, packed.weights, packed.looks))
        seed += stride
