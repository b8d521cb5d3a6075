"""How heads of the demo model are taught to look names up: needs PyTorch."""

# pyright: basic, reportMissingImports=false

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from bench.demo_model import train  # noqa: E402
from bench.demo_model.export import masters_of  # noqa: E402
from bench.demo_model.forward import TrainingForm  # noqa: E402
from bench.demo_model.lookups import ASKED, KINDS_OF_LOOKS, NEXT, NOWHERE, TOOL  # noqa: E402
from bench.demo_model.sublayers import layout_of  # noqa: E402
from bench.demo_model.taught import (  # noqa: E402
    MOST_TAUGHT,
    Aims,
    aims_of,
    layers_of,
    lookup_loss,
    seen_before,
)
from tests.reference.random_tensors import TINY_CONFIG, random_tensors  # noqa: E402

CONFIG = Path(__file__).parents[2] / "mlx_engine" / "demo" / "config.json"


def nowhere(T: int):
    return torch.full((KINDS_OF_LOOKS, 1, T), NOWHERE)


def places(aims: Aims) -> dict[int, int]:
    """Of a sequence: where the tokens that count look."""
    at, where, counts = (each[0].tolist() for each in aims)
    assert len(set(at)) == len(at)
    return {token: place for token, place, is_one in zip(at, where, counts, strict=True) if is_one}


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
    layout = layout_of(torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1]]))
    at, counts = torch.tensor([[4, 7]]), torch.tensor([[True, False]])
    q = torch.zeros(1, T, d)
    q[0, 4, 2] = 1

    def loss(place: int, counts: Any) -> float:
        return float(lookup_loss(q, rows, layout, Aims(at, torch.tensor([[place, 0]]), counts)))

    assert loss(2, counts) < 1e-3
    assert loss(1, counts) > 10
    assert loss(1, counts & False) == 0


