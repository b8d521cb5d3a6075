"""A folder with all kinds of files, and a watch on what was caught."""

from collections.abc import Generator
from pathlib import Path

import pytest

from tests.diskcache.content import FLUSH_S, check, opened, save
from tests.diskcache.recording import Tree, read_tree
from tests.diskcache.support import ANCHORS, OTHER, PROMPTS, RECORD_KEY


@pytest.fixture(scope="session")
def full(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tree, dict[Path, int]]:
    """A cache with all kinds of files, and how many of ANCHORS were there before each file."""
    folder = tmp_path_factory.mktemp("full")
    before: dict[Path, int] = {}
    with opened(folder) as cache:
        cache.record_put(RECORD_KEY, OTHER)
        for number, (ids, position) in enumerate(ANCHORS):
            assert save(cache, ids, position)
            assert cache.flush(FLUSH_S)
            for path in read_tree(folder):
                before.setdefault(path, number)
        check(cache, PROMPTS, ANCHORS)
    tree = read_tree(folder)
    for path in tree:
        before.setdefault(path, len(ANCHORS))
    return tree, before


@pytest.fixture
def no_surprises(caplog: pytest.LogCaptureFixture) -> Generator[None]:
    """Nothing was caught that the cache did not expect."""
    yield
    assert not [each.getMessage() for each in caplog.get_records("call") if each.exc_info]
