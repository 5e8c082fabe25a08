"""What the interpreter cannot show: the kernels of a mixture of experts compile for a Hopper GPU."""

from __future__ import annotations

from typing import Any

import pytest
from compiled_reports import reports_of

pytest.importorskip("triton")

KERNELS = {
    "route_kernel", "group_kernel", "expert_product_kernel", "combine_kernel", "combine_norm_kernel",
}  # fmt: skip


@pytest.fixture(scope="module")
def reports() -> list[dict[str, Any]]:
    return reports_of("compile_moe_kernels.py")


def test_every_kernel_compiles_and_fits_a_processor(reports: list[dict[str, Any]]) -> None:
    assert {report["kernel"] for report in reports} == KERNELS
    assert {report["block_p"] for report in reports} == {16, 32, 128, None}
    assert max(report["shared_bytes"] for report in reports) <= 227 * 1024


def test_only_weights_of_a_norm_are_read_before_the_kernel_ahead_has_ended(
    reports: list[dict[str, Any]],
) -> None:
    for report in reports:
        assert report["waits"], report
        assert report["stores_before_wait"] == 0, report
        assert (report["loads_before_wait"] > 0) == (report["kernel"] == "combine_norm_kernel"), report


def test_weights_go_to_shared_memory_16_bytes_at_a_time_and_products_to_the_tensor_cores(
    reports: list[dict[str, Any]],
) -> None:
    for report in reports:
        if report["kernel"] == "expert_product_kernel":
            assert report["wide_copies"] > 0, report
            is_exact = report["dtype"] == "torch.float32"  # which the tensor cores are not
            assert is_exact or report["tensor_core_products"] > 0, report
