"""Custom Metal kernels executed on the CPU: `EmulatedKernel` stands for `mx.fast.metal_kernel`.

The kernel's own source is compiled for this machine and run by a child process, which a crash or
an endless loop cannot outlive. What the kernel does wrong is raised as a KernelError. Results say
nothing about speed, and nothing here was compared with Apple's compiler or GPU: see README.md.
"""

import subprocess
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from math import prod
from pathlib import Path
from typing import TypeAlias

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from tests.msl import memory, source, strict, toolchain
from tests.msl.faults import Fault, KernelFault, Kind
from tests.msl.memory import Buffer

MAX_THREADS = 1024
MAX_THREADGROUP_BYTES = 32 << 10
# How much longer than its limit a child may take before it is killed.
PATIENCE_S = 10

Scalar: TypeAlias = bool | int | float


class Order(StrEnum):
    """In which order threads and threadgroups take turns."""

    FORWARD = "forward"
    REVERSE = "reverse"
    RANDOM = "random"


@dataclass(frozen=True)
class Settings:
    """How kernels are run: see `using`.

    Without `checked` there are no counters, and of the faults only crashes, endless loops,
    divergence and too much threadgroup memory are found.
    """

    checked: bool = True
    strict: bool = True
    order: Order = Order.FORWARD
    limit_s: int = 60


@dataclass(frozen=True)
class Counts:
    """Bytes that a kernel loaded from and stored to one buffer: in all, and different ones."""

    loaded: int
    loaded_unique: int
    stored: int
    stored_unique: int


@dataclass(frozen=True)
class Report:
    """What one dispatch did. `traffic` is by parameter and empty if it ran unchecked."""

    kernel: str
    threads: int
    threadgroup_bytes: int
    traffic: Mapping[str, Counts]

    @property
    def unique_bytes(self) -> int:
        """Bytes that must move at least once."""
        return sum(t.loaded_unique + t.stored_unique for t in self.traffic.values())

    @property
    def total_bytes(self) -> int:
        return sum(t.loaded + t.stored for t in self.traffic.values())


last_report: Report | None = None
_settings = Settings()
_recorders: list[list[Report]] = []


@contextmanager
def using(
    *,
    checked: bool | None = None,
    strict: bool | None = None,
    order: Order | None = None,
    limit_s: int | None = None,
) -> Generator[None]:
    """Runs kernels with other settings within the block."""
    global _settings
    before = _settings
    given = {"checked": checked, "strict": strict, "order": order, "limit_s": limit_s}
    _settings = replace(before, **{k: v for k, v in given.items() if v is not None})
    try:
        yield
    finally:
        _settings = before


@contextmanager
def recording() -> Generator[list[Report]]:
    """Yields a list to which every dispatch within the block adds its report."""
    reports: list[Report] = []
    _recorders.append(reports)
    try:
        yield reports
    finally:
        _recorders.pop()


class EmulatedKernel:
    """A custom kernel with the arguments, the call and the results of `mx.fast.metal_kernel`.

    It computes when it is called, so its inputs must not be tracers; compile_options and stream
    have no effect. Beside MLX's own errors a call raises CompileError, StrictError or KernelFault.
    """

    def __init__(
        self,
        name: str,
        input_names: Sequence[str],
        output_names: Sequence[str],
        source: str,
        header: str = "",
        ensure_row_contiguous: bool = True,
        atomic_outputs: bool = False,
        compile_options: object = None,
    ) -> None:
        if not output_names:
            raise ValueError("[metal_kernel] Must specify at least one output.")
        self.name = name
        self.input_names = tuple(input_names)
        self.output_names = tuple(output_names)
        self.source = source
        self.header = header
        self.ensure_row_contiguous = ensure_row_contiguous
        self.atomic_outputs = atomic_outputs

    def __call__(
        self,
        *,
        inputs: Sequence[mx.array | Scalar],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        template: source.Template | None = None,
        init_value: float | None = None,
        verbose: bool = False,
        stream: object = None,
    ) -> list[mx.array]:
        for given, names, what in (
            (inputs, self.input_names, "inputs"),
            (output_shapes, self.output_names, "output_shapes"),
            (output_dtypes, self.output_names, "output_dtypes"),
        ):
            if len(given) != len(names):
                raise ValueError(
                    f"[metal_kernel] Expected `{what}` to have size {len(names)}"
                    f" but got size {len(given)}."
                )
        if prod(threadgroup) > MAX_THREADS:
            raise ValueError(
                f"Thread group size ({prod(threadgroup)}) is greater than "
                f" the maximum allowed threads per threadgroup ({MAX_THREADS})."
            )
        if min(*grid, *threadgroup) < 1:
            raise ValueError(f"nothing to run: grid {grid}, threadgroup {threadgroup}")
        arrays = [_as_array(x) for x in inputs]
        text = self.text(arrays, output_dtypes, template or ())
        if verbose:
            print(f"Generated source code for `{self.name}`:\n```\n{text.metal()}\n```")
        buffers = [
            buffer
            for name, array in zip(self.input_names, arrays, strict=True)
            for buffer in memory.input_buffers(
                self.source, name, array, row_contiguous=self.ensure_row_contiguous
            )
        ]
        n_inputs = len(buffers)
        outputs = list(zip(self.output_names, output_shapes, output_dtypes, strict=True))
        buffers += [memory.output_buffer(*output, init_value) for output in outputs]
        if _settings.strict:
            strict.check(text)
        contents = _run(text, buffers, grid, threadgroup)
        return [
            memory.to_array(content, shape, dtype)
            for content, (_, shape, dtype) in zip(contents[n_inputs:], outputs, strict=True)
        ]

    def text(
        self,
        inputs: Sequence[mx.array],
        output_dtypes: Sequence[mx.Dtype],
        template: source.Template,
    ) -> source.KernelText:
        return source.generate(
            name=self.name,
            input_names=self.input_names,
            output_names=self.output_names,
            source=self.source,
            header=self.header,
            atomic_outputs=self.atomic_outputs,
            inputs=inputs,
            output_dtypes=output_dtypes,
            template=template,
        )


