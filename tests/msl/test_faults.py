"""Every detection, each with a kernel that commits the fault."""

from dataclasses import dataclass

import mlx.core as mx
import pytest

from tests.msl.emulator import EmulatedKernel, Order, using
from tests.msl.faults import KernelFault, Kind

pytestmark = pytest.mark.usefixtures("emulated_kernel")

BEGIN = "uint i = thread_position_in_grid.x; uint l = thread_position_in_threadgroup.x;\n"
TG_BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
DEVICE_BARRIER = "threadgroup_barrier(mem_flags::mem_device);"


@dataclass(frozen=True)
class Case:
    """A kernel over 64 threads; `where` is the place that the report must name."""

    kind: Kind
    source: str
    where: str = ""
    threadgroup: int = 64
    n_out: int = 64
    atomic_outputs: bool = False


def run(
    source: str,
    *,
    threads: int = 64,
    threadgroup: int = 64,
    n_out: int = 64,
    header: str = "",
    atomic_outputs: bool = False,
    init_value: float | None = None,
) -> mx.array:
    kernel = EmulatedKernel(
        "k", ["a"], ["out"], BEGIN + source, header, atomic_outputs=atomic_outputs
    )
    (out,) = kernel(
        inputs=[mx.arange(64, dtype=mx.float32)],
        grid=(threads, 1, 1),
        threadgroup=(threadgroup, 1, 1),
        output_shapes=[(n_out,)],
        output_dtypes=[mx.float32],
        init_value=init_value,
    )
    return out


