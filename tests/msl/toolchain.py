"""clang: which packages it needs, what it compiles a kernel with, and where results are kept.

Everything built lies in build/msl of the checkout, named by a hash of what it was made from, so
that tests may run side by side and nothing has to be cleaned. `DS41_EMULATOR_CACHE` names another
folder.
"""

import functools
import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx

from tests.msl.faults import CompileError

HERE = Path(__file__).resolve().parent
CACHE = Path(os.environ.get("DS41_EMULATOR_CACHE") or HERE.parents[1] / "build" / "msl")
MLX_INCLUDE = Path(str(mx.__file__)).parent / "include"
MLX_KERNELS = "mlx/backend/metal/kernels"
# What MLX puts before the source of a custom kernel.
PREAMBLE = f'#include "{MLX_KERNELS}/utils.h"\n'

PACKAGES = ("clang-19", "lld-19", "libclang-rt-19-dev", "llvm-19")
PROGRAMS = ("clang++-19", "ld.lld-19", "llvm-symbolizer-19")
CXX = "clang++-19"
COMPILE_LIMIT_S = 120

METAL_HEADERS = (
    "atomic common compute geometric integer limits math quadgroup relational simdgroup"
    " simdgroup_matrix stdlib type_traits"
).split()

DIALECT = (
    *("-std=c++17", "-ffreestanding", "-nostdlibinc", "-fno-lax-vector-conversions"),
    "-Wno-everything",
    # 0.5 is a float in Metal.
    *("-Xclang", "-cl-single-precision-constant"),
)
EXECUTABLE = (
    *DIALECT,
    *("-fno-pie", "-fno-exceptions", "-fno-rtti", "-fno-strict-aliasing", "-gline-tables-only"),
    # Rounding after every operation, as the types say.
    *("-ffp-contract=off", "-Xclang", "-ffloat16-excess-precision=none"),
    *("-Xclang", "-fbfloat16-excess-precision=none"),
    # A big frame must meet the guard page below the stack.
    "-fstack-clash-protection",
    # Loops that spin must spin, and lanes must not be led apart.
    *("-fno-finite-loops", "-fconvergent-functions"),
    # What nobody wrote is NaN.
    "-ftrivial-auto-var-init=pattern",
    *("-Werror=return-type", "-Werror=uninitialized"),
    # Unrolled loops take long to compile and compute the same; the strict pass sees the pragma.
    "-DDS41_UNROLL=",
)
UNCHECKED = ("-O2",)
CHECKED = (
    "-O1",
    *("-fsanitize=thread", "-mllvm", "-tsan-instrument-read-before-write"),
    *("-mllvm", "-tsan-instrument-func-entry-exit=0"),
    # Vectorised accesses have sizes that the sanitizer leaves out.
    *("-fno-vectorize", "-fno-slp-vectorize"),
    "-fsanitize=array-bounds,shift-exponent,integer-divide-by-zero,float-cast-overflow",
)
RUNTIME = ("-std=c++17", "-O2", "-g1", "-fno-pie", "-Wall", "-Wextra", "-Werror")


def unavailable() -> str | None:
    """The reason why kernels cannot be executed on this machine, or None."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return "Metal source is executed on Linux x86-64 only"
    if not all(shutil.which(program) for program in PROGRAMS) or not _builtins().exists():
        return f"executing Metal source needs the Debian packages {' '.join(PACKAGES)}"
    return None


@functools.cache
def _builtins() -> Path:
    """Conversions of half and bfloat that clang calls, from libclang-rt-19-dev."""
    command = [CXX, "--rtlib=compiler-rt", "--print-libgcc-file-name"]
    return Path(subprocess.run(command, capture_output=True, text=True).stdout.strip())


def digest(*parts: object) -> str:
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:24]


def write_once(path: Path, content: str) -> Path:
    """A file that appears complete or not at all, also when several processes write it."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            file.write(content)
        os.replace(file.name, path)
    return path


def clang(arguments: Sequence[object], *, source: str = "", refusal: bool = True) -> str:
    """Runs clang and returns its diagnostics; CompileError if it fails and `refusal` is set."""
    done = subprocess.run(
        [CXX, *map(str, arguments)],
        input=source,
        capture_output=True,
        text=True,
        timeout=COMPILE_LIMIT_S,
    )
    if refusal and done.returncode:
        raise CompileError(done.stderr[:8000])
    return done.stderr


