"""What the model takes, what a machine has, and what is said when the two do not meet."""

import copy
import json
import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_engine import memory
from mlx_engine.config import ModelConfig
from mlx_engine.config_file import parse_config
from mlx_engine.errors import DeviceError
from mlx_engine.memory import MachineMemory
from tests.reference.random_tensors import TINY_CONFIG

GB = 10**9
RELEASED = parse_config(
    json.loads((Path(__file__).parents[1] / "data" / "released_config.json").read_text())
)
TINY = parse_config(TINY_CONFIG)
BIG_MAC = MachineMemory("Metal", 512 * GB, 400 * GB)


def test_the_released_weights_are_all_but_tables_drafts_vision_and_image_biases() -> None:
    owners = 147_838_599_136 + 147_823_271_392 + 1_323_827_200 + 1_323_837_440 + 315_043_840
    assert memory.resident_bytes(RELEASED) == owners - 40 * 384 * 4


@pytest.mark.parametrize(
    ("context_tokens", "growing"),
    [(32_768, 29_163_520), (131_072, 116_654_080), (1_048_576, 933_232_640)],
)
def test_the_released_state_has_the_published_bytes(context_tokens: int, growing: int) -> None:
    """Section 7 of docs/model.md."""
    assert memory.growing_bytes(RELEASED, context_tokens) == growing
    assert memory.window_bytes(RELEASED) == 2_703_360
    assert memory.state_bytes(RELEASED, context_tokens) == growing + 2_703_360 + 12_288
    assert memory.growing_bytes_per_token(RELEASED) == 890


def test_rows_are_counted_whole() -> None:
    # An odd token waits in layers 2, 8 and 14 and has its row in layer 20 alone.
    assert memory.growing_bytes(RELEASED, 5) - memory.growing_bytes(RELEASED, 4) == 288 + 68
    assert memory.growing_bytes(RELEASED, 6) - memory.growing_bytes(RELEASED, 5) == 4 * (288 + 68)


def test_the_scales_by_row_and_the_hot_rows_are_kept() -> None:
    c, engram = RELEASED, RELEASED.engram
    assert engram is not None
    D, heads = c.hidden_size, c.num_attention_heads * c.head_dim
    attention = D * c.q_lora_rank + c.q_lora_rank * heads + D * c.head_dim
    output = c.o_lora_rank * heads + D * c.o_groups * c.o_lora_rank
    shared = 3 * D * c.moe_intermediate_size
    queries = c.q_lora_rank * c.index_n_heads * c.index_head_dim
    projections = (c.hc_mult + 1) * D * engram.columns * engram.head_dim
    fp8 = c.num_hidden_layers * (attention + output + shared)
    fp8 += len(c.index_source_layer_ids) * queries + len(engram.layer_ids) * projections
    assert memory.kept_bytes(RELEASED) == fp8 // 32 + 512 * 2**20


def test_of_small_tables_no_more_is_kept_than_they_have() -> None:
    raw = copy.deepcopy(TINY_CONFIG)
    raw["text_config"] |= {"engram_layer_ids": [], "engram_num_embeddings": []}
    tables = (630 + 834) * (32 + 1)
    projections = 2 * (4 + 1) * 128 * 6 * 32
    without = memory.kept_bytes(parse_config(raw))
    assert memory.kept_bytes(TINY) == without + projections // 32 + 2 * tables


def test_a_model_that_fits_is_told_its_needs() -> None:
    needed = memory.require_memory(RELEASED, 1_048_576, BIG_MAC, 512)
    assert needed.weights_bytes == memory.resident_bytes(RELEASED)
    assert needed.kept_bytes == memory.kept_bytes(RELEASED)
    assert needed.state_bytes == memory.default_session_bytes(RELEASED, 1_048_576)
    assert needed.activation_bytes == memory.activation_bytes(RELEASED, 1_048_576, 512)
    parts = (
        needed.weights_bytes,
        needed.kept_bytes,
        needed.state_bytes,
        needed.activation_bytes,
    )
    assert needed.total_bytes == sum(parts)


