"""`ds41 bench model` over the tiny model: every prompt is read whole, and every figure follows."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from mlx_engine.cli.main import app
from mlx_engine.engine import Engine

pytestmark = pytest.mark.usefixtures("no_model_is_named")


def bench(*args: str) -> Result:
    return CliRunner().invoke(app, ["bench", "model", *args])


def test_each_context_is_read_anew_and_answered_past_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompts: list[Sequence[int]] = []
    generate = Engine.generate

    def noting(self: Engine, token_ids: Sequence[int], **options: Any) -> Any:
        prompts.append(token_ids)
        assert options["ignore_eos"]
        return generate(self, token_ids, **options)

    monkeypatch.setattr(Engine, "generate", noting)
    result = bench("--contexts", "40,70,40", "--tokens", "3")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert [line.split()[0] for line in lines[:-1]] == ["context", "40", "70", "40"]
    record = json.loads(lines[-1])
    assert (record["devices"], record["answered_tokens"]) == (1, 3)
    # The first is the one that does not count; no two begin alike, so that no session is used.
    assert [len(each) for each in prompts] == [40, 40, 70, 40]
    assert len({tuple(each[:4]) for each in prompts}) == 4
    for found, tokens in zip(record["contexts"], (40, 70, 40), strict=True):
        assert found["context_tokens"] == tokens
        assert found["prefill_s"] * found["prefill_tokens_per_s"] == pytest.approx(tokens, rel=1e-3)
        assert found["decode_ms"] * found["decode_tokens_per_s"] == pytest.approx(1e3, rel=1e-3)
        assert 0 <= found["engram_share"] < 1
        assert found["peak_bytes"] > 0


@pytest.mark.parametrize("contexts", ["", "x", "512,", "0", "12,-3"])
def test_contexts_that_are_none(contexts: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        app(["bench", "model", "--contexts", contexts])
    assert end.value.code == 2
    assert f"--contexts is {contexts!r}" in capsys.readouterr().err


def test_a_context_that_the_model_has_not(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        app(["bench", "model", "--contexts", "512,131066", "--tokens", "3"])
    assert end.value.code == 2
    said = "has 131066, but beside 7 tokens of answer the model's context has room for 131065"
    assert said in capsys.readouterr().err
