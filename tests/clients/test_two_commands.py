"""The README's two commands: `ds41 serve` and `ds41 launch claude`, with the demo model."""

import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.clients import claude_code
from tests.server.test_serve import COMMAND, running

ROOT = Path(__file__).resolve().parents[2]
PATIENT_S = 300
JSON = ("--output-format", "json")
SHORT = ("--system-prompt", "Be brief.", "--tools", "Read")
# What the commands name that this machine need not have.
MODEL = "--model ~/DeepSeek-V4.1-Flash"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty cache folder of the commands, which know no model."""
    monkeypatch.delenv("DS41_MODEL", raising=False)
    monkeypatch.delenv("DS41_API_KEY", raising=False)
    monkeypatch.setenv("DS41_CACHE_DIR", str(tmp_path / "cache"))


@pytest.mark.parametrize("version", claude_code.VERSIONS)
@pytest.mark.usefixtures("cache")
def test_a_turn_by_the_commands_of_the_readme(version: str, tmp_path: Path) -> None:
    variables = with_claude(version, tmp_path)
    turn([*COMMAND, "serve"], [*COMMAND, "launch", "claude"], variables, tmp_path)


@pytest.mark.slow  # it also needs a package index
@pytest.mark.usefixtures("cache")
def test_a_turn_from_a_clone_by_the_very_words_of_the_readme(tmp_path: Path) -> None:
    variables = with_claude(claude_code.VERSIONS[-1], tmp_path)
    clone = cloned(tmp_path / "clone")
    (commands,) = set(documented("README.md")) & set(documented("docs/clients.md"))
    serve, launch = commands
    assert serve.endswith(MODEL)
    make, _, serve = serve.removesuffix(MODEL).partition(" && ")
    outer = {"MAKEFLAGS", "MAKELEVEL", "VIRTUAL_ENV"}
    plain = {name: value for name, value in os.environ.items() if name not in outer}
    made = subprocess.run(shlex.split(make), env=plain, cwd=clone, capture_output=True)
    assert made.returncode == 0, (made.stdout + made.stderr).decode()
    turn(shlex.split(serve), shlex.split(launch), variables, clone)


def documented(page: str) -> list[tuple[str, str]]:
    """The two commands, wherever a page has them one below the other, without what they say."""
    pairs = re.findall(
        r"^    (make ds41 && .*)\n    (.*)$", (ROOT / page).read_text(), re.MULTILINE
    )
    return [
        (first.split(" #")[0].strip(), second.split(" #")[0].strip()) for first, second in pairs
    ]


def cloned(folder: Path) -> Path:
    """The files that git knows, as they are now."""
    if not (ROOT / ".git").exists():
        pytest.skip("this is no clone")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    for name in filter(None, os.fsdecode(listed.stdout).split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


def with_claude(version: str, folder: Path) -> dict[str, str]:
    """Variables of a user who has that Claude Code, for another server and behind a dead proxy."""
    command = claude_code.program(version)
    program = folder / "bin" / "claude"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
    program.chmod(0o755)
    home = folder / "home"
    (home / ".claude").mkdir(parents=True)
    elsewhere = {"ANTHROPIC_BASE_URL": claude_code.DEAD_PROXY, "CLAUDE_CODE_USE_BEDROCK": "1"}
    (home / ".claude" / "settings.json").write_text(json.dumps({"env": elsewhere}))
    alone = {name: value for name, value in claude_code.ALONE.items() if name != "NO_PROXY"}
    return {
        **os.environ,
        **alone,
        "HOME": str(home),
        "PATH": f"{program.parent}:{os.environ['PATH']}",
    }


def turn(
    serve: Sequence[str], launch: Sequence[str], variables: Mapping[str, str], folder: Path
) -> None:
    """Ask one question by the two commands, both started in a folder."""
    with running("--kv-disk-dir", "none", serve=serve, cwd=folder) as server:
        run = subprocess.run(
            [*launch, "--url", server.address, "-p", "Hi", *JSON, *SHORT],
            env=variables,
            cwd=folder,
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
