"""The text of a custom kernel: as MLX generates it, and as C++ that clang can compile.

MLX's rules are those of mlx/backend/common/metal_kernel.cpp
(https://github.com/ml-explore/mlx): the body is searched for names, and what it names becomes a
parameter. test_source.py holds the result to the text that MLX itself prints.
"""

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import mlx.core as mx

from tests.msl.faults import CompileError
from tests.msl.toolchain import PREAMBLE

Template: TypeAlias = Sequence[tuple[str, bool | int | mx.Dtype]]

# MLX passes smaller arrays in the constant address space.
SMALLEST_DEVICE_ARRAY = 8

METAL_TYPES = {
    mx.bool_: "bool",
    mx.uint8: "uint8_t",
    mx.uint16: "uint16_t",
    mx.uint32: "uint32_t",
    mx.uint64: "uint64_t",
    mx.int8: "int8_t",
    mx.int16: "int16_t",
    mx.int32: "int32_t",
    mx.int64: "int64_t",
    mx.float16: "float16_t",
    mx.bfloat16: "bfloat16_t",
    mx.float32: "float",
}

# Attribute, its type, and its value in terms of runtime/abi.h.
ATTRIBUTES = (
    ("dispatch_quadgroups_per_threadgroup", "uint", "(t->threads + 3) / 4"),
    ("dispatch_simdgroups_per_threadgroup", "uint", "t->simdgroups"),
    ("dispatch_threads_per_threadgroup", "uint3", "dispatched_threadgroup"),
    ("grid_origin", "uint3", ""),
    ("grid_size", "uint3", "threads_per_grid"),
    ("quadgroup_index_in_threadgroup", "uint", "t->index / 4"),
    ("quadgroups_per_threadgroup", "uint", "(t->threads + 3) / 4"),
    ("simdgroup_index_in_threadgroup", "uint", "t->simdgroup"),
    ("simdgroups_per_threadgroup", "uint", "t->simdgroups"),
    ("thread_execution_width", "uint", "MSL_LANES"),
    ("thread_index_in_quadgroup", "uint", "t->index % 4"),
    ("thread_index_in_simdgroup", "uint", "t->lane"),
    ("thread_index_in_threadgroup", "uint", "t->index"),
    ("thread_position_in_grid", "uint3", "position_in_grid"),
    ("thread_position_in_threadgroup", "uint3", "position_in_threadgroup"),
    ("threadgroup_position_in_grid", "uint3", "threadgroup_position"),
    ("threadgroups_per_grid", "uint3", "threadgroups_per_grid"),
    ("threads_per_grid", "uint3", "threads_per_grid"),
    ("threads_per_simdgroup", "uint", "MSL_LANES"),
    ("threads_per_threadgroup", "uint3", "threads_per_threadgroup"),
)


@dataclass(frozen=True)
class Parameter:
    """A parameter of the kernel's function and what the emulator passes for it."""

    declaration: str
    argument: str


@dataclass(frozen=True)
class KernelText:
    """One kernel, generated for given types."""

    name: str  # as given by the user; names the source in messages
    function: str
    header: str
    template: str  # "template <...>\n" or ""
    instance: str  # "<float, 3>" or ""
    parameters: tuple[Parameter, ...]
    source: str

    def _signature(self) -> str:
        declarations = ",\n".join(p.declaration for p in self.parameters)
        return f"{self.template}[[kernel]] void {self.function}(\n{declarations}) {{\n"

    def metal(self) -> str:
        """The text that MLX would hand to Apple's compiler, without its preamble."""
        text = f"{self.header}{self._signature()}{self.source}\n}}\n"
        if self.instance:
            f = self.function + self.instance
            text += f'\ntemplate [[host_name("{self.function}")]] [[kernel]] decltype({f}) {f};\n'
        return text

    def cpp(self) -> str:
        """The same as C++; compiler messages name NAME.metal and NAME.header.metal."""
        marked = (
            f'#line 1 "{self.name}.header.metal"\n{self.header}\n'
            f'#line 1 "{self.name}.signature.metal"\n{self._signature()}'
            f'#line 1 "{self.name}.metal"\n{self.source}\n}}\n'
        )
        return PREAMBLE + rewrite(marked)

    def program(self) -> str:
        """A translation unit whose entry runs one thread of the kernel."""
        arguments = ", ".join(p.argument for p in self.parameters)
        return self.cpp() + (
            '#line 1 "entry.cpp"\n'
            'extern "C" MSL_UNCHECKED void msl_entry(void* const* b, const msl_thread* t) {\n'
            f"  {self.function}{self.instance}({arguments});\n}}\n"
        )

    def instantiated(self) -> str:
        """A translation unit that only makes the compiler look at the kernel."""
        f = self.function + self.instance
        return self.cpp() + (f"template decltype({f}) {f};\n" if self.instance else "")


