"""`ds41 serve`: the engine as a local endpoint, until Ctrl-C.

Reads options, says how to reach the server, and hands over to it. Nothing heavy is imported before
the command runs.
"""

import logging
import re
import socket
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from mlx_engine.cli.devices import DevicesOption, HostsOption, Spread, StallOption
from mlx_engine.cli.ending import leave
from mlx_engine.cli.folders import model_directory
from mlx_engine.cli.kv_disk import SPACE, check_named, kv_directory, kv_disk, parse_bytes
from mlx_engine.cli.options import (
    ContextOption,
    DiskDirOption,
    DiskSpaceOption,
    DtypeOption,
    ModelOption,
    TinyRandomOption,
)
from mlx_engine.cli.terminal import say
from mlx_engine.errors import BadRequest
from mlx_engine.folders import cache_directory
from mlx_engine.ranks import STALL_S

if TYPE_CHECKING:
    from mlx_engine.engine import Engine
    from mlx_engine.loading import OpenModel

PORT = 8041

# After a second signal, whichever they were.
_LEFT_CODE = 130

# Addresses that stand for all that this machine has.
_EVERYWHERE = ("0.0.0.0", "::")
# One of those that are kept for examples (RFC 5737): nothing is sent there.
_FAR_AWAY = ("192.0.2.1", 9)


def serve_command(
    model: ModelOption = None,
    tiny_random: TinyRandomOption = False,
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
    ctx: ContextOption = None,
    max_queued: Annotated[
        int,
        typer.Option(help="Requests that may wait; more are told to come back later.", min=1),
    ] = 64,
    dtype: DtypeOption = "bfloat16",
    kv_disk_dir: DiskDirOption = None,
    kv_disk_space: DiskSpaceOption = SPACE,
    devices: DevicesOption = 1,
    hosts: HostsOption = None,
    stall_timeout: StallOption = STALL_S,
    is_quiet: Annotated[
        bool, typer.Option("--quiet", help="Log only what went wrong, and not each request.")
    ] = False,
) -> None:
    """Serve the model to Claude Code and to other clients of Anthropic's and OpenAI's protocols.

    At the start it prints the address, the memory that is needed, and the
    environment for Claude Code; ds41 launch claude starts it with that. The
    port opens at once: requests that come while the model loads wait for it.

    Endpoints: /v1/messages and its count_tokens (Anthropic),
    /v1/chat/completions, /v1/responses and /v1/completions (OpenAI), and
    /v1/models. Every model name is answered by the one model. A page at /
    shows what runs; for programs there are /health (503 until the model is
    loaded), /metrics (Prometheus) and /status, which ds41 ps shows.

    Answers: up to four are made at once, by turns, so that a short request
    does not wait for a long prompt; one that begins like a prompt that is
    being read waits for that instead of reading it again. When --max-queued
    wait, others are told to come back later (529 or 429, with retry-after).
    A stream says every few seconds that it lives; an answer that is not
    streamed does so after half a minute, by white space ahead of its JSON. A
    client that leaves frees the engine, and what was computed for it is kept:
    the same prompt goes on from there.

    What a request says is obeyed, or refused by name with a 400: answers by a
    JSON schema, several answers to a prompt, and an image that is asked about
    are. An image of an earlier turn or in a tool's result becomes a line that
    says so. Fields that are not known have no effect and are noted in the log,
    each once. A body may have 32 MiB.

    Safety: only this machine can reach the server unless --host says
    otherwise, and then only with a key. Web pages are kept out unless their
    origin is allowed, and so is whoever calls the server by a foreign name.
    The log names requests and never what they say.

    Ctrl-C, SIGTERM and SIGHUP end open answers with an error that tells clients
    to try again, and keep what was computed up to the last place that can be
    resumed; a second one leaves at once, with exit code 130, and loses what
    is not on disk yet.

    Examples:

    ds41 serve --model ~/DeepSeek-V4.1-Flash --ctx 262144

    DS41_API_KEY=... ds41 serve --host 0.0.0.0 --kv-disk-space 200GB
    """
    from mlx_engine.loading import open_model
    from mlx_engine.memory import ANSWERS
    from mlx_engine.server.app import create_app
    from mlx_engine.server.connections import allow_many
    from mlx_engine.server.security import Access, is_loopback, origins
    from mlx_engine.server.service import MODEL_NAME, Service
    from mlx_engine.server.serving import Serving, address_of, listen, numeric
    from mlx_engine.worker import Worker

    if api_key is not None and not re.fullmatch("[!-~]+", api_key):
        raise BadRequest(
            "the API key is empty, or no header can carry it: give letters, digits and signs "
            "without spaces, or leave --api-key out"
        )
    bound = numeric(host)
    if not is_loopback(bound) and api_key is None:
        raise BadRequest(
            f"{host} can be reached from other machines: ask them for a key by --api-key"
        )
    access = Access(
        api_key,
        # With a key the name under which others reach this machine does not matter.
        host_names=frozenset({host}) if is_loopback(bound) else None,
        origins=origins(allow_origin or ()),
    )
    spread = Spread.of(devices, hosts, stall_timeout)
    kv_folder, kv_space_bytes = kv_directory(kv_disk_dir), parse_bytes(kv_disk_space)
    directory, stand_in = model_directory(model, tiny_random=tiny_random)
    opened = open_model(directory, context_tokens=ctx)
    check_named(kv_disk_dir, kv_space_bytes)
    allow_many()
    listener = listen(bound, port)

    @contextmanager
    def load(on_progress: Callable[[int, int], None]) -> "Generator[Engine]":
        with (
            spread.lead(opened, dtype) as lead,
            kv_disk(opened, dtype, kv_folder, kv_space_bytes) as disk_cache,
            opened.load(
                dtype,
                disk_cache=disk_cache,
                cache_dir=cache_directory(),
                on_progress=on_progress,
                lead=lead,
            ) as engine,
        ):
            yield engine

    def on_state() -> None:
        if worker.state == "ready":
            say(f"ready at {address_of(listener)}")
        elif worker.state == "failed":
            serving.stop()

    worker = Worker(load, max_active=ANSWERS, max_queued=max_queued, on_state=on_state)
    service = Service(
        worker, opened.tokenizer, opened.context_tokens, model_name=stand_in or MODEL_NAME
    )
    app = create_app(service, access)
    serving = Serving(app, worker, listener, leave=lambda: leave(_LEFT_CODE))
    logging.getLogger("mlx_engine").setLevel(logging.WARNING if is_quiet else logging.INFO)
    elsewhere = _outer_address(listener) if bound in _EVERYWHERE else None
    _greet(
        opened,
        address_of(listener),
        elsewhere,
        service.model_id,
        devices=spread.count,
        has_key=api_key is not None,
    )
    serving.run()
    say("stopped")


