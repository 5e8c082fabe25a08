"""The arithmetic of ``benchmarks/profile_step.py`` on made-up profiler events, and one run on a CPU."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "profile_step.py"
_spec = importlib.util.spec_from_file_location("profile_step", SCRIPT)
assert _spec is not None
assert _spec.loader is not None
profile_step = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(profile_step)


def event(category: str, name: str, start: float, duration: float, thread: int = 1) -> dict[str, Any]:
    return {"cat": category, "name": name, "ts": start, "dur": duration, "tid": thread}


def test_gpu_activities_are_merged_and_the_rest_is_gaps() -> None:
    events = [
        event("kernel", "gemm<128>(float*)", 0, 10),
        event("kernel", "gemm<64>(float*)", 5, 10),  # overlaps: busy once
        event("gpu_memcpy", "Memcpy DtoD", 18, 2),
        event("kernel", "norm", 50, 10),
        event("cuda_runtime", "cudaStreamSynchronize", 20, 30),
        event("cuda_runtime", "cudaGraphLaunch", 1, 4),
        event("cpu_op", "aten::copy_", 0, 3),
    ]
    figures = profile_step.analyse(events, steps=2)
    assert figures["gpu_busy_us"] == (15 + 2 + 10) / 2
    assert figures["gpu_span_us"] == 60 / 2
    assert figures["gpu_gap_us"] == (3 + 30) / 2
    assert (figures["gaps_over_20_us"], figures["largest_gap_us"]) == (0.5, 30)
    assert (figures["host_wait_us"], figures["num_launches"]) == (15, 0.5)
    assert figures["kernels"][0] == {"name": "gemm", "count": 1.0, "us": 10.0}
    assert {row["name"] for row in figures["kernels"]} == {"gemm", "norm", "Memcpy DtoD"}


def test_operators_count_their_own_time_only() -> None:
    events = [
        event("cpu_op", "aten::linear", 0, 10),
        event("cpu_op", "aten::mm", 2, 5),
        event("cpu_op", "aten::mm", 20, 5),
        event("cpu_op", "aten::linear", 0, 7, thread=2),
    ]
    figures = profile_step.analyse(events, steps=1)
    assert figures["num_operators"] == 4
    assert figures["operators"] == [
        {"name": "aten::linear", "count": 2.0, "us": 12.0},
        {"name": "aten::mm", "count": 2.0, "us": 10.0},
    ]


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("rms_norm_kernel", "rms_norm_kernel"),
        ("void at::native::copy_kernel<4, float>(int)", "at::native::copy_kernel"),
        (
            "void at::native::elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(int)",
            "at::native::elementwise_kernel CUDAFunctor_add",
        ),
        ("x" * 200, "x" * 60),
    ],
)
def test_kernel_names_are_cut(name: str, short: str) -> None:
    assert profile_step.short_name(name) == short


def test_a_run_ends_in_one_line_of_json(tmp_path: Path) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 50,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    arguments = "--device cpu --batch 2 9 --prompt-tokens 8 99 --steps 3 --max-running-requests 2"
    command = [sys.executable, str(SCRIPT), "--model", str(tmp_path), *arguments.split()]
    run = subprocess.run([*command, "--kv-cache-tokens", "256"], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout.splitlines()[-1])
    assert list(result["decode"]) == ["2"], "9 requests do not fit"
    assert list(result["prefill"]) == ["8"], "99 tokens do not fit"
    assert result["decode"]["2"]["wall_us"] > 0
    assert "decode, batch 2" in run.stderr
