"""What happens when kernels start, and when one fails: its family goes off with one warning."""

import inspect
import logging
import pkgutil
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_engine import ops
from mlx_engine.cuda.kernels import CudaKernels
from mlx_engine.ops import launch
from mlx_engine.ops.launch import FastPaths, Kernel
from mlx_engine.sampling import Sampler, Sampling
from tests.engine.quiet import quiet_tokens
from tests.engine.support import Subject, build, tiny_config

OPS = [
    import_module(f"{ops.__name__}.{found.name}") for found in pkgutil.iter_modules(ops.__path__)
]

# In the form of MLX's, with what Apple's compiler prints after it.
NOT_BUILT = """[metal::Device] Unable to build metal library from source
program_source:6:9: warning: unused variable 'i' [-Wunused-variable]
    int i = 0;
        ^
program_source:7:5: error: use of undeclared identifier 'y'
    y = 1;
    ^
program_source:9:1: fatal error: no such type
""" + "".join(f"program_source:{line}:1: error: {'z' * 1000}\n" for line in range(10, 40))

DOUBLE = Kernel("linear", "double", ("x",), ("out",), "")


@launch.falls_back
def double(x: mx.array) -> mx.array:
    if not launch.is_on("linear"):
        return 2 * x
    (out,) = DOUBLE(
        [x],
        template=[("N", x.size)],
        grid=(1, 1, 1),
        threadgroup=(1, 1, 1),
        shapes=[x.shape],
        dtypes=[x.dtype],
    )
    return out


class Factory:
    """Kernels that double an input of less than `limit` values, and cannot be compiled for more."""

    def __init__(self, limit: int = 1 << 30) -> None:
        self.limit = limit
        self.calls = 0

    def __call__(self, **_: Any) -> Callable[..., list[mx.array]]:
        def run(*, inputs: list[mx.array], **_: Any) -> list[mx.array]:
            self.calls += 1
            if inputs[0].size >= self.limit:
                raise RuntimeError(NOT_BUILT)
            return [2 * inputs[0]]

        return run


@pytest.fixture(autouse=True)
def only_these_probes(monkeypatch: pytest.MonkeyPatch) -> Generator[dict[str, Callable[[], bool]]]:
    """The self-tests that `start` runs; what it switches on is off again afterwards."""
    probes: dict[str, Callable[[], bool]] = {}
    monkeypatch.setattr(launch, "_probes", probes)
    with launch.using(None):
        yield probes


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]


def test_a_family_is_on_if_its_self_test_passes(
    only_these_probes: dict[str, Callable[[], bool]], caplog: pytest.LogCaptureFixture
) -> None:
    def raising() -> bool:
        raise ValueError("no such function\nmore")

    only_these_probes |= {
        "linear": lambda: double(mx.ones((2,))).tolist() == [2.0, 2.0],
        "mhc": lambda: False,
        "front": raising,
    }
    assert launch.start(Factory()) == FastPaths(("linear",), ("front", "mhc"))
    assert [launch.is_on(family) for family in ("linear", "mhc", "front")] == [True, False, False]
    differs, raised = warnings(caplog)
    assert "mhc kernels are off" in differs and "differ" in differs
    assert "front kernels are off" in raised and raised.endswith("no such function")


