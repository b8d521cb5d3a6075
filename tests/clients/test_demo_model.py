"""Claude Code with the demo model, which nobody scripts."""

import pytest

from bench.demo_model.read_turns import REQUESTS, read_turn
from tests.clients import claude_code
from tests.server.test_serve import COMMAND, running


@pytest.mark.slow  # a CPU reads the first prompt for a minute or two
def test_a_file_is_read_and_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one of three requests at least: most are right, and the model draws its answers."""
    monkeypatch.delenv("DS41_MODEL", raising=False)
    monkeypatch.delenv("DS41_API_KEY", raising=False)
    command = claude_code.program(claude_code.VERSIONS[-1])
    all_told: list[str] = []
    with running("--kv-disk-dir", "none", serve=[*COMMAND, "serve"]) as server:
        for request in REQUESTS[:3]:
            is_right, told = read_turn(command, *request, server.address)
            if is_right:
                return
            all_told.append(told)
    pytest.fail("\n".join(all_told))
