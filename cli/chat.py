"""`ds41 chat`: a conversation in the terminal, with an engine of its own or with a running server.

Owns the course of the conversation: what is read, which commands there are, and what is kept of an
answer that was stopped. What is shown is terminal's part; nothing heavy is imported before the
command runs.
"""

import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Protocol

import typer

from mlx_engine.cli.devices import DevicesOption, HostsOption, Spread, StallOption
from mlx_engine.cli.kv_disk import SPACE
from mlx_engine.cli.loaded import loaded_engine
from mlx_engine.cli.options import (
    ContextOption,
    DiskDirOption,
    DiskSpaceOption,
    DtypeOption,
    EffortOption,
    MaxTokensOption,
    MinPOption,
    ModelOption,
    SeedOption,
    SystemOption,
    TemperatureOption,
    TinyRandomOption,
    TopKOption,
    TopPOption,
    sampling,
)
from mlx_engine.cli.ps import SERVER
from mlx_engine.cli.signals import Signals
from mlx_engine.cli.terminal import Terminal, say
from mlx_engine.errors import BadRequest, EngineError
from mlx_engine.ranks import STALL_S

if TYPE_CHECKING:
    from mlx_engine.prompt import Message
    from mlx_engine.respond import Event, Request

_COMMANDS = {
    "/new": "begin a new conversation",
    "/help": "show this",
    "/exit": "end, as Ctrl-D does",
}
_PROMPT = "> "


class Answering(Protocol):
    """What a conversation needs of an engine, or of a server."""

    def respond(
        self, request: "Request", *, cancelled: Callable[[], bool]
    ) -> "Generator[Event]": ...

    def save_piece(self) -> bool: ...


def chat_command(
    context: typer.Context,
    model: ModelOption = None,
    tiny_random: TinyRandomOption = False,
    url: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help=f"Talk to a running server, as {SERVER}, and load no model.",
            show_default="load the model here",
        ),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="DS41_API_KEY", help="The server's key.", show_default="no key"),
    ] = None,
    system: SystemOption = None,
    effort: EffortOption = "high",
    is_without_thinking: Annotated[
        bool, typer.Option("--no-thinking", help="Answer at once: the same as --effort off.")
    ] = False,
    max_tokens: MaxTokensOption = None,
    temperature: TemperatureOption = None,
    top_p: TopPOption = None,
    top_k: TopKOption = None,
    min_p: MinPOption = None,
    seed: SeedOption = None,
    ctx: ContextOption = None,
    dtype: DtypeOption = "bfloat16",
    kv_disk_dir: DiskDirOption = None,
    kv_disk_space: DiskSpaceOption = SPACE,
    devices: DevicesOption = 1,
    hosts: HostsOption = None,
    stall_timeout: StallOption = STALL_S,
) -> None:
    """Talk with the model in the terminal.

    Every line is a message; the arrow keys bring earlier ones back. The
    reasoning is shown dim. Ctrl-C stops an answer and keeps the conversation
    with what was said so far; a second one, while it stops, ends the program.
    /new begins a new conversation, Ctrl-D or /exit ends.

    Where standard input is no terminal, each of its lines is answered in turn:
    answers go to standard output, all else to standard error. The first line
    that cannot be answered ends it, with exit code 2.

    The model is loaded here, or with --url that of a running ds41 serve
    answers. Nothing is kept of a conversation but what the disk cache holds.
    """
    from mlx_engine.prompt import Message
    from mlx_engine.respond import Request

    if sys.stdin is None:  # where the caller closed it
        raise BadRequest("there is nothing to read: standard input is closed")
    request = Request(
        [Message("user", "-")],
        system=system,
        effort="off" if is_without_thinking else effort,
        max_tokens=max_tokens,
        sampling=sampling(
            temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed
        ),
    )
    terminal = Terminal(is_streaming=True)
    with ExitStack() as stack:
        signals = stack.enter_context(Signals.noted())
        if url is not None:
            from mlx_engine.cli.remote import RemoteEngine

            _refuse_local_options(context)
            remote = RemoteEngine(url, api_key)
            say(f"{url} answers{', once its model is loaded' if remote.is_loading else ''}")
            engine: Answering = remote
        else:
            engine = stack.enter_context(
                loaded_engine(
                    request,
                    terminal,
                    signals,
                    model=model,
                    tiny_random=tiny_random,
                    ctx=ctx,
                    dtype=dtype,
                    kv_disk_dir=kv_disk_dir,
                    kv_disk_space=kv_disk_space,
                    spread=Spread.of(devices, hosts, stall_timeout),
                )
            )
        Chat(engine, request, terminal, signals).run()


