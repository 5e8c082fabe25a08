"""What the interpreter cannot show: the head that picks compiles for a Hopper GPU as it is meant to."""

from __future__ import annotations

from typing import Any

import pytest
from compiled_reports import reports_of

pytest.importorskip("triton")


@pytest.fixture(scope="module")
def reports() -> list[dict[str, Any]]:
    return reports_of("compile_head_product.py")


def test_it_fits_a_processor_and_the_assembler_made_no_mistake(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        assert report["shared_bytes"] <= 227 * 1024, report
        assert not report["unwritten"], report
        assert report["spills"] == 0, report
        # Where it runs out of registers the assembler waits for every single product; so it does, too, where
        # sums become float16 one by one.
        assert report["product_waits"][0] <= report["product_waits"][1], report


def test_groups_of_warps_multiply_what_is_copied_16_bytes_at_a_time(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        assert report["groups_multiply"] == (report["rows_pad"] > 8), report
        assert report["wide_copies"] > 0, report


def test_weights_alone_are_asked_for_before_the_wait_and_nothing_is_written(
    reports: list[dict[str, Any]],
) -> None:
    assert any(report["calls_before_wait"] for report in reports)
    for report in reports:
        assert (report["loads_before_wait"] > 0) == (report["early"] > 0), report
        assert report["stores_before_wait"] == 0, report
        assert report["stores"] > 0, report


def test_logits_stay_with_the_threads_that_made_them(reports: list[dict[str, Any]]) -> None:
    """A step that nobody reads logits of must not pay for their order in memory."""
    for report in reports:
        assert report["reordered"] == [], report
