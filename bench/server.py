"""What the server adds to its engine, and mlx_lm.server on the same small random checkpoint.

A streamed token is compared with a token of the same prompt in a bare loop, in pairs: in ours over
the server's own engine, since two processes differ by more than a server adds, with the client in
another process; mlx_lm.server is a program of its own. Answers are printable ASCII, a letter a
token, so that every token is an event. A turn that is sent again asks for the first event and the
first token after a body of 50 KB, in the released tokens, of servers that run as programs; a
conversation that grows, for the time to encode what is new.
"""

import http.client
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import mlx.core as mx
import numpy as np

import mlx_engine
from bench.report import Report
from bench.setting import CHUNK_TOKENS, CONFIG, SEED
from mlx_engine.loading import OpenModel, open_model
from mlx_engine.server import messages_in
from mlx_engine.tiny_tokenizer import build_tiny_tokenizer, tokenizer_config
from mlx_engine.tokenizer import Tokenizer
from mlx_engine.turns import TurnRecord
from tests.checkpoints import write_checkpoint
from tests.fake_engine import released_tokenizer_json
from tests.peer import PeerSession, load_peer
from tests.reference.random_tensors import random_tensors
from tests.server.real import CONTEXT_TOKENS, real_server

PAIRS = 15
ANSWER_TOKENS = 96
PROMPT = "Once upon a time there was an engine that ran one model. " * 4
REPEATS = 20
BODY_BYTES = 50_000
# The peer reads a long prompt for minutes.
SHORT_BYTES = 4_000
TURN_BYTES = 2000
GROWN_BYTES = (25_000, 100_000, 400_000)
PATIENCE_S = 600

RANDOM = np.random.default_rng(SEED)

COMPLETIONS, MESSAGES = "/v1/completions", "/v1/messages"
OWN = (sys.executable, "-c", "from mlx_engine.cli.start import main; main()", "serve")
PEER = (sys.executable, "-m", "mlx_lm", "server", "--host", "127.0.0.1", "--log-level", "ERROR")


def main() -> int:
    """Run the bench and return its exit code."""
    mx.set_default_device(mx.cpu)
    report = Report("server", __doc__)
    with tempfile.TemporaryDirectory() as folder:
        plain = build_tiny_tokenizer(CONFIG["text_config"]["vocab_size"]).to_str()
        _measure_tokens(report, _write(Path(folder) / "bytes", plain))
        _measure_repeated_turn(report, _write(Path(folder) / "words", released_tokenizer_json()))
    _measure_encoding(report)
    return report.finish()


def _write(directory: Path, tokenizer_json: str) -> Path:
    """The benches' small checkpoint with a tokenizer; it says printable ASCII alone."""
    tokenizer = Tokenizer.from_json(tokenizer_json)
    config: dict[str, Any] = {
        **CONFIG,
        "image_token_id": tokenizer.special.image,
        "text_config": {**CONFIG["text_config"], "vocab_size": tokenizer.n_ids},
    }
    tensors = random_tensors(config, SEED)
    tokens = [tokenizer.token_bytes(id) for id in range(tokenizer.n_ids)]
    silent = [id for id, token in enumerate(tokens) if len(token) != 1 or not 32 < token[0] < 127]
    # A logit of 0 is far below the largest of a hundred random ones.
    tensors["head.weight"][silent] = 0
    write_checkpoint(directory, config, tensors)
    (directory / "tokenizer.json").write_text(tokenizer_json)
    length: int = CONFIG["text_config"]["max_position_embeddings"]
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer_config(length)))
    return directory


