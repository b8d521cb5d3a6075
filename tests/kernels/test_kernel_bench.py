"""`ds41 bench kernels`, whole and small: the emulator runs the kernels, its times mean nothing."""

import json
import sys
import time
from collections.abc import Callable
from email.message import Message
from importlib.resources import files
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from typer.testing import CliRunner

import mlx_engine
from mlx_engine.cli import bench
from mlx_engine.cli.bench import Machine, report, tracker
from mlx_engine.cli.main import app
from mlx_engine.config_file import parse_config
from mlx_engine.errors import DeviceError
from mlx_engine.kernel_bench import (
    Measured,
    Result,
    Timing,
    _measure,  # pyright: ignore[reportPrivateUsage]
    run,
    totals,
)
from mlx_engine.kernel_cases import cases
from mlx_engine.kernel_inputs import Numbers, Sizes, Work
from mlx_engine.ops import launch
from mlx_engine.power import INTERVAL_S, PowerMeter
from tests.kernels.counted import counted
from tests.kernels.trace import Launch, trace
from tests.kernels.traffic import floor_bytes
from tests.msl import emulator
from tests.msl.conftest import require_emulator
from tests.msl.emulator import EmulatedKernel

DATA = Path(__file__).parents[1] / "data"

SMALL = Sizes(
    hidden_size=128,
    moe_intermediate_size=64,
    num_attention_heads=4,
    head_dim=64,
    qk_rope_head_dim=16,
    q_lora_rank=64,
    o_lora_rank=32,
    o_groups=2,
    n_routed_experts=16,
    num_experts_per_tok=2,
    sliding_window=8,
    hc_sinkhorn_iters=3,
    index_n_heads=8,
    index_head_dim=64,
    index_topk=16,
    candidate_topk_blocks=16,
    candidate_block_size=4,
    engram_columns=4,
    engram_head_dim=32,
    vocab_size=3000,
    experts=8,
    head_rows=64,
    rows=48,
    keys=256,
    few_tokens=3,
    many_tokens=40,
    cold_bytes=1 << 12,
)
ONCE = Timing(chain_s=0, chains=1, power_s=0.5)
MACHINE = Machine("Apple M3 Ultra", 512 << 30, 819)


def one_wrong(**arguments: Any) -> Callable[..., list[mx.array]]:
    """The emulator, but for one kernel whose results are a quarter too large."""
    kernel = EmulatedKernel(**arguments)
    if arguments["name"] != "moe_down":
        return kernel

    def run(**call: Any) -> list[mx.array]:
        return [1.25 * out for out in kernel(**call)]

    return run


