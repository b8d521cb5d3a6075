"""Stores what the training form computes on a random checkpoint, for the engine's tests.

    python -m bench.demo_model.agreement

Tokens without a close call, so that both round and choose alike. Before it writes, it sees that
documents packed into one sequence do not know of each other.
"""

# pyright: basic, reportMissingImports=false

from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch

from bench.demo_model import roundings
from bench.demo_model.export import masters_of
from bench.demo_model.forward import Batch, TrainingForm
from tests.engine.quiet import quiet_tokens
from tests.reference.random_tensors import DATA, TINY_CONFIG, random_tensors

FILE: Path = DATA / "demo_training_form.npz"
SEED = 0


def main() -> None:
    """Compute, check and write."""
    text = TINY_CONFIG["text_config"]
    token_map = np.arange(text["vocab_size"]) % text["engram_compressed_vocab_size"]
    form = TrainingForm(TINY_CONFIG, token_map, "cpu", torch.float32, False)
    masters = masters_of(TINY_CONFIG, random_tensors(TINY_CONFIG, SEED))
    parameters = {key: torch.from_numpy(value) for key, value in masters.items()}
    tokens = quiet_tokens("tiny")
    W = text["sliding_window"]

    def logits(*documents: list[int]) -> np.ndarray:
        """Of each document's tokens, all packed into one sequence."""
        ids, numbers, kept = [], [], []
        for number, document in enumerate(documents):
            room = len(document) + len(document) % 2
            kept += range(len(ids), len(ids) + len(document))
            ids += document + [0] * (room - len(document))
            numbers += [number] * room
        padding = -len(ids) % W
        batch = Batch(torch.tensor([ids + [0] * padding]), torch.tensor([numbers + [-2] * padding]))
        with torch.no_grad():
            return form(parameters, batch).logits.numpy()[kept]

    # Rounded after their rotation, cached values depend on where a document stands.
    with patch.multiple(roundings, **dict.fromkeys(("window", "index", "compressed"), _same)):
        packed = logits(tokens[:7], tokens, tokens[:20])[7 : 7 + len(tokens)]
        difference = abs(packed - logits(tokens)).max()
    print("packed against alone:", difference)
    assert difference < 1e-3
    np.savez_compressed(FILE, tokens=np.array(tokens), logits=logits(tokens))


def _same(x: torch.Tensor) -> torch.Tensor:
    return x


if __name__ == "__main__":
    main()
