"""NVIDIA's run-time compiler through ctypes, and the machine code it made before.

MLX would compile our kernels too, but with its own headers, which take seconds each, and anew in
every process. The library and CUDA's headers are those that MLX's CUDA build depends on.
"""

import ctypes
import hashlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from mlx_engine.errors import DeviceError
from mlx_engine.folders import cache_directory

_TOOLKIT = Path(os.environ.get("CUDA_HOME") or "/usr/local/cuda")
_FUNCTION = re.compile(r"(?:Function properties for|Compiling entry function) '?(\w+)")
_REGISTERS = re.compile(r"Used (\d+) registers")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_SHARED = re.compile(r"(\d+) bytes smem")


@dataclass(frozen=True)
class Usage:
    """What one kernel takes of a multiprocessor."""

    registers: int
    stack_bytes: int
    spill_bytes: int
    shared_bytes: int


def cubin(source: str, architecture: str) -> bytes:
    """Machine code of a source for an architecture such as sm_80, from the cache if it lies there.

    That is `cuda` in the cache folder. Raises DeviceError with what the compiler says.
    """
    key = hashlib.sha256(f"{architecture}\n{source}".encode()).hexdigest()
    folder = cache_directory() / "cuda"
    path = folder / f"{key}.cubin"
    if path.exists():
        return path.read_bytes()
    code, _ = compiled(source, architecture)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        part.write_bytes(code)
        part.replace(path)
    except OSError:
        pass  # without a cache the next process compiles again
    return code


def compiled(source: str, architecture: str) -> tuple[bytes, dict[str, Usage]]:
    """Machine code of a source, and what each of its kernels uses."""
    nvrtc, include = _library(), _include()
    if nvrtc is None or include is None:
        raise DeviceError(missing())
    program = ctypes.c_void_p()
    code = nvrtc.nvrtcCreateProgram(
        ctypes.byref(program), source.encode(), b"kernels.cu", 0, None, None
    )
    _check(code)
    try:
        options = [
            b"--device-as-default-execution-space",
            f"--gpu-architecture={architecture}".encode(),
            f"--include-path={include}".encode(),
            b"--ptxas-options=--verbose",
        ]
        code = nvrtc.nvrtcCompileProgram(
            program, len(options), (ctypes.c_char_p * len(options))(*options)
        )
        log = _text(program, "ProgramLog").decode()
        if code:
            raise DeviceError(f"CUDA's compiler refuses a kernel: {log}")
        return _text(program, "CUBIN"), dict(_usages(log))
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def missing() -> str:
    """What a kernel cannot be compiled without and is not here, or an empty string."""
    if _library() is None:
        return "CUDA's run-time compiler is missing: install nvidia-cuda-nvrtc"
    if _include() is None:
        return "CUDA's headers are missing: install nvidia-cuda-runtime and nvidia-cuda-crt"
    return ""


def _usages(log: str) -> Iterator[tuple[str, Usage]]:
    name, stack, spills = "", 0, 0
    for line in log.splitlines():
        if function := _FUNCTION.search(line):
            name = function[1]
        if found := _STACK.search(line):
            stack, spills = int(found[1]), int(found[2]) + int(found[3])
        if found := _REGISTERS.search(line):
            shared = _SHARED.search(line)
            yield name, Usage(int(found[1]), stack, spills, int(shared[1]) if shared else 0)


def _text(program: ctypes.c_void_p, what: str) -> bytes:
    nvrtc, size = _library(), ctypes.c_size_t()
    _check(getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _check(getattr(nvrtc, f"nvrtcGet{what}")(program, buffer))
    return buffer.raw if what == "CUBIN" else buffer.value


def _check(code: int) -> None:
    if code:
        raise DeviceError(f"CUDA's run-time compiler fails with code {code}")


@cache
def _library() -> ctypes.CDLL | None:
    for folder in (*_wheels("lib"), _TOOLKIT / "lib64"):
        for path in sorted(folder.glob("libnvrtc.so.*")):
            # The library looks for its other half by name alone.
            for builtins in folder.glob("libnvrtc-builtins.so.*"):
                ctypes.CDLL(str(builtins), ctypes.RTLD_GLOBAL)
            return ctypes.CDLL(str(path))
    return None


@cache
def _include() -> Path | None:
    folders = (*_wheels("include"), _TOOLKIT / "include")
    return next((f for f in folders if (f / "cuda_bf16.h").exists()), None)


def _wheels(part: str) -> list[Path]:
    """Folders of NVIDIA's wheels: nvidia/cu13/lib, or nvidia/cuda_nvrtc/lib for CUDA 12."""
    spec = find_spec("nvidia")
    places = spec.submodule_search_locations if spec else None
    return [folder for place in places or () for folder in sorted(Path(place).glob(f"*/{part}"))]
