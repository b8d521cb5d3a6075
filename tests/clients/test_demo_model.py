"""Claude Code with the demo model, which nobody scripts."""

import pytest

from bench.demo_model.read_turns import REQUESTS, read_turn
from mlx_engine.cli.folders import demo_directory
from tests.clients import claude_code
from tests.server.test_serve import COMMAND, running

PATIENT_S = 600


@pytest.mark.slow  # a CPU reads the first prompt for a minute or two
@pytest.mark.skipif(demo_directory() is None, reason="no demo model was installed")
def test_a_file_is_read_and_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one of three requests at least: the model draws its answers, and some are wrong."""
    monkeypatch.delenv("DS41_MODEL", raising=False)
    monkeypatch.delenv("DS41_API_KEY", raising=False)
    command = claude_code.program(claude_code.VERSIONS[-1])
    all_told: list[str] = []
    with running("--kv-disk-dir", "none", serve=[*COMMAND, "serve"]) as server:
        for request in REQUESTS[:3]:
            is_right, told = read_turn(command, request, server.address, PATIENT_S)
            if is_right:
                return
            all_told.append(told)
    pytest.fail("\n".join(all_told))
