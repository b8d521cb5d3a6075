"""`ds41 ps`: what a running server is at.

Asks a server over HTTP, and needs no model.
"""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.client import HTTPException
from typing import Annotated, Any

import typer

from mlx_engine.cli.serve import PORT
from mlx_engine.cli.table import table
from mlx_engine.errors import BadRequest

SERVER = f"http://127.0.0.1:{PORT}"

_PATIENCE_S = 10


def ps_command(
    url: Annotated[str, typer.Option(help="The server's address.")] = SERVER,
    api_key: Annotated[
        str | None, typer.Option(envvar="DS41_API_KEY", help="Its key.", show_default="no key")
    ] = None,
) -> None:
    """List the requests of a running server: how far each is, and what waits."""
    status = ask_status(url, api_key)
    state = status["state"]
    if status["load"] is not None:
        done, total = status["load"]["done_bytes"] / 1e9, status["load"]["total_bytes"] / 1e9
        state += f" ({done:,.1f} of {total:,.1f} GB)"
    typer.echo(f"{status['model_name']}: {state}, context {status['context_tokens']:,} tokens")
    if status["jobs"]:
        for line in _jobs(status["jobs"]):
            typer.echo(line)
    else:
        typer.echo("nothing to do")


def ask_status(url: str, api_key: str | None) -> dict[str, Any]:
    """What a running server says of itself. Raises BadRequest where there is none."""
    url = f"{url.rstrip('/')}/status"
    headers = {} if api_key is None else {"x-api-key": api_key}
    try:
        # A proxy of the environment would not reach this machine.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(
            urllib.request.Request(url, headers=headers), timeout=_PATIENCE_S
        ) as reply:
            return json.load(reply)
    except urllib.error.HTTPError as error:
        error.close()
        reason = "the key is missing or wrong" if error.code == 401 else f"status {error.code}"
    except (OSError, HTTPException, ValueError) as error:
        cause = error.reason if isinstance(error, urllib.error.URLError) else error
        reason = getattr(cause, "strerror", None) or str(cause)
    raise BadRequest(
        f"{url} does not answer as ds41 serve does ({reason}): start it, or name --url"
    )


def _jobs(jobs: list[dict[str, Any]]) -> Iterator[str]:
    rows = [("request", "state", "age", "prompt tokens read", "cached", "answered", "speed")]
    for job in jobs:
        state = f"waits, {job['position']}." if job["position"] else job["state"]
        read = cached = answered = speed = ""
        if job["prompt_tokens"] is not None:
            read = f"{job['read_tokens']:,} of {job['prompt_tokens']:,}"
        if job["cached_tokens"] is not None:
            cached = f"{job['cached_tokens']:,}"
        if job["state"] == "prefill" and job["read_left_s"] is not None:
            speed = f"{job['read_tokens_per_s']:,.0f}/s, {job['read_left_s']:.0f} s left"
        elif job["state"] == "decode":
            answered = f"{job['completion_tokens']:,}"
            speed = f"{job['decode_tokens_per_s']:,.1f}/s"
        rows.append((job["id"], state, f"{job['age_s']:.0f} s", read, cached, answered, speed))
    return table(rows)
