"""What the emulator counts, what it refuses, and that nothing a kernel does reaches the tests."""

import mlx.core as mx
import numpy as np
import pytest

from tests.msl import conftest, emulator, toolchain
from tests.msl.emulator import Counts, EmulatedKernel, recording, using
from tests.msl.faults import CompileError, KernelFault, Kind
from tests.msl.memory import as_float64
from tests.msl.run_body import FLOATS, INTEGERS, run

pytestmark = pytest.mark.usefixtures("emulated_kernel")


def call(source: str, header: str = "", threads: int = 64) -> mx.array:
    return run(
        EmulatedKernel,
        source,
        [FLOATS],
        threads=threads,
        shape=(64,),
        dtype=mx.float32,
        header=header,
    )


def traffic() -> dict[str, Counts]:
    assert emulator.last_report is not None
    return dict(emulator.last_report.traffic)


def test_bytes_are_counted_in_all_and_once() -> None:
    call("out[i] = a[i] + a[i / 2] + a[63];")
    assert traffic() == {"a": Counts(3 * 256, 256, 0, 0), "out": Counts(0, 0, 256, 256)}
    call("if (i < 16) { float4 x = ((const device float4*)a)[i]; ((device float4*)out)[i] = x; }")
    assert traffic() == {"a": Counts(256, 256, 0, 0), "out": Counts(0, 0, 256, 256)}
    call("out[i] = 0; threadgroup_barrier(mem_flags::mem_device); if (i < 3) out[i] += a[2 * i];")
    assert traffic() == {"a": Counts(12, 12, 0, 0), "out": Counts(12, 12, 256 + 12, 256)}


def test_bytes_of_matrices_atomics_and_shapes_are_counted() -> None:
    source = (
        "simdgroup_matrix<float, 8, 8> m; simdgroup_load(m, a, 8);"
        "simdgroup_store(m, out, a_shape[0] / 8);"
    )
    run(EmulatedKernel, source, [FLOATS], threads=32, shape=(64,), dtype=mx.float32)
    assert traffic() == {
        "a": Counts(256, 256, 0, 0),
        "a_shape": Counts(32 * 4, 4, 0, 0),
        "out": Counts(0, 0, 256, 256),
    }
    source = "atomic_fetch_add_explicit(&out[i % 4], a[i], memory_order_relaxed);"
    run(
        EmulatedKernel,
        source,
        [INTEGERS],
        threads=64,
        shape=(4,),
        dtype=mx.int32,
        init_value=0,
        atomic_outputs=True,
    )
    assert traffic()["out"] == Counts(256, 16, 256, 16)


def test_report_of_a_dispatch() -> None:
    call("threadgroup float t[9], u; out[i] = 0;")
    report = emulator.last_report
    assert report is not None
    assert (report.kernel, report.threads, report.threadgroup_bytes) == ("known", 64, 48 + 16)
    assert (report.unique_bytes, report.total_bytes) == (256, 256)


def test_recording_keeps_every_report_of_its_block() -> None:
    with recording() as outer:
        with recording():
            pass
        call("out[i] = a[i];")
        with recording() as inner:
            call("out[i] = 1;")
    call("out[i] = 2;")
    assert [report.unique_bytes for report in outer] == [512, 256]
    assert inner == outer[1:]


def test_unchecked_run_counts_nothing_and_gives_the_same() -> None:
    checked = call("out[i] = simd_sum(a[i] * a[i]);")
    with using(checked=False):
        assert call("out[i] = simd_sum(a[i] * a[i]);").tolist() == checked.tolist()
    assert traffic() == {}


