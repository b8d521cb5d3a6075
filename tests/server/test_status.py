"""`/status`, and `ds41 ps` that shows it, also of what is no server of ours."""

import socket
import threading
from typing import Any

import httpx
import pytest
from starlette.responses import JSONResponse, Response
from typer.testing import CliRunner, Result

from mlx_engine.cli.main import app
from mlx_engine.cli.ps import ask_status, server_url
from mlx_engine.errors import BadRequest
from mlx_engine.server.security import Access
from tests.scripted_engine import Course, ScriptedEngine
from tests.server.support import PATIENCE_S, messages_body, on_port, serving, until


def test_the_status_and_ps_tell_how_far_each_request_is() -> None:
    key = "a key of ours"
    go = threading.Event()

    def wait_in_the_middle(course: Course) -> None:
        if course.chunks_done == 2:
            assert go.wait(PATIENCE_S)

    engine = ScriptedEngine("</think>Hello", before_step=wait_in_the_middle, chunk_tokens=16)
    access = Access(api_key=key)
    with (
        serving(engine, access=access, max_active=1) as server,
        on_port(server.app) as address,
    ):

        def ps(*args: str) -> Result:
            return CliRunner().invoke(app, ["ps", "--url", address, *args])

        url, body = f"{address}/v1/messages", messages_body(stream=True)
        headers = {"x-api-key": key}
        assert "nothing to do" in ps("--api-key", key).stdout
        with (
            httpx.stream("POST", url, json=body, headers=headers, verify=False) as first,
            httpx.stream("POST", url, json=body, headers=headers, verify=False) as second,
        ):
            try:
                until(lambda: bool(engine.courses) and engine.courses[0].chunks_done == 2)
                until(lambda: len(server.worker.jobs()) == 2)
                status = server.ask("GET", "/status", headers=headers).json()
                assert status["state"] == "ready" and status["context_tokens"] == 100_000
                working, waiting = status["jobs"]
                n = len(engine.courses[0].call.token_ids)
                assert (working["state"], working["position"]) == ("prefill", 0)
                assert (working["read_tokens"], working["prompt_tokens"]) == (32, n)
                assert (waiting["state"], waiting["position"]) == ("queued", 1)
                result = ps("--api-key", key)
                assert result.exit_code == 0 and "ready" in result.stdout
                assert f"32 of {n}" in result.stdout and "waits, 1." in result.stdout
            finally:
                go.set()
            for response in (first, second):
                response.read()
        wrong = ps("--api-key", "wrong")
        assert wrong.exit_code == 2 and "the key is missing or wrong" in wrong.stderr
        assert "--api-key or DS41_API_KEY" in wrong.stderr and "start it" not in wrong.stderr
        none = ps("--api-key", "schl\u00fcssel")
        assert none.exit_code == 2 and "no header can carry the API key" in none.stderr
        beneath = CliRunner().invoke(app, ["ps", "--url", f"{address}/v1", "--api-key", key])
        assert "status 404): leave out /v1, or name another by --url" in beneath.stderr
    gone = CliRunner().invoke(app, ["ps", "--url", address])
    assert gone.exit_code == 2 and "does not answer" in gone.stderr
    assert len(gone.stderr.splitlines()) == 1


def test_ps_tells_what_is_wrong_with_the_disk_cache() -> None:
    status: dict[str, Any] = {"state": "ready", "model": "m", "model_name": "M"}
    status |= {"load": None, "context_tokens": 9, "jobs": []}
    for disk, is_told in ((None, False), ({"notice": None}, False), ({"notice": "Full."}, True)):
        with on_port(JSONResponse({**status, "disk_cache": disk})) as address:
            shown = CliRunner().invoke(app, ["ps", "--url", address]).stdout.splitlines()
        assert shown == [shown[0], *["Full."] * is_told, "nothing to do"]


@pytest.mark.parametrize("said", [{}, [], {"state": "ready", "model": "m", "jobs": []}])
def test_another_server_is_not_taken_for_ours(said: Any) -> None:
    with on_port(JSONResponse(said)) as address:
        with pytest.raises(BadRequest, match="does not answer as ds41 serve does"):
            ask_status(address, None)
        for command in (["ps"], ["launch", "claude"]):
            result = CliRunner().invoke(app, [*command, "--url", address])
            assert result.exit_code == 2 and "another server" in result.stderr


@pytest.mark.parametrize("said", [b"", b"\xff\xfe", b"{", b"<html>", b"[" * 100_000])
def test_no_word_of_a_parser_is_shown(said: bytes) -> None:
    with on_port(Response(said)) as address:
        result = CliRunner().invoke(app, ["ps", "--url", address])
    assert result.exit_code == 2
    assert result.stderr == (
        f"ds41: {address} does not answer as ds41 serve does (it is another server): "
        "start it, or name another by --url\n"
    )


COMMANDS = pytest.mark.parametrize("command", [["ps"], ["launch", "claude"], ["chat"]])


def refusal(command: list[str], url: str) -> str:
    """What a command says of a server that it cannot use, but for the server's address."""
    result = CliRunner().invoke(app, [*command, "--url", url], input="Hi\n")
    assert (result.exit_code, result.stdout) == (2, "")
    said = f"ds41: {url} does not answer as ds41 serve does "
    assert result.stderr.startswith(said) and result.stderr.count("\n") == 1
    return result.stderr.removeprefix(said).rstrip()


@COMMANDS
def test_a_path_that_is_too_much_is_named(command: list[str]) -> None:
    with serving(ScriptedEngine("so")) as server, on_port(server.app) as address:
        said = refusal(command, f"{address}/v1")
    assert said == "(it answers with status 404): leave out /v1, or name another by --url"


@COMMANDS
@pytest.mark.parametrize("path", ["", "/v1"])
def test_a_server_that_is_not_there_is_to_be_started(command: list[str], path: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    said = refusal(command, f"http://127.0.0.1:{port}{path}")
    assert said == "(Connection refused): start it, or name another by --url"


@COMMANDS
def test_a_server_that_hangs_up_is_not_another_one(command: list[str]) -> None:
    def hang_up() -> None:
        client, _ = listener.accept()
        with client:
            # What lies there unread would make it a reset.
            client.recv(10_000)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=hang_up)
        thread.start()
        said = refusal(command, f"http://127.0.0.1:{listener.getsockname()[1]}")
        thread.join()
    assert said.endswith("without response): start it, or name another by --url")


@pytest.mark.parametrize(
    "named",
    [
        *("", "http://", "127.0.0.1:8041", "localhost:8041", "ftp://x", "http:/x", "http://x:y"),
        *("http://x:0", "http://x:99999", "http://[::1", "http://me@x", "http://x?a", "http://x#a"),
        *("http://x y", "http://x\n", f"http://{'x' * 70}"),
    ],
)
@COMMANDS
def test_what_is_no_address_is_one_sentence(command: list[str], named: str) -> None:
    result = CliRunner().invoke(app, [*command, "--url", named])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == (
        f"ds41: --url {named!r} is no address of a server: write it as http://127.0.0.1:8041\n"
    )


def test_an_address_ends_without_a_slash() -> None:
    for named in ("http://127.0.0.1:8041/", "https://[::1]", "http://x/behind/a/proxy/"):
        assert server_url(named) == named.rstrip("/")
