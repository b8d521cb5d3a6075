"""`ds41 doctor`: whether this machine can run the model, and what to do where it cannot.

Owns what is checked and how it is judged; machine asks, memory and checkpoint know what is needed.
What cannot be checked is said to be so. Nothing heavy is imported before the command runs.
"""

import json
import os
import re
import socket
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast, get_args

import typer

from mlx_engine.cli.kv_disk import SPACE, kv_directory, parse_bytes
from mlx_engine.cli.machine import Machine
from mlx_engine.cli.options import ContextOption, folder
from mlx_engine.cli.serve import PORT
from mlx_engine.errors import CacheUnusable, ModelFileError
from mlx_engine.folders import expanded

if TYPE_CHECKING:
    from mlx_engine.config import ModelConfig
    from mlx_engine.memory import MachineMemory

Level = Literal["ok", "warning", "problem", "not checked"]

_COLOURS = {"ok": "green", "warning": "yellow", "problem": "red", "not checked": None}

# Older versions of Claude Code have not been run against the server.
_LEAST_CLAUDE = (2, 1, 112)

_PATIENCE_S = 3.0


@dataclass(frozen=True)
class Finding:
    """What was seen of one thing, and what to do about it where something is to be done."""

    what: str
    level: Level
    seen: str
    todo: str = ""