def test_no_report_is_left_of_a_kernel_that_failed() -> None:
    call("out[i] = 0;")
    with pytest.raises(KernelFault):
        call("out[i + 1] = 0;")
    assert emulator.last_report is None


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        ("out[i + (1 << 28)] = 0;", Kind.CRASH),
        ("((device float*)a)[i] = i; out[i] = 0;", Kind.CRASH),
        ("out[i] = 5 / int(a[i] * 0);", Kind.CRASH),
        ("while (a[0] == a[0]) {}", Kind.SPIN),
    ],
    ids=["far away", "input", "division", "loop"],
)
def test_crash_of_an_unchecked_kernel_is_a_fault_at_its_line(source: str, kind: Kind) -> None:
    with using(checked=False, strict=False, limit_s=1), pytest.raises(KernelFault) as caught:
        call(source)
    assert [(f.kind, f.where) for f in caught.value.faults] == [(kind, "known.metal:2")]


def test_child_that_cannot_stop_itself_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulator, "PATIENCE_S", -1)
    with using(limit_s=2), pytest.raises(KernelFault) as caught:
        call("while (true) {}")
    assert "killed after 1 seconds" in str(caught.value)


def test_compile_error_names_the_line() -> None:
    with using(strict=False), pytest.raises(CompileError, match=r"known\.metal:3:\d+: error: .*f'"):
        call("\nout[i] = f(a[i]);")
    with using(strict=False), pytest.raises(CompileError, match=r"known\.header\.metal:2"):
        call("out[i] = 0;", header="\n#error no\n")


def test_private_memory_that_nobody_wrote_is_refused_or_nan() -> None:
    with pytest.raises(CompileError, match="uninitialized"):
        call("float x; out[i] = x;")
    out = as_float64(call("float t[4]; t[i % 3] = a[i]; out[i] = t[i % 4];"))
    i = np.arange(64)
    np.testing.assert_array_equal(np.isnan(out), i % 3 != i % 4)


def test_second_call_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    first = call("out[i] = 3 * a[i];")

    def refuse(*_: object, **__: object) -> str:
        raise AssertionError("clang was started")

    monkeypatch.setattr(toolchain, "clang", refuse)
    assert call("out[i] = 3 * a[i];").tolist() == first.tolist()


def test_calls_that_mlx_refuses_are_refused() -> None:
    kernel = EmulatedKernel("k", ["a"], ["out"], "out[thread_position_in_grid.x] = a[0];")

    def run_with(
        inputs: int = 1, shapes: int = 1, dtypes: int = 1, grid: int = 4, threads: int = 4
    ) -> None:
        kernel(
            inputs=[FLOATS] * inputs,
            grid=(grid, 1, 1),
            threadgroup=(threads, 1, 1),
            output_shapes=[(4,)] * shapes,
            output_dtypes=[mx.float32] * dtypes,
        )

    run_with()
    with pytest.raises(ValueError, match="`inputs` to have size 1 but got size 2"):
        run_with(inputs=2)
    with pytest.raises(ValueError, match="`output_shapes` to have size 1 but got size 0"):
        run_with(shapes=0)
    with pytest.raises(ValueError, match="`output_dtypes` to have size 1 but got size 3"):
        run_with(dtypes=3)
    with pytest.raises(ValueError, match="1025"):
        run_with(threads=1025)
    with pytest.raises(ValueError, match="nothing to run"):
        run_with(grid=0)
    with pytest.raises(ValueError, match="at least one output"):
        EmulatedKernel("k", ["a"], [], "")
    with pytest.raises(TypeError, match="complex64"):
        kernel(
            inputs=[FLOATS.astype(mx.complex64)],
            grid=(4, 1, 1),
            threadgroup=(4, 1, 1),
            output_shapes=[(4,)],
            output_dtypes=[mx.float32],
        )


@pytest.mark.parametrize("required", [False, True])
def test_machine_without_the_compiler_skips_unless_it_is_required(
    required: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(toolchain, "PROGRAMS", ("no-such-compiler",))
    monkeypatch.setenv("DS41_REQUIRE_EMULATOR", str(int(required)))
    expected = pytest.fail.Exception if required else pytest.skip.Exception
    with pytest.raises(expected, match="clang-19 lld-19 libclang-rt-19-dev llvm-19"):
        conftest.require_emulator()