def _refuse_local_options(context: typer.Context) -> None:
    names = ("model", "tiny_random", "ctx", "dtype", "kv_disk_dir", "kv_disk_space")
    for name in (*names, "devices", "hosts", "stall_timeout"):
        source = context.get_parameter_source(name)
        # A model that the environment names is for other commands.
        if source is not None and source.name == "COMMANDLINE":
            option = f"--{name.replace('_', '-')}"
            raise BadRequest(f"{option} is not for --url: what runs there is the server's to say")


class Chat:
    """Conversations, one after the other; `request` is the pattern of each turn's request."""

    def __init__(
        self, engine: Answering, request: "Request", terminal: Terminal, signals: Signals
    ) -> None:
        self._engine = engine
        self._request = request
        self._terminal = terminal
        self._signals = signals
        self._is_typed = sys.stdin.isatty()
        self._messages: list[Message] = []

    def run(self) -> None:
        """Answer line by line, until there are no more.

        Raises what the engine does; where somebody types it is said, and the conversation goes on.
        """
        if self._is_typed:
            say("/help lists the commands, Ctrl-C stops an answer, Ctrl-D ends")
        for line in self._lines():
            try:
                if line == "/exit":
                    return
                self._do(line)
            except EngineError as error:
                if not self._is_typed:
                    raise
                say(str(error))
            if self._is_typed:
                typer.echo(err=True)

    def _do(self, line: str) -> None:
        word = line.split(maxsplit=1)[0]
        # A path is no command.
        if not word.startswith("/") or "/" in word[1:]:
            self._answer(line)
        elif line == "/new":
            self._messages = []
            say("a new conversation")
        elif line == "/help":
            for command, meaning in _COMMANDS.items():
                typer.echo(f"{command}  {meaning}", err=True)
        else:
            raise BadRequest(f"{word} is no command, or stands alone: /help lists them")

    def _answer(self, text: str) -> None:
        from mlx_engine.prompt import Message

        asked = [*self._messages, Message("user", text)]
        events = self._engine.respond(
            replace(self._request, prompt=asked),
            cancelled=lambda: bool(self._signals.numbers),
        )
        with closing(events):
            end = self._terminal.show(events)
        # Whoever types next gives the disk no time.
        while self._engine.save_piece():
            pass
        if end.finish_reason != "cancelled":
            self._terminal.turn(end)
        elif self._is_typed:
            say("stopped")
        else:
            raise typer.Exit(128 + self._signals.numbers[0])
        if end.text or end.finish_reason == "stop":
            self._messages = [*asked, Message("assistant", end.text, end.reasoning)]
        else:
            say("there is no answer yet, so the message is not kept")

    def _lines(self) -> Iterator[str]:
        """The lines that say something, without the space around them."""
        if self._is_typed:
            # Gives `input` line editing and a history.
            with suppress(ImportError):
                import_module("readline")
        while True:
            self._signals.forget()
            self._signals.are_awaited = False
            try:
                line = self._line().strip()
            except EOFError:
                if self._is_typed:
                    typer.echo(err=True)
                return
            except KeyboardInterrupt:
                if not self._is_typed:
                    raise
                typer.echo(err=True)
                continue
            except UnicodeDecodeError:
                raise BadRequest("what was read is not UTF-8 text: convert it first") from None
            finally:
                self._signals.are_awaited = True
            if line:
                yield line

    def _line(self) -> str:
        if not self._is_typed:
            line = sys.stdin.readline()
            if not line:
                raise EOFError
            return line
        if sys.stdout.isatty():
            return input(_PROMPT)
        typer.echo(_PROMPT, nl=False, err=True)
        return input()
