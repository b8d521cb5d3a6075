"""What the server is at, as JSON: the model, each request, sessions, disk cache and memory.

The one source of the page at / and of `ds41 ps`. What requests say is never among it.
"""

import time
from dataclasses import asdict
from typing import Any

import mlx.core as mx

from mlx_engine import __version__, memory
from mlx_engine.job import Job
from mlx_engine.server.service import Service
from mlx_engine.worker import AnsweringEngine

_DISK_FIELDS = (
    *("anchors", "stored_tokens", "total_bytes", "space_bytes", "queued_bytes"),
    *("other_models_bytes", "foreign_bytes"),
    *("hits", "misses", "restored_tokens", "saved_bytes", "evicted", "evicted_bytes"),
    *("damaged", "faults", "notice"),
)


class Activity:
    """Reports on a service that begins now."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._started_s = time.monotonic()
        self._machine: memory.MachineMemory | None = None

    def report(self) -> dict[str, Any]:
        """All of it, requests at work first; times in seconds.

        `load` is None unless the model loads, and what only an engine can tell is None until then.
        """
        service, worker = self._service, self._service.worker
        done_bytes, total_bytes = worker.load_bytes
        is_loading = worker.state == "loading"
        return {
            "state": worker.state,
            "model": service.model_id,
            "model_name": service.model_name,
            "version": __version__,
            "context_tokens": service.context_tokens,
            "uptime_s": time.monotonic() - self._started_s,
            "load": {"done_bytes": done_bytes, "total_bytes": total_bytes} if is_loading else None,
            "jobs": [_job(job, worker.position(job)) for job in worker.jobs()],
            "counts": asdict(worker.counts),
            **self._of_engine(worker.engine),
        }

    def _of_engine(self, engine: AnsweringEngine | None) -> dict[str, Any]:
        if engine is None:
            return {"memory": None, "sessions": None, "disk_cache": None}
        disk = engine.disk_stats()
        return {
            "memory": self._memory(),
            "sessions": asdict(engine.session_stats()),
            "disk_cache": disk and {name: getattr(disk, name) for name in _DISK_FIELDS},
        }

    def _memory(self) -> dict[str, Any]:
        # Asked once an engine has set the device up, not before it and beside it.
        machine = self._machine = self._machine or memory.machine_memory()
        is_limited = machine.kind == "Metal"
        return {
            "kind": machine.kind,
            "active_bytes": mx.get_active_memory(),
            "spare_bytes": mx.get_cache_memory(),
            "peak_bytes": mx.get_peak_memory(),
            "limit_bytes": machine.usable_bytes if is_limited else machine.total_bytes,
        }


def _job(job: Job, position: int) -> dict[str, Any]:
    progress = job.progress
    return {
        "id": job.id,
        "state": job.state,
        "position": position,
        "age_s": time.monotonic() - job.created_s,
        "prompt_tokens": progress.total_tokens if progress else None,
        "cached_tokens": job.cached_tokens,
        "read_tokens": progress.done_tokens if progress else None,
        "read_tokens_per_s": job.prefill_tokens_per_s,
        "read_left_s": job.prefill_left_s,
        "completion_tokens": job.completion_tokens,
        "decode_tokens_per_s": job.decode_tokens_per_s,
    }
