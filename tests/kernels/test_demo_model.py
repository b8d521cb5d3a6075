"""The demo model computed by the kernels: answers that are pinned for every backend."""

import pytest

from bench.demo_model.golden import answer
from mlx_engine.cli.folders import demo_directory
from mlx_engine.loading import open_model
from tests.demo_model.test_shipped import goldens
from tests.kernels.counted import Launches

DEMO = demo_directory()
PROMPT = "What is 2+3?"


@pytest.mark.skipif(DEMO is None, reason="no demo model was installed")
def test_a_golden_answer(kernels_on: Launches) -> None:
    assert DEMO is not None
    (golden,) = (each for each in goldens() if each.prompt == PROMPT)
    with open_model(DEMO, context_tokens=4096).load("float32") as engine:
        now = answer(engine, golden.prompt, golden.effort)
    assert now.text == golden.text
    assert kernels_on is None or "moe_gate_up" in {report.kernel for report in kernels_on}
