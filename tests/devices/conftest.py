"""The ranks whose results the tests of this folder compare."""

import numpy as np
import pytest

from tests.devices.rank import Arrays
from tests.devices.ring import run_ranks


@pytest.fixture(scope="session", params=[2, 4], ids="{} ranks".format)
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Arrays]:
    count: int = request.param
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(count, "tests.devices.rank", [str(folder)], folder)
    return [dict(np.load(folder / f"rank-{rank}.npz")) for rank in range(count)]