def test_a_longer_chunk_needs_more_and_a_short_one_still_the_pass_on_the_tail() -> None:
    short, usual, long = (
        memory.activation_bytes(RELEASED, 1_048_576, chunk) for chunk in (1, 2048, 8192)
    )
    assert short < usual < 0.5 * long
    # The 2,541 last tokens pass the layers above the last kv source at once, in any chunks.
    streams = RELEASED.hc_mult * RELEASED.hidden_size * 4
    assert short > RELEASED.reach_tokens(RELEASED.last_kv_source) * streams
    assert memory.activation_bytes(RELEASED, 64, 8192) == memory.activation_bytes(RELEASED, 64, 64)


def refusal(machine: MachineMemory, config: ModelConfig = RELEASED, tokens: int = 1_048_576) -> str:
    with pytest.raises(DeviceError) as caught:
        memory.require_memory(config, tokens, machine)
    return str(caught.value)


def test_the_limit_is_what_is_needed_to_the_byte() -> None:
    needed = memory.needs(RELEASED, 1_048_576).total_bytes
    memory.require_memory(RELEASED, 1_048_576, MachineMemory("CUDA", 2 * needed, needed))
    assert refusal(MachineMemory("CUDA", 2 * needed, needed - 1))


@pytest.mark.parametrize("context_tokens", [4096, 65_536, 1_048_576])
def test_answers_without_a_limit_are_given_at_once(context_tokens: int) -> None:
    free_bytes = memory.default_session_bytes(RELEASED, context_tokens)
    free_bytes -= memory.short_session_bytes(RELEASED, context_tokens)
    assert memory.ANSWERS * memory.answer_bytes(RELEASED, context_tokens) <= free_bytes


def test_a_refusal_has_the_numbers() -> None:
    message = refusal(MachineMemory("Metal", 128 * GB, 96 * GB))
    kept = memory.format_bytes(memory.kept_bytes(RELEASED))
    for part in (
        "298.6 GB of weights",
        f"{kept} kept beside them",
        "4.52 GB for sessions of 1,048,576 tokens",
        "96.0 GB of 128.0 GB",
    ):
        assert part in message
    assert "sysctl" not in message and "--ctx" not in message and "use a machine with" in message


def test_a_mac_that_could_give_more_is_told_how() -> None:
    message = refusal(MachineMemory("Metal", 384 * GB, 290 * GB))
    found = re.search(r"sudo sysctl iogpu\.wired_limit_mb=(\d+)", message)
    assert found is not None and "--ctx" not in message
    raised = MachineMemory("Metal", 384 * GB, int(found[1]) * 2**20)
    memory.require_memory(RELEASED, 1_048_576, raised)


def test_a_context_that_is_too_long_alone_is_told_one_that_fits() -> None:
    machine = MachineMemory("CUDA", 320 * GB, memory.needs(RELEASED, 100_000).total_bytes)
    found = re.search(r"--ctx (\d+)", refusal(machine))
    assert found is not None
    context_tokens = int(found[1])
    memory.require_memory(RELEASED, context_tokens, machine)
    assert context_tokens <= 100_000 < context_tokens + 1024
    assert refusal(machine, tokens=context_tokens + 1024)


def test_a_host_with_other_programs_is_told_to_stop_them() -> None:
    assert "stop other programs" in refusal(MachineMemory("CPU", 512 * GB, 100 * GB))


def test_a_model_without_compressed_layers_has_no_context_that_fits_better() -> None:
    raw = copy.deepcopy(TINY_CONFIG)
    raw["text_config"] |= {
        "compress_ratios": [0] * 10,
        "kv_source_layer_ids": [],
        "index_source_layer_ids": [],
        "candidate_source_layer_id": -1,
    }
    config = parse_config(raw)
    assert memory.growing_bytes(config, 512) == 0
    assert "use a machine with" in refusal(MachineMemory("CPU", 1000, 1000), config, 512)


def test_the_wired_limit_is_raised_to_all_that_the_gpu_may_use_on_metal_alone() -> None:
    limits: list[int] = []
    for kind in ("Metal", "CUDA", "CPU"):
        memory.raise_wired_limit(MachineMemory(kind, 512 * GB, 400 * GB), limits.append)
    assert limits == [400 * GB]


