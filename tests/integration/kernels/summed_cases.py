"""Operands and oracles of products with a norm behind them, under the interpreter."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from linear_cases import make_product, tile
from torch import Tensor

from gapless.kernels.linear_tiles import Tiles

Operands = tuple[Tensor, Tensor, Tensor, Tensor, float]
"""Of ``linear_add_rms_norm``."""


def part_tile(block_o: int, block_i: int, split: int, num_early: int, parts: int) -> Tiles:
    return replace(tile(block_o, block_i, split, num_early), parts=parts)


def make_operands(num_tokens: int, num_in: int, size: int, *, dtype: torch.dtype) -> Operands:
    """Activations and the residual stream are rows of wider tensors."""
    x, weight, _ = make_product(num_tokens, num_in, size, dtype=dtype, has_bias=False)
    residual = torch.randn(num_tokens, size + 8).to(dtype)[:, :size]
    return x, weight, residual, torch.linspace(0.5, 1.5, size).to(dtype), 1e-6


def parts_oracle(x_TI: Tensor, weight_EI: Tensor, parts: int) -> Tensor:
    """``[P, T, E]`` in float64."""
    columns = zip(x_TI.double().chunk(parts, 1), weight_EI.double().chunk(parts, 1), strict=True)
    return torch.stack([F.linear(x, weight) for x, weight in columns])


def sum_in_order(parts_PTE: Tensor, dtype: torch.dtype) -> Tensor:
    """One part after the other in float32, rounded once."""
    total = parts_PTE[0].clone()
    for part_TE in parts_PTE[1:]:
        total += part_TE
    return total.to(dtype)
