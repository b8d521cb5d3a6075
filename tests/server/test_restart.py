"""A server that ends in the middle of a prompt, and the next one."""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from mlx_engine.engine import Engine
from mlx_engine.loading import OpenModel
from mlx_engine.respond import End, Request
from mlx_engine.worker import Worker
from tests.server.real import CHUNK_TOKENS, load, open_disk_cache, open_tiny
from tests.server.support import until, working

PROMPT = Request("word " * 400, raw=True, max_tokens=2)


@contextmanager
def at_work(opened: OpenModel, folder: Path) -> Generator[tuple[Worker, Engine]]:
    with open_disk_cache(opened, folder, 10**9) as cache:
        with load(opened, folder, 2, cache) as engine, working(lambda _: engine) as worker:
            until(lambda: worker.state == "ready")
            yield worker, engine


def test_what_was_read_of_a_prompt_outlives_the_server(tmp_path: Path) -> None:
    opened = open_tiny(tmp_path)
    with at_work(opened, tmp_path) as (worker, engine):
        job = worker.submit(PROMPT)

        def stop_in_the_middle() -> None:
            if job.progress is not None and job.progress.done_tokens > 10 * CHUNK_TOKENS:
                worker.stop()

        job.wake = stop_in_the_middle
        until(lambda: job.is_done)
    computed_tokens = engine.session_stats().computed_tokens
    assert job.is_done and 10 * CHUNK_TOKENS < computed_tokens < 1900
    with at_work(opened, tmp_path) as (worker, engine):
        *_, end = worker.submit(PROMPT).wait()
        assert isinstance(end, End)
        assert end.prompt_tokens > computed_tokens
        assert computed_tokens - CHUNK_TOKENS <= end.cached_tokens <= computed_tokens
