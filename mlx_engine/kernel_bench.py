"""Each operation with kernels of ours: first compared with its reference, then timed.

Runs the cases of `kernel_cases` through a kernel factory, one after the other. A kernel whose
result is not its reference's is reported and not timed.
"""

import statistics
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import mlx.core as mx

from mlx_engine.errors import DeviceError
from mlx_engine.kernel_cases import Case, cases
from mlx_engine.kernel_inputs import Compute, Numbers, Sizes, Work
from mlx_engine.ops import launch
from mlx_engine.ops.launch import KernelFactory
from mlx_engine.power import PowerMeter

# GB/s as Apple publishes them, of the variant with most where a name has several.
PEAK_GB_S = {
    "Apple M1": 68,
    "Apple M1 Pro": 200,
    "Apple M1 Max": 400,
    "Apple M1 Ultra": 800,
    "Apple M2": 100,
    "Apple M2 Pro": 200,
    "Apple M2 Max": 400,
    "Apple M2 Ultra": 800,
    "Apple M3": 100,
    "Apple M3 Pro": 150,
    "Apple M3 Max": 400,
    "Apple M3 Ultra": 819,
    "Apple M4": 120,
    "Apple M4 Pro": 273,
    "Apple M4 Max": 546,
    "Apple M5": 153,
    "Apple M5 Pro": 307,
    "Apple M5 Max": 614,
}

# How far a result may be off: of its greatest value for numbers, or as the share that differs of
# ids and of the bytes of packed rows, where a sum in another order can move a value over a tie.
# bf16 allows four roundings of 2^-8, since a result has one or two behind it, and so has the
# reference; f32 what sums of 2^13 products in two orders may differ by, 2^-11 each.
_LIMITS = {mx.bfloat16: 2.0**-6, mx.float32: 2.0**-10, mx.int32: 0.01}
_PACKED_LIMIT = 0.01


@dataclass(frozen=True)
class Timing:
    """How long is measured: `chains` times a chain of calls that takes about `chain_s`.

    A chain goes through every copy at least once, and beyond that has `most_calls` at the most and
    outputs of `most_made_bytes`. With a meter more chains run for `power_s`, in which several of
    its samples fall.
    """

    chain_s: float = 0.1
    chains: int = 9
    most_calls: int = 2048
    most_made_bytes: int = 1 << 30
    power_s: float = 1.5


class Measured(NamedTuple):
    """Of one call: seconds of the device, and of the host to describe it to MLX; joules of both.

    `is_floored` says that the device's were too few for the clock: it took less than given here.
    """

    seconds: float
    host_s: float
    is_floored: bool
    joules: float | None


@dataclass(frozen=True)
class Result:
    """What became of a case: of one call the bytes that it must move, `launches` and `measured`.

    `touched_bytes` are the different ones of a chain. `fault` says what is wrong with the kernel,
    and then it was not measured.
    """

    family: str
    name: str
    tokens: int
    per_token: float
    n_bytes: int
    touched_bytes: int
    fault: str = ""
    launches: int = 0
    measured: Measured | None = None

    @property
    def seconds(self) -> float:
        return self.measured.seconds if self.measured else 0.0

    @property
    def joules(self) -> float | None:
        return self.measured.joules if self.measured else None

    @property
    def gb_per_s(self) -> float:
        return self.n_bytes / self.seconds / 1e9 if self.seconds else 0.0


def metal_factory() -> KernelFactory:
    """MLX's own kernels. Raises DeviceError where there is no Metal."""
    if not mx.metal.is_available():
        raise DeviceError(
            "the kernels are written in Metal, which this machine does not have: run this on a Mac "
            "with Apple silicon"
        )
    return mx.fast.metal_kernel  # pyright: ignore[reportReturnType]


def run(
    factory: KernelFactory,
    sizes: Sizes | None = None,
    timing: Timing | None = None,
    meter: PowerMeter | None = None,
) -> Iterator[Result]:
    """Check and time every case, one at a time, and yield what became of it."""
    sizes = sizes or Sizes()
    counter = _Counter(factory)
    with launch.using(counter):
        for case in cases(sizes):
            yield _result(case, case.prepare(sizes, case.tokens, Numbers()), counter, timing, meter)
            # The next case needs the memory.
            mx.clear_cache()


def totals(results: Sequence[Result]) -> tuple[float, float | None]:
    """Seconds and joules of the operations that a decode step calls: an estimate of a token's."""
    called = [result for result in results if result.per_token and not result.fault]
    joules = [result.joules for result in called]
    seconds = sum(result.per_token * result.seconds for result in called)
    if not joules or None in joules:
        return seconds, None
    return seconds, sum(result.per_token * (result.joules or 0) for result in called)


class _Counter:
    """A kernel factory that counts the launches of what another one makes.

    While it is checking, each is computed at once, so that a fault has the kernel's name.
    """

    def __init__(self, factory: KernelFactory) -> None:
        self._factory = factory
        self.launches = 0
        self.is_checking = False

    def __call__(self, **arguments: Any) -> Callable[..., list[mx.array]]:
        name = str(arguments["name"])
        with _named(name):
            kernel = self._factory(**arguments)

        def run(**call: Any) -> list[mx.array]:
            self.launches += 1
            if not self.is_checking:
                return kernel(**call)
            mx.eval(call["inputs"])
            with _named(name):
                outputs = kernel(**call)
                mx.eval(outputs)
            return outputs

        return run


@contextmanager
def _named(kernel: str) -> Generator[None]:
    """Say which kernel failed. Whatever a compiler or driver raises, the others go on."""
    try:
        yield
    except Exception as error:
        raise DeviceError(f"{kernel}: {launch.complaint(error)}") from error


