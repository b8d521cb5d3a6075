"""`ds41 bench kernels`, whole and small: the emulator runs the kernels, its times mean nothing."""

import json
import sys
import time
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from typer.testing import CliRunner

import mlx_engine
from mlx_engine.cli.bench import TRACKER, Machine, report
from mlx_engine.cli.main import app
from mlx_engine.config_file import parse_config
from mlx_engine.errors import DeviceError
from mlx_engine.kernel_bench import Result, Timing, run, totals
from mlx_engine.kernel_cases import cases
from mlx_engine.kernel_inputs import Numbers, Sizes
from mlx_engine.ops import launch
from mlx_engine.power import INTERVAL_S, PowerMeter
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
    cold_bytes=1 << 14,
)
ONCE = Timing(chain_s=0, chains=1)
MACHINE = Machine("Apple M3 Ultra", 512 << 30, 819)


def one_wrong(**arguments: Any) -> Callable[..., list[mx.array]]:
    """The emulator, but for one kernel whose results are a quarter too large."""
    kernel = EmulatedKernel(**arguments)
    if arguments["name"] != "moe_down":
        return kernel

    def run(**call: Any) -> list[mx.array]:
        return [1.25 * out for out in kernel(**call)]

    return run


def test_the_whole_bench(capsys: pytest.CaptureFixture[str]) -> None:
    require_emulator()
    with emulator.using(checked=False, strict=False):
        assert report(MACHINE, run(one_wrong, SMALL, ONCE)) == 1
    lines = capsys.readouterr().out.splitlines()
    record = json.loads(lines[-1])
    assert TRACKER in lines[-2]
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
    timed = [found[c.family, c.name, c.tokens].get("us", 0) * c.per_token for c in expected]
    assert record["token_ms"] == pytest.approx(sum(timed) / 1e3, rel=1e-2)


def test_every_family_has_cases() -> None:
    sources = {Path(f.name) for f in files("mlx_engine.metal").iterdir()}
    families = {source.stem for source in sources if source.suffix == ".metal"}
    # Those are the experts' for many tokens.
    assert {case.family for case in cases(SMALL)} == families - {"expert_tiles"}


def test_the_bytes_of_a_case_are_those_that_move() -> None:
    """One token of every case, and many where other kernels do another sum."""
    require_emulator()
    for case in cases(SMALL):
        is_other = case.family == "experts" and case.tokens == SMALL.many_tokens
        if case.tokens > 1 and not is_other:
            continue
        work = case.prepare(SMALL, case.tokens, Numbers())
        with launch.using(EmulatedKernel), emulator.recording() as reports:
            mx.eval(work.compute(work.x, 0))
        moved = sum(report.unique_bytes for report in reports)
        assert work.n_bytes == pytest.approx(moved, rel=0.02), case


def test_a_kernel_that_fails_does_not_end_the_bench() -> None:
    def broken(**_: Any) -> Callable[..., list[mx.array]]:
        raise RuntimeError("does not compile\nat line 3")

    results = list(run(broken, SMALL, ONCE))
    assert {result.fault for result in results} == {"does not compile"}
    assert totals(results) == (0, None)


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
        assert numbers.n_bytes < 1e9, case
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
        Result(*about, 40, 100, launches=1, seconds=1e-3, joules=0.5),
        Result(*about, 2, 100, launches=1, seconds=2e-3, joules=1.0),
        Result(*about, 0, 100, launches=1, seconds=9.0, joules=9.0),
    ]
    assert totals(results) == (pytest.approx(0.044), pytest.approx(22))
    assert results[0].gb_per_s == pytest.approx(1e-4)


def test_a_meter_gives_joules() -> None:
    require_emulator()
    with (
        emulator.using(checked=False, strict=False),
        PowerMeter((sys.executable, "-c", POWERMETRICS)) as meter,
    ):
        result = next(run(EmulatedKernel, SMALL, Timing(chain_s=0.5, chains=2), meter))
    assert result.joules == pytest.approx(50 * result.seconds)


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
