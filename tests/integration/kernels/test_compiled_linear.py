"""What the interpreter cannot show: the small products compile for a Hopper GPU and read weights early."""

from __future__ import annotations

from typing import Any

import pytest
from compiled_reports import reports_of

pytest.importorskip("triton")


@pytest.fixture(scope="module")
def reports() -> list[dict[str, Any]]:
    return reports_of("compile_linear_kernels.py")


def test_both_kernels_compile_and_fit_a_processor(reports: list[dict[str, Any]]) -> None:
    assert {report["kernel"] for report in reports} == {"gemv_kernel", "tile_kernel"}
    assert max(report["shared_bytes"] for report in reports) <= 227 * 1024


def test_weights_are_read_16_bytes_at_a_time(reports: list[dict[str, Any]]) -> None:
    assert {report["load_bits"] for report in reports if report["early"]} == {128}


def test_weights_are_in_flight_before_the_wait_and_nothing_is_written(reports: list[dict[str, Any]]) -> None:
    assert any(report["early"] > 1 for report in reports)
    for report in reports:
        assert report["waits"], report
        assert report["stores_before_wait"] == 0, report
        assert report["loads_before_wait"] >= report["early"], report
