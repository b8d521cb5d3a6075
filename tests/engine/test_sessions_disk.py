"""Sessions over a disk cache: across a restart a state is the live one's, to the byte."""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlx_engine.diskcache.cache import DiskCache
from mlx_engine.diskcache.layout import BLOCK_TOKENS
from mlx_engine.loading import open_model
from mlx_engine.session import Session
from mlx_engine.sessions import Sessions
from mlx_engine.state_transfer import parts
from tests.engine.support import Subject, build, tiny_config
from tests.engine.timelines import CountingModel, best, greedy, parts_from, seen
from tests.unit.arrays import host

IDS = np.random.default_rng(5).integers(3, 250, 3 * BLOCK_TOKENS).tolist()
OTHER = np.random.default_rng(6).integers(3, 250, 100).tolist()
WRAPS = [(8, n) for n in (7, 8, 9, 17)] + [(128, n) for n in (127, 128, 129)]
# An answer moves the second anchor to the block's edge, before it and behind it.
EDGES = [(8, BLOCK_TOKENS + n) for n in (-3, -1, 0, 1, 3)]


def subject(window: int) -> Subject:
    return build(tiny_config(sliding_window=window, max_position_embeddings=8192), 0)


@contextmanager
def started(folder: Path, window: int = 8) -> Generator[tuple[Sessions, CountingModel]]:
    """Sessions over what the folder has; at the end all that is queued has been written."""
    shape = parts(subject(window).config)
    cache = DiskCache.open(folder, fingerprint=b"test", parts=shape, free_floor_bytes=0)
    model = CountingModel(subject(window))
    sessions = Sessions(
        model,
        subject(window).reader,
        budget_bytes=10**9,
        chunk_tokens=512,
        cache=cache,
        least_save_tokens=1,
    )
    yield sessions, model
    assert cache.flush(60)
    assert not cache.stats().dropped and not cache.stats().refused
    cache.close()


def end_turn(sessions: Sessions, session: Session) -> None:
    """The end of an answer, and then nobody asks for a while."""
    sessions.end_turn(session)
    while sessions.save_piece():
        pass