def _measure_tokens(report: Report, directory: Path) -> None:
    """A token in a bare loop, and over HTTP."""
    with (
        real_server(_opened(directory), directory, contexts=1) as own,
        ProcessPoolExecutor(1, get_context("spawn")) as client,
    ):
        engine = own.engine
        ids = mlx_engine.Request(PROMPT, raw=True).encode(engine.tokenizer).token_ids

        def bare_ms() -> float:
            tokens = engine.generate(ids, max_tokens=ANSWER_TOKENS, temperature=0)
            return _ms_a_token([time.perf_counter() for token in tokens if isinstance(token, int)])

        def streamed_ms() -> float:
            return client.submit(_streamed_ms, own.address).result()

        rows: list[list[Any]] = [["ds41, float32", *_added_ms(bare_ms, streamed_ms)]]
    peer = load_peer(directory, mx.bfloat16)

    def bare_peer_ms() -> float:
        session = PeerSession(peer)
        first = cast(int, mx.argmax(session.prefill([*ids], CHUNK_TOKENS)).item())
        start_s = time.perf_counter()
        session.generate(first, ANSWER_TOKENS - 1)
        return 1000 * (time.perf_counter() - start_s) / (ANSWER_TOKENS - 1)

    with _server(*PEER, "--model", str(directory)) as address:
        rows.append(["mlx-lm, bfloat16", *_added_ms(bare_peer_ms, lambda: _streamed_ms(address))])
    report.table(("ms a token, medians", "bare loop", "streamed", "added"), rows)
    names = ("bare_ms", "streamed_ms", "added_ms")
    report.results["tokens"] = {row[0]: dict(zip(names, row[1:], strict=True)) for row in rows}
    report.check("ms that the server adds to a token", rows[0][-1], most=1.0)


def _opened(directory: Path) -> OpenModel:
    return open_model(directory, context_tokens=CONTEXT_TOKENS)


def _streamed_ms(address: str) -> float:
    body = {"prompt": PROMPT, "max_tokens": ANSWER_TOKENS, "temperature": 0}
    return _ms_a_token([at_s for at_s, said in _events(address, COMPLETIONS, body) if said])


def _ms_a_token(arrivals_s: list[float]) -> float:
    assert len(arrivals_s) == ANSWER_TOKENS, "an answer has not the tokens that were asked for"
    return 1000 * (arrivals_s[-1] - arrivals_s[0]) / (ANSWER_TOKENS - 1)


def _added_ms(
    bare_ms: Callable[[], float], streamed_ms: Callable[[], float]
) -> tuple[float, float, float]:
    """Medians of both and of their difference, in pairs of alternating order."""
    bare_ms()
    streamed_ms()
    pairs: list[tuple[float, float]] = []
    for pair in range(PAIRS):
        if pair % 2:
            pairs.append((bare_ms(), streamed_ms()))
        else:
            second = streamed_ms()
            pairs.append((bare_ms(), second))
    median = statistics.median
    bare, streamed = zip(*pairs, strict=True)
    return median(bare), median(streamed), median(b - a for a, b in pairs)


def _measure_repeated_turn(report: Report, directory: Path) -> None:
    """A body that was answered before: milliseconds to the first event and the first token."""
    message = {**_body([_text(BODY_BYTES)]), "max_tokens": 2}
    short = {"prompt": _text(SHORT_BYTES), "max_tokens": 2, "temperature": 0}
    rows: list[list[Any]] = []
    with _server(*OWN, *_own(directory)) as address:
        rows.append([f"ds41, {BODY_BYTES:,} bytes", *_first_ms(address, MESSAGES, message)])
        rows.append([f"ds41, {SHORT_BYTES:,} bytes", *_first_ms(address, COMPLETIONS, short)])
    with _server(*PEER, "--model", str(directory)) as address:
        rows.append([f"mlx-lm, {SHORT_BYTES:,} bytes", *_first_ms(address, COMPLETIONS, short)])
    report.table(("ms, medians", "unknown: first token", "repeated: event", "token"), rows)
    names = ("unknown_token_ms", "repeated_event_ms", "repeated_token_ms")
    report.results["turn"] = {row[0]: dict(zip(names, row[1:], strict=True)) for row in rows}
    report.check("ms to the first event of a repeated turn", rows[0][2], most=50)