def _result(
    case: Case, work: Work, counter: _Counter, timing: Timing | None, meter: PowerMeter | None
) -> Result:
    about = (case.family, case.name, case.tokens, case.per_token, work.n_bytes, work.touched_bytes)
    try:
        counter.launches, counter.is_checking = 0, True
        found = work.compute(work.inputs, 0)
        launches, counter.is_checking = counter.launches, False
        with launch.using(None):
            fault = fault_of(found, work.compute(work.inputs, 0))
        if not launches:
            fault = "no kernel was launched"
        if fault:
            return Result(*about, fault=fault)
        made_bytes = sum(array.nbytes for array in found)
        measured = _measure(work, made_bytes, timing or Timing(), meter)
    except DeviceError as error:
        return Result(*about, fault=str(error))
    except Exception as error:
        return Result(*about, fault=launch.complaint(error))
    return Result(*about, launches=launches, measured=measured)


def fault_of(found: list[mx.array], wanted: list[mx.array]) -> str:
    """How a result differs from the reference's, empty if it agrees."""
    for i, (ours, reference) in enumerate(zip(found, wanted, strict=True)):
        if (ours.shape, ours.dtype) != (reference.shape, reference.dtype):
            return f"output {i} is {ours.dtype} {ours.shape}, not {reference.dtype}"
        limit = _LIMITS.get(ours.dtype, _PACKED_LIMIT)
        difference = _difference(ours, reference)
        # Written so that a difference that is no number is a fault.
        if not difference <= limit:
            return f"output {i} differs from the reference by {difference:.2g} of at most {limit:g}"
    return ""


def _difference(ours: mx.array, reference: mx.array) -> float:
    if mx.issubdtype(ours.dtype, mx.floating):
        ours, reference = ours.astype(mx.float32), reference.astype(mx.float32)
        largest = mx.max(mx.abs(reference))
        off = mx.max(mx.abs(ours - reference)) / mx.maximum(largest, 1e-30)
        return cast(float, off.item())
    if ours.dtype == mx.int32:
        # Ids ascend: one that is missing would move all that follow.
        rows = zip(_id_rows(ours), _id_rows(reference), strict=True)
        return sum(len(set(a) - set(b)) for a, b in rows) / ours.size
    differing = ours.reshape(-1).view(mx.uint8) != reference.reshape(-1).view(mx.uint8)
    return cast(float, mx.mean(differing.astype(mx.float32)).item())


def _id_rows(ids: mx.array) -> list[list[int]]:
    rows: Any = ids.reshape(-1, ids.shape[-1] if ids.ndim else 1).tolist()
    return rows


def _measure(work: Work, made_bytes: int, timing: Timing, meter: PowerMeter | None) -> Measured:
    """The median chain, less what links its calls."""
    mx.eval(_chain(work, work.compute, work.copies))  # every kernel compiled, every copy computed
    calls = max(2, work.copies)
    warm_s = _timed(work, work.compute, calls).device_s / calls
    most = min(timing.most_calls, timing.most_made_bytes // made_bytes)
    calls = max(min(round(timing.chain_s / warm_s), most), calls)
    chains = [_timed(work, work.compute, calls) for _ in range(timing.chains)]
    links = [_timed(work, _nothing, calls) for _ in range(timing.chains)]
    with_links_s = statistics.median(chain.device_s for chain in chains) / calls
    seconds = with_links_s - statistics.median(link.device_s for link in links) / calls
    host_s = statistics.median(chain.host_s for chain in chains)
    host_s -= statistics.median(link.host_s for link in links)
    joules = None if meter is None else _joules(work, calls, timing.power_s, meter)
    # A call too short for the clock takes at least a tenth of what was seen of it.
    return Measured(
        max(seconds, with_links_s / 10),
        max(host_s, 0.0) / calls,
        seconds < with_links_s / 10,
        joules,
    )


class _Times(NamedTuple):
    """Seconds in which a chain was described to MLX, and in which it was computed."""

    host_s: float
    device_s: float


def _timed(work: Work, compute: Compute, calls: int) -> _Times:
    start_s = time.perf_counter()
    last = _chain(work, compute, calls)
    built_s = time.perf_counter()
    mx.eval(last)
    return _Times(built_s - start_s, time.perf_counter() - built_s)


def _joules(work: Work, calls: int, power_s: float, meter: PowerMeter) -> float | None:
    """Of one call, with the host's part in it and the link: mean power times time over calls.

    A chain is described while the one before it runs.
    """
    start_s, done, running = time.monotonic(), 0, work.inputs
    while time.monotonic() - start_s < power_s:
        following = _chain(work, work.compute, calls)
        mx.eval(running)
        mx.async_eval(following)
        done, running = done + calls, following
    mx.eval(running)
    end_s = time.monotonic()
    watts = meter.watts(start_s, end_s)
    return None if watts is None else watts * (end_s - start_s) / done


def _nothing(inputs: tuple[mx.array, ...], _: int) -> list[mx.array]:
    return list(inputs)


def _chain(work: Work, compute: Compute, calls: int) -> tuple[mx.array, ...]:
    """Calls of which each needs the one before, so that none hides behind another; not computed."""
    inputs = work.inputs
    for call in range(calls):
        found = compute(inputs, call % work.copies)
        # Both branches are the inputs, by a condition that is there only after the call.
        done = found[-1].reshape(-1)[:1].view(mx.uint8)[:1].view(mx.bool_)
        inputs = tuple(mx.where(done, x, x) for x in inputs)
    return inputs
