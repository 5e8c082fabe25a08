"""What the interpreter cannot show: products in parts, and the norms that add them up, compile for a Hopper
GPU, fit a processor, and read nothing of a step before the kernel ahead has ended."""

from __future__ import annotations

from typing import Any

import pytest
from compiled_reports import reports_of

pytest.importorskip("triton")


@pytest.fixture(scope="module")
def reports() -> list[dict[str, Any]]:
    return reports_of("compile_summed_products.py")


def of_kernel(reports: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [report for report in reports if report["kernel"] == name]


def test_products_in_parts_fit_a_processor_and_leave_few_of_them_idle(reports: list[dict[str, Any]]) -> None:
    products = of_kernel(reports, "tile_kernel")
    assert {report["tokens"] for report in products} == {8, 16, 32, 64, 128}
    for report in products:
        num_blocks, parts = report["grid"]
        assert (parts, report["shared_bytes"] <= 227 * 1024) == (report["parts"], True), report
        assert 128 <= num_blocks * parts <= 256, report


def test_operands_and_parts_move_16_bytes_at_a_time(reports: list[dict[str, Any]]) -> None:
    for report in of_kernel(reports, "tile_kernel"):
        assert report["store_bits"] == 128 or report["tokens"] <= 8, report
        assert report["tensor_core_products"] > 0, report
        assert (report["load_bits"] == 128) if report["early"] else report["wide_copies"], report
    for report in of_kernel(reports, "rms_norm_kernel"):
        assert report["load_bits"] >= 64, report


def test_only_weights_are_read_before_the_wait_and_nothing_is_written(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        assert report["waits"], report
        assert report["stores_before_wait"] == 0, report
    for report in of_kernel(reports, "tile_kernel"):
        assert report["loads_before_wait"] >= report["early"], report
    for report in of_kernel(reports, "rms_norm_kernel"):
        assert report["loads_before_wait"] <= 2, "the norm's weights alone"


def test_a_norm_of_many_parts_has_more_threads(reports: list[dict[str, Any]]) -> None:
    """So that no thread holds so much that the assembler would load it in turns."""
    warps = {report["parts"]: report["num_warps"] for report in of_kernel(reports, "rms_norm_kernel")}
    assert warps == {2: 4, 8: 16, 16: 16}
