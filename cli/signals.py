"""Ctrl-C and SIGTERM while an engine is at work: noted where they may wait, raised where not."""

import signal
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Signals:
    """The Ctrl-C and SIGTERM that came.

    One that is awaited is asked for between tokens: the answer so far is written, and so is what
    the disk cache has waiting. Any other ends the program, and so does the second one.
    """

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.are_awaited = False

    @classmethod
    @contextmanager
    def noted(cls) -> "Generator[Signals]":
        """Note signals until the context is left."""
        signals = cls()
        before = {number: signal.signal(number, signals._note) for number in _SIGNALS}
        try:
            yield signals
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def forget(self) -> None:
        """Go on after what has come; a SIGTERM among it ends the program now."""
        if signal.SIGTERM in self.numbers:
            raise SystemExit(128 + signal.SIGTERM)
        self.numbers.clear()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.numbers.append(number)
        if self.are_awaited and len(self.numbers) == 1:
            return
        if number == signal.SIGTERM:
            raise SystemExit(128 + number)
        raise KeyboardInterrupt