@pytest.mark.parametrize(("window", "n"), WRAPS + EDGES)
def test_a_restart_goes_on_with_the_same_tokens(tmp_path: Path, window: int, n: int) -> None:
    folder = tmp_path / "cache"
    with started(folder, window) as (sessions, _):
        session, logits = sessions.sync(IDS[:n], [n // 2])
        answer = [best(logits)]
        for _ in range(3):
            answer.append(best(sessions.step(session, answer[-1])))
        end_turn(sessions, session)
        prompt = [*IDS[:n], *answer, *OTHER]
        # From the anchor at the end of the answer, as after a restart.
        session.rewind(session.position)
        kept = session.position
        state = seen(session.state)
        session, logits = sessions.sync(prompt)
        expected = greedy(session, logits, 12)
    with started(folder, window) as (sessions, model):
        again, _ = sessions.sync(IDS[:n])
        assert model.tokens <= 2
        model.encoded.clear()
        session, logits = sessions.sync(prompt[: kept + 1])
        session.rewind(kept)
        assert seen(session.state) == state
        assert again in sessions
        session, logits = sessions.sync(prompt)
        assert model.tokens == 1 + len(prompt) - kept
        found = greedy(session, logits, 12)
        assert found[0] == expected[0]
        np.testing.assert_array_equal(found[1], expected[1])


@pytest.mark.parametrize("n", [BLOCK_TOKENS + n for n in (-1, 0, 1)])
def test_at_a_blocks_edge_a_prompt_parts_from_what_was_stored(tmp_path: Path, n: int) -> None:
    folder = tmp_path / "cache"
    even = n // 2 * 2
    prompts = [[*IDS[:n], *OTHER], [*IDS[:n], *reversed(OTHER)]]
    found: list[Any] = []
    with started(folder) as (sessions, model):
        for prompt in prompts:
            session, logits = sessions.sync(prompt, [n])
            found.append((seen(session.state), host(logits)))
            end_turn(sessions, session)
        # The second took what the first had before the edge.
        assert model.tokens == 2 * len(prompts[0]) - even
    for prompt, (state, logits) in zip(prompts, found, strict=True):
        # From its anchor at the edge, with other tokens stored behind it, and from its end.
        with started(folder) as (sessions, model):
            session, _ = sessions.sync([*IDS[:n], 7])
            assert model.tokens == n + 1 - even
            sessions.reset()
            model.encoded.clear()
            session, again = sessions.sync(prompt)
            assert model.tokens <= 2
            np.testing.assert_array_equal(host(again), logits)
            assert seen(session.state) == state


@pytest.mark.parametrize("chunk_tokens", [16, 48, 127])
def test_a_restored_session_agrees_with_a_cold_run_in_other_chunks(
    tmp_path: Path, chunk_tokens: int
) -> None:
    """The same tokens, up to where the cold run had two that were as good as equal.

    Sums in another order move values over a rounding's edge, and the logits by what that moves.
    """
    folder = tmp_path / "cache"
    with started(folder) as (sessions, _):
        end_turn(sessions, sessions.sync(IDS[:300], [100])[0])
    with started(folder) as (sessions, model):
        session, logits = sessions.sync(IDS[:340])
        assert model.tokens == 40
        own = [host(logits)]
        tokens, more = greedy(session, logits, 16)
        own += more
    cold = Session(subject(8).model, subject(8).reader, chunk_tokens=chunk_tokens)
    logits = cold.sync(IDS[:340])
    for token, ours in zip(tokens, own, strict=False):
        if parts_from(ours, host(logits), 0.1):
            break
        logits = cold.step(token)


def test_a_token_differs_only_at_a_near_tie(capsys: pytest.CaptureFixture[str]) -> None:
    logits = np.array([0.0, 3.0, 2.99, 1.0], np.float32)
    assert not parts_from(logits, logits, 0.0)
    assert not parts_from(logits, logits + np.float32(0.005), 0.01)
    assert capsys.readouterr().out == ""
    tilted = logits + np.array([0, -0.01, 0.01, 0], np.float32)
    assert parts_from(logits, tilted, 0.02) and parts_from(tilted, logits, 0.02)
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("a near-tie: 1 is 1.00e-02 ahead of 2")
    assert second.startswith("a near-tie: 2 is 1.00e-02 ahead of 1")
    # Neither a tie nor the same token makes up for logits that are apart.
    for other in (tilted, logits - np.array([0, 0, 0, 0.02], np.float32)):
        with pytest.raises(AssertionError, match="apart"):
            parts_from(logits, other, 0.005)


def test_an_idle_engine_hands_over_what_waits(tmp_path: Path, checkpoint: Path) -> None:
    opened = open_model(checkpoint, context_tokens=1024)
    cache = DiskCache.open(
        tmp_path / "cache", fingerprint=b"test", parts=parts(opened.config), free_floor_bytes=0
    )
    prompt = [token_id % 200 for token_id in IDS[:300]]
    with opened.load("float32", disk_cache=cache) as engine:
        answer = engine.generate(prompt, max_tokens=1, ignore_eos=True)
        assert isinstance([*answer][-1], int) and cache.flush(60)
        assert cache.lookup(prompt) == 0
        # Its rows, and its tail.
        assert engine.save_piece() and engine.save_piece()
        assert cache.flush(60) and cache.lookup(prompt) == 298
        # The end of the answer lies too near.
        assert engine.save_piece() and not engine.save_piece()
    assert not engine.save_piece()
    cache.close()


def test_a_damaged_file_costs_tokens_and_no_answer(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    with started(folder) as (sessions, _):
        session, logits = sessions.sync(IDS[:301], [101])
        end_turn(sessions, session)
        expected = host(logits)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    sizes = [path.stat().st_size for path in files]
    for path, size in zip(files, sizes, strict=True):
        if size > 4096:
            with path.open("r+b") as file:
                file.seek(size // 2)
                byte = file.read(1)
                file.seek(size // 2)
                file.write(bytes([byte[0] ^ 255]))
    with started(folder) as (sessions, model):
        np.testing.assert_array_equal(host(sessions.sync(IDS[:301], [101])[1]), expected)
        assert model.tokens > 200
