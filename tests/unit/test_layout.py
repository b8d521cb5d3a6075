"""The shape of the project: packages, import direction, file sizes, what a start-up imports.

Reads the sources and the packaging files; runs no model.
"""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from graphlib import TopologicalSorter
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS: dict[str, Any] = PROJECT["tool"]["setuptools"]
LOCK_FILES = ("requirements.lock", "requirements-dev.lock")

# Low to high. A module imports from its own row and the rows above it in this table.
RANKS = (
    ("errors", "host_memory"),
    ("diskcache", "cache_file", "folders", "json_file"),
    ("config", "layer_plan", "config_file", "formats"),
    ("hosts", "calls", "ranks"),
    ("inventory", "shards", "weights", "memory", "devices"),
    ("tensor_reader",),
    ("progress", "token_ids", "token_map", "tokenizer", "engram", "engram_table"),
    ("checkpoint", "tiny", "tiny_tokenizer", "download", "fingerprint"),
    ("metal", "cuda"),
    ("ops",),
    ("kernel_inputs", "power"),
    ("kernel_state_cases", "kernel_cases"),
    ("kernel_bench",),
    ("state", "state_transfer"),
    ("chunk", "step_chunk"),
    ("model",),
    ("decoder",),
    ("session", "full_logits"),
    ("identity", "joining", "lead"),
    ("sessions", "room", "saving", "live", "eviction"),
    ("turns", "sampling", "tool_calls", "prompt", "request", "answer", "respond"),
    ("engine",),
    ("loading",),
    ("follow",),
    ("__init__",),
    ("job",),
    ("worker",),
    ("server",),
    ("cli",),
)
RANK = {name: rank for rank, names in enumerate(RANKS) for name in names}

# They cost a second or more; only a command that needs one may import it.
SLOW_IMPORTS = {"mlx_lm", "transformers", "torch", "huggingface_hub"}

LOCAL_PATH = re.compile(
    r"(?<![\w.)}\]/-])/(?:work|root)/|\bshared/(?:spec|gpu|metal_on_cpu|\w+\.md)"
)


def package_folders() -> dict[str, Path]:
    """Every folder that holds package code, by its import name."""
    not_packages = {"tests", "bench", "build", "dist"}
    tops = {
        f"mlx_engine.{folder.name}": folder
        for folder in ROOT.iterdir()
        if (folder / "__init__.py").is_file() and folder.name not in not_packages
    }
    tops["mlx_engine"] = tops.pop("mlx_engine.mlx_engine")
    found = dict(tops)
    for name, top in tops.items():
        for source in top.rglob("*.py"):
            parts = source.parent.relative_to(top).parts
            found[".".join((name, *parts))] = source.parent
    return found


def modules() -> dict[str, Path]:
    """Every module of the package, by its import name; a package's name is its `__init__.py`."""
    found: dict[str, Path] = {}
    for package, folder in package_folders().items():
        for source in folder.glob("*.py"):
            found[package if source.stem == "__init__" else f"{package}.{source.stem}"] = source
    return found


MODULES = modules()