def test_in_cuda_a_self_test_leaves_all_but_kernels_to_the_cpu(
    only_these_probes: dict[str, Callable[[], bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Since MLX compiles its own operations there at their first use, for a minute and a half."""
    entered: list[object] = []

    @contextmanager
    def noted(device: object) -> Generator[None]:
        entered.append(device)
        yield
        entered.pop()

    def probe() -> bool:
        seen.append(list(entered))
        return True

    monkeypatch.setattr(mx, "stream", noted)
    only_these_probes |= {"linear": probe, "mhc": probe}
    for factory, devices in ((Factory(), []), (CudaKernels(), [mx.cpu])):
        seen: list[list[object]] = []
        launch.start(factory)
        assert seen == [devices, devices]
        assert not entered


def test_a_kernel_that_fails_at_other_sizes_falls_back(
    only_these_probes: dict[str, Callable[[], bool]], caplog: pytest.LogCaptureFixture
) -> None:
    only_these_probes["linear"] = lambda: True
    launch.start(factory := Factory(limit=8))
    assert double(mx.ones((4,))).tolist() == [2.0] * 4
    assert (factory.calls, launch.fast_paths().on) == (1, ("linear",))
    for _ in range(2):
        assert double(mx.ones((8,))).tolist() == [2.0] * 8
    assert (factory.calls, launch.fast_paths()) == (2, FastPaths((), ("linear",)))
    (warning,) = warnings(caplog)
    assert "linear kernels are off" in warning
    # The kernel, what MLX says, and why: the compiler's first errors and not all of them.
    assert "double: [metal::Device] Unable to build metal library from source; " in warning
    assert "program_source:7:5: error: use of undeclared identifier 'y'; " in warning
    assert "program_source:9:1: fatal error: no such type; program_source:10:1: error: z" in warning
    assert "warning" not in warning and "program_source:11" not in warning
    assert len(warning) < 1000


def test_a_kernel_that_fails_when_it_is_computed_falls_back(
    only_these_probes: dict[str, Callable[[], bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLX compiles late: each variant is computed at its first call, and not again."""
    only_these_probes["linear"] = lambda: True
    launch.start(factory := Factory())
    computed = Counter[int]()

    def failing(arrays: list[mx.array]) -> None:
        # The inputs of each call are computed first; they are ones.
        if mx.all(arrays[0] == 1).item():
            return
        computed[arrays[0].size] += 1
        if arrays[0].size == 8:
            raise RuntimeError("a threadgroup is too large")

    monkeypatch.setattr(mx, "eval", failing)
    results = [double(mx.ones((n,))) for n in (4, 4, 5, 8, 4)]
    monkeypatch.undo()
    assert [x.tolist() for x in results] == [[2.0] * n for n in (4, 4, 5, 8, 4)]
    assert (computed, factory.calls) == ({4: 1, 5: 1, 8: 1}, 4)


def test_a_fault_of_what_came_before_is_not_the_kernel_s(
    only_these_probes: dict[str, Callable[[], bool]], caplog: pytest.LogCaptureFixture
) -> None:
    """MLX computes late: the first kernel would meet whatever is wrong before it."""
    only_these_probes["linear"] = lambda: True
    launch.start(Factory())
    # What has no inverse fails when it is computed.
    pending = mx.linalg.inv(mx.zeros((2, 2)), stream=mx.cpu)
    with pytest.raises(RuntimeError, match="Inverse"):
        double(pending)
    assert launch.fast_paths().on == ("linear",) and not warnings(caplog)
    assert double(mx.ones((2, 2))).tolist() == [[2.0, 2.0]] * 2


@pytest.mark.parametrize("module", OPS)
def test_an_operation_falls_back_once(module: ModuleType) -> None:
    for name, operation in inspect.getmembers(module, inspect.isfunction):
        inner = getattr(operation, "__wrapped__", None)
        assert not hasattr(inner, "__wrapped__"), name


def test_without_start_a_fault_is_raised() -> None:
    """What tests run must not fall back unseen."""
    with launch.using(Factory(limit=8)), pytest.raises(RuntimeError, match="Unable to build"):
        double(mx.ones((8,)))


FAMILIES = (
    *("attention", "engram", "expert_tiles", "experts", "front", "indexer", "linear", "mhc"),
    *("router", "sampling"),
)


def test_a_model_whose_kernels_all_fail_computes_as_without_them(
    only_these_probes: dict[str, Callable[[], bool]], caplog: pytest.LogCaptureFixture
) -> None:
    """Every operation that has kernels falls back: many tokens, few, and the draw."""
    subject = build(tiny_config(index_head_dim=64, sliding_window=20), 0)

    def results() -> list[np.ndarray[Any, Any]]:
        ids = quiet_tokens("kernels")
        token = Sampler(Sampling(seed=0))(mx.array(subject_logits(subject, ids)[-1]))
        return [subject_logits(subject, ids), np.array(token)]

    expected = results()
    found: list[np.ndarray[Any, Any]] = []
    only_these_probes |= dict.fromkeys(FAMILIES, lambda: True)
    # A family that is off already hides the operations after it.
    for family in FAMILIES:
        launch.start(Factory(limit=0))
        launch._off |= set(FAMILIES) - {family}  # pyright: ignore[reportPrivateUsage]
        found = results()
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_array_equal(a, b)
        assert launch.fast_paths() == FastPaths((), FAMILIES)
    assert len(warnings(caplog)) == len(FAMILIES)


def subject_logits(subject: Subject, ids: list[int]) -> np.ndarray[Any, Any]:
    return subject.run(ids, [35, 1, 1, 1, 1]).logits
