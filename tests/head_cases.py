"""Heads, tiles and the oracle of a head that picks, for the interpreter and for a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from gapless.engine.graph_set import INVALID_TOKEN, greedy_or_invalid
from gapless.kernels.head_product import head_greedy, launch_head
from gapless.kernels.head_tiles import HeadTiles

HALVES = (torch.bfloat16, torch.float16)
TILES = (
    HeadTiles(block_r=64, block_o=64, block_i=64, num_warps=4, num_stages=3),
    HeadTiles(block_r=16, block_o=32, block_i=32, num_early=2, prefetch=64, num_warps=4, num_stages=3),
    HeadTiles(block_r=32, block_o=16, block_i=16, split=4, num_early=1, num_warps=4, num_stages=3),
)


def make_head(
    num_rows: int, num_in: int, size: int, *, dtype: torch.dtype, device: str = "cpu"
) -> tuple[Tensor, Tensor]:
    """Hidden states and weights whose logits are a few units large: full of ties in half precision."""
    torch.manual_seed(num_rows + size)
    hidden = torch.randn(num_rows, num_in, device=device)
    weight = torch.randn(size, num_in, device=device) * (3 * num_in**-0.5)
    return hidden.to(dtype), weight.to(dtype)


def tied_head(dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, Tensor, list[int]]:
    """Rows with equal best logits, in one chunk and in several; their best tokens."""
    hidden = torch.zeros(5, 64, dtype=dtype, device=device)
    weight = torch.zeros(203, 64, dtype=dtype, device=device)
    hidden[0, 0] = hidden[1, 1] = hidden[2, 2] = 1.0
    hidden[3] = -1.0  # its logits are -0 or less
    weight[[5, 6, 202], 0] = 2.0
    weight[[70, 131, 199], 1] = 2.0
    weight[:, 2] = 0.5  # the whole row
    weight[:3, 3] = 1.0
    hidden[4, 5], weight[0, 5] = 2.0**-14, -(2.0**-14)  # in float16 -0 among zeros
    return hidden, weight, [5, 70, 0, 3, 0 if dtype is torch.float16 else 1]


def run_head(
    hidden_RE: Tensor,
    weight_VE: Tensor,
    *,
    tiles: HeadTiles | None,
    needed: bool = True,
    size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Logits (7 where none was written) and tokens; without tiles by the operator."""
    num_rows, device = hidden_RE.shape[0], hidden_RE.device
    logits_RV = torch.full((num_rows, size or weight_VE.shape[0]), 7.0, device=device)
    tokens_R = torch.full((num_rows,), 99, dtype=torch.int64, device=device)
    needs_logits_1 = torch.full((1,), int(needed), dtype=torch.int32, device=device)
    args = (hidden_RE, weight_VE, logits_RV, tokens_R, needs_logits_1, INVALID_TOKEN)
    if tiles is None:
        head_greedy(*args)
    else:
        launch_head(*args, tiles)
    return logits_RV, tokens_R


def assert_picks(hidden_RE: Tensor, weight_VE: Tensor, *, tiles: HeadTiles | None) -> tuple[Tensor, Tensor]:
    """Logits are the rounded products, of which tokens are exactly the best; the same without logits, which
    are then left alone. Returns both."""
    logits_RV, tokens_R = run_head(hidden_RE, weight_VE, tiles=tiles)
    dtype = hidden_RE.dtype
    assert torch.equal(logits_RV.to(dtype).float().nan_to_num(), logits_RV.nan_to_num()), "rounded"
    expected_RV = (hidden_RE.double() @ weight_VE.double().T).to(dtype).float()
    step = torch.finfo(dtype).eps
    torch.testing.assert_close(logits_RV, expected_RV, atol=step, rtol=2 * step, equal_nan=True)
    differing = (logits_RV != expected_RV) & ~expected_RV.isnan()
    assert differing.sum() <= max(2, 0.05 * differing.numel())
    assert torch.equal(tokens_R.cpu(), greedy_or_invalid(logits_RV.cpu()))
    untouched_RV, again_R = run_head(hidden_RE, weight_VE, tiles=tiles, needed=False)
    assert (untouched_RV == 7.0).all(), "nothing is written that nobody reads"
    assert torch.equal(again_R, tokens_R)
    return logits_RV, tokens_R