def _greet(
    opened: "OpenModel",
    address: str,
    elsewhere: str | None,
    model_id: str,
    *,
    devices: int,
    has_key: bool,
) -> None:
    """Say what is served and where, and what Claude Code has to know."""
    from mlx_engine import memory
    from mlx_engine.server.claude_code import environment, shell_lines

    needed = memory.needs(opened.config, opened.context_tokens, devices=devices)
    say(f"{opened.checkpoint.directory} as {model_id}, loading")
    each = f"each of {devices} devices: " if devices > 1 else ""
    say(each + memory.describe(needed, opened.context_tokens))
    say(f"listening at {address}, which shows a browser what runs")
    if elsewhere is not None:
        say(f"other machines reach it at {elsewhere}, with the key")
    say(f"for Claude Code: ds41 launch claude --url {address}, or")
    token = "YOUR_API_KEY" if has_key else model_id
    variables = environment(address, model_id, opened.context_tokens, token)
    typer.echo(f"\n{shell_lines(variables)}\n")


def _outer_address(listener: socket.socket) -> str:
    """The address of a server at which this machine is known elsewhere, or its name."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(_FAR_AWAY)
            host = str(probe.getsockname()[0])
    except OSError:
        host = socket.gethostname()
    return f"http://{host}:{listener.getsockname()[1]}"
