"""The shipped demo model in the engine: it finds a needle whatever became of the state between."""

import json
from collections.abc import Generator
from pathlib import Path
from random import Random

import numpy as np
import pytest

from bench.demo_model.export import export, read_masters
from bench.demo_model.facts import facts_of, notes_of
from bench.demo_model.golden import PROMPTS, Golden, answer
from bench.demo_model.restore import restore
from mlx_engine.cli.folders import demo_directory
from mlx_engine.diskcache.cache import DiskCache
from mlx_engine.engine import Engine
from mlx_engine.fingerprint import fingerprint
from mlx_engine.loading import Dtype, OpenModel, open_model
from mlx_engine.prompt import Message
from mlx_engine.respond import End, Request
from mlx_engine.sampling import Sampling
from mlx_engine.state_transfer import parts

DEMO = demo_directory()
GOLDEN = Path(__file__).parents[1] / "data" / "demo_golden.json"

pytestmark = pytest.mark.skipif(DEMO is None, reason="no demo model was installed")

_NOTES = notes_of(Random(7), facts_of(Random(7), 12), 2000)
NEEDLE = "The secret word of Pelivo is marble."
QUESTION = "What is the secret word of Pelivo?"
READ = Message("user", f"{_NOTES[:1500]} {NEEDLE} {_NOTES[1500:]}")


@pytest.fixture(scope="module")
def opened() -> OpenModel:
    assert DEMO is not None
    return open_model(DEMO, context_tokens=4096)


@pytest.fixture(scope="module")
def engine(opened: OpenModel) -> Generator[Engine]:
    with opened.load("float32") as engine:
        yield engine


def goldens() -> list[Golden]:
    """The stored answers."""
    return [Golden(**golden) for golden in json.loads(GOLDEN.read_text())]


def say(engine: Engine, *messages: Message, prompt: str = QUESTION) -> End:
    request = Request(
        [*messages, Message("user", prompt)],
        effort="off",
        max_tokens=60,
        sampling=Sampling(temperature=0.0),
    )
    *_, end = engine.respond(request)
    assert isinstance(end, End)
    return end


def test_it_fits_in_the_package():
    assert DEMO is not None
    assert sum(path.stat().st_size for path in DEMO.iterdir()) < 16e6


def test_the_needle_is_found_after_a_rewind(engine: Engine):
    first = say(engine, READ, Message("assistant", "I have read it."))
    say(engine, READ, Message("assistant", "I have read it."), prompt="Count from 1 to 9.")
    again = say(engine, READ, Message("assistant", "I have read it."))
    assert again.text == first.text == NEEDLE
    assert first.cached_tokens == 0 < again.cached_tokens


def test_the_needle_is_found_after_a_restart_from_the_disk(opened: OpenModel, tmp_path: Path):
    texts: list[str] = []
    for is_restart in (False, True):
        disk = DiskCache.open(
            tmp_path / "kv",
            fingerprint=fingerprint(opened.checkpoint, "float32", None),
            parts=parts(opened.config),
            free_floor_bytes=0,
        )
        with opened.load("float32", disk_cache=disk) as engine:
            end = say(engine, READ, Message("assistant", "I have read it."))
        disk.close()
        assert (end.cached_tokens > 0) == is_restart
        texts.append(end.text)
    assert texts == [NEEDLE, NEEDLE]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_golden_answers(opened: OpenModel, dtype: Dtype):
    stored = goldens()
    assert [(golden.prompt, golden.effort) for golden in stored] == list(PROMPTS)
    with opened.load(dtype) as engine:
        for golden in stored:
            now = answer(engine, golden.prompt, golden.effort)
            assert (now.text, now.reasoning) == (golden.text, golden.reasoning), golden.margin
            # As the checkpoint is exported: logits as trained would come a fourth as near.
            assert now.margin > golden.margin / 2


def test_training_can_go_on_from_the_shipped_weights(tmp_path: Path):
    """What is restored from them is exported with the same values, and restored alike again."""
    assert DEMO is not None
    restore(DEMO, tmp_path / "prepared", tmp_path / "weights")
    export(tmp_path / "prepared", tmp_path / "weights", tmp_path / "checkpoint")
    restore(tmp_path / "checkpoint", tmp_path / "again", tmp_path / "weights again")
    first, again = (read_masters(tmp_path / name) for name in ("weights", "weights again"))
    assert first.keys() == again.keys() and len(first) > 30
    assert all(np.array_equal(first[key], again[key]) for key in first)
    assert abs(first["head.weight"]).max() > 0.01
    for name in ("token_map.npy", "texts.json", "tokenizer.json", "config.json"):
        assert (tmp_path / "prepared" / name).read_bytes() == (
            tmp_path / "again" / name
        ).read_bytes()
    # Other weights are not mixed with them.
    with pytest.raises(FileExistsError, match="has weights already"):
        restore(DEMO, tmp_path / "prepared", tmp_path / "weights")