def doctor_command(
    model: Annotated[
        Path | None,
        typer.Option(
            parser=folder,
            metavar="DIR",
            envvar="DS41_MODEL",
            help="The checkpoint's folder, to be checked too.",
            show_default="the release as published",
        ),
    ] = None,
    ctx: ContextOption = None,
    port: Annotated[int, typer.Option(help="The port to serve at.", min=1, max=65535)] = PORT,
    kv_disk_dir: Annotated[
        str | None,
        typer.Option(
            metavar="DIR|none",
            help="The disk cache's folder.",
            show_default="kv in the cache folder",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check this machine, and say what to do.

    Looks at the system, Python, MLX and its device, the memory beside what
    the model needs, the disk, the model's files, the kernels, the port and
    Claude Code. Changes nothing. On a GPU the kernels are compiled and
    compared with MLX's operations, which can take a minute the first time.

    The exit code is 1 if there is a problem, and 0 if there are at most
    warnings: things that work, but not as well as they could, or not yet.
    """
    directory = None if model is None else expanded(model)
    checks = Checks(Machine(), directory, ctx, port, kv_directory(kv_disk_dir))
    findings: list[Finding] = []
    for finding in checks.run():
        findings.append(finding)
        if not as_json:
            _print(finding)
    counts = {level: sum(f.level == level for f in findings) for level in get_args(Level)}
    if as_json:
        record = {"findings": [asdict(f) for f in findings], "problems": counts["problem"]}
        typer.echo(json.dumps(record))
    else:
        levels = [(level, counts[level]) for level in ("problem", "warning") if counts[level]]
        counted = [f"{n} {level}{'' if n == 1 else 's'}" for level, n in levels]
        typer.echo(f"\n{' and '.join(counted) or 'nothing to do'}")
    if counts["problem"]:
        raise typer.Exit(1)


def _print(finding: Finding) -> None:
    level = typer.style(f"{finding.level:<12}", fg=_COLOURS[finding.level], bold=True)
    typer.echo(f"{level}{finding.what:<14}{finding.seen}")
    if finding.todo:
        typer.echo(f"{'':<26}to do: {finding.todo}")


@dataclass(frozen=True)
class Checks:
    """All checks of a machine for a model; `directory` None stands for the release as published.

    kv_directory: the disk cache's folder, None for no disk cache.
    """

    machine: Machine
    directory: Path | None
    context_tokens: int | None
    port: int
    kv_directory: Path | None

    def run(self) -> Iterator[Finding]:
        """Yield the findings as they are made."""
        yield self._system()
        yield self._python()
        mlx = self._mlx()
        yield mlx
        config: ModelConfig | None = None
        if mlx.level == "problem":
            for what in ("model", "memory", "kernels"):
                yield Finding(what, "not checked", "MLX has to start first")
        else:
            model, config = self._model()
            yield model
            yield from self._memory(config)
            yield self._kernels()
        yield from self._disks(config)
        yield self._port()
        yield self._claude()

    def _system(self) -> Finding:
        system = self.machine.system()
        if system.name == "Darwin":
            seen = f"macOS {system.version} on {system.processor}"
            if system.processor != "arm64":
                todo = "use a Python for arm64, on a Mac with Apple silicon"
                return Finding("system", "problem", seen, todo)
            if _numbers(system.version) < (14,):
                return Finding("system", "problem", seen, "update to macOS 14 or later")
            return Finding("system", "ok", seen)
        seen = f"{system.name} on {system.processor}"
        if system.name != "Linux" or system.processor not in ("x86_64", "aarch64", "arm64"):
            todo = "use a Mac with Apple silicon, or Linux on x86-64 or arm64"
            return Finding("system", "problem", seen, todo)
        seen += f", glibc {system.version}" if system.version else ", without glibc"
        if _numbers(system.version) < (2, 35):
            return Finding("system", "problem", seen, "use a system with glibc 2.35 or later")
        return Finding("system", "ok", seen)

    def _python(self) -> Finding:
        python = self.machine.system().python
        seen = ".".join(map(str, python))
        if (3, 11) <= python[:2] <= (3, 13):
            return Finding("Python", "ok", seen)
        return Finding("Python", "problem", seen, "use Python 3.11, 3.12 or 3.13")

    def _mlx(self) -> Finding:
        try:
            version = self.machine.mlx_version()
        except ImportError as error:
            todo = "install ds41 with one of the extras cpu, cuda12 and cuda13"
            if self.machine.system().name == "Darwin":
                todo = "install ds41 again"
            return Finding("MLX", "problem", f"it cannot start: {error}", todo)
        kind = self.machine.memory().kind
        seen = f"{version}, computes on {'the CPU' if kind == 'CPU' else f'a GPU by {kind}'}"
        if kind != "CPU":
            return Finding("MLX", "ok", seen)
        if self.machine.system().name == "Darwin":
            return Finding("MLX", "problem", seen, "run it where macOS gives Metal, not in a guest")
        todo = (
            "for the released model use a GPU: a Mac with Apple silicon, or the extra cuda12/cuda13"
        )
        return Finding("MLX", "warning", seen, todo)

    def _model(self) -> "tuple[Finding, ModelConfig | None]":
        """The finding on the model's files, and its configuration where that can be known."""
        from mlx_engine import memory
        from mlx_engine.checkpoint import find_problems
        from mlx_engine.config_file import load_config, released_config
        from mlx_engine.shards import list_tensors

        if self.directory is None:
            seen = "none is named: what follows is for the release as published"
            todo = "name its folder by --model or DS41_MODEL; ds41 download fetches it"
            return Finding("model", "not checked", seen, todo), released_config()
        again = f"ds41 download {self.directory} fetches what is missing of the release"
        try:
            listing, config = list_tensors(self.directory), load_config(self.directory)
        except ModelFileError as error:
            return Finding("model", "problem", str(error), again), None
        problems = find_problems(config, listing)
        if problems:
            more = f"; and {len(problems) - 2:,} more" if len(problems) > 2 else ""
            return Finding("model", "problem", f"{'; '.join(problems[:2])}{more}", again), config
        n_bytes = sum(location.n_bytes for location in listing.locations.values())
        files = {location.path for location in listing.locations.values()}
        seen = (
            f"{self.directory}: all {len(listing.locations):,} tensors in {len(files)} files, "
            f"{memory.format_bytes(n_bytes)}; what is in them is not read here"
        )
        return Finding("model", "ok", seen), config

    def _memory(self, config: "ModelConfig | None") -> Iterator[Finding]:
        from mlx_engine import memory

        machine = self.machine.memory()
        if config is None:
            yield Finding("memory", "not checked", "what the model needs is not known")
        else:
            limit = config.max_position_embeddings
            context_tokens = limit if self.context_tokens is None else self.context_tokens
            if not 1 <= context_tokens <= limit:
                seen = f"the context is {context_tokens:,} tokens, the model takes 1 to {limit:,}"
                yield Finding("memory", "problem", seen, "name another by --ctx")
            else:
                yield self._room_for(config, context_tokens, machine)
        if machine.kind != "Metal":
            yield Finding("wired limit", "not checked", "only macOS has one")
            return
        limit_mb = self.machine.output("sysctl", "-n", "iogpu.wired_limit_mb")
        if limit_mb is None:
            seen = "sysctl iogpu.wired_limit_mb says nothing here"
            yield Finding("wired limit", "not checked", seen)
        elif limit_mb == "0":
            seen = f"macOS's own, {memory.format_bytes(machine.usable_bytes)} for the GPU"
            yield Finding("wired limit", "ok", seen)
        else:
            seen = f"raised to {limit_mb} MB, until the next restart of this Mac"
            yield Finding("wired limit", "ok", seen)

    def _room_for(
        self, config: "ModelConfig", context_tokens: int, machine: "MachineMemory"
    ) -> Finding:
        from mlx_engine import memory

        needed = memory.needs(config, context_tokens)
        seen = f"{memory.describe(needed, context_tokens)}, {memory.describe_machine(machine)}"
        if needed.total_bytes <= machine.usable_bytes:
            return Finding("memory", "ok", seen)
        # Nobody who names no model has said that it is the release that is to run here.
        level: Level = "warning" if self.directory is None else "problem"
        todo = memory.remedy(config, needed, context_tokens, machine)
        return Finding("memory", level, seen, todo)

    def _kernels(self) -> Finding:
        if self.machine.memory().kind == "CPU":
            return Finding("kernels", "not checked", "they run on GPUs; MLX's operations compute")
        paths, said = self.machine.kernels()
        if not paths.off:
            return Finding("kernels", "ok", f"all {len(paths.on)} families agree with MLX")
        seen = f"off: {', '.join(paths.off)}; on: {', '.join(paths.on) or 'none'}"
        seen += f" ({'; '.join(said)})" if said else ""
        todo = "the answers are right but slower; please report this line"
        return Finding("kernels", "warning", seen, todo)

    def _disks(self, config: "ModelConfig | None") -> Iterator[Finding]:
        if self.directory is None:
            yield self._room_for_the_release()
        if self.kv_directory is None:
            yield Finding("disk cache", "ok", "off")
            return
        from mlx_engine.diskcache.store import FLOOR_BYTES, FLOOR_SHARE

        try:
            free_bytes, total_bytes = self.machine.space(_existing(self.kv_directory))
        except OSError as error:
            seen = f"{self.kv_directory} cannot be used: {error.strerror}"
            yield Finding("disk cache", "problem", seen, "name another by --kv-disk-dir, or none")
            return
        if refused := _refused(self.kv_directory):
            todo = "name another folder with --kv-disk-dir, or none"
            yield Finding("disk cache", "problem", refused, todo)
            return
        kept_bytes = min(int(total_bytes * FLOOR_SHARE), FLOOR_BYTES)
        room_bytes, space_bytes = free_bytes - kept_bytes, parse_bytes(SPACE)
        seen = f"{self.kv_directory}: {_gb(free_bytes)} free, {_gb(kept_bytes)} are left to others"
        if room_bytes < 0:
            yield Finding("disk cache", "warning", seen, "free some space: nothing is written")
        elif room_bytes < space_bytes:
            yield Finding("disk cache", "ok", f"{seen}, so it grows by {_gb(room_bytes)} at most")
        else:
            yield Finding("disk cache", "ok", f"{seen}, room for its {SPACE}")

    def _room_for_the_release(self) -> Finding:
        from mlx_engine.config_file import released_config
        from mlx_engine.download import MARGIN_BYTES
        from mlx_engine.inventory import tensor_specs

        n_bytes = sum(spec.n_bytes for spec in tensor_specs(released_config())) + MARGIN_BYTES
        here = Path.cwd()
        free_bytes, _ = self.machine.space(here)
        seen = f"{here}: {_gb(free_bytes)} free, a download of the release takes {_gb(n_bytes)}"
        if free_bytes < n_bytes:
            todo = "to download it, name a folder on a larger disk: ds41 download DIR"
            return Finding("disk", "warning", seen, todo)
        return Finding("disk", "ok", seen)

    def _port(self) -> Finding:
        try:
            socket.create_server(("127.0.0.1", self.port)).close()
            return Finding("port", "ok", f"{self.port} is free")
        except OSError as error:
            reason = error.strerror
        state = _server_state(self.port)
        if state is not None:
            return Finding("port", "ok", f"{self.port} has a ds41 serve, which is {state}")
        todo = "end the program that has it, or serve at another by --port"
        return Finding("port", "warning", f"{self.port} cannot be served: {reason}", todo)

    def _claude(self) -> Finding:
        program = self.machine.program("claude")
        install = "npm install -g @anthropic-ai/claude-code"
        if program is None:
            return Finding("Claude Code", "warning", "not on the PATH", f"to use it: {install}")
        said = self.machine.output(program, "--version") or ""
        version = re.search(r"\d+\.\d+\.\d+", said)
        if version is None:
            seen = f"{program} does not say its version"
            return Finding("Claude Code", "warning", seen, f"install it again: {install}")
        seen = f"{version[0]} at {program}"
        if _numbers(version[0]) < _LEAST_CLAUDE:
            least = ".".join(map(str, _LEAST_CLAUDE))
            todo = f"we have tried {least} and later: {install}"
            return Finding("Claude Code", "warning", seen, todo)
        return Finding("Claude Code", "ok", seen)


def _server_state(port: int) -> str | None:
    """What a server of ours at this port says of itself, None where there is none.

    Not by ask_status, for which a server may want its key.
    """
    connection = HTTPConnection("127.0.0.1", port, timeout=_PATIENCE_S)
    try:
        connection.request("GET", "/health")
        said = json.load(connection.getresponse())
    except (OSError, HTTPException, ValueError):
        return None
    finally:
        connection.close()
    state = cast("dict[str, object]", said).get("status") if isinstance(said, dict) else None
    return state if state in ("loading", "ready", "failed", "stopped") else None


def _refused(folder: Path) -> str | None:
    """Why a folder cannot be a cache's, None where nothing speaks against it."""
    from mlx_engine.diskcache.check import is_empty
    from mlx_engine.diskcache.files import Files
    from mlx_engine.diskcache.store import Store

    try:
        if not is_empty(folder):
            Store.existing(folder, Files())
    except CacheUnusable as error:
        return str(error).rstrip(".")
    above = _existing(folder)
    return None if os.access(above, os.W_OK) else f"{above} cannot be written to"


def _existing(folder: Path) -> Path:
    """The folder, or the one above it that is there."""
    return next(f for f in (folder.absolute(), *folder.absolute().parents) if f.is_dir())


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))


def _gb(n_bytes: int) -> str:
    return f"{n_bytes / 1e9:,.0f} GB"
