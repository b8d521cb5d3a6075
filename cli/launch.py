"""`ds41 launch`: other programs, set up for a running server by what they are started with.

No file of theirs is changed; a program that is started otherwise is as it was.
"""

import json
import os
import shutil
from collections.abc import Mapping
from typing import Annotated
from urllib.parse import urlsplit

import typer

from mlx_engine.cli.ps import SERVER, ask_status, server_url
from mlx_engine.errors import BadRequest

launch_app = typer.Typer(help="Start a program that uses a running server.", no_args_is_help=True)

# They would win over what is set here, and a key for elsewhere has no business here.
_OTHERS = (
    "ANTHROPIC_API_KEY",
    "ANTHROPIC_CUSTOM_HEADERS",
    "CLAUDE_CODE_USE_ANTHROPIC_AWS",
    "CLAUDE_CODE_USE_BEDROCK",
    "CLAUDE_CODE_USE_FOUNDRY",
    "CLAUDE_CODE_USE_MANTLE",
    "CLAUDE_CODE_USE_VERTEX",
)
_KEY = "ANTHROPIC_AUTH_TOKEN"


@launch_app.callback()
def _launch() -> None:  # pyright: ignore[reportUnusedFunction]
    """Start a program that uses a running server."""


@launch_app.command(
    "claude",
    context_settings={
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "help_option_names": ["--help"],
    },
)
def claude_command(
    context: typer.Context,
    url: Annotated[str, typer.Option(help="The server's address.")] = SERVER,
    api_key: Annotated[
        str | None, typer.Option(envvar="DS41_API_KEY", help="Its key.", show_default="no key")
    ] = None,
) -> None:
    """Start Claude Code on the model of a running server; all other arguments are passed on.

    Only this one is set up, by environment variables and --settings: your
    settings stay as they are, and what they name under env as another server
    has no effect on it. The server is reached without a proxy.

    Example:

    ds41 launch claude -p "What is in this folder?"
    """
    from mlx_engine.server.claude_code import environment

    url = server_url(url)
    status = ask_status(url, api_key)
    program = shutil.which("claude")
    if program is None:
        raise BadRequest(
            "claude is not on the PATH: install Claude Code, as by "
            "npm install -g @anthropic-ai/claude-code"
        )
    model, context_tokens = status["model"], status["context_tokens"]
    variables = environment(url, model, context_tokens, api_key or model)
    kept = {name: value for name, value in os.environ.items() if name not in _OTHERS}
    # Either spelling is read, by some before the other.
    past_proxies = ",".join(
        filter(None, (kept.get("no_proxy") or kept.get("NO_PROXY"), urlsplit(url).hostname))
    )
    kept |= {"NO_PROXY": past_proxies, "no_proxy": past_proxies}
    args = [*_settings(variables, has_key=api_key is not None), *context.args]
    os.execve(program, [program, *args], {**kept, **variables})


def _settings(variables: Mapping[str, str], *, has_key: bool) -> list[str]:
    """Options by which the variables win over those of the user's settings.

    A key stays in the environment: everybody on this machine can read what programs are started by.
    """
    told = {name: value for name, value in variables.items() if name != _KEY or not has_key}
    return ["--settings", json.dumps({"env": told | dict.fromkeys(_OTHERS, "")})]
