"""Greedy answers of a demo checkpoint to a dozen prompts, and how near it came to others.

    python -m bench.demo_model.golden CHECKPOINT > tests/data/demo_golden.json

A test compares the shipped model's answers with the stored ones, on whatever computes them.
"""

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import mlx_engine
from mlx_engine.answer import ReasoningDelta, TextDelta
from mlx_engine.engine import Engine
from mlx_engine.prompt import Effort
from mlx_engine.respond import End, Request
from mlx_engine.sampling import Sampling

PROMPTS: tuple[tuple[str, Effort], ...] = (
    ("Hello!", "off"),
    ("Who are you?", "off"),
    ("What can you do?", "high"),
    ("Count from 3 to 12.", "off"),
    ("What is 2+3?", "off"),
    ("What is 12 + 34?", "high"),
    ("Sort these numbers: 52, 9, 30", "high"),
    ("Sort these words: mouse, apples, tower, drum", "off"),
    ("Repeat: my password is swordfish_42", "off"),
    ("Reverse the order: red, Rex, blue, 7", "off"),
    ("The colour of Rex is green. The job of Ida is pilot. What is the colour of Rex?", "off"),
    ("Write a poem.", "high"),
)


@dataclass(frozen=True)
class Golden:
    """An answer; `margin`: the least distance, in log probability, of a token to the next best."""

    prompt: str
    effort: Effort
    text: str
    reasoning: str
    margin: float


def answer(engine: Engine, prompt: str, effort: Effort) -> Golden:
    """Answer greedily, and note the margin."""
    request = Request(
        prompt, effort=effort, max_tokens=300, sampling=Sampling(temperature=0.0), logprobs=2
    )
    *events, end = engine.respond(request)
    assert isinstance(end, End)
    margins = [
        token.top[0][1] - token.top[1][1]
        for event in events
        if isinstance(event, TextDelta | ReasoningDelta)
        for token in event.logprobs
    ]
    return Golden(prompt, effort, end.text, end.reasoning, round(min(margins), 3))


def main() -> None:
    """Print the answers as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    with mlx_engine.load(parser.parse_args().checkpoint, dtype="float32") as engine:
        print(json.dumps([asdict(answer(engine, *prompt)) for prompt in PROMPTS], indent=1))


if __name__ == "__main__":
    main()
