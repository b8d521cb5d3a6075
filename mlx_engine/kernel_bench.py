"""Each operation with kernels of ours: first compared with its reference, then timed.

Runs the cases of `kernel_cases` through a kernel factory, one after the other. A kernel whose
result is not its reference's is reported and not timed.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx

from mlx_engine.errors import DeviceError
from mlx_engine.kernel_cases import Case, Compute, Work, cases
from mlx_engine.kernel_inputs import Numbers, Sizes
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
_LIMITS = {mx.bfloat16: 2.0**-6, mx.float32: 2.0**-10, mx.int32: 0.01}
_PACKED_LIMIT = 0.01


@dataclass(frozen=True)
class Timing:
    """How long is measured: `chains` times a chain of calls that takes about `chain_s`."""

    chain_s: float = 0.1
    chains: int = 9
    most_calls: int = 512


@dataclass(frozen=True)
class Result:
    """What became of a case.

    `fault` says what is wrong with the kernel, and then there are no figures: seconds and joules of
    one call, launches of kernels in it, bytes that it must move. joules is None without a meter.
    """

    family: str
    name: str
    tokens: int
    per_token: float
    n_bytes: int
    fault: str = ""
    launches: int = 0
    seconds: float = 0.0
    joules: float | None = None

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
    """A kernel factory that counts the launches of what another one makes."""

    def __init__(self, factory: KernelFactory) -> None:
        self._factory = factory
        self.launches = 0

    def __call__(self, **arguments: Any) -> Callable[..., list[mx.array]]:
        kernel = self._factory(**arguments)

        def run(**call: Any) -> list[mx.array]:
            self.launches += 1
            return kernel(**call)

        return run


def _result(
    case: Case, work: Work, counter: _Counter, timing: Timing | None, meter: PowerMeter | None
) -> Result:
    about = (case.family, case.name, case.tokens, case.per_token, work.n_bytes)
    counter.launches = 0
    try:
        found = work.compute(work.x, 0)
        launches = counter.launches
        with launch.using(None):
            fault = _fault(found, work.compute(work.x, 0))
    except Exception as error:  # whatever a compiler or driver raises, the other kernels go on
        return Result(*about, fault=str(error).splitlines()[0] if str(error) else repr(error))
    if not launches:
        fault = "no kernel was launched"
    if fault:
        return Result(*about, fault=fault)
    seconds, joules = _measure(work, timing or Timing(), meter)
    return Result(*about, launches=launches, seconds=seconds, joules=joules)


def _fault(found: list[mx.array], wanted: list[mx.array]) -> str:
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


def _measure(work: Work, timing: Timing, meter: PowerMeter | None) -> tuple[float, float | None]:
    """Seconds and joules of one call: the median chain, less what links its calls."""
    _chain(work, work.compute, work.copies)  # every kernel compiled, every copy computed
    calls = max(2, work.copies)
    warm_s = _seconds(work, work.compute, calls) / calls
    calls = min(max(round(timing.chain_s / warm_s), 2), timing.most_calls)
    start_s = time.monotonic()
    chains = [_seconds(work, work.compute, calls) for _ in range(timing.chains)]
    end_s = time.monotonic()
    links = [_seconds(work, _nothing, calls) for _ in range(timing.chains)]
    with_links_s = statistics.median(chains) / calls
    seconds = with_links_s - statistics.median(links) / calls
    # A call too short for the clock takes at least a tenth of what was seen of it.
    seconds = max(seconds, with_links_s / 10)
    watts = None if meter is None else meter.watts(start_s, end_s)
    return seconds, None if watts is None else watts * seconds


def _nothing(x: mx.array, _: int) -> list[mx.array]:
    return [x]


def _seconds(work: Work, compute: Compute, calls: int) -> float:
    start_s = time.perf_counter()
    _chain(work, compute, calls)
    return time.perf_counter() - start_s


def _chain(work: Work, compute: Compute, calls: int) -> None:
    """Calls of which each needs the one before, so that none hides behind another."""
    x = work.x
    for call in range(calls):
        found = compute(x, call % work.copies)
        # Both branches are x, by a condition that is there only after the call.
        done = found[-1].reshape(-1)[:1].view(mx.uint8)[:1].view(mx.bool_)
        x = mx.where(done, x, x)
    mx.eval(x)