def generate(
    *,
    name: str,
    input_names: Sequence[str],
    output_names: Sequence[str],
    source: str,
    header: str,
    atomic_outputs: bool,
    inputs: Sequence[mx.array],
    output_dtypes: Sequence[mx.Dtype],
    template: Template,
) -> KernelText:
    """The kernel's text for these inputs and outputs; TypeError for a type it cannot take."""
    function = f"custom_kernel_{name}"
    if template:
        values = "_".join(_template_value(value) for _, value in template)
        function += f"__{values.replace('-', '_')}"
    parameters: list[Parameter] = []

    def add(declaration: str, cpp_type: str, reference: bool) -> None:
        index = len(parameters)
        value = f"({cpp_type}*)b[{index}]"
        parameters.append(
            Parameter(f"  {declaration} [[buffer({index})]]", f"*{value}" if reference else value)
        )

    for input_name, array in zip(input_names, inputs, strict=True):
        metal_type, is_scalar = metal_type_of(array.dtype), array.ndim == 0
        is_small = array.size < SMALLEST_DEVICE_ARRAY
        space = "constant" if is_small else "device"
        add(
            f"const {space} {metal_type}{'&' if is_scalar else '*'} {input_name}",
            f"const {metal_type}",
            is_scalar,
        )
        for suffix, info_type, mark in shape_parameters(source, input_name, array):
            full_name = f"{input_name}_{suffix}"
            add(f"const constant {info_type}{mark} {full_name}", f"const {info_type}", mark == "&")
        function += f"_{metal_type}{'s' if is_scalar else 'c' if is_small else ''}"
    for output_name, dtype in zip(output_names, output_dtypes, strict=True):
        metal_type = metal_type_of(dtype)
        function += f"_{metal_type}"
        metal_type = f"atomic<{metal_type}>" if atomic_outputs else metal_type
        add(f"device {metal_type}* {output_name}", metal_type, False)
    for attribute, attribute_type, value in ATTRIBUTES:
        if attribute in source:
            if attribute_type == "uint3":
                value = f"uint3(t->{value}.x, t->{value}.y, t->{value}.z)" if value else "uint3(0)"
            declaration = f"  {attribute_type} {attribute} [[{attribute}]]"
            parameters.append(Parameter(declaration, value))
    kinds = ", ".join(f"{_template_kind(value)} {key}" for key, value in template)
    return KernelText(
        name=name,
        function=function,
        header=header,
        template=f"template <{kinds}>\n" if template else "",
        instance=f"<{', '.join(_template_value(v) for _, v in template)}>" if template else "",
        parameters=tuple(parameters),
        source=source,
    )


def metal_type_of(dtype: mx.Dtype) -> str:
    if dtype not in METAL_TYPES:
        raise TypeError(f"the emulator has no arrays of {dtype}")
    return METAL_TYPES[dtype]


def shape_parameters(source: str, name: str, array: mx.array) -> list[tuple[str, str, str]]:
    """Suffix, type and pointer or reference mark of what the body asks to know of an input."""
    if array.ndim == 0:
        return []
    known = (("shape", "int", "*"), ("strides", "int64_t", "*"), ("ndim", "int", "&"))
    return [entry for entry in known if f"{name}_{entry[0]}" in source]


def _template_kind(value: bool | int | mx.Dtype) -> str:
    return "bool" if isinstance(value, bool) else "int" if isinstance(value, int) else "typename"


def _template_value(value: bool | int | mx.Dtype) -> str:
    return str(int(value)) if isinstance(value, int) else metal_type_of(value)


TOKEN = re.compile(
    r"//[^\n]*|/\*.*?\*/"  # comments
    r"|#(?:\\\n|[^\n])*"  # preprocessor lines
    r"|\"(?:\\.|[^\"\\])*\"|'(?:\\.|[^'\\])*'"
    r"|[A-Za-z_]\w*|\d[\w.]*|::|\s+|.",
    re.DOTALL,
)
OPENING, CLOSING = "([{<", ")]}>"