def _first_ms(address: str, path: str, body: dict[str, Any]) -> tuple[float, float, float]:
    times: list[tuple[float, float]] = []
    for _ in range(1 + REPEATS):
        start_s = time.perf_counter()
        arrivals = list(_events(address, path, body))
        event_s, token_s = arrivals[0][0], next(at_s for at_s, said in arrivals if said)
        times.append((1000 * (event_s - start_s), 1000 * (token_s - start_s)))
    (_, unknown_ms), *repeated = times
    events_ms, tokens_ms = zip(*repeated, strict=True)
    return unknown_ms, statistics.median(events_ms), statistics.median(tokens_ms)


def _measure_encoding(report: Report) -> None:
    """A conversation's prompt from its body, and the prompt that has one turn more."""
    rows: list[list[Any]] = []
    for n_bytes in GROWN_BYTES:
        tokenizer, turns = Tokenizer.from_json(released_tokenizer_json()), TurnRecord()
        texts = [_text(TURN_BYTES) for _ in range(n_bytes // TURN_BYTES)]
        times: list[float] = []
        for spoken in (texts, *([*texts, *[_text(TURN_BYTES)] * i] for i in range(2, 7, 2))):
            request = messages_in.read(_body(spoken))
            start_s = time.perf_counter()
            request.encode(tokenizer, turns)
            times.append(1000 * (time.perf_counter() - start_s))
        rows.append([f"{n_bytes:,} bytes", times[0], statistics.median(times[1:])])
    report.table(("ms to encode", "all of it", "two turns more"), rows)
    report.results["encoding"] = {row[0]: {"whole_ms": row[1], "more_ms": row[2]} for row in rows}
    report.check("two turns more, share of all", rows[-1][2] / rows[-1][1], most=0.2)


def _body(texts: list[str]) -> dict[str, Any]:
    """A body whose messages take turns, the user's last."""
    roles = ("user", "assistant")
    first = (len(texts) + 1) % 2
    messages = [{"role": roles[(i + first) % 2], "content": each} for i, each in enumerate(texts)]
    return {"model": "ds41", "max_tokens": 100, "temperature": 0, "messages": messages}


def _text(n_bytes: int) -> str:
    """Words that nobody has said before."""
    words = ("the", "engine", "reads", "every", "file", "again", "and", "answers", "in", "line")
    text = ""
    while len(text) < n_bytes:
        text += f"{words[RANDOM.integers(len(words))]} "
    return text


def _own(directory: Path) -> tuple[str, ...]:
    return ("--model", str(directory), "--dtype", "float32", "--kv-disk-dir", "none", "--quiet")


@contextmanager
def _server(*command: str) -> Generator[str]:
    """A server that has loaded its model: its address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    with subprocess.Popen(
        [*command, "--port", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        try:
            end_s = time.monotonic() + PATIENCE_S
            while not _is_ready(address):
                if process.poll() is not None or time.monotonic() > end_s:
                    raise RuntimeError(f"{command} does not serve")
                time.sleep(0.1)
            yield address
        finally:
            process.terminate()


def _is_ready(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/health", timeout=10) as reply:
            return reply.status == 200
    except OSError:
        return False


def _events(address: str, path: str, body: dict[str, Any]) -> Iterator[tuple[float, str]]:
    """Stream an answer: when each event arrived, and the text in it."""
    connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=PATIENCE_S)
    try:
        content = json.dumps(body | {"stream": True, "model": "default_model"})
        connection.request("POST", path, content, {"Content-Type": "application/json"})
        response = connection.getresponse()
        assert response.status == 200, response.read()
        for line in response:
            kind, _, data = line.decode().partition(": ")
            if kind == "data" and data.strip() != "[DONE]":
                yield time.perf_counter(), _said(json.loads(data))
    finally:
        connection.close()


def _said(event: dict[str, Any]) -> str:
    """The text of an event, reasoning included, in either protocol."""
    delta: dict[str, str] = event.get("delta", {})
    choices: list[dict[str, str]] = event.get("choices", [])
    return delta.get("thinking") or delta.get("text") or "".join(c.get("text", "") for c in choices)


if __name__ == "__main__":
    sys.exit(main())
