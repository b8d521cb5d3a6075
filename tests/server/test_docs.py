"""docs/server.md names every field that the endpoints know."""

import re
from pathlib import Path

import pytest

from mlx_engine.server import chat, completions, fields, messages_in, responses_in
from mlx_engine.server.body import (
    BODY_S,
    BODY_SILENCE_S,
    FREE_BODIES,
    IMAGE_NOTE,
    MAX_BODIES_BYTES,
    MAX_BODY_BYTES,
    SMALL_BODY_BYTES,
)
from mlx_engine.server.connections import HEAD_SILENCE_S
from mlx_engine.server.sse import KEEP_ALIVE_S, WHOLE_SILENCE_S

DOCS = (Path(__file__).parents[2] / "docs/server.md").read_text()
COLUMNS = {1: messages_in, 2: chat, 3: responses_in, 4: completions}


@pytest.mark.parametrize("column", COLUMNS)
def test_every_known_field_is_described(column: int) -> None:
    rows = [line.split("|")[1:-1] for line in DOCS.splitlines() if line.startswith("|")]
    named = re.findall(r"`(\w+)`", " ".join(row[column] for row in rows if len(row) == 5))
    for_all = {"stream", "model", *fields.SAMPLING_FIELDS}
    assert set(named) | for_all == set(COLUMNS[column].KNOWN_FIELDS)
    assert all(f"`{name}`" in DOCS for name in for_all)


def test_the_numbers_are_those_of_the_code() -> None:
    for number in (
        f"at most {MAX_BODY_BYTES // 2**20} MiB",
        f"{MAX_BODIES_BYTES // 2**20} MiB together",
        f"the first\n{SMALL_BODY_BYTES // 2**10} KiB of {FREE_BODIES} at a time",
        f"nothing comes for {BODY_SILENCE_S:g} seconds",
        f"not all within\n{BODY_S / 60:g} minutes",
        f"{fields.MAX_MESSAGES:,} messages",
        f"{fields.MAX_TOOLS:,} tools",
        f"{fields.MAX_STOP_STRINGS} stop\nstrings of {fields.MAX_STOP_CHARACTERS:,} characters",
        f"head of a request within {HEAD_SILENCE_S:g}\nseconds",
        f"more than {KEEP_ALIVE_S:g} seconds",
        f"longer than {WHOLE_SILENCE_S:g} seconds",
        IMAGE_NOTE,
    ):
        assert number in DOCS
