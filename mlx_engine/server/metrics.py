"""What the server is at, for those who watch: Prometheus, and `ds41 ps`.

Owns the names of the numbers; the worker counts. What requests say is never among them.
"""

import time
from collections.abc import Iterator
from typing import Any

from mlx_engine.job import Job
from mlx_engine.server.service import Service
from mlx_engine.worker import Worker


def status(service: Service) -> dict[str, Any]:
    """The model and the requests in the server, those at work first; times in seconds."""
    worker = service.worker
    jobs = worker.jobs()
    return {
        "state": worker.state,
        "model": service.model_id,
        "context_tokens": service.context_tokens,
        "jobs": [_job(job, worker.position(job)) for job in jobs],
    }


def _job(job: Job, position: int) -> dict[str, Any]:
    progress = job.progress
    return {
        "id": job.id,
        "state": job.state,
        "position": position,
        "age_s": time.monotonic() - job.created_s,
        "prompt_tokens": progress.total_tokens if progress else None,
        "read_tokens": progress.done_tokens if progress else None,
        "read_tokens_per_s": job.prefill_tokens_per_s,
        "read_left_s": job.prefill_left_s,
    }


def exposition(worker: Worker) -> str:
    """All metrics in Prometheus' text format."""
    return "".join(line + "\n" for line in _lines(worker))


def _lines(worker: Worker) -> Iterator[str]:
    counts, jobs = worker.counts, worker.jobs()
    waiting = [job for job in jobs if job.state == "queued"]
    yield from _metric("ready", "gauge", "1 when the model is loaded.", worker.state == "ready")
    yield from _metric("load_bytes", "gauge", "Bytes of weights read.", worker.load_bytes[0])
    yield from _metric("jobs_waiting", "gauge", "Requests in the queue.", len(waiting))
    yield from _metric("jobs_active", "gauge", "Requests at work.", len(jobs) - len(waiting))
    oldest_s = max((time.monotonic() - job.created_s for job in waiting), default=0.0)
    yield from _metric("queue_oldest_seconds", "gauge", "Wait of the oldest.", oldest_s)
    progress = [job.progress for job in jobs if job.state == "prefill" and job.progress]
    left = sum(each.total_tokens - each.done_tokens for each in progress)
    yield from _metric("prefill_tokens_left", "gauge", "Prompt tokens still to read.", left)
    outcomes = ("answered", "cancelled", "failed", "refused")
    yield "# HELP ds41_requests_total Requests by how they ended."
    yield "# TYPE ds41_requests_total counter"
    for outcome in outcomes:
        yield f'ds41_requests_total{{outcome="{outcome}"}} {getattr(counts, outcome)}'
    for name, text, value in (
        ("prompt_tokens", "Tokens of prompts.", counts.prompt_tokens),
        ("cached_tokens", "Tokens of prompts that were known.", counts.cached_tokens),
        ("completion_tokens", "Tokens of answers.", counts.completion_tokens),
        ("prefill_seconds", "Time to the first token.", counts.prefill_s),
        ("decode_seconds", "Time from there to the end.", counts.decode_s),
    ):
        yield from _metric(f"{name}_total", "counter", text, value)


def _metric(name: str, kind: str, text: str, value: float) -> Iterator[str]:
    yield f"# HELP ds41_{name} {text}"
    yield f"# TYPE ds41_{name} {kind}"
    yield f"ds41_{name} {value:g}" if isinstance(value, float) else f"ds41_{name} {int(value)}"
