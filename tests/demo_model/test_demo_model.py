"""The demo model without its training: sizes, chat format, cases, packing, export."""

import json
from dataclasses import replace
from math import prod
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from bench.demo_model.cases import KINDS, case
from bench.demo_model.chat import Chat, Encoder, format_texts, spans
from bench.demo_model.evaluate import conversation_of
from bench.demo_model.export import fp4_codes, fp8_codes, masters_of, tensors_of
from bench.demo_model.heads import agent
from bench.demo_model.packing import NO_DOCUMENT, pack
from bench.demo_model.sizes import demo_config
from bench.demo_model.tasks import chat_of
from mlx_engine.config_file import parse_config
from mlx_engine.inventory import tensor_specs
from mlx_engine.layer_plan import LayerKind, layer_plan
from mlx_engine.prompt import encode
from tests.fake_engine import tiny_tokenizer, tiny_tokenizer_json
from tests.reference.formats import e4m3, e8m0, fp4_weight, fp8_weight
from tests.reference.random_tensors import TINY_CONFIG, random_tensors, tensor_layout

CONFIG = demo_config(compressed_vocab_size=1500, image_token_id=2000)


def test_sizes_keep_the_promises():
    config = parse_config(CONFIG)
    specs = [spec for spec in tensor_specs(config) if not spec.name.endswith(".scale")]
    assert sum(spec.n_bytes for spec in tensor_specs(config)) < 14e6
    active = 0.0
    for spec in specs:
        count = prod(spec.shape) * (2 if spec.dtype == "I8" else 1)
        if ".experts." in spec.name:
            active += count * config.num_experts_per_tok / config.n_routed_experts
        elif not spec.name.endswith(("embed.weight", ".bias_vl")):
            active += count
    assert active < 5e6


def test_every_mechanism_is_there():
    config = parse_config(CONFIG)
    plans = layer_plan(config)
    assert {plan.kind for plan in plans} == set(LayerKind)
    assert {plan.ratio for plan in plans} == {0, 1, 2}
    assert config.engram is not None and len(config.engram.layer_ids) == 2
    assert any(plan.is_candidate_source for plan in plans)
    # In a context of 32,000 tokens the selection takes few, also of the candidates.
    assert config.index_topk * 4 <= config.candidate_topk_blocks * config.candidate_block_size
    assert config.candidate_topk_blocks * config.candidate_block_size * 4 < 32_000


@pytest.mark.parametrize("thinks", [False, True])
@pytest.mark.parametrize("tokens", [400, 3000])
def test_chats_are_written_as_the_engine_writes_them(tokens: int, thinks: bool):
    encoder, texts = Encoder(tiny_tokenizer_json()), format_texts()
    roles: set[str] = set()
    for seed in range(12):
        chat = replace(chat_of(Random(seed), tokens), thinks=thinks)
        expected = encode(conversation_of(chat), tiny_tokenizer()).token_ids
        asked = replace(chat, turns=chat.turns[:-1])
        text = "".join(text for text, _ in spans(asked, texts, opens=True))
        assert encoder.marked(text) == list(expected)
        roles |= {turn.role for turn in chat.turns}
    assert roles == {"user", "assistant"} | ({"tool", "system"} if tokens > 700 else set())


@pytest.mark.parametrize("tokens", [1500, 6000])
def test_long_heads_are_written_as_the_engine_writes_them(tokens: int):
    encoder, texts = Encoder(tiny_tokenizer_json()), format_texts()
    roles: set[str] = set()
    for seed in range(20):
        chat = Chat()
        agent(Random(seed), chat, tokens)
        expected = encode(conversation_of(chat), tiny_tokenizer()).token_ids
        asked = replace(chat, turns=chat.turns[:-1])
        text = "".join(text for text, _ in spans(asked, texts, opens=True))
        assert encoder.marked(text) == list(expected)
        roles |= {turn.role for turn in chat.turns}
    assert roles == {"user", "system", "assistant", "tool"}


