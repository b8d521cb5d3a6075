"""However a run over several devices ends, it says why, in time, and leaves no process behind."""

import json
import os
import queue
import random
import re
import signal
import time
import urllib.request
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import pytest

from mlx_engine import ranks
from mlx_engine.hosts import LOCAL, Host, Hosts
from tests.devices.command import GREEDY, Run, are_gone, environment, eventually, write_model

ENDLESS = ("run", "word " * 40, *GREEDY, "--max-tokens", "9000")
WITHIN_S = 10.0
START_S = 60.0


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("devices")
    return environment(write_model(folder / "model"), folder / "cache")


@pytest.mark.parametrize("attempt", range(20))
def test_a_rank_is_killed_at_any_moment(attempt: int, env: dict[str, str], tmp_path: Path) -> None:
    chance = random.Random(attempt)
    count = 4 if attempt % 5 == 4 else 2
    victim = chance.randrange(count)
    run = Run(env, tmp_path / "log", *ENDLESS, "--devices", str(count))
    assert eventually(lambda: len(run.followers()) == count - 1, START_S)
    time.sleep(chance.uniform(0, 3 if count == 2 else 5))
    others = run.followers()
    os.kill([run.pid, *others][victim], signal.SIGKILL)
    code = run.end(others, WITHIN_S)
    if victim == 0:
        assert code == -signal.SIGKILL
    else:
        assert code in (1, 2)
        (line,) = (each for each in run.output.splitlines() if "127.0.0.1" in each)
        assert f"rank {victim} on 127.0.0.1" in line


def answering(env: dict[str, str], tmp_path: Path, *options: str) -> Run:
    run = Run(env, tmp_path / "log", *ENDLESS, "--devices", "2", *options)
    assert eventually(lambda: run.has_answered, START_S), run.output
    return run


def test_a_rank_that_is_stopped(env: dict[str, str], tmp_path: Path) -> None:
    run = answering(env, tmp_path, "--stall-timeout", "8")
    others = run.followers()
    os.kill(others[0], signal.SIGSTOP)
    assert run.end(others, 2 * WITHIN_S) == 1
    said = "rank 1 on 127.0.0.1 has made no progress for 8 s (--stall-timeout)"
    assert said in run.output


@pytest.mark.parametrize(
    ("stall_s", "told"), [(1, "1.5 s (which a start has at least)"), (2, "2 s (--stall-timeout)")]
)
def test_a_stall_is_told_with_the_time_that_it_was_waited_for(
    stall_s: float, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "_START_S", 1.5)
    said: queue.Queue[str] = queue.Queue()
    alone = Hosts((Host(LOCAL, LOCAL),), "ring", (1,))
    with closing(ranks.Ranks(alone, stall_s, end=cast(Any, said.put))) as others:
        begun_s = time.monotonic()
        others.send("begin")
        message = said.get(timeout=WITHIN_S)
    assert time.monotonic() - begun_s > float(told.split()[0])
    assert f"rank 0 on this machine has made no progress for {told} while others wait" in message


def test_rank_0_is_stopped(env: dict[str, str], tmp_path: Path) -> None:
    run = answering(env, tmp_path, "--stall-timeout", "8")
    others = run.followers()
    os.kill(run.pid, signal.SIGSTOP)
    assert are_gone(others, 2 * WITHIN_S)
    os.kill(run.pid, signal.SIGCONT)
    assert run.end(others, 2 * WITHIN_S) == 1
    assert "rank 1 on 127.0.0.1 has ended" in run.output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("moment", ["load", "prefill", "decode"])
def test_a_signal_leaves_nothing_behind(
    number: int, moment: str, env: dict[str, str], tmp_path: Path
) -> None:
    prompt = "word " * (9000 if moment == "prefill" else 10)
    command = ("run", prompt, *GREEDY, "--max-tokens", "9000", "--devices", "2")
    run = Run(env, tmp_path / "log", *command)
    assert eventually(lambda: bool(run.followers()), START_S)
    others = run.followers()
    if moment == "prefill":
        assert eventually(lambda: run.has_loaded, START_S)
        time.sleep(0.5)
    if moment == "decode":
        assert eventually(lambda: run.has_answered, START_S)
    os.kill(run.pid, number)
    # A chunk that is under way is computed to its end.
    assert run.end(others, START_S) == 128 + number
    assert "Traceback" not in run.output
    assert moment == "load" or "; cancelled" in run.output


def test_a_second_ctrl_c_waits_for_nothing(env: dict[str, str], tmp_path: Path) -> None:
    run = answering(env, tmp_path, "--kv-disk-dir", str(tmp_path / "kv"))
    others = run.followers()
    os.kill(run.pid, signal.SIGINT)
    os.kill(run.pid, signal.SIGINT)
    assert run.end(others, START_S) == 130
    assert "Traceback" not in run.output


def test_a_terminals_ctrl_c_reaches_rank_0_alone(env: dict[str, str], tmp_path: Path) -> None:
    run = answering(env, tmp_path)
    others = run.followers()
    assert all(os.getpgid(pid) != os.getpgid(run.pid) for pid in others)
    os.kill(run.pid, signal.SIGINT)
    assert run.end(others, START_S) == 130


def served(env: dict[str, str], tmp_path: Path, *more: str) -> Run:
    options = ("--port", "0", "--ctx", "4096", "--kv-disk-dir", "none", "--devices", "2", *more)
    run = Run(env, tmp_path / "log", "serve", *options)
    assert eventually(lambda: "ready at" in run.output, START_S), run.output
    return run


def test_a_server_answers_and_ends_with_an_idle_rank(env: dict[str, str], tmp_path: Path) -> None:
    run = served(env, tmp_path)
    assert "each of 2 devices: the model needs" in run.output
    (address,) = re.findall("ready at (.*)", run.output)
    body = json.dumps({"model": "any", "prompt": "Hi", "max_tokens": 3, "temperature": 0})
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{address}/v1/completions", body.encode(), headers)
    with urllib.request.urlopen(request, timeout=START_S) as answer:
        assert json.load(answer)["usage"]["completion_tokens"] == 3
    others = run.followers()
    os.kill(others[0], signal.SIGTERM)
    assert run.end(others, WITHIN_S) == 1
    assert "rank 1 on 127.0.0.1 was ended by SIGTERM; the run ends with it" in run.output


def test_rank_0_is_stopped_while_it_has_nothing_to_do(env: dict[str, str], tmp_path: Path) -> None:
    run = served(env, tmp_path, "--stall-timeout", "4")
    others = run.followers()
    os.kill(run.pid, signal.SIGSTOP)
    # As when its machine has lost its power.
    assert are_gone(others, 2 * WITHIN_S)
    os.kill(run.pid, signal.SIGCONT)
    assert run.end(others, 2 * WITHIN_S) == 1


def test_an_idle_rank_that_does_not_end(env: dict[str, str], tmp_path: Path) -> None:
    run = served(env, tmp_path)
    others = run.followers()
    os.kill(others[0], signal.SIGSTOP)
    os.kill(run.pid, signal.SIGTERM)
    # What rank 0's own device waits for may never come, so its end must not wait for the device.
    assert run.end(others, 2 * WITHIN_S) == 1
    assert "rank 1 on 127.0.0.1 did not end within 5 s when the run did" in run.output