def test_the_whole_bench(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    require_emulator()
    monkeypatch.setenv("MLX_MAX_OPS_PER_BUFFER", "40")
    monkeypatch.delenv("MLX_MAX_MB_PER_BUFFER", raising=False)
    with emulator.using(checked=False, strict=False):
        assert report(MACHINE, run(one_wrong, SMALL, ONCE)) == 1
    lines = capsys.readouterr().out.splitlines()
    record = json.loads(lines[-1])
    assert tracker() in lines[-2]
    assert record["mlx_max_ops_per_buffer"] == "40"
    assert record["mlx_max_mb_per_buffer"] is None
    assert (record["machine"], record["peak_gb_per_s"]) == ("Apple M3 Ultra", 819)
    assert (record["ds41"], record["bench"]) == (mlx_engine.__version__, "kernels")

    expected = cases(SMALL)
    found = {(r["family"], r["operation"], r["tokens"]): r for r in record["results"]}
    assert list(found) == [(case.family, case.name, case.tokens) for case in expected]
    # The wrong kernel is that of a few tokens; many have others.
    wrong = [key for key, figures in found.items() if "fault" in figures]
    assert wrong == [("experts", "all of an FFN", tokens) for tokens in (1, 3)]
    assert record["wrong"] == 2
    for key, figures in found.items():
        (line,) = [x for x in lines if x.startswith(f"{key[0]:<10} {key[1]:<30} {key[2]:>6}")]
        if key in wrong:
            assert "differs from the reference" in figures["fault"]
            assert f"WRONG, not timed: {figures['fault']}" in line
            assert "us" not in figures
        else:
            assert min(figures["launches"], figures["us"], figures["gb_per_s"]) > 0
            assert figures["share_of_peak"] == pytest.approx(figures["gb_per_s"] / 819, rel=1e-2)
            assert figures["joules"] is None
            assert figures["host_us"] > 0
            assert figures["touched_bytes"] >= figures["bytes"]
            is_marked = " <" in line
            assert is_marked == figures["floored"]
    timed = [found[c.family, c.name, c.tokens].get("us", 0) * c.per_token for c in expected]
    assert record["token_ms"] == pytest.approx(sum(timed) / 1e3, rel=1e-2)


def test_every_family_has_cases() -> None:
    sources = {Path(f.name) for f in files("mlx_engine.metal").iterdir()}
    families = {source.stem for source in sources if source.suffix == ".metal"}
    # Those are the experts' for many tokens, and a part of attention.
    assert {case.family for case in cases(SMALL)} == families - {"expert_tiles", "packed_rows"}


def test_the_bytes_of_a_case_are_those_that_move() -> None:
    """One token of every case, and many where other kernels do another sum."""
    require_emulator()
    for case in cases(SMALL):
        is_other = case.family == "experts" and case.tokens == SMALL.many_tokens
        if case.tokens > 1 and not is_other:
            continue
        work = case.prepare(SMALL, case.tokens, Numbers())
        with launch.using(EmulatedKernel), emulator.recording() as reports:
            mx.eval(work.compute(work.inputs, 0))
        moved = sum(counted(report).unique_bytes for report in reports)
        assert work.n_bytes == pytest.approx(moved, rel=0.01), case


NOT_BUILT = "not built\na.h:3:1: warning: unused\na.h:4:2: error: no type named 'x'\n  x y;"


def test_a_kernel_that_fails_does_not_end_the_bench(capsys: pytest.CaptureFixture[str]) -> None:
    """Its name and the compiler's errors are told, as MLX has them: at the first use."""

    def broken(**arguments: Any) -> Callable[..., list[mx.array]]:
        def run(**_: Any) -> list[mx.array]:
            raise RuntimeError(NOT_BUILT)

        if arguments["name"].startswith("fp8"):
            raise RuntimeError(NOT_BUILT)
        return run

    results = list(run(broken, SMALL, ONCE))
    faults = {result.fault for result in results}
    for kernel in ("fp8_rows", "fp8_tiles", "mhc_between", "moe_gate_up", "sampling_greatest"):
        assert f"{kernel}: not built; a.h:4:2: error: no type named 'x'" in faults
    assert all(fault.endswith("error: no type named 'x'") for fault in faults)
    assert totals(results) == (0, None)
    report(MACHINE, results)
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {figures["fault"] for figures in record["results"]} == faults


def traced(work: Work) -> list[Launch]:
    """The launches of one call."""
    with launch.using(None):
        mx.eval(work.compute(work.inputs, 0))  # the weights, which are lazy

    def computed(**given: mx.array) -> list[mx.array]:
        return work.compute(tuple(given[name] for name in sorted(given)), 0)

    return trace(computed, {f"x{i}": x for i, x in enumerate(work.inputs)}, lambda _: 0)


def test_every_launch_of_a_case_waits_for_the_call_before() -> None:
    """Else a chain of calls would run part of one beside another."""
    for case in cases(SMALL):
        found = traced(case.prepare(SMALL, case.tokens, Numbers()))
        assert found and all(each.source == 0 for each in found), (case, found)


# What these read has just been made by the launch before, but for a few weights.
SMALL_READERS = {"compressed row", "index key", "a draw with top-p"}


def test_a_chain_reads_more_than_a_cache_holds() -> None:
    sizes = Sizes()
    assert sizes.cold_bytes > 2 * (96 << 20)
    for case in cases(sizes):
        work = case.prepare(sizes, case.tokens, Numbers())
        if case.name not in SMALL_READERS and (case.family != "front" or case.tokens == 1):
            assert work.touched_bytes >= sizes.cold_bytes, case
        assert work.touched_bytes <= work.copies * work.n_bytes, case


def test_shares_have_nothing_in_common_as_long_as_there_is_enough() -> None:
    ids = np.array(Numbers().shares(7, 20, 90), dtype=np.int32)
    assert ids.shape == (7, 20) and ids.min() >= 0 and ids.max() < 90
    assert (np.diff(ids, axis=1) > 0).all()
    for four in (ids[:4], ids[4:]):
        assert np.unique(four).size == four.size


def test_the_host_s_time_is_not_the_device_s() -> None:
    """A kernel that takes its time to be described, and none to be computed."""

    def described(inputs: tuple[mx.array, ...], _: int) -> list[mx.array]:
        time.sleep(0.02)
        return [2 * inputs[0]]

    work = Work((mx.ones((8,)),), described, 3, 64, 64)
    measured = _measure(work, 32, ONCE, None)
    assert measured.host_s >= 0.02 > measured.seconds


def test_an_operation_without_a_kernel_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def is_on(_: str) -> bool:
        return False

    monkeypatch.setattr(launch, "is_on", is_on)
    results = list(run(EmulatedKernel, SMALL, ONCE))
    assert {result.fault for result in results} == {"no kernel was launched"}


def test_the_cases_are_those_of_a_decode_step_and_take_little_memory() -> None:
    """At the release's widths their bytes are its floor, less gaps in the table, and state."""
    sizes, moved = Sizes(), 0.0
    for case in cases(sizes):
        numbers = Numbers()
        work = case.prepare(sizes, case.tokens, numbers)
        moved += case.per_token * work.n_bytes
        assert numbers.n_bytes < 2e9, case
    config = parse_config(json.loads((DATA / "released_config.json").read_text()))
    assert moved == pytest.approx(floor_bytes(config), rel=0.02)


POWERMETRICS = """
import itertools, time
for i in itertools.count():
    print("*** Sampled system activity ***", "CPU Power: 900 mW", flush=True)
    print(f"Combined Power (CPU + GPU + ANE): {1000 if i == 0 else 50_000} mW", flush=True)
    time.sleep(0.05)
"""


def test_power_is_the_mean_of_the_samples_within() -> None:
    with PowerMeter((sys.executable, "-c", POWERMETRICS)) as meter:
        start_s = time.monotonic()
        assert meter.watts(start_s, start_s + 9) is None
        while meter.watts(start_s, time.monotonic()) is None:
            time.sleep(0.01)
        end_s = time.monotonic()
        assert end_s - start_s >= INTERVAL_S
        # The first sample lies before.
        assert meter.watts(start_s, end_s) == 50
        assert meter.watts(start_s - 9, end_s) < 50  # pyright: ignore[reportOptionalOperand]


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ((sys.executable, "-c", "import sys; sys.exit('a password is required')"), "a password is"),
        ((sys.executable, "-c", ""), "it printed no power"),
        (("/nowhere/powermetrics",), "No such file"),
    ],
)
def test_no_power_is_one_sentence(command: tuple[str, ...], said: str) -> None:
    with pytest.raises(DeviceError, match=f"no power .*{said}.*sudo -v"):
        PowerMeter(command)


