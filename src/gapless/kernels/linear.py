"""A decoder's matrix products as operators: our kernels for a few tokens, mostly cuBLAS for many.

cuBLAS is made for large products; with a handful of tokens it takes two to three times as long as reading the
weights does, and it cannot start early. ``small_linear`` and ``gate_up_silu`` ask ``linear_choice.py`` for
tiles and launch ``linear_jit.py``, or call cuBLAS where that is as fast; with more tokens ``gate_up_silu``
takes ``gated_product.py`` where timings say so. The choice depends on the shape of the call alone, so a graph
and the padded eager run it must equal take the same kernel. ``T`` tokens, ``I`` input features, ``O`` output
features. Weights are read before the kernel ahead has ended, so they must not be written by it: a weight that
is computed in the same graph needs another operation in between.
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
from gapless.kernels.gated_product import can_run_gated, is_aligned, launch_gated
from gapless.kernels.launch import Constants, launch
from gapless.kernels.linear_choice import choose
from gapless.kernels.linear_tiles import GatedTiles, Product, Tiles, max_tokens, token_bucket
from gapless.kernels.select import launch_options


def _fake_linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    return x_TI.new_empty((x_TI.shape[0], weight_OI.shape[0]))


@register_custom_op(fake=_fake_linear, is_fresh=True)
def small_linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """``[T, I], [O, I], [O] -> [T, O]``: ``x @ weight.T + bias``, summed in float32."""
    tiles = choose_tiles(x_TI, weight_OI)
    if not isinstance(tiles, Tiles):
        return F.linear(x_TI, weight_OI, bias_O)
    return launch_product(x_TI, weight_OI, bias_O, tiles, is_gated=False)


def _fake_gate_up(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    return x_TI.new_empty((x_TI.shape[0], weight_OI.shape[0] // 2))


@register_custom_op(fake=_fake_gate_up, is_fresh=True)
def gate_up_silu(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """``[T, I], [2 * O, I], [2 * O] -> [T, O]``: ``silu(gate) * up``, gate being the first half of the rows.

    Gate and up are rounded before silu, and silu before its product: as in two steps.
    """
    tiles = choose_tiles(x_TI, weight_OI, is_gated=True)
    if isinstance(tiles, Tiles):
        return launch_product(x_TI, weight_OI, bias_O, tiles, is_gated=True)
    # Alignment is a property of weights and of memory as it is always given out: no accident of a call.
    if (
        tiles is None
        or bias_O is not None
        or not can_run_gated(x_TI.device)
        or not is_aligned(x_TI, weight_OI)
    ):
        return fused_silu_mul(F.linear(x_TI, weight_OI, bias_O))
    return gated_product(x_TI, weight_OI, tiles)


def launch_product(
    x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, tiles: Tiles, *, is_gated: bool
) -> Tensor:
    """The product with given tiles (of one part): for the operators above, and for timing them."""
    assert tiles.parts == 1
    num_out = weight_OI.shape[0] // 2 if is_gated else weight_OI.shape[0]
    out_TO = torch.empty((x_TI.shape[0], num_out), dtype=x_TI.dtype, device=x_TI.device)
    if out_TO.numel() == 0:
        return out_TO
    kernel, args, constants = _arguments(x_TI, weight_OI, bias_O, out_TO, tiles, is_gated=is_gated)
    launch(kernel, (-(-weight_OI.shape[0] // tiles.block_o),), args, constants)
    return out_TO


def launch_parts(x_TI: Tensor, weight_OI: Tensor, tiles: Tiles) -> Tensor:
    """``[T, I], [O, I] -> [P, T, O]`` in float32: parts whose sum is the product. Their number is more than
    one and divides ``I``; neither ``T`` nor ``O`` is 0."""
    assert tiles.parts > 1
    assert x_TI.shape[1] % tiles.parts == 0
    shape = (tiles.parts, x_TI.shape[0], weight_OI.shape[0])
    parts_PTO = torch.empty(shape, dtype=torch.float32, device=x_TI.device)
    kernel, args, constants = _arguments(x_TI, weight_OI, None, parts_PTO, tiles, is_gated=False)
    launch(kernel, (-(-weight_OI.shape[0] // tiles.block_o), tiles.parts), args, constants)
    return parts_PTO


def gated_product(x_TI: Tensor, weight_OI: Tensor, tiles: GatedTiles) -> Tensor:
    """``gate_up_silu`` of many tokens with given tiles; ``can_run_gated`` and ``is_aligned`` hold."""
    out_TO = torch.empty((x_TI.shape[0], weight_OI.shape[0] // 2), dtype=x_TI.dtype, device=x_TI.device)
    launch_gated(x_TI, weight_OI, out_TO, tiles)
    return out_TO


def _arguments(
    x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, out_TO: Tensor, tiles: Tiles, *, is_gated: bool
) -> tuple[Any, list[Any], Constants]:
    """The kernel, its arguments and its constants."""
    assert x_TI.stride(1) == weight_OI.stride(1) == 1
    num_tokens, num_out = out_TO.shape[-2:]
    bias_or_any = weight_OI if bias_O is None else bias_O
    args = [x_TI, weight_OI, bias_or_any, out_TO, x_TI.stride(0), weight_OI.stride(0), num_out]
    if tiles.on_tensor_cores:
        args.append(num_tokens)
        num_tokens = max(token_bucket(num_tokens), 8)
    constants = _constants(tiles, num_tokens, x_TI.shape[1], is_gated, bias_O is not None, x_TI.device)
    return _kernels().tile_kernel if tiles.on_tensor_cores else _kernels().gemv_kernel, args, constants


@functools.cache
def _constants(
    tiles: Tiles, num_tokens: int, num_in: int, is_gated: bool, has_bias: bool, device: torch.device
) -> Constants:
    constants: dict[str, Any] = {
        "NUM_IN": num_in,
        "BLOCK_O": tiles.block_o,
        "BLOCK_I": tiles.block_i,
        "NUM_EARLY": tiles.num_early,
        "IS_GATED": is_gated,
        "HAS_BIAS": has_bias,
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
        **launch_options(device),
    }
    if not tiles.on_tensor_cores:
        return Constants(**constants, NUM_TOKENS=num_tokens)
    return Constants(
        **constants, TOKENS_PAD=num_tokens, SPLIT=tiles.split, PREFETCH=tiles.prefetch, PARTS=tiles.parts
    )


def choose_tiles(
    x_TI: Tensor, weight_OI: Tensor, *, is_gated: bool = False, is_summed: bool = False
) -> Tiles | GatedTiles | None:
    """What is chosen for the shape of a call; None: cuBLAS."""
    num_tokens = x_TI.shape[0]
    if num_tokens > max_tokens(is_gated=is_gated, is_summed=is_summed):
        return None
    product = product_of(num_tokens, weight_OI, is_gated=is_gated, is_summed=is_summed)
    return choose(product, x_TI.device)


def product_of(num_tokens: int, weight_OI: Tensor, *, is_gated: bool, is_summed: bool) -> Product:
    """The shape of a product with ``weight_OI``, and the bucket of ``num_tokens``."""
    return _product_of(num_tokens, *weight_OI.shape, is_gated, is_summed, weight_OI.dtype)


@functools.cache
def _product_of(
    num_tokens: int, num_rows: int, num_in: int, is_gated: bool, is_summed: bool, dtype: torch.dtype
) -> Product:
    return Product(
        num_tokens=token_bucket(num_tokens),
        num_in=num_in,
        num_out=num_rows // 2 if is_gated else num_rows,
        is_gated=is_gated,
        is_summed=is_summed,
        dtype=dtype,
    )


@functools.cache
def _kernels() -> ModuleType:
    """Apart from the other kernels, so that its text alone decides whether stored timings still hold."""
    from gapless.kernels import linear_jit

    return linear_jit
