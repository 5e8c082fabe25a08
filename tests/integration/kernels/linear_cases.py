"""Shapes, tiles and the oracle of small matrix products, for the interpreter and for a GPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from gapless.kernels.linear_tiles import Tiles

HALVES = (torch.bfloat16, torch.float16)


def gemv(block_o: int, block_i: int, num_early: int) -> Tiles:
    return Tiles(on_tensor_cores=False, block_o=block_o, block_i=block_i, num_early=num_early, num_warps=4)


def tile(block_o: int, block_i: int, split: int, num_early: int) -> Tiles:
    return Tiles(
        on_tensor_cores=True,
        block_o=block_o,
        block_i=block_i,
        split=split,
        num_early=num_early,
        num_warps=max(split, 4),
    )


def make_product(
    num_tokens: int, num_in: int, num_rows: int, *, dtype: torch.dtype, has_bias: bool, device: str = "cpu"
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Activations, weights and bias; the activations are rows of a wider tensor."""
    wide = torch.randn(num_tokens, num_in + 24, device=device).to(dtype)
    weight = (torch.randn(num_rows, num_in, device=device) * num_in**-0.5).to(dtype)
    bias = torch.randn(num_rows, device=device).to(dtype) if has_bias else None
    return wide[:, :num_in], weight, bias


def linear_oracle(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, *, is_gated: bool) -> Tensor:
    """In float64, rounded where two steps round."""
    bias = None if bias_O is None else bias_O.double()
    out = F.linear(x_TI.double(), weight_OI.double(), bias).to(x_TI.dtype)
    if not is_gated:
        return out
    gate, up = out.chunk(2, dim=-1)
    return F.silu(gate) * up


def assert_close_to_oracle(actual: Tensor, expected: Tensor) -> None:
    """Half precision: the last bit may differ, and where gate or up did, a little more."""
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    step = torch.finfo(actual.dtype).eps
    torch.testing.assert_close(actual, expected, atol=step, rtol=2 * step, equal_nan=True)
    differing = (actual != expected) & ~(actual.isnan() & expected.isnan())
    assert differing.sum() <= max(2, 0.05 * differing.numel())
