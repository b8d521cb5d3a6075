"""The engine computes what the demo model's training form does: logits stored by it.

`python -m bench.demo_model.agreement` stores them; it needs torch, this test does not.
"""

import numpy as np

from tests.engine.quiet import quiet_tokens
from tests.engine.support import build
from tests.reference.random_tensors import DATA, TINY_CONFIG

# Both compute in float32, in another order; the logits' standard deviation is near three.
TOLERANCE = 1e-4


def test_the_training_form_and_the_engine_agree():
    with np.load(DATA / "demo_training_form.npz") as stored:
        tokens, expected = stored["tokens"].tolist(), stored["logits"]
    assert tokens == quiet_tokens("tiny"), "store the logits anew"
    run = build(TINY_CONFIG, 0).run(tokens)
    assert np.abs(run.logits - expected).max() < TOLERANCE
    assert expected.std() > 1