FAULTS = {
    "write past the end": Case(Kind.OUT_OF_BOUNDS, "out[i + 1] = a[i];", "k.metal:2"),
    "write before the start": Case(Kind.OUT_OF_BOUNDS, "(out - 1)[i] = a[i];", "k.metal:2"),
    "read past the end": Case(Kind.OUT_OF_BOUNDS, "out[i] = a[i]\n + a[2 * i];", "k.metal:3"),
    "write half past the end": Case(
        Kind.OUT_OF_BOUNDS, "((device float2*)out)[i / 2] = a[i];", n_out=63
    ),
    "write far away": Case(Kind.OUT_OF_BOUNDS, "out[i + 100000000] = a[i];"),
    "past a threadgroup array": Case(
        Kind.OUT_OF_BOUNDS, "threadgroup float t[32]; t[i] = a[i]; out[i] = t[i];", "k.metal:2"
    ),
    "from one threadgroup array into another, by pointer": Case(
        Kind.OUT_OF_BOUNDS,
        "threadgroup float t[32]; threadgroup float u[64]; u[i] = 0;\n"
        "threadgroup float* p = t; p[i] = a[i]; out[i] = p[i] + u[i];",
        "k.metal:3",
    ),
    "past a private array": Case(
        Kind.OUT_OF_BOUNDS,
        "float t[4] = {a[i]}; t[(7 * i) % 9] = 1; out[i] = t[i % 4];",
        "k.metal:2",
    ),
    "past a constant table": Case(
        Kind.OUT_OF_BOUNDS, "constexpr float t[4] = {1, 2, 3, 4}; out[i] = t[i];", "k.metal:2"
    ),
    "private memory of another thread": Case(
        Kind.OUT_OF_BOUNDS,
        "threadgroup ulong shared[1]; float mine = a[i]; thread float* p = &mine;\n"
        f"if (i == 0) shared[0] = ulong(p); {TG_BARRIER}\n"
        "if (i == 1) *reinterpret_cast<thread float*>(shared[0]) = 2; out[i] = mine;",
        "k.metal:4",
    ),
    "misaligned vector": Case(
        Kind.MISALIGNED, "out[i] = ((const device float2*)(a + 1))[i / 4].x;", "k.metal:2"
    ),
    "write to an input": Case(
        Kind.READ_ONLY, "((device float*)a)[i] = 1; out[i] = 0;", "k.metal:2"
    ),
    "threadgroup memory that nobody wrote": Case(
        Kind.UNINITIALISED_READ,
        f"threadgroup float t[64]; if (i > 3) t[i] = a[i]; {TG_BARRIER} out[i] = t[63 - i];",
    ),
    "threadgroup memory that another threadgroup wrote": Case(
        Kind.UNINITIALISED_READ,
        f"threadgroup float t[32]; if (i < 32) t[l] = 1; {TG_BARRIER} out[i] = t[l];",
        threadgroup=32,
    ),
    "output read before it is written": Case(Kind.UNINITIALISED_READ, "out[i] += a[i];"),
    "atomic update of memory that nobody wrote": Case(
        Kind.UNINITIALISED_READ,
        "atomic_fetch_add_explicit(&out[i], a[i], memory_order_relaxed);",
        atomic_outputs=True,
    ),
    "output that is not written": Case(Kind.UNWRITTEN_OUTPUT, "if (i < 60) out[i] = a[i];"),
    "no barrier between write and read": Case(
        Kind.RACE, "threadgroup float t[64];\nt[i] = a[i]; out[i] = t[63 - i];", "k.metal:3"
    ),
    "no barrier between read and write": Case(
        Kind.RACE,
        f"threadgroup float t[64]; t[i] = a[i]; {TG_BARRIER}\n"
        f"float x = t[63 - i];\nt[i] = x;\n {TG_BARRIER} out[i] = t[i];",
        "k.metal:4",
    ),
    "a barrier that fences other memory": Case(
        Kind.RACE, f"threadgroup float t[64]; t[i] = a[i]; {DEVICE_BARRIER} out[i] = t[63 - i];"
    ),
    "device memory behind a barrier that fences threadgroup memory": Case(
        Kind.RACE,
        f"out[i] = a[i]; {TG_BARRIER} float x = out[63 - i]; {DEVICE_BARRIER} out[i] = x;",
    ),
    "a barrier of the simdgroup between simdgroups": Case(
        Kind.RACE,
        "threadgroup float t[64]; t[i] = a[i]; simdgroup_barrier(mem_flags::mem_threadgroup);"
        "out[i] = t[63 - i];",
    ),
    "a simd operation taken for a fence": Case(
        Kind.RACE,
        "threadgroup float t[64]; t[i] = a[i]; float s = simd_sum(a[i]); out[i] = s + t[i ^ 1];",
    ),
    "two threads write one element": Case(Kind.RACE, "out[i / 2] = a[i];", n_out=32),
    "two threadgroups write one element": Case(
        Kind.RACE, "out[l] = a[i];", threadgroup=32, n_out=32
    ),
    "one threadgroup reads what another writes": Case(
        Kind.RACE, "out[i] = a[i]; if (i == 40) out[i] += out[0];", threadgroup=32
    ),
    "a plain write beside an atomic one": Case(
        Kind.RACE,
        "threadgroup atomic_uint n[1]; atomic_store_explicit(n, 0u, memory_order_relaxed);\n"
        "if (i == 5) *(threadgroup uint*)n = 3; out[i] = 0;",
    ),
    "a barrier that some threads skip": Case(
        Kind.DIVERGENT_BARRIER, f"if (i < 32)\n {TG_BARRIER}\n out[i] = a[i];", "k.metal:3"
    ),
    "a barrier after some threads returned": Case(
        Kind.DIVERGENT_BARRIER, f"out[i] = a[i]; if (i == 63) return; {TG_BARRIER}"
    ),
    "two barriers for two halves": Case(
        Kind.DIVERGENT_BARRIER,
        f"if (i < 32) {{ {TG_BARRIER} out[i] = 1; }} else {{ {TG_BARRIER} out[i] = 2; }}",
    ),
    "simd_sum that some lanes skip": Case(
        Kind.DIVERGENT_SIMD,
        "float s = 0; if (i % 32 < 7)\n s = simd_sum(a[i]);\nout[i] = s;",
        "k.metal:3",
    ),
    "simd_sum after some lanes returned": Case(
        Kind.DIVERGENT_SIMD, "out[i] = 0; if (i >= 40) return; out[i] = simd_sum(a[i]);"
    ),
    "simdgroup_barrier that some lanes skip": Case(
        Kind.DIVERGENT_SIMD, "if (i & 1) simdgroup_barrier(mem_flags::mem_threadgroup); out[i] = 0;"
    ),
    "matrix product that some lanes skip": Case(
        Kind.DIVERGENT_SIMD,
        "simdgroup_matrix<float, 8, 8> m(1.0f); if (i % 32 < 31) simdgroup_multiply(m, m, m);"
        "out[i] = m.thread_elements()[0];",
    ),
    "shuffle from a lane that returned": Case(
        Kind.INACTIVE_LANE, "out[i] = 0; if (i % 32 == 3) return; out[i] = simd_shuffle(a[i], 3);"
    ),
    "shuffle from no lane": Case(Kind.INACTIVE_LANE, "out[i] = simd_shuffle(a[i], 32);"),
    "shuffle by different distances": Case(
        Kind.UNDEFINED, "out[i] = simd_shuffle_down(a[i], i == 5 ? 2 : 1);", "k.metal:2"
    ),
    "40 KiB of threadgroup memory": Case(
        Kind.THREADGROUP_MEMORY, "threadgroup float t[10240]; t[i] = a[i]; out[i] = t[i];"
    ),
    "40 KiB in two variables": Case(
        Kind.THREADGROUP_MEMORY,
        "threadgroup float t[5120], u[5120]; t[i] = u[i] = a[i]; out[i] = t[i];",
    ),
    "shift by too many bits": Case(Kind.UNDEFINED, "out[i] = 1u << i;", "k.metal:2"),
    "division by zero": Case(Kind.UNDEFINED, "out[i] = 5 / int(a[i]);", "k.metal:2"),
    "cast of a number that does not fit": Case(
        Kind.UNDEFINED, "out[i] = uint8_t(a[i] * 5.0f);", "k.metal:2"
    ),
    "a loop without end": Case(Kind.SPIN, "out[i] = 0; while (true) {}"),
    "waiting for another thread": Case(
        Kind.SPIN,
        "threadgroup atomic_uint n[1]; atomic_store_explicit(n, 0u, memory_order_relaxed);\n"
        "while (atomic_load_explicit(n, memory_order_relaxed) == 0) {}\n out[i] = 0;",
        "k.metal:3",
    ),
    "more private memory than there is": Case(
        Kind.CRASH,
        "float t[100000]; for (uint j = 0; j < 100000; j++) t[j] = a[i];\n"
        "out[i] = t[uint(a[3] * a[i])];",
    ),
}


