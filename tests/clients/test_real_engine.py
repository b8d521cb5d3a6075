"""Claude Code over the real engine with a small random model: what its sessions compute, by token.

What the model says follows a script, put in place of the tokens that it draws; all else is as it is
served.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import pytest

from mlx_engine import memory
from mlx_engine.engine import Engine
from mlx_engine.loading import open_model
from mlx_engine.progress import Prefilled
from mlx_engine.server.app import create_app
from mlx_engine.server.security import Access
from mlx_engine.server.service import Service
from tests.checkpoints import write_checkpoint
from tests.clients import claude_code
from tests.clients.test_claude_code import asks_both_agents, before_user, plain, reads
from tests.fake_engine import released_tokenizer, released_tokenizer_json, with_special_tokens
from tests.reference.random_tensors import TINY_CONFIG, random_tensors
from tests.server.support import on_port, until, working

CONTEXT_TOKENS = 110_000
# Sessions resume at a full block of every layer, and the last token drawn is no part of them.
RESUME_TOKENS = 4

Script = Callable[[str], str]


@dataclass
class Course:
    """One prompt: its tokens, those of them that were known, and the answer's."""

    prompt: Sequence[int]
    cached_tokens: int = -1
    said: list[int] = field(default_factory=list[int])


def follow(engine: Engine, script: Script) -> list[Course]:
    """Let an engine say what a script answers to each prompt; its courses, as they come."""
    courses: list[Course] = []
    generate = engine.generate
    special = released_tokenizer().special

    def scripted(token_ids: Sequence[int], **options: Any) -> Generator[Any, None, Any]:
        said = with_special_tokens(script(plain(token_ids)), released_tokenizer())
        tokens = iter([*said, special.eos])

        def choose(logits: mx.array) -> mx.array:
            return mx.array(next(tokens))

        sampler = SimpleNamespace(next=lambda: choose)
        with patch("mlx_engine.engine.Sampler", return_value=sampler):
            steps = generate(token_ids, **options)
        course = Course(token_ids)
        courses.append(course)
        return noted(steps, course)

    def noted(steps: Generator[Any, None, Any], course: Course) -> Generator[Any, None, Any]:
        try:
            while True:
                step = next(steps)
                if isinstance(step, int):
                    course.said.append(step)
                elif isinstance(step, Prefilled) and course.cached_tokens < 0:
                    course.cached_tokens = step.done_tokens
                yield step
        except StopIteration as end:
            return end.value
        finally:
            steps.close()

    engine.generate = scripted
    return courses


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tests' tiny model, without Engram, with the released vocabulary."""
    tokenizer = released_tokenizer()
    text = {k: v for k, v in TINY_CONFIG["text_config"].items() if not k.startswith("dspark")}
    text |= {
        "vocab_size": tokenizer.n_ids,
        "max_position_embeddings": 131072,
        "rope_scaling": text["rope_scaling"] | {"original_max_position_embeddings": 8192},
        "engram_layer_ids": [],
        "engram_num_embeddings": [],
        "num_nextn_predict_layers": 0,
        "compress_ratios": text["compress_ratios"][: text["num_hidden_layers"]],
    }
    config = TINY_CONFIG | {"image_token_id": tokenizer.special.image, "text_config": text}
    directory = tmp_path_factory.mktemp("model")
    write_checkpoint(directory, config, random_tensors(config, 0))
    (directory / "tokenizer.json").write_text(released_tokenizer_json())
    return directory


@contextmanager
def serving(checkpoint: Path, script: Script) -> Generator[tuple[str, list[Course]]]:
    """A server over the engine: its address, and the courses of its prompts."""
    opened = open_model(checkpoint, context_tokens=CONTEXT_TOKENS)
    courses: list[list[Course]] = []

    @contextmanager
    def load(on_progress: Callable[[int, int], None]) -> Generator[Engine]:
        room_bytes = 3 * memory.default_session_bytes(opened.config, CONTEXT_TOKENS)
        with opened.load("float32", session_bytes=room_bytes) as engine:
            courses.append(follow(engine, script))
            yield engine

    with working(load) as worker:
        service = Service(worker, opened.tokenizer, opened.context_tokens)
        with on_port(create_app(service, Access())) as address:
            until(lambda: worker.state != "loading")
            assert worker.state == "ready", worker.error
            yield address, courses[0]


def ask(
    checkpoint: Path, script: Script, question: str, folder: Path
) -> tuple[dict[str, Any], list[Course]]:
    """What Claude Code prints at the end, and the courses; a short prompt of the system's."""
    command = claude_code.program("2.1.332")
    short = ("--system-prompt", "Be brief.", "--tools", "Read,Agent")
    with serving(checkpoint, script) as (address, courses):
        return claude_code.ask(command, question, folder, address, CONTEXT_TOKENS, *short), courses


def is_continued(course: Course, before: Course) -> bool:
    """Whether a prompt went on where an answer had ended, but for a token that is drawn last."""
    return len(before.prompt) + len(before.said) - course.cached_tokens <= RESUME_TOKENS


def test_what_was_said_and_read_is_not_computed_again(checkpoint: Path, tmp_path: Path) -> None:
    note = tmp_path / "note.txt"
    note.write_text("the word is FORTYTWO\n")

    def script(so_far: str) -> str:
        return "Seen.</think>It says FORTYTWO." if "is FORTYTWO" in so_far else reads(note)

    printed, courses = ask(checkpoint, script, "What is in it?", tmp_path)
    assert printed["result"] == "It says FORTYTWO."
    first, second = courses
    assert first.cached_tokens == 0
    assert is_continued(second, first)


def test_subagents_at_once_read_their_common_head_once(checkpoint: Path, tmp_path: Path) -> None:
    def script(so_far: str) -> str:
        if "Ask both agents." not in so_far:
            word = "ALPHA" if "Say the word ALPHA" in so_far else "BETA"
            return f"Hm.</think>It is {word}-FOUND."
        is_known = "ALPHA-FOUND" in so_far and "BETA-FOUND" in so_far
        return "Seen.</think>Both came." if is_known else asks_both_agents()

    printed, courses = ask(checkpoint, script, "Ask both agents.", tmp_path)
    assert printed["result"] == "Both came."
    first, one, other, last = courses
    least, most = sorted((one, other), key=lambda course: course.cached_tokens)
    assert most.cached_tokens > before_user(most.prompt) - RESUME_TOKENS > least.cached_tokens
    assert is_continued(last, first)
