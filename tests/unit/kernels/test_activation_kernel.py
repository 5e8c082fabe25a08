"""The gated activation under Triton's interpreter, against ``silu(gate) * up``."""

from __future__ import annotations

import pytest
import torch

from gapless.kernels.activation import fused_silu_mul
from kernel_oracles import DTYPES, assert_close_to, silu_mul_oracle

pytestmark = pytest.mark.usefixtures("poisoned_memory")
interpreted = pytest.mark.skipif(
    torch.cuda.is_available(), reason="with a GPU tests/gpu covers the compiled kernels"
)


@interpreted
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 48, 300, 1024, 1536, 2100])
@pytest.mark.parametrize("num_tokens", [1, 3])
def test_equals_silu_times_up(num_tokens: int, size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(size)
    gate_up = (torch.randn(num_tokens, 2 * size) * 4).to(dtype)
    assert_close_to(fused_silu_mul(gate_up), silu_mul_oracle(gate_up))


@interpreted
@pytest.mark.parametrize("dtype", DTYPES)
def test_extreme_gates(dtype: torch.dtype) -> None:
    gate = torch.tensor([0.0, -0.0, 60000.0, -60000.0, 100.0, -100.0, -20.0, 1e-4], dtype=dtype)
    gate_up = torch.cat((gate, torch.full_like(gate, 0.5)))[None]
    assert_close_to(fused_silu_mul(gate_up), silu_mul_oracle(gate_up), fraction=0.2)


@interpreted
def test_nan_stays_where_it_is() -> None:
    gate_up = torch.randn(2, 40)
    gate_up[0, 3] = gate_up[1, 27] = float("nan")
    expected = torch.zeros(2, 20, dtype=torch.bool)
    expected[0, 3] = expected[1, 7] = True
    assert torch.equal(fused_silu_mul(gate_up).isnan(), expected)


@interpreted
def test_rows_of_a_wider_tensor() -> None:
    wide = torch.randn(3, 100)
    assert_close_to(fused_silu_mul(wide[:, :64]), silu_mul_oracle(wide[:, :64]))


def test_no_rows_launch_nothing() -> None:
    assert fused_silu_mul(torch.empty(0, 64)).shape == (0, 32)
