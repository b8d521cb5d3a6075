"""The strict pass refuses what it should and accepts what MLX and we write."""

import mlx.core as mx
import pytest

from tests.msl import source, strict
from tests.msl.emulator import EmulatedKernel, using
from tests.msl.faults import StrictError
from tests.msl.test_mlx_kernels import fp_quantized

pytestmark = pytest.mark.usefixtures("emulated_kernel")

BEGIN = "uint i = thread_position_in_grid.x;\n"
HEADER = """
inline float load(const device float* p) { return *p; }
template <typename U>
inline float load_shared(const threadgroup U* p) { return *p; }
inline void twice(thread float& x) { x *= 2; }
"""


def refusals(body: str, header: str = HEADER) -> tuple[str, ...]:
    text = EmulatedKernel("k", ["a", "b"], ["out"], BEGIN + body, header).text(
        [mx.zeros((64,)), mx.zeros((64,), mx.bfloat16)], [mx.float32], [("T", mx.float32)]
    )
    try:
        strict.check(text)
    except StrictError as error:
        return error.refusals
    return ()


# What is refused, a part of the message and, by its presence in the key, what is wrong.
BODIES = {
    "pointer without a space": ("const float* p = a + i; out[i] = *p;", "address space"),
    "private pointer without a space": (
        "float x[2] = {1, 2}; float* p = x; out[i] = p[1];",
        "no address space in 'float * p'",
    ),
    "reference without a space": ("const T& x = a[i]; out[i] = x;", "address space"),
    "device for threadgroup": (
        "threadgroup float t[64]; t[i] = 1; out[i] = load(t + i);",
        "no matching function for call to 'load'",
    ),
    "threadgroup for device, in a template": ("out[i] = load_shared(a + i);", "load_shared"),
    "cast to another space": ("out[i] = *(const threadgroup float*)(a + i);", "address space"),
    "cast that drops the space": ("out[i] = ((const uchar*)a)[i];", "address space"),
    "write to an input": ("a[i] = 1; out[i] = 0;", "read-only"),
    "double": ("double d = a[i]; out[i] = d;", "Metal has no double"),
    "std": ("out[i] = std::exp(a[i]);", "Metal has no std"),
    "new": ("thread float* p = new float[4]; out[i] = p[0];", "Metal has no new"),
    "goto": ("goto end; end: out[i] = 0;", "Metal has no goto"),
    "half and float in one call": ("out[i] = max(half(a[i]), 0.0f);", "ambiguous"),
    "int and uint in one call": ("out[i] = min(i, 5);", "ambiguous"),
    "a function of an integer": ("out[i] = exp(i);", "ambiguous"),
    "float becomes bfloat": ("bfloat x = a[i] * 2.0f; out[i] = x;", "'bfloat'"),
    "float becomes bfloat in an update": ("bfloat x = b[i]; x += a[i]; out[i] = x;", "'bfloat'"),
    "half becomes bfloat": ("half h = 1.0h; bfloat x = h; out[i] = x;", "bfloat"),
    "bfloat becomes half": ("half h = b[i]; out[i] = h;", "half"),
    "vectors of different types": ("int4 x = int4(1); float4 y = x; out[i] = y.x;", "float4"),
    "unsigned and signed vectors": ("uint4 x = uint4(1); int4 y = x; out[i] = y.x;", "int4"),
    "quotient of a pointer": ("out[i] = (a + i) / 2.0f;", "invalid operands"),
    "matrix of another type": (
        "simdgroup_matrix<half, 8, 8> m; simdgroup_load(m, a, 8); out[i] = 0;",
        "simdgroup_load",
    ),
}
HEADERS = {
    "parameter without a space": ("inline float f(const float* p) { return *p; }", "float * p"),
    "reference parameter without a space": (
        "inline void f(int n, float& x) { x = n; }",
        "float & x",
    ),
    "template parameter without a space": (
        "template <typename U> void f(vec<U, 4>& x, int n = 2) { x = n; }",
        "vec < U , 4 > & x",
    ),
    "global variable that is not constant": (
        "const float LUT[2] = {1, 2};\ninline float f(uint i) { return LUT[i & 1]; }",
        "program scope variable",
    ),
    "virtual": ("struct S { virtual float f() { return 1; } };", "Metal has no virtual"),
}


