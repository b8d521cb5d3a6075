"""What the tests of the library's boundary share."""

from pathlib import Path

import pytest

from mlx_engine.cli import folders
from mlx_engine.tiny import tiny_checkpoint, tiny_config, write_tiny_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint, but 60 tokens wrap its window and prune rows and candidates."""
    config = tiny_config()
    config["text_config"] |= {"sliding_window": 16, "index_topk": 16, "candidate_topk_blocks": 4}
    directory = tmp_path_factory.mktemp("model") / "tiny"
    write_tiny_checkpoint(directory, config=config)
    return directory


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder that has the tiny model."""
    directory = tmp_path_factory.mktemp("cache")
    tiny_checkpoint(directory)
    return directory


@pytest.fixture
def no_model_is_named(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands take the tiny random model, as where no demo model was installed."""
    monkeypatch.setattr(folders, "demo_directory", lambda: None)
    monkeypatch.delenv("DS41_MODEL", raising=False)
    monkeypatch.setenv("DS41_CACHE_DIR", str(cache))