def test_a_row_of_two_tokens_is_hit_at_either_of_them():
    T, d = 12, 4
    rows = torch.zeros(1, T // 2, d)
    # A query finds row 1, but would rather find rows 0, 4 and 5.
    rows[0, :, 0] = torch.tensor([90.0, 40.0, 0.0, 0.0, 90.0, 90.0])
    layout = layout_of(torch.tensor([[0] * 2 + [1] * 10]))
    q = torch.zeros(1, T, d)
    q[..., 0] = 1

    def loss(at: int, place: int) -> float:
        aims = Aims(torch.tensor([[at]]), torch.tensor([[place]]), torch.tensor([[True]]))
        return float(lookup_loss(q, rows, layout, aims))

    # Row 0 is of another document, row 4 is closed by token 9, row 5 by none of these.
    for place in (2, 3):
        assert loss(7, place) == loss(8, place) < 1e-3
        assert loss(9, place) == pytest.approx(25, abs=1e-3)
    assert loss(8, 4) == loss(8, 5) == pytest.approx(20, abs=1e-3)
    assert loss(9, 8) == loss(9, 9) < 1e-3
    # Between equal rows the loss tells how many are seen.
    q[:] = 0
    for at, seen in ((3, 1), (4, 1), (5, 2), (6, 2), (7, 3)):
        assert loss(at, 2) == pytest.approx(math.log(seen), abs=1e-6)


def test_the_loss_is_the_mean_of_those_that_count():
    torch.manual_seed(0)
    T, d = 16, 8
    q, rows = torch.randn(2, T, d, requires_grad=True), torch.randn(2, T, d)
    layout = layout_of(torch.zeros(2, T, dtype=torch.int64))
    at = torch.tensor([[3, 9, 15], [0, 7, 11]])
    where = torch.tensor([[1, 2, 9], [0, 7, 3]])
    counts = torch.tensor([[True, False, True], [False, True, True]])
    expected = [
        -(rows[b, : t + 1] @ q[b, t] * d**-0.5).log_softmax(-1)[place]
        for b, t, place in ((0, 3, 1), (0, 15, 9), (1, 7, 7), (1, 11, 3))
    ]
    loss = lookup_loss(q, rows, layout, Aims(at, where, counts))
    assert float(loss) == pytest.approx(float(sum(expected)) / 4, rel=1e-5)
    # Only those that count are taught.
    (gradient,) = torch.autograd.grad(loss, q)
    taught_rows = gradient.abs().sum(-1).nonzero().tolist()
    assert taught_rows == [[0, 3], [0, 15], [1, 7], [1, 11]]


def test_answers_are_looked_up_from_before_others():
    # The second half says again what the first one does.
    ids = torch.arange(1500).repeat(2)[None]
    documents = torch.zeros_like(ids)
    follows = torch.zeros(1, 3000)
    follows[0, 1700:1800] = 1
    follows[0, 2500:2600] = 0.05
    aims = aims_of(ids, documents, follows, nowhere(3000))[ASKED]
    assert aims.at.shape == aims.where.shape == aims.counts.shape == (1, MOST_TAUGHT)
    assert places(aims) == {token: token - 1501 for token in range(1700, 1800)}
    follows[:] = 1
    aims = aims_of(ids, documents, follows, nowhere(3000))[ASKED]
    # All over the sequence, each once.
    assert aims.at.unique().numel() == MOST_TAUGHT
    assert aims.at.min() < 300 and aims.at.max() > 2700
    found = places(aims)
    assert found and all(token - place == 1501 for token, place in found.items())


def test_each_kind_is_taught_its_tokens_and_places():
    ids = torch.arange(200).repeat(2)[None]
    looks = nowhere(400)
    expected = {TOOL: {20: 7, 21: 7, 350: 9}, NEXT: {310: 40, 311: 41}, ASKED: {310: 50, 320: 60}}
    for kind, tokens in expected.items():
        for token, place in tokens.items():
            looks[kind, 0, token] = place
    follows = torch.zeros(1, 400)
    follows[0, 309:323] = 1
    aims = aims_of(ids, torch.zeros_like(ids), follows, looks)
    assert set(aims) == set(expected)
    for kind in (TOOL, NEXT):
        assert places(aims[kind]) == expected[kind]
    # Others look at the token before them, where it stood first.
    # A token with a place is taught that alone, also one that knows only what comes next.
    others = {token: token - 201 for token in range(309, 323) if token not in (310, 311, 320)}
    assert places(aims[ASKED]) == expected[ASKED] | others


def test_places_are_taught_before_what_stood_before():
    ids = torch.arange(2000).repeat(2)[None]
    looks = nowhere(4000)
    named = torch.arange(2000, 4000, 2)
    looks[ASKED, 0, named] = named - 1500
    aims = aims_of(ids, torch.zeros_like(ids), torch.ones(1, 4000), looks)[ASKED]
    found = places(aims)
    assert len(found) > 1000
    assert {token: place for token, place in found.items() if token - place == 1500} == dict(
        zip(named.tolist(), (named - 1500).tolist(), strict=True)
    )


def test_of_more_than_are_taught_all_have_their_own_place():
    ids = torch.arange(3000)[None]
    looks = nowhere(3000)
    looks[:, 0, 1:] = torch.arange(2999)
    for aims in aims_of(ids, torch.zeros_like(ids), torch.zeros(1, 3000), looks).values():
        found = places(aims)
        assert len(found) == MOST_TAUGHT
        assert all(place == token - 1 for token, place in found.items())


@pytest.mark.parametrize("R", [1, 2])
def test_where_there_is_nothing_to_look_at_nothing_is_taught(R: int):
    T, d = 64, 8
    documents = torch.tensor([[0] * 40 + [1] * 24])
    aims = aims_of(torch.arange(T)[None], documents, torch.ones(1, T), nowhere(T))
    assert sorted(aims) == [TOOL, ASKED, NEXT]
    for each in aims.values():
        assert not each.counts.any()
        # The first token of a document sees no row of two.
        q = torch.randn(1, T, d, requires_grad=True)
        rows = torch.randn(1, T // R, d, requires_grad=True)
        loss = lookup_loss(q, rows, layout_of(documents), each)
        assert loss == 0
        for gradient in torch.autograd.grad(loss, (q, rows)):
            assert (gradient == 0).all()


def test_a_step_tells_the_loss_of_each_head_that_is_taught():
    text: dict[str, Any] = TINY_CONFIG["text_config"]
    vocabulary = int(text["vocab_size"])
    token_map = np.arange(vocabulary) % int(text["engram_compressed_vocab_size"])
    tensors = masters_of(TINY_CONFIG, random_tensors(TINY_CONFIG, 0))
    parameters = {key: torch.from_numpy(value) for key, value in tensors.items()}
    form = TrainingForm(TINY_CONFIG, token_map, "cpu", torch.float32, False)
    T = 2 * text["sliding_window"]
    ids = torch.from_numpy(np.random.default_rng(0).integers(3, vocabulary, (1, T)))
    looks = nowhere(T).int()
    looks[[TOOL, NEXT], 0, T - 1] = T // 2
    args = ids.int(), torch.zeros(1, T).int(), torch.full((1, T), 0.05), looks
    with torch.no_grad():
        lookup_losses = train.losses(form, parameters, *args)[3]
    assert layers_of(TINY_CONFIG) == {3: TOOL, 4: ASKED, 6: NEXT}
    first, second, third = lookup_losses.tolist()
    assert 0 < first < 100 and second == 0 and 0 < third < 100


def test_other_configurations_teach_other_layers():
    """Around the layer that names candidates, and the last one that chooses rows."""
    for first, sources, layers in ((2, [2, 5], [1, 2, 5]), (6, [3, 6, 9, 12], [5, 6, 12])):
        text = {"candidate_source_layer_id": first, "index_source_layer_ids": sources}
        expected = dict(zip(layers, (TOOL, ASKED, NEXT), strict=True))
        assert layers_of({"text_config": text}) == expected


def test_the_demo_model_has_a_layer_for_each_kind():
    config = json.loads(CONFIG.read_text())
    layers = layers_of(config)
    assert layers == {3: TOOL, 4: ASKED, 6: NEXT}
    # The losses are told in this order, and each layer has rows to look at.
    assert list(layers) == sorted(layers)
    ratios = config["text_config"]["compress_ratios"]
    assert [ratios[layer] for layer in layers] == [2, 1, 1]
