"""One model over several devices, as commands name them: options, and the start of the others.

How the ranks work together is lead's part; which of them hold what, the model's.
"""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mlx_engine.errors import BadRequest
from mlx_engine.folders import cache_directory, expanded
from mlx_engine.ranks import STALL_S

if TYPE_CHECKING:
    from mlx_engine.hosts import Hosts
    from mlx_engine.lead import Lead
    from mlx_engine.loading import Dtype, OpenModel
    from mlx_engine.session import Prefill

DevicesOption = Annotated[
    int,
    typer.Option(
        metavar="N",
        min=1,
        help="Share the model among so many devices of this machine: its first N GPUs by NCCL.",
    ),
]
HostsOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Share the model among the machines of this host file, in the JSON of mlx.launch, "
        "this one first; the others are reached by ssh.",
    ),
]
StallOption = Annotated[
    float,
    typer.Option(
        metavar="SECONDS",
        min=1,
        help="End the run when one of several devices makes no progress for so long, or for 30 "
        "seconds while they start if that is longer.",
    ),
]


@dataclass(frozen=True)
class Spread:
    """The devices that share a model, None for a single one, and how long one may be waited for."""

    hosts: "Hosts | None" = None
    stall_s: float = STALL_S

    @classmethod
    def of(cls, devices: int, file: Path | None, stall_s: float) -> "Spread":
        """What the options say. Raises BadRequest for both at once, and as `read_hosts`."""
        if file is not None and devices > 1:
            raise BadRequest("--devices and --hosts are one or the other: give --hosts alone")
        if file is None and devices == 1:
            return cls()
        import mlx.core as mx

        from mlx_engine.hosts import local_hosts, read_hosts

        on_cuda = mx.default_device() == mx.gpu and mx.cuda.is_available()
        backend = "nccl" if on_cuda else "ring"
        hosts = (
            local_hosts(devices, backend) if file is None else read_hosts(expanded(file), backend)
        )
        return cls(hosts if hosts.count > 1 else None, stall_s)

    @property
    def count(self) -> int:
        """The devices."""
        return 1 if self.hosts is None else self.hosts.count

    @contextmanager
    def lead(
        self, opened: "OpenModel", dtype: "Dtype", prefill: "Prefill" = "short"
    ) -> "Generator[Lead | None]":
        """Start the other devices for a model; None for a single one. Raises what leading does."""
        if self.hosts is None:
            yield None
            return
        from mlx_engine import memory
        from mlx_engine.calls import Plan
        from mlx_engine.lead import leading

        plan = Plan(
            opened.checkpoint.directory.resolve(),
            opened.context_tokens,
            dtype,
            prefill,
            memory.CHUNK_TOKENS,
            memory.default_session_bytes(opened.config, opened.context_tokens),
            cache_directory(),
        )
        with leading(self.hosts, opened.checkpoint, plan, self.stall_s) as lead:
            yield lead
