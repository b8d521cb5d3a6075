"""`ds41 launch`: other programs, set up for a running server by their environment alone.

No file of theirs is changed; a program that is started otherwise is as it was.
"""

import os
import shutil
from typing import Annotated

import typer

from mlx_engine.cli.ps import SERVER, ask_status, server_url
from mlx_engine.errors import BadRequest

launch_app = typer.Typer(help="Start a program that uses a running server.", no_args_is_help=True)

# They would win over what is set here, and a key for elsewhere has no business here.
_OTHERS = ("ANTHROPIC_API_KEY", "CLAUDE_CODE_USE_BEDROCK", "CLAUDE_CODE_USE_VERTEX")


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

    Only this one is set up, by environment variables: your settings stay as
    they are.

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
    os.execve(program, [program, *context.args], {**kept, **variables})
