"""Chromium without a window, driven over a pipe by its own protocol.

Owns how it starts and ends and how it is asked; what a page must look like is the tests' part.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import pytest

_PATIENT_S = 60
_FLAGS = "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --remote-debugging-pipe"


def program() -> str:
    """Where Chromium is; skips without it, where CI sets DS41_REQUIRE_BROWSER=1 and fails."""
    found = shutil.which("chromium") or shutil.which("google-chrome")
    if found:
        return found
    reason = "Chromium is not installed"
    if os.environ.get("DS41_REQUIRE_BROWSER") == "1":
        pytest.fail(reason)
    pytest.skip(reason)


@dataclass
class Page:
    """One page; `requests` are the addresses that it has asked for."""

    _commands: BinaryIO
    _replies: BinaryIO
    session: str = ""
    requests: list[str] = field(default_factory=list[str])
    _number: int = 0

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """A command of the DevTools protocol, and its result."""
        self._number += 1
        command: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self.session:
            command["sessionId"] = self.session
        self._commands.write(json.dumps(command).encode() + b"\0")
        self._commands.flush()
        while True:
            reply = self._read()
            if reply.get("method") == "Network.requestWillBeSent":
                self.requests.append(reply["params"]["request"]["url"])
            if reply.get("id") == self._number:
                assert "result" in reply, reply
                return reply["result"]

    def value(self, expression: str) -> Any:
        """What an expression of JavaScript gives, as JSON can tell it."""
        given = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in given, given
        return given["result"].get("value")

    def _read(self) -> dict[str, Any]:
        data = bytearray()
        while (byte := self._replies.read(1)) != b"\0":
            assert byte, "the browser has ended"
            data += byte
        return json.loads(data)


@contextmanager
def open_page(folder: Path) -> Generator[Page]:
    """An empty page of a browser whose profile is a folder."""
    # The browser reads from 3 and writes to 4, whatever else is open here.
    commands, our_commands = os.pipe()
    our_replies, replies = os.pipe()
    flags = [*_FLAGS.split(), f"--user-data-dir={folder}", "about:blank"]
    process = subprocess.Popen(
        [
            *("bash", "-c", 'exec "${@:3}" 3<&"$1" 4>&"$2"', "bash", str(commands), str(replies)),
            *(program(), *flags),
        ],
        pass_fds=(commands, replies),
        stderr=subprocess.DEVNULL,
    )
    os.close(commands)
    os.close(replies)
    with os.fdopen(our_commands, "wb") as to, os.fdopen(our_replies, "rb") as back:
        page = Page(to, back)
        try:
            (target,) = [
                each
                for each in page.call("Target.getTargets")["targetInfos"]
                if each["type"] == "page"
            ]
            attached = page.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
            page.session = attached["sessionId"]
            page.call("Network.enable")
            yield page
            page.session = ""
            page.call("Browser.close")
            process.wait(_PATIENT_S)
        finally:
            process.kill()
            process.wait()
