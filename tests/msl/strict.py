"""Refuses Metal source that the emulator could run but Apple's compiler would not take.

Three readings of the same text, each for what it can see:

1. Words and declarations: keywords that Metal has not; pointers and references without an address
   space.
2. C++ in which device, constant and threadgroup are address spaces: pointers that lose or change
   their space, const, ambiguous calls, implicit conversions between vectors and to bfloat.
3. C++ for OpenCL, of whose messages only the reliable ones are kept: casts between address spaces,
   global variables that are not constant.

What the bare headers of MLX provoke does not count. Limits: nothing here was verified with Apple's
compiler, and to pass does not mean to compile there. Not seen: a cast of a private pointer to one
without a space, constants that are converted to bfloat implicitly, recursion, resource limits of
a pipeline. Seen wrongly: a mixed call such as max(bfloat, float), which Metal resolves to float;
array parameters and methods qualified with device, constant or threadgroup.
"""

import functools
import re
from collections.abc import Sequence
from pathlib import Path

from tests.msl import toolchain
from tests.msl.faults import CompileError, StrictError
from tests.msl.source import TOKEN, KernelText, is_blank

AS_CPP = (
    *("-x", "c++", *toolchain.DIALECT),
    *("-Wimplicit-float-conversion", "-fsyntax-only"),
)
# A GPU target has both half and bfloat; without a generic space every pointer must name its own.
AS_OPENCL = (
    *("-x", "clcpp", "-cl-std=CLC++2021", "-cl-no-stdinc", "-fno-lax-vector-conversions"),
    *("-target", "amdgcn-amd-amdhsa", "-nogpulib", "-w", "-fsyntax-only"),
    "-Xclang",
    "-cl-ext=-__opencl_c_generic_address_space,-cl_khr_fp64,-__opencl_c_fp64,-__opencl_c_pipes,"
    "-__opencl_c_device_enqueue,-__opencl_c_images,-__opencl_c_read_write_images,"
    "-__opencl_c_3d_image_writes,-cl_khr_3d_image_writes",
)
RELIABLE_IN_OPENCL = re.compile(
    r"address space|program scope variable|not supported in C\+\+ for OpenCL|pointers to functions"
)
TO_BFLOAT = re.compile(
    r"loses floating-point precision: '[^']*'(?: \(aka[^)]*\))? to '(?:bfloat|__bf16)"
)

FORBIDDEN = {
    *("asm", "catch", "co_await", "co_return", "co_yield", "delete", "double", "dynamic_cast"),
    *("goto", "new", "noexcept", "std", "thread_local", "throw", "try", "typeid", "virtual"),
}
SPACES = {"constant", "device", "thread", "threadgroup", "threadgroup_imageblock", "ray_data"}
# What may stand before the type of a declaration.
SPECIFIERS = {"const", "constexpr", "inline", "static", "volatile"}


def check(kernel: KernelText) -> None:
    """Raises StrictError with every refusal; remembers, also on disk, what passed."""
    refusals = _refusals(kernel.instantiated(), kernel.name, kernel.header, kernel.source)
    if refusals:
        raise StrictError(refusals)


@functools.cache
def _refusals(text: str, name: str, header: str, source: str) -> tuple[str, ...]:
    rules = Path(__file__).read_text()
    mark = toolchain.CACHE / f"strict-{toolchain.digest(toolchain.stamp(), rules, text)}"
    if mark.exists():
        return ()
    found = [*read(header, f"{name}.header.metal"), *read(source, f"{name}.metal")]
    for options in (AS_CPP, AS_OPENCL):
        found += [m for m in _messages(text, options) if m not in _known(options)]
    if not found:
        toolchain.write_once(mark, "")
    return tuple(dict.fromkeys(found))


@functools.cache
def _known(options: tuple[str, ...]) -> frozenset[str]:
    return frozenset(_messages(toolchain.PREAMBLE, options))


def _messages(text: str, options: tuple[str, ...]) -> list[str]:
    flags = [*options, *toolchain.include_flags("strict_shim")]
    output = toolchain.clang(
        [*flags, "-ferror-limit=0", "-fno-caret-diagnostics", "-"], source=text, refusal=False
    )
    if "PLEASE submit a bug report" in output:
        raise CompileError(output[:8000])
    found: list[str] = []
    for line in output.splitlines():
        message = re.sub(r"^[^:]*/", "", line)
        is_kept = options is not AS_OPENCL or RELIABLE_IN_OPENCL.search(message)
        if (" error: " in message and is_kept) or TO_BFLOAT.search(message):
            found.append(re.sub(r" (error|warning): ", " ", message))
    return found


def read(text: str, file: str) -> list[str]:
    """What single words and declarations give away."""
    tokens: list[tuple[str, int]] = []
    line = 1
    for token in TOKEN.findall(text):
        if not is_blank(token) and not token.startswith(("#", '"', "'")):
            tokens.append((token, line))
        line += token.count("\n")
    words = [token for token, _ in tokens]
    found = [f"{file}:{line}: Metal has no {word}" for word, line in tokens if word in FORBIDDEN]
    for start, end in _declarations(words):
        if _lacks_address_space(words[start:end]):
            what = " ".join(words[start:end])
            found.append(f"{file}:{tokens[start][1]}: no address space in '{what}'")
    return found


def _declarations(words: Sequence[str]) -> list[tuple[int, int]]:
    """Ranges that may be declarations: beginnings of statements, and parameters of functions."""
    ranges: list[tuple[int, int]] = []
    for i, word in enumerate(words):
        before = words[i - 1] if i else ";"
        if before in (";", "{", "}") or (before == "(" and i > 1 and words[i - 2] == "for"):
            ranges.append((i, _end(words, i, (";", "=", "{", "(", ":"))))
        if word == "(" and _is_function(words, i):
            start = i + 1
            while words[start - 1] != ")":
                end = _end(words, start, (",", ")"))
                ranges.append((start, _end(words[:end], start, ("=", "["))))
                start = end + 1
    return ranges


def _end(words: Sequence[str], start: int, stops: tuple[str, ...]) -> int:
    """The first stop from `start` on that stands in no bracket."""
    depth = 0
    for i in range(start, len(words)):
        if depth == 0 and words[i] in stops:
            return i
        depth += words[i] in ("(", "[", "<")
        depth -= words[i] in (")", "]", ">")
    return len(words)


def _is_function(words: Sequence[str], opening: int) -> bool:
    """Whether the parameters of a function's definition start here: its body follows them."""
    closing = _end(words, opening + 1, (")",))
    after = words[closing + 1] if closing + 1 < len(words) else ""
    name = words[opening - 1] if opening else ""
    is_statement = name in ("if", "for", "while", "switch", "constexpr", ")", "]")
    return after in ("{", "thread", "const") and name.isidentifier() and not is_statement


def _lacks_address_space(words: Sequence[str]) -> bool:
    """Whether the words declare a named pointer or reference to a type without an address space."""
    rest = [word for word in words if word not in SPECIFIERS]
    if not rest or rest[0] in ("auto", "typedef", "using", "return", "template", "typename"):
        return False
    match = re.match(r"(?:\w+ :: )*\w+ (?:< .* > )?(?:[*&] )+\w+$", " ".join(rest))
    return match is not None and rest[0].isidentifier() and not SPACES & set(rest)