def _build(path: Path, arguments: Sequence[object], source: str = "") -> Path:
    """What clang makes of the arguments, complete or not at all."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
        clang([*arguments, "-o", partial], source=source)
        os.replace(partial, path)
    return path


@functools.cache
def stamp() -> str:
    """Changes with everything that a result depends on besides its own source and options."""
    sources = [p for p in sorted(HERE.rglob("*")) if p.suffix in (".h", ".cpp")]
    compiler = subprocess.run([CXX, "--version"], capture_output=True, text=True, check=True).stdout
    texts = [f"{p.relative_to(HERE)}\n{p.read_text()}" for p in sources]
    return digest(compiler, version("mlx"), _machine(), DIALECT, RUNTIME, *texts)


@functools.cache
def _machine() -> tuple[str, ...]:
    flags = set(re.findall(r"\S+", Path("/proc/cpuinfo").read_text().partition("flags")[2][:4000]))
    # Conversions of half are calls without it.
    return ("-march=x86-64-v3",) if {"avx2", "bmi2", "f16c", "fma"} <= flags else ()


@functools.cache
def include_folder() -> Path:
    """The system headers of Metal by name, and those headers of MLX that need a change.

    Metal converts half to bfloat with a static_cast where clang wants a float in between.
    """
    folder = CACHE / f"include-{stamp()}"
    for name in METAL_HEADERS:
        write_once(folder / f"metal_{name}", '#include "msl_metal.h"\n')
    for name in ("fp4.h", "fp8.h"):
        text = (MLX_INCLUDE / MLX_KERNELS / name).read_text()
        cast = re.compile(r"static_cast<bfloat16_t>\((this->operator float16_t\(\))\)")
        write_once(folder / MLX_KERNELS / name, cast.sub(r"bfloat16_t(float(\1))", text))
    return folder


def include_flags(shim: str) -> tuple[str, ...]:
    folders = [HERE / shim, HERE / "shim", HERE / "runtime", include_folder(), MLX_INCLUDE]
    return tuple(f"-I{folder}" for folder in folders)


@functools.cache
def _precompiled_preamble(options: tuple[str, ...]) -> Path:
    path = CACHE / f"preamble-{digest(stamp(), *options)}.pch"
    # The stamp knows what the headers contain; when they were written does not matter.
    options = (*options, "-Xclang", "-fno-pch-timestamp")
    return _build(path, [*options, "-x", "c++-header", "-"], PREAMBLE)


@functools.cache
def _runtime() -> list[Path]:
    sources = sorted((HERE / "runtime").glob("*.cpp"))
    return [
        _build(CACHE / f"{source.stem}-{stamp()}.o", [*RUNTIME, *_machine(), "-c", source])
        for source in sources
    ]


def build_kernel(text: str, *, checked: bool) -> Path:
    """The program that runs one dispatch of the kernel in `text` (a whole translation unit)."""
    options = (*EXECUTABLE, *(CHECKED if checked else UNCHECKED), *_machine())
    program = CACHE / f"kernel-{digest(stamp(), text, *options)}"
    if program.exists():
        return program
    options = (*options, *include_flags("shim"))
    compiled = program.with_name(f"{program.name}.{os.getpid()}.o")
    preamble = ["-include-pch", _precompiled_preamble(options)]
    _build(compiled, [*options, *preamble, "-x", "c++", "-c", "-"], text)
    link = ["-fuse-ld=lld", "--rtlib=compiler-rt", "-no-pie", compiled, *_runtime(), "-lm"]
    _build(program, link)
    compiled.unlink()
    return program


@functools.cache
def locate(program: Path, address: int) -> str:
    """Where in the kernel's source an address of the program is: "name.metal:3", or "".

    No column, since rewriting moves what follows it in a line.
    """
    if not address:
        return ""
    command = ["llvm-symbolizer-19", f"--obj={program}", "--inlines", hex(address - 1)]
    frames = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
    places = (re.fullmatch(r"(?:.*/)?(.*\.metal:\d+):\d+", frame) for frame in frames)
    return next((place[1] for place in places if place), "")
