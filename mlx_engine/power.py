"""The power that a Mac's processor draws, from macOS's own `powermetrics`, which needs root.

Counts CPU, GPU and neural engine as Apple estimates them; memory and the rest are not in it.
"""

import re
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType

from mlx_engine.errors import DeviceError

INTERVAL_S = 0.2
COMMAND = (
    *("sudo", "powermetrics", "--samplers", "cpu_power,gpu_power"),
    *("--sample-rate", str(round(INTERVAL_S * 1000)), "--buffer-size", "1"),
)
_COMBINED = re.compile(r"^Combined Power \(CPU \+ GPU \+ ANE\): (\d+(?:\.\d+)?) mW")
# A password has to be typed before the first sample.
_PATIENCE_S = 60.0


class PowerMeter:
    """Samples the power for as long as it is open. `command` prints what powermetrics prints.

    Raises DeviceError when no sample comes.
    """

    def __init__(self, command: Sequence[str] = COMMAND) -> None:
        self._samples: list[tuple[float, float]] = []
        self._first = threading.Event()
        self._is_closing = False
        try:
            self._process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        except OSError as error:
            raise _failed(f"{command[0]}: {error.strerror}") from None
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        has_news = self._first.wait(_PATIENCE_S)
        if not self._samples:
            said = self._complaint() if has_news else f"none came in {_PATIENCE_S:g} seconds"
            self.close()
            raise _failed(said)

    def watts(self, start_s: float, end_s: float) -> float | None:
        """The mean of the samples that lie within a time of `time.monotonic`, None without any."""
        inside = [watts for at, watts in list(self._samples) if start_s + INTERVAL_S <= at <= end_s]
        return sum(inside) / len(inside) if inside else None

    def _complaint(self) -> str:
        assert self._process.stderr is not None
        return " ".join(self._process.stderr.read().split()) or "it printed no power"

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if self._is_closing:
                break
            if found := _COMBINED.match(line):
                self._samples.append((time.monotonic(), float(found[1]) / 1000))
                self._first.set()
        self._first.set()  # it ended, maybe without a sample

    def close(self) -> None:
        """End the command."""
        self._is_closing = True
        # A process of root's cannot be stopped from here, but it ends when nobody reads it.
        with suppress(PermissionError):
            self._process.terminate()
        self._reader.join()
        for stream in (self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()
        self._process.wait()

    def __enter__(self) -> "PowerMeter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _failed(why: str) -> DeviceError:
    return DeviceError(
        f"powermetrics gives no power ({why}); it needs macOS and root: run `sudo -v` first, or "
        "leave out --power"
    )