@pytest.mark.parametrize(("body", "message"), BODIES.values(), ids=BODIES.keys())
def test_body_is_refused(body: str, message: str) -> None:
    found = refusals(body)
    assert any(message in refusal and "k.metal:2" in refusal for refusal in found), found


@pytest.mark.parametrize(("header", "message"), HEADERS.values(), ids=HEADERS.keys())
def test_header_is_refused(header: str, message: str) -> None:
    found = refusals("out[i] = 0;", header + "\n")
    assert any(message in refusal and "k.header.metal:1" in refusal for refusal in found), found


ACCEPTED = {
    "spaces kept": "threadgroup T t[64], u[2]; t[i] = load(a + i); if (i == 0) u[0] = 1;"
    "threadgroup_barrier(mem_flags::mem_threadgroup);"
    "out[i] = load_shared(t) * 0.5 + u[0];",
    "half mixes with float": "half h = half(a[i]) * 2.0h; h = a[i]; out[i] = h + 1.0f;",
    "bfloat by cast": "bfloat x = static_cast<bfloat>(a[i]); x = bfloat(x * 2.0f); out[i] = x;",
    "vectors": "float4 v = float4(a[i], 1, 2, 3).wzyx; v = max(v, 0.0f) * 2; out[i] = dot(v, v);",
    "private pointers": "float x[4] = {a[i]}; thread float* p = x; twice(p[1]); out[i] = x[1];",
    "auto": "auto p = a + i; out[i] = *p; for (auto q = p; q < p + 1; q++) out[i] += q[0];",
    "lambda": "auto f = [&](float x) { return x + 1; }; out[i] = f(a[i]);",
    "wider words": "uint4 q = *(const device uint4*)(a + i / 4 * 4); out[i] = q.x;",
    "products": "int x = 2, y = 3; out[i] = x * y & x; for (x = 0; x * y < 9; x++) y *= 2;",
    "matrices": "simdgroup_matrix<T, 8, 8> m, n(1.0f); simdgroup_load(m, a, 8);"
    "simdgroup_multiply_accumulate(n, m, m, n); out[i] = n.thread_elements()[0];",
    "votes": "if (simd_all(simd_max(a[i]) > 0)) out[i] = simd_shuffle_down(a[i], 1);",
}


@pytest.mark.parametrize("body", ACCEPTED.values(), ids=ACCEPTED.keys())
def test_body_is_accepted(body: str) -> None:
    assert refusals(body) == ()


def test_kernels_of_mlx_are_accepted() -> None:
    for function in ("fp_qmv_fast_impl", "fp_qmv_impl"):
        body = (
            f"{function}<T, 32, 4>((const device uint*)a, (const device uchar*)a, nullptr, a, out,"
            "a_shape[0], a_shape[0], threadgroup_position_in_grid,"
            "simdgroup_index_in_threadgroup, thread_index_in_simdgroup);"
        )
        assert refusals(body, fp_quantized()) == ()


def test_kernel_that_is_refused_does_not_run_unless_asked_to() -> None:
    kernel = EmulatedKernel("k", ["a"], ["out"], BEGIN + "const float* p = a; out[i] = p[i];")

    def run() -> list[mx.array]:
        return kernel(
            inputs=[mx.arange(8, dtype=mx.float32)],
            grid=(8, 1, 1),
            threadgroup=(8, 1, 1),
            output_shapes=[(8,)],
            output_dtypes=[mx.float32],
        )

    with pytest.raises(StrictError, match="address space"):
        run()
    with using(strict=False):
        assert run()[0].tolist() == list(range(8))


def test_reading_ignores_comments_and_strings() -> None:
    text = '// new\n/* float* p = x; */ constant char s[] = "goto";\n'
    assert strict.read(text, "k") == []
    assert strict.read("\n\nasm(1);", "k.metal") == ["k.metal:3: Metal has no asm"]
    assert source.rewrite(text) == text
