"""Every kernel that the operations launch at the released widths compiles for A100 and H100."""

import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_engine.cuda import compiler
from mlx_engine.cuda.compiler import Usage
from mlx_engine.cuda.kernels import most_threads
from mlx_engine.errors import DeviceError
from tests.cuda.launches import Recorder, record

# Decode, a few rows, and prefill.
TOKENS = (1, 9, 2048)
# Kernels that share a multiprocessor's registers with a second block keep a few bytes elsewhere.
MOST_SPILLED_BYTES = 1024
# What a multiprocessor of an A100 has, of which each block takes 1 KiB for itself, and a block.
MULTIPROCESSOR_BYTES, BLOCK_BYTES, OWN_BYTES = 164 << 10, 163 << 10, 1 << 10


@dataclass(frozen=True)
class Function:
    """A kernel for some types: its text, and how many bytes its blocks ask for at their launch."""

    text: str
    dynamic_bytes: int
    blocks: int


def programs(tokens: Sequence[int], dtypes: Sequence[mx.Dtype]) -> dict[str, dict[str, Function]]:
    """By what stands before them, the kernels of a family that differ: functions by their names."""
    recorder = Recorder()
    record(recorder, tokens, dtypes)
    found: dict[str, dict[str, Function]] = defaultdict(dict)
    seen: set[str] = set()
    for kernel, call in recorder.calls:
        threads = most_threads(call["grid"], call["threadgroup"])
        name = f"{kernel.name}_{len(seen)}"
        arguments = call["inputs"], call["template"], threads, call["output_dtypes"]
        text = kernel.before() + kernel.function("", *arguments)
        if text not in seen:
            seen.add(text)
            function = kernel.function(name, *arguments)
            found[kernel.before()][name] = Function(function, kernel.shared_memory, kernel.blocks)
    return found


@pytest.fixture(autouse=True)
def _needs_compiler() -> None:  # pyright: ignore[reportUnusedFunction]
    reason = compiler.missing()
    if reason and os.environ.get("DS41_REQUIRE_NVRTC") == "1":
        pytest.fail(reason)
    if reason:
        pytest.skip(reason)


@pytest.mark.parametrize(
    ("architecture", "dtypes"),
    [("sm_80", (mx.bfloat16, mx.float32)), ("sm_90", (mx.bfloat16,))],
)
def test_every_kernel_compiles(architecture: str, dtypes: tuple[mx.Dtype, ...]) -> None:
    found: dict[str, Usage] = {}
    known: dict[str, Function] = {}
    for before, functions in programs(TOKENS, dtypes).items():
        source = before + "".join(function.text for function in functions.values()) + "}\n"
        found |= compiler.compiled(source, architecture)[1]
        known |= functions
    assert len(found) == len(known) > 60
    assert not {name: use for name, use in found.items() if use.spill_bytes > MOST_SPILLED_BYTES}
    assert max(use.shared_bytes for use in found.values()) <= 48 << 10
    for name, function in known.items():
        shared_bytes = found[name].shared_bytes + function.dynamic_bytes
        assert shared_bytes <= BLOCK_BYTES, name
        assert function.blocks * (shared_bytes + OWN_BYTES) <= MULTIPROCESSOR_BYTES, name


def test_cuda_says_what_is_wrong_with_a_source() -> None:
    with pytest.raises(DeviceError, match=r"undefined|not defined"):
        compiler.compiled("__global__ void f(float* x) { *x = nothing; }", "sm_80")


def test_machine_code_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS41_CACHE_DIR", str(tmp_path))
    source = 'extern "C" __global__ void f(float* x) { *x = 1.0f; }'
    code = compiler.cubin(source, "sm_80")
    monkeypatch.setattr(compiler, "compiled", None)
    assert compiler.cubin(source, "sm_80") == code
    assert [path.parent for path in tmp_path.rglob("*.cubin")] == [tmp_path / "cuda"]
    assert code.startswith(b"\x7fELF")
