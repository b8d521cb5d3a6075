"""Claude Code with a checkpoint, which nobody scripts: is a file read, and told of?

    python -m bench.demo_model.read_turns CHECKPOINT

Needs what `make clients` installs. The first request reads the whole head of Claude Code's prompt,
which takes a CPU minutes; those after it begin like the first.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.clients import claude_code
from tests.server.test_serve import COMMAND, running

CONTEXT_TOKENS = 65_536
PATIENT_S = 1800.0
# What is asked for, what the file says of it, and the file's name: no file of the training says it.
REQUESTS = (
    ("harvest", "tomorrow", "plan"), ("captain", "Ludmila", "crew"), ("anchor", "rusty", "ship"),
    ("deadline", "noon", "todo"), ("greeting", "aloha", "letter"), ("planet", "Saturn", "space"),
    ("villain", "Mortimer", "novel"), ("fuel", "diesel", "truck"), ("mascot", "penguin", "team"),
    ("flavour", "vanilla", "menu"),
)  # fmt: skip


def main() -> None:
    """Ask for each file; print the calls and the answer, and how many were right."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint")
    serve = [*COMMAND, "serve", "--model", parser.parse_args().checkpoint]
    try:
        command = claude_code.program(claude_code.VERSIONS[-1])
    except pytest.skip.Exception as reason:
        sys.exit(str(reason))
    right = 0
    with running("--kv-disk-dir", "none", serve=serve) as server:
        for request in REQUESTS:
            is_right, told = read_turn(command, request, server.address)
            right += is_right
            print("right" if is_right else "WRONG", told, flush=True)
    print(f"{right} of {len(REQUESTS)}")


def read_turn(
    command: list[str], request: tuple[str, str, str], address: str, patient_s: float = PATIENT_S
) -> tuple[bool, str]:
    """Ask for one of the REQUESTS: whether its file was read and told of, and all that was said."""
    key, value, name = request
    # A folder for each: no request can be answered by what another one left.
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"{name}.txt")
        path.write_text(f"colour: green\n{key}: {value}\nnumber: 7\n")
        question = f"Read {path} and tell me the {key}."
        calls, answer = _turn(command, question, Path(folder), address, patient_s)
    is_right = ("Read", str(path)) in calls and value in answer
    return is_right, f"{question} {calls} {answer!r}"


def _turn(
    command: list[str], question: str, folder: Path, address: str, patient_s: float
) -> tuple[list[tuple[str, Any]], str]:
    """The calls, each a name and the file that it reads, and the answer or what went wrong."""
    args = (command, question, folder, address, CONTEXT_TOKENS, "--verbose")
    try:
        messages: Any = claude_code.ask(*args, patient_s=patient_s)
    except (AssertionError, json.JSONDecodeError, subprocess.TimeoutExpired) as error:
        return [], str(error)[:500]
    return list(_calls(messages)), str(messages[-1].get("result"))


def _calls(messages: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    for message in messages:
        for block in message["message"]["content"] if message["type"] == "assistant" else ():
            if block["type"] == "tool_use":
                yield block["name"], block["input"].get("file_path", json.dumps(block["input"]))


if __name__ == "__main__":
    main()
