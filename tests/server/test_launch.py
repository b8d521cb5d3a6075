"""`ds41 launch claude`: what the program is started with."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mlx_engine.server.security import Access
from tests.scripted_engine import ScriptedEngine
from tests.server.support import on_port, serving

COMMAND = [sys.executable, "-W", "error", "-c", "from mlx_engine.cli.start import main; main()"]
KEY = "a key of ours"
ELSEWHERE = {
    "ANTHROPIC_API_KEY": "a key for elsewhere",
    "CLAUDE_CODE_USE_FOUNDRY": "1",
    "HTTP_PROXY": "http://127.0.0.1:9",
    "NO_PROXY": "home.example",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a program `claude` that prints its arguments and variables."""
    program = tmp_path / "claude"
    code = "import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ)]))"
    program.write_text(f"#!{sys.executable}\n{code}\n")
    program.chmod(0o755)
    return tmp_path


def launch(path: Path, *args: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "PATH": str(path), **ELSEWHERE}
    command = [*COMMAND, "launch", "claude", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=variables)


def test_claude_code_starts_with_the_servers_variables(folder: Path) -> None:
    engine = ScriptedEngine(context_tokens=123_456)
    access = Access(api_key=KEY)
    with serving(engine, access=access) as server, on_port(server.app) as address:
        own = ("--url", address, "--api-key", KEY)
        run = launch(folder, *own, "-p", "a question", "--model", "x", "-h")
        refused = launch(folder, "--url", address)
        absent = launch(folder / "elsewhere", *own)
    assert run.returncode == 0, run.stderr
    (option, settings, *args), variables = json.loads(run.stdout)
    assert args == ["-p", "a question", "--model", "x", "-h"]
    assert option == "--settings" and KEY not in settings
    told = json.loads(settings)["env"]
    assert told["ANTHROPIC_BASE_URL"] == address
    assert {name for name in ELSEWHERE if told.get(name) == ""} == {
        "ANTHROPIC_API_KEY",
        "CLAUDE_CODE_USE_FOUNDRY",
    }
    assert variables["NO_PROXY"] == variables["no_proxy"] == "home.example,127.0.0.1"
    assert variables["ANTHROPIC_BASE_URL"] == address
    assert variables["ANTHROPIC_AUTH_TOKEN"] == KEY
    assert variables["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "123456"
    assert variables["CLAUDE_CODE_AUTO_COMPACT_WINDOW"] == "123456"
    assert not {"ANTHROPIC_API_KEY", "CLAUDE_CODE_USE_FOUNDRY"} & variables.keys()
    assert refused.returncode == 2 and "the key is missing or wrong" in refused.stderr
    assert absent.returncode == 2 and "claude is not on the PATH" in absent.stderr
    nobody = launch(folder, *own)
    assert nobody.returncode == 2 and "does not answer" in nobody.stderr
    assert "Traceback" not in refused.stderr + absent.stderr + nobody.stderr
