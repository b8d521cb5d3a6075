"""What the tests of the library's boundary share."""

from pathlib import Path

import pytest

from mlx_engine.tiny import tiny_config, write_tiny_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint, but 60 tokens wrap its window and prune rows and candidates."""
    config = tiny_config()
    config["text_config"] |= {"sliding_window": 16, "index_topk": 16, "candidate_topk_blocks": 4}
    directory = tmp_path_factory.mktemp("model") / "tiny"
    write_tiny_checkpoint(directory, config=config)
    return directory
