"""What can be wrong with a kernel, as exceptions and as data.

The runtime (runtime/*.cpp) and the strict pass find the faults; this file only names them.
"""

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """The kinds of fault that the runtime reports, spelled as in its answer."""

    OUT_OF_BOUNDS = "out-of-bounds"
    MISALIGNED = "misaligned"
    READ_ONLY = "read-only"
    UNINITIALISED_READ = "uninitialised-read"
    UNWRITTEN_OUTPUT = "unwritten-output"
    RACE = "race"
    DIVERGENT_BARRIER = "divergent-barrier"
    DIVERGENT_SIMD = "divergent-simd"
    INACTIVE_LANE = "inactive-lane"
    THREADGROUP_MEMORY = "threadgroup-memory"
    UNDEFINED = "undefined"
    SPIN = "spin"
    CRASH = "crash"


@dataclass(frozen=True)
class Fault:
    """One fault: its kind, where in the source ("name.metal:3", empty if unknown) and what."""

    kind: Kind
    where: str
    message: str

    def __str__(self) -> str:
        return ": ".join(part for part in (self.where, self.kind.value, self.message) if part)


class KernelError(Exception):
    """A kernel that must not ship; the children say who refuses it."""


class CompileError(KernelError):
    """clang refuses the source: the message holds its diagnostics."""


class StrictError(KernelError):
    """The strict pass refuses what the emulator would have executed."""

    def __init__(self, refusals: tuple[str, ...]) -> None:
        super().__init__("\n".join(refusals))
        self.refusals = refusals


class KernelFault(KernelError):
    """The kernel did something wrong while it ran."""

    def __init__(self, name: str, faults: tuple[Fault, ...]) -> None:
        super().__init__("\n".join([f"kernel {name}:", *map(str, faults)]))
        self.faults = faults

    @property
    def kinds(self) -> set[Kind]:
        return {fault.kind for fault in self.faults}