@pytest.mark.parametrize("case", FAULTS.values(), ids=FAULTS.keys())
def test_fault_is_reported(case: Case) -> None:
    with pytest.raises(KernelFault) as caught, using(limit_s=1, strict=False):
        run(
            case.source,
            threadgroup=case.threadgroup,
            n_out=case.n_out,
            atomic_outputs=case.atomic_outputs,
        )
    assert case.kind in caught.value.kinds, str(caught.value)
    if case.where:
        places = {fault.where for fault in caught.value.faults if fault.kind is case.kind}
        assert case.where in places, str(caught.value)


CORRECT = {
    "barriers around a shared array": (
        f"threadgroup float t[64]; t[i] = a[i]; {TG_BARRIER} float x = t[63 - i];"
        f"{TG_BARRIER} t[i] = x; {TG_BARRIER} out[i] = t[63 - i];"
    ),
    "simdgroup_barrier within the simdgroup": (
        "threadgroup float t[64]; t[i] = a[i]; simdgroup_barrier(mem_flags::mem_threadgroup);"
        "float x = t[i ^ 31]; simdgroup_barrier(mem_flags::mem_threadgroup); t[i] = x;"
        "simdgroup_barrier(mem_flags::mem_threadgroup); out[i] = t[i ^ 31];"
    ),
    "a whole simdgroup skips a simd operation": (
        "out[i] = a[i]; if (i >= 32) return; out[i] = simd_shuffle_xor(a[31 - i], 31);"
    ),
    "everyone reads what one thread wrote": (
        f"threadgroup uint n; if (i == 63) n = 7; {TG_BARRIER} out[i] = a[i] + n - 7;"
    ),
    "a thread reads its own output": "out[i] = a[i] - 1; out[i] += 1;",
    "outputs exchanged through device memory": (
        f"out[i] = a[63 - i]; {DEVICE_BARRIER} float x = out[63 - i]; {DEVICE_BARRIER} out[i] = x;"
    ),
    "shuffles stop at the edge": (
        "float down = simd_shuffle_down(a[i], 1); float up = simd_shuffle_up(down, 1);"
        "out[i] = i % 32 == 0 ? a[i] : up;"
    ),
    "everyone counts": (
        "threadgroup atomic_uint n[2]; if (i < 2) atomic_store_explicit(n + i, 0u,"
        f"memory_order_relaxed); {TG_BARRIER}\n"
        "atomic_fetch_add_explicit(n + i / 32, 1u, memory_order_relaxed);"
        f"{TG_BARRIER} out[i] = a[i] * atomic_load_explicit(n, memory_order_relaxed) / 32;"
    ),
    "a loop of different lengths": (
        "float x = 0; for (uint j = 0; j < i; j++) x += 1; out[i] = x;"
    ),
}


@pytest.mark.parametrize("order", Order)
@pytest.mark.parametrize("source", CORRECT.values(), ids=CORRECT.keys())
def test_correct_kernel_is_accepted(source: str, order: Order) -> None:
    with using(order=order):
        assert run(source).tolist() == list(range(64))


@pytest.mark.parametrize("order", Order)
def test_order_shows_what_a_missing_barrier_does(order: Order) -> None:
    """Unchecked, the mistake is in the numbers: threads of another simdgroup have not written."""
    source = "threadgroup float t[64]; t[i] = a[i]; out[i] = t[63 - i];"
    with using(order=order, checked=False):
        assert run(source).tolist() != list(range(63, -1, -1))


def test_one_fault_is_reported_once_and_together_with_others() -> None:
    source = "threadgroup float t[64];\n t[i] = a[i];\n out[i] = t[63 - i];\n out[i] += 1 << i;"
    with pytest.raises(KernelFault) as caught:
        run(source)
    found = [(fault.kind, fault.where) for fault in caught.value.faults]
    assert sorted(found) == sorted(
        [
            (Kind.RACE, "k.metal:3"),
            (Kind.RACE, "k.metal:4"),
            (Kind.UNINITIALISED_READ, "k.metal:4"),
            (Kind.UNDEFINED, "k.metal:5"),
        ]
    )


def test_report_names_the_variable_and_the_thread() -> None:
    with pytest.raises(KernelFault, match=r"thread \(32,0,0\) of threadgroup \(0,0,0\).*tile"):
        run(
            "threadgroup float tile[32], other[32]; threadgroup float* p = tile; p[i] = 1;"
            "other[l % 32] = 1; out[i] = 0;"
        )


def test_fault_in_the_header_names_the_header() -> None:
    with pytest.raises(KernelFault) as caught:
        run(
            "out[i] = get(a + i);",
            header="\ninline float get(const device float* p) {\n return p[1]; }\n",
        )
    assert {fault.where for fault in caught.value.faults} == {"k.header.metal:3"}
