"""What of training runs without a GPU; what needs PyTorch is skipped where it is absent."""

import os
import queue
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.demo_model.packing import SEEN_AGAIN, Feed, Packed


def _packed(T: int) -> Packed:
    ids = np.zeros((1, T), np.uint16)
    return Packed(ids, ids, np.zeros((1, T), np.float32))


def test_a_batch_is_seen_again_rather_than_waited_for():
    feed = Feed(Path(), 64, 1, 0)
    ready: queue.Queue[Any] = queue.Queue()
    feed._queue = ready  # pyright: ignore[reportPrivateUsage]
    for T in [16] * SEEN_AGAIN + [64]:
        packed = _packed(T)
        ready.put((packed.ids, packed.documents, packed.weights))
        assert feed.take([T], 0.5)[1]
    packed, is_new = feed.take([16], 0.5)
    assert packed.ids.shape == (1, 16) and not is_new
    # Of this length too few are known: a new one is waited for.
    new = _packed(64)
    ready.put((new.ids, new.documents, new.weights))
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


def test_a_text_is_looked_up_where_it_stood_first():
    torch = pytest.importorskip("torch")
    from bench.demo_model.sublayers import seen_before

    # 7 stands alone, then twice behind 6; 9 stands too near to where it is asked for.
    ids = torch.tensor([[7, 5, 6, 7, 4, 6, 7, *range(100, 160), 6, 7, 1, 9, 9, 1, 160, 7]])
    documents = torch.zeros_like(ids)
    at = torch.tensor([[69, 72, 74, 2]])
    where, is_known = seen_before(ids, documents, at)
    # Two tokens agree at 3 and at 6, of which 3 is first.
    assert is_known.tolist() == [[True, False, False, False]]
    assert where[0, 0] == 3
    documents[0, :10] = 1
    assert not seen_before(ids, documents, at)[1].any()


def test_what_stands_before_the_beginning_is_not_compared():
    torch = pytest.importorskip("torch")
    from bench.demo_model.sublayers import seen_before

    # Where the sequence were a ring, 8 7 would stand at its beginning, before the other 8 7.
    ids = torch.tensor([[7, 1, 8, 7, *range(100, 160), 8, 7, 2, 8]])
    where, is_known = seen_before(ids, torch.zeros_like(ids), torch.tensor([[66]]))
    assert is_known.item() and where.item() == 3


def test_a_head_is_taught_the_place_it_looks_up():
    torch = pytest.importorskip("torch")
    from bench.demo_model.sublayers import layout_of, lookup_loss

    T, d = 8, 4
    rows = torch.eye(T)[None, :, :d] * 40
    documents = torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1]])
    at, counts = torch.tensor([[4, 7]]), torch.tensor([[True, False]])
    q = torch.zeros(1, T, d)
    q[0, 4, 2] = 1
    args = layout_of(documents), at
    assert lookup_loss(q, rows, *args, torch.tensor([[2, 0]]), counts) < 1e-3
    assert lookup_loss(q, rows, *args, torch.tensor([[1, 0]]), counts) > 10
    assert lookup_loss(q, rows, *args, torch.tensor([[1, 0]]), counts & False) == 0


def test_a_sequence_in_which_nothing_counts_has_no_loss():
    torch = pytest.importorskip("torch")
    from bench.demo_model.sublayers import cross_entropy

    logits, targets = torch.randn(3, 5), torch.tensor([0, 1, 2])
    assert [float(each) for each in cross_entropy(logits, targets, torch.zeros(3))] == [0, 0]


def test_answers_are_looked_up_from_before_others():
    torch = pytest.importorskip("torch")
    from bench.demo_model import train

    ids = torch.arange(3000)[None]
    follows = torch.zeros(1, 3000)
    follows[0, 100:200] = 1
    follows[0, 500:600] = 0.05
    at, counts = train._answered(ids, follows)
    assert at.shape == counts.shape == (1, train.LOOKUPS)
    assert sorted(at[counts].tolist()) == list(range(100, 200))
    follows[:] = 1
    at, counts = train._answered(ids, follows)
    # All over the sequence, each once.
    assert counts.all() and at.unique().numel() == train.LOOKUPS
    assert at.min() < 300 and at.max() > 2700


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
