"""Residual addition and layer norm in one kernel, under Triton's interpreter, against PyTorch's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from gapless.kernels.layer_norm import fused_add_layer_norm
from kernel_oracles import DTYPES, assert_close_to

pytestmark = [
    pytest.mark.usefixtures("poisoned_memory"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU tests/gpu covers the compiled kernels"),
]


def rows(num_rows: int, size: int, dtype: torch.dtype, *, mean: float = 0.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_rows + size)
    return (torch.randn(num_rows, size, generator=generator) + mean).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mean", [0.0, 30.0])
@pytest.mark.parametrize("size", [8, 100, 1152])
def test_it_equals_addition_then_norm(size: int, mean: float, dtype: torch.dtype) -> None:
    update, residual = rows(3, size, dtype), rows(4, size, dtype, mean=mean)[:3]
    weight, bias = rows(5, size, dtype)[0], rows(6, size, dtype)[0]
    before = residual.clone()
    total, normed = fused_add_layer_norm(update, residual, weight, bias, 1e-6)
    assert torch.equal(total, residual + update), "the residual stream is bit-equal"
    expected = F.layer_norm((residual + update).float(), (size,), weight.float(), bias.float(), 1e-6)
    if dtype == torch.float32:
        torch.testing.assert_close(normed, expected, atol=2e-5, rtol=1e-5)
    else:
        assert_close_to(normed, expected.to(dtype), fraction=0.05)
    assert torch.equal(residual, before), "the residual may be a static input"


def test_rows_may_lie_in_a_wider_tensor_and_there_may_be_none() -> None:
    wide, weight, bias = rows(4, 96, torch.float32), torch.ones(32), torch.zeros(32)
    total, normed = fused_add_layer_norm(wide[:, :32], wide[:, 40:72], weight, bias, 1e-6)
    assert torch.equal(total, wide[:, :32] + wide[:, 40:72])
    torch.testing.assert_close(normed, F.layer_norm(total, (32,), eps=1e-6), atol=1e-5, rtol=1e-5)
    total, normed = fused_add_layer_norm(wide[:0, :32], wide[:0, 40:72], weight, bias, 1e-6)
    assert total.shape == normed.shape == (0, 32)
