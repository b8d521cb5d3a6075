"""Short names for machine code, since MLX hashes all of a kernel's code at every launch.

That costs 4 us for 16 KB, as much as the rest of a launch. MLX first looks for a module in a folder
of its own, by the kernel's name and that hash (mlx/backend/cuda/jit_module.cpp), so code put there
is found by the hash of a few bytes. Where a trial launch says otherwise, MLX gets the code itself.
"""

import ctypes
import hashlib
import os
import tempfile
from collections.abc import Callable
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import mlx.core as mx

from mlx_engine.cuda import compiler

# The seed of std::hash in libstdc++.
_SEED = 0xC70F6907
_TRIAL = 'extern "C" __global__ void trial(float* out) { out[threadIdx.x] = 41.0f; }'


def handle(name: str, code: bytes, architecture: str) -> bytes:
    """What MLX must be given to run kernel `name` of a machine code: a short name, or the code."""
    return _put(name, code) if _are_found(architecture) else code


def _put(name: str, code: bytes) -> bytes:
    short = hashlib.sha256(code).hexdigest()[:16].encode()
    module = f"{name}_{_hash(short):x}"
    folder = _folder()
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / f"{module}.txt", f"{name}\t{name}\n".encode())
    _write(folder / f"{module}.ptx", code)
    return short


def _write(path: Path, content: bytes) -> None:
    # Other processes may read the folder at any time.
    part = path.with_name(f"{path.name}.{os.getpid()}")
    part.write_bytes(content)
    part.replace(path)


@cache
def _are_found(architecture: str) -> bool:
    code = compiler.cubin(_TRIAL, architecture)
    try:
        (out,) = cast(Callable[..., Any], mx.fast.precompiled_cuda_kernel)(
            name="trial",
            compiled_source=_put("trial", code),
            inputs=[],
            output_shapes=[(1,)],
            output_dtypes=[mx.float32],
            scalars=[],
            grid=(1, 1, 1),
            threadgroup=(1, 1, 1),
        )
        return bool(out.item() == 41.0)
    except (OSError, AttributeError, RuntimeError):
        return False


def _folder() -> Path:
    given = os.environ.get("MLX_PTX_CACHE_DIR")
    return Path(given) if given else Path(tempfile.gettempdir()) / "mlx" / version("mlx") / "ptx"


def _hash(text: bytes) -> int:
    """std::hash of a string."""
    function = ctypes.CDLL("libstdc++.so.6")["_ZSt11_Hash_bytesPKvmm"]
    function.restype = ctypes.c_size_t
    function.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t]
    return function(text, len(text), _SEED)
