"""Other weights, shapes, format versions and tokens have nothing in common with one's own."""

from pathlib import Path

import numpy as np
import pytest

from mlx_engine.diskcache import layout
from mlx_engine.diskcache.layout import TokenIds
from tests.diskcache.content import FLUSH_S, check, opened, restored, room, save, tokens
from tests.diskcache.recording import Tree, read_tree, write_tree
from tests.diskcache.support import ANCHORS, BASE, PROMPTS, go_on, saved, warnings

pytestmark = pytest.mark.usefixtures("no_surprises")


def test_other_tokens_under_the_same_keys_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Colliding(layout.PrefixKeys):
        def after(self, ids: TokenIds) -> bytes:
            return super().after(np.zeros_like(ids))

    monkeypatch.setattr("mlx_engine.diskcache.index.PrefixKeys", Colliding)
    monkeypatch.setattr("mlx_engine.diskcache.compose.PrefixKeys", Colliding)
    with opened(tmp_path / "kv") as cache:
        saved(cache, tokens(1, 3000), 3000)
        other = tokens(2, 3000)
        assert cache.lookup(other) == 3000
        assert cache.restore(other, 3000, room(3000)) is None
        assert "tokens are others" in warnings(caplog)[0]


def test_weights_of_the_same_name_and_shapes_have_nothing_in_common(
    full: tuple[Tree, dict[Path, int]], tmp_path: Path
) -> None:
    tree, _ = full
    write_tree(tree, tmp_path)
    with opened(tmp_path) as cache:
        with opened(tmp_path, fingerprint=b"other weights") as other:
            for ids in PROMPTS:
                assert other.lookup(ids) == 0
                assert other.restore(ids, 300, room(300)) is None
            assert save(other, BASE, 2048, salt=7)
            assert other.flush(FLUSH_S)
            assert restored(other, BASE, salt=7) == 2048
            assert other.stats().other_models_bytes == cache.stats().own_bytes > 0
        check(cache, PROMPTS, ANCHORS)
    with opened(tmp_path) as cache:
        check(cache, PROMPTS, ANCHORS)


def test_parts_of_another_shape_have_nothing_in_common(
    full: tuple[Tree, dict[Path, int]], tmp_path: Path
) -> None:
    tree, _ = full
    write_tree(tree, tmp_path)
    with opened(tmp_path, parts=(layout.Part(1, 40),)) as cache:
        assert all(cache.lookup(ids) == 0 for ids in PROMPTS)


def test_a_newer_version_is_a_miss_and_is_left_alone(
    full: tuple[Tree, dict[Path, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree, _ = full
    with monkeypatch.context() as patch:
        patch.setattr(layout, "FORMAT_VERSION", layout.FORMAT_VERSION + 1)
        with opened(tmp_path) as cache:
            for ids, position in ANCHORS:
                assert save(cache, ids, position, salt=1)
            assert cache.flush(FLUSH_S)
    newer = read_tree(tmp_path)
    with opened(tmp_path) as cache:
        assert all(cache.lookup(ids) == 0 for ids in PROMPTS)
        assert save(cache, BASE, 300)
        assert cache.flush(FLUSH_S)
    now = read_tree(tmp_path)
    assert all(now[path] == data for path, data in newer.items() if path.parent != Path())
    # A file of the newer version under a name that this one would give.
    for path in (path for path, data in tree.items() if data is not None and path.parent != Path()):
        folder = tmp_path / "forged" / path.name[-30:]
        folder.mkdir(0o700, parents=True)
        same_name = next((other for other in newer if other.name[64:] == path.name[64:]), None)
        write_tree({**tree, path: newer[same_name] if same_name else b""}, folder)
        go_on(folder, 0)
