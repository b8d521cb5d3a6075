"""TurnRecord: the exact tokens of answers, for when their turns return in later prompts.

Clients send a turn back rendered anew: tool arguments spelled otherwise, the reasoning left out,
whitespace gone; and other tokens than the sampled ones are another state. Owns what makes two turns
the same, the bound on what is kept, and the form in which a store keeps it over a restart. Where in
a prompt the tokens go is prompt's part.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

MAX_BYTES = 64 * 2**20

# Part of what a store holds: raise it when the words or the keys change their meaning.
_VERSION = 1
_DIGEST_WORDS = 8
_HEAD_WORDS = 3 + _DIGEST_WORDS
# What Python's own objects take beside the tokens and keys of a turn, roughly.
_OVERHEAD_BYTES = 600


class TurnStore(Protocol):
    """What a record needs to outlive the process; neither method may wait for a disk."""

    def record_put(self, key: bytes, token_ids: NDArray[np.uint32]) -> None:
        """Keep words of 32 bits under a key of 32 bytes."""
        ...

    def records(self) -> Iterable[tuple[bytes, NDArray[np.uint32]]]:
        """All that is kept, as it was put."""
        ...


@dataclass(frozen=True)
class Shown:
    """A turn of the assistant as a client has it.

    text: without reasoning and calls. call_ids: of its tool calls, in their order. signature: of
    its reasoning, "" where none was given out or it did not come back.

    Two turns are the same when their call ids are equal, their texts too but for whitespace at
    both ends, and they have the signature in common, or call ids at all, or the tokens before
    them. How the arguments of a call are spelled does not matter: its id stands for them. A
    reasoning that comes back changed, apart from whitespace, makes it another turn.
    """

    text: str
    reasoning: str = ""
    call_ids: Sequence[str] = ()
    signature: str = ""

    def keys(self, prefix: bytes) -> tuple[bytes, ...]:
        """Digests of 32 bytes, each enough to find the turn; the surest comes first.

        `prefix` is the digest of the tokens before the turn, its role token included.
        """
        same = [self.text.strip(), *self.call_ids]
        keys = [_digest("prefix", prefix.hex(), *same)]
        if self.call_ids:
            keys.insert(0, _digest("calls", *same))
        if self.signature:
            keys.insert(0, _digest("signature", self.signature, *same))
        return tuple(keys)

    @property
    def reasoning_digest(self) -> bytes:
        """32 bytes that tell reasonings apart, whatever whitespace they have."""
        return _digest("reasoning", "".join(self.reasoning.split()))


@dataclass(frozen=True, eq=False)
class Turn:
    """The sampled tokens of one turn: after its header, before its end mark.

    starts_in_reasoning: the header was `<think>`, so the tokens up to the first `</think>` are
    reasoning.
    """

    token_ids: NDArray[np.uint32]
    starts_in_reasoning: bool
    reasoning_digest: bytes
    keys: tuple[bytes, ...]

    @property
    def n_bytes(self) -> int:
        """Bytes in memory, Python's own about right."""
        return self.token_ids.nbytes + 32 * len(self.keys) + _OVERHEAD_BYTES

    def to_words(self) -> NDArray[np.uint32]:
        """The turn as one array, for a store."""
        head = np.array([_VERSION, self.starts_in_reasoning, len(self.keys)], "<u4")
        digests = np.frombuffer(self.reasoning_digest + b"".join(self.keys), "<u4")
        return np.concatenate([head, digests, self.token_ids])

    @classmethod
    def from_words(cls, words: NDArray[np.uint32]) -> Self | None:
        """The turn that `to_words` wrote; None for words of another version."""
        if words.size < _HEAD_WORDS or words[0] != _VERSION:
            return None
        n_keys = int(words[2])
        digests = words[3 : _HEAD_WORDS + n_keys * _DIGEST_WORDS].astype("<u4").tobytes()
        if not n_keys or len(digests) != 32 * (1 + n_keys):
            return None
        reasoning, *keys = (digests[i : i + 32] for i in range(0, len(digests), 32))
        token_ids = words[_HEAD_WORDS + n_keys * _DIGEST_WORDS :].copy()
        return cls(token_ids, bool(words[1]), reasoning, tuple(keys))


class TurnRecord:
    """The turns that were answered, up to `max_bytes`; what was unused longest goes first.

    With a store it begins with what that holds. Any thread may call.
    """

    def __init__(self, store: TurnStore | None = None, *, max_bytes: int = MAX_BYTES) -> None:
        self._store = store
        self._max_bytes = max_bytes
        self._lock = Lock()
        self._turns: dict[Turn, None] = {}  # in the order of their last use
        self._by_key: dict[bytes, Turn] = {}
        self.n_bytes = 0
        for _, words in store.records() if store else ():
            turn = Turn.from_words(words)
            if turn is not None:
                self._insert(turn)

    def put(
        self, prefix: bytes, shown: Shown, token_ids: Sequence[int], *, starts_in_reasoning: bool
    ) -> None:
        """Keep the tokens of a turn; of turns with the same key the last one counts.

        The tokens must say what was shown and no more: a call that the client never got would
        come back as its own.
        """
        turn = Turn(
            np.array(token_ids, np.uint32),
            starts_in_reasoning,
            shown.reasoning_digest,
            shown.keys(prefix),
        )
        with self._lock:
            self._insert(turn)
        if self._store is not None:
            words = turn.to_words()
            self._store.record_put(hashlib.sha256(words.tobytes()).digest(), words)

    def find(self, prefix: bytes, shown: Shown) -> Turn | None:
        """The turn that a client has sent back, None where it is not known or is another."""
        with self._lock:
            for key in shown.keys(prefix):
                turn = self._by_key.get(key)
                if turn is not None and (
                    not shown.reasoning or shown.reasoning_digest == turn.reasoning_digest
                ):
                    self._turns[turn] = self._turns.pop(turn)
                    return turn
        return None

    def _insert(self, turn: Turn) -> None:
        if turn.n_bytes > self._max_bytes:
            return
        self._turns[turn] = None
        self._by_key |= dict.fromkeys(turn.keys, turn)
        self.n_bytes += turn.n_bytes
        while self.n_bytes > self._max_bytes:
            self._remove(next(iter(self._turns)))

    def _remove(self, turn: Turn) -> None:
        del self._turns[turn]
        self.n_bytes -= turn.n_bytes
        for key in turn.keys:
            if self._by_key.get(key) is turn:  # a later turn may have taken the key
                del self._by_key[key]


def _digest(*fields: str) -> bytes:
    digest = hashlib.sha256()
    for field in fields:
        data = field.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.digest()
