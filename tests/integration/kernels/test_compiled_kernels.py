"""What the interpreter cannot show: the kernels compile for a Hopper GPU, with full-width memory accesses."""

from __future__ import annotations

from typing import Any

import pytest
from compiled_reports import reports_of

pytest.importorskip("triton")

KERNELS = {
    "rms_norm_kernel",
    "embed_norm_kernel",
    "silu_mul_kernel",
    "rotate_heads_kernel",
    "best_of_chunk_kernel",
    "best_of_row_kernel",
}
SAMPLING_KERNELS = {
    "best_and_splitters_kernel",
    "weigh_splitters_kernel",
    "list_between_kernel",
    "find_cut_kernel",
    "weigh_kept_kernel",
    "draw_kernel",
}
MEDIA_KERNELS = {
    "axis_rows_kernel", "embed_media_kernel", "add_media_norm_kernel", "add_layer_norm_kernel",
    "write_values_kernel",
}  # fmt: skip
NARROW_KERNELS = {"best_of_row_kernel", "count_drawn_kernel", "axis_rows_kernel", "write_values_kernel"}
"""A token, a head's angles, or rows of bytes that start anywhere."""
PENALTY_KERNELS = {"penalise_kernel", "count_drawn_kernel"}
FIRST_KERNELS = {"step_arrays_kernel"}


@pytest.fixture(scope="module")
def reports() -> list[dict[str, Any]]:
    return reports_of("compile_fused_kernels.py")


def test_every_kernel_compiles(reports: list[dict[str, Any]]) -> None:
    assert {
        report["kernel"] for report in reports
    } == KERNELS | MEDIA_KERNELS | SAMPLING_KERNELS | PENALTY_KERNELS | FIRST_KERNELS
    assert max(report["shared_bytes"] for report in reports) <= 48 * 1024


def test_memory_moves_16_bytes_at_a_time(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        if report["kernel"] in SAMPLING_KERNELS:  # which write sums
            assert report["load_bits"] == 128, report
        elif report["kernel"] not in NARROW_KERNELS | FIRST_KERNELS:
            assert (report["load_bits"], report["store_bits"]) == (128, 128), report


def test_early_kernels_wait_before_they_write_or_read_what_was_computed(
    reports: list[dict[str, Any]],
) -> None:
    reads_weights = {"rms_norm_kernel", "embed_norm_kernel", "rotate_heads_kernel"}
    reads_weights |= {"add_media_norm_kernel", "add_layer_norm_kernel"}
    never_early = PENALTY_KERNELS | {"axis_rows_kernel", "embed_media_kernel", "write_values_kernel"}
    never_early |= FIRST_KERNELS
    for report in reports:
        if report["kernel"] in never_early:
            assert not report["waits"], report
            continue
        assert report["waits"], report
        assert report["stores_before_wait"] == 0, report
        # A table that the step itself makes is there only behind the wait.
        is_allowed = report["kernel"] in reads_weights and report["has_positions"]
        assert (report["loads_before_wait"] > 0) == is_allowed, report


def test_the_kernel_behind_the_first_one_lets_others_start_behind_its_own_wait_only(
    reports: list[dict[str, Any]],
) -> None:
    """They read what the first one has written, before they wait."""
    releases = {report["kernel"]: report["releases_before_wait"] for report in reports if report["waits"]}
    assert releases["embed_norm_kernel"] == 0
    assert releases["rotate_heads_kernel"] == 1
    assert not any(report["releases_before_wait"] for report in reports if report["kernel"] in FIRST_KERNELS)


def test_angles_are_exact_however_large(reports: list[dict[str, Any]]) -> None:
    """The approximate instructions are for angles near zero; positions go to a hundred thousand."""
    rows = [report for report in reports if report["kernel"] == "axis_rows_kernel"]
    assert rows
    assert not any(report["approximate_angles"] for report in rows)