def _as_array(x: mx.array | Scalar) -> mx.array:
    if isinstance(x, bool | int | float):
        dtype = {bool: mx.bool_, int: mx.int32, float: mx.float32}[type(x)]
        return mx.array(x, dtype=dtype)
    return x


def _run(
    text: source.KernelText,
    buffers: Sequence[Buffer],
    grid: tuple[int, int, int],
    threadgroup: tuple[int, int, int],
) -> list[NDArray[np.uint8]]:
    """Runs one dispatch in a child process; returns what the buffers hold afterwards."""
    global last_report
    last_report = None
    program = toolchain.build_kernel(text.program(), checked=_settings.checked)
    size = [min(t, g) for t, g in zip(threadgroup, grid, strict=True)]
    with memory.shared_file(buffers) as file:
        job = [
            *file.lines,
            "grid {} {} {}".format(*grid),
            "threadgroup {} {} {}".format(*size),
            f"check {_settings.checked:d}",
            f"order {_settings.order}",
            f"limit {_settings.limit_s}",
        ]
        answer, died = _child(program, "\n".join(job), file.fd)
        contents = [file.read(i, buffer.content.size) for i, buffer in enumerate(buffers)]
    faults = [_fault(program, *fields) for kind, *fields in answer if kind == "fault"]
    traffic = {
        buffers[int(index)].name: Counts(*map(int, counts))
        for kind, index, *counts in answer
        if kind == "buffer" and _settings.checked
    }
    threadgroup_bytes = sum(int(line[1]) for line in answer if line[0] == "threadgroup")
    if threadgroup_bytes > MAX_THREADGROUP_BYTES:
        message = f"{threadgroup_bytes} bytes exceed {MAX_THREADGROUP_BYTES}"
        faults.append(Fault(Kind.THREADGROUP_MEMORY, "", message))
    if died and not faults:
        faults.append(Fault(Kind.CRASH, "", died))
    if ["end", "1"] in answer and traffic:
        faults += _unwritten(buffers, traffic)
    if faults:
        raise KernelFault(text.name, tuple(faults))
    last_report = Report(text.name, prod(grid), threadgroup_bytes, traffic)
    for reports in _recorders:
        reports.append(last_report)
    return contents


def _child(program: Path, job: str, fd: int) -> tuple[list[list[str]], str]:
    """The fields of the answer's lines, and how the child died if it did.

    It keeps the time limit itself, to say where it was; it is killed if it does not manage to.
    """
    patience_s = _settings.limit_s + PATIENCE_S
    try:
        done = subprocess.run(
            [program], input=job, capture_output=True, text=True, pass_fds=(fd,), timeout=patience_s
        )
    except subprocess.TimeoutExpired:
        return [], f"killed after {patience_s} seconds"
    died = f"exit status {done.returncode}: {done.stderr[:500]}" if done.returncode else ""
    return [line.split("\t") for line in done.stdout.splitlines()], died


def _fault(program: Path, kind: str, site: str, last_site: str, message: str) -> Fault:
    places = (toolchain.locate(program, int(address, 16)) for address in (site, last_site))
    return Fault(Kind(kind), next(filter(None, places), ""), message)


def _unwritten(buffers: Sequence[Buffer], traffic: Mapping[str, Counts]) -> Iterator[Fault]:
    for buffer in buffers:
        missing = buffer.content.size - traffic[buffer.name].stored_unique
        if buffer.writable and not buffer.initialised and missing:
            message = f"{missing} of {buffer.content.size} bytes of {buffer.name} are never written"
            yield Fault(Kind.UNWRITTEN_OUTPUT, "", message)
