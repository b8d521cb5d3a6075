"""What the server is at, as Prometheus reads it.

Owns the names of the numbers; worker and engine count. What requests say is never among them.
"""

import time
from collections.abc import Iterator, Mapping

from mlx_engine.diskcache.cache import CacheStats
from mlx_engine.live import Stats
from mlx_engine.worker import Counts, Worker

Number = float | Mapping[str, float]


def exposition(worker: Worker) -> str:
    """All metrics in Prometheus' text format."""
    return "".join(line + "\n" for line in _lines(worker))


def _lines(worker: Worker) -> Iterator[str]:
    yield from _gauge("ready", "1 when the model is loaded.", worker.state == "ready")
    yield from _gauge("load_bytes", "Bytes of weights read.", worker.load_bytes[0])
    yield from _of_jobs(worker)
    yield from _of_counts(worker.counts)
    engine = worker.engine
    if engine is not None:
        yield from _of_sessions(engine.session_stats())
        disk = engine.disk_stats()
        if disk is not None:
            yield from _of_disk(disk)


def _of_jobs(worker: Worker) -> Iterator[str]:
    jobs = worker.jobs()
    queued = [job for job in jobs if job.state == "queued"]
    held = [job for job in jobs if job.state == "waiting"]
    yield from _gauge("jobs_waiting", "Requests in the queue.", len(queued))
    yield from _gauge("jobs_held", "Requests that wait for another, or for memory.", len(held))
    n_active = len(jobs) - len(queued) - len(held)
    yield from _gauge("jobs_active", "Requests at work.", n_active)
    oldest_s = max((time.monotonic() - job.created_s for job in queued), default=0.0)
    yield from _gauge("queue_oldest_seconds", "Wait of the oldest.", oldest_s)
    reading = [job for job in jobs if job.state == "prefill"]
    progress = [job.progress for job in reading if job.progress]
    left_tokens = sum(each.total_tokens - each.done_tokens for each in progress)
    yield from _gauge("prefill_tokens_left", "Prompt tokens still to read.", left_tokens)
    tokens_per_s = sum(job.prefill_tokens_per_elapsed_s for job in reading)
    yield from _gauge("prefill_tokens_per_second", "Prompt tokens read a second.", tokens_per_s)
    left_s = max((job.prefill_left_s or 0.0 for job in reading), default=0.0)
    yield from _gauge("prefill_left_seconds", "Until the last prompt is read.", left_s)


def _of_counts(counts: Counts) -> Iterator[str]:
    outcomes = {
        f'outcome="{name}"': getattr(counts, name)
        for name in ("answered", "cancelled", "failed", "refused")
    }
    yield from _counter("requests_total", "Requests by how they ended.", outcomes)
    yield from _counter("prompt_tokens_total", "Tokens of prompts.", counts.prompt_tokens)
    known = "Tokens of prompts that were known."
    yield from _counter("cached_tokens_total", known, counts.cached_tokens)
    yield from _counter("completion_tokens_total", "Tokens of answers.", counts.completion_tokens)
    yield from _counter("prefill_seconds_total", "Work up to the first token.", counts.prefill_s)
    yield from _counter("decode_seconds_total", "Work from there to the end.", counts.decode_s)
    waited = "Time in the queue, and while others had the engine."
    yield from _counter("waited_seconds_total", waited, counts.waited_s)


def _of_sessions(stats: Stats) -> Iterator[str]:
    sources = {
        f'source="{name}"': getattr(stats, name)
        for name in ("continued", "rewound", "forked", "restored", "fresh")
    }
    yield from _counter("prompts_total", "Prompts by where their session came from.", sources)
    yield from _gauge("sessions", "Sessions in memory.", stats.sessions)
    n_bytes = stats.state_bytes + stats.checkpoint_bytes
    yield from _gauge("session_bytes", "What they take, checkpoints included.", n_bytes)
    yield from _gauge("session_budget_bytes", "What they may take.", stats.budget_bytes)
    yield from _counter("sessions_evicted_total", "Sessions that went for room.", stats.evicted)


def _of_disk(stats: CacheStats) -> Iterator[str]:
    yield from _gauge("disk_cache_bytes", "All files of its folder.", stats.total_bytes)
    yield from _gauge("disk_cache_space_bytes", "What they may take.", stats.space_bytes)
    found = {'result="hit"': stats.hits, 'result="miss"': stats.misses}
    yield from _counter("disk_cache_lookups_total", "Prompts looked up on disk.", found)
    restored = "Tokens of prompts that were read from disk."
    yield from _counter("disk_cache_restored_tokens_total", restored, stats.restored_tokens)
    yield from _counter("disk_cache_written_bytes_total", "Bytes written.", stats.saved_bytes)
    faults = {'kind="damaged"': stats.damaged, 'kind="fault"': stats.faults}
    yield from _counter("disk_cache_faults_total", "Damaged entries, and faults.", faults)


def _gauge(name: str, text: str, value: float) -> Iterator[str]:
    return _metric(name, "gauge", text, value)


def _counter(name: str, text: str, value: Number) -> Iterator[str]:
    return _metric(name, "counter", text, value)


def _metric(name: str, kind: str, text: str, value: Number) -> Iterator[str]:
    """The lines of one metric; several values have a label each."""
    yield f"# HELP ds41_{name} {text}"
    yield f"# TYPE ds41_{name} {kind}"
    if isinstance(value, Mapping):
        for label, each in value.items():
            yield f"ds41_{name}{{{label}}} {_written(each)}"
    else:
        yield f"ds41_{name} {_written(value)}"


def _written(value: float) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(int(value))
