"""A decoder's matrix products as operators: our kernels for a few tokens, cuBLAS for many.

cuBLAS is made for large products; with a handful of tokens it takes two to three times as long as reading the
weights does, and it cannot start early. ``small_linear`` and ``gate_up_silu`` ask ``linear_choice.py`` for
tiles and launch ``linear_jit.py``, or call cuBLAS where that is as fast. The choice depends on the shape of
the call alone, so a graph and the padded eager run it must equal take the same kernel. ``T`` tokens, ``I``
input features, ``O`` output features.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gapless.graphs.ops import register_custom_op
from gapless.kernels.activation import fused_silu_mul
from gapless.kernels.linear_choice import MAX_TOKENS, Product, Tiles, choose, token_bucket
from gapless.kernels.select import launch_options


def _fake_linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    return x_TI.new_empty((x_TI.shape[0], weight_OI.shape[0]))


@register_custom_op(fake=_fake_linear)
def small_linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """``[T, I], [O, I], [O] -> [T, O]``: ``x @ weight.T + bias``, summed in float32."""
    tiles = _choose(x_TI, weight_OI, is_gated=False)
    if tiles is None:
        return F.linear(x_TI, weight_OI, bias_O)
    return launch_product(x_TI, weight_OI, bias_O, tiles, is_gated=False)


def _fake_gate_up(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    return x_TI.new_empty((x_TI.shape[0], weight_OI.shape[0] // 2))


@register_custom_op(fake=_fake_gate_up)
def gate_up_silu(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """``[T, I], [2 * O, I], [2 * O] -> [T, O]``: ``silu(gate) * up``, gate being the first half of the rows.

    Gate and up are rounded before silu, and silu before its product: as in two steps.
    """
    tiles = _choose(x_TI, weight_OI, is_gated=True)
    if tiles is None:
        return fused_silu_mul(F.linear(x_TI, weight_OI, bias_O))
    return launch_product(x_TI, weight_OI, bias_O, tiles, is_gated=True)


def launch_product(
    x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, tiles: Tiles, *, is_gated: bool
) -> Tensor:
    """The product with given tiles: for the operators above, and for timing them."""
    num_tokens, num_rows = x_TI.shape[0], weight_OI.shape[0]
    num_out = num_rows // 2 if is_gated else num_rows
    out_TO = torch.empty((num_tokens, num_out), dtype=x_TI.dtype, device=x_TI.device)
    if num_tokens == 0 or num_out == 0:
        return out_TO
    assert x_TI.stride(1) == weight_OI.stride(1) == 1
    args: list[Any] = [
        x_TI,
        weight_OI,
        weight_OI if bias_O is None else bias_O,
        out_TO,
        x_TI.stride(0),
        weight_OI.stride(0),
        num_out,
    ]
    constants: dict[str, Any] = {"NUM_IN": x_TI.shape[1], "NUM_EARLY": tiles.num_early}
    if tiles.on_tensor_cores:
        args.append(num_tokens)
        kernel = _kernels().tile_kernel
        constants |= {
            "TOKENS_PAD": max(token_bucket(num_tokens), 8),
            "SPLIT": tiles.split,
            "PREFETCH": tiles.prefetch,
        }
    else:
        kernel = _kernels().gemv_kernel
        constants |= {"NUM_TOKENS": num_tokens}
    kernel[(-(-num_rows // tiles.block_o),)](
        *args,
        **constants,
        BLOCK_O=tiles.block_o,
        BLOCK_I=tiles.block_i,
        IS_GATED=is_gated,
        HAS_BIAS=bias_O is not None,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **launch_options(x_TI.device),
    )
    return out_TO


def _choose(x_TI: Tensor, weight_OI: Tensor, *, is_gated: bool) -> Tiles | None:
    if x_TI.shape[0] > MAX_TOKENS:
        return None
    num_rows, num_in = weight_OI.shape
    product = Product(
        num_tokens=token_bucket(x_TI.shape[0]),
        num_in=num_in,
        num_out=num_rows // 2 if is_gated else num_rows,
        is_gated=is_gated,
        dtype=x_TI.dtype,
    )
    return choose(product, x_TI.device)


@functools.cache
def _kernels() -> ModuleType:
    """Apart from the other kernels, so that its text alone decides whether stored timings still hold."""
    from gapless.kernels import linear_jit

    return linear_jit
