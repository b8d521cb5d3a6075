"""What `ds41 doctor` asks of the machine that it runs on, in one place that tests can stand in for.

Only looks: nothing is changed, and no network is asked.
"""

import logging
import platform
import shutil
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module, metadata
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Generator

    from mlx_engine.memory import MachineMemory
    from mlx_engine.ops.launch import FastPaths

_PATIENCE_S = 10.0


@dataclass(frozen=True)
class System:
    """The operating system: `version` is macOS's own, or glibc's on Linux; "" where unknown."""

    name: str
    version: str
    processor: str
    python: tuple[int, int, int]


class Machine:
    """This machine."""

    def system(self) -> System:
        """What runs here."""
        name = platform.system()
        library, glibc = platform.libc_ver()
        version = platform.mac_ver()[0] if name == "Darwin" else glibc if library == "glibc" else ""
        return System(name, version, platform.machine(), sys.version_info[:3])

    def mlx_version(self) -> str:
        """MLX's version. Raises ImportError where it cannot start."""
        import_module("mlx.core")  # without its library this is what fails
        return metadata.version("mlx")

    def memory(self) -> "MachineMemory":
        """The memory, and what computes."""
        from mlx_engine.memory import machine_memory

        return machine_memory()

    def kernels(self) -> "tuple[FastPaths, list[str]]":
        """Which kernels agree with MLX's operations here, and what is said of the others."""
        from mlx_engine.ops import launch

        with _heard(logging.getLogger("mlx_engine.ops.launch")) as said:
            return launch.start_here(), said

    def space(self, folder: Path) -> tuple[int, int]:
        """Bytes that are free on the disk of a folder, and of that disk. Raises OSError."""
        usage = shutil.disk_usage(folder)
        return usage.free, usage.total

    def program(self, name: str) -> str | None:
        """Where a program is on the PATH."""
        return shutil.which(name)

    def output(self, *command: str) -> str | None:
        """What a program prints; None where it cannot be run, fails or takes long."""
        try:
            run = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_PATIENCE_S,
            )
        except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError):
            return None
        return run.stdout.strip() if run.returncode == 0 else None


@contextmanager
def _heard(log: logging.Logger) -> "Generator[list[str]]":
    """What a logger says in the meantime, kept instead of passed on."""
    said: list[str] = []

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    ear = Ear()
    log.addHandler(ear)
    was_passed_on, log.propagate = log.propagate, False
    try:
        yield said
    finally:
        log.removeHandler(ear)
        log.propagate = was_passed_on
