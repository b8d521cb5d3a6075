"""What of training runs without a GPU; what needs PyTorch is skipped where it is absent."""

import os
import queue
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.demo_model.lookups import KINDS_OF_LOOKS, NOWHERE
from bench.demo_model.packing import SEEN_AGAIN, Feed, Packed


def _packed(T: int) -> Packed:
    ids = np.zeros((1, T), np.uint16)
    looks = np.full((KINDS_OF_LOOKS, 1, T), NOWHERE, np.uint16)
    return Packed(ids, ids, np.zeros((1, T), np.float32), looks)


def test_a_batch_is_seen_again_rather_than_waited_for():
    feed = Feed(Path(), 64, 1, 0)
    ready: queue.Queue[Any] = queue.Queue()
    feed._queue = ready  # pyright: ignore[reportPrivateUsage]
    for T in [16] * SEEN_AGAIN + [64]:
        packed = _packed(T)
        ready.put((packed.ids, packed.documents, packed.weights, packed.looks))
        assert feed.take([T], 0.5)[1]
    packed, is_new = feed.take([16], 0.5)
    assert packed.ids.shape == (1, 16) and not is_new
    # Of this length too few are known: a new one is waited for.
    new = _packed(64)
    ready.put((new.ids, new.documents, new.weights, new.looks))
    packed, is_new = feed.take([64], 0.5)
    assert packed.ids is new.ids and is_new


def test_kernels_compute_what_pytorch_does():
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "bench.demo_model.kernel_agreement"],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert run.returncode == 0, run.stdout + run.stderr


def test_without_selection_every_row_is_attended_to():
    torch = pytest.importorskip("torch")
    from bench.demo_model.export import masters_of
    from bench.demo_model.forward import Batch, TrainingForm
    from tests.reference.random_tensors import TINY_CONFIG, random_tensors

    text: dict[str, Any] = TINY_CONFIG["text_config"]
    rows = int(text["engram_compressed_vocab_size"])
    token_map = np.arange(int(text["vocab_size"]), dtype=np.int64) % rows
    masters = masters_of(TINY_CONFIG, random_tensors(TINY_CONFIG, 0))
    parameters = {key: torch.from_numpy(value) for key, value in masters.items()}
    T = 8 * text["sliding_window"]
    ids = torch.from_numpy(np.random.default_rng(0).integers(3, text["vocab_size"], (1, T)))
    batch = Batch(ids, torch.zeros_like(ids))

    def logits(selects: bool, **changed: int) -> Any:
        config = TINY_CONFIG | {"text_config": text | changed}
        form = TrainingForm(config, token_map, "cpu", torch.float32, False)
        with torch.no_grad():
            out: Any = form(parameters, batch, selects=selects)
        return out.logits

    everything = logits(True, index_topk=T, candidate_topk_blocks=T)
    assert torch.equal(logits(False), everything)
    assert not torch.equal(logits(True), everything)


def test_a_sequence_in_which_nothing_counts_has_no_loss():
    torch = pytest.importorskip("torch")
    from bench.demo_model import sublayers

    logits, targets = torch.randn(3, 5), torch.tensor([0, 1, 2])
    assert sublayers.cross_entropy(logits, targets, torch.zeros(3)) == (0, 0)


def test_weights_that_were_saved_are_loaded(tmp_path: Path):
    torch = pytest.importorskip("torch")
    from bench.demo_model import masters

    saved = {"a": torch.randn(5, 3), "b": torch.randn(2**22), "c": torch.randn(2**22)}
    (tmp_path / "masters-7.npz").write_bytes(b"of a larger run")
    masters.save(tmp_path, saved)
    assert len(list(tmp_path.iterdir())) == 2
    loaded = {key: torch.zeros_like(p) for key, p in saved.items()}
    masters.load(tmp_path, loaded)
    assert all(torch.equal(loaded[key], p.bfloat16().float()) for key, p in saved.items())
