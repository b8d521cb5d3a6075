"""The README's two commands: `ds41 serve` and `ds41 launch claude`, with the demo model."""

import json
import os
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.clients import claude_code
from tests.server.test_serve import COMMAND, running

PATIENT_S = 300
JSON = ("--output-format", "json")


@pytest.mark.parametrize("version", claude_code.VERSIONS)
def test_a_turn_by_the_commands_of_the_readme(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = claude_code.program(version)
    monkeypatch.delenv("DS41_MODEL", raising=False)
    program = tmp_path / "bin" / "claude"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
    program.chmod(0o755)
    home = tmp_path / "home"
    home.mkdir()
    variables = {
        **os.environ,
        **claude_code.ALONE,
        "HOME": str(home),
        "PATH": f"{program.parent}:{os.environ['PATH']}",
    }
    short = ("--system-prompt", "Be brief.", "--tools", "Read")
    with running("--kv-disk-dir", "none", model=()) as server:
        run = subprocess.run(
            [*COMMAND, "launch", "claude", "--url", server.address, "-p", "Hi", *JSON, *short],
            env=variables,
            cwd=home,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENT_S,
        )
        assert server.stop() == 0
    assert run.returncode == 0, run.stdout + run.stderr
    printed = json.loads(run.stdout)
    assert not printed["is_error"] and printed["stop_reason"] == "end_turn"
    assert "POST '/v1/messages' 200" in server.errors and "Traceback" not in server.errors
