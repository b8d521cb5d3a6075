"""What several unit tests share: the command over a model that is not there."""

from pathlib import Path

import pytest

from tests.fake_engine import FakeEngine, FakeModel


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeModel:
    """Stands in for every checkpoint that `ds41` opens, DS41_MODEL by default."""
    model = FakeModel(FakeEngine("why\n</think>\nso\U0001f600"))
    monkeypatch.setattr("mlx_engine.loading.open_model", model.open)
    monkeypatch.setenv("DS41_MODEL", str(tmp_path / "model"))
    monkeypatch.setenv("DS41_CACHE_DIR", str(tmp_path / "cache"))
    return model