def is_blank(token: str) -> bool:
    return token.isspace() or token.startswith(("//", "/*"))


def rewrite(text: str) -> str:
    """Replaces the two things that C++ cannot express; every line keeps its number.

    A variable in threadgroup memory becomes a reference to an object of the whole threadgroup, and
    vec<T, N>(...), also by another name, becomes a call that makes a vector.
    """
    tokens = TOKEN.findall(text)
    aliases = set(re.findall(r"\busing\s+(\w+)\s*=\s*(?:metal\s*::\s*)?vec\s*<", text))
    aliases |= set(re.findall(r"\btypedef\s+(?:metal\s*::\s*)?vec\s*<[^;]*>\s*(\w+)\s*;", text))
    numbers = itertools.count()
    out: list[str] = []
    before = ";"  # the last token that is neither blank nor a preprocessor line
    at = 0
    while at < len(tokens):
        token, end = tokens[at], at + 1
        if token == "threadgroup":
            end = _declaration_end(tokens, at)
            declaration = "".join(tokens[at + 1 : end])
            if _is_variable(declaration, before, tokens[end]):
                token = _shared_variables(declaration, numbers)
            else:
                end = at + 1
        elif token == "vec" and before != "operator":
            end = _after_angles(tokens, at + 1)
            vector = "".join(tokens[at:end])
            is_call = "".join(tokens[end : end + 2]).lstrip()[:1] == "("
            token = f"msl::make<{vector}>" if is_call else vector
        elif token in aliases and "".join(tokens[end : end + 2]).lstrip()[:1] == "(":
            token = f"msl::make<{token}>"
        out.append(token)
        last = tokens[end - 1]
        if not is_blank(last) and not last.startswith("#"):
            before = last
        at = end
    return "".join(out)


def _after_angles(tokens: Sequence[str], at: int) -> int:
    """The index behind the template arguments that start at `at`, or `at` if none do."""
    first = next((i for i in range(at, len(tokens)) if not tokens[i].isspace()), len(tokens))
    if first == len(tokens) or tokens[first] != "<":
        return at
    depth = 0
    for i in range(first, len(tokens)):
        depth += (tokens[i] == "<") - (tokens[i] == ">")
        if depth == 0:
            return i + 1
    return at


def _declaration_end(tokens: Sequence[str], at: int) -> int:
    """The index of the token that ends the declarator list or the parameter after `at`."""
    depth = 0
    for i in range(at + 1, len(tokens)):
        if depth == 0 and tokens[i] in (";", "=", "{", ")", ">"):
            return i
        depth += tokens[i] in OPENING
        depth -= tokens[i] in CLOSING
    raise CompileError("the source ends in a declaration in threadgroup memory")


def _is_variable(declaration: str, before: str, end: str) -> bool:
    """Whether the words behind `threadgroup` declare variables; CompileError if that is unclear.

    Otherwise they are the target of a pointer or reference, or the word qualifies a method.
    """
    first = _split_at_commas(declaration)[0].partition("[")[0]
    if "*" in first or "&" in first or not first.strip():
        return False
    if before in (";", "{", "}") and end == ";":
        return True
    words = f"threadgroup{declaration}{end}".strip()
    raise CompileError(f"threadgroup variables must be plain statements: {words}")


def _shared_variables(declaration: str, numbers: "itertools.count[int]") -> str:
    first, *others = _split_at_commas(declaration)
    match = re.match(r"(\s*.*?)(\w+\s*(?:\[.*)?)$", first.rstrip(), re.DOTALL)
    if match is None:
        raise CompileError(f"not understood: threadgroup{declaration};")
    statements: list[str] = []
    for declarator in [match[2], *others]:
        name, bracket, bounds = declarator.strip().partition("[")
        name = name.strip()
        shared = f"msl::threadgroup_variable<{match[1]}{bracket}{bounds}>"
        statements.append(f'auto& {name} = *{shared}({next(numbers)}, "{name}")')
    text = "; ".join(statements)
    return text + "\n" * (declaration.count("\n") - text.count("\n"))


def _split_at_commas(text: str) -> list[str]:
    """The parts between commas that stand in no bracket, without comments."""
    parts, depth = [""], 0
    for token in TOKEN.findall(text):
        depth += token in OPENING
        depth -= token in CLOSING
        if token == "," and depth == 0:
            parts.append("")
        elif not token.startswith(("//", "/*")):
            parts[-1] += token
    return parts
