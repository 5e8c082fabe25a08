"""Interpolated positions by one kernel equal the torch operations of Transformers."""

from __future__ import annotations

import pytest
import torch

from gapless.errors import ConfigError
from gapless.kernels.positions import add_interpolated

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU kernels are not interpreted")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("num_patches", "size"), [(1, 8), (5, 36), (3, 1152), (0, 8)])
def test_the_kernel_equals_gather_weigh_sum_add(num_patches: int, size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    embedded, table = torch.randn(num_patches, size).to(dtype), torch.randn(16, size).to(dtype)
    indices = torch.randint(0, 16, (num_patches, 4), dtype=torch.int32)
    weights, out = torch.rand(num_patches, 4), torch.full((num_patches, size), float("nan"), dtype=dtype)
    add_interpolated(embedded, table, indices, weights, out)
    expected = embedded + (table[indices] * weights[:, :, None]).sum(1).to(dtype)
    tolerance = {torch.float32: 1e-6, torch.float16: 4e-3, torch.bfloat16: 4e-2}[dtype]
    torch.testing.assert_close(out, expected, atol=tolerance, rtol=0)


def test_tensors_with_gaps_are_refused() -> None:
    embedded, table = torch.randn(4, 16)[:, ::2], torch.randn(16, 8)
    indices, weights = torch.zeros(4, 4, dtype=torch.int32), torch.zeros(4, 4)
    with pytest.raises(ConfigError, match="contiguous"):
        add_interpolated(embedded, table, indices, weights, torch.zeros(4, 8))
