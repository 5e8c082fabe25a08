"""The arithmetic of profiles, on made-up profiler events."""

from __future__ import annotations

from typing import Any

import pytest

from gapless.bench.trace import analyse, cpu_lanes, short_name


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
    figures = analyse(events, steps=2)
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
    figures = analyse(events, steps=1)
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
    assert short_name(name) == short


def test_lanes_are_threads_busiest_first_and_nested_calls_count_once() -> None:
    events = [
        event("cpu_op", "aten::linear", 0, 10, thread=7),
        event("cuda_runtime", "cudaLaunchKernel", 2, 5, thread=7),
        event("cpu_op", "aten::mm", 0, 40, thread=8),
        event("kernel", "gemm", 0, 100, thread=9),
    ]
    assert cpu_lanes(events, steps=2) == [
        {"thread": "8", "busy_us": 20.0, "events": 1},
        {"thread": "7", "busy_us": 5.0, "events": 2},
    ]


def test_no_events_give_no_figures_but_no_error_either() -> None:
    assert analyse([], steps=1) == {"operators": [], "num_operators": 0}
    assert cpu_lanes([], steps=1) == []
