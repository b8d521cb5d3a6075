"""`ds41 ps`: what a running server is at.

Asks a server over HTTP, and needs no model.
"""

import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.client import HTTPException
from typing import Annotated, Any, cast
from urllib.parse import urlsplit

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
    """List the requests of a running server: how far each is, and what waits.

    What is wrong with its disk cache is told before.
    """
    status = ask_status(server_url(url), api_key)
    state = status["state"]
    if status["load"] is not None:
        done, total = status["load"]["done_bytes"] / 1e9, status["load"]["total_bytes"] / 1e9
        state += f" ({done:,.1f} of {total:,.1f} GB)"
    typer.echo(f"{status['model_name']}: {state}, context {status['context_tokens']:,} tokens")
    disk: dict[str, Any] | None = status.get("disk_cache")
    if disk and disk.get("notice"):
        typer.echo(disk["notice"])
    if status["jobs"]:
        for line in _jobs(status["jobs"]):
            typer.echo(line)
    else:
        typer.echo("nothing to do")


def server_url(named: str) -> str:
    """The address that --url names, without a slash at its end. Raises BadRequest for none."""
    try:
        url = urlsplit(named)
        (url.hostname or "").encode("idna")
        is_address = url.scheme in ("http", "https") and url.hostname and url.port != 0
    except ValueError:  # a port that is none, a bracket that is not closed
        is_address = False
    if (
        not is_address
        or any(mark in named for mark in "?#@ ")
        or not named.isascii()
        or not named.isprintable()
    ):
        raise BadRequest(f"--url {named!r} is no address of a server: write it as {SERVER}")
    return named.rstrip("/")


def ask_status(url: str, api_key: str | None) -> dict[str, Any]:
    """What a running server says of itself: its state, model, context_tokens and jobs at least.

    url: as `server_url` gives it. Raises BadRequest where there is none.
    """
    if api_key and not (api_key.isascii() and api_key.isprintable()):
        raise BadRequest("no header can carry the API key: give letters, digits and signs")
    headers = {} if api_key is None else {"x-api-key": api_key}
    is_path_wrong = False
    try:
        # A proxy of the environment would not reach this machine.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(
            urllib.request.Request(f"{url}/status", headers=headers), timeout=_PATIENCE_S
        ) as reply:
            return _status(json.load(reply))
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 401:
            raise BadRequest(
                f"the key is missing or wrong: give that of {url} by --api-key or DS41_API_KEY"
            ) from None
        reason, is_path_wrong = f"it answers with status {error.code}", error.code == 404
    except OSError as error:  # before the next: a server that hangs up is both
        cause = error.reason if isinstance(error, urllib.error.URLError) else error
        reason = getattr(cause, "strerror", None) or str(cause)
        if isinstance(cause, ssl.SSLError):
            reason = "no secure connection can be made"
    except (HTTPException, ValueError, RecursionError):
        reason, is_path_wrong = "it is another server", True
    path = urlsplit(url).path
    todo = f"leave out {path}" if path and is_path_wrong else "start it"
    raise BadRequest(
        f"{url} does not answer as ds41 serve does ({reason}): {todo}, or name another by --url"
    )


def _status(said: Any) -> dict[str, Any]:
    """What a server of ours says. Raises ValueError where another one has answered."""
    kinds = {"state": str, "model": str, "context_tokens": int, "jobs": list}
    status = cast("dict[str, Any]", said) if isinstance(said, dict) else {}
    if not all(isinstance(status.get(name), kind) for name, kind in kinds.items()):
        raise ValueError("it is another server")
    return status


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
