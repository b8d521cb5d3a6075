"""Claude Code with a checkpoint, which nobody scripts: is a file read, and told of?

    python -m bench.demo_model.read_turns CHECKPOINT

Needs what `make clients` installs. The first request reads the whole head of Claude Code's prompt,
which takes a CPU minutes; those after it begin like the first.
"""

import json
import sys
import tempfile
from pathlib import Path

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
    """Ask for each file and print what was said, and how many answers were right."""
    command = claude_code.program(claude_code.VERSIONS[-1])
    serve = [*COMMAND, "serve", "--model", sys.argv[1]]
    right = 0
    with (
        tempfile.TemporaryDirectory() as folder,
        running("--kv-disk-dir", "none", serve=serve) as server,
    ):
        for key, value, name in REQUESTS:
            path = Path(folder, f"{name}.txt")
            path.write_text(f"colour: green\n{key}: {value}\nnumber: 7\n")
            question = f"Read {path} and tell me the {key}."
            args = (command, question, Path(folder), server.address, CONTEXT_TOKENS)
            said = json.dumps(claude_code.ask(*args, patient_s=PATIENT_S)["result"])
            right += value in said
            print(f"{question} {said}", flush=True)
    print(f"{right} of {len(REQUESTS)}")


if __name__ == "__main__":
    main()
