"""What teaches the demo model to look names up, and what keeps a run's weights: needs PyTorch."""

# pyright: basic, reportMissingImports=false

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from bench.demo_model import masters, train  # noqa: E402
from bench.demo_model.sublayers import (  # noqa: E402
    cross_entropy,
    layout_of,
    lookup_loss,
    seen_before,
)


def test_a_text_is_looked_up_where_it_stood_first():
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
    # Where the sequence were a ring, 8 7 would stand at its beginning, before the other 8 7.
    ids = torch.tensor([[7, 1, 8, 7, *range(100, 160), 8, 7, 2, 8]])
    where, is_known = seen_before(ids, torch.zeros_like(ids), torch.tensor([[66]]))
    assert is_known.item() and where.item() == 3


def test_a_head_is_taught_the_place_it_looks_up():
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
    logits, targets = torch.randn(3, 5), torch.tensor([0, 1, 2])
    assert [float(each) for each in cross_entropy(logits, targets, torch.zeros(3))] == [0, 0]


def test_answers_are_looked_up_from_before_others():
    ids = torch.arange(3000)[None]
    follows = torch.zeros(1, 3000)
    follows[0, 100:200] = 1
    follows[0, 500:600] = 0.05
    at, counts = train.answered(ids, follows)
    assert at.shape == counts.shape == (1, train.LOOKUPS)
    assert sorted(at[counts].tolist()) == list(range(100, 200))
    follows[:] = 1
    at, counts = train.answered(ids, follows)
    # All over the sequence, each once.
    assert counts.all() and at.unique().numel() == train.LOOKUPS
    assert at.min() < 300 and at.max() > 2700


def test_weights_that_were_saved_are_loaded(tmp_path: Path):
    saved = {"a": torch.randn(5, 3), "b": torch.randn(2**22), "c": torch.randn(2**22)}
    (tmp_path / "masters-7.npz").write_bytes(b"of a larger run")
    masters.save(tmp_path, saved)
    assert len(list(tmp_path.iterdir())) == 2
    loaded = {key: torch.zeros_like(p) for key, p in saved.items()}
    masters.load(tmp_path, loaded)
    assert all(torch.equal(loaded[key], p.bfloat16().float()) for key, p in saved.items())
