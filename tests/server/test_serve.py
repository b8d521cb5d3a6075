"""`ds41 serve` as a program, over the tiny model: its banner, its answers, its end."""

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Generator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import anthropic
import pytest
from typer.testing import CliRunner, Result

from mlx_engine import memory
from mlx_engine.cli.main import app
from mlx_engine.errors import ModelFileError
from mlx_engine.loading import open_model
from mlx_engine.server.claude_code import environment
from mlx_engine.server.serving import address_of, listen
from mlx_engine.tiny import tiny_checkpoint
from tests.server.support import PATIENCE_S, messages_body, sent_events

PYTHON = [sys.executable, "-W", "error", "-c"]
COMMAND = [*PYTHON, "from mlx_engine.cli.start import main; main()"]
PATIENT_S = 120
SECRET = "zanzibar"
INT, TERM, HUP = signal.SIGINT, signal.SIGTERM, signal.SIGHUP

# An engine whose step never ends, and says on the output that it has begun.
ENDLESS = """
import mlx.core as mx
from mlx_engine.engine import Engine

def respond(self, request, *, cancelled):
    print("at work", flush=True)
    while True:
        mx.eval(mx.ones((256, 256)) @ mx.ones((256, 256)))
    yield

Engine.respond = respond
from mlx_engine.cli.start import main; main()
"""
# As a shell without job control starts what is to go on in the background.
IN_BACKGROUND = ("sh", "-c", 'trap "" INT; exec "$@"', "sh")
BY_NOHUP = ("sh", "-c", 'trap "" HUP; exec "$@"', "sh")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder that has the tiny model."""
    directory = tmp_path_factory.mktemp("cache")
    tiny_checkpoint(directory)
    return directory


@pytest.fixture(autouse=True)
def no_model_is_named(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DS41_MODEL", "DS41_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DS41_CACHE_DIR", str(cache))


@pytest.fixture(autouse=True)
def signals_are_the_tests_own() -> Generator[None]:
    """A server in this process would keep them."""
    before = {number: signal.getsignal(number) for number in (INT, TERM, HUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def ds41(*args: str) -> Result:
    return CliRunner().invoke(app, args)


@dataclass
class Program:
    """A server that runs; `variables` are those that it printed."""

    process: subprocess.Popen[bytes]
    variables: dict[str, str]
    errors: str = ""

    @property
    def address(self) -> str:
        return self.variables["ANTHROPIC_BASE_URL"]

    @contextmanager
    def client(self) -> Generator[anthropic.Anthropic]:
        """As the printed variables tell."""
        with anthropic.Anthropic(
            base_url=self.address,
            auth_token=self.variables["ANTHROPIC_AUTH_TOKEN"],
            max_retries=0,
            timeout=PATIENT_S,
            http_client=anthropic.DefaultHttpxClient(verify=False, trust_env=False),
        ) as client:
            yield client

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        _, errors = self.process.communicate(timeout=PATIENT_S)
        self.errors = errors.decode()
        return self.process.returncode


@contextmanager
def running(
    *args: str,
    serve: Sequence[str] = (*COMMAND, "serve", "--tiny-random"),
    cwd: Path | None = None,
) -> Generator[Program]:
    """A server on a free port; `serve` is the command that starts it, seen from `cwd`."""
    command = [*serve, "--port", "0", *args]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=cwd,
        # Who runs the tests may have had it ignored.
        preexec_fn=lambda: signal.signal(HUP, signal.SIG_DFL),
    ) as process:
        try:
            assert process.stdout is not None
            variables: dict[str, str] = {}
            for line in process.stdout:
                match = re.fullmatch(r"export (\w+)=(\S+)", line.decode().strip())
                if match:
                    variables[match[1]] = match[2]
                elif variables:
                    break
            assert variables, process.communicate()
            yield Program(process, variables)
        finally:
            process.kill()


def test_an_answer_by_the_printed_variables_and_an_end_by_ctrl_c() -> None:
    with running() as program, program.client() as client:
        options: dict[str, Any] = {
            "model": program.variables["ANTHROPIC_MODEL"],
            "max_tokens": 8,
            "extra_body": {"temperature": 0},
            "messages": [{"role": "user", "content": SECRET}],
        }
        # The model may still be loading.
        first = create(client, **options)
        assert first.stop_reason == "max_tokens" and first.usage.output_tokens == 8
        counted = client.messages.count_tokens(model="ds41", messages=options["messages"])
        with client.messages.stream(**options) as stream:
            again = cast(anthropic.types.Message, stream.get_final_message())
        assert said(again) == said(first)
        cached: list[int] = []
        for message in (first, again):
            usage = message.usage
            cached.append(usage.cache_read_input_tokens or 0)
            created = usage.cache_creation_input_tokens or 0
            assert usage.input_tokens + cached[-1] + created == counted.input_tokens
        assert cached[0] == 0 and cached[1] > 0.9 * counted.input_tokens
        context = int(program.variables["CLAUDE_CODE_MAX_CONTEXT_TOKENS"])
        with pytest.raises(anthropic.BadRequestError, match=f"> {context - 1} maximum"):
            client.messages.create(
                model="ds41",
                max_tokens=1,
                messages=[{"role": "user", "content": "x" * context}],
            )
        assert program.stop(signal.SIGINT) == 0
    assert "ready at " in program.errors and "stopped" in program.errors
    assert program.errors.count("POST '/v1/messages' 200") == 2
    assert SECRET not in program.errors and "Traceback" not in program.errors


def test_a_terminal_that_closes_ends_it_like_sigterm() -> None:
    with running("--kv-disk-dir", "none") as program, program.client() as client:
        messages = [{"role": "user", "content": "Hello"}]
        create(client, model="ds41", max_tokens=1, messages=messages)
        assert program.stop(signal.SIGHUP) == 0
    assert "SIGHUP: open answers end here" in program.errors and "stopped" in program.errors


def test_nohup_outlives_the_terminal() -> None:
    serve = (*BY_NOHUP, *COMMAND, "serve")
    options: dict[str, Any] = {"model": "ds41", "max_tokens": 1}
    options["messages"] = [{"role": "user", "content": "Hello"}]
    with running("--kv-disk-dir", "none", serve=serve) as program, program.client() as client:
        create(client, **options)
        program.process.send_signal(HUP)
        assert create(client, **options).usage.output_tokens == 1
        assert program.stop(TERM) == 0
    assert "SIGTERM: open answers end here" in program.errors and "SIGHUP" not in program.errors


def test_it_says_what_is_served_where_and_what_that_needs(cache: Path) -> None:
    opened = open_model(tiny_checkpoint(cache), context_tokens=3000)
    needed = memory.needs(opened.config, 3000)
    with running("--kv-disk-dir", "none", "--ctx", "3000") as program:
        program.stop()
    assert program.variables["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "3000"
    _, model, needs, listening, by_launch, *_ = program.errors.splitlines()
    assert model == f"ds41: {opened.checkpoint.directory} as ds41, loading"
    assert needs == f"ds41: {memory.describe(needed, 3000)}" and "3,000 tokens" in needs
    assert listening == f"ds41: listening at {program.address}, which shows a browser what runs"
    assert f"ds41 launch claude --url {program.address}" in by_launch


@pytest.mark.parametrize(
    ("signals", "is_told", "prefix"),
    [
        *(((first, second), True, ()) for first, second in product((INT, TERM), repeat=2)),
        ((HUP, HUP), True, ()),
        # At once: nothing has been done about the first one.
        ((TERM, INT), False, ()),
        ((INT, INT), True, IN_BACKGROUND),
    ],
)
def test_a_second_signal_waits_for_nothing(
    signals: tuple[int, int], is_told: bool, prefix: tuple[str, ...]
) -> None:
    first, second = signals
    command = (*prefix, *PYTHON, ENDLESS)
    with running("--kv-disk-dir", "none", serve=(*command, "serve", "--tiny-random")) as program:
        assert program.process.stdout is not None and program.process.stderr is not None
        url = urlsplit(program.address)
        with closing(http.client.HTTPConnection(url.netloc, timeout=PATIENT_S)) as connection:
            connection.request("POST", "/v1/messages", json.dumps(messages_body(stream=True)))
            assert program.process.stdout.readline() == b"at work\n"
            program.process.send_signal(first)
            for line in program.process.stderr if is_told else ():
                if b"leaves at once" in line:
                    break
            assert program.stop(second) == 130
    assert program.errors.splitlines()[-1].startswith("ds41: left at once")
    assert "Traceback" not in program.errors


HEADS = {
    "no HTTP": b"zanzibar\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    "two lengths": b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\n"
    b"Content-Length: 2\r\n\r\n",
    "a header without end": b"GET / HTTP/1.1\r\nHost: localhost\r\nA: ".ljust(2**16 + 1, b"x"),
    "no host": b"GET / HTTP/1.1\r\n\r\n",
    "a chunk of no length": b"POST /v1/messages HTTP/1.1\r\nHost: localhost\r\n"
    b"Transfer-Encoding: chunked\r\n\r\nzanzibar\r\n",
}


def test_a_broken_head_is_a_400_and_nothing_in_the_log() -> None:
    with running("--kv-disk-dir", "none") as program:
        url = urlsplit(program.address)
        for what, head in HEADS.items():
            with socket.create_connection((url.hostname, url.port), timeout=PATIENCE_S) as client:
                client.sendall(head)
                with client.makefile("rb") as reader:
                    answer = reader.read()
            assert answer.startswith(b"HTTP/1.1 400 "), what
            assert b"Traceback" not in answer, what
        assert program.stop() == 0
    assert "Traceback" not in program.errors and SECRET not in program.errors


def create(client: anthropic.Anthropic, **options: Any) -> anthropic.types.Message:
    return cast(anthropic.types.Message, client.messages.create(**options))


def said(message: anthropic.types.Message) -> list[dict[str, Any]]:
    return [block.model_dump(exclude={"signature"}) for block in message.content]


@pytest.mark.parametrize("number", [INT, TERM])
def test_a_signal_ends_an_open_stream_with_an_error_event(number: int) -> None:
    with running() as program:
        url = urlsplit(program.address)
        connection = http.client.HTTPConnection(url.netloc, timeout=PATIENT_S)
        body = json.dumps(messages_body(stream=True, max_tokens=100_000))
        connection.request("POST", "/v1/messages", body)
        response = connection.getresponse()
        start = b""
        while b"thinking_delta" not in start:
            start += response.read1()
        assert program.stop(number) == 0
        events = sent_events((start + response.read()).decode())
        connection.close()
    assert events[0]["type"] == "message_start"
    assert events[-1]["type"] == "error"
    assert events[-1]["error"]["type"] == "overloaded_error"
    assert "Traceback" not in program.errors


def test_a_restart_goes_on_from_the_disk(tmp_path: Path) -> None:
    body: dict[str, Any] = {
        "model": "ds41",
        "max_tokens": 6,
        "extra_body": {"temperature": 0},
        "messages": [{"role": "user", "content": "word " * 60}],
    }
    options = ("--kv-disk-dir", str(tmp_path / "kv"), "--dtype", "float32", "--quiet")
    answers: list[anthropic.types.Message] = []
    for _ in range(2):
        with running(*options) as program, program.client() as client:
            answers.append(create(client, **body))
            assert program.stop() == 0
            assert "POST" not in program.errors
    first, second = answers
    assert first.usage.cache_read_input_tokens == 0
    assert (second.usage.cache_read_input_tokens or 0) > 0
    assert said(first) == said(second)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--host", "0.0.0.0"], "--api-key"),
        (["--host", "192.168.7.7"], "--api-key"),
        (["--api-key", ""], "the API key is empty"),
        (["--api-key", " "], "the API key is empty"),
        (["--api-key", "two words"], "no header can carry it"),
        (["--api-key", "schlüssel"], "no header can carry it"),
        (["--allow-origin", "app.example"], "the origin 'app.example' is none"),
        (["--allow-origin", "*"], "the origin '*' is none: give scheme, name and port"),
        (["--port", "65536"], "--port"),
        (["--max-queued", "0"], "--max-queued"),
        (["--kv-disk-space", "much"], "the size 'much' cannot be read"),
        (["--ctx", "0"], "the context is 0 tokens"),
        (["--model", "absent"], "absent"),
        (["--host", ""], "the host is empty"),
        (["--host", "127.0.0.300"], "the host '127.0.0.300' is no address and no known name"),
        (["--host", "nope.invalid"], "the host 'nope.invalid' is no address and no known name"),
        (["--host", "a" * 64], "is no address and no known name"),
        (["--host", "192.0.2.1", "--api-key", "k"], "192.0.2.1 port 8041 cannot be served"),
    ],
)
def test_a_bad_option_is_one_sentence(args: list[str], says: str) -> None:
    result = ds41("serve", *args)
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    assert says in result.stderr and "Traceback" not in result.output


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = ds41("serve", "--port", str(port))
    assert result.exit_code == 2
    assert f"127.0.0.1 port {port} cannot be served" in result.stderr


def test_a_model_that_cannot_be_loaded_ends_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*args: object, **options: object) -> None:
        raise ModelFileError("shard 3 is damaged: fetch it again")

    monkeypatch.setattr("mlx_engine.loading.OpenModel.load", load)
    result = ds41("serve", "--port", "0")
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1] == "ds41: shard 3 is damaged: fetch it again"


def test_the_help_names_what_there_is_and_waits_for_nothing() -> None:
    report = "import atexit, sys\natexit.register(lambda: print('slow:', *slow & {*sys.modules}))\n"
    slow = "slow = {'mlx.core', 'uvicorn', 'fastapi'}\n"
    code = f"{report}{slow}from mlx_engine.cli.main import app; app(['serve', '--help'])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    for word in ("/v1/messages", "/health", "/metrics", "Ctrl-C", "--api-key", "DS41_MODEL"):
        assert word in run.stdout
    assert run.stdout.splitlines()[-1].split() == ["slow:"]


def test_addresses_are_those_that_reach_the_server() -> None:
    with listen("0.0.0.0", 0) as everywhere:
        port = everywhere.getsockname()[1]
        assert address_of(everywhere) == f"http://127.0.0.1:{port}"
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S):
            pass


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_an_open_server_says_how_others_reach_it(host: str) -> None:
    if host == "::" and not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    with running("--host", host, "--api-key", "k", "--kv-disk-dir", "none") as program:
        port = urlsplit(program.address).port
        for each in ("127.0.0.1", "::1") if host == "::" else ("127.0.0.1",):
            with socket.create_connection((each, port), timeout=PATIENCE_S):
                pass
        program.stop()
    named: list[str] = re.findall(r"other machines reach it at (\S+), with the key", program.errors)
    (url,) = map(urlsplit, named)
    assert (url.scheme, url.port) == ("http", port) and url.hostname not in ("", host)


def test_the_variables_for_claude_code_name_the_window() -> None:
    variables = environment("http://127.0.0.1:1", "ds41", 262_144, "key")
    assert variables["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "262144"
    assert variables["ANTHROPIC_AUTH_TOKEN"] == "key"
    # Claude Code takes such a name for one of Anthropic's, and its window with it.
    assert not variables["ANTHROPIC_MODEL"].startswith("claude-")
    assert all(os.fsencode(value).isascii() for value in variables.values())
