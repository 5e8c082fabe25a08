"""The CPU's RMS norm in fewer kernels is PyTorch's, in a unit or two of the last place: where it was written
to the bit, but a sum may be vectorised otherwise elsewhere."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from gapless.models.layers import HeadNorm, Placement, RMSNorm, UnitRMS

CPU = Placement(dtype=torch.float32, device=torch.device("cpu"))
CLOSE = {"rtol": 3e-7, "atol": 0.0}


@pytest.mark.parametrize("size", [1, 7, 64, 100, 576, 4096])
@pytest.mark.parametrize("num_tokens", [0, 1, 3, 8, 100])
def test_it_is_the_norm_of_pytorch(size: int, num_tokens: int) -> None:
    hidden = torch.randn(num_tokens, size) * 3
    norm = RMSNorm(size, eps=1e-5, placement=CPU)
    torch.nn.init.normal_(norm.weight)
    assert norm.unit_rms is not None
    torch.testing.assert_close(norm(hidden), F.rms_norm(hidden, (size,), norm.weight, 1e-5), **CLOSE)


def test_heads_that_are_a_view_of_a_merged_product() -> None:
    heads = torch.randn(5, 8, 64)[:, :6]
    norm = HeadNorm(num_heads=4, num_kv_heads=2, head_size=64, eps=1e-6, placement=CPU)
    torch.nn.init.normal_(norm.weight_HD)
    torch.testing.assert_close(norm(heads), F.rms_norm(heads, (64,), None, 1e-6) * norm.weight_HD, **CLOSE)


def test_rows_of_zeros_and_non_finite_rows() -> None:
    hidden = torch.zeros(3, 16)
    hidden[1, 2], hidden[2, 3] = float("inf"), float("nan")
    expected = F.rms_norm(hidden, (16,), None, 1e-5)
    assert torch.equal(UnitRMS(16, eps=1e-5)(hidden).nan_to_num(7.0), expected.nan_to_num(7.0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes_keep_the_norm_of_pytorch(dtype: torch.dtype) -> None:
    norm = RMSNorm(8, eps=1e-5, placement=Placement(dtype=dtype, device=torch.device("cpu")))
    assert norm.unit_rms is None
