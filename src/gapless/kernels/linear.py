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
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gapless.graphs.ops import register_custom_op
from gapless.kernels.activation import fused_silu_mul
from gapless.kernels.gated_product import can_run_gated, is_aligned, launch_gated
from gapless.kernels.launch import Constants, compiling_ahead, launch
from gapless.kernels.linear_choice import (
    MAX_GATED_TOKENS,
    MAX_TOKENS,
    GatedTiles,
    Product,
    Tiles,
    choose,
    takes_gated_tiles,
    token_bucket,
)
from gapless.kernels.select import launch_options


def _fake_linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    return x_TI.new_empty((x_TI.shape[0], weight_OI.shape[0]))


@register_custom_op(fake=_fake_linear, is_fresh=True)
def small_linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """``[T, I], [O, I], [O] -> [T, O]``: ``x @ weight.T + bias``, summed in float32."""
    tiles = _choose(x_TI, weight_OI, is_gated=False)
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
    tiles = _choose(x_TI, weight_OI, is_gated=True)
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Matrices:
    """The weights of one product in every layer, all of one shape, and the bias of the first."""

    weights: tuple[Tensor, ...]
    bias: Tensor | None
    is_gated: bool

    def product(self, num_tokens: int) -> Product:
        """Its shape with a bucket of tokens."""
        return _product(num_tokens, self.weights[0], is_gated=self.is_gated)

    def products(self) -> Iterator[Product]:
        """Every bucket for which there may be a kernel of ours."""
        num_tokens = 1
        while num_tokens <= MAX_TOKENS or takes_gated_tiles(self.product(num_tokens)):
            yield self.product(num_tokens)
            num_tokens *= 2


def launch_product(
    x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, tiles: Tiles, *, is_gated: bool
) -> Tensor:
    """The product with given tiles: for the operators above, and for timing them."""
    num_out = weight_OI.shape[0] // 2 if is_gated else weight_OI.shape[0]
    out_TO = torch.empty((x_TI.shape[0], num_out), dtype=x_TI.dtype, device=x_TI.device)
    if out_TO.numel() == 0:
        return out_TO
    kernel, args, constants = _arguments(x_TI, weight_OI, bias_O, out_TO, tiles, is_gated=is_gated)
    launch(kernel, (-(-weight_OI.shape[0] // tiles.block_o),), args, constants)
    return out_TO


def gated_product(x_TI: Tensor, weight_OI: Tensor, tiles: GatedTiles) -> Tensor:
    """``gate_up_silu`` of many tokens with given tiles; ``can_run_gated`` and ``is_aligned`` hold."""
    out_TO = torch.empty((x_TI.shape[0], weight_OI.shape[0] // 2), dtype=x_TI.dtype, device=x_TI.device)
    launch_gated(x_TI, weight_OI, out_TO, tiles)
    return out_TO


def compile_products(matrices: Iterable[Matrices]) -> None:
    """Compile every kernel that these products will ask for, side by side: one after another, at their first
    launches, they would take seconds of every start that does not find them in Triton's own store."""
    with compiling_ahead():
        for group in matrices:
            weight_OI = group.weights[0]
            for product in group.products():
                tiles = choose(product, weight_OI.device)
                if isinstance(tiles, Tiles):
                    x_TI = weight_OI.new_empty((product.num_tokens, product.num_in))
                    launch_product(x_TI, weight_OI, group.bias, tiles, is_gated=group.is_gated)
                elif tiles is not None and group.bias is None and can_run_gated(weight_OI.device):
                    x_TI = weight_OI.new_empty((1, product.num_in))  # compiled alike for any number of tokens
                    if is_aligned(x_TI, weight_OI):
                        gated_product(x_TI, weight_OI, tiles)


def _arguments(
    x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, out_TO: Tensor, tiles: Tiles, *, is_gated: bool
) -> tuple[Any, list[Any], Constants]:
    """The kernel, its arguments and its constants."""
    assert x_TI.stride(1) == weight_OI.stride(1) == 1
    num_tokens, num_out = out_TO.shape
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
    return Constants(**constants, TOKENS_PAD=num_tokens, SPLIT=tiles.split, PREFETCH=tiles.prefetch)


def _choose(x_TI: Tensor, weight_OI: Tensor, *, is_gated: bool) -> Tiles | GatedTiles | None:
    num_tokens = x_TI.shape[0]
    if num_tokens > (MAX_GATED_TOKENS if is_gated else MAX_TOKENS):
        return None
    return choose(_product(num_tokens, weight_OI, is_gated=is_gated), x_TI.device)


def _product(num_tokens: int, weight_OI: Tensor, *, is_gated: bool) -> Product:
    num_rows, num_in = weight_OI.shape
    return _product_of(num_tokens, num_in, num_rows // 2 if is_gated else num_rows, is_gated, weight_OI.dtype)


@functools.cache
def _product_of(num_tokens: int, num_in: int, num_out: int, is_gated: bool, dtype: torch.dtype) -> Product:
    return Product(
        num_tokens=token_bucket(num_tokens), num_in=num_in, num_out=num_out, is_gated=is_gated, dtype=dtype
    )


@functools.cache
def _kernels() -> ModuleType:
    """Apart from the other kernels, so that its text alone decides whether stored timings still hold."""
    from gapless.kernels import linear_jit

    return linear_jit
