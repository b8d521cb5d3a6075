"""The generated text is MLX's own, and rewriting it for C++ keeps its meaning and its lines."""

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import cast

import mlx.core as mx
import pytest

from tests.msl.conftest import KernelFactory
from tests.msl.emulator import EmulatedKernel
from tests.msl.faults import CompileError
from tests.msl.source import ATTRIBUTES, Template, generate, rewrite

EVERY_ATTRIBUTE = " ".join(name for name, _, _ in ATTRIBUTES)


def text_of_mlx(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    call: Callable[..., mx.array],
    *inputs: mx.array,
) -> str:
    """What MLX prints while it records a call in a graph, which needs no GPU."""
    capfd.readouterr()
    mx.export_function(str(tmp_path / "kernel.mlxfn"), call, *inputs)
    printed = re.search(r"```\n(.*)\n```", capfd.readouterr().out, re.DOTALL)
    assert printed is not None
    return printed[1]


@pytest.mark.parametrize("atomic_outputs", [False, True])
@pytest.mark.parametrize(
    "template",
    [
        [],
        [("T", mx.bfloat16)],
        [("T", mx.float16), ("N", -3), ("F", True), ("G", False), ("U", mx.uint8), ("B", mx.bool_)],
    ],
    ids=["none", "type", "several"],
)
@pytest.mark.parametrize(
    "source",
    [
        "uint i = thread_position_in_grid.x; out[i] = a[i];",
        f"// {EVERY_ATTRIBUTE}\na_shape; a_strides; a_ndim; small_shape; scalar_shape; b_ndim",
    ],
    ids=["plain", "everything"],
)
def test_text_is_that_of_mlx(
    source: str,
    template: Template,
    atomic_outputs: bool,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    arrays = [
        mx.zeros((4, 16), mx.float16),
        mx.zeros((7,), mx.uint32),
        mx.array(2.0),
        mx.zeros((8,), mx.bool_),
        mx.zeros((2, 3, 4), mx.int64),
        mx.zeros((1, 9), mx.int8),
        mx.zeros((), mx.bfloat16),
    ]
    input_names = ["a", "small", "scalar", "b", "c", "d", "e"]
    output_dtypes = [mx.float32, mx.uint8, mx.int16]
    kernel = cast(KernelFactory, mx.fast.metal_kernel)(
        name="k",
        input_names=input_names,
        output_names=["out", "second", "third"],
        source=source,
        header="// header\n",
        atomic_outputs=atomic_outputs,
    )

    def call(*inputs: mx.array) -> mx.array:
        return kernel(
            inputs=list(inputs),
            template=template or None,
            grid=(64, 1, 1),
            threadgroup=(32, 1, 1),
            output_shapes=[(64,)] * 3,
            output_dtypes=output_dtypes,
            verbose=True,
        )[0]

    ours = generate(
        name="k",
        input_names=input_names,
        output_names=["out", "second", "third"],
        source=source,
        header="// header\n",
        atomic_outputs=atomic_outputs,
        inputs=arrays,
        output_dtypes=output_dtypes,
        template=template,
    )
    assert ours.metal() == text_of_mlx(tmp_path, capfd, call, *arrays)


def test_python_numbers_become_the_scalars_that_mlx_makes_of_them(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], emulated_kernel: type[EmulatedKernel]
) -> None:
    def out_of(factory: KernelFactory, x: mx.array) -> mx.array:
        kernel = factory(
            name="k",
            input_names=["x", "f", "n", "b"],
            output_names=["out"],
            source="uint i = thread_position_in_grid.x; out[i] = x[i] * f + n + b;",
        )
        (out,) = kernel(
            inputs=[x, 1.5, 3, True],
            grid=(8, 1, 1),
            threadgroup=(8, 1, 1),
            output_shapes=[(8,)],
            output_dtypes=[mx.float32],
            verbose=True,
        )
        return out

    x = mx.arange(8, dtype=mx.float32)
    of_mlx = cast(KernelFactory, mx.fast.metal_kernel)
    theirs = text_of_mlx(tmp_path, capfd, functools.partial(out_of, of_mlx), x)
    out = out_of(emulated_kernel, x)
    assert theirs in capfd.readouterr().out
    assert out.tolist() == [1.5 * i + 4 for i in range(8)]


@pytest.mark.parametrize(
    ("metal", "cpp"),
    [
        (
            "threadgroup float t[8];",
            'auto& t = *msl::threadgroup_variable< float [8]>(0, "t");',
        ),
        (
            "{threadgroup T a[BM * (BK + 4)][f(2, 3)], b; }",
            '{auto& a = *msl::threadgroup_variable< T [BM * (BK + 4)][f(2, 3)]>(0, "a");'
            ' auto& b = *msl::threadgroup_variable< T >(1, "b"); }',
        ),
        (
            "threadgroup vec<T, 4> x[2];",
            'auto& x = *msl::threadgroup_variable< vec<T, 4> [2]>(0, "x");',
        ),
        ("threadgroup float* p = t;", "threadgroup float* p = t;"),
        ("f((threadgroup uint*)p, q);", "f((threadgroup uint*)p, q);"),
        (
            "void f(threadgroup T* a, const threadgroup U& b) {}",
            "void f(threadgroup T* a, const threadgroup U& b) {}",
        ),
        ("struct S { void f() threadgroup {} };", "struct S { void f() threadgroup {} };"),
        ("x = vec<T, 4>(1, 2, 3, 4);", "x = msl::make<vec<T, 4>>(1, 2, 3, 4);"),
        ("vec<T, 4> x = y; f<vec<T, 2>>(x);", "vec<T, 4> x = y; f<vec<T, 2>>(x);"),
        (
            "using T4 = vec<T, 4>; T4 x = T4(a, b);",
            "using T4 = vec<T, 4>; T4 x = msl::make<T4>(a, b);",
        ),
        ('// threadgroup float t;\n"vec<T, 2>(x)"', '// threadgroup float t;\n"vec<T, 2>(x)"'),
    ],
)
def test_rewriting(metal: str, cpp: str) -> None:
    def without_blanks(text: str) -> str:
        return re.sub(r"\s+", "", text)

    assert without_blanks(rewrite(metal)) == without_blanks(cpp)


def test_rewriting_keeps_lines() -> None:
    variables = "a;\nthreadgroup float t[\n  4\n],\n  u; // u\n"
    metal = variables + "#define X \\\n 1\n x = vec<T,\n 2>(\n0);\nend"
    assert rewrite(metal).split("\n").index("end") == metal.split("\n").index("end")


@pytest.mark.parametrize(
    "metal",
    ["alignas(16) threadgroup float t[4];", "threadgroup float t = 0;", "threadgroup float t"],
)
def test_unclear_threadgroup_variables_are_refused_rather_than_made_private(metal: str) -> None:
    with pytest.raises(CompileError, match="threadgroup"):
        rewrite(metal)