@pytest.mark.parametrize(
    ("info", "expected"),
    [
        (
            {"memory_size": 512 * GB, "max_recommended_working_set_size": 400 * GB},
            MachineMemory("Metal", 512 * GB, 400 * GB),
        ),
        (
            {"total_memory": 80 * GB, "free_memory": 70 * GB},
            MachineMemory("CUDA", 80 * GB, 70 * GB),
        ),
    ],
)
def test_the_device_tells_its_memory(
    monkeypatch: pytest.MonkeyPatch, info: dict[str, Any], expected: MachineMemory
) -> None:
    monkeypatch.setattr(mx, "device_info", lambda: {"device_name": "some device", **info})
    assert memory.machine_memory() == expected


def host(tmp_path: Path, cgroup_line: str, files: dict[str, str]) -> MachineMemory:
    """The memory of a host with 64 kB, of which 48 are available, and these control groups."""
    proc = tmp_path / "proc"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 64 kB\nMemFree: 8 kB\nMemAvailable: 48 kB\nPages: 3\n")
    (proc / "self" / "cgroup").write_text(cgroup_line)
    for name, content in files.items():
        path = tmp_path / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return memory.machine_memory(proc, tmp_path / "cgroup")


@pytest.fixture
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx, "device_info", lambda: {"device_name": "some CPU"})


KB = 1024


@pytest.mark.usefixtures("on_a_cpu")
def test_a_host_without_limits_tells_what_is_available(tmp_path: Path) -> None:
    files = {"a/memory.max": "max", "a/memory.current": "5", "a/memory.stat": "inactive_file 1\n"}
    assert host(tmp_path, "0::/a\n", files) == MachineMemory("CPU", 64 * KB, 48 * KB)


@pytest.mark.usefixtures("on_a_cpu")
def test_the_tightest_control_group_counts_without_its_idle_file_pages(tmp_path: Path) -> None:
    files = {
        "a/memory.max": str(40 * KB),
        "a/memory.current": str(30 * KB),
        "a/memory.stat": f"anon 3\ninactive_file {20 * KB}\n",
        "a/b/memory.max": str(50 * KB),
        "a/b/memory.current": str(25 * KB),
        "a/b/memory.stat": "inactive_file 0\n",
    }
    # a: 40 - (30 - 20) = 30; b: 50 - 25 = 25.
    assert host(tmp_path, "0::/a/b\n", files) == MachineMemory("CPU", 40 * KB, 25 * KB)


@pytest.mark.usefixtures("on_a_cpu")
def test_control_groups_of_the_first_version(tmp_path: Path) -> None:
    """In a container the path is the host's, and the limit is at the mount's root."""
    files = {
        "memory/memory.limit_in_bytes": str(32 * KB),
        "memory/memory.usage_in_bytes": str(12 * KB),
        "memory/memory.stat": f"total_inactive_file {4 * KB}\n",
    }
    line = "3:cpu,cpuacct:/x\n2:memory:/docker/abc\n"
    assert host(tmp_path, line, files) == MachineMemory("CPU", 32 * KB, 24 * KB)


@pytest.mark.usefixtures("on_a_cpu")
def test_a_host_without_proc_tells_its_total(tmp_path: Path) -> None:
    found = memory.machine_memory(tmp_path / "none", tmp_path / "none")
    assert found.kind == "CPU" and found.total_bytes == found.usable_bytes > 2**20


def test_this_machine_has_memory() -> None:
    found = memory.machine_memory()
    assert 0 < found.usable_bytes <= found.total_bytes


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 KB"),
        (62_720, "62.7 KB"),
        (2_703_360, "2.70 MB"),
        (510_286_023_000, "510.3 GB"),
        (2 * 10**12, "2.00 TB"),
        (5 * 10**15, "5000.0 TB"),
    ],
)
def test_sizes_are_short(n_bytes: int, text: str) -> None:
    assert memory.format_bytes(n_bytes) == text
