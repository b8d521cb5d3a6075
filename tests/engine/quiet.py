"""Token sequences on which none of the reference's discrete choices is a close call.

A value that lies within float32's error of a rounding midpoint may round either way, and then all
that follows differs. Sequences without one let the engine and the reference be compared exactly,
on any machine. They are searched for with the reference alone and kept in a file.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from tests.reference.forward import Reference

# The least margin of every choice (Trace.margins). The engine's float32 values come within 4e-6 of
# the reference's, as a share of their block's largest.
MARGIN = 8e-6
FILE = Path(__file__).parents[1] / "data" / "quiet_tokens.json"


def quiet_tokens(name: str) -> list[int]:
    """The sequence of a case, for its checkpoint of seed 0."""
    sequences: dict[str, list[int]] = json.loads(FILE.read_text())
    return sequences[name]


def search(reference: Reference, T: int, seed: int = 0) -> list[int]:
    """T text tokens, each the first of a random order that keeps all margins above MARGIN."""
    rng = np.random.default_rng(seed)
    tokens: list[int] = []
    while len(tokens) < T:
        for token in rng.permutation(reference.c["image_token_id"]).tolist():
            margins = reference.forward([*tokens, token]).margins
            if min(margins.values()) > MARGIN:
                tokens.append(token)
                break
        else:
            # A dead end: what follows can only be close.
            del tokens[-3:]
    return tokens


def _write() -> None:
    """Search anew for every case of the tests: minutes, far fewer with OPENBLAS_NUM_THREADS=1."""
    from tests.devices import rank
    from tests.engine import test_mutations, test_reference
    from tests.engine.support import build
    from tests.kernels import test_model

    cases: dict[str, tuple[dict[str, Any], int]] = {
        name: (case.config, case.T) for name, case in test_reference.CASES.items()
    }
    cases["loud"] = (test_mutations.CONFIG, test_mutations.T)
    cases["devices"] = (rank.CONFIG, sum(rank.CHUNKS))
    cases["kernels"] = (test_model.CONFIG, sum(test_model.CHUNKS))
    sequences = {
        name: search(build(config, 0).reference(), T) for name, (config, T) in cases.items()
    }
    FILE.write_text(json.dumps(sequences).replace("], ", "],\n ") + "\n")


if __name__ == "__main__":
    _write()