def test_joules_are_those_of_the_time() -> None:
    about = ("mhc", "x", 1)
    results = [
        Result(*about, 40, 100, 100, launches=1, measured=Measured(1e-3, 0.0, False, 0.5)),
        Result(*about, 2, 100, 100, launches=1, measured=Measured(2e-3, 0.0, False, 1.0)),
        Result(*about, 0, 100, 100, launches=1, measured=Measured(9.0, 0.0, False, 9.0)),
    ]
    assert totals(results) == (pytest.approx(0.044), pytest.approx(22))
    assert results[0].gb_per_s == pytest.approx(1e-4)


def test_a_meter_gives_joules() -> None:
    """Chains as short as these have no sample, so more of them follow."""
    require_emulator()
    asked: list[float] = []

    class Meter(PowerMeter):
        def watts(self, start_s: float, end_s: float) -> float | None:
            asked.append(end_s - start_s)
            return super().watts(start_s, end_s)

    with (
        emulator.using(checked=False, strict=False),
        Meter((sys.executable, "-c", POWERMETRICS)) as meter,
    ):
        result = next(run(EmulatedKernel, SMALL, ONCE, meter))
    (loop_s,) = asked
    assert loop_s >= ONCE.power_s
    assert result.joules is not None
    # A whole number of calls took 50 W.
    calls = 50 * loop_s / result.joules
    assert calls == pytest.approx(round(calls)) and calls >= 1


def test_a_meter_has_several_samples_of_each_case() -> None:
    assert Timing().power_s >= 1 >= 5 * INTERVAL_S


def test_what_is_too_short_is_marked(capsys: pytest.CaptureFixture[str]) -> None:
    results = [
        Result("mhc", name, 1, 1, 100, 100, launches=1, measured=Measured(1e-6, 0.0, floored, None))
        for name, floored in (("short", True), ("long", False))
    ]
    report(MACHINE, results)
    lines = capsys.readouterr().out.splitlines()
    short, long = (next(x for x in lines if name in x.split()) for name in ("short", "long"))
    assert "<1.0" in short and "<" not in long
    assert any(line.startswith("< ") for line in lines)
    found = json.loads(lines[-1])["results"]
    assert [figures["floored"] for figures in found] == [True, False]


def test_a_call_of_no_time_is_floored() -> None:
    work = Work((mx.ones((8,)),), lambda inputs, _: list(inputs), 1, 64, 64)
    measured = [_measure(work, 32, Timing(chain_s=0, chains=5), None) for _ in range(20)]
    assert any(m.is_floored for m in measured)
    assert all(m.seconds > 0 for m in measured)


def test_results_go_to_the_address_that_the_package_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    message = Message()
    for entry in ("Homepage, https://example.org", "Issues, https://example.org/issues"):
        message["Project-URL"] = entry

    def metadata(_: str) -> Message:
        return message

    monkeypatch.setattr(bench.metadata, "metadata", metadata)
    assert tracker() == "https://example.org/issues"
    del message["Project-URL"]
    assert tracker() == "the issue tracker of the project"


def test_without_metal_one_sentence_says_what_to_do() -> None:
    if mx.metal.is_available():
        pytest.skip("this machine has Metal")
    done = CliRunner().invoke(app, ["bench", "kernels"])
    (line,) = done.stderr.splitlines()
    assert (done.exit_code, done.stdout) == (2, "")
    assert line.startswith("ds41: ") and "Mac with Apple silicon" in line


def test_bench_alone_shows_what_there_is() -> None:
    done = CliRunner().invoke(app, ["bench"])
    assert done.exit_code == 0
    assert "kernels" in done.stdout