def test_the_answer_is_what_the_model_learns():
    chat = Chat(thinks=True)
    chat.user("1 + 1?")
    chat.answer("2", "easy")
    encoder = Encoder(tiny_tokenizer_json())
    ids, weights, _ = encoder.document(chat, format_texts())
    learned = encoder.marked("easy</think>2<｜end▁of▁sentence｜>")
    assert ids[weights == 1].tolist() == learned
    assert ids[-len(learned) :].tolist() == learned


@pytest.mark.parametrize("kind", KINDS)
def test_cases_ask_for_what_can_be_known(kind: str):
    """Held-out cases are the same each time, differ, and end with an answer."""
    first, again, other = (case(kind, number) for number in (0, 0, 1))
    assert first == again
    assert first != other
    answer = first.turns[-1]
    assert answer.role == "assistant" and (answer.text or answer.calls)
    if kind.startswith("recall"):
        value = answer.text.rsplit(" is ", 1)[1].removesuffix(".")
        assert value in first.turns[0].text
    for call in answer.calls:
        definition = next(tool for tool in first.tools if tool["name"] == call.name)
        assert set(definition["parameters"]["required"]) <= set(call.arguments)


def test_documents_are_packed_evenly_and_padding_counts_nothing():
    encoder, texts = Encoder(tiny_tokenizer_json()), format_texts()
    packed = pack(Random(0), encoder, texts, B=4, T=2048, lookups=0.2)
    rows, at = np.nonzero(packed.documents != NO_DOCUMENT)
    starts_anew = (at == 0) | (packed.documents[rows, at] != packed.documents[rows, at - 1])
    assert starts_anew.sum() > 4
    assert (at[starts_anew] % 2 == 0).all()
    assert (packed.ids[rows, at][starts_anew] == 0).all(), "a document begins with a BOS"
    assert not packed.weights[packed.documents == NO_DOCUMENT].any()


def test_every_document_has_something_to_learn():
    encoder, texts = Encoder(tiny_tokenizer_json()), format_texts()
    for seed in range(3):
        packed = pack(Random(seed), encoder, texts, B=8, T=512, lookups=0)
        for documents, weights in zip(packed.documents, packed.weights, strict=True):
            numbers = set(documents.tolist()) - {NO_DOCUMENT}
            assert numbers == set(documents[weights == 1].tolist())


def test_export_gives_back_every_value_of_a_checkpoint():
    tensors = random_tensors(TINY_CONFIG, 0)
    masters = masters_of(TINY_CONFIG, tensors)
    exported = tensors_of(TINY_CONFIG, masters)
    assert exported.keys() == tensor_layout(TINY_CONFIG).keys()
    for name, (_, shape) in tensor_layout(TINY_CONFIG).items():
        assert exported[name].shape == shape
    again = masters_of(TINY_CONFIG, exported)
    assert all(np.array_equal(again[key], value) for key, value in masters.items())


floats = arrays(np.float32, (32, 64), elements=st.floats(-100, 100, width=32))


@given(floats)
def test_fp4_is_the_nearest(values: Any):
    codes, scales = fp4_codes(values)
    decoded = fp4_weight(codes, scales)
    step = e8m0(scales).repeat(32, axis=1)
    assert (np.abs(decoded) <= 6 * step).all() and (np.abs(values) <= 6 * step).all()
    # Half of the widest gap, 4 to 6, and of the narrowest below 2.
    assert (np.abs(decoded - values) <= step * np.where(np.abs(values) < 2 * step, 0.25, 1)).all()


@given(floats, st.sampled_from([1, 32]))
def test_fp8_is_the_nearest(values: Any, rows: int):
    codes, scales = fp8_codes(values, rows=rows)
    if rows == 32:
        decoded = fp8_weight(codes, scales)
    else:
        decoded = e4m3(codes) * e8m0(scales).repeat(32, axis=1)
    step = e8m0(scales).repeat(rows, axis=0).repeat(32, axis=1)
    # Three bits of mantissa, and 2^-9 units where they are subnormal.
    assert (np.abs(decoded - values) <= np.maximum(np.abs(values) / 16, step * 2.0**-10)).all()


def test_format_texts_are_of_the_format_alone():
    texts = format_texts()
    assert json.dumps(vars(texts)) == json.dumps(vars(format_texts()))
    assert texts.effort.endswith("\n\n") and "Tools" in texts.tools_head
