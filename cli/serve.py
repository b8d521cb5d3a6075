"""`ds41 serve`: the engine as a local endpoint, until Ctrl-C.

Reads options, says how to reach the server, and hands over to it. Nothing heavy is imported before
the command runs.
"""

import logging
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from mlx_engine.cli.folders import cache_directory, model_directory
from mlx_engine.cli.kv_disk import SPACE, kv_directory, kv_disk, parse_bytes
from mlx_engine.errors import BadRequest

if TYPE_CHECKING:
    from mlx_engine.engine import Engine
    from mlx_engine.loading import OpenModel

PORT = 8041

# Sessions are not held while another job reads its prompt, so one is answered after the other.
_ACTIVE_JOBS = 1


def serve_command(
    model: Annotated[
        Path | None,
        typer.Option(
            envvar="DS41_MODEL",
            help="The checkpoint's folder; without it a tiny random model shows that all works.",
        ),
    ] = None,
    host: Annotated[
        str,
        typer.Option(help="The address to listen on; any but this machine's own needs --api-key."),
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port; 0 takes a free one.", min=0, max=65535)] = (
        PORT
    ),
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="DS41_API_KEY",
            help="Ask for this key, as x-api-key or as a bearer token.",
            show_default="no key",
        ),
    ] = None,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ORIGIN",
            help="Let pages of this origin use the server, as https://app.example; "
            "may be repeated.",
        ),
    ] = None,
    ctx: Annotated[
        int | None,
        typer.Option(help="Tokens of prompt and answer together.", show_default="the model's"),
    ] = None,
    max_queued: Annotated[
        int,
        typer.Option(help="Requests that may wait; more are told to come back later.", min=1),
    ] = 64,
    dtype: Annotated[
        Literal["bfloat16", "float32"], typer.Option(help="Numbers between the layers.")
    ] = "bfloat16",
    kv_disk_dir: Annotated[
        str | None,
        typer.Option(
            metavar="DIR|none",
            help="Keep on disk what reading prompts has computed, so that conversations go on "
            "at once after a restart; private to you, but it can be turned back into the text.",
            show_default="kv in the cache folder",
        ),
    ] = None,
    kv_disk_space: Annotated[
        str, typer.Option(metavar="SIZE", help="The most that all files of that folder may take.")
    ] = SPACE,
    is_quiet: Annotated[
        bool, typer.Option("--quiet", help="Log only what went wrong, and not each request.")
    ] = False,
) -> None:
    """Serve the model to Claude Code and to other clients of Anthropic's and OpenAI's protocols.

    The port opens at once; requests that come while the model loads wait for
    it. What to set for Claude Code is printed at the start.

    Endpoints: /v1/messages and its count_tokens (Anthropic),
    /v1/chat/completions, /v1/responses and /v1/completions (OpenAI), and
    /v1/models. Every model name is answered by the one model. For those who
    watch there are /health (503 until the model is loaded), /metrics
    (Prometheus) and /status, which ds41 ps shows.

    Requests are answered one after the other. A client that leaves frees the
    engine, and what was computed for it is kept: the same prompt goes on from
    there. Too many requests are told to come back later.

    Only this machine can reach the server unless --host says otherwise, and
    then only with a key. Web pages are kept out, unless their origin is
    allowed. The log names requests and never what they say.

    Ctrl-C ends open answers with an error that tells clients to try again; a
    second one waits for nothing.
    """
    from mlx_engine.loading import open_model
    from mlx_engine.server.app import create_app
    from mlx_engine.server.security import Access, is_loopback, origins
    from mlx_engine.server.service import Service
    from mlx_engine.server.serving import Serving, address_of, listen
    from mlx_engine.worker import Worker

    if api_key is not None and not api_key.strip():
        raise BadRequest("the API key is empty: give one, or leave --api-key out")
    if not is_loopback(host) and api_key is None:
        raise BadRequest(
            f"{host} can be reached from other machines: ask them for a key by --api-key"
        )
    kv_folder, kv_space_bytes = kv_directory(kv_disk_dir), parse_bytes(kv_disk_space)
    opened = open_model(model_directory(model), context_tokens=ctx)
    listener = listen(host, port)

    @contextmanager
    def load(on_progress: Callable[[int, int], None]) -> "Generator[Engine]":
        with (
            kv_disk(opened, dtype, kv_folder, kv_space_bytes) as disk_cache,
            opened.load(
                dtype,
                disk_cache=disk_cache,
                cache_dir=cache_directory(),
                on_progress=on_progress,
            ) as engine,
        ):
            yield engine

    def on_state() -> None:
        if worker.state == "ready":
            _say(f"ready at {address_of(listener)}")
        elif worker.state == "failed":
            serving.stop()

    # With a key the name under which others reach this machine does not matter.
    names = frozenset({host}) if is_loopback(host) else None
    worker = Worker(load, max_active=_ACTIVE_JOBS, max_queued=max_queued, on_state=on_state)
    service = Service(worker, opened.tokenizer, opened.context_tokens)
    app = create_app(service, Access(api_key, names, origins(allow_origin or ())))
    serving = Serving(app, worker, listener)
    logging.getLogger("mlx_engine").setLevel(logging.WARNING if is_quiet else logging.INFO)
    _greet(opened, address_of(listener), service.model_id, has_key=api_key is not None)
    serving.run()
    _say("stopped")


def _greet(opened: "OpenModel", address: str, model_id: str, *, has_key: bool) -> None:
    """Say what is served and where, and what Claude Code has to know."""
    from mlx_engine import memory
    from mlx_engine.server.claude_code import environment, shell_lines

    needed = memory.needs(opened.config, opened.context_tokens)
    _say(f"{opened.checkpoint.directory} as {model_id}, loading")
    _say(memory.describe(needed, opened.context_tokens))
    _say(f"listening at {address}")
    _say(f"for Claude Code: ds41 launch claude --url {address}, or")
    token = "YOUR_API_KEY" if has_key else model_id
    variables = environment(address, model_id, opened.context_tokens, token)
    typer.echo(f"\n{shell_lines(variables)}\n")


def _say(message: str) -> None:
    typer.echo(f"ds41: {message}", err=True)
