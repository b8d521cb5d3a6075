"""Hosts: where the ranks of one model run, and how MLX makes a group of them.

Owns the host file, which is that of MLX's launcher, and the environment that MLX documents for each
back-end. Starts nothing and imports no MLX.
"""

import json
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast, get_args

from mlx_engine.errors import BadRequest

Backend = Literal["ring", "nccl", "jaccl"]
Address: TypeAlias = tuple[str, int]

LOCAL = "127.0.0.1"
# MLX's launcher begins there too.
PORT = 32323


@dataclass(frozen=True)
class Host:
    """Where one rank runs: `ssh` is whom to ask, `ip` where the others reach it.

    rdma: its device towards each rank, None towards itself, for JACCL. python and model: the
    interpreter and the checkpoint there, by default as on rank 0's machine.
    """

    ssh: str
    ip: str
    rdma: tuple[Any, ...] = ()
    python: str | None = None
    model: str | None = None

    @property
    def is_local(self) -> bool:
        """Whether this is the machine that starts the others."""
        return self.ssh in (LOCAL, "localhost")

    def is_same(self, other: "Host") -> bool:
        """Whether both are one machine, as far as their names tell."""
        return self.ssh == other.ssh or (self.is_local and other.is_local)


@dataclass(frozen=True)
class Environment:
    """What one rank needs to join: variables, and variables that name files with these contents.

    listens, reaches: the address that it opens, and that of another that it calls.
    """

    variables: Mapping[str, str]
    files: Mapping[str, str]
    listens: Address | None
    reaches: Address | None


@dataclass(frozen=True)
class Hosts:
    """The ranks' hosts in order, rank 0's first; `variables` are set for every rank.

    In rank 0 that is after its MLX was imported, and too late for what MLX reads by then.
    """

    hosts: tuple[Host, ...]
    backend: Backend
    ports: tuple[int, ...]
    variables: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def count(self) -> int:
        """The ranks."""
        return len(self.hosts)

    def environment(self, rank: int) -> Environment:
        """What a rank needs to join the others, by MLX's documentation of distributed."""
        at = [(host.ip, port) for host, port in zip(self.hosts, self.ports, strict=True)]
        variables = {**self.variables, "MLX_RANK": str(rank)}
        first = (at[0], None) if rank == 0 else (None, at[0])
        ip, port = at[0]
        if self.backend == "ring":
            nodes = json.dumps([[f"{ip}:{port}"] for ip, port in at])
            reaches = at[(rank + 1) % self.count]
            return Environment(variables, {"MLX_HOSTFILE": nodes}, at[rank], reaches)
        if self.backend == "nccl":
            variables |= {
                "MLX_WORLD_SIZE": str(self.count),
                "NCCL_HOST_IP": ip,
                "NCCL_PORT": str(port),
            }
            if rank:
                variables["CUDA_VISIBLE_DEVICES"] = self._gpu(rank)
            return Environment(variables, {}, *first)
        variables["MLX_JACCL_COORDINATOR"] = f"{ip}:{port}"
        devices = json.dumps([host.rdma for host in self.hosts])
        return Environment(variables, {"MLX_IBV_DEVICES": devices}, *first)

    def _gpu(self, rank: int) -> str:
        """The only one that a rank sees, since MLX computes on a process's first; rank 0 has 0."""
        host = self.hosts[rank]
        before = sum(each.is_same(host) for each in self.hosts[:rank])
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") if host.is_local else None
        if visible is None:
            return str(before)
        given = [each for each in visible.split(",") if each]
        if before >= len(given):
            raise BadRequest(
                f"rank {rank} has no GPU: CUDA_VISIBLE_DEVICES names {len(given)} of them "
                f"({visible}), so use as many devices or name more"
            )
        return given[before]


def local_hosts(count: int, backend: Backend) -> Hosts:
    """So many ranks on this machine, at ports that are free. Raises BadRequest for less than 1."""
    if count < 1:
        raise BadRequest(f"there are {count} devices, there must be at least 1")
    sockets = [socket.create_server((LOCAL, 0)) for _ in range(count)]
    ports = tuple(int(each.getsockname()[1]) for each in sockets)
    for each in sockets:
        each.close()
    return Hosts((Host(LOCAL, LOCAL),) * count, backend, ports)


def read_hosts(path: Path, local_backend: Backend) -> Hosts:
    """Read a host file; `local_backend` is taken where it names none and has no RDMA devices.

    It is a JSON list of hosts, each with "ssh" and "ips" and for JACCL with "rdma", or an object
    with "hosts", "backend" and "envs", as MLX's launcher reads it; beside these "port" is the first
    rank's, the next ones follow, and a host may have "python" and "model". Raises BadRequest.
    """
    try:
        data: Any = json.loads(path.read_text(encoding="utf-8-sig"))
        about = cast("dict[str, Any]", data if isinstance(data, dict) else {"hosts": data})
        hosts = tuple(_host(each) for each in about["hosts"])
        envs = dict(_variable(each) for each in about.get("envs", ()))
        port: Any = about.get("port", PORT)
        if type(port) is not int or not 1 <= port <= 2**16 - len(hosts):
            raise ValueError(f"the port is {port!r}")
    except OSError as error:
        raise BadRequest(f"the host file {path} cannot be read: {error.strerror}") from None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise BadRequest(
            f"the host file {path} is none ({type(error).__name__}: {error}): give a JSON list of "
            'objects like {"ssh": "mac2.local", "ips": ["10.0.0.2"]}'
        ) from None
    if not hosts or not hosts[0].is_local:
        raise BadRequest(
            f"the host file {path} must begin with this machine, where rank 0 runs: give it "
            f'"ssh": "{LOCAL}", and under "ips" the address at which the others reach it'
        )
    has_rdma = all(len(host.rdma) == len(hosts) for host in hosts)
    backend = about.get("backend") or ("jaccl" if has_rdma else local_backend)
    if backend not in get_args(Backend):
        names = ", ".join(get_args(Backend))
        raise BadRequest(f"the back-end in {path} is {backend!r}, it must be one of {names}")
    if backend == "jaccl" and not has_rdma:
        raise BadRequest(
            f"JACCL needs for every host in {path} an RDMA device towards each, null towards itself"
        )
    return Hosts(hosts, backend, tuple(range(port, port + len(hosts))), envs)


def _host(about: Mapping[str, Any]) -> Host:
    ssh = _text("ssh", about["ssh"])
    ips: object = about.get("ips") or [ssh]
    if not isinstance(ips, list):
        raise TypeError(f'"ips" is {ips!r}, which is no list')
    ip = _text("ips", cast("list[Any]", ips)[0])
    python, model = (
        None if about.get(key) is None else _text(key, about[key]) for key in ("python", "model")
    )
    return Host(ssh, ip, tuple(about.get("rdma") or ()), python, model)


def _text(what: str, value: object) -> str:
    if not isinstance(value, str) or not value or not value.isprintable():
        raise ValueError(f'"{what}" is {value!r}')
    return value


def _variable(given: object) -> tuple[str, str]:
    name, is_set, value = _text("envs", given).partition("=")
    if not name.isidentifier() or not is_set:
        raise ValueError(f"a variable is {given!r}, and not NAME=value")
    return name, value
