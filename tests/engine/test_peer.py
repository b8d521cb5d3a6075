"""The model against mlx-lm's own on the same checkpoint: float32, Engram off."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray

import mlx_engine.model
from mlx_engine.checkpoint import open_checkpoint
from mlx_engine.formats import CacheFormats
from mlx_engine.model import Model
from mlx_engine.ops.attention import SelectedRows, WindowRows
from mlx_engine.ops.mhc import Mixing
from mlx_engine.ops.router import Routing
from mlx_engine.session import Session
from mlx_engine.state import SessionState
from tests.checkpoints import write_checkpoint
from tests.peer import PeerModel, PeerSession, import_peer, load_peer, without_roundings
from tests.reference.random_tensors import TINY_CONFIG, random_tensors

# Beyond the candidate blocks' capacity, the top-k, several windows and the YaRN length.
T = 61
TINY: dict[str, Any] = {
    **TINY_CONFIG["text_config"],
    "engram_layer_ids": [],
    "engram_num_embeddings": [],
}
CONFIGS: dict[str, dict[str, Any]] = {
    "tiny": TINY,
    # Every row selected, groups of three, a window-only layer on top, plain router weights.
    "all-rows": {
        **TINY,
        "compress_ratios": [3, 3, 3, 0, 3, 3, 3, 0, 0, 0],
        "kv_source_layer_ids": [0, 2],
        "index_source_layer_ids": [0, 2, 4],
        "candidate_source_layer_id": -1,
        "index_topk": 64,
        "norm_topk_prob": False,
        "gate_temp": 1.5,
        "hc_mult": 2,
        "hc_sinkhorn_iters": 3,
        "sliding_window": 16,
    },
    # Other widths, a clamp that bites, blocks of four rows.
    "wide": {
        **TINY,
        "hidden_size": 96,
        "head_dim": 96,
        "qk_rope_head_dim": 32,
        "num_attention_heads": 6,
        "o_groups": 3,
        "index_n_heads": 8,
        "index_head_dim": 64,
        "index_topk": 8,
        "candidate_topk_blocks": 3,
        "candidate_block_size": 4,
        "num_experts_per_tok": 3,
        "swiglu_limit": 0.5,
        "sliding_window": 5,
    },
}
# In these no rounding code of a cached row lies so near a midpoint that f32 noise can flip it.
SEEDS = {"tiny": 30, "all-rows": 34, "wide": 8}
SPLITS: dict[str, Sequence[int]] = {
    "one-piece": (T,),
    "chunks": (1, 6, 2, 17, 1, 1, 20, 13),
    "steps": (45, *[1] * (T - 45)),
}


class Choices:
    """The experts [T, k] and the compressed rows [T, S] chosen in each call, in order."""

    def __init__(self) -> None:
        self.experts: list[NDArray[Any]] = []
        self.rows: list[NDArray[np.bool_]] = []

    def add_experts(self, ids: mx.array) -> None:
        self.experts.append(np.sort(np.array(ids, np.int32), axis=-1))

    def add_rows(self, ids: mx.array | None, n_rows: int, n_queries: int) -> None:
        """ids: [Q, k], -1 for none."""
        chosen = np.zeros((n_queries, n_rows + 1), dtype=np.bool_)
        if ids is not None:
            np.put_along_axis(chosen, np.array(ids, np.int32), True, axis=-1)
        self.rows.append(chosen[:, :n_rows])


@pytest.fixture(scope="module", params=CONFIGS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def models(name: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, PeerModel]:
    config = {**TINY_CONFIG, "text_config": CONFIGS[name]}
    directory = tmp_path_factory.mktemp(name)
    write_checkpoint(directory, config, random_tensors(config, SEEDS[name]))
    checkpoint = open_checkpoint(directory)
    model = Model(checkpoint.config, checkpoint.read_weights(), mx.float32)
    return model, load_peer(directory, mx.float32)


def text_ids(name: str) -> list[int]:
    return np.random.default_rng(SEEDS[name]).integers(0, 255, T).tolist()


def record_own(monkeypatch: pytest.MonkeyPatch) -> Choices:
    choices = Choices()
    route, attention = mlx_engine.model.mhc_route, mlx_engine.model.sparse_attention

    def recorded_route(*args: Any, **options: Any) -> tuple[mx.array, mx.array, Mixing, Routing]:
        streams, x, mixing, routing = route(*args, **options)
        choices.add_experts(routing.chosen()[0])
        return streams, x, mixing, routing

    def recorded_attention(
        q: mx.array,
        first_query: int,
        window: WindowRows,
        selected: SelectedRows | None,
        sinks: mx.array,
        **options: Any,
    ) -> mx.array:
        ids, n_rows = None, 0
        if selected is not None:
            n_rows = selected.rows.shape[0]
            every = mx.arange(n_rows)[None]
            ids = mx.where(every < selected.visible[:, None], every, -1)
            ids = ids if selected.ids is None else selected.ids
        choices.add_rows(ids, n_rows, q.shape[0])
        return attention(q, first_query, window, selected, sinks, **options)

    monkeypatch.setattr(mlx_engine.model, "mhc_route", recorded_route)
    monkeypatch.setattr(mlx_engine.model, "sparse_attention", recorded_attention)
    return choices


def record_peer(monkeypatch: pytest.MonkeyPatch) -> Choices:
    choices = Choices()
    module = import_peer("models.deepseek_v41")
    route, attention = module.Router.__call__, module._sparse_attention

    def recorded_route(self: Any, x: mx.array) -> tuple[mx.array, mx.array]:
        ids, weights = route(self, x)
        choices.add_experts(ids)
        return ids, weights

    def recorded_attention(
        q: mx.array, kvs: list[mx.array], indices: list[mx.array], **options: Any
    ) -> mx.array:
        is_compressed = len(kvs) == 2
        choices.add_rows(
            indices[1][0] if is_compressed else None,
            kvs[1].shape[1] if is_compressed else 0,
            q.shape[1],
        )
        return attention(q, kvs, indices, **options)

    monkeypatch.setattr(module.Router, "__call__", recorded_route)
    monkeypatch.setattr(module, "_sparse_attention", recorded_attention)
    return choices


def own_logits(
    model: Model, ids: list[int], split: Sequence[int], formats: CacheFormats | None = None
) -> NDArray[np.float32]:
    state = SessionState(model.config, formats)
    return np.concatenate(
        [np.array(model.forward(part, state, None), np.float32) for part in pieces(ids, split)]
    )


def peer_logits(peer: PeerModel, ids: list[int], split: Sequence[int]) -> NDArray[np.float32]:
    session = PeerSession(peer)
    return np.concatenate(
        [np.array(session.logits(part), np.float32) for part in pieces(ids, split)]
    )


def pieces(ids: list[int], split: Sequence[int]) -> list[list[int]]:
    ends = np.cumsum(split)
    assert ends[-1] == len(ids)
    return [ids[end - size : end] for end, size in zip(ends, split, strict=True)]


@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS)
def test_logits_and_choices_are_the_peers(
    models: tuple[Model, PeerModel],
    name: str,
    split: Sequence[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, peer = models
    own_choices, peer_choices = record_own(monkeypatch), record_peer(monkeypatch)
    own = own_logits(model, text_ids(name), split)
    expected = peer_logits(peer, text_ids(name), split)
    assert 2.5 < expected.std() < 3.5
    np.testing.assert_allclose(own, expected, rtol=0, atol=1e-3)
    calls = len(split) * model.config.num_hidden_layers
    assert len(own_choices.rows) == len(own_choices.experts) == calls
    for kind in ("experts", "rows"):
        pairs = zip(getattr(own_choices, kind), getattr(peer_choices, kind), strict=True)
        for call, (chosen, wanted) in enumerate(pairs):
            np.testing.assert_array_equal(chosen, wanted, err_msg=f"{kind} of call {call}")


def test_without_cache_roundings_only_noise_is_left(
    models: tuple[Model, PeerModel], name: str
) -> None:
    model, peer = models
    ids, split = text_ids(name), SPLITS["chunks"]
    with without_roundings() as formats:
        own, expected = own_logits(model, ids, split, formats), peer_logits(peer, ids, split)
    np.testing.assert_allclose(own, expected, rtol=0, atol=5e-5)


def test_a_session_goes_on_as_the_peer_does(models: tuple[Model, PeerModel], name: str) -> None:
    model, peer = models
    ids = text_ids(name)
    own, other = Session(model, None, chunk_tokens=16), PeerSession(peer)
    pairs = [(own.sync(ids[:50]), other.prefill(ids[:50], chunk_tokens=16))]
    pairs += [(own.step(token_id), other.logits([token_id])[0]) for token_id in ids[50:]]
    for logits, expected in pairs:
        np.testing.assert_allclose(
            np.array(logits, np.float32), np.array(expected, np.float32), rtol=0, atol=1e-3
        )
