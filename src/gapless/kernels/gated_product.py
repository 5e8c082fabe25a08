"""Launches of ``gated_product_jit.py``, the gated product of many tokens on a Hopper GPU.

Gluon is experimental: the kernel runs with the versions of Triton it was written for, and everything else
keeps cuBLAS and the activation's own kernel. Which tiles it takes, and whether it is worth taking, is
``linear_choice.py``'s to say. ``T`` tokens, ``I`` input features, ``O`` output features.
"""

from __future__ import annotations

import functools
from types import ModuleType

import torch
from torch import Tensor

from gapless.env import read_env
from gapless.kernels.launch import KNOWN_VERSIONS, Constants, launch
from gapless.kernels.linear_tiles import GatedTiles
from gapless.kernels.select import is_hopper, launch_options


@functools.cache
def can_run_gated(device: torch.device) -> bool:
    """Whether the GPU and Triton are ones the kernel was written for."""
    if not is_hopper(device) or read_env().triton_interpret:
        return False
    import triton

    return triton.__version__.startswith(KNOWN_VERSIONS)


def is_aligned(x_TI: Tensor, weight_OI: Tensor) -> bool:
    """Whether the tensor memory engine can read both: rows of multiples of 16 bytes, in half precision."""
    return x_TI.dtype == weight_OI.dtype and all(
        tensor.element_size() == 2
        and tensor.stride(1) == 1
        and tensor.stride(0) % 8 == 0
        and tensor.data_ptr() % 16 == 0
        for tensor in (x_TI, weight_OI)
    )


def launch_gated(x_TI: Tensor, weight_OI: Tensor, out_TO: Tensor, tiles: GatedTiles) -> None:
    """``[T, I], [2 * O, I] -> [T, O]``, written to ``out_TO``; none of them is empty."""
    num_tokens, num_out = out_TO.shape
    blocks = (
        (x_TI, (tiles.block_t, tiles.block_i)),
        (weight_OI, (tiles.block_o, tiles.block_i)),
        (out_TO, (tiles.block_t // 2, tiles.block_o)),
    )
    descriptors = [_describe(tensor, block) for tensor, block in blocks]
    num_tiles = -(-num_tokens // tiles.block_t) * -(-num_out // tiles.block_o)
    grid = (min(num_tiles, _num_processors(x_TI.device)),)
    constants = _constants(tiles, x_TI.shape[1], x_TI.device)
    launch(_kernels().gated_product_kernel, grid, (*descriptors, num_tokens, num_out), constants)


def _describe(tensor: Tensor, block: tuple[int, int]) -> object:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), list(block), _layout(block))


@functools.cache
def _layout(block: tuple[int, int]) -> object:
    from triton.experimental.gluon.language import NVMMASharedLayout, bfloat16

    return NVMMASharedLayout.get_default_for(list(block), bfloat16)  # the same for either half precision


@functools.cache
def _constants(tiles: GatedTiles, num_in: int, device: torch.device) -> Constants:
    return Constants(
        NUM_IN=num_in,
        SHARED_BY=tiles.shared_by,
        STAGES=tiles.num_stages,
        SKEW=tiles.skew,
        num_warps=4,
        **launch_options(device),
    )


@functools.cache
def _num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def _kernels() -> ModuleType:
    from gapless.kernels import gated_product_jit

    return gated_product_jit