def imports(source: str, known: frozenset[str]) -> Iterator[str]:
    """The modules among `known` that `source` imports, at any depth of the code."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno} is a relative import"
            for alias in node.names:
                for name in (f"{node.module}.{alias.name}", str(node.module)):
                    if name in known:
                        yield name
                        break


def rank(module: str) -> int:
    parts = module.split(".")
    name = parts[1] if len(parts) > 1 else "__init__"
    assert name in RANK, f"{module} has no place in the import order: add it to RANKS"
    return RANK[name]


def test_every_package_directory_is_listed() -> None:
    folders = package_folders()
    assert set(folders) == set(SETUPTOOLS["packages"])
    for name, folder in folders.items():
        assert (folder / "__init__.py").is_file(), f"{folder} has modules but no __init__.py"
        mapped = SETUPTOOLS["package-dir"].get(name, name.replace(".", "/"))
        assert ROOT / mapped == folder


def test_the_type_checker_and_the_linter_know_every_mapped_folder() -> None:
    mapped = set(SETUPTOOLS["package-dir"].values())
    makefile = re.search(r"^MAPPED := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert makefile is not None
    ruff = PROJECT["tool"]["ruff"]["lint"]
    assert set(makefile[1].split()) == mapped
    assert set(ruff["flake8-tidy-imports"]["banned-api"]) == mapped
    assert mapped <= set(ruff["isort"]["known-third-party"])
    assert mapped <= set(PROJECT["tool"]["pyright"]["include"])


def test_imports_are_found_in_every_form() -> None:
    known = frozenset({"mlx_engine", "mlx_engine.errors", "mlx_engine.ops.norm"})
    source = (
        "import os, mlx_engine.ops.norm\n"
        "def f():\n    from mlx_engine import errors, load\n"
        "    from mlx_engine.errors import EngineError\n"
    )
    found = sorted(imports(source, known))
    assert found == [
        "mlx_engine",
        "mlx_engine.errors",
        "mlx_engine.errors",
        "mlx_engine.ops.norm",
    ]
    with pytest.raises(AssertionError, match="relative"):
        list(imports("from . import errors", known))


def test_every_name_in_the_import_order_is_a_module() -> None:
    assert set(RANK) == {name.partition(".")[2].partition(".")[0] or "__init__" for name in MODULES}


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_down(module: str) -> None:
    own = rank(module)
    found = imports(MODULES[module].read_text(), frozenset(MODULES))
    upward = [name for name in found if rank(name) > own]
    assert not upward, f"{module} imports what stands above it"


def test_imports_have_no_cycle() -> None:
    known = frozenset(MODULES)
    graph = {
        name: [found for found in imports(path.read_text(), known) if found != name]
        for name, path in MODULES.items()
    }
    TopologicalSorter(graph).prepare()


@pytest.mark.parametrize("module", MODULES)
def test_a_source_file_stays_short(module: str) -> None:
    assert len(MODULES[module].read_text().splitlines()) <= 400


@pytest.mark.parametrize(
    "start",
    [
        pytest.param("import mlx_engine", id="import"),
        pytest.param("from mlx_engine.cli.main import app; app(['--help'])", id="help"),
    ],
)
def test_a_start_imports_nothing_slow(start: str) -> None:
    report = (
        "import atexit, sys\n"
        f"atexit.register(lambda: print('slow:', *({SLOW_IMPORTS!r} & sys.modules.keys())))\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", report + start], capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-1].split() == ["slow:"]


def test_the_installed_command_is_the_declared_one() -> None:
    (command,) = metadata.entry_points(group="console_scripts", name="ds41")
    assert command.value == PROJECT["project"]["scripts"]["ds41"]
    assert metadata.version("ds41") == PROJECT["project"]["version"]


def locked(name: str) -> dict[str, tuple[str, list[str]]]:
    """Package -> (version, hashes) of a lock file."""
    entries = re.split(r"\n(?=[\w.-]+==)", (ROOT / name).read_text())[1:]
    pins: dict[str, tuple[str, list[str]]] = {}
    for entry in entries:
        pin = re.match(r"([\w.-]+)==([^\s;]+)", entry)
        assert pin is not None
        assert canonicalize_name(pin[1]) not in pins, f"{pin[1]} has two versions in {name}"
        hashes = re.findall(r"--hash=sha256:([0-9a-f]{64})\b", entry)
        pins[canonicalize_name(pin[1])] = (pin[2], hashes)
    return pins


@pytest.mark.parametrize("name", LOCK_FILES)
def test_a_lock_file_has_hashes_and_names_no_host(name: str) -> None:
    assert "://" not in (ROOT / name).read_text()
    pins = locked(name)
    assert pins
    assert [package for package, (_, hashes) in pins.items() if not hashes] == []


@pytest.mark.parametrize("name", LOCK_FILES)
def test_a_lock_file_holds_what_the_project_asks_for(name: str) -> None:
    groups = PROJECT["dependency-groups"]
    wanted = PROJECT["project"]["dependencies"] + groups["build"]
    if name == "requirements-dev.lock":
        wanted = wanted + groups["dev"]
    pins = locked(name)
    for requirement in map(Requirement, wanted):
        version, _ = pins.get(canonicalize_name(requirement.name), ("absent", []))
        assert version in requirement.specifier, f"{requirement} against {version}: make lock"


def test_the_lock_files_agree() -> None:
    runtime, development = (locked(name) for name in LOCK_FILES)
    assert runtime.items() <= development.items()


def test_local_paths_are_recognised() -> None:
    for path in ("/".join(("", "work", "main")), "/".join(("shared", "spec", "model.md"))):
        assert LOCAL_PATH.search(f"see '{path}'")
    assert not LOCAL_PATH.search("a/work/b, $(CURDIR)/root/, network/, shared/rows")


def test_no_file_names_a_local_path() -> None:
    try:
        listing = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    files = [ROOT / name for name in listing.stdout.split("\0") if name]
    assert files
    named = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in files
        if path.is_file()
        for match in LOCAL_PATH.finditer(path.read_text(errors="replace"))
    ]
    assert named == []
